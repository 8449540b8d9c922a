"""What the gateway counts and times, for Prometheus. Knows no request; one registry per gateway.

`docs/metrics.md` lists every name. Labels are bounded: models come from the catalog, service classes, outcomes, phases
and codes from this program, workers from the membership. What every token passes is in `services.runtime.metrics`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prometheus_client import Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.registry import Collector

from gateway.observability.model_server import ModelServer, Population
from gateway.observability.worker_figures import WorkerFigures
from gateway.topology.member import Member
from gateway.topology.pacing import Pace
from gateway.topology.presence import Presence
from gateway.topology.troubles import Troubles
from services.cluster.memory import MemoryUse, StorageBounds
from services.cluster.redis_store import Store
from services.runtime.breaker import CircuitState
from services.runtime.metrics import Counts, Distributions, FastRegistry, process_registry
from services.runtime.status import TABLE
from services.runtime.transports import TRANSPORTS
from services.scheduling.health import CAUSES

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""The type of the page for scrapers that ask for no other."""
OPENMETRICS_TYPE = "application/openmetrics-text"
MAX_TENANTS = 100
"""The most tenants that have figures of their own."""
OTHER_TENANTS = "(other)"
"""All other tenants together; no tenant can have this name."""
DURATION_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600),
)
"""The buckets for requests and their phases; a request lasts 10 minutes at most, or `--max-request-s`."""
WAIT_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
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
OVERLOADS = ("deadline", "ttft", "itl", "pages", "queue", "wait")
RETRIES = ("worker_lost", "worker_unavailable", "transfer_failed", "layout_mismatch", "internal_error")
SERVER_ERRORS = sorted({row.openai_code for row in TABLE.values() if row.http >= 500})
"""The public codes of errors that are the server's fault."""
WHOSE = ("model", "service_class")
"""The labels of what is told of requests."""
_TRANSPORTS = frozenset(("none", "loopback", *TRANSPORTS))


class RequestFigures:
    """The figures of one model and service class: looked up once for an answer, written with each of its tokens."""

    __slots__ = (
        *("failovers", "first_predictions", "generated_tokens", "itl_s", "phases_s", "prefix_hit_tokens"),
        *("prefix_queried_tokens", "prompt_size", "prompt_tokens", "queue_s", "second_predictions", "size", "ttft_s"),
        *("_metrics", "_handoffs_s", "_model", "_whose"),
    )

    def __init__(self, metrics: "Metrics", model: str, service_class: str) -> None:
        self._metrics, self._model, self._whose = metrics, model, (model, service_class)
        whose = self._whose
        self.ttft_s = metrics.ttft_s.labels(*whose)
        self.itl_s = metrics.itl_s.labels(*whose)
        self.queue_s = metrics.queue_s.labels(*whose)
        self.phases_s = [metrics.phases_s.labels(*whose, phase) for phase in PHASES]
        self.prompt_size = metrics.prompt_size.labels(*whose)
        self.size = metrics.size.labels(*whose)
        self.generated_tokens = metrics.generated_tokens.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.prefix_queried_tokens = metrics.prefix_queried_tokens.labels(model)
        self.prefix_hit_tokens = metrics.prefix_hit_tokens.labels(model)
        self.first_predictions = metrics.predictions.labels(model, "first")
        self.second_predictions = metrics.predictions.labels(model, "second")
        self.failovers = metrics.failovers.labels(model)
        self._handoffs_s = metrics.handoffs_s.labels(model)

    def note_answer(self, *, prompt_tokens: int, tokens: int, finish_reason: str) -> None:
        """Notes that an answer ended, and after how many tokens. Without a `finish_reason` it failed."""
        self.prompt_size.observe(prompt_tokens)
        self.size.observe(tokens)
        self.prompt_tokens.value += prompt_tokens
        if finish_reason:
            self._metrics.answers.labels(self._model, finish_reason).value += 1

    def note_end(
        self, outcome: str, *, total_s: float, phases_s: Sequence[float] | None = None, trace_id: str = ""
    ) -> None:
        """Notes that a request ended as one of OUTCOMES; `phases_s` are in the order of PHASES.

        None: no answer of it was begun. `trace_id` is that of its trace, where one is recorded.
        """
        durations_s = self._metrics.durations_s.labels(*self._whose, outcome)
        durations_s.observe(total_s)
        if trace_id:
            durations_s.exemplify(total_s, trace_id)
        if phases_s is not None:
            for phase, seconds in zip(self.phases_s, phases_s, strict=True):
                phase.observe(seconds)

    def note_handoff(self, transport: str, *, num_bytes: int, exposed_s: float) -> None:
        """Notes that a decode worker has an answer's pages."""
        self._handoffs_s.observe(exposed_s)
        known = transport if transport in _TRANSPORTS else "other"
        self._metrics.handoff_bytes.labels(self._model, known).value += num_bytes


class Metrics:
    """The gateway's figures. Attributes with `_s` are histograms in seconds."""

    def __init__(self) -> None:
        self._registry = process_registry("gateway")
        self._fast_registry = FastRegistry()
        self._figures: dict[tuple[str, str], RequestFigures] = {}
        self._tenants: set[str] = set()
        """Tenants with figures of their own."""
        self._knows_tenant: Callable[[str], bool] | None = None
        self._population: Callable[[], Population] = dict
        self._shown_population: Population = {}
        self._make_times()
        self._make_tokens()
        self._make_events()
        self._make_refusals()
        self._make_store_figures()
        self._make_loads()
        # A rate begins with the second value of a series, so what alerts are about has a first one: 0.
        for family, words in (
            (self._refusals, SERVER_ERRORS),
            (self._overloads, OVERLOADS),
            (self._retries_by_reason, RETRIES),
        ):
            for word in words:
                family.labels(word)
        self._workers = WorkerFigures()
        self._registry.register(self._workers)
        self._registry.register(ModelServer(lambda: self._shown_population, self._workers.kv_use))

    def _make_times(self) -> None:
        self.ttft_s = self._times(
            "time_to_first_token", "From arrival to the first token.", (*WAIT_BUCKETS_S, *LONG_WAITS_S)
        )
        self.itl_s = self._times(
            "inter_token_latency",
            "Time of each token after the first; of tokens that came together, each its share.",
            (*TOKEN_BUCKETS_S, *LONG_GAPS_S),
        )
        self.queue_s = self._times(
            "queue",
            "From arrival until workers took the answer; observed at that moment.",
            (*WAIT_BUCKETS_S, *LONG_WAITS_S),
        )
        self.phases_s = self._times(
            "request_phase",
            "Time of ended requests by phase: queue, prefill, transfer, decode; those of a request sum up to its time.",
            DURATION_BUCKETS_S,
            "phase",
        )
        self.durations_s = self._times(
            "request_duration",
            "From arrival to the end of a request, by outcome: finished, failed, cancelled, refused.",
            DURATION_BUCKETS_S,
            "outcome",
        )
        self.handoffs_s = Distributions(
            "tandem_handoff_exposed_seconds",
            "Time of a handoff of pages that computing did not hide: from the seal to the commit.",
            ("model",),
            self._fast_registry,
            bounds=WAIT_BUCKETS_S,
        )
        self.model_switches = Distributions(
            "tandem_model_switch_seconds",
            "Time in which workers that models share got another model, by where it was: asleep, disk.",
            ("model", "from"),
            self._fast_registry,
            bounds=DURATION_BUCKETS_S,
        )
        self.predictions = Distributions(
            "tandem_token_prediction_ratio",
            "Time from the choice of workers to an answer's first or second token, over what was predicted then.",
            ("model", "token"),
            self._fast_registry,
            bounds=PREDICTION_BUCKETS,
        )

    def _make_tokens(self) -> None:
        fast = self._fast_registry
        self.prompt_size, self.size = (
            Distributions(f"tandem_request_{what}_tokens", words, WHOSE, fast, bounds=SIZE_BUCKETS_TOKENS)
            for what, words in (
                ("prompt", "Tokens of an answer's prompt."),
                ("generated", "Tokens of an answer, however it ended."),
            )
        )
        self.generated_tokens = self._counts(
            "generated_tokens", "Tokens delivered by workers and not dropped.", "model"
        )
        self.prompt_tokens = self._counts("prompt_tokens", "Tokens of prompts of ended answers.", "model")
        self.prefix_queried_tokens = self._counts(
            "prefix_queried_tokens",
            "Prompt tokens of answers whose first token came: what could have been found in a cache.",
            "model",
        )
        self.prefix_hit_tokens = self._counts(
            "prefix_hit_tokens",
            "Those prompt tokens that were not computed because their pages were found in a cache.",
            "model",
        )
        self.handoff_bytes = self._counts(
            "handoff_bytes", "Payload bytes of handoffs that were committed.", "model", "transport"
        )
        self._tenant_tokens = self._counts(
            "tenant_tokens", "Tokens of ended requests of a tenant, by kind: prompt, generated.", "tenant", "kind"
        )
        self._tenant_requests = self._counts(
            "tenant_requests", "Ended requests of a tenant that were accepted, by outcome.", "tenant", "outcome"
        )

    def _make_events(self) -> None:
        self.answers = self._counts(
            "answers", "Answers that ended well, by why: stop, length.", "model", "finish_reason"
        )
        self.retries = self._counter("failed_attempts", "Attempts that failed.")
        self._retries_by_reason = self._counter(
            "retries", "Failed attempts after which the answer was tried again, by what they failed of.", "reason"
        )
        self.failovers = self._counter(
            "failovers",
            "Answers that workers had begun, that failed there, and that other workers, or the same, took again.",
            "model",
        )
        self.delayed_retries = self._counter("delayed_retries", "Retries that had to wait because there were too many.")
        self.quarantined = self._counter("quarantined_requests", "Requests that two workers died of.")
        self.moves = self._counter(
            "moves",
            "Answers to be moved to another decode worker, with their pages: begun, refused by all that were asked.",
            "outcome",
        )
        self.rebalanced = self._counter(
            "rebalanced_answers",
            "Answers that were to move to a decode worker with less to do, by why (faster, pages) and what came of it: "
            "moved, refused, ended before that.",
            *("reason", "outcome"),
        )
        self.fallbacks = self._counter(
            "fallbacks",
            "Calls that another model answers than the one asked for: overloaded, unavailable.",
            *("asked", "answering", "reason"),
        )
        self.tiers = self._counter(
            "tier_answers", "Calls for a tier, by the model that answers and why.", *("tier", "answering", "reason")
        )
        self.batch_rows = self._counter(
            "batch_rows",
            "Rows of batches by what came of asking them: completed, failed, expired, later.",
            "outcome",
        )

    def _make_refusals(self) -> None:
        self._refusals = self._counter("refused_requests", "Calls answered with an error, by its code.", "code")
        self._overloads = self._counter(
            "overload_refusals",
            "Calls refused because the cluster is full, by what is short: deadline, ttft, itl, pages, queue; wait: "
            "they waited for workers and none came in time.",
            "reason",
        )
        # Without a label for the tenant: a file of keys may name thousands of them.
        self._tenant_refusals = self._counter(
            "tenant_refusals",
            "Calls refused for their tenant's limit: requests_per_minute, tokens_per_minute, concurrency, "
            "named_requests (the room for its requests with a name).",
            "limit",
        )
        self._unlogged = self._counter(
            "unlogged_requests",
            "Requests without a line of their own in the log, since there were too many: refused, slow.",
            "kind",
        )

    def _make_store_figures(self) -> None:
        self._redis_up = self._gauge(
            "redis_up",
            "1 if Redis serves this gateway. 0 after 3 s without an answer, and for 5 s after a denied command.",
        )
        self._redis_round_trip_s = self._gauge(
            "redis_round_trip_seconds", "Mean time of a call to Redis, including calls that timed out."
        )
        self._storage = self._gauge(
            "redis_memory_bytes",
            "Memory of Redis, by kind: files (with batches) and journals, as they are counted; used: all of it.",
            "kind",
        )
        self._storage_limit = self._gauge(
            "redis_memory_limit_bytes", "What each of these kinds may take; 0: no limit.", "kind"
        )
        self._evicted_keys = self._gauge(
            "redis_evicted_keys",
            "Keys that Redis has thrown away for want of memory since it was started; anything but 0 is wrong.",
        )
        self._journal_memory = self._gauge(
            "named_requests_memory_bytes",
            "What requests with a name take of this gateway's memory, about, those included that nobody reads.",
        )

    def _make_loads(self) -> None:
        self._busy_share = self._gauge("event_loop_busy_ratio", "Share of the last 0.1 s in which the gateway worked.")
        self._hold_s = self._gauge(
            "token_hold_seconds",
            "How long tokens of an answer wait for one another to go out together; 0 while there is time for each.",
        )
        self._open_breakers = self._gauge(
            "open_breakers",
            "Workers kept from work because they are slow, silent or erring or their GPU is in trouble, and pairs that "
            "are kept apart because they cannot reach each other.",
        )
        self._openings = self._gauge(
            "circuit_openings",
            "How often a worker was kept from work since the gateway started, by cause: slow, silent, erring, gpu.",
            "cause",
        )
        self._requests = self._gauge("requests", "Answers now, by state: queued, running.", *WHOSE, "state")

    def _times(self, name: str, words: str, bounds: Sequence[float], *labels: str) -> Distributions:
        name = f"tandem_{name}_seconds"
        return Distributions(name, words, (*WHOSE, *labels), self._fast_registry, bounds=bounds)

    def _counts(self, name: str, words: str, *labels: str) -> Counts:
        return Counts(f"tandem_{name}", words, labels, self._fast_registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", words, labels, registry=self._registry)

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        return Gauge(f"tandem_{name}", words, labels, registry=self._registry)

    def of(self, model: str, service_class: str) -> RequestFigures:
        """Returns the figures of a model's requests of one class."""
        key = (model, service_class)
        figures = self._figures.get(key)
        if figures is None:
            figures = self._figures[key] = RequestFigures(self, model, service_class)
        return figures

    def note_retry(self, reason: str) -> None:
        """Notes that an attempt failed for one of a few reasons, and that the answer is tried again."""
        self._retries_by_reason.labels(reason).inc()

    def note_sent(self, role: str, worker_id: str) -> None:
        """Notes that a worker took an attempt."""
        self._workers.note_sent(role, worker_id)

    def note_refusal(self, code: str) -> None:
        """Notes that a call was answered with an error of this code."""
        self._refusals.labels(code).inc()

    def note_overload(self, reason: str) -> None:
        """Notes that a call was refused because the cluster is full; `reason` is one of a few words."""
        self._overloads.labels(reason).inc()

    def note_tenant_refusal(self, limit: str) -> None:
        """Notes that a call was refused because its tenant has reached this limit."""
        self._tenant_refusals.labels(limit).inc()

    def note_tenant(self, tenant: str, outcome: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        """Notes that an accepted request of a tenant ended; nothing while no tenants are known."""
        if self._knows_tenant is None:
            return
        if tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS and self._knows_tenant(tenant):
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        self._tenant_requests.labels(tenant, outcome).value += 1
        self._tenant_tokens.labels(tenant, "prompt").value += prompt_tokens
        self._tenant_tokens.labels(tenant, "generated").value += generated_tokens

    def note_unlogged(self, kind: str) -> None:
        """Notes that a request got no line of its own; it was `refused` or `slow`."""
        self._unlogged.labels(kind).inc()

    def note_storage(self, use: MemoryUse, bounds: StorageBounds) -> None:
        """Notes what Redis' memory is used for now; `bounds` are those of the counted kinds."""
        taken = {"files": use.file_bytes, "journals": use.journal_bytes, "answers": use.answer_bytes}
        for kind, num_bytes in {**taken, "used": use.used_bytes}.items():
            self._storage.labels(kind).set(num_bytes)
        limits = {"files": bounds.file_bytes, "journals": bounds.journal_bytes, "answers": bounds.answer_bytes}
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
        self._workers.circuit = circuit
        for cause in CAUSES:
            self._openings.labels(cause).set_function(partial(_at, num_openings, cause))

    def watch_store(self, store: Store) -> None:
        """Reads it whenever the figures are asked for."""
        self._redis_up.set_function(lambda: float(store.is_up))
        self._redis_round_trip_s.set_function(lambda: store.round_trip.waited_s)

    def watch_troubles(self, troubles: Troubles, presence: Presence) -> None:
        """Reads them whenever the figures are asked for."""
        self._workers.trouble_counts, self._workers.presence = troubles.counts, presence

    def watch_tenants(self, is_known: Callable[[str], bool]) -> None:
        """Has tenants that are known have figures of their own, the first MAX_TENANTS of them that ask."""
        self._knows_tenant = is_known

    def watch(self, figures: Collector) -> None:
        """Shows what another part of the gateway counts."""
        self._registry.register(figures)

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
            self.prefix_queried_tokens.total(),
            self.prefix_hit_tokens.total(),
        )

    def circuit(self, worker_id: str) -> CircuitState:
        """Returns the state of a worker's circuit."""
        return self._workers.circuit(worker_id)

    def render(self, members: Sequence[Member], *, accept: str = "") -> bytes:
        """Returns all figures in Prometheus' text format, or in that of OpenMetrics for a header `accept` with it.

        What is told of single workers is told of `members` only.
        """
        self._workers.show(members)
        self._requests.clear()
        self._shown_population = self._population()
        for whose, num_requests in self._shown_population.items():
            self._requests.labels(*whose).set(num_requests)
        encode, content_type = choose_encoder(accept)
        is_openmetrics = content_type.startswith(OPENMETRICS_TYPE)
        return self._fast_registry.text(is_openmetrics=is_openmetrics) + encode(self._registry)


def content_type_of(accept: str) -> str:
    """Returns the type of the page that a scraper with this header `accept` gets."""
    return choose_encoder(accept)[1]


def _at(counts: Mapping[str, int], key: str) -> float:
    return counts.get(key, 0)
