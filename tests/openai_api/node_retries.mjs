// How often the official SDK for Node asks a server that refuses, and what it tells in the end.

import { createRequire } from "node:module";

const [, , modules, baseURL, model] = process.argv;
const { default: OpenAI } = await import(createRequire(`${modules}/`).resolve("openai"));
const client = new OpenAI({ baseURL, apiKey: "x", maxRetries: 1 });
const ask = () => client.chat.completions.create({ model, messages: [{ role: "user", content: "Hi" }] });
const { status, code, constructor } = await ask().catch((error) => error);
console.log(JSON.stringify({ status, code, kind: constructor.name }));
