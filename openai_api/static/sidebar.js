// The list of conversations: search, open, rename, delete, export, import.

import { button, byId, make } from "./elements.js";
import { text } from "./strings.js";

export class Sidebar {
  constructor(store, { onOpen, onRemove }) {
    this.store = store;
    this.onOpen = onOpen;
    this.onRemove = onRemove;
    this.current = null;
    byId("search").addEventListener("input", () => this.show());
    byId("new").addEventListener("click", () => this.open(store.create()));
    byId("export").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.importFile(event.target));
    byId("open-sidebar").addEventListener("click", () => this.toggle(true));
    byId("close-sidebar").addEventListener("click", () => this.toggle(false));
  }

  toggle(isShown) {
    document.body.classList.toggle("with-sidebar", isShown);
    byId(isShown ? "close-sidebar" : "open-sidebar").focus();
  }

  open(conversation) {
    this.current = conversation;
    document.body.classList.remove("with-sidebar");
    this.onOpen(conversation);
    this.show();
  }

  show() {
    const found = this.store.matching(byId("search").value);
    const items = found.map((each) => this.item(each));
    const isEmpty = !items.length && byId("search").value;
    byId("conversations").replaceChildren(...(isEmpty ? [make("li", { textContent: text.nothingFound })] : items));
  }

  item(conversation) {
    const isCurrent = conversation === this.current;
    const open = button(conversation.title || text.untitled, () => this.open(conversation), { className: "title" });
    if (isCurrent) open.setAttribute("aria-current", "true");
    const label = (what) => ({ attributes: { "aria-label": `${what}: ${conversation.title}` }, className: "icon" });
    return make("li", { className: isCurrent ? "current" : "" }, open,
      button("✎", () => this.rename(conversation, open), label(text.rename)),
      button("✕", () => this.remove(conversation), label(text.remove)));
  }

  rename(conversation, open) {
    const input = make("input", { value: conversation.title, attributes: { "aria-label": text.renameTo } });
    const finish = (isKept) => {
      if (!input.isConnected) return;
      if (isKept && input.value.trim()) conversation.title = input.value.trim().slice(0, 200);
      this.store.save();
      this.show();
      if (conversation === this.current) byId("title").textContent = conversation.title;
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") finish(false);
    });
    input.addEventListener("blur", () => finish(true));
    open.replaceWith(input);
    input.select();
  }

  remove(conversation) {
    if (!confirm(text.confirmRemove(conversation.title))) return;
    this.store.remove(conversation);
    this.onRemove(conversation);
    this.show();
  }

  exportAll() {
    const url = URL.createObjectURL(new Blob([this.store.exported()], { type: "application/json" }));
    make("a", { href: url, download: "photoninfer-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  async importFile(input) {
    const file = input.files[0];
    input.value = "";
    if (!file) return;
    let told;
    try {
      told = text.imported(this.store.imported(await file.text()));
    } catch {
      told = text.badImport;
    }
    byId("announcer").textContent = told;
    alert(told);
    this.show();
  }
}
