// The page that submits a job: form and YAML in step, problems beside fields, the plan before it runs.

import { ApiError, call, get } from "./api.js";
import { announce, toast } from "./page.js";
import { SpecDocument, stringify } from "./spec_document.js";
import { SpecForm } from "./spec_form.js";
import { planFragment, problemList, showFragment } from "./spec_plan.js";

const PLAN_DELAY_MS = 700;
const DRAFT = `shardyard-draft${location.search}`; // of this address: edits of a job's spec survive a reload
const field = (id) => document.getElementById(id);
const text = field("spec");
const spec = new SpecDocument("");
let form = null;
let timer = null;
let request = null;
let key = newKey();

// A job is stored once, however often its button is pressed or the network fails in between.
function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function changed({ isTyped }) {
  key = newKey();
  if (!isTyped) text.value = spec.text;
  try {
    sessionStorage.setItem(DRAFT, spec.text);
  } catch {
    // A browser that stores nothing keeps no draft.
  }
  const value = spec.value;
  field("submit").disabled = spec.text.trim() === "";
  if (!spec.error) form?.show(value);
  clearTimeout(timer);
  timer = setTimeout(plan, PLAN_DELAY_MS);
}

async function plan() {
  request?.abort();
  field("plan").ariaBusy = "false";
  if (spec.text.trim() === "") return showProblems(null);
  field("plan").ariaBusy = "true";
  request = new AbortController();
  try {
    const isSweep = "sweep" in spec.value;
    showFragment(field("plan"), await planFragment(isSweep ? withoutSweep(spec.text) : spec.text, request.signal));
    if (isSweep) {
      const note = "Plan of a job with the spec's own values; those of the sweep may change it.";
      field("plan").prepend(Object.assign(document.createElement("p"), { className: "notice", textContent: note }));
    }
    showProblems(null);
  } catch (error) {
    if (error.name === "AbortError") return;
    showProblems(error);
  }
  field("plan").ariaBusy = "false";
}

function withoutSweep(text) {
  const single = new SpecDocument(text);
  single.set(["sweep"], undefined);
  return single.text;
}

function showProblems(error) {
  form?.showProblems(error?.errors ?? []);
  const words = error ? [problemList(error, (problem) => problem.path && `#${problem.path}`)] : [];
  field("problems").replaceChildren(...words);
}

// A link to a problem's field opens the groups that it is in.
field("problems").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  const id = form?.open(decodeURIComponent(link.hash.slice(1)));
  if (!id) return text.focus();
  const target = field(id);
  target.scrollIntoView({ block: "center" });
  (target.tagName === "DETAILS" ? target.querySelector("summary") : target).focus();
});

text.addEventListener("input", () => {
  spec.read(text.value);
  changed({ isTyped: true });
});

field("example").addEventListener("change", async (event) => {
  if (!event.target.value) return;
  try {
    const response = await fetch(event.target.value);
    if (!response.ok) throw new ApiError(response.status, {});
    spec.read(await response.text());
    changed({ isTyped: false });
  } catch (error) {
    toast(error instanceof ApiError ? error.message : new ApiError(0, {}).message);
  }
});

field("submit").addEventListener("click", async () => {
  field("submit").disabled = true;
  const isSweep = "sweep" in spec.value;
  try {
    const created = await call("POST", isSweep ? "/v1/sweeps" : "/v1/jobs", {
      body: spec.text, headers: { "content-type": "application/yaml", "idempotency-key": key },
    });
    sessionStorage.removeItem(DRAFT);
    location.assign(isSweep ? `/sweeps/${created.id}` : `/jobs/${created.id}`);
  } catch (error) {
    showProblems(error);
    announce(error.message);
    field("problems").scrollIntoView({ block: "nearest" });
    field("submit").disabled = false;
  }
});

// The spec to start from: another job's, the draft of this tab, or none.
async function firstText() {
  const draft = sessionStorage.getItem(DRAFT);
  if (draft) return draft;
  const from = new URLSearchParams(location.search).get("from");
  if (from) return stringify((await get(`/v1/jobs/${encodeURIComponent(from)}`)).spec);
  return "";
}

try {
  const schema = await get("/v1/schema");
  form = new SpecForm(schema, field("form"), (path, value) => {
    spec.set(path, value);
    changed({ isTyped: false });
  });
  spec.read(await firstText());
  changed({ isTyped: false });
} catch (error) {
  toast(error.message);
}
