// The page of a job: its parts, kept up to date by its events.

import { get, post, remove } from "./api.js";
import { duration, number, percent } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { LabelMap } from "./label_map.js";
import { TrainingCurves } from "./training_curves.js";
import { startEvents } from "./job_events.js";
import { startFiles } from "./job_files.js";
import { startLogs } from "./job_logs.js";
import { JobEvents, showConnection } from "./live.js";
import { announce, ask, freshPage, replaceContent, toast } from "./page.js";

const PARTS = ["state", "actions", "summary", "plan", "results", "checkpoints", "events", "commands"];
const REFRESH_MS = 5_000;
const RANKS_MS = 10_000;
const root = document.getElementById("job");
const { job: jobId, name: jobName } = root.dataset;
const path = `/v1/jobs/${jobId}`;

// Parts rendered by the server: taken from the same page again after events that change them.

let refreshTimer = null;
let refreshedAt = 0;

function refreshSoon() {
  if (refreshTimer) return;
  refreshTimer = setTimeout(refresh, Math.max(300, refreshedAt + REFRESH_MS - Date.now()));
}

async function refresh() {
  refreshTimer = null;
  refreshedAt = Date.now();
  try {
    const page = await freshPage();
    const fresh = page.getElementById("job");
    if (!fresh) return location.reload(); // it is being deleted
    for (const id of PARTS) {
      const [part, freshPart] = [document.getElementById(id), page.getElementById(id)];
      if (!part || !freshPart || part.dataset.extended) continue;
      for (const details of part.querySelectorAll("details[open]")) openSame(details, freshPart);
      replaceContent(part, freshPart);
    }
    Object.assign(root.dataset, fresh.dataset);
    await showSamples();
  } catch (error) {
    if (error.status === 404 || error.status === 410) return location.assign("/");
    // The connection is shown by the stream; the next event refreshes again.
  }
}

async function showSamples() {
  const section = document.getElementById("samples");
  section.replaceChildren(...(await freshPage(`/jobs/${jobId}/samples`)).body.childNodes);
  section.hidden = !section.children.length;
}

function openSame(details, part) {
  const words = (element) => element.querySelector("summary")?.textContent.replace(/\d+/g, "");
  const same = [...part.querySelectorAll("details")].find((other) => words(other) === words(details));
  if (same) same.open = true;
}

setInterval(() => {
  const isWatched = document.visibilityState === "visible" && document.querySelector("#summary details[open]");
  if (isWatched && root.dataset.over !== "yes") refreshSoon();
}, RANKS_MS);

// Figures of the newest step

function showStep(metric) {
  const figure = (name, text) => {
    const element = document.querySelector(`[data-figure="${name}"]`);
    if (element && element.textContent !== text) element.textContent = text;
  };
  const isFinite = (value) => typeof value === "number";
  figure("loss", "loss" in metric && metric.loss === null ? "NaN" : number(metric.loss));
  figure("tokens_per_s", number(metric.tokens_per_s));
  figure("step_s", isFinite(metric.step_s) ? `${number(metric.step_s * 1000)} ms` : "–");
  const numSteps = Number(root.dataset.numSteps);
  const left = numSteps - metric.step;
  figure("left", isFinite(metric.step_s) && left >= 0 ? duration(left * metric.step_s) : "–");
  const bar = document.querySelector("#summary progress");
  if (bar) bar.value = Math.min(metric.step, numSteps);
  const words = document.querySelectorAll("#summary .progress-words > span");
  if (words.length === 2) {
    words[0].textContent = `${number(metric.step)} / ${number(numSteps)}`;
    words[1].textContent = percent(metric.step, numSteps);
  }
}

// Actions

const ACTIONS = {
  pause: {
    send: () => post(`${path}/pause`), verb: "Pause", done: "asked to pause",
    words: "It commits a checkpoint at its next step and frees its workers. It can be resumed from there.",
  },
  resume: { send: () => post(`${path}/resume`), done: "queued again" },
  cancel: {
    send: () => post(`${path}/cancel`), verb: "Cancel", done: "asked to end",
    words: "It ends at its next step. What it has committed as checkpoints stays, and it can be resumed from there.",
  },
  delete: {
    send: () => remove(path), verb: "Delete", done: "deleted",
    words: "Its checkpoints, logs and metrics are removed from storage. This cannot be undone.",
  },
};

document.getElementById("actions").addEventListener("click", async ({ target }) => {
  const action = ACTIONS[target.dataset.action];
  if (!action) return;
  const { verb, words } = action;
  if (words && !(await ask({ title: `${verb} ${jobName}?`, words, verb: `${verb} job` }))) return;
  target.disabled = true;
  try {
    await action.send();
    toast(`${jobName} is ${action.done}.`, "success");
    if (action === ACTIONS.delete) return location.assign("/");
    refreshedAt = 0;
    refreshSoon();
    if (action === ACTIONS.resume) events.open();
  } catch (error) {
    toast(error.message);
  } finally {
    target.disabled = false;
  }
});

// Difference of specs

document.getElementById("difference-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const place = document.getElementById("difference");
  const other = event.target.elements.other.value.trim();
  if (!other) return;
  try {
    const { items } = await get(`${path}/difference`, { other });
    place.replaceChildren(items.length ? differenceTable(items, other) : paragraph("The specs are equal.", "muted"));
  } catch (error) {
    place.replaceChildren(paragraph(error.message, "problem"));
  }
});

function paragraph(text, className) {
  return Object.assign(document.createElement("p"), { textContent: text, className });
}

function differenceTable(items, other) {
  const frame = Object.assign(document.createElement("div"), { className: "table-frame" });
  const table = Object.assign(document.createElement("table"), { className: "table" });
  const head = table.createTHead().insertRow();
  for (const name of ["Field", "This job", other]) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name }));
  }
  const body = table.createTBody();
  for (const item of items) {
    const row = body.insertRow();
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: item.path, className: "code" }));
    for (const value of [item.value, item.other]) {
      const cell = row.insertCell();
      cell.className = "code";
      cell.textContent = value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
    }
  }
  frame.append(table);
  return frame;
}

// Start

const curves = new TrainingCurves(jobId, document.getElementById("charts"), document.getElementById("curve-controls"));
const heatMap = new HeatMap(jobId);
const labelMap = new LabelMap(jobId);
startLogs(jobId, root);
startEvents(jobId);
startFiles(jobId);

let events = null;
const after = await curves.load();
showSamples().catch(() => {}); // the next refresh shows them
events = new JobEvents(jobId, { after, query: "&interval_s=2&loads=false" });
showConnection(events, document.getElementById("live"), announce);
let newestMetric = null;
events.addEventListener("event", ({ detail: event }) => {
  if (event.kind !== "metric") return refreshSoon();
  if (event.superseded) return;
  curves.add(event);
  heatMap.noteStep(event.data.step);
  if (event.data.label_loads) labelMap.noteEvaluation();
  if (!newestMetric) requestAnimationFrame(() => (showStep(newestMetric), curves.draw(), (newestMetric = null)));
  newestMetric = event.data;
});
events.addEventListener("gone", () => curves.load());
if (root.dataset.over !== "yes") events.open();
