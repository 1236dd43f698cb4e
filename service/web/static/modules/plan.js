// The planner: a spec and machines, and the best layouts.

import { announce } from "./page.js";
import { planFragment, problemList, showFragment } from "./spec_plan.js";

const NUM_LAYOUTS = 5;
const form = document.getElementById("plan");
const field = (id) => document.getElementById(id);
let request = null;

field("example").addEventListener("change", async (event) => {
  if (event.target.value) field("spec").value = await (await fetch(event.target.value)).text();
});

function showMachines() {
  const isDescribed = field("device").value !== "";
  for (const element of document.querySelectorAll(".described")) {
    element.hidden = !isDescribed;
  }
}

// A plan request around the text of a spec. A text that already is one keeps what it says.
function requestText() {
  const text = field("spec").value;
  const lines = [`top: ${NUM_LAYOUTS}`];
  if (field("num-workers").value) lines.push(`num_workers: ${Number(field("num-workers").value)}`);
  if (field("goal").value) lines.push(`goal: ${field("goal").value}`);
  if (field("device").value) {
    const cluster = {
      num_nodes: Number(field("num-nodes").value), devices_per_node: Number(field("devices-per-node").value),
      device: field("device").value,
    };
    if (field("price").value) cluster.price_per_hour = Number(field("price").value);
    lines.push(`cluster: ${JSON.stringify(cluster)}`);
  }
  if (/^spec\s*:/m.test(text)) {
    const named = new Set([...text.matchAll(/^([a-z_]+)\s*:/gm)].map((match) => match[1]));
    return [text, ...lines.filter((line) => !named.has(line.split(":")[0]))].join("\n");
  }
  return ["spec:", ...text.split("\n").map((line) => `  ${line}`), ...lines].join("\n");
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  request?.abort();
  request = new AbortController();
  const button = form.querySelector("button");
  button.disabled = true;
  button.textContent = "Planning…";
  field("problems").replaceChildren();
  try {
    showFragment(field("result"), await planFragment(requestText(), request.signal));
    announce("The plan is there.");
  } catch (error) {
    if (error.name !== "AbortError") field("problems").replaceChildren(problemList(error));
  } finally {
    button.disabled = false;
    button.textContent = "Plan";
  }
});

field("device").addEventListener("change", showMachines);
showMachines();
