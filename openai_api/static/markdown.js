// Markdown of a model or a user -> elements that can't run anything.

import createPurifier from "./vendor/purify.js";
import { Marked } from "./vendor/marked.js";
import highlighter from "./vendor/highlight.js";
import { text } from "./strings.js";

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const escaped = (content) => content.replace(/[&<>]/g, (letter) => ENTITIES[letter]);

// Formulas stay as they are typed: Markdown would take their underscores and backslashes.
function formula(name, level, start, rule) {
  return {
    name,
    level,
    start: (source) => source.match(start)?.index,
    tokenizer(source) {
      const found = rule.exec(source);
      return found ? { type: name, raw: found[0], content: found[0].trim() } : undefined;
    },
    renderer: ({ content }) => `<span class="math">${escaped(content)}</span>`,
  };
}

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  renderer: { html: ({ raw }) => escaped(raw) }, // HTML is shown, not obeyed
  extensions: [
    formula("mathBlock", "block", /\$\$|\\\[/, /^(?:\$\$[^]+?\$\$|\\\[[^]+?\\\])/),
    formula("mathInline", "inline", /\$|\\\(/, /^(?:\$\$[^$]+?\$\$|\$(?! )[^$\n]+?(?<! )\$(?!\d)|\\\([^]+?\\\))/),
  ],
});

const purifier = createPurifier(window);
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.target = "_blank";
    node.rel = "noopener noreferrer";
  }
});
const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "em", "strong", "del", "code", "pre", "a", "ul", "ol", "li", "blockquote", "span",
    "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "sup", "sub"],
  ALLOWED_ATTR: ["href", "title", "class", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

export function render(source) {
  const fragment = purifier.sanitize(marked.parse(source), ALLOWED);
  for (const pre of fragment.querySelectorAll("pre")) decorate(pre);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function decorate(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  const plain = code.textContent;
  if (highlighter.getLanguage(language)) {
    const coloured = purifier.sanitize(highlighter.highlight(plain, { language }).value, ALLOWED);
    code.replaceChildren(coloured);
  }
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = text.copy;
  copy.setAttribute("aria-label", text.copyCode);
  copy.addEventListener("click", () => copyText(plain, copy));
  const bar = document.createElement("div");
  bar.className = "code-bar";
  bar.append(Object.assign(document.createElement("span"), { textContent: language }), copy);
  pre.tabIndex = 0;
  const frame = document.createElement("div");
  frame.className = "code";
  pre.replaceWith(frame);
  frame.append(bar, pre);
}

export async function copyText(content, button) {
  try {
    await navigator.clipboard.writeText(content);
  } catch {
    return; // no permission
  }
  const label = button.textContent;
  button.textContent = text.copied;
  setTimeout(() => (button.textContent = label), 1500);
}
