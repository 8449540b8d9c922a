// gRPC's client for JavaScript, with the .proto as it is; examples/chat_grpc.mjs is the short form.
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import {readFileSync} from "node:fs";
import {GRPC, KEY, MODEL, assert, check, finish} from "./checks.mjs";

const definition = loader.loadSync(process.env.COMPAT_PROTO, {keepCase: true, enums: String});
const {Inference} = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new Inference(GRPC, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${KEY}`);
const messages = [{role: "user", content: "How is the weather?"}];
const parameters = JSON.stringify({type: "object", properties: {city: {type: "string", enum: ["Rome", "Oslo"]}}, required: ["city"]});
const sampling = {max_tokens: 8};

const call = (method, request) =>
  new Promise((resolve, reject) => client[method](request, metadata, (error, answer) => (error ? reject(error) : resolve(answer))));

async function streamed(request) {
  const parts = [];
  for await (const part of client.Chat(request, metadata)) parts.push(part);
  return parts;
}

await check("models", async () => assert((await call("ListModels", {})).models.some((model) => model.name === MODEL)));
await check("a text", async () => assert((await call("GenerateUnary", {text: "Once", sampling})).token_ids.length));
await check("a conversation", async () => {
  const answer = await call("ChatUnary", {messages, sampling});
  assert(answer.choices[0].delta.role === "assistant");
});
await check("a conversation, streamed", async () => {
  const parts = await streamed({messages, sampling});
  assert(["FINISH_REASON_STOP", "FINISH_REASON_LENGTH"].includes(parts.at(-1).finish_reason));
});
await check("a function that must be called", async () => {
  const tools = [{name: "weather", parameters}];
  const answer = await call("ChatUnary", {messages, tools, tool_choice: {mode: "MODE_REQUIRED"}, sampling: {max_tokens: 200}});
  assert("city" in JSON.parse(answer.choices[0].delta.tool_calls[0].arguments));
});
await check("several answers", async () => assert((await call("ChatUnary", {messages, sampling, num_choices: 2})).choices.length === 2));
await check("a regular expression", async () => {
  const answer = await call("ChatUnary", {messages, sampling, response_format: {regex: "[0-9]{3}"}});
  assert(/^[0-9]{3}$/.test(answer.choices[0].delta.content), answer.choices[0].delta.content);
});
await check("mistakes are INVALID_ARGUMENT", async () => {
  try {
    await call("ChatUnary", {messages: []});
  } catch (error) {
    assert(error.code === grpc.status.INVALID_ARGUMENT, error.message);
    return;
  }
  throw new Error("it was answered");
});
client.close();
finish(JSON.parse(readFileSync("node_modules/@grpc/grpc-js/package.json")).version);
