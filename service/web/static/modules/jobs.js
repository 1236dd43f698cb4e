// The list of jobs: refreshed while something goes on, with actions on the selected ones.

import { call, post, remove } from "./api.js";
import { plural } from "./format.js";
import { announce, ask, freshPage, replaceContent, toast } from "./page.js";

const ACTIVE_MS = 10_000;
const IDLE_MS = 30_000;
const list = document.getElementById("list");
const bar = document.getElementById("selection");
const live = document.getElementById("live");
const selected = new Set();
const names = new Map();
let lastChosen = null;

const boxes = () => [...list.querySelectorAll('input[name="job"]')];

// Selection

function showSelection() {
  const visible = new Set(boxes().map((box) => box.value));
  for (const id of selected) if (!visible.has(id)) selected.delete(id);
  for (const box of boxes()) {
    box.checked = selected.has(box.value);
    names.set(box.value, box.closest("tr").querySelector(".job-name").textContent);
  }
  const all = document.getElementById("select-all");
  if (all) {
    all.checked = selected.size > 0 && selected.size === visible.size;
    all.indeterminate = selected.size > 0 && selected.size < visible.size;
  }
  bar.hidden = selected.size === 0;
  document.getElementById("selection-words").textContent = `${plural(selected.size, "job")} selected`;
  const compare = document.getElementById("compare");
  compare.hidden = selected.size < 2;
  compare.href = `/compare?${[...selected].map((id) => `job=${id}`).join("&")}`;
}

function choose(box, isRange) {
  const all = boxes();
  const [from, to] = [all.indexOf(lastChosen), all.indexOf(box)].sort((a, b) => a - b);
  const range = isRange && from >= 0 ? all.slice(from, to + 1) : [box];
  for (const other of range) box.checked ? selected.add(other.value) : selected.delete(other.value);
  lastChosen = box;
  showSelection();
}

list?.addEventListener("click", (event) => {
  if (event.target.name === "job") choose(event.target, event.shiftKey);
  if (event.target.id === "select-all") {
    for (const box of boxes()) event.target.checked ? selected.add(box.value) : selected.delete(box.value);
    showSelection();
  }
});

document.getElementById("select-none")?.addEventListener("click", () => {
  selected.clear();
  showSelection();
  boxes()[0]?.focus();
});

// Up and down move between the rows' boxes and links; a space selects, as everywhere.
list?.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const row = event.target.closest("tr[data-id]");
  if (!step || !row) return;
  const next = step > 0 ? row.nextElementSibling : row.previousElementSibling;
  const selector = event.target.name === "job" ? 'input[name="job"]' : ".job-name";
  const target = next?.querySelector(selector);
  if (!target) return;
  event.preventDefault();
  target.focus();
});

// Actions

const ACTIONS = {
  resume: { done: "resumed", send: (id) => post(`/v1/jobs/${id}/resume`) },
  cancel: {
    done: "asked to end", send: (id) => post(`/v1/jobs/${id}/cancel`), verb: "Cancel",
    words: "They end at their next step. What they have committed as checkpoints stays, and they can be resumed from there.",
  },
  delete: {
    done: "deleted", send: (id) => remove(`/v1/jobs/${id}`), verb: "Delete",
    words: "Their checkpoints, logs and metrics are removed from storage. This cannot be undone.",
  },
};

bar?.addEventListener("click", async (event) => {
  const action = ACTIONS[event.target.dataset.action];
  if (!action) return;
  const ids = [...selected];
  if (action.words && !(await confirmed(action, ids))) return;
  let done = 0;
  for (const id of ids) {
    try {
      await action.send(id);
      done += 1;
    } catch (error) {
      toast(`${names.get(id)}: ${error.message}`);
    }
  }
  if (done) toast(`${plural(done, "job")} ${action.done}`, "success");
  selected.clear();
  await refresh();
});

function confirmed(action, ids) {
  const verb = `${action.verb} ${plural(ids.length, "job")}`;
  const items = ids.map((id) => `${names.get(id)} (${id})`);
  return ask({ title: `${verb}?`, words: action.words, verb, keep: "Keep them", items });
}

// Filters apply as soon as they are chosen.
document.getElementById("sort")?.addEventListener("change", (event) => event.target.form.requestSubmit());
document.getElementById("filters")?.addEventListener("submit", (event) => {
  for (const field of event.target.elements) if (field.name && (!field.value || field.value === "newest")) field.disabled = true;
});
addEventListener("pageshow", () => {
  for (const field of document.getElementById("filters")?.elements ?? []) field.disabled = false;
  if (!list) return;
  for (const box of boxes()) if (box.checked) selected.add(box.value); // on the way back, browsers check them again
  showSelection();
});

// Refreshing: the same page again, of which only the list is taken.

let timer = null;
async function refresh() {
  clearTimeout(timer);
  if (document.visibilityState === "visible" && !document.querySelector("dialog[open]")) {
    try {
      const page = await freshPage();
      const fresh = page.getElementById("list");
      if (!fresh) return location.reload(); // the first job, or the last one's deletion
      replaceContent(list, fresh);
      replaceContent(document.querySelector(".tabs"), page.querySelector(".tabs"));
      showSelection();
      showLive(true);
    } catch {
      showLive(false);
    }
  }
  const isSoon = list.dataset.active === "yes" || live.dataset.live === "lost";
  timer = setTimeout(refresh, isSoon ? ACTIVE_MS : IDLE_MS);
}

function showLive(isOn) {
  const state = isOn ? "on" : "lost";
  if (live.dataset.live === "lost" || !isOn) {
    live.textContent = isOn ? "up to date again" : "connection lost, trying again";
    if (live.dataset.live !== state) announce(live.textContent);
    live.hidden = false;
  }
  live.dataset.live = state;
}

addEventListener("online", () => list && refresh());
document.addEventListener("visibilitychange", () => list && document.visibilityState === "visible" && refresh());
if (list) {
  showSelection();
  timer = setTimeout(refresh, list.dataset.active === "yes" ? ACTIVE_MS : IDLE_MS);
} else {
  // An empty service: look for the first job.
  const look = async () => {
    const jobs = await call("GET", "/v1/jobs?limit=1").catch(() => null);
    if (jobs?.items.length) location.reload();
    else setTimeout(look, ACTIVE_MS);
  };
  setTimeout(look, ACTIVE_MS);
}
