"""Whether a GPU is healthy, degraded or not to be used, by what its driver reports. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from services.runtime.gpu_facts import GpuFacts


class GpuState(StrEnum):
    """What is to be done with a GPU."""

    OK = "ok"
    DEGRADED = "degraded"
    OUT = "out"


HARMLESS_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Faults of a program, not of the GPU, as listed in NVIDIA's device plugin for Kubernetes."""
DEGRADING_XIDS = frozenset({63, 92, 94})
"""Row remapping recorded, many corrected errors, a contained error: the GPU still works, and should be looked at."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The limits beyond which a GPU counts as degraded or is not used; weights are shares of its full speed."""

    default_slowdown_c: float = 90.0
    """The temperature at which a GPU slows down, where it does not say so itself."""
    hot_margin_c: float = 5.0
    """A GPU this close to that temperature is degraded."""
    out_above_c: float = 5.0
    """A GPU this far above that temperature is out: its own throttling does not help."""
    min_free_share: float = 0.01
    """A GPU with less free memory than this is degraded: the driver's next allocation fails."""
    weights: tuple[tuple[str, float], ...] = (
        ("hw_thermal", 0.5),
        ("hw_power_brake", 0.5),
        ("hw_slowdown", 0.5),
        ("sw_thermal", 0.7),
    )
    """Weights by reason for throttling, without `sw_power_cap`: many GPUs are at their power limit whenever they are
    busy, and what that costs is measured."""
    suspect_weight: float = 0.5
    """The weight of a GPU that is degraded for any other reason."""


@dataclass(frozen=True, slots=True)
class GpuJudgement:
    """The judgement of a GPU. `weight`: its share of full speed; `reasons` name what was found, for log and status."""

    state: GpuState = GpuState.OK
    weight: float = 1.0
    reasons: tuple[str, ...] = ()


GPU_OK = GpuJudgement()


def judge_gpu(facts: GpuFacts, limits: GpuLimits | None = None) -> GpuJudgement:
    """Judges a GPU: uncorrected errors, failed remapping, own faults or great heat put it out; the rest degrades it."""
    limits = limits or GpuLimits()
    out: list[str] = []
    degraded: list[tuple[str, float]] = [(name, w) for name, w in limits.weights if name in facts.throttle_reasons]
    if facts.num_uncorrected:
        out.append("uncorrected_memory_errors")
    if facts.has_remap_failed:
        out.append("row_remap_failed")
    if facts.is_remap_pending:
        degraded.append(("row_remap_pending", limits.suspect_weight))
    if facts.is_lost:
        out.append("lost")
    for xid in sorted(facts.xids - HARMLESS_XIDS):
        if xid in DEGRADING_XIDS:
            degraded.append((f"xid_{xid}", limits.suspect_weight))
        else:
            out.append(f"xid_{xid}")
    if facts.temperature_c is not None:
        slowdown_c = limits.default_slowdown_c if facts.slowdown_c is None else facts.slowdown_c
        if facts.temperature_c >= slowdown_c + limits.out_above_c:
            out.append("too_hot")
        elif facts.temperature_c >= slowdown_c - limits.hot_margin_c:
            degraded.append(("hot", limits.suspect_weight))
    if (
        facts.free_bytes is not None
        and facts.total_bytes
        and facts.free_bytes < limits.min_free_share * facts.total_bytes
    ):
        degraded.append(("little_free_memory", limits.suspect_weight))
    if out:
        return GpuJudgement(GpuState.OUT, 0.0, tuple(out))
    if degraded:
        return GpuJudgement(GpuState.DEGRADED, min(w for _, w in degraded), tuple(name for name, _ in degraded))
    return GpuJudgement()
