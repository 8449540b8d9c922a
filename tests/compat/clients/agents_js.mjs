// OpenAI's Agents SDK for JavaScript, as its documentation uses it: by /v1/responses, and by chats.
import {readFileSync} from "node:fs";
import {KEY, MODEL, URL, assert, check, finish} from "./checks.mjs";

process.env.OPENAI_BASE_URL = `${URL}/v1`;
process.env.OPENAI_API_KEY = KEY;
process.env.OPENAI_AGENTS_DISABLE_TRACING = "1";
const {Agent, run, setOpenAIAPI, tool} = await import("@openai/agents");
const {z} = await import("zod");

// The demo model would call without end where it must call: parallelToolCalls is off where a call is required.
const cities = z.object({city: z.enum(["Rome", "Oslo"])});
let called = "";
const weather = tool({
  name: "weather",
  description: "Tells the weather of a city.",
  parameters: cities,
  execute: async ({city}) => { called = city; return "sunny"; },
});

function agent(members = {}, settings = {}) {
  return new Agent({name: "Helper", instructions: "Be brief.", model: MODEL, modelSettings: {temperature: 0, ...settings}, ...members});
}

for (const way of ["responses", "chat_completions"]) {
  setOpenAIAPI(way);
  await check(`${way}: nothing set`, async () => {
    assert((await run(new Agent({name: "Helper", model: MODEL}), "Hello")).rawResponses.length === 1);
  });
  await check(`${way}: an answer, streamed`, async () => {
    const result = await run(agent(), "Hello", {stream: true});
    let events = 0;
    for await (const event of result) events += event.type === "raw_model_stream_event";
    await result.completed;
    assert(events > 0);
  });
  await check(`${way}: a tool that must be called, and the answer after it`, async () => {
    called = "";
    await run(agent({tools: [weather]}, {toolChoice: "required", parallelToolCalls: false}), "The weather in Rome?");
    assert(["Rome", "Oslo"].includes(called));
  });
  await check(`${way}: an output with a type`, async () => {
    const result = await run(agent({outputType: cities}), "Which?");
    assert(["Rome", "Oslo"].includes(result.finalOutput.city));
  });
  await check(`${way}: an agent hands over to another`, async () => {
    const other = new Agent({name: "Other", model: MODEL, modelSettings: {temperature: 0}});
    const result = await run(agent({handoffs: [other]}, {toolChoice: "required", parallelToolCalls: false}), "Hello");
    assert(result.lastAgent.name === "Other");
  });
}

finish(JSON.parse(readFileSync("node_modules/@openai/agents/package.json")).version);
