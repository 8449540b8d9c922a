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
await check("responses: stored and continued", async () => {
  const first = await client.responses.create({model: MODEL, input: "Hello", max_output_tokens: 8});
  assert((await client.responses.retrieve(first.id)).id === first.id);
  const again = await client.responses.create({model: MODEL, input: "And then?", max_output_tokens: 8, previous_response_id: first.id});
  assert((await client.responses.inputItems.list(again.id)).data.length === 3);
});
await check("responses: in the background, polled, resumed and cancelled", async () => {
  let response = await client.responses.create({model: MODEL, input: "Hello", max_output_tokens: 8, background: true});
  for (let tries = 0; tries < 600 && ["queued", "in_progress"].includes(response.status); tries++) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    response = await client.responses.retrieve(response.id);
  }
  assert(["completed", "incomplete"].includes(response.status));
  const numbers = [];
  let id = "";
  for await (const event of await client.responses.create({model: MODEL, input: "Hello", max_output_tokens: 8, background: true, stream: true})) {
    numbers.push(event.sequence_number);
    id = id || event.response.id;
    if (numbers.length === 2) break;
  }
  for await (const event of await client.responses.retrieve(id, {stream: true, starting_after: 1})) numbers.push(event.sequence_number);
  assert(numbers.every((number, index) => number === index) && numbers.length > 3);
  response = await client.responses.create({model: MODEL, input: "Hello", max_output_tokens: 500, background: true});
  assert(["cancelled", "completed", "incomplete"].includes((await client.responses.cancel(response.id)).status));
});
await check("conversations: continued by responses, changed and deleted", async () => {
  const asked = {type: "message", role: "user", content: "Hello"};
  const made = await client.conversations.create({items: [asked], metadata: {topic: "weather"}});
  const response = await client.responses.create({model: MODEL, input: "And then?", max_output_tokens: 8, conversation: made.id});
  assert(response.conversation.id === made.id);
  const items = [];
  for await (const item of client.conversations.items.list(made.id, {order: "asc", limit: 2})) items.push(item);
  assert(items.map((item) => item.role).join() === "user,user,assistant");
  await client.conversations.items.delete(items[0].id, {conversation_id: made.id});
  const [added] = (await client.conversations.items.create(made.id, {items: [asked]})).data;
  assert((await client.conversations.items.retrieve(added.id, {conversation_id: made.id})).id === added.id);
  assert((await client.conversations.update(made.id, {metadata: {a: "b"}})).metadata.a === "b");
  assert((await client.conversations.delete(made.id)).deleted);
});
await check("chat: stored, listed, changed and deleted", async () => {
  const answer = await client.chat.completions.create({model: MODEL, messages, max_tokens: 8, store: true, metadata: {topic: "weather"}});
  assert((await client.chat.completions.retrieve(answer.id)).choices[0].message.content === answer.choices[0].message.content);
  const ids = [];
  for await (const chat of client.chat.completions.list({metadata: {topic: "weather"}, limit: 1})) ids.push(chat.id);
  assert(ids.includes(answer.id));
  assert((await client.chat.completions.messages.list(answer.id)).data.length === 1);
  assert((await client.chat.completions.update(answer.id, {metadata: {a: "b"}})).metadata.a === "b");
  assert((await client.chat.completions.delete(answer.id)).deleted);
});
finish(JSON.parse(readFileSync("node_modules/openai/package.json")).version);
