// What the official SDK for Node makes of a server: asks for everything once, and prints it as JSON.

import { createRequire } from "node:module";

const [, , modules, baseURL, model] = process.argv;
const { resolve } = createRequire(`${modules}/`);
const { default: OpenAI } = await import(resolve("openai"));
const { makeParseableResponseFormat } = await import(resolve("openai/lib/parser"));
const client = new OpenAI({ baseURL, apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const parameters = {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
};
const schema = {
  type: "object",
  properties: { name: { type: "string" }, size: { type: "string" } },
  required: ["name", "size"],
  additionalProperties: false,
};
const found = {};

async function collect(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const plain = await client.chat.completions.create({ model, messages });
found.plain = plain.choices[0].message.content;

const options = { model, messages, stream: true, stream_options: { include_usage: true } };
const chunks = await collect(await client.chat.completions.create(options));
found.streamed = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
found.usage = [plain.usage, chunks.at(-1).usage];

const prompt = await client.completions.create({ model, prompt: "Hi" });
found.text = prompt.choices[0].text;
found.models = (await collect(await client.models.list())).map((each) => each.id);

const runner = client.chat.completions.runTools({
  model,
  messages: [{ role: "user", content: "Weather?" }],
  stream: true,
  tools: [{
    type: "function",
    function: {
      name: "get_weather", description: "Weather of a city.", parameters, parse: JSON.parse,
      function: ({ city }) => `sunny in ${city}`,
    },
  }],
});
found.tools = await runner.finalContent();

const format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
const response_format = makeParseableResponseFormat(format, JSON.parse);
const parsed = await client.chat.completions.parse({ model, messages, response_format });
found.parsed = parsed.choices[0].message.parsed;

found.response = (await client.responses.create({ model, input: "Hi" })).output_text;
const events = await collect(await client.responses.create({ model, input: "Hi", stream: true }));
found.events = [events[0].type, events.at(-1).type];
found.responseStreamed = events
  .filter((event) => event.type === "response.output_text.delta").map((event) => event.delta).join("");

const failure = (promise) => promise.then(() => null, (error) => error);
const bad = await failure(client.chat.completions.create({ model, messages, temperature: 3 }));
found.bad = [bad instanceof OpenAI.BadRequestError, bad.param, bad.requestID !== null];
const unknown = await failure(client.chat.completions.create({ model: "gpt-4", messages }));
found.unknown = [unknown instanceof OpenAI.NotFoundError, unknown.code];

console.log(JSON.stringify(found));
