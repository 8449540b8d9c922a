"""A small kind of worker, and questions about it."""

from collections.abc import Sequence

from planning.planner.question import Kind, LatencyTargets, Question, Workload
from planning.simulator.laws import LinearLaw
from planning.simulator.profiles import Profile
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed

STEP = DecodeSpeed(0.01, 1e-4, 1e-8)
KIND = Kind("kind", Profile("kind", LinearLaw(PrefillSpeed(0.01, 1e-4, 1e-9), STEP, STEP), 1000), 1, 2.0, 500, 200_000)


def question(
    *,
    rate_per_s: float,
    targets: LatencyTargets,
    lengths: Sequence[tuple[int, int]] = ((800, 60),),
    max_gpus: int = 1000,
    redundancy: int = 0,
) -> Question:
    return Question(Workload(rate_per_s, lengths), targets, [KIND], max_gpus, redundancy, seeds=(1, 2))
