// Expert load over time as a heat map, a layer at a time, the worst-balanced layer first.

import { get } from "./api.js";
import { number, plural } from "./format.js";
import { HeatCanvas, axis, experts, legend, showEnds, table, words } from "./heat_canvas.js";

const REFRESH_MS = 20_000;

export class HeatMap {
  #data = null;
  #layer = null;
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
    this.cells.cursor = null;
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
    if (!this.cells) this.#build();
    this.cells.draw(load.load.length, load.load[0].length, (column, row) => load.load[column][row]);
    showEnds(this.axis, ...[load.steps[0], load.steps.at(-1)].map((step) => `step ${number(step)}`));
    this.#describe(load);
    this.#speak();
  }

  #build() {
    this.cells = new HeatCanvas("heat-words", () => this.#speak());
    this.axis = axis();
    this.words = words("heat-words");
    this.table = Object.assign(document.createElement("div"), { className: "table-frame layer-table", tabIndex: 0 });
    this.table.setAttribute("role", "region");
    this.table.setAttribute("aria-label", "MoE layers, the worst-balanced first");
    this.busiest = document.createElement("details");
    this.busiest.append(Object.assign(document.createElement("summary"), { textContent: "Newest loads of this layer as a table" }));
    this.frame.append(this.cells.element, this.axis, legend("mean", "no load"), this.words, this.table, this.busiest);
  }

  #describe(load) {
    const [bucket, worst] = busiest(load);
    this.cells.element.setAttribute("aria-label",
      `Loads of layer ${load.layer}, ${plural(load.num_experts, "expert")}, over ${plural(load.steps.length, "recorded step")}. ` +
      `At step ${number(load.steps.at(-1))}, the busiest, ${experts(load, bucket)}, has ${number(worst)} times the mean load. Arrow keys read single loads.`);
    const order = load.load.at(-1).map((value, index) => [value, index]).sort((a, b) => b[0] - a[0]);
    const rows = order.slice(0, 20).map(([value, index]) => [experts(load, index), `${number(value)}×`]);
    this.busiest.querySelector(".table-frame")?.remove();
    const frame = Object.assign(document.createElement("div"), { className: "table-frame" });
    frame.append(table(["Expert", `Load at step ${number(load.steps.at(-1))}`], rows));
    this.busiest.append(frame);
  }

  // Words about the cell that is read, else about the busiest expert.
  #speak() {
    const [load] = this.#data.loads;
    const [bucket, worst] = busiest(load);
    const [column, row] = this.cells.cursor ?? [];
    const value = load.load[column]?.[row];
    this.words.textContent = this.cells.cursor
      ? `Step ${number(load.steps[column])}, ${experts(load, row)}: ${value ? `${number(value)} times the mean` : "no load"}.`
      : `Busiest at step ${number(load.steps.at(-1))}: ${experts(load, bucket)} with ${number(worst)} times the mean.`;
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

// [bucket, load] of the busiest expert at the newest step.
function busiest(load) {
  const worst = Math.max(...load.load.at(-1));
  return [load.load.at(-1).indexOf(worst), worst];
}
