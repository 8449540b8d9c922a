// The workers: gateway, then prefill, then decode, each with its pages, its queue and its speed.

import {$, clock, count, make, rate, say, time} from "./dom.js";

const PAGES = [["used", "by requests now"], ["reserved", "for a transfer in flight"], ["cached", "content kept until somebody needs the room"], ["free", "nothing in them"]];
const STATES = {ready: "●", starting: "◌", draining: "◐", lost: "✕", left_out: "⊘"};
const TURNS = {awake: "●", switching: "◌", asleep: "◐", on_disk: "○"};
const CIRCUITS = {open: "is kept from work", half_open: "is kept from work, and tried", suspected: "should get no work, and does, since no more of its role can be spared"};
const cards = new Map();
const columns = {};

export function start() {
  $("page-legend").append(...PAGES.map(([state, words]) => make("li", {}, make("span", {class: `swatch page-${state}`}), `${state} – ${words}`)));
  const gateway = make("div", {class: "panel node"}, make("h3", {}, "Gateway"), make("p", {class: "id"}), make("dl", {class: "facts"}));
  columns.gateway = gateway;
  const [prefill, decode] = [["prefill", "Prefill workers"], ["decode", "Decode workers"]].map(([role, title]) => {
    columns[role] = {count: make("span", {class: "when"}), list: make("ul", {class: "workers", "aria-label": title}), empty: make("p", {class: "note"})};
    return make("div", {class: "column"}, make("h3", {}, title, " ", columns[role].count), columns[role].list, columns[role].empty);
  });
  $("topology").append(gateway, arrow("prompts"), prefill, arrow("KV pages"), decode);
}

export function show(state) {
  const facts = [["Running", count(state.requests.running)], ["Queued", count(state.requests.queued)], ["Routing", state.gateway.routing]];
  say(columns.gateway.querySelector(".id"), state.gateway.id);
  setFacts(columns.gateway.querySelector("dl"), facts);
  showTroubles(state.troubles);
  showBottlenecks(state.bottlenecks);
  showTurns(state.turns);
  showDecisions(state.decisions);
  const seen = new Set();
  for (const role of ["prefill", "decode"]) {
    const workers = state.workers.filter((worker) => worker.role === role);
    const numReady = workers.filter((worker) => worker.state === "ready").length;
    say(columns[role].count, workers.length ? `${numReady} of ${workers.length} ready` : "");
    say(columns[role].empty, workers.length ? "" : role === "prefill"
      ? "None is registered: decode workers compute prompts themselves."
      : "None is registered: requests are refused until one comes.");
    for (const worker of workers) {
      const name = `${role} ${worker.id}`;
      seen.add(name);
      if (!cards.has(name)) {
        cards.set(name, new Card(worker));
        columns[role].list.append(cards.get(name).element);
      }
      cards.get(name).update(worker);
    }
  }
  for (const [name, card] of cards) {
    if (!seen.has(name)) {
      card.element.remove();
      cards.delete(name);
    }
  }
}

function showTroubles(troubles) {
  const list = $("troubles");
  list.hidden = troubles.length === 0;
  if (list.children.length !== troubles.length) list.replaceChildren(...troubles.map(() => make("li", {}, make("p", {class: "trouble"}), make("p", {class: "note"}))));
  troubles.forEach((trouble, index) => {
    say(list.children[index].firstChild, `⚠ ${trouble.kind} ${trouble.subject}: ${trouble.cause}`);
    say(list.children[index].lastChild, `${trouble.remedy} (since ${new Date(trouble.since_unix_s * 1000).toLocaleString()})`);
  });
}

// What is full and what more workers would bring: one sentence for each model that is held back.
function showBottlenecks(bottlenecks) {
  const list = $("bottlenecks");
  list.hidden = bottlenecks.length === 0;
  if (list.children.length !== bottlenecks.length) list.replaceChildren(...bottlenecks.map(() => make("li", {}, make("p", {class: "trouble"}), make("p", {class: "note"}))));
  bottlenecks.forEach((one, index) => {
    const [what, ...gains] = one.said.split("; ");
    say(list.children[index].firstChild, `⧗ ${one.model} is held back: ${what}`);
    say(list.children[index].lastChild, `${gains.join("; ") || "more workers would bring nothing"} (since ${new Date(one.since_unix_s * 1000).toLocaleString()})`);
  });
}

// Models that share workers: how near each is to being served, which workers have it, and what a switch takes.
function showTurns({models, groups, switch_s: times}) {
  const names = Object.keys(models);
  $("turns-box").hidden = names.length === 0;
  const list = $("turns");
  if (list.children.length !== names.length) list.replaceChildren(...names.map(() => make("li", {}, make("p"), make("p", {class: "note"}))));
  names.forEach((name, index) => {
    const at = groups.filter((group) => group.model === name).map((group) => `${group.group} ${group.state} for ${time(group.for_s)}`);
    say(list.children[index].firstChild, `${TURNS[models[name]] ?? "?"} ${name}: ${models[name].replace("_", " ")}`);
    say(list.children[index].lastChild, at.join(", "));
  });
  const taken = [["asleep", "memory"], ["disk", "disk"]].filter(([where]) => where in times).map(([where, words]) => `${time(times[where])} from ${words}`);
  say($("turns-note"), taken.length ? `A switch takes ${taken.join(" and ")}.` : "No switch was measured yet.");
}

// The autoscaler's last decisions, each with its reason.
function showDecisions(decisions) {
  $("decisions-box").hidden = decisions.length === 0;
  const list = $("decisions");
  if (list.children.length !== decisions.length) list.replaceChildren(...decisions.map(() => make("li", {}, make("p"), make("p", {class: "note"}))));
  decisions.forEach((decision, index) => {
    say(list.children[index].firstChild, `${clock(decision.at_unix_s * 1000)} ${decision.done}`);
    say(list.children[index].lastChild, decision.reason);
  });
}

class Card {
  constructor(worker) {
    this.state = make("span", {class: "state"});
    this.bar = make("div", {class: "bar", role: "img"}, ...PAGES.map(([state]) => make("span", {class: `page-${state}`})));
    this.pages = make("p", {class: "pages"});
    this.facts = make("dl", {class: "facts"});
    this.trouble = make("p", {class: "trouble"});
    this.element = make("li", {class: "panel worker"}, make("div", {class: "title-row"}, make("h4", {}, worker.id), this.state), this.bar, this.pages, this.facts, this.trouble);
  }

  update(worker) {
    const {pages} = worker;
    say(this.state, `${STATES[worker.state] ?? "?"} ${worker.state}`);
    this.state.dataset.state = worker.state;
    PAGES.forEach(([state], index) => {
      this.bar.children[index].style.flexGrow = pages[state];
      this.bar.children[index].hidden = !pages[state];
    });
    const words = PAGES.filter(([state]) => pages[state]).map(([state]) => `${count(pages[state])} ${state}`).join(", ");
    this.bar.setAttribute("aria-label", `Pages: ${words || "none"}`);
    say(this.pages, `${words || "no pages"} of ${count(pages.total)} pages`);
    setFacts(this.facts, [
      ...(worker.engine ? [["Engine", worker.engine]] : []),
      ...(worker.pool ? [["Pool", worker.pool]] : []),
      ...(worker.region ? [["Region", worker.region]] : []),
      ["Running", count(worker.running)],
      ["Waiting", worker.waiting_tokens ? `${count(worker.waiting)} (${count(worker.waiting_tokens)} tokens)` : count(worker.waiting)],
      ...speeds(worker),
      ...(worker.preempted ? [["Preempted", count(worker.preempted)]] : []),
      ...counted(worker.counts),
    ]);
    say(this.trouble, troubles(worker).join("; "));
    this.element.classList.toggle("is-troubled", troubles(worker).length > 0 || worker.state !== "ready");
  }
}

// Decode workers compute prompts too, at times; what a worker has not measured is not said.
function speeds(worker) {
  const said = [];
  if (worker.prefill_tokens_per_s !== null && worker.role === "prefill") said.push(["Prompts", `${rate(worker.prefill_tokens_per_s)} tokens/s`]);
  if (worker.step_s !== null && worker.role === "decode") said.push(["Step", time(worker.step_s)]);
  if (worker.gpu && worker.gpu.temperature_c !== null) said.push(["GPU", `${count(worker.gpu.temperature_c)} °C`]);
  return said;
}

// Acceptance of proposed tokens since the worker started, and its cached pages in the host's memory.
function counted(counts) {
  const said = [];
  if (!counts) return said;
  for (const [source, {proposed, accepted}] of Object.entries(counts.speculation)) {
    if (proposed) said.push([`Accepted (${source})`, `${Math.round(accepted / proposed * 100)} % of ${count(proposed)} tokens`]);
  }
  const tier = counts.host_tier;
  if (tier) said.push(["Host tier", `${count(tier.held)} of ${count(tier.total)} pages, ${count(tier.loaded)} came back`]);
  return said;
}

function troubles(worker) {
  const said = [];
  if (worker.left_out) said.push(`⚠ gets no work: ${worker.left_out}`);
  if (CIRCUITS[worker.circuit]) said.push(`⚠ circuit ${worker.circuit} (${CIRCUITS[worker.circuit]}): ${worker.circuit_found}`);
  if (worker.gpu && worker.gpu.state !== "ok") said.push(`⚠ GPU ${worker.gpu.state}: ${worker.gpu.reasons.join(", ")}`);
  return said;
}

function setFacts(list, facts) {
  if (list.children.length !== facts.length) list.replaceChildren(...facts.map(() => make("div", {}, make("dt"), make("dd"))));
  facts.forEach(([name, value], index) => {
    say(list.children[index].firstChild, name);
    say(list.children[index].lastChild, value);
  });
}

function arrow(words) {
  return make("p", {class: "arrow"}, make("span", {}, words), make("span", {class: "tip", "aria-hidden": "true"}));
}
