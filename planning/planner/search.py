"""The search for a plan: from the closed form's numbers, one worker more or less at a time, each step simulated.

Large clusters are simulated by a cell: a part of the workers at the same part of the rate. A cell queues more than the
whole cluster would, as it has fewer workers to choose from, so that a plan errs to the safe side.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from planning.planner.bounds import Bound, impossible, least_workers, step_target_s
from planning.planner.question import CHUNK_TOKENS, DECODE_CHUNK_TOKENS, Kind, LatencyTargets, Question
from planning.simulator.cluster import ClusterSpec, Run, simulate
from planning.simulator.faults import without_region
from planning.simulator.report import answered, e2e_s, percentile, tpot_s, ttft_s

CELL_WORKERS = 8
"""The most workers of a role that are simulated, about."""
MIN_REQUESTS = 1000
SPAN = 8.0
"""Requests arrive for this many times as long as one takes."""
WARM_UP, COOL_DOWN = 0.3, 0.1
"""The first and last of the requests, which do not count: the cluster is empty before the one and after the other."""
MAX_STEPS = 40
GROWTHS = (1.2, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Percentiles of one simulation, in seconds, and how busy the roles were."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    busy_prefill: float
    busy_decode: float

    def missed(self, targets: LatencyTargets) -> list[str]:
        """Returns the targets that are not kept."""
        rows = (
            ("ttft", self.ttft_s, targets.ttft_s),
            ("tpot", self.tpot_s, targets.tpot_s),
            ("e2e", self.e2e_s, targets.e2e_s),
        )
        return [name for name, value, target in rows if target is not None and not value <= target]


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers and kinds of workers; with no prefill workers, decode workers compute prompts too."""

    prefill: Kind
    decode: Kind
    num_prefill: int
    num_decode: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all workers."""
        return self.num_prefill * self.prefill.num_gpus + self.num_decode * self.decode.num_gpus

    @property
    def price_per_h(self) -> float:
        """Dollars an hour."""
        return self.num_prefill * self.prefill.price_per_h + self.num_decode * self.decode.price_per_h

    @property
    def watts(self) -> float:
        """Watts under load."""
        return self.num_prefill * self.prefill.watts + self.num_decode * self.decode.watts


@dataclass(frozen=True, slots=True)
class Plan:
    """A shape that keeps the targets, what it was seen to do, and what happens when things change."""

    shape: Shape
    outcomes: tuple[Outcome, ...]
    """One for each seed."""
    growth: dict[float, Outcome] = field(default_factory=dict)
    """What it does when the rate is this many times as high."""
    lost: dict[str, list[str]] = field(default_factory=dict)
    """LatencyTargets that are missed while one worker of a role is lost."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The cheapest plan with separate roles, the cheapest with one pool, or why there is neither."""

    best: Plan | None
    one_pool: Plan | None
    others: tuple[Shape, ...]
    bound: Bound | None


def answer(question: Question) -> Answer:
    """Finds plans for every pair of kinds of one model; the cheapest comes first."""
    bounds, too_few, shapes, pools = list[Bound](), list[Bound](), list[Shape](), list[Shape]()
    for prefill in question.kinds:
        for decode in question.kinds:
            bound = impossible(prefill, decode, targets=question.targets, workload=question.workload)
            if bound is not None:
                bounds.append(bound)
                continue
            least = least_workers(prefill, decode, targets=question.targets, workload=question.workload)
            least_gpus = math.ceil(least[0]) * prefill.num_gpus + math.ceil(least[1]) * decode.num_gpus
            if least_gpus > question.max_gpus:
                too_few.append(Bound(f"GPUs: at least {least_gpus} are needed", question.max_gpus, least_gpus))
                continue
            shapes.append(Shape(prefill, decode, math.ceil(least[0]), math.ceil(least[1])))
            if prefill is decode:
                pools.append(Shape(prefill, decode, 0, math.ceil(least[0] + least[1])))
    # Whatever a shape costs at least, a dearer one that is found already is better than.
    best = _cheapest(question, sorted(shapes, key=lambda shape: shape.price_per_h))
    pool = _cheapest(question, sorted(pools, key=lambda shape: shape.price_per_h))
    found = None if best is None else _judged(question, best)
    single = None if pool is None else _judged(question, pool)
    if found is None and single is None and shapes:
        too_few = [_within_limit(question, shapes)]
    # What more GPUs could do is not impossible.
    bounds = too_few or bounds
    nearest = min(
        bounds, key=lambda bound: bound.nearest_s / bound.target_s if bound.target_s else math.inf, default=None
    )
    return Answer(found, single, tuple(shapes), nearest if found is None and single is None else None)


def outcome(question: Question, shape: Shape, *, seed: int = 1, load: float = 1.0, lost_region: str = "") -> Outcome:
    """Simulates a shape at `load` times the workload's rate, without the workers of `lost_region`."""
    geography = question.geography
    cells = max(1, max(shape.num_prefill, shape.num_decode) // CELL_WORKERS)
    num_decode = max(1, shape.num_decode // cells)
    num_prefill = max(1, round(shape.num_prefill / cells)) if shape.num_prefill else 0
    # The cell gets the share of the rate of its scarcer role.
    shares = [num_decode / shape.num_decode] + ([num_prefill / shape.num_prefill] if num_prefill else [])
    rate_per_s = question.workload.rate_per_s * load * max(shares)
    num_requests = max(MIN_REQUESTS, math.ceil(SPAN * rate_per_s * _usual_s(question, shape)))
    workers = f"{num_prefill} prefill and {num_decode} decode workers" if num_prefill else f"{num_decode} workers"
    question.tell(f"{workers} with {num_requests} requests at {rate_per_s:.3g} a second")
    trace = geography.placed(question.workload.trace(num_requests, rate_per_s=rate_per_s, seed=seed), seed=seed)
    longest = max(prompt + reply for prompt, reply in question.workload.lengths)
    decode = shape.decode.spec(is_decode=True, chunk_tokens=CHUNK_TOKENS if num_prefill else DECODE_CHUNK_TOKENS)
    spec = ClusterSpec(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=shape.prefill.spec(),
        decode=decode,
        max_sequence_tokens=longest,
        max_waiting=10**6,
    )
    meddler = without_region(lost_region) if lost_region else None
    return _measured(simulate(trace, geography.cluster(spec), "hybrid", seed=seed, meddler=meddler), question.targets)


def _usual_s(question: Question, shape: Shape) -> float:
    """Returns about how long a request takes that keeps its targets."""
    workload, step_s = (
        question.workload,
        step_target_s(shape.prefill, targets=question.targets, workload=question.workload),
    )
    if step_s is None:
        step_s = 2 * shape.decode.profile.law.decode_at(1).step_s(1, round(workload.mean_prompt))
    return (question.targets.ttft_s or 0.0) / 2 + workload.mean_answer * step_s


def _measured(run: Run, targets: LatencyTargets) -> Outcome:
    num_all = len(run.jobs)
    jobs = [job for job in answered(run) if WARM_UP * num_all <= job.index <= (1 - COOL_DOWN) * num_all]

    def at(values: Iterable[float]) -> float:
        return percentile(sorted(values), targets.percentile)

    busy = {
        letter: [one.total / run.end_s for name, one in run.busy.items() if name[0] == letter] for letter in ("p", "d")
    }
    return Outcome(
        at(map(ttft_s, jobs)),
        at(tpot_s(job) for job in jobs if job.num_output_tokens > 1),
        at(map(e2e_s, jobs)),
        sum(busy["p"]) / max(1, len(busy["p"])),
        sum(busy["d"]) / len(busy["d"]),
    )


def _within_limit(question: Question, shapes: list[Shape]) -> Bound:
    """Returns what the best of these shapes does with all GPUs that there may be."""
    targets, found = question.targets, []
    for shape in shapes:
        factor = question.max_gpus / shape.num_gpus
        num_prefill = max(1, math.floor(shape.num_prefill * factor))
        num_decode = (question.max_gpus - num_prefill * shape.prefill.num_gpus) // shape.decode.num_gpus
        if num_decode < 1:
            continue
        full = replace(shape, num_prefill=num_prefill, num_decode=num_decode)
        seen = outcome(question, full)
        for name in seen.missed(targets):
            target_s, value_s = getattr(targets, f"{name}_s"), getattr(seen, f"{name}_s")
            words = f"GPUs: with {full.num_gpus} as {num_prefill}:{num_decode} {name.upper()} is {value_s:.3g} s"
            found.append(Bound(words, target_s, value_s))
    worst = Bound(f"GPUs: {question.max_gpus} are too few for any shape", 0.0, 0.0)
    return min(found, key=lambda bound: bound.nearest_s / bound.target_s, default=worst)


def _cheapest(question: Question, shapes: list[Shape]) -> Shape | None:
    best: Shape | None = None
    for shape in shapes:
        if best is not None and shape.price_per_h >= best.price_per_h:
            break
        grown = _grown(question, shape, best)
        if grown is not None and (best is None or grown.price_per_h < best.price_per_h):
            best = grown
    return best


def _grown(question: Question, shape: Shape, best: Shape | None) -> Shape | None:
    """Adds workers until the targets are kept, by steps that double while far off; then takes back what it can."""
    # The closed form knows no batch of prompts, so that even fewer may do.
    step, before = 1, replace(shape, num_prefill=0, num_decode=0)
    for _ in range(MAX_STEPS):
        if shape.num_gpus > question.max_gpus or (best is not None and shape.price_per_h >= best.price_per_h):
            return None
        missed, seen = _look(question, shape)
        if not missed:
            break
        before = shape
        shape = _more(shape, missed, seen, step=step)
        step = min(step * 2, max(1, (shape.num_prefill + shape.num_decode) // 8))
    else:
        return None
    shape = _shrunk(question, shape, before)
    for seed in question.seeds:
        missed, seen = _look(question, shape, seed=seed)
        if missed:
            shape = _more(shape, missed, seen, step=1)
    return shape if shape.num_gpus <= question.max_gpus else None


def _shrunk(question: Question, shape: Shape, before: Shape) -> Shape:
    for name in ("num_decode", "num_prefill"):
        low, high = getattr(before, name), getattr(shape, name)
        while high - low > 1:
            middle = (low + high) // 2
            fewer = replace(shape, **{name: middle})
            if _look(question, fewer)[0]:
                low = middle
            else:
                high, shape = middle, fewer
    return shape


def _look(question: Question, shape: Shape, *, seed: int = 1) -> tuple[list[str], Outcome | None]:
    """Returns the targets that are missed, with as many workers lost as must be bearable, and what was seen."""
    spare = question.redundancy
    if spare and (shape.num_decode <= spare or 0 < shape.num_prefill <= spare):
        return ["redundancy"], None
    regions = question.geography.regions
    if question.geography.held_share and min(shape.num_decode, shape.num_prefill or shape.num_decode) < len(regions):
        return ["regions"], None
    fewer = replace(shape, num_decode=shape.num_decode - spare)
    if shape.num_prefill:
        fewer = replace(fewer, num_prefill=shape.num_prefill - spare)
    seen = outcome(question, fewer, seed=seed)
    return seen.missed(question.targets), seen


def _more(shape: Shape, missed: list[str], seen: Outcome | None, *, step: int) -> Shape:
    if not shape.num_prefill:
        return replace(shape, num_decode=shape.num_decode + step)
    if seen is None:
        return replace(shape, num_prefill=shape.num_prefill + 1, num_decode=shape.num_decode + 1)
    lacks_prefill = "ttft" in missed or ("e2e" in missed and seen.busy_prefill > seen.busy_decode)
    lacks_decode = "tpot" in missed or ("e2e" in missed and not lacks_prefill)
    return replace(
        shape,
        num_prefill=shape.num_prefill + (step if lacks_prefill else 0),
        num_decode=shape.num_decode + (step if lacks_decode else 0),
    )


def _judged(question: Question, shape: Shape) -> Plan:
    outcomes = tuple(outcome(question, shape, seed=seed) for seed in question.seeds)
    growth = {load: outcome(question, shape, load=load) for load in GROWTHS}
    lost = {}
    for role, fewer in (
        ("prefill", replace(shape, num_prefill=shape.num_prefill - 1)),
        ("decode", replace(shape, num_decode=shape.num_decode - 1)),
    ):
        if role == "prefill" and not shape.num_prefill:
            continue
        is_last = fewer.num_decode == 0 or (role == "prefill" and fewer.num_prefill == 0)
        lost[role] = ["all of a role"] if is_last else outcome(question, fewer).missed(question.targets)
    regions = question.geography.regions
    for region in regions if shape.num_decode >= len(regions) > 1 else ():
        missed = outcome(question, shape, lost_region=region).missed(question.targets)
        lost[f"region {region}"] = ["what is held there", *missed] if question.geography.held_share else missed
    return Plan(shape, outcomes, growth, lost)
