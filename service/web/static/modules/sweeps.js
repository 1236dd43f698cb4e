// Sweeps: refreshed while one runs; of one sweep, its curves, the line of a row, and its end.

import { post, remove } from "./api.js";
import { JobCurves } from "./job_curves.js";
import { announce, ask, freshPage, replaceContent, toast } from "./page.js";

const RUNNING_MS = 5_000;
const IDLE_MS = 60_000;
const content = document.getElementById("content");
const live = document.getElementById("live");

// Refreshing: the same page again, of which only the content is taken.

let timer = null;
async function refresh() {
  clearTimeout(timer);
  if (document.visibilityState === "visible" && !document.querySelector("dialog[open]")) {
    try {
      const page = await freshPage();
      const hasCurves = document.getElementById("curves") !== null;
      if (hasCurves !== (page.getElementById("curves") !== null)) return location.reload(); // the first step
      replaceContent(content, page.getElementById("content"));
      for (const button of document.querySelectorAll("[data-action]")) {
        button.hidden = page.querySelector(`[data-action="${button.dataset.action}"]`).hidden;
      }
      showLive(true);
    } catch (error) {
      if (error.status === 410) return location.assign("/sweeps");
      showLive(false);
    }
  }
  timer = setTimeout(refresh, content.dataset.running === "yes" ? RUNNING_MS : IDLE_MS);
}

function showLive(isOn) {
  if (!live) return;
  const wasLost = live.dataset.live === "lost";
  live.dataset.live = isOn ? "on" : "lost";
  live.textContent = isOn ? "up to date again" : "connection lost, trying again";
  live.hidden = isOn && !wasLost;
  if (wasLost !== !isOn) announce(live.textContent);
}

// A row and its line in the picture

function choose(event) {
  const number = event.type === "pointerout" ? null : event.target.closest?.("[data-member]")?.dataset.member;
  for (const element of content.querySelectorAll("[data-member]")) {
    if (element.dataset.member === number) element.dataset.chosen = "";
    else delete element.dataset.chosen;
    if (element.tagName === "TR") element.ariaSelected = element.dataset.member === number ? "true" : null;
  }
}

for (const kind of ["pointerover", "pointerout", "focusin"]) content.addEventListener(kind, choose);

// Actions

const ACTIONS = {
  pause: {
    send: (id) => post(`/v1/sweeps/${id}/pause`), title: "Pause this sweep?", verb: "Pause sweep",
    words: "Its jobs commit a checkpoint at their next step and free their workers. It can be resumed from there.",
  },
  resume: { send: (id) => post(`/v1/sweeps/${id}/resume`) },
  cancel: {
    send: (id) => post(`/v1/sweeps/${id}/cancel`), title: "Cancel this sweep?", verb: "Cancel sweep",
    words: "All its jobs end at their next step. What they have committed as checkpoints stays.",
  },
  delete: {
    send: (id) => remove(`/v1/sweeps/${id}`), title: "Delete this sweep?", verb: "Delete sweep",
    words: "All its jobs are removed, with their checkpoints, logs and metrics. This cannot be undone.",
  },
};

for (const button of document.querySelectorAll("[data-action]")) {
  button.addEventListener("click", async () => {
    const action = ACTIONS[button.dataset.action];
    if (action.words && !(await ask(action))) return;
    try {
      await action.send(button.dataset.sweep);
      await refresh();
    } catch (error) {
      toast(error.message);
    }
  });
}

const curves = document.getElementById("curves");
if (curves) new JobCurves(curves, JSON.parse(curves.dataset.jobs), { metric: curves.dataset.metric, onLive: showLive }).load();
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && refresh());
timer = setTimeout(refresh, content.dataset.running === "yes" ? RUNNING_MS : IDLE_MS);
