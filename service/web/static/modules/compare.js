// Curves of the jobs that the page compares.

import { JobCurves } from "./job_curves.js";
import { announce } from "./page.js";

const element = document.getElementById("curves");
const live = document.getElementById("live");

function showLive(isOn) {
  const wasLost = live.dataset.live === "lost";
  live.dataset.live = isOn ? "on" : "lost";
  live.textContent = isOn ? "up to date again" : "connection lost, trying again";
  live.hidden = isOn && !wasLost;
  if (wasLost !== !isOn) announce(live.textContent);
}

if (element) {
  const { jobs, metric } = element.dataset;
  new JobCurves(element, JSON.parse(jobs), { metric, onLive: showLive }).load();
}
