// The open conversation: sends, streams, stops, answers anew.

import { streamChat } from "./api.js";
import { byId, make } from "./elements.js";
import { MessageView } from "./message.js";
import { text } from "./strings.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export class Chat {
  constructor(store, onChange) {
    this.store = store;
    this.onChange = onChange; // the list of conversations may look different
    this.list = byId("messages");
    this.aborter = null;
    byId("stop").addEventListener("click", () => this.stop());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    const prompt = byId("prompt");
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    prompt.addEventListener("input", () => fit(prompt));
  }

  get isBusy() {
    return this.aborter !== null;
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.show();
  }

  show() {
    const { messages, title } = this.conversation;
    byId("title").textContent = title || text.untitled;
    document.title = title ? `${title} · PhotonInfer` : "PhotonInfer";
    this.views = messages.map((message, index) => new MessageView(message, this.actionsOf(index)));
    this.list.replaceChildren(...this.views.map((view) => view.element));
    if (!messages.length) {
      this.list.append(make("div", { className: "empty" },
        make("p", { className: "big", textContent: text.emptyTitle }),
        make("p", { textContent: text.emptyHint })));
    }
    this.list.scrollTop = this.list.scrollHeight;
  }

  actionsOf(index) {
    const { messages } = this.conversation;
    if (messages[index].role === "user") return { edit: (content) => this.resend(index, content) };
    return index === messages.length - 1 ? { regenerate: () => this.regenerate(index) } : {};
  }

  submit() {
    const prompt = byId("prompt");
    const content = prompt.value.trim();
    if (!content || this.isBusy) return;
    prompt.value = "";
    fit(prompt);
    this.conversation.messages.push(blank("user", content));
    this.conversation.title ||= content.replace(/\s+/g, " ").slice(0, 80);
    this.answer();
  }

  resend(index, content) {
    if (!content.trim() || this.isBusy) return;
    this.conversation.messages.splice(index, Infinity, blank("user", content.trim()));
    this.answer();
  }

  regenerate(index) {
    if (this.isBusy) return;
    this.conversation.messages.splice(index, Infinity);
    this.answer();
  }

  stop() {
    this.aborter?.abort();
  }

  async answer() {
    const { conversation, store } = this;
    const body = this.body();
    const message = blank("assistant", "");
    conversation.messages.push(message);
    store.touch(conversation);
    this.onChange();
    this.show();
    const view = this.views.at(-1);
    const aborter = (this.aborter = new AbortController());
    this.setBusy(view, true);
    const clock = new Clock();
    try {
      const onChunk = (chunk) => this.take(chunk, message, view, clock);
      await streamChat(body, { key: store.key, signal: aborter.signal, onChunk });
      message.figures = clock.figures();
    } catch (error) {
      message.error = aborter.signal.aborted ? text.stopped : error.message;
      if (error.kind === "busy") this.countDown(view, error);
    }
    this.aborter = null;
    this.setBusy(view, false);
    store.touch(conversation);
    this.onChange();
  }

  setBusy(view, isBusy) {
    view.live = isBusy;
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("announcer").textContent = isBusy ? text.answering : view.message.error || text.answered;
    if (!isBusy && document.activeElement === document.body) byId("prompt").focus();
  }

  take(chunk, message, view, clock) {
    clock.usage = chunk.usage ?? clock.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) clock.tick();
    message.content += content ?? "";
    message.reasoning += reasoning ?? "";
    for (const part of calls ?? []) {
      const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    clock.isCut ||= choice.finish_reason === "length";
    const isAtEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 80;
    view.updateSoon();
    if (isAtEnd) requestAnimationFrame(() => (this.list.scrollTop = this.list.scrollHeight));
  }

  countDown(view, error) {
    const end = Date.now() + error.seconds * 1000;
    const timer = setInterval(() => {
      const left = Math.ceil((end - Date.now()) / 1000);
      view.message.error = left > 0 ? text.errors.busy(left) : text.errors.busyNow;
      view.error.textContent = view.message.error;
      if (left <= 0 || !view.element.isConnected) clearInterval(timer);
    }, 250);
    view.message.error = text.errors.busy(error.seconds);
  }

  // The request, of the settings that are set.
  body() {
    const { settings } = this.store;
    const history = this.conversation.messages.filter(({ content, calls }) => content || calls.length);
    const messages = history.map(({ role, content }) => ({ role, content }));
    if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
    const body = { model: settings.model, messages };
    for (const name of NUMBERS) if (settings[name] !== "" && !Number.isNaN(Number(settings[name]))) body[name] = Number(settings[name]);
    const stop = settings.stop.split("\n").filter(Boolean);
    if (stop.length) body.stop = stop;
    if (!settings.thinks) body.chat_template_kwargs = { enable_thinking: false };
    return body;
  }
}

const blank = (role, content) => ({ role, content, reasoning: "", calls: [], figures: "", error: "" });

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 220)}px`;
}

// Times of one answer.
class Clock {
  constructor() {
    this.start = performance.now();
    this.first = this.last = null;
    this.usage = null;
    this.isCut = false;
  }

  tick() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  figures() {
    if (!this.usage || this.first === null) return "";
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.usage;
    const seconds = (this.last - this.first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : "";
    const ttft = Math.round(this.first - this.start);
    return text.figures({ ttft, rate, prompt, tokens, cached: details?.cached_tokens ?? 0, isCut: this.isCut });
  }
}
