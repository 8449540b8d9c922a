"""What the gateway counts and times, for Prometheus. Knows no request; one registry per gateway."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.topology import Member
from services.scheduling.health import GpuState

CONTENT_TYPE = CONTENT_TYPE_LATEST
DURATION_BUCKETS_S = tuple(0.01 * 2**n for n in range(14))
TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
OUTCOMES = ("finished", "failed", "cancelled")


class Metrics:
    """The gateway's figures. Attributes with `_s` are histograms in seconds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.ttft_s = Histogram(
            "tandem_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.itl_s = Histogram(
            "tandem_inter_token_latency_seconds",
            "Time between tokens after the first.",
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.generated_tokens = Counter(
            "tandem_generated_tokens", "Tokens delivered by workers and not dropped.", registry=registry
        )
        self.retries = Counter("tandem_failed_attempts", "Attempts that failed.", registry=registry)
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
        self.sent = Counter(
            "tandem_sent_attempts",
            "Attempts that a worker took, by role and worker.",
            ("role", "worker"),
            registry=registry,
        )
        self._open_breakers = Gauge(
            "tandem_open_breakers",
            "Workers left alone because they are slow, silent or erring or their GPU is in trouble, and pairs that "
            "cannot reach each other.",
            registry=registry,
        )
        self._duration_s = Histogram(
            "tandem_request_duration_seconds",
            "From arrival to the end.",
            ("outcome",),
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._durations_s = {outcome: self._duration_s.labels(outcome) for outcome in OUTCOMES}
        self._prompt_tokens = Counter("tandem_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._refusals = Counter(
            "tandem_refused_requests", "Calls answered with an error, by its code.", ("code",), registry=registry
        )
        # Without the tenant: whoever writes the file of keys may name thousands.
        self._tenant_refusals = Counter(
            "tandem_tenant_refusals",
            "Calls refused for their tenant's limit: requests_per_minute, tokens_per_minute, concurrency.",
            ("limit",),
            registry=registry,
        )
        self._requests = Gauge("tandem_requests", "Requests now, by state.", ("state",), registry=registry)
        self._workers = Gauge("tandem_workers", "Workers by role and state.", ("role", "state"), registry=registry)
        self._gpus = Gauge(
            "tandem_worker_gpu",
            "1 for the state that a worker's GPU is in: ok, degraded, out. Only of workers that can ask theirs.",
            ("role", "worker", "state"),
            registry=registry,
        )
        self._pages = Gauge(
            "tandem_kv_pages", "KV pages by worker and state.", ("role", "worker", "state"), registry=registry
        )

    def note_end(self, outcome: str, *, total_s: float, prompt_tokens: int) -> None:
        """One answer ended: finished, failed or cancelled."""
        self._durations_s[outcome].observe(total_s)
        self._prompt_tokens.inc(prompt_tokens)

    def note_refusal(self, code: str) -> None:
        """A call was answered with an error of this code."""
        self._refusals.labels(code).inc()

    def note_tenant_refusal(self, limit: str) -> None:
        """A call was refused because its tenant has reached this limit."""
        self._tenant_refusals.labels(limit).inc()

    def watch_requests(self, queued: Callable[[], float], running: Callable[[], float]) -> None:
        """Reads these counts whenever the figures are asked for."""
        self._requests.labels("queued").set_function(queued)
        self._requests.labels("running").set_function(running)

    def watch_breakers(self, num_open: Callable[[], float]) -> None:
        """Reads this count whenever the figures are asked for."""
        self._open_breakers.set_function(num_open)

    def render(self, members: list[Member]) -> bytes:
        """All figures in Prometheus' text format."""
        self._workers.clear()
        self._pages.clear()
        self._gpus.clear()
        for member in members:
            record, load = member.record, member.load
            self._workers.labels(record.role, member.state).inc()
            for state in ("free", "cached", "reserved", "used"):
                self._pages.labels(record.role, record.id, state).set(getattr(load, f"pages_{state}"))
            for gpu_state in GpuState if member.gpu_facts is not None else ():
                self._gpus.labels(record.role, record.id, gpu_state.value).set(gpu_state is member.gpu.state)
        return generate_latest(self._registry)
