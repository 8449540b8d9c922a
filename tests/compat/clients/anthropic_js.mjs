// Anthropic's client for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
import {readFileSync} from "node:fs";
import {KEY, MODEL, URL, assert, check, finish} from "./checks.mjs";

const client = new Anthropic({baseURL: URL, apiKey: KEY});
const messages = [{role: "user", content: "How is the weather?"}];
const input_schema = {type: "object", properties: {city: {type: "string", enum: ["Rome", "Oslo"]}}, required: ["city"]};
const tools = [{name: "weather", input_schema}];

await check("models", async () => assert((await client.models.list()).data.some((model) => model.id === MODEL)));
await check("message", async () => {
  const answer = await client.messages.create({model: MODEL, max_tokens: 8, messages});
  assert(answer.role === "assistant" && answer.stop_reason);
});
await check("message, streamed", async () => {
  const stream = client.messages.stream({model: MODEL, max_tokens: 8, messages});
  let text = "";
  stream.on("text", (part) => (text += part));
  const final = await stream.finalMessage();
  assert(text === final.content.map((block) => block.text ?? "").join(""));
});
await check("a tool that must be called", async () => {
  const answer = await client.messages.create({model: MODEL, max_tokens: 200, messages, tools, tool_choice: {type: "any", disable_parallel_tool_use: true}});
  assert(answer.stop_reason === "tool_use" && "city" in answer.content.find((block) => block.type === "tool_use").input);
});
await check("tokens are counted", async () => assert((await client.messages.countTokens({model: MODEL, messages})).input_tokens > 1));
await check("errors are the client's own", async () => {
  try {
    await client.messages.create({model: "no", max_tokens: 8, messages});
  } catch (error) {
    assert(error instanceof Anthropic.NotFoundError, error.message);
    return;
  }
  throw new Error("it was answered");
});
finish(JSON.parse(readFileSync("node_modules/@anthropic-ai/sdk/package.json")).version);
