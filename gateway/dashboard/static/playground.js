// Asks the public API and shows the answer as it comes, with its times by this browser's clock.

import {KeyNeeded, ask, events, read} from "./api.js";
import {$, count, make, rate, say, time} from "./dom.js";

let running = null;
let onError = () => {};

export function start(fail) {
  onError = fail;
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("ask-stop").addEventListener("click", () => running?.abort());
  $("ask-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
}

export async function setUp(api) {
  $("ask").hidden = !api.is_here;
  $("no-api").hidden = api.is_here;
  say($("no-api"), api.is_here ? "" : `This address is the operators' own and does not serve the API. The playground is on the same page at the API's port, ${api.port}.`);
  if (!api.is_here) return;
  const models = (await read("v1/models")).data.map((model) => model.id);
  $("ask-model").replaceChildren(...models.map((name) => make("option", {}, name)));
}

async function send() {
  if (running) return;
  running = new AbortController();
  const times = {sent: performance.now(), first: null, last: null, tokens: 0, reason: ""};
  $("ask-send").disabled = true;
  $("ask-stop").disabled = false;
  $("answer").hidden = false;
  $("answer").setAttribute("aria-busy", "true");
  $("answer").replaceChildren();
  say($("ask-status"), "waiting for the first token");
  figures(times);
  try {
    const [path, body] = question();
    const response = await ask(path, {method: "POST", signal: running.signal, headers: {"content-type": "application/json"}, body: JSON.stringify(body)});
    await take(response, times);
    say($("ask-status"), times.reason === "length" ? "ended by max tokens" : `ended by ${times.reason || "the server"}`);
    const name = response.headers.get("x-request-id");
    if (name) $("ask-status").append(" – ", make("a", {href: `#request=${encodeURIComponent(name)}`}, "its waterfall"));
  } catch (error) {
    say($("ask-status"), error.name === "AbortError" ? "stopped" : `✕ ${error.message}`);
    if (error instanceof KeyNeeded) onError(error);
  } finally {
    running = null;
    $("answer").setAttribute("aria-busy", "false");
    $("ask-send").disabled = false;
    $("ask-stop").disabled = true;
  }
}

function question() {
  const common = {model: $("ask-model").value, max_tokens: $("ask-tokens").valueAsNumber, temperature: $("ask-temperature").valueAsNumber, stream: true, stream_options: {include_usage: true}};
  const prompt = $("ask-prompt").value;
  if ($("ask-kind").value === "text") return ["v1/completions", {...common, prompt}];
  return ["v1/chat/completions", {...common, messages: [{role: "user", content: prompt}]}];
}

async function take(response, times) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? choice?.delta?.reasoning_content ?? choice?.text ?? "";
    if (text) {
      times.last = performance.now();
      times.first ??= times.last;
      if (!times.tokens) say($("ask-status"), "answering");
      times.tokens += 1;
      $("answer").append(text);
    }
    times.reason = choice?.finish_reason ?? times.reason;
    times.tokens = event.usage?.completion_tokens ?? times.tokens;
    figures(times);
  }
}

function figures({sent, first, last, tokens}) {
  const gaps = tokens - 1;
  const spent = (last - first) / 1e3;
  const tiles = [
    ["TTFT", time(first === null ? null : (first - sent) / 1e3)],
    ["ITL, mean", time(gaps > 0 && spent > 0 ? spent / gaps : null)],
    ["Tokens", count(tokens)],
    ["Tokens/s", rate(gaps > 0 && spent > 0 ? gaps / spent : null)],
  ];
  $("ask-figures").hidden = false;
  $("ask-figures").replaceChildren(...tiles.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
