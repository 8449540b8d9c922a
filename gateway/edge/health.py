"""What `/health?verbose` says: checks of a gateway and its cluster, each with its figure, its limit and a reason.

A check that is not ok makes the health `degraded` and nothing else: it is for people and monitors. Whether the process
should be restarted is `/health` itself, whether it should get requests is `/ready`. Finds nothing out itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.topology.members import Topology
from gateway.topology.troubles import TroubleReport, Troubles
from services.cluster.redis_store import Store
from services.runtime.gpu_facts import GpuFacts
from services.runtime.memory_limit import memory_limit

NOT_READY = "too few workers, or a failing task"
"""Why a gateway is not ready."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """The thresholds; None: there is no such limit. Times in seconds, shares from 0 to 1, temperatures in Celsius."""

    max_queued: int | None = None
    ttft_p99_s: float | None = None
    max_error_share: float | None = None
    max_gpu_c: float | None = None
    min_free_share: float | None = None


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """What is judged. `figures` are those of the last seconds (`gateway/dashboard/series.py`), None where unknown.

    `gpus` by worker; `free_share` is the free part of the memory that this process's container or unit may use, None
    where nothing limits it.
    """

    is_ready: bool
    is_redis_available: bool
    troubles: Sequence[TroubleReport]
    figures: Mapping[str, float | None]
    gpus: Mapping[str, GpuFacts]
    free_share: float | None


@dataclass(frozen=True, slots=True)
class Check:
    """A judgement. `figure` and `limit` are None where it has none, or nothing is known; `reason` is for people."""

    name: str
    ok: bool
    reason: str
    figure: float | None = None
    limit: float | None = None


class HealthPages:
    """What `/health` and `/ready` say. `figures` gives those of the last second, `is_ready` what `/ready` is."""

    def __init__(
        self,
        topology: Topology,
        store: Store,
        *,
        troubles: Troubles,
        figures: Callable[[], Mapping[str, float | None]],
        limits: HealthLimits,
        is_ready: Callable[[], bool],
    ) -> None:
        self._topology = topology
        self._store = store
        self._troubles = troubles
        self._figures = figures
        self._limits = limits
        self.is_ready = is_ready

    def report(self) -> dict[str, Any]:
        """Returns what `/health?verbose` shows."""
        limit = memory_limit()
        facts = HealthFacts(
            is_ready=self.is_ready(),
            is_redis_available=self._store.is_up,
            troubles=self._troubles.all(),
            figures=self._figures(),
            gpus={one.record.id: one.gpu_facts for one in self._topology.members() if one.gpu_facts is not None},
            free_share=None if limit is None else 1.0 - limit.used_share,
        )
        return report(facts, self._limits)


def report(facts: HealthFacts, limits: HealthLimits) -> dict[str, Any]:
    """Returns the page as a JSON object."""
    found = list(checks(facts, limits))
    status = "ok" if all(check.ok for check in found) else "degraded"
    return {"status": "alive", "health": status, "checks": [asdict(check) for check in found]}


def checks(facts: HealthFacts, limits: HealthLimits) -> Iterable[Check]:
    """Returns all checks, those without a limit included."""
    figures = facts.figures
    yield Check(
        "ready",
        facts.is_ready,
        "requests can be served" if facts.is_ready else NOT_READY,
    )
    said = "Redis answers" if facts.is_redis_available else "Redis does not answer: no worker can join"
    yield Check("redis", facts.is_redis_available, said)
    troubles = "; ".join(f"{one.kind} {one.subject}: {one.cause}" for one in facts.troubles)
    yield Check("troubles", not facts.troubles, troubles or "none", len(facts.troubles), 0)
    yield _at_most("queue_depth", figures.get("queued"), limits.max_queued, "requests wait for a place")
    yield _at_most("ttft_p99_s", figures.get("ttft_p99_s"), limits.ttft_p99_s, "s to the first token, 99th percentile")
    yield _at_most("error_share", _error_share(figures), limits.max_error_share, "of the answers that ended failed")
    heats = {worker: gpu.temperature_c for worker, gpu in facts.gpus.items() if gpu.temperature_c is not None}
    hottest = max(heats, key=heats.__getitem__, default="")
    yield _at_most("gpu_temperature_c", heats.get(hottest), limits.max_gpu_c, f"°C, the GPU of {hottest}")
    shares = {
        f"the GPU of {worker}": gpu.free_bytes / gpu.total_bytes
        for worker, gpu in facts.gpus.items()
        if gpu.free_bytes is not None and gpu.total_bytes
    }
    if facts.free_share is not None:
        shares["the gateway"] = facts.free_share
    fullest = min(shares, key=shares.__getitem__, default="")
    yield _at_least(
        "free_memory_share", shares.get(fullest), limits.min_free_share, f"of the memory of {fullest} is free"
    )


def _error_share(figures: Mapping[str, float | None]) -> float | None:
    failed, finished = figures.get("failed_per_s"), figures.get("finished_per_s")
    if failed is None or finished is None or not failed + finished:
        return None
    return failed / (failed + finished)


def _at_most(name: str, figure: float | None, limit: float | None, words: str) -> Check:
    is_ok = figure is None or limit is None or figure <= limit
    return Check(name, is_ok, _reason(figure, limit, words, "at most"), figure, limit)


def _at_least(name: str, figure: float | None, limit: float | None, words: str) -> Check:
    is_ok = figure is None or limit is None or figure >= limit
    return Check(name, is_ok, _reason(figure, limit, words, "at least"), figure, limit)


def _reason(figure: float | None, limit: float | None, words: str, bound: str) -> str:
    if figure is None:
        return "nothing is known of it now"
    return f"{figure:.4g} {words} ({'no limit' if limit is None else f'limit: {bound} {limit:g}'})"
