// OpenAI's client for JavaScript.
import OpenAI from "openai";
import {readFileSync} from "node:fs";
import {KEY, MODEL, URL, assert, check, finish} from "./checks.mjs";

const client = new OpenAI({baseURL: `${URL}/v1`, apiKey: KEY});
const messages = [{role: "user", content: "How is the weather?"}];
const parameters = {type: "object", properties: {city: {type: "string", enum: ["Rome", "Oslo"]}}, required: ["city"]};

await check("models", async () => assert((await client.models.list()).data.some((model) => model.id === MODEL)));
await check("chat", async () => {
  const answer = await client.chat.completions.create({model: MODEL, messages, max_tokens: 8});
  assert(answer.choices[0].message.role === "assistant");
});
await check("chat, streamed", async () => {
  let parts = 0;
  for await (const part of await client.chat.completions.create({model: MODEL, messages, max_tokens: 8, stream: true})) parts += part.choices.length;
  assert(parts > 1);
});
await check("a tool that must be called", async () => {
  const tools = [{type: "function", function: {name: "weather", parameters}}];
  const answer = await client.chat.completions.create({model: MODEL, messages, tools, tool_choice: "required", max_tokens: 200});
  assert("city" in JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
});
await check("responses", async () => {
  const answer = await client.responses.create({model: MODEL, input: "Hello", max_output_tokens: 8});
  assert(["completed", "incomplete"].includes(answer.status));
});
await check("responses, streamed", async () => {
  const kinds = [];
  for await (const event of await client.responses.create({model: MODEL, input: "Hello", max_output_tokens: 8, stream: true})) kinds.push(event.type);
  assert(kinds[0] === "response.created");
});
finish(JSON.parse(readFileSync("node_modules/openai/package.json")).version);
