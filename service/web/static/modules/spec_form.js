// A form of the spec's schema. Groups are drawn when they are opened; each field changes one value of the document.

import { defaultText, indexOfChoice, kindOf, resolve } from "./schema.js";
import { parse, stringify, valueAt } from "./spec_document.js";

const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$/;

export class SpecForm {
  #schema;
  #element;
  #value = {};
  #problems = [];
  #change;
  #parts = [];

  // `change(path, value)` is called for each edit; undefined removes the value.
  constructor(schema, element, change) {
    this.#schema = schema;
    this.#element = element;
    this.#change = change;
    const required = new Set(schema.required ?? []);
    for (const [name, property] of Object.entries(schema.properties)) {
      const draw = () => this.#section([name], property, required.has(name));
      this.#parts.push({ draw, element: draw() });
    }
    this.#element.replaceChildren(...this.#parts.map(({ element }) => element));
  }

  // Draw the values of a document; the field that has the focus keeps it, with what is being typed there.
  show(value) {
    this.#value = value;
    const focused = this.#element.contains(document.activeElement) ? document.activeElement : null;
    for (const part of this.#parts) {
      if (part.element.draw) part.element.draw();
      else {
        const fresh = part.draw();
        part.element.replaceWith(fresh);
        part.element = fresh;
      }
    }
    if (focused) keepFocus(focused);
  }

  // Show problems beside their fields, and open the groups that have some.
  showProblems(problems) {
    this.#problems = problems;
    for (const problem of problems) this.open(problem.path);
    this.show(this.#value);
  }

  // Open the groups down to a path as problems have it; returns the id of the nearest field.
  open(path) {
    const keys = keysOf(path);
    let id = null;
    for (let length = 1; length <= keys.length; length += 1) {
      const element = document.getElementById(idOf(keys.slice(0, length)));
      if (!element) continue;
      id = element.id;
      if (element.tagName === "DETAILS" && !element.open) {
        element.open = true;
        element.draw();
      }
    }
    return id;
  }

  #section(path, property, isRequired) {
    const schema = resolve(property, this.#schema);
    const kind = kindOf(schema);
    if (kind !== "group" && kind !== "choice") return this.#field(path, schema, kind, isRequired);
    const section = document.createElement("details");
    section.id = idOf(path);
    section.className = "spec-group";
    const summary = document.createElement("summary");
    const body = document.createElement("div");
    body.className = "spec-fields";
    section.append(summary, body);
    section.draw = () => {
      const value = valueAt(this.#value, path);
      const mark = this.#problemsAt(path, true).length ? "has-problem" : "";
      summary.className = mark;
      summary.replaceChildren(nameOf(path, isRequired), ...[summaryOf(value)].filter(Boolean));
      if (section.open) this.#drawGroup(path, schema, kind, body, value);
    };
    section.addEventListener("toggle", () => section.open && !body.childElementCount && section.draw());
    section.draw();
    return section;
  }

  #drawGroup(path, schema, kind, body, value) {
    const opened = new Set([...body.querySelectorAll("details[open]")].map((part) => part.id));
    const parts = [];
    if (schema.description) parts.push(helpOf(schema.description));
    let fields = schema;
    if (kind === "choice") {
      const index = value === undefined ? -1 : indexOfChoice(schema.choices, value);
      parts.push(this.#choice(path, schema, index));
      fields = index < 0 ? {} : schema.choices[index].schema;
    }
    const required = new Set(fields.required ?? []);
    for (const [name, property] of Object.entries(fields.properties ?? {})) {
      if (resolve(property, this.#schema).const !== undefined) continue;
      parts.push(this.#section([...path, name], property, required.has(name)));
    }
    parts.push(...this.#problemsAt(path).map(problemOf));
    body.replaceChildren(...parts);
    for (const part of body.querySelectorAll("details")) {
      if (!opened.has(part.id)) continue;
      part.open = true;
      part.draw();
    }
  }

  #choice(path, schema, index) {
    const id = `${idOf(path)}-choice`;
    const options = schema.choices.map(({ name }, place) => [String(place), name]);
    const select = selectOf(id, [["", schema.default === undefined ? "choose…" : "default"], ...options], index < 0 ? "" : String(index));
    select.addEventListener("change", () => {
      const chosen = schema.choices[Number(select.value)];
      this.#change(path, select.value === "" ? undefined : this.#emptyOf(chosen, valueAt(this.#value, path)));
    });
    return fieldOf(id, document.createTextNode(schema.choices[0].key ?? "kind"), select, "", []);
  }

  // The least value of a choice, with what it has in common with the value before.
  #emptyOf({ schema, key, name }, before) {
    if ("const" in schema) return schema.const;
    const kept = Object.entries(before ?? {}).filter(([property]) => property !== key && property in schema.properties);
    return { ...(key ? { [key]: name } : {}), ...Object.fromEntries(typeof before === "object" ? kept : []) };
  }

  #field(path, schema, kind, isRequired) {
    const value = valueAt(this.#value, path);
    const id = idOf(path);
    const fallback = defaultText(schema);
    let input;
    if (kind === "enum" || kind === "boolean") {
      const values = kind === "boolean" ? [true, false] : schema.enum;
      const options = values.map((option) => [JSON.stringify(option), kind === "boolean" ? (option ? "yes" : "no") : String(option)]);
      const none = fallback ? `default: ${kind === "boolean" ? (schema.default ? "yes" : "no") : fallback}` : isRequired ? "choose…" : "not set";
      input = selectOf(id, [["", none], ...options], value === undefined ? "" : JSON.stringify(value));
      input.addEventListener("change", () => this.#change(path, input.value === "" ? undefined : JSON.parse(input.value)));
    } else {
      input = document.createElement(kind === "yaml" ? "textarea" : "input");
      input.id = id;
      input.className = kind === "text" ? "input" : "input code";
      input.value = value === undefined ? "" : kind === "yaml" ? stringify(value).trimEnd() : String(value);
      input.placeholder = fallback;
      input.spellcheck = false;
      input.autocomplete = "off";
      if (kind === "number") input.inputMode = "decimal";
      if (kind === "yaml") input.rows = Math.min(8, Math.max(1, input.value.split("\n").length));
      let committed = input.value;
      const commit = () => {
        if (input.value === committed) return;
        committed = input.value;
        setTimeout(() => this.#change(path, valueOf(committed, kind))); // once the focus is where it goes
      };
      input.addEventListener("change", commit);
      input.addEventListener("blur", commit); // what was typed before a redraw is no change of the new field
    }
    return fieldOf(id, nameOf(path, isRequired), input, schema.description ?? "", this.#problemsAt(path, kind === "yaml"));
  }

  #problemsAt(path, isBelow = false) {
    const place = path.join(".");
    return this.#problems.filter((problem) => {
      const keys = keysOf(problem.path).join(".");
      return keys === place || (isBelow && keys.startsWith(`${place}.`));
    });
  }
}

function keepFocus(before) {
  const after = document.getElementById(before.id);
  if (!after || after === before) return;
  after.focus({ preventScroll: true });
  if (!("selectionStart" in after)) return;
  after.value = before.value;
  after.setSelectionRange(before.selectionStart, before.selectionEnd);
}

const idOf = (path) => `spec-${path.join("-")}`;
const keysOf = (path) => (path ?? "").replace(/\[(\d+)\]/g, ".$1").split(".").filter(Boolean);

// A value of a field's text: undefined for none, numbers as such, otherwise the text, which the service then refuses.
function valueOf(text, kind) {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  if (kind === "text") return text;
  if (kind === "number") return NUMBER.test(trimmed) ? Number(trimmed) : trimmed;
  try {
    return parse(trimmed);
  } catch {
    return trimmed;
  }
}

function nameOf(path, isRequired) {
  const name = document.createElement("span");
  const code = document.createElement("code");
  code.textContent = path.at(-1);
  name.append(code);
  if (isRequired) {
    const mark = document.createElement("span");
    mark.className = "required";
    mark.textContent = " required";
    name.append(mark);
  }
  return name;
}

function summaryOf(value) {
  if (value === undefined) return null;
  const words = document.createElement("span");
  words.className = "spec-summary";
  words.textContent = JSON.stringify(value).replace(/"/g, "").replace(/,/g, ", ").replace(/:/g, ": ").replace(/^\{|\}$/g, "");
  return words;
}

function selectOf(id, options, chosen) {
  const select = document.createElement("select");
  select.id = id;
  select.className = "input";
  for (const [value, words] of options) select.append(new Option(words, value, false, value === chosen));
  return select;
}

function fieldOf(id, name, input, description, problems) {
  const field = document.createElement("div");
  field.className = "field";
  const label = document.createElement("label");
  label.htmlFor = id;
  label.append(name);
  field.append(label, input);
  if (description) {
    const help = helpOf(description);
    help.id = `${id}-help`;
    input.setAttribute("aria-describedby", help.id);
    field.append(help);
  }
  if (problems.length) {
    field.dataset.invalid = "";
    input.setAttribute("aria-invalid", "true");
    field.append(...problems.map(problemOf));
  }
  return field;
}

// A description, in which backticks mark code.
function helpOf(description) {
  const help = document.createElement("p");
  help.className = "help";
  for (const [place, text] of description.replace(/\s+/g, " ").split("`").entries()) {
    const part = document.createElement(place % 2 ? "code" : "span");
    part.textContent = text;
    help.append(part);
  }
  return help;
}

function problemOf(problem) {
  const words = document.createElement("p");
  words.className = "problem";
  words.textContent = `${problem.rule}${problem.remedy ? `; ${problem.remedy}` : ""}`;
  return words;
}
