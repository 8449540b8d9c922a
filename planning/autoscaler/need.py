"""How many workers a load takes, by the planner's closed forms and what is known of the workers' speeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from planning.autoscaler.policy import Need
from planning.planner.bounds import least_workers
from planning.planner.question import MAX_BATCH, Kind, LatencyTargets, Workload
from planning.simulator.laws import LinearLaw
from planning.simulator.profiles import Profile
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a gateway tells of one worker; None: it has measured nothing yet. `max_batch` 0: unknown.

    `kv_tokens`: tokens that its pages hold; `max_batch`: sequences that it decodes at a time.
    """

    role: str
    state: str
    prefill: PrefillSpeed | None
    decode: DecodeSpeed | None
    kv_tokens: int
    max_batch: int
    waiting_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast prompts and answers are computed, by the worker in the middle, and what a decode worker has room for."""

    prefill: PrefillSpeed
    decode: DecodeSpeed
    kv_tokens: int
    max_batch: int

    @property
    def kind(self) -> Kind:
        """The kind of worker that the closed forms take; it has no price."""
        law = LinearLaw(self.prefill, self.decode, self.decode)
        return Kind("measured", Profile("measured", law, 0), 1, 0.0, 0.0, self.kv_tokens, self.max_batch)


def need_of(prefill: Kind, decode: Kind, *, targets: LatencyTargets) -> Need:
    """Returns how many workers of each role a load takes at least, as fractions."""

    def need(rate_per_s: float, mean_prompt: float, mean_answer: float) -> tuple[float, float]:
        if rate_per_s <= 0:
            return 0.0, 0.0
        lengths = [(max(1, round(mean_prompt)), max(1, round(mean_answer)))]
        return least_workers(prefill, decode, targets=targets, workload=Workload(rate_per_s, lengths))

    return need


def measured(workers: Sequence[WorkerFacts], before: Speeds | None) -> Speeds | None:
    """Returns what the workers have measured; what none of them has is as `before`.

    None: nobody has measured yet how fast prompts are computed, or how fast answers are.
    """
    prefills = [one for one in workers if one.role == "prefill"]
    decodes = [one for one in workers if one.role == "decode"]
    # Where no prefill worker has measured anything, decode workers may have: they compute prompts too.
    prompts = [one.prefill for one in prefills if one.prefill] or [one.prefill for one in decodes if one.prefill]
    steps = [one.decode for one in decodes if one.decode]
    rooms = [one.kv_tokens for one in decodes if one.kv_tokens > 0]
    batches = [one.max_batch for one in decodes if one.max_batch > 0]
    prefill, decode = (None, None) if before is None else (before.prefill, before.decode)
    if prompts:
        prefill = sorted(prompts, key=lambda line: line.time_s(512))[len(prompts) // 2]
    if steps:
        decode = sorted(steps, key=lambda line: line.step_s(8, 4096))[len(steps) // 2]
    if prefill is None or decode is None:
        return None
    kv_tokens = before.kv_tokens if before is not None and not rooms else int(statistics.median(rooms or [1]))
    return Speeds(
        prefill=prefill,
        decode=decode,
        kv_tokens=kv_tokens,
        max_batch=int(statistics.median(batches)) if batches else MAX_BATCH,
    )
