// The page: reads a snapshot, follows the gateway's updates, and hands them to the parts.

import {KeyNeeded, ask, events, key, read} from "./api.js";
import {Chart} from "./charts.js";
import * as cluster from "./cluster.js";
import {$, clock, count, make, rate, say, share, time} from "./dom.js";
import * as playground from "./playground.js";
import * as requests from "./requests.js";

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10000;
const percentiles = (name) => ["p50", "p90", "p99"].map((which, index) => ({name: which, column: `${name}_${which}_s`, style: `s${index + 1}`}));
const CHARTS = [
  [new Chart("Time to first token", percentiles("ttft"), time), "ttft_s"],
  [new Chart("Time per later token (ITL)", percentiles("itl"), time), "itl_s"],
  [new Chart("Tokens per second", [{name: "generated", column: "generated_per_s", style: "s1"}, {name: "prompts", column: "prompt_per_s", style: "s2"}], rate)],
  [new Chart("Prefix cache hit rate", [{name: "of prompt tokens", column: "hit_share", style: "s1"}], share, {most: 1})],
  [new Chart("Requests per second", [{name: "within targets", column: "good_per_s", style: "s1"}, {name: "finished", column: "finished_per_s", style: "s2"}, {name: "refused", column: "refused_per_s", style: "s3"}, {name: "failed", column: "failed_per_s", style: "s4"}], rate)],
  [new Chart("Running and queued", [{name: "running", column: "running", style: "s1"}, {name: "queued", column: "queued", style: "s2"}], rate)],
];

let state = null;
let whose = null;  // the gateway that all parts of the page were set up for
let leaving = null;
let isPaused = false;

start();

function start() {
  $("charts").append(...CHARTS.map(([chart]) => chart.element));
  cluster.start();
  requests.start(fail);
  playground.start(fail);
  startTheme();
  $("span").addEventListener("change", drawCharts);
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", isPaused);
    isPaused ? stop("paused") : follow();
  });
  $("door").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set($("key").value.trim());
    $("key").value = "";
    follow();
  });
  $("forget").addEventListener("click", () => {
    key.forget();
    location.reload();
  });
  // A page that nobody sees costs the gateway nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stop("asleep");
    else if (!isPaused) follow();
  });
  document.hidden ? stop("asleep") : follow();
}

function startTheme() {
  const theme = $("theme");
  theme.value = localStorage.getItem("tandem-theme") ?? "";
  const use = () => {
    document.documentElement.dataset.theme = theme.value;
    localStorage.setItem("tandem-theme", theme.value);
  };
  theme.addEventListener("change", use);
  use();
}

function stop(why) {
  leaving?.abort();
  leaving = null;
  link(why);
}

async function follow() {
  stop("connecting");
  const mine = (leaving = new AbortController());
  let retryMs = FIRST_RETRY_MS;
  while (!mine.signal.aborted) {
    try {
      await begin(mine.signal);
      const response = await ask("dashboard/events", {signal: mine.signal});
      for await (const data of events(response)) {
        retryMs = FIRST_RETRY_MS;
        link("live");
        take(JSON.parse(data));
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof KeyNeeded) return fail(error);
      say($("whose"), error instanceof TypeError ? "The gateway cannot be reached." : error.message);
    }
    link("connection lost, trying again");
    await new Promise((resume) => setTimeout(resume, retryMs));
    retryMs = Math.min(LAST_RETRY_MS, retryMs * 2);
  }
}

async function begin(signal) {
  const snapshot = await read("dashboard/data", {signal});
  const isOther = whose !== snapshot.gateway.id;
  state = snapshot;
  $("door").hidden = true;
  $("main").hidden = false;
  $("forget").hidden = !key.get();
  if (isOther) {
    requests.reset(state.models);
    await playground.setUp(state.api);
  }
  show();
  if (whose === null) requests.openAddressed();
  whose = state.gateway.id;
}

function take(update) {
  const {unix_s: times, ...columns} = update.series;
  delete update.series;
  Object.assign(state, update);
  if (times.length && times[0] !== state.series.unix_s.at(-1)) {
    const most = state.gateway.kept.seconds;
    state.series.unix_s.push(...times);
    for (const [name, values] of Object.entries(columns)) state.series[name].push(...values);
    for (const values of Object.values(state.series)) values.splice(0, values.length - most);
  }
  show();
}

function show() {
  const {gateway} = state;
  say($("whose"), `cluster ${gateway.cluster}, gateway ${gateway.id}, up for ${time(Math.round(state.now_unix_s - gateway.started_unix_s))}`);
  say($("scope-note"), `This is what gateway ${gateway.id} knows: all workers of the cluster, and the requests that came to this gateway. Others have pages of their own. Figures are kept for ${time(gateway.kept.seconds)}, and the last ${count(gateway.kept.max_requests)} requests, in this process only: a gateway that starts again begins with nothing.`);
  const isFresh = state.last_number === 0 && !state.requests.running;
  $("fresh").hidden = !isFresh;
  say($("fresh"), isFresh ? `This gateway started at ${clock(gateway.started_unix_s * 1e3)} and has served no request yet. What it showed before a restart is gone; figures begin with the first request.` : "");
  tiles();
  cluster.show(state);
  requests.show(state);
  drawCharts();
}

function tiles() {
  const now = (name) => state.series[name].at(-1);
  const {ttft_s: ttft, itl_s: itl} = state.gateway.targets;
  const promised = [ttft && `TTFT ${time(ttft)}`, itl && `ITL ${time(itl)}`].filter(Boolean).join(", ");
  const shown = [
    ["Tokens per second", rate(now("generated_per_s")), `prompts ${rate(now("prompt_per_s"))}`],
    ["First token, p50", time(now("ttft_p50_s")), `p99 ${time(now("ttft_p99_s"))}`],
    ["Later tokens, p50", time(now("itl_p50_s")), `p99 ${time(now("itl_p99_s"))}`],
    ["Cache hit rate", share(now("hit_share")), "of prompt tokens"],
    ["Goodput", `${rate(now("good_per_s"))} req/s`, promised ? `within ${promised}` : "no targets are set: all that finish"],
    ["Running", count(state.requests.running), `${count(state.requests.queued)} queued`],
  ];
  const list = $("tiles");
  if (!list.children.length) list.append(...shown.map(([name]) => make("div", {class: "panel"}, make("dt", {}, name), make("dd"), make("dd", {class: "more"}))));
  shown.forEach(([, value, more], index) => {
    say(list.children[index].children[1], value);
    say(list.children[index].children[2], more);
  });
}

function drawCharts() {
  if (!state) return;
  const {unix_s: times, ...columns} = state.series;
  for (const [chart, target] of CHARTS) chart.update(times, columns, Number($("span").value), target ? state.gateway.targets[target] : null);
}

// A key that is missing, wrong or not an admin's.
function fail(error) {
  if (!(error instanceof KeyNeeded)) return;
  stop("locked");
  say($("door-error"), key.get() ? error.message : "");
  key.forget();
  $("main").hidden = true;
  $("door").hidden = false;
  $("key").focus();
}

function link(words) {
  say($("link"), words);
  $("link").dataset.state = words;
}
