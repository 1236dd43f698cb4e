// Canvas of coloured cells that the pointer and the arrow keys read one by one, with its legend; and tables beside it.

const OCTAVES = 3; // colours span from 1/8 to 8 times the mean
// Cividis, which those who do not tell red from green see as others do.
const COLOURS = [
  [0, 32, 76], [0, 49, 107], [54, 70, 108], [87, 92, 109], [116, 115, 117],
  [148, 141, 119], [184, 170, 109], [223, 202, 90], [255, 234, 70],
];
const UNUSED = [178, 34, 60]; // nothing at all

export class HeatCanvas {
  cursor = null; // [column, row] of the cell that is read

  // `onMove` is called when the cursor has moved or left; `wordsId` names the element with words about the cell.
  constructor(wordsId, onMove) {
    this.element = Object.assign(document.createElement("canvas"), { tabIndex: 0 });
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-describedby", wordsId);
    const move = (cell) => ((this.cursor = cell), onMove());
    this.element.addEventListener("pointermove", (event) => {
      const box = this.element.getBoundingClientRect();
      const part = (position, length, count) => clamp(Math.floor((position / length) * count), count);
      move([part(event.clientX - box.left, box.width, this.element.width), part(event.clientY - box.top, box.height, this.element.height)]);
    });
    this.element.addEventListener("pointerleave", () => document.activeElement !== this.element && move(null));
    this.element.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [column, row] = this.cursor ?? [this.element.width - 1, 0];
      move([clamp(column + step[0], this.element.width), clamp(row + step[1], this.element.height)]);
    });
  }

  // `valueAt(column, row)`: a multiple of the mean.
  draw(width, height, valueAt) {
    Object.assign(this.element, { width, height });
    if (this.cursor) this.cursor = [clamp(this.cursor[0], width), clamp(this.cursor[1], height)];
    const context = this.element.getContext("2d");
    const image = context.createImageData(width, height);
    for (let row = 0; row < height; row += 1) {
      for (let column = 0; column < width; column += 1) {
        image.data.set([...colour(valueAt(column, row)), 255], 4 * (row * width + column));
      }
    }
    context.putImageData(image, 0, 0);
  }
}

function clamp(value, count) {
  return Math.min(count - 1, Math.max(0, value));
}

export function experts({ experts_per_bucket: width, num_experts: count }, bucket) {
  if (width === 1) return `expert ${bucket}`;
  return `experts ${bucket * width} to ${Math.min(count, (bucket + 1) * width) - 1}`;
}

// Colour on a logarithmic scale around 1, the mean.
function colour(value) {
  if (value <= 0) return UNUSED;
  const place = Math.min(1, Math.max(0, (Math.log2(value) + OCTAVES) / (2 * OCTAVES))) * (COLOURS.length - 1);
  const [low, high] = [COLOURS[Math.floor(place)], COLOURS[Math.ceil(place)]];
  return low.map((channel, index) => Math.round(channel + (high[index] - channel) * (place - Math.floor(place))));
}

export function legend(mean, nothing) {
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
  frame.append(`⅛ of the ${mean}`, canvas, `8 times the ${mean} and more`, swatch, nothing);
  return frame;
}

export function words(id) {
  const element = Object.assign(document.createElement("p"), { className: "heat-words muted", id });
  element.setAttribute("aria-live", "polite");
  return element;
}

// Texts below the ends of a canvas.
export function axis() {
  return Object.assign(document.createElement("div"), { className: "heat-axis" });
}

export function showEnds(axis, ...texts) {
  axis.replaceChildren(...texts.map((textContent) => Object.assign(document.createElement("span"), { textContent })));
}

export function table(heads, rows) {
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
