// Makes elements without markup in strings.

export function make(tag, properties = {}, ...children) {
  const { attributes = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function button(label, onClick, properties = {}) {
  const made = make("button", { type: "button", textContent: label, ...properties });
  made.addEventListener("click", onClick);
  return made;
}

export const byId = (id) => document.getElementById(id);
