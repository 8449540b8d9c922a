"""Each figure moves when its event happens, labels are bounded, and `docs/metrics.md` lists exactly these figures."""

import asyncio
import contextlib
import re
import socket
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from gateway.access.keys import ApiKey, digest_of_key, new_key, toml_entry
from gateway.http.bodies import Bodies
from gateway.http.connections import Connections
from gateway.http.metrics import HttpUse
from gateway.limits import SERVICE_CLASSES
from gateway.observability.background_tasks import BackgroundTaskMetrics
from gateway.observability.bottlenecks import BottleneckWatch
from gateway.observability.metrics import MAX_TENANTS, OTHER_TENANTS, Metrics
from gateway.topology.counts import Counts, HostTierPages
from gateway.topology.presence import Presence
from gateway.topology.reports import WorkerLoad
from gateway.topology.troubles import Troubles
from protos import worker_pb2
from services.cluster.memory import MemoryUse, StorageBounds
from services.engine.cache.host_tier import HostTierStats
from services.runtime.clock import ManualClock
from services.runtime.config import load as load_config
from services.runtime.errors import InternalError, Overloaded, TransferFailed
from services.runtime.gpu_facts import GpuFacts
from services.runtime.worker_state import WorkerState
from services.scheduling.gpu_judgement import judge_gpu
from tests.waiting import HANG_LIMIT_S
from worker.config import WorkerConfig
from worker.gpu_use import GpuUse
from worker.metrics import Load as OwnLoad
from worker.metrics import WorkerMetrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ANSWER_TEXT = "hello world, naïve café end"


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer)


class Figures:
    """A page of metrics, to be asked for single values."""

    def __init__(self, text):
        self.samples = {}
        self.kinds = {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name not in self.kinds, f"{name} is on the page twice"
                self.kinds[name] = kind
            elif not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                name, _, labels = series.partition("{")
                key = name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
                assert key not in self.samples, f"{line} is on the page twice"
                self.samples[key] = float(value)

    def __getitem__(self, name):
        """The sum over all series of a name, or of those that have the labels: `figures["x", {"model": "tiny"}]`."""
        name, labels = name if isinstance(name, tuple) else (name, {})
        wanted = set(labels.items())
        return sum(value for (other, has), value in self.samples.items() if other == name and wanted <= has)

    def labels(self, name):
        """Names of the labels of a metric that has been observed, without a histogram's own."""
        names = (name, f"{name}_bucket")
        found = {label for (other, has), _ in self.samples.items() if other in names for label, _ in has}
        return found - {"le"}


async def figures_of(system):
    return Figures((await system.http.get("/metrics")).text)


def figures_now(system):
    return Figures(system.gateway.metrics.render([]).decode())


MINE = {"model": "tiny", "service_class": "normal"}


async def test_an_answer_moves_its_figures(make_system, pair, answer):
    system = await make_system()
    await system.add_pair(pair)
    before = await figures_of(system)
    assert before["tandem_requests"] == 0
    assert {name for _, has in before.samples for label, name in has if label == "service_class"} == set(
        SERVICE_CLASSES
    )
    num_tokens = (await system.complete(max_tokens=100)).json()["usage"]["completion_tokens"]
    after = await figures_of(system)
    for name in ("time_to_first_token_seconds", "queue_seconds", "request_prompt_tokens", "request_generated_tokens"):
        assert after[f"tandem_{name}_count", MINE] == 1, name
    assert after["tandem_inter_token_latency_seconds_count", MINE] == num_tokens - 1
    assert after["tandem_request_duration_seconds_count", {**MINE, "outcome": "finished"}] == 1
    for phase in ("queue", "prefill", "transfer", "decode"):
        assert after["tandem_request_phase_seconds_count", {**MINE, "phase": phase}] == 1
    total_s = after["tandem_request_duration_seconds_sum"]
    assert after["tandem_request_phase_seconds_sum"] == pytest.approx(total_s)
    assert after["tandem_time_to_first_token_seconds_sum"] >= after["tandem_queue_seconds_sum"] > 0
    assert after["tandem_inter_token_latency_seconds_sum"] < total_s
    assert after["tandem_request_generated_tokens_sum"] == num_tokens
    assert after["tandem_generated_tokens_total"] == num_tokens
    assert after["tandem_prompt_tokens_total"] == after["tandem_request_prompt_tokens_sum"] == 3
    assert after["tandem_answers_total", {"model": "tiny", "finish_reason": "stop"}] == 1
    assert after["tandem_prefix_queried_tokens_total", {"model": "tiny"}] == 3
    assert after["tandem_prefix_hit_tokens_total"] == 0
    assert after["tandem_handoff_bytes_total", {"model": "tiny", "transport": "none"}] == 64
    assert after["tandem_handoff_exposed_seconds_sum"] == pytest.approx(0.001)
    for role in ("prefill", "decode"):
        assert after["tandem_sent_attempts_total", {"role": role, "worker": f"{role}-0"}] == 1


async def test_cached_tokens_are_hits(make_system, worker_type, answer):
    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0, num_cached_tokens=2))
        num_before = figures_now(system)["tandem_generated_tokens_total"]
        attempt.tokens(0, answer[:1])
        await system.until(lambda: figures_now(system)["tandem_generated_tokens_total"] > num_before)
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(1, answer[1:4])
        attempt.finish()

    system = await make_system()
    await system.add(worker_type("decode", "decode-0", decode))
    for _ in range(2):
        assert (await system.complete(max_tokens=100)).status_code == 200
    figures = await figures_of(system)
    assert figures["tandem_prefix_queried_tokens_total"] == 6
    assert figures["tandem_prefix_hit_tokens_total"] == 4
    assert figures["tandem_inter_token_latency_seconds_count"] == 6, "tokens that came together are as many gaps"


async def test_who_waits_and_who_runs_is_counted_by_class(make_system, worker_type, answer):
    may_go = asyncio.Event()

    async def decode(attempt):
        if len(attempt.worker.attempts) > 1 and not may_go.is_set():
            attempt.refuse(Overloaded("one at a time"))
            return
        attempt.emit(worker_pb2.Admitted())
        await may_go.wait()
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, answer[:2])
        attempt.finish()

    def requests_now(service_class, state):
        labels = {"model": "tiny", "service_class": service_class, "state": state}
        return figures_now(system)["tandem_requests", labels]

    system = await make_system()
    await system.add(worker_type("decode", "decode-0", decode))
    first = asyncio.create_task(system.complete(max_tokens=10, service_class="interactive"))
    await system.until(lambda: requests_now("interactive", "running") == 1)
    others = [asyncio.create_task(system.complete(max_tokens=10, service_class="low")) for _ in range(2)]
    await system.until(lambda: requests_now("low", "queued") == 2)
    assert figures_now(system)["tandem_requests"] == 3
    may_go.set()
    for reply in await asyncio.gather(first, *others):
        assert reply.status_code == 200
    assert figures_now(system)["tandem_requests"] == 0
    assert figures_now(system)["tandem_queue_seconds_count", {"service_class": "low"}] == 2


@pytest.mark.parametrize(
    ("error", "reason"), [(InternalError("broken"), "internal_error"), (TransferFailed("torn"), "transfer_failed")]
)
async def test_retries_are_counted_by_reason(make_system, worker_type, pair, error, reason):
    errors = [error]

    async def decode(attempt):
        if errors:
            attempt.emit(worker_pb2.Admitted())
            attempt.fail(errors.pop())
        else:
            await pair.decode(attempt)

    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    await system.add(worker_type("decode", "decode-0", decode))
    assert (await system.complete(max_tokens=100)).status_code == 200
    figures = await figures_of(system)
    assert figures["tandem_failed_attempts_total"] == 1
    assert figures["tandem_retries_total", {"reason": reason}] == figures["tandem_retries_total"] == 1
    assert figures["tandem_failovers_total", {"model": "tiny"}] == 1


async def test_requests_are_counted_by_outcome(make_system, worker_type, pair):
    fate = []

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        await pair.event(attempt).wait()
        attempt.emit(worker_pb2.DecodeStarted())
        if fate == ["fails"]:
            attempt.fail(InternalError("broken"))

    system = await make_system(max_attempts=1)
    assert (await system.complete(max_tokens=5)).status_code == 503
    assert (await system.complete(max_tokens=-5)).status_code == 400
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    await system.add(worker_type("decode", "decode-0", decode))
    fate.append("fails")
    assert (await system.complete(max_tokens=5)).status_code == 500
    fate.append("is left alone")
    body = {"prompt": [5, 6, 7], "stream": True, "max_tokens": 100}
    async with system.http.stream("POST", "/v1/completions", json=body) as reply:
        await anext(reply.aiter_lines())
    name = "tandem_request_duration_seconds_count"
    await system.until(lambda: figures_now(system)[name] == 4)
    figures = await figures_of(system)
    for outcome, number in (("refused", 2), ("failed", 1), ("cancelled", 1), ("finished", 0)):
        assert figures[name, {**MINE, "outcome": outcome}] == number
    assert figures["tandem_request_phase_seconds_count", {"phase": "decode"}] == 2, "only of those that workers took"
    assert figures["tandem_refused_requests_total", {"code": "worker_unavailable"}] == 1
    assert figures["tandem_refused_requests_total", {"code": "invalid_value"}] == 1


async def test_a_worker_that_is_left_alone_shows_it(make_system, worker_type, pair):
    """The worker fails until its circuit opens, and a probe that succeeds closes it again."""
    is_broken = True

    async def decode(attempt):
        if not is_broken:
            await pair.decode(attempt)
            return
        attempt.emit(worker_pb2.Admitted())
        attempt.fail(InternalError("broken"))

    async def circuit():
        shown = await figures_of(system)
        states = [
            state for state in ("closed", "suspected", "open", "half_open") if shown[name, {**broken, "state": state}]
        ]
        (state,) = states
        return state

    name, broken = "tandem_worker_circuit", {"role": "decode", "worker": "decode-0"}
    system = await make_system(routing="least_loaded")
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    busy = worker_type("decode", "decode-1", pair.decode)
    busy.load.waiting_tokens = busy.load.running = 5  # so that the other one is asked first
    await system.add(worker_type("decode", "decode-0", decode))
    await system.add(busy)
    assert await circuit() == "closed"
    assert (await figures_of(system))[name, {"worker": "decode-1", "state": "closed"}] == 1
    async with asyncio.timeout(HANG_LIMIT_S):
        while await circuit() == "closed":
            assert (await system.complete(max_tokens=100)).status_code == 200
        assert await circuit() in ("open", "half_open")
        is_broken = False
        while await circuit() != "closed":
            assert (await system.complete(max_tokens=100)).status_code == 200


async def test_what_a_client_writes_is_no_label(make_system, pair):
    system = await make_system()
    await system.add_pair(pair)
    await system.complete(max_tokens=5, model="a-model-of-mine")
    await system.complete(max_tokens=5, service_class="a-class-of-mine")
    await system.complete(max_tokens=5, user="a-user", tenant="a-tenant")
    text = (await system.http.get("/metrics")).text
    for word in ("of-mine", "a-user", "a-tenant"):
        assert word not in text


async def test_tenants_of_the_key_file_have_figures_of_their_own(make_system, pair, tmp_path):
    admin, user = new_key(), new_key()
    keys = (ApiKey(digest_of_key(admin), "ops", is_admin=True), ApiKey(digest_of_key(user), "acme"))
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(map(toml_entry, keys)))
    system = await make_system(api_keys=file)
    await system.add_pair(pair)
    for key, tenant in ((user, ""), (admin, ""), (admin, "nobody-knows")):
        shown = {"authorization": f"Bearer {key}", **({"x-tandem-tenant": tenant} if tenant else {})}
        body = {"prompt": [5, 6, 7], "max_tokens": 4, **({"tenant": tenant} if tenant else {})}
        assert (await system.http.post("/v1/completions", json=body, headers=shown)).status_code == 200
    name = "tandem_tenant_requests_total"
    await system.until(lambda: figures_now(system)[name] == 3)
    figures = figures_now(system)
    for tenant in ("acme", "ops", OTHER_TENANTS):
        assert figures[name, {"tenant": tenant, "outcome": "finished"}] == 1
        assert figures["tandem_tenant_tokens_total", {"tenant": tenant, "kind": "prompt"}] == 3
        assert figures["tandem_tenant_tokens_total", {"tenant": tenant, "kind": "generated"}] == 4


def test_no_number_of_tenants_makes_a_page_long():
    metrics = Metrics()
    metrics.watch_tenants(lambda tenant: True)
    for number in range(3 * MAX_TENANTS):
        metrics.note_tenant(f"t-{number}", "finished", prompt_tokens=1, generated_tokens=1)
    figures = Figures(metrics.render([]).decode())
    name = "tandem_tenant_requests_total"
    assert len([key for key in figures.samples if key[0] == name]) == MAX_TENANTS + 1
    assert figures[name, {"tenant": OTHER_TENANTS}] == 2 * MAX_TENANTS


COUNTS = Counts({"ngram": 9}, {"ngram": 6}, {"place": 2}, HostTierPages(8, 5, 3, 9, 4, 2))


def member(role, worker_id, facts=None):
    record = SimpleNamespace(
        role=role,
        id=worker_id,
        model="tiny",
        version="1.0",
        host="here",
        region="",
        layout_fingerprint="f" * 8,
        tensor_parallel=2,
        pipeline_parallel=0,
    )
    gpu = judge_gpu(facts) if facts is not None else None
    session = SimpleNamespace(counts=COUNTS if facts is not None else None)
    load = WorkerLoad(8, 4, 2, 1, 1, running=3, waiting=2)
    return SimpleNamespace(record=record, load=load, session=session, state=WorkerState.READY, gpu_facts=facts, gpu=gpu)


def test_a_worker_that_left_is_in_no_figure():
    metrics = Metrics()
    facts = GpuFacts(temperature_c=60.0, free_bytes=4, total_bytes=5, num_uncorrected=0)
    members = [member("decode", "d-0", facts), member("decode", "d-1")]
    for each in members:
        metrics.note_sent("decode", each.record.id)
    figures = Figures(metrics.render(members).decode())
    assert figures["tandem_kv_pages", {"worker": "d-1", "state": "free"}] == 4
    assert figures["tandem_worker_gpu", {"worker": "d-0", "state": "ok"}] == 1
    assert figures["tandem_worker_speculative_accepted_tokens_total", {"worker": "d-0", "source": "ngram"}] == 6
    assert figures["tandem_worker_host_tier_moved_pages_total", {"worker": "d-0", "way": "back"}] == 4
    assert figures["tandem_worker_gpu_temperature_celsius", {"worker": "d-0"}] == 60
    assert figures["tandem_worker_gpu_memory_bytes", {"worker": "d-0", "state": "total"}] == 5
    assert figures["tandem_workers", {"role": "decode", "state": "ready"}] == 2
    assert figures["tandem_worker_devices", {"worker": "d-0"}] == 2
    assert figures["tandem_worker_sequences", {"worker": "d-1", "state": "running"}] == 3
    assert figures["tandem_worker_info", {"worker": "d-1", "model": "tiny", "layout": "ffffffff"}] == 1
    text = metrics.render(members[1:]).decode()
    assert "d-0" not in text
    assert Figures(text)["tandem_sent_attempts_total"] == 1
    metrics.note_sent("decode", "d-0")
    assert Figures(metrics.render(members).decode())["tandem_sent_attempts_total", {"worker": "d-0"}] == 1


async def refuses(attempt):
    attempt.refuse(Overloaded("no pages", retry_after_s=1.0))


async def test_refusals_for_want_of_room_count_by_what_is_short(make_system, worker_type):
    system = await make_system(max_queued_requests=0)
    await system.add(worker_type("decode", "decode-0", refuses))
    assert (await system.complete()).status_code == 503
    assert (await figures_of(system))["tandem_overload_refusals_total", {"reason": "queue"}] == 1


async def test_a_call_that_is_refused_counts_once_whatever_number_of_answers_it_asked_for(make_system, worker_type):
    system = await make_system(max_queued_requests=0, max_queue_wait_s=0.1)
    await system.add(worker_type("decode", "decode-0", refuses))
    assert (await system.complete(n=4)).status_code == 503
    assert (await figures_of(system))["tandem_overload_refusals_total"] == 1


async def test_those_who_waited_in_vain_count_as_such(make_system, worker_type):
    system = await make_system(max_queue_wait_s=0.1)
    await system.add(worker_type("decode", "decode-0", refuses))
    assert (await system.complete()).status_code == 503
    assert (await figures_of(system))["tandem_overload_refusals_total", {"reason": "wait"}] == 1


def test_what_alerts_are_about_is_0_before_it_happens():
    metrics = Metrics()
    metrics.of("tiny", "normal")
    samples = Figures(metrics.render([]).decode()).samples
    for name, label, word in (
        ("tandem_refused_requests_total", "code", "internal_error"),
        ("tandem_overload_refusals_total", "reason", "queue"),
        ("tandem_retries_total", "reason", "layout_mismatch"),
        ("tandem_failovers_total", "model", "tiny"),
    ):
        assert samples[name, frozenset({(label, word)})] == 0
    assert ("tandem_refused_requests_total", frozenset({("code", "invalid_value")})) not in samples


async def test_every_error_that_is_answered_counts(make_system):
    system = await make_system()
    asked = {
        ("POST", "/v1/completions"): (415, "unsupported_media_type"),
        ("GET", "/v1/models/nope"): (404, "model_not_found"),
        ("GET", "/v1/files/file-nope"): (404, "file_not_found"),
        ("GET", "/v1/responses/nope"): (404, "response_not_found"),
        ("GET", "/v2"): (404, "not_found"),
        ("PUT", "/v1/completions"): (405, "method_not_allowed"),
    }
    for (method, path), (http_status, code) in asked.items():
        answer = await system.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (http_status, code)
        assert (await figures_of(system))["tandem_refused_requests_total", {"code": code}] == 1


def all_moved():
    """A gateway's page on which each figure has a value."""
    metrics = Metrics()
    figures = metrics.of("tiny", "normal")
    figures.ttft_s.observe(0.1)
    figures.itl_s.observe(0.1)
    figures.queue_s.observe(0.1)
    figures.prefix_queried_tokens.value += 3
    figures.prefix_hit_tokens.value += 1
    figures.note_answer(prompt_tokens=3, tokens=2, finish_reason="stop")
    figures.note_end("finished", total_s=1.0, phases_s=(1.0, 0.0, 0.0, 0.0))
    figures.second_predictions.observe(1.5)
    figures.note_handoff("a new way", num_bytes=5, exposed_s=0.1)
    metrics.note_retry("worker_lost")
    figures.failovers.inc()
    metrics.note_sent("decode", "d-0")
    metrics.note_refusal("server_overloaded")
    metrics.note_overload("queue")
    metrics.note_tenant_refusal("concurrency")
    metrics.watch_tenants(lambda tenant: True)
    metrics.note_tenant("a-tenant", "finished", prompt_tokens=3, generated_tokens=2)
    metrics.note_unlogged("slow")
    metrics.moves.labels("begun").inc()
    metrics.rebalanced.labels("faster", "moved").inc()
    metrics.fallbacks.labels("large", "small", "overloaded").inc()
    metrics.model_switches.labels("small", "disk").observe(1.0)
    metrics.tiers.labels("auto", "small", "cheap").inc()
    metrics.batch_rows.labels("completed").inc()
    use = MemoryUse(
        used_bytes=5,
        max_bytes=9,
        policy="noeviction",
        num_evicted_keys=0,
        file_bytes=1,
        journal_bytes=1,
        answer_bytes=1,
    )
    metrics.note_storage(use, StorageBounds(file_bytes=2, journal_bytes=2, answer_bytes=2))
    metrics.watch(HttpUse(Connections(), Bodies(0)))
    metrics.watch(BackgroundTaskMetrics(SimpleNamespace(num_failures={"workers": 2})))
    population, clock = {("tiny", "normal", "queued"): 1}, ManualClock()
    metrics.watch_requests(lambda: population)
    bottlenecks = BottleneckWatch(list, lambda: population, clock=clock)
    metrics.watch(bottlenecks)
    for _ in range(2):
        clock.advance(10.0)
        list(bottlenecks.pieces())
    metrics.watch_breakers(lambda: 0, lambda worker_id: "closed", {})
    metrics.watch_troubles(Troubles(), Presence(lambda: {"decode": 1}))
    facts = GpuFacts(temperature_c=60.0, free_bytes=4, total_bytes=5, num_uncorrected=0)
    return metrics.render([member("decode", "d-0", facts)]).decode()


def worker_page():
    """What a worker serves."""
    metrics = WorkerMetrics(worker_id="w")
    metrics.watch_faults(lambda: {"lost_frame": 2})
    metrics.watch_host_tier(lambda: HostTierStats(8, 5, 3, 9, 4, 2))
    metrics.watch_gpu(lambda: GpuUse(412.0, 700.0, 5e6, {"sm": 1.98e9}, {"dram": 0.78}))
    metrics.count_attempt("finished")
    metrics.count_preemption("place")
    metrics.note_speculation("ngram", proposed=2, accepted=1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    settings = load_config(
        WorkerConfig,
        ["--id=w", "--model=x", "--redis=redis://127.0.0.1", f"--metrics-port={port}"],
        prog="test",
        environ={},
    )
    metrics.serve(settings, lambda: OwnLoad(8, 5, 0, 1, 2))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_LIMIT_S) as response:
        return response.read().decode()


def documented(title):
    """name → (type, labels) of a table of the page."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 and all(row[3:]) for row in rows), "each has a unit and a meaning"
    return {row[0].strip("`"): (row[1], frozenset(filter(None, row[2].replace(" ", "").split(",")))) for row in rows}


async def test_the_page_lists_what_a_gateway_shows(make_system, pair):
    system = await make_system()
    await system.add_pair(pair)
    await system.complete(max_tokens=5)
    running = await figures_of(system)
    moved = Figures(all_moved())
    assert moved.kinds == running.kinds
    shown = {name: (kind, frozenset(moved.labels(name))) for name, kind in moved.kinds.items()}
    assert shown == documented("Gateway") | documented("The model-server protocol")


def test_the_page_lists_what_a_worker_shows():
    shown = Figures(worker_page())
    assert {name: (kind, frozenset(shown.labels(name))) for name, kind in shown.kinds.items()} == documented("Worker")


@pytest.mark.parametrize("title", ["Gateway", "Worker"])
def test_names_follow_the_conventions(title):
    for name, (kind, _) in documented(title).items():
        if name.startswith("process_"):  # prometheus_client's own, with the names that dashboards know
            continue
        assert name.startswith("tandem_")
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|us|mb|gb|percent)(_total)?$", name), "base units only"


def test_vllm_names_lead_to_ours():
    section = PAGE.read_text().split("\n## What vLLM's dashboards ask for\n")[1].split("\n## ")[0]
    ours = set(re.findall(r"tandem_\w+", section))
    known = documented("Gateway").keys() | documented("Worker").keys()
    assert ours <= known, ours - known
    theirs = set(re.findall(r"vllm:\w+", section))
    assert {
        *("vllm:time_to_first_token_seconds", "vllm:time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"),
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"),
        *("vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    } <= theirs


def test_a_step_and_a_transfer_move_a_workers_figures():
    metrics = WorkerMetrics(worker_id="w")
    metrics.note_step(seconds=0.02, num_sequences=7, num_tokens=70)
    metrics.note_prompt(num_tokens=100, num_cached_tokens=32)
    metrics.note_transfer(num_bytes=10**6, seconds=0.5, exposed_s=0.004)
    counts = {}
    metrics.watch_faults(lambda: counts)
    counts["checksum_mismatch"] = 3
    metrics.watch_host_tier(lambda: HostTierStats(8, 5, 3, num_stored=9, num_loaded=4, num_dropped=2))
    figures = Figures(generate_latest(metrics.registry).decode())
    assert figures["tandem_step_seconds_sum"] == pytest.approx(0.02)
    assert figures["tandem_step_sequences_bucket", {"le": "8.0"}] == 1
    assert figures["tandem_step_sequences_bucket", {"le": "4.0"}] == 0
    assert figures["tandem_step_tokens_sum"] == figures["tandem_computed_tokens_total"] == 70
    assert figures["tandem_prefix_queried_tokens_total"] == 100
    assert figures["tandem_cached_tokens_total"] == 32
    assert figures["tandem_transferred_bytes_total"] == 10**6
    assert figures["tandem_transfer_seconds_sum"] == 0.5
    assert figures["tandem_transfer_exposed_seconds_sum"] == pytest.approx(0.004)
    assert figures["tandem_transfer_faults_total", {"worker": "w", "reason": "checksum_mismatch"}] == 3
    assert [figures["tandem_host_tier_pages", {"state": state}] for state in ("total", "free", "held")] == [8, 5, 3]
    moved = [figures["tandem_host_tier_moved_pages_total", {"way": way}] for way in ("out", "back", "dropped")]
    assert moved == [9, 4, 2]


async def test_a_request_that_was_refused_by_all_is_one_refusal(make_system, worker_type, pair):
    async def refuse(attempt):
        attempt.refuse(Overloaded("full"))

    system = await make_system(max_queue_wait_s=0.05)
    await system.add(worker_type("decode", "decode-0", refuse))
    assert (await system.complete(max_tokens=5)).status_code == 503
    figures = await figures_of(system)
    assert figures["tandem_request_duration_seconds_count", {**MINE, "outcome": "refused"}] == 1
    assert figures["tandem_queue_seconds_count"] == 0
