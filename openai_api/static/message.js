// One message on the page.

import { button, make } from "./elements.js";
import { copyText, render } from "./markdown.js";
import { text } from "./strings.js";

// `actions`: edit(content) for a user's message; regenerate() for an answer; null where neither can be.
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.isLive = false;
    this.thoughts = make("div", { className: "prose" });
    this.thinking = make("details", { className: "thinking", hidden: true },
      (this.thinkingLabel = make("summary", {})), this.thoughts);
    this.body = make("div", { className: "prose body" });
    this.calls = make("div", { className: "calls" });
    this.error = make("p", { className: "error", attributes: { role: "alert" }, hidden: true });
    this.figures = make("p", { className: "figures" });
    this.tools = make("div", { className: "tools" });
    const name = message.role === "user" ? text.you : text.assistant;
    this.element = make("article", { className: message.role, attributes: { "aria-label": name } },
      make("h3", { textContent: name }), this.thinking, this.body, this.calls, this.error, this.figures, this.tools);
    this.update();
  }

  set live(isLive) {
    this.isLive = isLive;
    this.element.classList.toggle("live", isLive);
    this.element.setAttribute("aria-busy", String(isLive));
    this.update();
  }

  // At most once a frame while an answer comes.
  updateSoon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.update();
    });
  }

  update() {
    const { content, reasoning, calls, figures, error } = this.message;
    this.thinking.hidden = !reasoning;
    this.thinkingLabel.textContent = this.isLive && !content ? text.thinking : text.thought;
    if (reasoning) this.thoughts.replaceChildren(render(reasoning));
    this.body.replaceChildren(render(content));
    this.calls.replaceChildren(...calls.map(callView));
    this.figures.textContent = figures;
    this.error.hidden = !error;
    this.error.textContent = error;
    this.tools.replaceChildren(...(this.isLive ? [] : this.toolButtons()));
  }

  toolButtons() {
    const buttons = [];
    if (this.message.content) {
      const copy = button(text.copy, () => copyText(this.message.content, copy));
      buttons.push(copy);
    }
    if (this.actions.edit) buttons.push(button(text.edit, () => this.startEdit()));
    if (this.actions.regenerate) {
      buttons.push(button(this.message.error ? text.retry : text.regenerate, () => this.actions.regenerate()));
    }
    return buttons;
  }

  startEdit() {
    const area = make("textarea", { value: this.message.content, attributes: { "aria-label": text.editMessage } });
    area.rows = Math.min(12, this.message.content.split("\n").length + 1);
    const save = button(text.resend, () => this.actions.edit(area.value), { className: "primary" });
    const cancel = button(text.cancel, () => this.update());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.update();
    });
    this.body.replaceChildren(area);
    this.tools.replaceChildren(save, cancel);
    area.focus();
  }
}

function callView({ name, arguments: given }) {
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // not whole yet
  }
  return make("details", { className: "call", open: true },
    make("summary", { textContent: text.toolCall(name) }),
    make("pre", { textContent: shown, tabIndex: 0 }));
}
