// A spec as a YAML document, whose fields are changed without losing its comments.

import { isMap, parse, parseDocument, stringify } from "../vendor/yaml/index.js";

export { parse, stringify };

export class SpecDocument {
  #document;
  #content = {};

  constructor(text) {
    this.read(text);
  }

  read(text) {
    this.text = text;
    this.#document = parseDocument(text);
    // Words for the first mistake in the YAML; null if there is none.
    this.error = this.#document.errors[0]?.message ?? null;
    this.#content = {};
    if (this.error) return;
    try {
      this.#content = this.#document.toJS();
    } catch (error) {
      this.error = error.message; // aliases of nothing, or so many that they would fill the memory
    }
  }

  get value() {
    const content = this.#content;
    return content !== null && typeof content === "object" && !Array.isArray(content) ? content : {};
  }

  // Set the value at a path, or remove it if it is undefined, with the maps that become empty.
  set(path, value) {
    if (value === undefined) this.#remove(path);
    else this.#set(path, value);
    const isEmpty = isMap(this.#document.contents) && this.#document.contents.items.length === 0;
    this.read(isEmpty ? "" : this.#document.toString({ lineWidth: 0, flowCollectionPadding: false }));
  }

  #set(path, value) {
    if (!isMap(this.#document.contents)) this.#document.contents = this.#document.createNode({});
    for (let length = 1; length < path.length; length += 1) {
      const parent = path.slice(0, length);
      if (!isMap(this.#document.getIn(parent, true))) this.#document.setIn(parent, this.#document.createNode({}));
    }
    this.#document.setIn(path, this.#document.createNode(value));
  }

  #remove(path) {
    for (let length = path.length; length > 0; length -= 1) {
      const place = path.slice(0, length);
      if (!this.#document.hasIn(place)) continue;
      const node = this.#document.getIn(place, true);
      if (length < path.length && !(isMap(node) && node.items.length === 0)) return;
      this.#document.deleteIn(place);
    }
  }
}

export const valueAt = (value, path) => path.reduce((part, key) => part?.[key], value);
