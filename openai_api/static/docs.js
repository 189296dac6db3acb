// Shows /openapi.json: each operation with the fields that it takes and gives, and all types.

import { byId, make } from "./elements.js";
import { KEY } from "./store.js";

const SKIPPED = ["$ref", "anyOf", "default", "description", "items", "properties", "required", "title", "type"];

// What follows the name of a limit in a schema, as short text: "minimum 1, maximum 128".
const limits = (schema) =>
  Object.entries(schema)
    .filter(([name]) => !SKIPPED.includes(name) && name !== "enum" && name !== "additionalProperties")
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
    .join(", ");

function linkTo(reference) {
  const name = reference.split("/").pop();
  return make("a", { href: `#${name}`, textContent: name });
}

// The parts of a type, to append: texts and links.
function typeOf(schema) {
  if (schema.$ref) return [linkTo(schema.$ref)];
  const event = schema.properties?.data?.contentSchema;
  if (event) return ["events of ", ...typeOf(event)];
  if (schema.anyOf) return schema.anyOf.flatMap((each, i) => (i ? [" | ", ...typeOf(each)] : typeOf(each)));
  const more = limits(schema);
  const noted = more ? [` (${more})`] : [];
  if (schema.enum) return [schema.enum.map((each) => JSON.stringify(each)).join(" | ")];
  if (schema.type === "array") return ["array of ", ...typeOf(schema.items ?? {}), ...noted];
  const values = schema.additionalProperties;
  if (values && typeof values === "object") return ["object of ", ...typeOf(values), ...noted];
  return [schema.type ?? "anything", ...noted];
}

function fieldTable(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const type = make("td", { className: "type" }, ...typeOf(field));
    const isDue = schema.required?.includes(name) ? "always" : "";
    return make("tr", {}, make("th", { scope: "row", textContent: name }), type, make("td", { textContent: isDue }));
  });
  const head = ["Field", "Type", "Present"].map((text) => make("th", { scope: "col", textContent: text }));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return make("div", { className: "table" }, table);
}

function contents(title, content = {}) {
  return Object.entries(content).map(([mediaType, { schema }]) =>
    make("p", {}, `${title} `, make("code", { textContent: mediaType }), ": ", ...typeOf(schema ?? {})));
}

function operationOf(path, method, operation) {
  const name = make("span", { className: "method", textContent: method.toUpperCase() });
  const parts = [...contents("Takes", operation.requestBody?.content)];
  for (const [status, { description, content }] of Object.entries(operation.responses)) {
    parts.push(...contents(`${status} ${description}:`, content));
  }
  const key = operation.security.length ? [make("p", { textContent: "Needs an API key." })] : [];
  const summary = make("summary", {}, name, make("code", { textContent: path }), ` ${operation.summary}`);
  return make("details", {}, summary, ...key, ...parts);
}

function typeCard(name, schema) {
  const summary = make("summary", {}, make("code", { textContent: name }), ` ${schema.description ?? ""}`);
  return make("details", { id: name }, summary, fieldTable(schema));
}

function show({ info, paths, components }) {
  byId("version").textContent = info.version;
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      byId("operations").append(operationOf(path, method, operation));
    }
  }
  byId("types").hidden = false;
  byId("types").append(...Object.entries(components.schemas).map(([name, schema]) => typeCard(name, schema)));
  openTarget();
}

// A link to a type opens it.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
  target?.scrollIntoView();
}

async function load() {
  const key = sessionStorage.getItem(KEY) ?? "";
  const response = await fetch("/openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  const body = await response.json();
  byId("access").hidden = response.ok;
  byId("failure").textContent = response.ok ? "" : body.error.message;
  if (response.ok) show(body);
}

function tryLoading() {
  load().catch((error) => { byId("failure").textContent = `The document could not be loaded: ${error.message}`; });
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  tryLoading();
});
addEventListener("hashchange", openTarget);
tryLoading();
