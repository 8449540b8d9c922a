"""The load of a worker and its Prometheus metrics. Does not depend on the role."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import cluster_pb2, worker_pb2
from services.engine.cache.host_tier import HostTierStats
from services.runtime.addresses import join_host_port
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import ConfigError
from services.runtime.metrics import Count, Distribution, process_registry
from worker.config import WorkerConfig
from worker.gpu_use import GpuUse

# A step takes from some 100 microseconds (a tiny model) to seconds (a long chunk on few cores).
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# From a few pages through shared memory to gigabytes over a slow network.
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SIZE_BUCKETS = tuple(2**exponent for exponent in range(16))
"""Sequences, or tokens, in a step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds of a worker, as the fields of `PrefillSpeed` … in `worker.proto`. None if not measured yet."""

    prefill: tuple[float, ...] | None = None
    decode: tuple[float, ...] | None = None
    link: tuple[float, ...] | None = None

    def set_in(self, load: worker_pb2.WorkerLoad) -> None:
        """Writes the known speeds into `load`."""
        if self.prefill is not None:
            speed = load.prefill_speed
            speed.overhead_s, speed.s_per_token, speed.s_per_token_squared = self.prefill
        if self.decode is not None:
            step = load.decode_speed
            step.overhead_s, step.s_per_sequence, step.s_per_context_token = self.decode
        if self.link is not None:
            load.link_speed.latency_s, load.link_speed.bytes_per_s = self.link


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a worker. The page states are defined in `cluster.proto`."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_reserved: int
    pages_used: int
    promised_pages: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    context_tokens: int = 0
    promised_pages_by_class: tuple[int, ...] = ()
    """Decode worker: pages that its requests are expected to need, allocated or not, by service class from 0."""
    running_by_class: tuple[int, ...] = ()
    """Decode worker: admitted requests by service class, from 0."""
    num_preempted: int = field(default=0, compare=False)
    speeds: Speeds = field(default=Speeds(), compare=False)

    def record_fields(self) -> dict[str, int]:
        """Returns the load as fields of a WorkerRecord."""
        return {
            "pages_total": self.pages_total,
            "pages_free": self.pages_free,
            "pages_cached": self.pages_cached,
            "pages_reserved": self.pages_reserved,
            "pages_used": self.pages_used,
            "running": self.running,
            "waiting": self.waiting,
        }

    def to_message(self, *, is_draining: bool) -> worker_pb2.WorkerLoad:
        """Returns the load as a message of the session."""
        state = cluster_pb2.WORKER_STATE_DRAINING if is_draining else cluster_pb2.WORKER_STATE_READY
        message = worker_pb2.WorkerLoad(
            pages=cluster_pb2.PageCounts(
                total=self.pages_total,
                free=self.pages_free,
                cached=self.pages_cached,
                reserved=self.pages_reserved,
                used=self.pages_used,
            ),
            promised_pages=self.promised_pages,
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            context_tokens=self.context_tokens,
            promised_pages_by_class=self.promised_pages_by_class,
            running_by_class=self.running_by_class,
            num_preempted=self.num_preempted,
            state=state,
            unix_ms=SYSTEM_CLOCK.unix_ns() // 1_000_000,
        )
        self.speeds.set_in(message)
        return message


class WorkerMetrics:
    """Prometheus metrics of one worker, in a separate registry."""

    def __init__(self, *, worker_id: str, program: str = "worker") -> None:
        self.registry = process_registry(program)
        self._worker_id = worker_id
        self._counts = worker_pb2.WorkerCounts()
        self._tier: Callable[[], HostTierStats] | None = None
        self._server: WSGIServer | None = None
        names, values = ("worker",), (worker_id,)
        self._steps = _Steps(worker_id)
        self.registry.register(self._steps)
        self.cached_tokens: Counter = Counter(
            "tandem_cached_tokens",
            "Prompt tokens that were not computed because their pages were still here.",
            names,
            registry=self.registry,
        ).labels(*values)
        self.transferred_bytes: Counter = Counter(
            "tandem_transferred_bytes", "Payload bytes of committed handoffs.", names, registry=self.registry
        ).labels(*values)
        self._prompt_tokens: Counter = Counter(
            "tandem_prefix_queried_tokens",
            "Tokens of prompts that were begun here: what could have been found in the cache.",
            names,
            registry=self.registry,
        ).labels(*values)
        self._pulls, self._pulled_bytes = _pull_counters(self.registry, worker_id)
        self._transfer_s: Histogram = Histogram(
            "tandem_transfer_seconds",
            "Time of a committed handoff from its first pages, which go while others are computed, to the commit.",
            names,
            registry=self.registry,
            buckets=TRANSFER_BUCKETS_S,
        ).labels(*values)
        self._exposed_s: Histogram = Histogram(
            "tandem_transfer_exposed_seconds",
            "The part of it that computing did not hide: from the seal to the commit.",
            names,
            registry=self.registry,
            buckets=TRANSFER_BUCKETS_S,
        ).labels(*values)
        self._preemptions = Counter(
            "tandem_preemptions",
            "Sequences that were preempted, by how: place (left its place to a better class), no_page (left its "
            "place because it found no page), swapped and recomputed (lost its pages).",
            ("worker", "reason"),
            registry=self.registry,
        )
        self._proposed, self._accepted = (
            Counter(f"tandem_speculative_{what}_tokens", words, ("worker", "source"), registry=self.registry)
            for what, words in (
                ("proposed", "Tokens that were proposed and computed along with others, by where they are from."),
                ("accepted", "Those of them that were what the model chose."),
            )
        )
        self._attempts = Counter(
            "tandem_attempts", "Attempts by how they ended.", ("worker", "outcome"), registry=self.registry
        )

    def note_step(self, *, seconds: float, num_sequences: int, num_tokens: int) -> None:
        """Records an engine step with the number of its sequences and tokens."""
        steps = self._steps
        steps.seconds.observe(seconds)
        steps.num_computed.value += num_tokens
        steps.sequences.observe(num_sequences)
        steps.tokens.observe(num_tokens)

    def note_prompt(self, *, num_tokens: int, num_cached_tokens: int) -> None:
        """Records a prompt that started, and how many of its tokens were cached."""
        self._prompt_tokens.inc(num_tokens)
        self.cached_tokens.inc(num_cached_tokens)

    def note_pull(self, *, num_tokens: int, num_bytes: int) -> None:
        """Records a prefix fetch. If it fetched no tokens, the prefix was computed."""
        self._pulls["fetched" if num_tokens else "computed"].inc()
        self._pulled_bytes.inc(num_bytes)

    def note_transfer(self, *, num_bytes: int, seconds: float, exposed_s: float) -> None:
        """Records a handoff that the other worker has committed."""
        self.transferred_bytes.inc(num_bytes)
        self._transfer_s.observe(seconds)
        self._exposed_s.observe(exposed_s)

    def watch_faults(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Exports the handoff faults by reason. `counts` is called for each scrape, in the thread that serves it."""
        self.registry.register(_Faults(self._worker_id, counts))

    def watch_host_tier(self, stats: Callable[[], HostTierStats]) -> None:
        """Exports the state of the host tier, in `counts` and for each scrape, in the thread that serves it."""
        self._tier = stats
        self.registry.register(_HostTier(self._worker_id, stats))

    def watch_gpu(self, use: Callable[[], GpuUse | None]) -> None:
        """Exports the utilization of the worker's GPU.

        `use` is called for each scrape, in the thread that serves it.
        """
        self.registry.register(_GpuUse(self._worker_id, use))

    def count_attempt(self, outcome: str) -> None:
        """Counts an attempt that ended. `outcome` has a small fixed set of values."""
        self._attempts.labels(self._worker_id, outcome).inc()

    def note_speculation(self, source: str, *, proposed: int, accepted: int) -> None:
        """Counts draft tokens. `source` has a small fixed set of values."""
        self._proposed.labels(self._worker_id, source).inc(proposed)
        self._accepted.labels(self._worker_id, source).inc(accepted)
        self._counts.proposed_tokens[source] += proposed
        self._counts.accepted_tokens[source] += accepted

    def count_preemption(self, reason: str) -> None:
        """Counts a preempted sequence. `reason` has a small fixed set of values."""
        self._preemptions.labels(self._worker_id, reason).inc()
        self._counts.preemptions[reason] += 1

    def counts(self) -> worker_pb2.WorkerCounts:
        """Returns a copy of the counts that gateways receive, even if /metrics is not served."""
        counts = worker_pb2.WorkerCounts()
        counts.CopyFrom(self._counts)
        counts.step_s = self._steps.seconds.sum
        if self._tier is not None:
            stats, tier = self._tier(), counts.host_tier
            tier.total_pages, tier.free_pages, tier.held_pages = stats.total, stats.free, stats.held
            tier.num_stored, tier.num_loaded, tier.num_dropped = stats.num_stored, stats.num_loaded, stats.num_dropped
        return counts

    def serve(self, settings: WorkerConfig, load: Callable[[], Load]) -> str:
        """Serves /metrics from a separate thread until `close`, if a port is set.

        `load` is called for each scrape, in that thread. Returns the host:port to scrape, or an empty string if no port
        is set. Raises ConfigError if the port cannot be bound.
        """
        if settings.metrics_port is None:
            return ""
        self.watch(load)
        try:
            self._server, _ = start_http_server(settings.metrics_port, addr=settings.host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"--metrics-port is {settings.metrics_port}, which cannot be listened on") from error
        logger.info("serving metrics", extra={"port": self._server.server_port})
        return join_host_port(settings.advertise_host or settings.host, self._server.server_port)

    def close(self) -> None:
        """Frees the port of /metrics, which takes up to half a second. May be called again."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def watch(self, load: Callable[[], Load]) -> None:
        """Exports the load of the worker. Call it once."""
        pages = Gauge("tandem_kv_pages", "KV pages by state.", ("worker", "state"), registry=self.registry)
        for state in ("total", "free", "cached", "reserved", "used"):
            pages.labels(self._worker_id, state).set_function(partial(_field, load, f"pages_{state}"))
        for name_of_field, name, words in (
            ("promised_pages", "tandem_kv_pages_promised", "Pages promised and not yet taken."),
            ("running", "tandem_running_sequences", "Sequences that are being computed."),
            ("waiting", "tandem_waiting_sequences", "Sequences taken and not begun."),
            ("waiting_tokens", "tandem_waiting_prompt_tokens", "Prompt tokens that wait for computation."),
        ):
            gauge = Gauge(name, words, ("worker",), registry=self.registry).labels(self._worker_id)
            gauge.set_function(partial(_field, load, name_of_field))


def _pull_counters(registry: CollectorRegistry, worker_id: str) -> tuple[Mapping[str, Counter], Counter]:
    """Returns the counters of prefix fetches by outcome, and of fetched bytes."""
    words = "Beginnings of prompts that other workers held: fetched from them, or computed after all."
    pulls = Counter("tandem_pulls", words, ("worker", "outcome"), registry=registry)
    by_outcome = {outcome: pulls.labels(worker_id, outcome) for outcome in ("fetched", "computed")}
    words = "Payload bytes of fetched beginnings of prompts."
    return by_outcome, Counter("tandem_pulled_bytes", words, ("worker",), registry=registry).labels(worker_id)


class _Steps(Collector):
    """Engine steps. Cheap to record, because the event loop does it for every step: see `services.runtime.metrics`."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self.seconds = Distribution(STEP_BUCKETS_S)
        self.sequences = Distribution(SIZE_BUCKETS)
        self.tokens = Distribution(SIZE_BUCKETS)
        self.num_computed = Count()

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of a scrape."""
        families, computed = self._families()
        for family, steps in zip(families, (self.seconds, self.sequences, self.tokens), strict=True):
            limits = [*(repr(float(bound)) for bound in steps.bounds), "+Inf"]
            buckets = list(zip(limits, steps.cumulative(), strict=True))
            family.add_metric((self._worker_id,), buckets, steps.sum)
        computed.add_metric((self._worker_id,), self.num_computed.value)
        return [*families, computed]

    def describe(self) -> Iterable[Metric]:
        """Returns the metric names for the registry."""
        families, computed = self._families()
        return [*families, computed]

    @staticmethod
    def _families() -> tuple[list[HistogramMetricFamily], CounterMetricFamily]:
        words = {
            "seconds": "Time of one engine step.",
            "sequences": "Sequences in one engine step: the batch size.",
            "tokens": "Tokens that went through the model in one engine step.",
        }
        whose = ("worker",)
        families = [HistogramMetricFamily(f"tandem_step_{name}", said, labels=whose) for name, said in words.items()]
        return families, CounterMetricFamily(
            "tandem_computed_tokens", "Tokens that went through the model.", labels=whose
        )


class _Faults(Collector):
    """Handoff faults, which are counted elsewhere."""

    def __init__(self, worker_id: str, counts: Callable[[], Mapping[str, int]]) -> None:
        self._worker_id = worker_id
        self._counts = counts

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Returns the metrics of a scrape."""
        family = self.describe()[0]
        for reason, count in self._counts().items():
            family.add_metric((self._worker_id, reason), count)
        return [family]

    def describe(self) -> list[CounterMetricFamily]:
        """Returns the metric name for the registry."""
        words = "What was refused, dropped or broken in handoffs, at either end, by reason."
        return [CounterMetricFamily("tandem_transfer_faults", words, labels=("worker", "reason"))]


class _HostTier(Collector):
    """Pages evicted from the pool to host memory, which are counted elsewhere."""

    def __init__(self, worker_id: str, stats: Callable[[], HostTierStats]) -> None:
        self._worker_id = worker_id
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of a scrape."""
        pages, moved = self.describe()
        stats = self._stats()
        for state, number in (("total", stats.total), ("free", stats.free), ("held", stats.held)):
            pages.add_metric((self._worker_id, state), number)
        for way, number in (("out", stats.num_stored), ("back", stats.num_loaded), ("dropped", stats.num_dropped)):
            moved.add_metric((self._worker_id, way), number)
        return [pages, moved]

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Returns the metric names for the registry."""
        held = "Room for KV pages in the host's memory: all of it, free, and held by cached pages."
        moved = "Cached KV pages that went to the host's memory (out), came back, or were evicted there (dropped)."
        return [
            GaugeMetricFamily("tandem_host_tier_pages", held, labels=("worker", "state")),
            CounterMetricFamily("tandem_host_tier_moved_pages", moved, labels=("worker", "way")),
        ]


class _GpuUse(Collector):
    """GPU utilization. Metrics that the GPU does not report are omitted, not 0."""

    def __init__(self, worker_id: str, use: Callable[[], GpuUse | None]) -> None:
        self._worker_id = worker_id
        self._use = use

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of a scrape."""
        power, limit, energy, clocks, busy = self.describe()
        use = self._use() or GpuUse()
        for family, value in ((power, use.power_w), (limit, use.power_limit_w), (energy, use.energy_j)):
            if value is not None:
                family.add_metric((self._worker_id,), value)
        for family, values in ((clocks, use.clocks_hz), (busy, use.busy)):
            for name, value in values.items():
                family.add_metric((self._worker_id, name), value)
        return [power, limit, energy, clocks, busy]

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Returns the metric names for the registry."""
        whose = ("worker",)
        return [
            GaugeMetricFamily("tandem_gpu_power_watts", "Power that the GPU draws.", labels=whose),
            GaugeMetricFamily("tandem_gpu_power_limit_watts", "Power that it may draw.", labels=whose),
            CounterMetricFamily("tandem_gpu_energy_joules", "Energy since its driver was loaded.", labels=whose),
            GaugeMetricFamily("tandem_gpu_clock_hertz", "Its clocks.", labels=(*whose, "clock")),
            GaugeMetricFamily(
                "tandem_gpu_busy_ratio", "Share of the time, or of what it could do, by part.", labels=(*whose, "part")
            ),
        ]


def _field(load: Callable[[], Load], name: str) -> float:
    return float(getattr(load(), name))
