// The list of ended requests, what is looked for in it, and the story of one of them.

import {Refused, read} from "./api.js";
import {$, bytes, clock, count, make, micros, say} from "./dom.js";

const PHASES = [["queue", "waiting for workers"], ["route", "asking workers"], ["waiting", "in the worker's queue"], ["prefill", "until the first token"], ["transfer", "handing pages over"], ["decode", "generating"]];
const IN_ROWS = ["queue", "prefill", "transfer", "decode"];
const OUTCOMES = {finished: "✓", failed: "✕", cancelled: "–", refused: "⊘"};
const PAGE = matchMedia("(max-width: 640px)").matches ? 10 : 25;
const EVERY_MS = 2000;

let shown = [];
let shownUpTo = -1;
let isBusy = false;
let lastAt = 0;
let started = 0;
let onError = () => {};

export function start(fail) {
  onError = fail;
  $("phase-legend").append(...PHASES.map(([phase, words]) => make("li", {}, make("span", {class: `swatch phase-${phase}`}), `${phase} – ${words}`)));
  $("search").addEventListener("submit", (event) => event.preventDefault());
  $("search").addEventListener("input", (event) => event.target.id !== "follow" && searchSoon());
  $("more").addEventListener("click", () => load(shown.at(-1)?.number));
  $("story-close").addEventListener("click", () => $("story").close());
  $("story").addEventListener("click", (event) => event.target === $("story") && $("story").close());
  $("story").addEventListener("close", () => {
    if (location.hash.startsWith("#request=")) history.replaceState(null, "", "#requests");
  });
  addEventListener("hashchange", openAddressed);
}

// Numbers begin anew with each gateway, so nothing of another one may stay.
export function reset(models) {
  asked += 1;
  shown = [];
  shownUpTo = -1;
  lastAt = -EVERY_MS;
  $("list").tBodies[0].replaceChildren();
  $("model").replaceChildren(make("option", {value: ""}, "any"), ...models.map((name) => make("option", {}, name)));
}

// Called with every update: reads the list again when there is something new, at most every two seconds.
export function show(state) {
  started = state.gateway.started_unix_s;
  showOpen(state.open, state.gateway.targets.ttft_s);
  const isWanted = shownUpTo < 0 || ($("follow").checked && state.last_number !== shownUpTo && shown.length <= PAGE);
  if (isWanted && !isBusy && performance.now() - lastAt > EVERY_MS) load(null, state.last_number);
}

const OPEN_PHASES = {queue: "waiting for workers", prefill: "computing the prompt", transfer: "handing pages over", decode: "generating"};

// Those that wait or run; one whose first token is later than the target is late already.
function showOpen({answers, total}, targetS) {
  $("open-box").hidden = !total;
  say($("open-note"), `${count(total)} ${total === 1 ? "answer waits or runs" : "answers wait or run"} now${total > answers.length ? `; the ${count(answers.length)} that came first` : ""}`);
  $("open").tBodies[0].replaceChildren(...answers.map((answer) => {
    const isLate = targetS !== null && (answer.first_token_us ?? answer.since_us) > targetS * 1e6;
    const workers = answer.workers.split(" ").filter(Boolean).join(" → ");
    const tries = answer.attempts > 1 ? `${answer.attempts} attempts` : "";
    return make("tr", {"data-late": isLate},
      make("td", {"data-label": "Request", class: "name"}, answer.request_id, make("small", {}, workers)),
      make("td", {"data-label": "Model and class"}, answer.model, make("small", {}, [answer.service_class, answer.tenant].filter(Boolean).join(" · "))),
      make("td", {"data-label": "Now"}, make("span", {class: `swatch phase-${answer.phase}`}), OPEN_PHASES[answer.phase], make("small", {}, [isLate && "◷ late", tries].filter(Boolean).join(", "))),
      make("td", {"data-label": "Since", class: "number"}, micros(answer.since_us)),
      make("td", {"data-label": "TTFT", class: "number"}, micros(answer.first_token_us)),
      make("td", {"data-label": "Tokens", class: "number"}, `${count(answer.prompt_tokens)} → ${count(answer.tokens)} of ${count(answer.max_tokens)}`));
  }));
}

export function openAddressed() {
  const match = /^#request=(.+)$/.exec(location.hash);
  if (match) openStory(decodeURIComponent(match[1]));
}

// One that has just ended may not be remembered yet, so it is asked for a few times.
async function openStory(name) {
  say($("story-title"), "Looking it up");
  $("story-body").replaceChildren();
  if (!$("story").open) $("story").showModal();
  for (let left = 4; ; left -= 1) {
    try {
      return tell(await read(`dashboard/requests/${encodeURIComponent(name)}`));
    } catch (error) {
      if (error instanceof Refused && left) {
        await new Promise((resume) => setTimeout(resume, 300));
        continue;
      }
      say($("story-title"), "Not here");
      $("story-body").replaceChildren(make("p", {}, error.message));
      return onError(error);
    }
  }
}

let timer = 0;
function searchSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => load(), 200);
}

let asked = 0;
async function load(before = null, upTo = shownUpTo) {
  const mine = ++asked;
  isBusy = true;
  lastAt = performance.now();
  const query = new URLSearchParams({limit: PAGE});
  for (const [name, id] of [["q", "q"], ["outcome", "outcome"], ["model", "model"], ["service_class", "class"]]) {
    if ($(id).value) query.set(name, $(id).value);
  }
  if (before) query.set("before", before);
  try {
    const found = await read(`dashboard/requests?${query}`);
    if (mine !== asked) return;
    shown = before ? [...shown, ...found.requests] : found.requests;
    shownUpTo = upTo;
    render(found, query.size > 1);
  } catch (error) {
    onError(error);
  } finally {
    isBusy = false;
  }
}

function render(found, isFiltered) {
  const body = $("list").tBodies[0];
  const focused = document.activeElement?.dataset?.number;
  const known = new Map([...body.rows].map((row) => [row.dataset.number, row]));
  body.replaceChildren(...shown.map((request) => known.get(String(request.number)) ?? listed(request)));
  if (focused) body.querySelector(`button[data-number="${CSS.escape(focused)}"]`)?.focus();
  $("more").hidden = !found.has_more;
  say($("list-note"), shown.length ? `${count(shown.length)} shown, ${count(found.kept)} remembered. A request that has ended is here; one that runs is not yet.`
    : isFiltered && found.kept ? `None of the ${count(found.kept)} remembered requests fits.`
    : `No request has ended at this gateway since it started at ${clock(started * 1e3)}. Those that other gateways served are on their pages.`);
}

function listed(request) {
  const name = make("button", {type: "button", class: "link", "data-number": request.number, onclick: () => open(request)}, request.request_id || "(no id)");
  const workers = request.workers.split(" ").filter(Boolean).join(" → ");
  const whose = [request.model || "–", [request.operation, request.service_class, request.tenant].filter(Boolean).join(" · ")];
  const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : "";
  return make("tr", {"data-number": request.number},
    make("td", {"data-label": "Ended"}, clock(request.ended_unix_ms)),
    make("td", {"data-label": "Request", class: "name"}, name, make("small", {}, workers)),
    make("td", {"data-label": "Model and class"}, whose[0], make("small", {}, whose[1])),
    make("td", {"data-label": "Outcome"}, outcome(request)),
    make("td", {"data-label": "Tokens", class: "number"}, `${count(request.prompt_tokens)}${cached} → ${count(request.generated_tokens)}`),
    make("td", {"data-label": "TTFT", class: "number"}, micros(request.ttft_us)),
    make("td", {"data-label": "Total", class: "number"}, micros(request.total_us)),
    make("td", {"data-label": "Phases", class: "phases"}, phases(request)));
}

function open(request) {
  history.replaceState(null, "", `#request=@${request.number}`);
  openStory(`@${request.number}`);
}

function outcome(request) {
  const words = request.outcome === "finished" ? (request.is_good ? "finished" : "finished, late") : [request.outcome, request.code].filter(Boolean).join(": ");
  const tries = request.attempts > request.answers ? `${request.attempts} attempts` : "";
  const isLate = request.outcome === "finished" && !request.is_good;
  const why = [tries, request.field || request.limit].filter(Boolean).join(", ");
  return make("span", {class: "outcome", "data-outcome": isLate ? "late" : request.outcome}, `${isLate ? "◷" : OUTCOMES[request.outcome] ?? ""} ${words}`, why && make("small", {}, why));
}

function phases(request) {
  const said = IN_ROWS.filter((phase) => request[`${phase}_us`]).map((phase) => `${phase} ${micros(request[`${phase}_us`])}`).join(", ");
  const bar = make("div", {class: "bar thin", role: "img", "aria-label": said, title: said});
  for (const phase of IN_ROWS) {
    const part = make("span", {class: `phase-${phase}`});
    part.style.flexGrow = request[`${phase}_us`];
    part.hidden = !request[`${phase}_us`];
    bar.append(part);
  }
  return bar;
}

function tell({request, answers}) {
  say($("story-title"), request.request_id || "(no id)");
  const facts = [
    ["Outcome", outcome(request)],
    ["Ended", `${clock(request.ended_unix_ms)}${request.finish_reason ? ` by ${request.finish_reason}` : ""}`],
    ["Model", request.model || "–"], ["Operation", request.operation || "–"], ["Class", request.service_class || "–"], ["Tenant", request.tenant || "–"],
    ["Total", micros(request.total_us)],
  ];
  if (request.answers) facts.push(["Prompt", `${count(request.prompt_tokens)} tokens, ${count(request.cached_tokens)} cached`], ["Answer", `${count(request.generated_tokens)} tokens`]);
  if (request.ttft_us !== null) facts.push(["First token", `after ${micros(request.ttft_us)}`]);
  if (request.tpot_us !== null) facts.push(["Later tokens", `${micros(request.tpot_us)} each`]);
  if (request.field || request.rule) facts.push(["Refused for", [request.field, request.rule].filter(Boolean).join(" ")]);
  if (request.limit) facts.push(["Limit", request.limit]);
  if (request.fallback) facts.push(["Fallback", request.fallback]);
  if (request.trace_id) facts.push(["Trace", request.trace_id]);
  $("story-body").replaceChildren(
    make("dl", {class: "facts wide"}, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    ...answers.map((answer, index) => told(answer, answers.length > 1 ? ` of answer ${index + 1}` : "", request)),
    answers.length ? "" : make("p", {class: "note"}, "It was not accepted, so no worker has seen it."),
  );
}

function told(answer, whose, request) {
  const rows = answer.bars.map((bar) => {
    const drawn = make("span", {class: `phase-${bar.phase}`});
    drawn.style.left = `${(100 * bar.began_us) / (answer.ended_us || 1)}%`;
    drawn.style.width = `${(100 * (bar.ended_us - bar.began_us)) / (answer.ended_us || 1)}%`;
    const track = make("div", {class: "track", "aria-hidden": "true"}, drawn);
    if (answer.first_token_us !== null) {
      const mark = make("span", {class: "first-token"});
      mark.style.left = `${(100 * answer.first_token_us) / (answer.ended_us || 1)}%`;
      track.append(mark);
    }
    const attempt = answer.attempts.length > 1 && bar.attempt ? ` ${bar.attempt}` : "";
    for (const [began, ended] of bar.chunks) {
      const chunk = make("span", {class: "chunk"});
      chunk.style.left = `${(100 * began) / (answer.ended_us || 1)}%`;
      chunk.style.width = `${(100 * (ended - began)) / (answer.ended_us || 1)}%`;
      track.append(chunk);
    }
    return make("tr", {},
      make("th", {scope: "row"}, make("span", {class: `swatch phase-${bar.phase}`}), `${bar.phase}${attempt}`, make("small", {}, bar.worker), chunksOf(bar)),
      make("td", {class: "number"}, `+${micros(bar.began_us)}`), make("td", {class: "number"}, micros(bar.ended_us - bar.began_us)),
      make("td", {class: "number"}, micros(bar.predicted_us)),
      make("td", {class: "wide"}, track));
  });
  const head = make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "Phase"), make("th", {scope: "col", class: "number"}, "From"), make("th", {scope: "col", class: "number"}, "Took"), make("th", {scope: "col", class: "number"}, "Expected"), make("th", {scope: "col", class: "wide"}, make("span", {class: "hidden"}, "Drawn"))));
  return make("section", {},
    make("h3", {}, `Waterfall${whose}`),
    make("table", {class: "waterfall"}, head, make("tbody", {}, ...rows)),
    answer.first_token_us === null ? "" : make("p", {class: "note"}, `The line is the first token, at +${micros(answer.first_token_us)}.`),
    make("h3", {}, `Why it went there${whose}`),
    answer.attempts.length ? make("ol", {class: "attempts"}, ...answer.attempts.map((attempt) => why(attempt, request)))
      : make("p", {class: "note"}, "No worker took it."));
}

function chunksOf({chunks}) {
  if (!chunks.length) return "";
  const said = chunks.slice(0, 4).map(([began, ended, tokens]) => `${count(tokens)} tokens in ${micros(ended - began)}`).join(", ");
  return make("small", {}, `${chunks.length === 1 ? "1 chunk" : `${chunks.length} chunks`}: ${said}${chunks.length > 4 ? ", …" : ""}`);
}

function why(attempt) {
  const where = attempt.prefill ? `${attempt.prefill} → ${attempt.decode}` : attempt.decode;
  const lines = attempt.why.map((line) => make("li", {}, `${line[0].toUpperCase()}${line.slice(1)}.`));
  if (attempt.predicted_ttft_us !== null) {
    const actual = attempt.actual_ttft_us === null ? "" : ` It came after ${micros(attempt.actual_ttft_us)}.`;
    lines.push(make("li", {}, `The first token was predicted ${micros(attempt.predicted_ttft_us)} after the decision.${actual}`));
  }
  if (attempt.predicted_second_us !== null) {
    const actual = attempt.actual_second_us === null ? "" : ` It came after ${micros(attempt.actual_second_us)}.`;
    const way = attempt.predicted_exposed_us ? `, ${micros(attempt.predicted_exposed_us)} of them for the pages' way` : "";
    lines.push(make("li", {}, `The second token was predicted ${micros(attempt.predicted_second_us)} after it${way}.${actual}`));
  }
  if (attempt.bytes) lines.push(make("li", {}, `${count(attempt.pages)} ${attempt.pages === 1 ? "page" : "pages"} (${bytes(attempt.bytes)}) went over ${attempt.transport}, of which ${micros(attempt.exposed_us)} were not hidden by computing.`));
  if (attempt.failure) lines.push(make("li", {class: "trouble"}, `✕ The attempt failed: ${attempt.failure}.`));
  const parts = Object.entries(attempt.parts_us);
  const price = parts.length ? make("details", {}, make("summary", {}, "What the price was made of"), make("table", {class: "parts"}, make("tbody", {}, ...parts.map(([name, spent]) => make("tr", {}, make("th", {scope: "row"}, name), make("td", {class: "number"}, micros(spent)))), make("tr", {class: "sum"}, make("th", {scope: "row"}, "the price"), make("td", {class: "number"}, micros(attempt.price_us)))))) : "";
  return make("li", {}, make("strong", {}, where), make("ul", {}, ...lines), price);
}
