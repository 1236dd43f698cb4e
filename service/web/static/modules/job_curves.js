// One metric of several jobs over one another, with a choice of the metric; follows jobs that go on.

import { get } from "./api.js";
import { Chart, chartControls } from "./chart.js";
import { getCurves } from "./curve_request.js";

const MAX_POINTS = 1_000;
const REFRESH_MS = 10_000;
const MEAN = "held_out";
const MEAN_PREFIX = "held_out.";

// Jobs: [{ id, name, isOver }]. Options: metric to begin with, height, onLive(isOn).
export class JobCurves {
  #curves = new Map();
  #names = new Set();
  #xName = "step";
  #timer = null;

  constructor(element, jobs, { metric = "loss", height = 340, onLive = () => {} } = {}) {
    this.jobs = jobs;
    this.metric = metric;
    this.onLive = onLive;
    const controls = document.createElement("div");
    const frame = document.createElement("div");
    element.replaceChildren(controls, frame);
    this.chart = new Chart(frame, { title: metric, height });
    chartControls(controls, {
      set: (options) => {
        if ("xName" in options) this.#xName = options.xName;
        this.chart.set(options);
        if ("xName" in options) this.#show();
      },
      onReset: () => this.chart.zoom(null),
    });
    this.choice = Object.assign(document.createElement("select"), { className: "input", id: "metric", name: "metric" });
    const field = Object.assign(document.createElement("div"), { className: "field" });
    field.append(Object.assign(document.createElement("label"), { textContent: "Metric", htmlFor: "metric" }), this.choice);
    controls.querySelector("form").prepend(field);
    this.choice.addEventListener("input", (event) => {
      event.stopPropagation();
      this.metric = this.choice.value;
      this.chart.set({ title: this.metric });
      this.#curves.clear();
      this.load();
    });
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.load());
  }

  async load() {
    clearTimeout(this.#timer);
    const metric = this.metric;
    const jobs = this.jobs.filter((job) => !job.isOver || !this.#curves.has(job.id));
    const results = await Promise.allSettled(jobs.map((job) => this.#fetch(job, metric)));
    if (metric !== this.metric) return; // another was chosen meanwhile
    this.onLive(results.every(({ status }) => status === "fulfilled"));
    this.#showChoices();
    this.#show();
    const hasActive = this.jobs.some(({ isOver }) => !isOver);
    if (hasActive && document.visibilityState === "visible") this.#timer = setTimeout(() => this.load(), REFRESH_MS);
  }

  async #fetch(job, metric) {
    const path = `/v1/jobs/${job.id}/curves`;
    const options = { max_points: MAX_POINTS };
    const answer = await get(path, { ...options, name: metric });
    for (const name of answer.names) this.#names.add(name);
    const sets = answer.names.filter((name) => name.startsWith(MEAN_PREFIX));
    if (metric === MEAN && !answer.names.includes(MEAN) && sets.length) {
      const { curves } = await getCurves(path, sets, options);
      this.#curves.set(job.id, mean(Object.values(curves)));
    } else this.#curves.set(job.id, answer.curves[metric] ?? { step: [], time_ms: [], value: [] });
  }

  #showChoices() {
    const names = [...this.#names].sort();
    if (names.some((name) => name.startsWith(MEAN_PREFIX)) && !names.includes(MEAN)) names.unshift(MEAN);
    if (!names.includes(this.metric)) names.unshift(this.metric);
    if ([...this.choice.options].map(({ value }) => value).join() === names.join()) return;
    this.choice.replaceChildren(
      ...names.map((value) => Object.assign(document.createElement("option"), { value, textContent: value === MEAN ? "held_out (mean of all sets)" : value })),
    );
    this.choice.value = this.metric;
  }

  #show() {
    const counts = new Map();
    for (const { name } of this.jobs) counts.set(name, (counts.get(name) ?? 0) + 1);
    this.chart.show(
      this.jobs.map(({ id, name }) => {
        const { step, time_ms: timeMs, value } = this.#curves.get(id) ?? { step: [], time_ms: [], value: [] };
        const x = this.#xName === "seconds" ? timeMs.map((time) => (time - timeMs[0]) / 1000) : step;
        return { name: counts.get(name) > 1 ? `${name} (${id})` : name, ...increasing(x, value) };
      }),
    );
  }
}

// Mean of curves at the steps that all of them have; held-out sets are evaluated at the same steps.
function mean(curves) {
  const [first, ...others] = curves;
  const tables = others.map(({ step, value }) => new Map(step.map((key, index) => [key, value[index]])));
  const result = { step: [], time_ms: [], value: [] };
  first.step.forEach((step, index) => {
    const values = [first.value[index], ...tables.map((table) => table.get(step))];
    if (values.includes(undefined)) return;
    const known = values.filter((value) => value !== null);
    result.step.push(step);
    result.time_ms.push(first.time_ms[index]);
    result.value.push(known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null);
  });
  return result;
}

// A chart needs x that increases: clocks of machines that a job moved between may differ.
function increasing(x, y) {
  const pairs = x.map((value, index) => [value, y[index]]).sort(([a], [b]) => a - b);
  return { x: pairs.map(([value]) => value), y: pairs.map(([, value]) => value) };
}
