// A JSON schema's parts as a form needs them: references resolved, "or null" left out, choices by name.

// A schema without references and alternatives of null; `choices` if there are still several.
export function resolve(schema, root) {
  let resolved = schema;
  while (resolved.$ref) {
    const { $ref, ...own } = resolved;
    const target = $ref.split("/").slice(1).reduce((part, key) => part[key], root);
    resolved = { ...target, ...own };
  }
  const alternatives = resolved.oneOf ?? resolved.anyOf;
  if (!alternatives) return resolved;
  const { oneOf, anyOf, ...own } = resolved;
  const others = alternatives.filter((alternative) => alternative.type !== "null");
  if (others.length === 1) return { ...resolve(others[0], root), ...own };
  return { ...own, choices: others.map((alternative) => choice(resolve(alternative, root), resolved.discriminator, root)) };
}

// `key` is the discriminator's property, whose constant names the choice; null where the keys of a value decide.
function choice(schema, discriminator, root) {
  const key = discriminator?.propertyName ?? null;
  if (key) {
    const property = resolve(schema.properties[key], root);
    return { schema, key, name: String(property.const ?? property.enum?.[0] ?? property.default) };
  }
  if ("const" in schema) return { schema, key, name: String(schema.const) };
  return { schema, key, name: wordsOf(schema.title ?? schema.type ?? "value") };
}

// `language model` of `LanguageModelSpec`.
const wordsOf = (title) => title.replace(/Spec$/, "").replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();

// Place of the choice that a value is of: by its discriminator, its type, or the keys it has.
export function indexOfChoice(choices, value) {
  const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
  const fits = choices.map(({ schema, key, name }) => {
    if (!isObject) return schema.const === value || (!("const" in schema) && typeName(schema) === typeOf(value)) ? 1 : -1;
    if (!schema.properties) return -1;
    if (key) return String(value[key] ?? schema.properties[key].default) === name ? 1 : -1;
    return Object.keys(value).filter((property) => property in schema.properties).length;
  });
  const best = Math.max(...fits);
  return best < 0 ? -1 : fits.indexOf(best);
}

const typeName = (schema) => (schema.type === "integer" ? "number" : schema.type ?? (schema.enum ? typeof schema.enum[0] : "object"));
const typeOf = (value) => (Array.isArray(value) ? "array" : typeof value);

// How a schema is edited: a group of fields, a choice, a select, a text, a number, or any value as YAML.
export function kindOf(schema) {
  if (schema.choices) return schema.choices.some(({ schema: part }) => part.properties) ? "choice" : "yaml";
  if (schema.properties) return "group";
  if (schema.enum) return "enum";
  if (schema.type === "boolean") return "boolean";
  if (schema.type === "integer" || schema.type === "number") return "number";
  if (schema.type === "string") return "text";
  return "yaml";
}

// The default in a few words; "" without one or for a large one.
export function defaultText(schema) {
  if (!("default" in schema) || schema.default === null) return "";
  const text = typeof schema.default === "string" ? schema.default : JSON.stringify(schema.default);
  return text.length <= 40 ? text : "";
}
