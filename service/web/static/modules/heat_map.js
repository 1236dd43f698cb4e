// Expert load over time as a heat map, a layer at a time, the worst-balanced layer first.

import { get } from "./api.js";
import { number, plural } from "./format.js";

const REFRESH_MS = 20_000;
const EVEN = 1; // the mean load
const OCTAVES = 3; // colours span from 1/8 to 8 times the mean
// Cividis, which those who do not tell red from green see as others do.
const COLOURS = [
  [0, 32, 76], [0, 49, 107], [54, 70, 108], [87, 92, 109], [116, 115, 117],
  [148, 141, 119], [184, 170, 109], [223, 202, 90], [255, 234, 70],
];
const UNUSED = [178, 34, 60]; // no load at all

export class HeatMap {
  #data = null;
  #layer = null;
  #cursor = null; // [column, row] of what the words are about
  #loadedAt = 0;
  #timer = null;
  #isVisible = false;

  constructor(jobId) {
    this.path = `/v1/jobs/${jobId}/experts`;
    this.note = document.getElementById("experts-note");
    this.frame = document.getElementById("heat-map");
    this.select = document.getElementById("layer");
    this.select.addEventListener("change", () => this.#choose(Number(this.select.value)));
    document.getElementById("experts-refresh").addEventListener("click", () => this.load());
    new IntersectionObserver(([entry]) => {
      this.#isVisible = entry.isIntersecting;
      if (this.#isVisible && !this.#data) this.load();
    }, { rootMargin: "200px" }).observe(document.getElementById("experts"));
  }

  // A step was recorded: load again after a while, if anybody looks.
  noteStep() {
    if (this.#timer || !this.#data) return;
    this.#timer = setTimeout(() => {
      this.#timer = null;
      if (this.#isVisible && document.visibilityState === "visible") this.load();
    }, Math.max(0, this.#loadedAt + REFRESH_MS - Date.now()));
  }

  async load() {
    this.#loadedAt = Date.now();
    try {
      const chosen = this.#layer === null ? {} : { layer: this.#layer };
      this.#data = await get(this.path, { ...chosen, max_layers: 1, max_points: 120 });
      this.#show();
    } catch (error) {
      this.note.textContent = `The loads cannot be loaded: ${error.message}`;
    }
  }

  async #choose(layer) {
    this.#layer = layer;
    this.#cursor = null;
    await this.load();
  }

  #show() {
    const { layers, loads } = this.#data;
    this.frame.hidden = !loads.length;
    this.select.closest(".end").hidden = !loads.length;
    if (!loads.length) {
      this.note.textContent = "No expert loads are recorded: the model has no MoE layers, or no step has been recorded yet.";
      return;
    }
    const [load] = loads;
    this.note.textContent =
      `${plural(layers.length, "MoE layer")}, the worst-balanced first. A column is a recorded step, a row ` +
      (load.experts_per_bucket === 1 ? "an expert" : `the busiest of ${load.experts_per_bucket} neighbouring experts`) +
      "; 1 is the mean load of the layer's experts.";
    this.#showLayers(layers, load.layer);
    if (!this.canvas) this.#build();
    this.#draw(load);
    this.#describe(load);
  }

  #build() {
    this.canvas = Object.assign(document.createElement("canvas"), { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-describedby", "heat-words");
    this.axis = Object.assign(document.createElement("div"), { className: "heat-axis" });
    this.words = Object.assign(document.createElement("p"), { className: "heat-words muted", id: "heat-words" });
    this.words.setAttribute("aria-live", "polite");
    this.table = Object.assign(document.createElement("div"), { className: "table-frame layer-table", tabIndex: 0 });
    this.table.setAttribute("role", "region");
    this.table.setAttribute("aria-label", "MoE layers, the worst-balanced first");
    this.busiest = document.createElement("details");
    this.busiest.append(Object.assign(document.createElement("summary"), { textContent: "Newest loads of this layer as a table" }));
    this.frame.append(this.canvas, this.axis, legend(), this.words, this.table, this.busiest);
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const part = (position, length, count) => Math.min(count - 1, Math.max(0, Math.floor((position / length) * count)));
      this.#point(part(event.clientX - box.left, box.width, this.canvas.width), part(event.clientY - box.top, box.height, this.canvas.height));
    });
    this.canvas.addEventListener("pointerleave", () => document.activeElement !== this.canvas && this.#point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      const [column, row] = this.#cursor ?? [this.canvas.width - 1, 0];
      const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
      this.#point(clamp(column + move[0], this.canvas.width), clamp(row + move[1], this.canvas.height));
    });
  }

  #draw(load) {
    const [width, height] = [load.load.length, load.load[0].length];
    Object.assign(this.canvas, { width, height });
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(width, height);
    load.load.forEach((row, column) => row.forEach((value, bucket) => {
      image.data.set([...colour(value), 255], 4 * (bucket * width + column));
    }));
    context.putImageData(image, 0, 0);
    this.axis.replaceChildren(
      ...[load.steps[0], load.steps.at(-1)].map((step) => Object.assign(document.createElement("span"), { textContent: `step ${number(step)}` })),
    );
  }

  #describe(load) {
    const worst = Math.max(...load.load.at(-1));
    const bucket = load.load.at(-1).indexOf(worst);
    this.canvas.setAttribute("aria-label",
      `Loads of layer ${load.layer}, ${plural(load.num_experts, "expert")}, over ${plural(load.steps.length, "recorded step")}. ` +
      `At step ${number(load.steps.at(-1))}, the busiest, ${experts(load, bucket)}, has ${number(worst)} times the mean load. Arrow keys read single loads.`);
    if (this.#cursor) this.#point(...this.#cursor);
    else this.words.textContent = `Busiest at step ${number(load.steps.at(-1))}: ${experts(load, bucket)} with ${number(worst)} times the mean.`;
    const order = load.load.at(-1).map((value, index) => [value, index]).sort((a, b) => b[0] - a[0]);
    const rows = order.slice(0, 20).map(([value, index]) => [experts(load, index), `${number(value)}×`]);
    this.busiest.querySelector(".table-frame")?.remove();
    const frame = Object.assign(document.createElement("div"), { className: "table-frame" });
    frame.append(table(["Expert", `Load at step ${number(load.steps.at(-1))}`], rows));
    this.busiest.append(frame);
  }

  #point(column, row) {
    const [load] = this.#data.loads;
    this.#cursor = column === null ? null : [Math.min(column, load.steps.length - 1), row];
    if (!this.#cursor) return this.#describe(load);
    const value = load.load[this.#cursor[0]][row];
    this.words.textContent = `Step ${number(load.steps[this.#cursor[0]])}, ${experts(load, row)}: ${value ? `${number(value)} times the mean` : "no load"}.`;
  }

  #showLayers(layers, chosen) {
    this.select.replaceChildren(...layers.map(({ layer, max_over_mean: worst }) =>
      Object.assign(document.createElement("option"), { value: layer, textContent: `${layer} (${number(worst)}×)`, selected: layer === chosen })));
    if (!this.table) return queueMicrotask(() => this.#showLayers(layers, chosen));
    const rows = layers.map((row) => [
      String(row.layer), `${number(row.max_over_mean)}×`, `${number(row.newest_max_over_mean)}×`,
      `${number(row.num_unused)} of ${number(row.num_experts)}`,
      row.dropped === null ? "–" : `${number(100 * row.dropped)}%`, number(row.entropy),
    ]);
    this.table.replaceChildren(table(["Layer", "Busiest over mean", "at the newest step", "Unused experts", "Dropped", "Entropy"], rows));
    for (const cell of this.table.querySelectorAll("tbody th")) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: cell.textContent });
      button.setAttribute("aria-label", `show layer ${cell.textContent}`);
      button.addEventListener("click", () => this.#choose(Number(button.textContent)));
      cell.replaceChildren(button);
    }
  }
}

function experts({ experts_per_bucket: width, num_experts: count }, bucket) {
  if (width === 1) return `expert ${bucket}`;
  return `experts ${bucket * width} to ${Math.min(count, (bucket + 1) * width) - 1}`;
}

// Position on a logarithmic scale, 0 to 1.
function colour(value) {
  if (value <= 0) return UNUSED;
  const place = Math.min(1, Math.max(0, (Math.log2(value / EVEN) + OCTAVES) / (2 * OCTAVES))) * (COLOURS.length - 1);
  const [low, high] = [COLOURS[Math.floor(place)], COLOURS[Math.ceil(place)]];
  return low.map((channel, index) => Math.round(channel + (high[index] - channel) * (place - Math.floor(place))));
}

function legend() {
  const frame = Object.assign(document.createElement("div"), { className: "heat-legend" });
  const canvas = Object.assign(document.createElement("canvas"), { width: 96, height: 1 });
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  const image = context.createImageData(96, 1);
  for (let x = 0; x < 96; x += 1) image.data.set([...colour(2 ** ((x / 95) * 2 * OCTAVES - OCTAVES)), 255], 4 * x);
  context.putImageData(image, 0, 0);
  const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  swatch.setAttribute("class", "swatch");
  swatch.setAttribute("viewBox", "0 0 10 10");
  const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", 10], ["height", 10], ["fill", `rgb(${UNUSED})`]]) square.setAttribute(name, value);
  swatch.append(square);
  frame.append("⅛ of the mean", canvas, "8 times the mean and more", swatch, "no load");
  return frame;
}

function table(heads, rows) {
  const table = Object.assign(document.createElement("table"), { className: "table" });
  const head = table.createTHead().insertRow();
  heads.forEach((name, index) => head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name, className: index ? "number" : "" })));
  const body = table.createTBody();
  for (const [name, ...cells] of rows) {
    const row = body.insertRow();
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: name }));
    for (const text of cells) Object.assign(row.insertCell(), { textContent: text, className: "number" });
  }
  return table;
}
