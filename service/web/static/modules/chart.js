// Line charts over steps or time: uPlot, with zoom, smoothing, a log scale, gaps, and the same values as a table.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { duration, number } from "./format.js";

const MAX_TABLE_ROWS = 50;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 2], [1, 2], [10, 2, 2, 2]];
const NUM_COLOURS = 8;

// Series: { name, x, y } with arrays of numbers; y may hold null, NaN or infinities, which are gaps.
// Options: title, unit, xName ("step" or "seconds"), height, smoothing (0 to 0.99), isLog, onZoom(min, max).
export class Chart {
  #plot = null;
  #observer;
  #series = [];
  #zoom = null;

  constructor(element, options = {}) {
    this.element = element;
    this.options = { title: "", unit: "", xName: "step", height: 240, smoothing: 0, isLog: false, ...options };
    element.classList.add("chart");
    this.note = Object.assign(document.createElement("p"), { className: "chart-note", hidden: true });
    this.frame = document.createElement("div");
    this.frame.setAttribute("role", "img");
    this.table = document.createElement("details");
    this.table.append(Object.assign(document.createElement("summary"), { className: "chart-note", textContent: "As a table" }));
    this.table.addEventListener("toggle", () => this.#showTable());
    element.replaceChildren(this.frame, this.note, this.table);
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(element);
    for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
      matchMedia(query).addEventListener("change", () => this.#draw());
    }
  }

  // Replace all series.
  show(series) {
    this.#series = series.map(({ name, x, y }) => ({ name, x: [...x], y: [...y] }));
    this.#draw();
  }

  // Add points to a series, in order of x; a repeated x replaces what is there, as a restarted run repeats steps.
  add(name, points) {
    let series = this.#series.find((candidate) => candidate.name === name);
    if (!series) this.#series.push((series = { name, x: [], y: [] }));
    for (const [x, y] of points) {
      while (series.x.length && series.x.at(-1) >= x) series.x.pop(), series.y.pop();
      series.x.push(x);
      series.y.push(y);
    }
    if (this.#plot && this.#plot.series.length === this.#series.length + 1) {
      this.#plot.setData(this.#data(), this.#zoom === null);
      this.#describe();
    } else this.#draw();
  }

  set(options) {
    const isOtherAxis = "xName" in options && options.xName !== this.options.xName;
    Object.assign(this.options, options);
    if (isOtherAxis) this.#zoom = null;
    this.#draw();
  }

  // The part between two values of x; null for all.
  zoom(range) {
    this.#zoom = range;
    if (!this.#plot) return;
    if (range) this.#plot.setScale("x", { min: range[0], max: range[1] });
    else this.#plot.setData(this.#data(), true);
  }

  destroy() {
    this.#observer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  #data() {
    const shown = this.#series.map(({ x, y }) => [x, smooth(y.map((value) => this.#drawable(value)), this.options.smoothing)]);
    return shown.length ? uPlot.join(shown) : [[]];
  }

  #drawable(value) {
    return typeof value === "number" && Number.isFinite(value) && (!this.options.isLog || value > 0) ? value : null;
  }

  #draw() {
    this.#plot?.destroy();
    this.#plot = null;
    const isEmpty = !this.#series.some(({ y }) => y.some((value) => this.#drawable(value) !== null));
    this.frame.hidden = isEmpty;
    this.#describe(isEmpty);
    if (isEmpty) return;
    this.#plot = new uPlot(this.#plotOptions(), this.#data(), this.frame);
    if (this.#zoom) this.#plot.setScale("x", { min: this.#zoom[0], max: this.#zoom[1] });
  }

  #plotOptions() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { xName, isLog, height } = this.options;
    const axis = {
      stroke: colour("--ink-muted"), font: `12px ${colour("--font-text")}`,
      grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 },
    };
    const xText = xName === "seconds" ? duration : number;
    return {
      width: Math.max(200, this.element.clientWidth), height,
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: padded } },
      axes: [
        { ...axis, values: (_plot, ticks) => ticks.map(xText) },
        { ...axis, size: 64, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
      ],
      series: [
        { label: xName === "seconds" ? "Time" : "Step", value: (_plot, value) => (value === null ? "–" : xText(value)) },
        ...this.#series.map(({ name, x }, index) => ({
          label: name, stroke: colour(`--series-${(index % NUM_COLOURS) + 1}`), width: 1.75,
          dash: this.#series.length > 1 ? DASHES[(index + Math.floor(index / NUM_COLOURS)) % DASHES.length] : undefined,
          value: (_plot, value) => number(value), spanGaps: false, points: { show: x.length === 1 ? true : undefined },
        })),
      ],
      cursor: { drag: { x: true, y: false, setScale: true }, focus: { prox: 24 } },
      focus: { alpha: 0.35 },
      legend: { live: true },
      hooks: { setScale: [(plot, key) => key === "x" && this.#zoomed(plot)] },
    };
  }

  #zoomed(plot) {
    const xs = plot.data[0];
    if (!xs?.length) return;
    const { min, max } = plot.scales.x;
    const isAll = min <= xs[0] && max >= xs.at(-1);
    const zoom = isAll ? null : [min, max];
    if (String(zoom) === String(this.#zoom)) return;
    this.#zoom = zoom;
    this.options.onZoom?.(zoom);
  }

  #resize() {
    const width = this.element.clientWidth;
    if (this.#plot && width && Math.abs(width - this.#plot.width) > 1) this.#plot.setSize({ width, height: this.options.height });
  }

  #describe(isEmpty = false) {
    const { title, unit, isLog } = this.options;
    const numGaps = this.#series.reduce((sum, { y }) => sum + y.filter((value) => value !== null && this.#drawable(value) === null).length, 0);
    const reason = isLog ? "are not finite or not positive, and cannot be on a log scale" : "are not finite: gaps in the curve";
    this.note.textContent = isEmpty
      ? numGaps ? `All values ${reason}.` : "No values yet."
      : numGaps === 1 ? `1 value ${reason.replace(/^are/, "is").replace("gaps", "a gap")}.` : `${number(numGaps)} values ${reason}.`;
    this.note.hidden = !isEmpty && numGaps === 0;
    this.table.hidden = isEmpty && numGaps === 0;
    const words = this.#series.map(({ name, y }) => {
      const values = y.filter((value) => this.#drawable(value) !== null);
      return `${name}: ${values.length} values, last ${number(values.at(-1))}`;
    });
    this.frame.setAttribute("aria-label", `${title || "Chart"}${unit ? ` in ${unit}` : ""}. ${words.join("; ")}`);
    this.#showTable();
  }

  // The same values, evenly chosen, for those who do not see the curve.
  #showTable() {
    if (!this.table.open) return;
    const xs = [...new Set(this.#series.flatMap(({ x }) => x))].sort((a, b) => a - b);
    const stride = Math.max(1, Math.ceil(xs.length / MAX_TABLE_ROWS));
    const rows = xs.filter((_x, index) => index % stride === 0 || index === xs.length - 1);
    const table = document.createElement("table");
    table.className = "table";
    const head = table.createTHead().insertRow();
    for (const name of [this.options.xName === "seconds" ? "Time" : "Step", ...this.#series.map(({ name }) => name)]) {
      head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name }));
    }
    const body = table.createTBody();
    const columns = this.#series.map(({ x, y }) => new Map(x.map((key, index) => [key, y[index]])));
    for (const x of rows) {
      const row = body.insertRow();
      row.insertCell().textContent = this.options.xName === "seconds" ? duration(x) : number(x);
      for (const column of columns) row.insertCell().textContent = column.has(x) ? number(column.get(x)) : "";
    }
    const frame = Object.assign(document.createElement("div"), { className: "table-frame", tabIndex: 0 });
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", `${this.options.title || "Chart"} as a table`);
    frame.append(table);
    this.table.querySelector(".table-frame")?.remove();
    this.table.append(frame);
  }
}

// Exponential moving average without a bias towards the first value; gaps stay gaps and are not counted.
export function smooth(values, weight) {
  if (!weight) return values;
  let average = 0;
  let debias = 0;
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    debias = weight * debias + (1 - weight);
    return average / debias;
  });
}

function padded(_plot, min, max) {
  if (min === null || min === undefined) return [0, 1];
  const pad = (max - min || Math.abs(max) || 1) * 0.06;
  return [min >= 0 && min - pad < 0 ? 0 : min - pad, max + pad];
}

// Controls for several charts at once: smoothing, log scale, step or time, zoom back.
// `set(options)` is called with what changed; `onReset()` when all is to be shown again.
export function chartControls(element, { set, onReset, hasTime = true }) {
  const form = document.createElement("form");
  form.className = "toolbar";
  form.setAttribute("aria-label", "Charts");
  form.append(
    field("Smoothing", Object.assign(document.createElement("input"), { type: "range", name: "smoothing", min: 0, max: 0.99, step: 0.01, value: 0 })),
    ...(hasTime ? [field("Over", select("xName", { step: "steps", seconds: "time" }))] : []),
    field("Scale", select("isLog", { "": "linear", log: "logarithmic" })),
    Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: "Show all" }),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target.name === "smoothing") set({ smoothing: Number(target.value) });
    if (target.name === "xName") set({ xName: target.value });
    if (target.name === "isLog") set({ isLog: target.value === "log" });
  });
  form.querySelector("button").addEventListener("click", () => onReset());
  element.replaceChildren(form);
}

function field(name, control) {
  const frame = Object.assign(document.createElement("div"), { className: "field" });
  control.id = `chart-${control.name}`;
  control.classList.add("input");
  frame.append(Object.assign(document.createElement("label"), { textContent: name, htmlFor: control.id }), control);
  return frame;
}

function select(name, choices) {
  const control = Object.assign(document.createElement("select"), { name });
  for (const [value, textContent] of Object.entries(choices)) {
    control.append(Object.assign(document.createElement("option"), { value, textContent }));
  }
  return control;
}
