// The dialog of settings; every change counts at once.

import { ApiError, modelNames } from "./api.js";
import { byId, make } from "./elements.js";
import { DEFAULTS } from "./store.js";
import { text } from "./strings.js";

const LIMITS = {
  temperature: { min: 0, max: 2, step: 0.1 },
  top_p: { min: 0, max: 1, step: 0.05 },
  top_k: { min: 0, step: 1 },
  min_p: { min: 0, max: 1, step: 0.01 },
  max_tokens: { min: 1, step: 1 },
  seed: { step: 1 },
};

export class Settings {
  constructor(store) {
    this.store = store;
    byId("open-settings").addEventListener("click", () => this.open());
    byId("reset-settings").addEventListener("click", () => {
      Object.assign(store.settings, DEFAULTS, { theme: store.settings.theme, model: store.settings.model });
      store.save();
      this.show();
    });
    byId("theme").addEventListener("click", () => {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const shown = store.settings.theme === "auto" ? (dark ? "dark" : "light") : store.settings.theme;
      store.settings.theme = shown === "dark" ? "light" : "dark";
      store.save();
      this.applyTheme();
    });
    this.applyTheme();
  }

  applyTheme() {
    document.documentElement.dataset.theme = this.store.settings.theme;
  }

  open() {
    this.show();
    byId("settings").showModal();
  }

  show() {
    byId("fields").replaceChildren(...Object.entries(text.fields).map(([name, [label, hint]]) => {
      const id = `setting-${name}`;
      const parts = [make("label", { htmlFor: id, textContent: label }), this.control(name, id)];
      if (hint) parts.push(make("small", { id: `${id}-hint`, textContent: hint }));
      if (hint) parts[1].setAttribute("aria-describedby", `${id}-hint`);
      return make("div", { className: `field ${name}` }, ...parts);
    }));
  }

  control(name, id) {
    const { store } = this;
    if (name === "key") {
      const input = make("input", { id, type: "password", value: store.key, autocomplete: "off" });
      input.addEventListener("change", async () => {
        store.key = input.value.trim();
        try {
          await this.findModel();
        } catch (error) {
          if (!(error instanceof ApiError)) throw error;
          byId(`${id}-hint`).textContent = error.message;
        }
      });
      return input;
    }
    const value = store.settings[name];
    const isLong = name === "system" || name === "stop";
    const control = name === "thinks" ? make("input", { id, type: "checkbox", checked: value })
      : name === "model" ? make("select", { id }, ...this.names.map((each) => make("option", { textContent: each })))
        : isLong ? make("textarea", { id, rows: name === "system" ? 4 : 2 })
          : make("input", { id, type: "number", ...LIMITS[name] });
    if (name !== "thinks") control.value = value;
    control.addEventListener("input", () => {
      if (name !== "thinks" && !control.checkValidity()) return;
      store.settings[name] = name === "thinks" ? control.checked : control.value;
      store.save();
      if (name === "model") this.showModel();
    });
    return control;
  }

  names = [];

  // Takes the server's model, unless one of its own is chosen.
  async findModel() {
    this.names = await modelNames(this.store.key);
    if (!this.names.includes(this.store.settings.model)) this.store.settings.model = this.names[0] ?? "";
    this.showModel();
    if (byId("settings").open) this.show();
  }

  showModel() {
    byId("model").textContent = this.store.settings.model;
  }
}
