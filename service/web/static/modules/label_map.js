// Which sources, roles or languages go to which experts at the newest evaluation, by layer, the most specialized first.

import { get } from "./api.js";
import { number, plural } from "./format.js";
import { HeatCanvas, axis, experts, legend, showEnds, table, words } from "./heat_canvas.js";

const NAMES = { part: "part of a source" };
const NUM_TOP = 3; // experts of a label in the table

export class LabelMap {
  #data = null;
  #layer = null;

  constructor(jobId) {
    this.path = `/v1/jobs/${jobId}/experts/labels`;
    this.section = document.getElementById("labels");
    this.note = document.getElementById("labels-note");
    this.select = document.getElementById("label-layer");
    this.select.addEventListener("change", () => {
      this.#layer = Number(this.select.value);
      this.load();
    });
    document.getElementById("experts-refresh").addEventListener("click", () => this.load());
    new IntersectionObserver(([entry], observer) => {
      if (!entry.isIntersecting) return;
      observer.disconnect();
      this.load();
    }, { rootMargin: "200px" }).observe(document.getElementById("experts"));
  }

  // An evaluation was recorded.
  noteEvaluation() {
    if (this.#data) this.load();
  }

  async load() {
    try {
      this.#data = await get(this.path, { ...(this.#layer === null ? {} : { layer: this.#layer }), max_layers: 1 });
      this.section.hidden = !this.#data.shares.length;
      if (!this.section.hidden) this.#show(this.#data);
    } catch (error) {
      this.section.hidden = false;
      this.note.textContent = `The shares cannot be loaded: ${error.message}`;
    }
  }

  #show({ step, kind: key, labels, layers, shares: [layer] }) {
    const kind = NAMES[key] ?? key;
    if (!this.cells) this.#build();
    document.getElementById("labels-title").textContent = `Experts by ${kind}`;
    this.note.textContent =
      `Held-out tokens of the evaluation at step ${number(step)}. A row is a ${kind}, a column ` +
      (layer.experts_per_bucket === 1 ? "an expert" : `${layer.experts_per_bucket} neighbouring experts`) +
      `; 1 is an even share. Layers are in order of specialization, in brackets: the share of a ${kind}'s choices that go elsewhere than those of the mean ${kind}.`;
    this.select.replaceChildren(...layers.map(({ layer: value, specialization }) =>
      Object.assign(document.createElement("option"), { value, textContent: `${value} (${share(specialization)})`, selected: value === layer.layer })));
    this.names.replaceChildren(...labels.map((label) =>
      Object.assign(document.createElement("li"), { textContent: label, title: label, dir: "auto" })));
    const width = layer.shares[0].length;
    this.cells.draw(width, labels.length, (column, row) => layer.shares[row][column] * (layer.num_experts / layer.experts_per_bucket));
    showEnds(this.axis, experts(layer, 0), experts(layer, width - 1));
    this.cells.element.setAttribute("aria-label",
      `Shares of layer ${layer.layer} at step ${number(step)}: ${plural(labels.length, "row")} by ${plural(layer.num_experts, "expert")}. Arrow keys read single shares.`);
    const rows = labels.map((label, row) => [label, number(layer.choices[row]), top(layer, row)]);
    this.table.replaceChildren(table([`${kind[0].toUpperCase()}${kind.slice(1)}`, "Choices", "Most of them go to"], rows));
    this.#speak();
  }

  #build() {
    this.cells = new HeatCanvas("label-words", () => this.#speak());
    this.names = Object.assign(document.createElement("ul"), { className: "label-names" });
    this.axis = axis();
    this.words = words("label-words");
    this.table = Object.assign(document.createElement("div"), { className: "table-frame layer-table", tabIndex: 0 });
    this.table.setAttribute("role", "region");
    this.table.setAttribute("aria-labelledby", "labels-title");
    const cells = Object.assign(document.createElement("div"), { className: "label-cells" });
    cells.append(this.cells.element);
    const rows = Object.assign(document.createElement("div"), { className: "label-rows" });
    rows.append(this.names, cells, this.axis);
    document.getElementById("label-map").append(rows, legend("even share", "none"), this.words, this.table);
  }

  // Words about the cell that is read.
  #speak() {
    const { labels, shares: [layer] } = this.#data;
    if (!this.cells.cursor) return (this.words.textContent = "");
    const [column, row] = this.cells.cursor;
    // Isolated: a label may change the direction of what follows.
    this.words.textContent = `\u2068${labels[row]}\u2069, ${experts(layer, column)}: ${share(layer.shares[row][column])} of its choices.`;
  }
}

function top(layer, row) {
  const order = layer.shares[row].map((value, bucket) => [value, bucket]).sort((a, b) => b[0] - a[0]);
  return order.slice(0, NUM_TOP).filter(([value]) => value).map(([value, bucket]) => `${experts(layer, bucket)} (${share(value)})`).join(", ");
}

function share(value) {
  return `${number(Math.round(1000 * value) / 10)}%`;
}
