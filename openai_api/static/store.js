// Conversations and settings, kept in this browser; the API key until the tab is closed.

const CONVERSATIONS = "photoninfer.conversations";
const SETTINGS = "photoninfer.settings";
export const KEY = "photoninfer.key";
const ROLES = ["user", "assistant"];

export const DEFAULTS = {
  model: "", system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", stop: "",
  thinks: true, theme: "auto",
};

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

const asText = (value) => (typeof value === "string" ? value : "");

// What storage and imports may hold: anything else is dropped.
function cleanMessage(raw) {
  if (!raw || !ROLES.includes(raw.role)) return null;
  const calls = Array.isArray(raw.calls) ? raw.calls : [];
  return {
    role: raw.role,
    content: asText(raw.content),
    reasoning: asText(raw.reasoning),
    calls: calls.map((call) => ({ id: asText(call?.id), name: asText(call?.name), arguments: asText(call?.arguments) })),
    figures: asText(raw.figures),
    error: asText(raw.error),
  };
}

function clean(raw) {
  if (!raw || typeof raw !== "object" || !Array.isArray(raw.messages)) return null;
  return {
    id: asText(raw.id) || `${Date.now()}-${Math.random()}`,
    title: asText(raw.title).slice(0, 200),
    changed: Number.isFinite(raw.changed) ? raw.changed : Date.now(),
    messages: raw.messages.map(cleanMessage).filter(Boolean),
  };
}

function cleanAll(raw) {
  return (Array.isArray(raw) ? raw : []).map(clean).filter((each) => each?.messages.length);
}

function cleanSettings(raw) {
  const known = Object.entries(raw ?? {}).filter(([name, value]) => typeof value === typeof DEFAULTS[name]);
  return { ...DEFAULTS, ...Object.fromEntries(known) };
}

export class Store {
  constructor(onFull) {
    this.onFull = onFull;
    this.conversations = cleanAll(read(CONVERSATIONS, []));
    this.settings = cleanSettings(read(SETTINGS, {}));
  }

  // Takes over what another tab has written, but for the conversation that is open here.
  reload(open) {
    const others = cleanAll(read(CONVERSATIONS, [])).filter((each) => each.id !== open.id);
    this.conversations = [open, ...others];
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(KEY, value);
  }

  create() {
    const made = clean({ messages: [] });
    this.conversations.unshift(made);
    return made;
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.save();
  }

  matching(words) {
    const wanted = words.trim().toLowerCase();
    const has = (value) => value.toLowerCase().includes(wanted);
    return this.conversations
      .filter((each) => each.messages.length)
      .filter((each) => !wanted || has(each.title) || each.messages.some((message) => has(message.content)))
      .sort((a, b) => b.changed - a.changed);
  }

  touch(conversation) {
    conversation.changed = Date.now();
    this.save();
  }

  save() {
    try {
      const kept = this.conversations.filter((each) => each.messages.length);
      localStorage.setItem(CONVERSATIONS, JSON.stringify(kept));
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
    } catch {
      this.onFull();
    }
  }

  exported() {
    const kept = this.conversations.filter((each) => each.messages.length);
    return JSON.stringify({ format: "photoninfer-conversations", version: 1, conversations: kept }, null, 1);
  }

  // Adds the conversations of an export; returns how many. Throws what JSON.parse throws, or a TypeError.
  imported(content) {
    const { format, conversations } = JSON.parse(content);
    if (format !== "photoninfer-conversations" || !Array.isArray(conversations)) throw new TypeError("no export");
    const found = cleanAll(conversations.map((each) => ({ ...each, id: "" })));
    this.conversations.unshift(...found);
    this.save();
    return found.length;
  }
}
