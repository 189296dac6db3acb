// The server's HTTP API, as the page uses it.

import { text } from "./strings.js";

export class ApiError extends Error {
  // kind: key, lost, cut, busy, tooLong or other; seconds: to wait, for busy
  constructor(kind, message, seconds = 0) {
    super(message);
    this.kind = kind;
    this.seconds = seconds;
  }
}

const headers = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function failureOf(response) {
  const body = await response.json().catch(() => ({}));
  const { message = `HTTP ${response.status}`, code = "" } = body.error ?? {};
  if (response.status === 401 || response.status === 403) return new ApiError("key", `${text.errors.key} ${message}`);
  if (response.status === 429 || response.status === 503) {
    const seconds = Math.max(1, Math.ceil(Number(response.headers.get("retry-after")) || 5));
    return new ApiError("busy", message, seconds);
  }
  if (code === "context_length_exceeded") return new ApiError("tooLong", `${text.errors.tooLong} (${message})`);
  return new ApiError("other", message);
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("lost", text.errors.lost);
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

export async function modelNames(key) {
  const response = await request("/v1/models", { headers: headers(key) });
  return (await response.json()).data.map((model) => model.id);
}

// The body of /health, whatever its status; null where nothing answers.
export async function health() {
  try {
    return await (await fetch("/health")).json();
  } catch {
    return null;
  }
}

// Values of /metrics by name, labels included.
export async function metrics(key) {
  const response = await request("/metrics", { headers: headers(key) });
  const found = new Map();
  for (const line of (await response.text()).split("\n")) {
    const end = line.lastIndexOf(" ");
    if (end > 0 && !line.startsWith("#")) found.set(line.slice(0, end), Number(line.slice(end + 1)));
  }
  return found;
}

// Sends a chat and calls onChunk with every event. Ends when the stream has said [DONE].
export async function streamChat(body, { key, signal, onChunk }) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("lost", text.errors.lost);
    }
    if (part.done) throw new ApiError("cut", text.errors.cut);
    const events = (pending + part.value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError("other", chunk.error.message);
      onChunk(chunk);
    }
  }
}
