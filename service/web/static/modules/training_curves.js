// The curves of a job: a chart for each kind of number, extended as steps are recorded.

import { get } from "./api.js";
import { Chart, chartControls } from "./chart.js";
import { getCurves } from "./curve_request.js";
import { number } from "./format.js";

const MAX_POINTS = 1_000;
const MAX_HELD = 4_000; // points of a curve in the browser before they are thinned again
const MAX_CURVES = 128; // of a chart: the first ones by name
const GIB = 2 ** 30;
const CHARTS = [
  { title: "Loss", names: ["loss", "nll"] },
  { title: "Held-out loss", prefix: "held_out." },
  { title: "Speed", unit: "tokens per second", names: ["tokens_per_s"] },
  { title: "Memory of rank 0", unit: "GiB", names: ["memory_bytes"], scale: 1 / GIB },
  { title: "Learning rate", names: ["lr"] },
  { title: "Gradient norm", names: ["grad_norm"] },
  { title: "Step time", unit: "seconds", names: ["step_s", "data_s"] },
  { title: "Auxiliary losses", names: ["aux_loss", "z_loss", "indexer_loss"] },
  { title: "Tokens by source", prefix: "source_tokens." },
  { title: "Numbers", prefix: "numbers." },
];

export class TrainingCurves {
  #charts = new Map(); // title: { chart, spec }
  #curves = new Map(); // name: { step: [], time: [], value: [] }
  #hidden = new Map(); // title: names of the chart beyond MAX_CURVES
  #detail = null; // { range, curves } of the part that is zoomed into
  #options = { smoothing: 0, xName: "step", isLog: false };
  #hasMoreNames = false;
  #begin = null; // time of the first step, in milliseconds
  #stale = new Set();
  #isZooming = false;

  constructor(jobId, element, controls) {
    this.jobId = jobId;
    this.path = `/v1/jobs/${jobId}/curves`;
    this.element = element;
    this.note = document.getElementById("curves-note");
    chartControls(controls, { set: (options) => this.#set(options), onReset: () => this.#zoom(null) });
  }

  // Load all curves; returns the id of the event after which the stream continues.
  async load() {
    try {
      const { names, has_more_names: hasMoreNames } = await get(this.path);
      this.#hasMoreNames = hasMoreNames;
      const shown = CHARTS.flatMap((spec) => {
        const own = names.filter((name) => matches(spec, name)).sort();
        this.#hidden.set(spec.title, new Set(own.slice(MAX_CURVES)));
        return own.slice(0, MAX_CURVES);
      });
      const { curves, last_event_id: lastEventId } = await getCurves(this.path, shown, { max_points: MAX_POINTS });
      this.#curves = new Map(Object.entries(curves).map(([name, curve]) => [name, read(curve)]));
      this.#begin = Math.min(...[...this.#curves.values()].map(({ time }) => time[0] ?? Infinity));
      this.#stale = new Set(this.#curves.keys());
      this.draw();
      return lastEventId;
    } catch (error) {
      this.note.hidden = false;
      this.note.textContent = `The curves cannot be loaded: ${error.message} Reload the page to try again.`;
      return 0;
    }
  }

  // A metric event. `draw` shows what was added.
  add({ time, data }) {
    const ms = Date.parse(time);
    if (!Number.isFinite(this.#begin)) this.#begin = ms;
    for (const [name, value] of numbers(data)) {
      const spec = CHARTS.find((other) => matches(other, name));
      if (!spec) continue;
      let curve = this.#curves.get(name);
      if (!curve && this.#numCurves(spec) >= MAX_CURVES) {
        this.#hidden.get(spec.title)?.add(name);
        continue;
      }
      if (!curve) this.#curves.set(name, (curve = { step: [], time: [], value: [] }));
      push(curve, data.step, ms, value);
      const detail = this.#detail?.curves.get(name);
      if (detail) push(detail, data.step, ms, value);
      this.#stale.add(name);
    }
    if ((this.#curves.get("loss")?.step.length ?? 0) > MAX_HELD) this.load();
  }

  #numCurves(spec) {
    return [...this.#curves.keys()].filter((name) => matches(spec, name)).length;
  }

  draw() {
    const names = [...this.#curves.keys()];
    this.note.hidden = names.length > 0 && !this.#hasMoreNames;
    this.note.textContent = names.length
      ? `This job records more names than have curves; the first 500 do. All of them: shardyard metrics ${this.jobId} --csv`
      : "No step is recorded yet. The curves begin with the first one.";
    for (const spec of CHARTS) {
      const own = names.filter((name) => matches(spec, name));
      if (!own.length || !own.some((name) => this.#stale.has(name))) continue;
      const chart = this.#charts.get(spec.title) ?? this.#newChart(spec);
      chart.show(own.map((name) => this.#series(spec, name)));
      this.#showHidden(spec, own.length);
    }
    this.#stale.clear();
  }

  #showHidden({ title }, numShown) {
    const numHidden = this.#hidden.get(title)?.size ?? 0;
    const note = this.element.querySelector(`[data-chart="${title}"] [data-hidden]`);
    note.hidden = numHidden === 0;
    note.dataset.hidden = numHidden;
    note.textContent = `${number(numShown)} of ${number(numShown + numHidden)} curves are drawn. All of them: shardyard metrics ${this.jobId} --csv`;
  }

  #series(spec, name) {
    const { step, time, value } = this.#detail?.curves.get(name) ?? this.#curves.get(name);
    const y = spec.scale ? value.map((number) => number * spec.scale) : value;
    const label = spec.prefix ? name.slice(spec.prefix.length) : name;
    if (this.#options.xName === "step") return { name: label, x: step, y };
    // Clocks of machines that the job moved between may differ, and a chart needs x that increases.
    const order = [...time.keys()].sort((one, other) => time[one] - time[other]);
    return { name: label, x: order.map((index) => (time[index] - this.#begin) / 1000), y: order.map((index) => y[index]) };
  }

  #newChart(spec) {
    const card = Object.assign(document.createElement("div"), { className: "card" });
    const title = Object.assign(document.createElement("h3"), { textContent: spec.title });
    if (spec.unit) title.append(Object.assign(document.createElement("span"), { className: "muted", textContent: `, ${spec.unit}` }));
    const frame = document.createElement("div");
    const note = Object.assign(document.createElement("p"), { className: "chart-note", hidden: true });
    note.dataset.hidden = "0";
    card.append(title, note, frame);
    card.dataset.chart = spec.title;
    const place = CHARTS.indexOf(spec);
    const next = [...this.element.querySelectorAll("[data-chart]")].find(
      (other) => CHARTS.findIndex(({ title }) => title === other.dataset.chart) > place,
    );
    this.element.insertBefore(card, next ?? null);
    const chart = new Chart(frame, {
      title: spec.title, unit: spec.unit ?? "", height: 220, ...this.#options, onZoom: (range) => this.#zoom(range),
    });
    this.#charts.set(spec.title, chart);
    return chart;
  }

  #set(options) {
    const isOtherAxis = "xName" in options;
    Object.assign(this.#options, options);
    for (const chart of this.#charts.values()) chart.set(options);
    if (!isOtherAxis) return;
    this.#detail = null;
    this.#stale = new Set(this.#curves.keys());
    this.draw();
  }

  // Zoom all charts alike, and load the points of that part.
  #zoom(range) {
    if (this.#isZooming) return;
    this.#isZooming = true;
    for (const chart of this.#charts.values()) chart.zoom(range);
    this.#isZooming = false;
    this.#detail = null;
    clearTimeout(this.timer);
    if (range && this.#options.xName === "step") this.timer = setTimeout(() => this.#loadDetail(range), 250);
    else if (!range) (this.#stale = new Set(this.#curves.keys())), this.draw();
  }

  async #loadDetail([from, to]) {
    const [since, until] = [Math.max(0, Math.floor(from)), Math.ceil(to)];
    try {
      const names = [...this.#curves.keys()];
      const { curves } = await getCurves(this.path, names, { since_step: since, until_step: until, max_points: MAX_POINTS });
      const merged = Object.entries(curves).map(([name, curve]) => [name, within(this.#curves.get(name), read(curve), since, until)]);
      this.#detail = { range: [from, to], curves: new Map(merged) };
      this.#isZooming = true;
      this.#stale = new Set(this.#curves.keys());
      this.draw();
      this.#isZooming = false;
    } catch {
      // The thinned curve stays.
    }
  }
}

const matches = (spec, name) => (spec.prefix ? name.startsWith(spec.prefix) : spec.names.includes(name));

// null stands for what is not finite.
function read({ step, time_ms, value }) {
  return { step, time: time_ms, value: value.map((number) => number ?? NaN) };
}

// A curve with the part from `since` to `until` replaced by more points.
function within(curve, detail, since, until) {
  const pick = (isIn) => (key) => curve[key].filter((_value, index) => isIn(curve.step[index]));
  const [before, after] = [pick((step) => step < since), pick((step) => step > until)];
  return Object.fromEntries(["step", "time", "value"].map((key) => [key, [...before(key), ...detail[key], ...after(key)]]));
}

// A repeated step replaces what was recorded from there on.
function push(curve, step, ms, value) {
  while (curve.step.length && curve.step.at(-1) >= step) {
    for (const key of ["step", "time", "value"]) curve[key].pop();
  }
  curve.step.push(step);
  curve.time.push(ms);
  curve.value.push(value ?? NaN);
}

// [name, value] of a record's numbers, as the API names them.
function* numbers(data) {
  for (const [name, value] of Object.entries(data)) {
    if (typeof value === "number" || value === null) yield [name, value];
    else if (["held_out", "numbers", "source_tokens"].includes(name)) {
      for (const [key, inner] of Object.entries(value)) {
        if (typeof inner === "number" || inner === null) yield [`${name}.${key}`, inner];
      }
    }
  }
}
