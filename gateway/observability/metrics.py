"""What the gateway counts and times, for Prometheus. Knows no request; one registry per gateway.

`docs/metrics.md` lists every name. Labels are bounded: models come from the catalog, service classes, outcomes, phases
and codes from this program, workers from the membership. What every token passes is in `services.runtime.metrics`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from gateway.topology.counts import CountsCollector
from gateway.topology.member import ROLES, Member
from gateway.topology.pacing import Pace
from gateway.topology.presence import Presence
from gateway.topology.troubles import Troubles
from services.cluster.memory import MemoryUse
from services.cluster.redis_store import Store
from services.runtime.breaker import CircuitState
from services.runtime.metrics import CertificateEnd, Counts, Distributions, FastRegistry, SpanCounts
from services.runtime.transports import TRANSPORTS
from services.scheduling.health import CAUSES, GpuState

CONTENT_TYPE = CONTENT_TYPE_LATEST
DURATION_BUCKETS_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    1.5,
    2,
    3,
    5,
    7.5,
    10,
    15,
    20,
    30,
    60,
    120,
    300,
    600,
)
"""The buckets for requests and their phases; a request lasts 10 minutes at most, or `--max-request-s`."""
WAIT_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
)
"""The buckets for the wait for workers and for the first token; the last ones are `LONG_WAITS_S`."""
LONG_WAITS_S = (40, 80, 160)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
"""The buckets for gaps between tokens; the last ones are `LONG_GAPS_S`. At 30 tokens a second a gap is 0.033 s."""
LONG_GAPS_S = (0.5, 1, 2.5, 10)
PREDICTION_BUCKETS = (0.1, 0.25, 0.5, 0.65, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
"""The buckets for what was measured, divided by what was predicted."""
SIZE_BUCKETS_TOKENS = tuple(2**exponent for exponent in range(18))
OUTCOMES = ("finished", "failed", "cancelled", "refused")
PHASES = ("queue", "prefill", "transfer", "decode")
STATES = ("queued", "running")

Population = Mapping[tuple[str, str, str], int]
"""(model, service class, one of STATES) → requests now."""


class RequestFigures:
    """The figures of one model and service class: looked up once for an answer, written with each of its tokens."""

    __slots__ = ("generated_tokens", "itl_s", "prompt_size", "size", "ttft_s")

    def __init__(self, metrics: "Metrics", model: str, service_class: str) -> None:
        whose = (model, service_class)
        self.ttft_s = metrics.ttft_s.labels(*whose)
        self.itl_s = metrics.itl_s.labels(*whose)
        self.prompt_size = metrics.prompt_size.labels(*whose)
        self.size = metrics.size.labels(*whose)
        self.generated_tokens = metrics.generated_tokens.labels()


class Metrics:
    """The gateway's figures. Attributes with `_s` are histograms in seconds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._fast_registry = fast = FastRegistry()
        self._figures: dict[tuple[str, str], RequestFigures] = {}
        whose = ("model", "service_class")
        self.ttft_s = Distributions(
            "tandem_time_to_first_token_seconds",
            "From arrival to the first token.",
            whose,
            fast,
            bounds=(*WAIT_BUCKETS_S, *LONG_WAITS_S),
        )
        self.itl_s = Distributions(
            "tandem_inter_token_latency_seconds",
            "Time of each token after the first; of tokens that came together, each its share.",
            whose,
            fast,
            bounds=(*TOKEN_BUCKETS_S, *LONG_GAPS_S),
        )
        self.queue_s = Distributions(
            "tandem_queue_seconds",
            "From arrival until workers took the answer; observed at that moment.",
            whose,
            fast,
            bounds=(*WAIT_BUCKETS_S, *LONG_WAITS_S),
        )
        self.phases_s = Distributions(
            "tandem_request_phase_seconds",
            "Time of ended requests by phase: queue, prefill, transfer, decode; those of a request sum up to its time.",
            (*whose, "phase"),
            fast,
            bounds=DURATION_BUCKETS_S,
        )
        self.durations_s = Distributions(
            "tandem_request_duration_seconds",
            "From arrival to the end of a request, by outcome: finished, failed, cancelled, refused.",
            (*whose, "outcome"),
            fast,
            bounds=DURATION_BUCKETS_S,
        )
        self.prompt_size = Distributions(
            "tandem_request_prompt_tokens",
            "Tokens of an answer's prompt.",
            whose,
            fast,
            bounds=SIZE_BUCKETS_TOKENS,
        )
        self.size = Distributions(
            "tandem_request_generated_tokens",
            "Tokens of an answer, however it ended.",
            whose,
            fast,
            bounds=SIZE_BUCKETS_TOKENS,
        )
        self.generated_tokens = Counts(
            "tandem_generated_tokens", "Tokens delivered by workers and not dropped.", (), fast
        )
        self.generated_tokens.labels()
        self._prompt_tokens = Counts("tandem_prompt_tokens", "Tokens of prompts of ended answers.", (), fast)
        self._prompt_tokens.labels()
        self._prefix_queried_tokens = Counts(
            "tandem_prefix_queried_tokens",
            "Prompt tokens of answers whose first token came: what could have been found in a cache.",
            ("model",),
            fast,
        )
        self._prefix_hit_tokens = Counts(
            "tandem_prefix_hit_tokens",
            "Those prompt tokens that were not computed because their pages were found in a cache.",
            ("model",),
            fast,
        )
        self._answers = Counter(
            "tandem_answers",
            "Answers that ended well, by why: stop, length.",
            ("model", "finish_reason"),
            registry=registry,
        )
        self.retries = Counter("tandem_failed_attempts", "Attempts that failed.", registry=registry)
        self._retries_by_reason = Counter(
            "tandem_retries",
            "Failed attempts after which the answer was tried again, by what they failed of.",
            ("reason",),
            registry=registry,
        )
        self._failovers = Counter(
            "tandem_failovers",
            "Answers that workers had begun, that failed there, and that other workers, or the same, took again.",
            ("model",),
            registry=registry,
        )
        self.delayed_retries = Counter(
            "tandem_delayed_retries", "Retries that had to wait because there were too many.", registry=registry
        )
        self.quarantined = Counter(
            "tandem_quarantined_requests", "Requests that two workers died of.", registry=registry
        )
        self.moves = Counter(
            "tandem_moves",
            "Answers to be moved away from a decode worker that is leaving: begun, refused by all others.",
            ("outcome",),
            registry=registry,
        )
        self.fallbacks = Counter(
            "tandem_fallbacks",
            "Calls that another model answers than the one asked for: overloaded, unavailable.",
            ("asked", "answering", "reason"),
            registry=registry,
        )
        self.batch_rows = Counter(
            "tandem_batch_rows",
            "Rows of batches by what came of asking them: completed, failed, expired, later.",
            ("outcome",),
            registry=registry,
        )
        self._sent = Counter(
            "tandem_sent_attempts",
            "Attempts that a worker took, by role and worker.",
            ("role", "worker"),
            registry=registry,
        )
        self._sent_to: dict[tuple[str, str], Counter] = {}
        """Its children, kept because finding one by its labels takes longer than counting."""
        self._handoffs_s = Distributions(
            "tandem_handoff_exposed_seconds",
            "Time of a handoff of pages that computing did not hide: from the seal to the commit.",
            ("model",),
            fast,
            bounds=WAIT_BUCKETS_S,
        )
        self._handoff_bytes = Counts(
            "tandem_handoff_bytes", "Payload bytes of handoffs that were committed.", ("model", "transport"), fast
        )
        self._predictions = Distributions(
            "tandem_token_prediction_ratio",
            "Time from the choice of workers to an answer's first or second token, over what was predicted then.",
            ("model", "token"),
            fast,
            bounds=PREDICTION_BUCKETS,
        )
        self._open_breakers = Gauge(
            "tandem_open_breakers",
            "Workers kept from work because they are slow, silent or erring or their GPU is in trouble, and pairs that "
            "are kept apart because they cannot reach each other.",
            registry=registry,
        )
        self._openings = Gauge(
            "tandem_circuit_openings",
            "How often a worker was kept from work since the gateway started, by cause: slow, silent, erring, gpu.",
            ("cause",),
            registry=registry,
        )
        self._refusals = Counter(
            "tandem_refused_requests", "Calls answered with an error, by its code.", ("code",), registry=registry
        )
        self._overloads = Counter(
            "tandem_overload_refusals",
            "Calls refused because the cluster is full, by what is short: deadline, ttft, itl, pages, queue; wait: "
            "they waited for workers and none came in time.",
            ("reason",),
            registry=registry,
        )
        # Without a label for the tenant: a file of keys may name thousands of them.
        self._tenant_refusals = Counter(
            "tandem_tenant_refusals",
            "Calls refused for their tenant's limit: requests_per_minute, tokens_per_minute, concurrency, "
            "named_requests (the room for its requests with a name).",
            ("limit",),
            registry=registry,
        )
        self._redis_up = Gauge("tandem_redis_up", "Whether Redis answered this gateway last.", registry=registry)
        self._redis_round_trip_s = Gauge(
            "tandem_redis_round_trip_seconds", "Mean time of a call to Redis that was answered.", registry=registry
        )
        self._storage = Gauge(
            "tandem_redis_memory_bytes",
            "Memory of Redis, by kind: files (with batches) and journals, as they are counted; used: all of it.",
            ("kind",),
            registry=registry,
        )
        self._storage_limit = Gauge(
            "tandem_redis_memory_limit_bytes",
            "What each of these kinds may take; 0: no limit.",
            ("kind",),
            registry=registry,
        )
        self._evicted_keys = Gauge(
            "tandem_redis_evicted_keys",
            "Keys that Redis has thrown away for want of memory since it was started; anything but 0 is wrong.",
            registry=registry,
        )
        self._journal_memory = Gauge(
            "tandem_named_requests_memory_bytes",
            "What requests with a name take of this gateway's memory, about, those included that nobody reads.",
            registry=registry,
        )
        self._busy_share = Gauge(
            "tandem_event_loop_busy_ratio", "Share of the last 0.1 s in which the gateway worked.", registry=registry
        )
        self._hold_s = Gauge(
            "tandem_token_hold_seconds",
            "How long tokens of an answer wait for one another to go out together; 0 while there is time for each.",
            registry=registry,
        )
        self._unlogged = Counter(
            "tandem_unlogged_requests",
            "Requests without a line of their own in the log, since there were too many: refused, slow.",
            ("kind",),
            registry=registry,
        )
        self._requests = Gauge(
            "tandem_requests", "Answers now, by state: queued, running.", (*whose, "state"), registry=registry
        )
        self._workers = Gauge(
            "tandem_workers",
            "Workers by role and state; gone: vanished without a word in the last 10 minutes.",
            ("role", "state"),
            registry=registry,
        )
        self._expected_workers = Gauge(
            "tandem_expected_workers", "Workers of a role that --expect names.", ("role",), registry=registry
        )
        self._vanished = Counter(
            "tandem_vanished_workers",
            "Workers that vanished without having said that they leave, by role.",
            ("role",),
            registry=registry,
        )
        self._troubles = Gauge(
            "tandem_troubles",
            "Troubles of this moment by kind; /cluster has their causes.",
            ("kind",),
            registry=registry,
        )
        worker = ("role", "worker")
        self._gpus = Gauge(
            "tandem_worker_gpu",
            "1 for the state that a worker's GPU is in: ok, degraded, out. Only of workers that can ask theirs.",
            (*worker, "state"),
            registry=registry,
        )
        self._gpu_temperatures = Gauge(
            "tandem_worker_gpu_temperature_celsius", "Temperature of a worker's GPU.", worker, registry=registry
        )
        self._gpu_memory = Gauge(
            "tandem_worker_gpu_memory_bytes",
            "Memory of a worker's GPU: free, total.",
            (*worker, "state"),
            registry=registry,
        )
        self._gpu_errors = Gauge(
            "tandem_worker_gpu_uncorrected_errors",
            "Memory errors of a worker's GPU that were not corrected, since its driver was loaded.",
            worker,
            registry=registry,
        )
        self._circuits = Gauge(
            "tandem_worker_circuit",
            "1 for the state of a worker's circuit: closed, open (kept from work), half_open (kept from work and "
            "tried), suspected (it should get no work, and does, since no more of its role can be spared).",
            (*worker, "state"),
            registry=registry,
        )
        self._pages = Gauge("tandem_kv_pages", "KV pages by worker and state.", (*worker, "state"), registry=registry)
        self._counts = CountsCollector()
        registry.register(self._counts)
        registry.register(SpanCounts())
        registry.register(CertificateEnd())
        gpus = (self._gpus, self._gpu_temperatures, self._gpu_memory, self._gpu_errors)
        self._of_workers = (self._workers, self._pages, self._circuits, *gpus)
        self._circuit: Callable[[str], CircuitState] = lambda worker_id: "closed"
        self._population: Callable[[], Population] = dict
        self._presence, self._trouble_counts = Presence(), Troubles().counts
        self._shown_vanished = dict.fromkeys(ROLES, 0)

    def of(self, model: str, service_class: str) -> RequestFigures:
        """Returns the figures of a model's requests of one class."""
        key = (model, service_class)
        figures = self._figures.get(key)
        if figures is None:
            figures = self._figures[key] = RequestFigures(self, model, service_class)
        return figures

    def note_placed(self, model: str, service_class: str, queue_s: float) -> None:
        """Notes that workers took an answer for the first time."""
        self.queue_s.labels(model, service_class).observe(queue_s)

    def note_first_token(self, model: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Notes an answer's first token, with which it is known how much of its prompt was cached."""
        self._prefix_queried_tokens.labels(model).value += prompt_tokens
        self._prefix_hit_tokens.labels(model).value += cached_tokens

    def note_answer(
        self, model: str, service_class: str, *, prompt_tokens: int, tokens: int, finish_reason: str
    ) -> None:
        """Notes that an answer ended, and after how many tokens. Without a `finish_reason` it failed."""
        figures = self.of(model, service_class)
        figures.prompt_size.observe(prompt_tokens)
        figures.size.observe(tokens)
        self._prompt_tokens.labels().value += prompt_tokens
        if finish_reason:
            self._answers.labels(model, finish_reason).inc()

    def note_end(
        self,
        model: str,
        service_class: str,
        outcome: str,
        *,
        total_s: float,
        phases_s: Mapping[str, float] | None = None,
    ) -> None:
        """Notes that a request ended as one of OUTCOMES; `phases_s` None: no answer of it was begun."""
        self.durations_s.labels(model, service_class, outcome).observe(total_s)
        for phase, seconds in (phases_s or {}).items():
            self.phases_s.labels(model, service_class, phase).observe(seconds)

    def note_handoff(self, model: str, transport: str, *, num_bytes: int, exposed_s: float) -> None:
        """Notes that a decode worker has an answer's pages."""
        self._handoffs_s.labels(model).observe(exposed_s)
        known = transport if transport in ("none", "loopback", *TRANSPORTS) else "other"
        self._handoff_bytes.labels(model, known).value += num_bytes

    def note_prediction(self, model: str, token: str, predicted_s: float, seen_s: float) -> None:
        """Notes how long after the choice of workers an answer's `first` or `second` token came."""
        if predicted_s > 0:
            self._predictions.labels(model, token).observe(seen_s / predicted_s)

    def note_retry(self, reason: str) -> None:
        """Notes that an attempt failed for one of a few reasons, and that the answer is tried again."""
        self._retries_by_reason.labels(reason).inc()

    def note_failover(self, model: str) -> None:
        """Notes that workers took an answer again after it had failed on others."""
        self._failovers.labels(model).inc()

    def note_sent(self, role: str, worker_id: str) -> None:
        """Notes that a worker took an attempt."""
        sent = self._sent_to.get((role, worker_id))
        if sent is None:
            sent = self._sent_to[role, worker_id] = self._sent.labels(role, worker_id)
        sent.inc()

    def note_refusal(self, code: str) -> None:
        """Notes that a call was answered with an error of this code."""
        self._refusals.labels(code).inc()

    def note_overload(self, reason: str) -> None:
        """Notes that a call was refused because the cluster is full; `reason` is one of a few words."""
        self._overloads.labels(reason).inc()

    def note_tenant_refusal(self, limit: str) -> None:
        """Notes that a call was refused because its tenant has reached this limit."""
        self._tenant_refusals.labels(limit).inc()

    def note_unlogged(self, kind: str) -> None:
        """Notes that a request got no line of its own; it was `refused` or `slow`."""
        self._unlogged.labels(kind).inc()

    def note_storage(self, use: MemoryUse, limits: Mapping[str, int]) -> None:
        """Notes what Redis' memory is used for now; `limits` are those of the counted kinds."""
        taken = {"files": use.file_bytes, "journals": use.journal_bytes, "used": use.used_bytes}
        for kind, num_bytes in taken.items():
            self._storage.labels(kind).set(num_bytes)
        for kind, num_bytes in {**limits, "used": use.max_bytes}.items():
            self._storage_limit.labels(kind).set(num_bytes)
        self._evicted_keys.set(use.num_evicted_keys)

    def watch_journals(self, num_bytes: Callable[[], float]) -> None:
        """Reads it whenever the figures are asked for."""
        self._journal_memory.set_function(num_bytes)

    def watch_requests(self, population: Callable[[], Population]) -> None:
        """Reads these counts whenever the figures are asked for."""
        self._population = population

    def watch_breakers(
        self, num_open: Callable[[], float], circuit: Callable[[str], CircuitState], num_openings: Mapping[str, int]
    ) -> None:
        """Reads this count, the state of each worker's circuit, and the openings by cause, for each scrape."""
        self._open_breakers.set_function(num_open)
        self._circuit = circuit
        for cause in CAUSES:
            self._openings.labels(cause).set_function(partial(_at, num_openings, cause))

    def watch_store(self, store: Store) -> None:
        """Reads it whenever the figures are asked for."""
        self._redis_up.set_function(lambda: float(store.is_available))
        self._redis_round_trip_s.set_function(lambda: store.round_trip.mean_s)

    def watch_troubles(self, troubles: Troubles, presence: Presence) -> None:
        """Reads them whenever the figures are asked for."""
        self._trouble_counts, self._presence = troubles.counts, presence

    def watch_http(self, use: Collector) -> None:
        """Shows what clients hold over HTTP."""
        self._registry.register(use)

    def watch_pace(self, pace: Pace) -> None:
        """Reads it whenever the figures are asked for."""
        self._busy_share.set_function(lambda: pace.busy_share)
        self._hold_s.set_function(lambda: pace.hold_s)

    def totals(self) -> tuple[list[int], list[int], float, float, float]:
        """Returns counts since the start: TTFT and ITL by bucket, generated, prompt and cached prompt tokens."""
        return (
            self.ttft_s.totals(),
            self.itl_s.totals(),
            self.generated_tokens.total(),
            self._prefix_queried_tokens.total(),
            self._prefix_hit_tokens.total(),
        )

    def circuit(self, worker_id: str) -> CircuitState:
        """Returns the state of a worker's circuit."""
        return self._circuit(worker_id)

    def render(self, members: Sequence[Member]) -> bytes:
        """Returns all figures in Prometheus' text format. What is told of single workers is told of `members` only."""
        for gauge in self._of_workers:
            gauge.clear()
        for member in members:
            self._show_worker(member)
        self._counts.shown = {
            (member.record.role, member.record.id): member.session.counts
            for member in members
            if member.session.counts is not None
        }
        self._show_presence()
        self._forget_all_but((member.record.role, member.record.id) for member in members)
        self._requests.clear()
        for whose, num_requests in self._population().items():
            self._requests.labels(*whose).set(num_requests)
        return generate_latest(self._registry) + self._fast_registry.text()

    def _show_presence(self) -> None:
        presence = self._presence
        for role in ROLES:
            self._workers.labels(role, "gone").set(sum(gone.worker.role == role for gone in presence.gone))
            vanished = self._vanished.labels(role)
            vanished.inc(presence.num_vanished[role] - self._shown_vanished[role])
            self._shown_vanished[role] = presence.num_vanished[role]
        for expected_role, expected in presence.expected.items():
            self._expected_workers.labels(expected_role).set(expected)
        for kind, num_troubles in self._trouble_counts().items():
            self._troubles.labels(kind).set(num_troubles)

    def _show_worker(self, member: Member) -> None:
        record, load, facts = member.record, member.load, member.gpu_facts
        whose = (record.role, record.id)
        self._workers.labels(record.role, member.state).inc()
        for state in ("free", "cached", "reserved", "used"):
            self._pages.labels(*whose, state).set(getattr(load, f"pages_{state}"))
        circuit = self._circuit(record.id)
        for circuit_state in get_args(CircuitState):
            self._circuits.labels(*whose, circuit_state).set(circuit_state == circuit)
        if facts is None:
            return
        for gpu_state in GpuState:
            self._gpus.labels(*whose, gpu_state.value).set(gpu_state is member.gpu.state)
        if facts.temperature_c is not None:
            self._gpu_temperatures.labels(*whose).set(facts.temperature_c)
        if facts.num_uncorrected is not None:
            self._gpu_errors.labels(*whose).set(facts.num_uncorrected)
        for state, num_bytes in (("free", facts.free_bytes), ("total", facts.total_bytes)):
            if num_bytes is not None:
                self._gpu_memory.labels(*whose, state).set(num_bytes)

    def _forget_all_but(self, workers: Iterable[tuple[str, str]]) -> None:
        """Forgets the counts of workers that left: workers come and go, some with a new name each time."""
        for gone in self._sent_to.keys() - set(workers):
            del self._sent_to[gone]
            self._sent.remove(*gone)


def _at(counts: Mapping[str, int], key: str) -> float:
    return counts.get(key, 0)
