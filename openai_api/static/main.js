// Puts the parts of the page together.

import { ApiError } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./elements.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Status } from "./status.js";
import { Store } from "./store.js";
import { text, translate } from "./strings.js";

translate(document);
const store = new Store(() => (byId("announcer").textContent = text.noRoom));
const settings = new Settings(store);
const chat = new Chat(store, () => sidebar.show());
const sidebar = new Sidebar(store, {
  onOpen: (conversation) => chat.open(conversation),
  onRemove: (conversation) => conversation === chat.conversation && sidebar.open(store.create()),
});
const status = new Status(store, async () => {
  try {
    await settings.findModel();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.kind === "key") settings.open();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.isBusy && !document.querySelector("dialog[open]")) chat.stop();
});
addEventListener("storage", () => {
  store.reload(sidebar.current);
  sidebar.show();
});
sidebar.open(store.matching("")[0] ?? store.create());
byId("prompt").focus();
status.watch();
