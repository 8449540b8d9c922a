"""Evaluates the health readings of a GPU: healthy, degraded, or out of use. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from services.runtime.gpu_facts import GpuFacts


class GpuState(StrEnum):
    """Verdict on a GPU."""

    OK = "ok"
    DEGRADED = "degraded"
    OUT = "out"


HARMLESS_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XID errors caused by a program and not by the GPU, as listed in NVIDIA's device plugin for Kubernetes."""
DEGRADING_XIDS = frozenset({63, 92, 94})
"""XID errors after which the GPU still works: recorded row remapping, many corrected errors, a contained error."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits beyond which a GPU counts as degraded or is not used. Weights are fractions of its full speed."""

    default_slowdown_c: float = 90.0
    """Temperature at which a GPU slows down, in °C, if its driver does not report one."""
    hot_margin_c: float = 5.0
    """Distance below that temperature, in °C, at which a GPU counts as degraded."""
    out_above_c: float = 5.0
    """Distance above that temperature, in °C, at which a GPU is out of use, because its throttling does not help."""
    min_free_share: float = 0.01
    """Fraction of free memory below which a GPU is degraded, because the driver's next allocation may fail."""
    weights: tuple[tuple[str, float], ...] = (
        ("hw_thermal", 0.5),
        ("hw_power_brake", 0.5),
        ("hw_slowdown", 0.5),
        ("sw_thermal", 0.7),
    )
    """Weights by throttling reason. `sw_power_cap` is missing, because busy GPUs often reach their power limit."""
    suspect_weight: float = 0.5
    """Weight of a GPU that is degraded for any other reason."""


@dataclass(frozen=True, slots=True)
class GpuJudgement:
    """Verdict with its reasons, which logs and status views show. `weight` is a fraction of the full speed."""

    state: GpuState = GpuState.OK
    weight: float = 1.0
    reasons: tuple[str, ...] = ()


GPU_OK = GpuJudgement()


def judge_gpu(facts: GpuFacts, limits: GpuLimits | None = None) -> GpuJudgement:
    """Returns the verdict on a GPU.

    Uncorrected errors, failed row remapping, hardware faults, and overheating put it out of use. The rest degrades it.
    """
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
