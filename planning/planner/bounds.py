"""What no number of workers can do, and how many are needed at least: closed forms, before anything is simulated.

A prompt that is alone is computed in no less than its law says, and an answer of n tokens takes n - 1 steps of a batch
of one; targets below that are infeasible however many workers there are. Queues come on top: a target of exactly that
is kept by nobody, so that the nearest feasible target is a little more.
"""

from dataclasses import dataclass

from planning.planner.question import CHUNK_TOKENS, Kind, LatencyTargets, Workload
from planning.simulator.report import percentile
from services.scheduling.capacity import largest_batch, tokens_per_s

MARGIN = 1.05
"""A target must be this many times what an idle worker takes."""
MAX_UTILISATION = 0.9


@dataclass(frozen=True, slots=True)
class Bound:
    """What keeps a kind from a target: the constraint in words, its value, and the nearest that could be kept."""

    constraint: str
    target_s: float
    nearest_s: float


def prompt_s(kind: Kind, num_tokens: int) -> float:
    """Returns the seconds of a prompt that is alone, in steps of at most CHUNK_TOKENS tokens."""
    law = kind.profile.law
    return sum(
        law.step_s([(min(CHUNK_TOKENS, num_tokens - before), before)]) for before in range(0, num_tokens, CHUNK_TOKENS)
    )


def alone_s(kind: Kind, *, targets: LatencyTargets, workload: Workload) -> dict[str, float]:
    """Returns TTFT, TPOT and E2E of requests that are alone on their workers, at the targets' percentile."""
    share = targets.percentile
    ttft, tpot, e2e = [], [], []
    for num_prompt, num_answer in workload.lengths:
        first_s = min(kind.profile.outside_s) + prompt_s(kind, num_prompt)
        step_s = kind.profile.law.decode_at(1).step_s(1, num_prompt + num_answer / 2)
        ttft.append(first_s)
        tpot.append(step_s)
        e2e.append(first_s + (num_answer - 1) * step_s)
    return {
        "ttft": percentile(sorted(ttft), share),
        "tpot": percentile(sorted(tpot), share),
        "e2e": percentile(sorted(e2e), share),
    }


def impossible(prefill: Kind, decode: Kind, *, targets: LatencyTargets, workload: Workload) -> Bound | None:
    """Returns the target that this pair of kinds can never keep, whatever its number, or None."""
    first, later = (
        alone_s(prefill, targets=targets, workload=workload),
        alone_s(decode, targets=targets, workload=workload),
    )
    longest = max(prompt + answer for prompt, answer in workload.lengths)
    if longest > decode.kv_tokens:
        return Bound(f"pages: {longest} tokens do not fit into the {decode.kv_tokens} of {decode.name}", 0.0, 0.0)
    rows = (
        ("TTFT: computing a prompt alone takes", targets.ttft_s, first["ttft"]),
        ("TPOT: a decode step of one sequence takes", targets.tpot_s, later["tpot"]),
        ("E2E: a request alone takes", targets.e2e_s, first["ttft"] + later["e2e"] - later["ttft"]),
    )
    for words, target_s, least_s in rows:
        if target_s is not None and target_s < MARGIN * least_s:
            return Bound(f"{words} {least_s:.4g} s on {decode.name}", target_s, MARGIN * least_s)
    return None


def most_per_s(kind: Kind, workload: Workload, *, step_target_s: float | None) -> tuple[float, int]:
    """Returns the requests per second that one decode worker ends at best, and the batch it has then.

    The batch is as large as the pages, the kind's largest one and the time of a step allow.
    """
    context = workload.mean_prompt + workload.mean_answer / 2
    most = max(1, min(kind.max_batch, int(kind.kv_tokens / (workload.mean_prompt + workload.mean_answer))))
    line_at = kind.profile.law.decode_at
    batch = largest_batch(line_at, most, context_tokens=context, step_target_s=step_target_s)
    per_s = tokens_per_s(line_at(batch), batch, context_tokens=context)
    return per_s / max(1.0, workload.mean_answer - 1), batch


def step_target_s(prefill: Kind, *, targets: LatencyTargets, workload: Workload) -> float | None:
    """Returns how long a step may take: by TPOT, or by what E2E leaves for it."""
    found = [] if targets.tpot_s is None else [targets.tpot_s]
    if targets.e2e_s is not None:
        rest_s = targets.e2e_s - MARGIN * prompt_s(prefill, round(workload.mean_prompt))
        longest = percentile(sorted(answer for _, answer in workload.lengths), targets.percentile)
        found.append(rest_s / max(1.0, longest - 1))
    return min(found, default=None)


def least_workers(prefill: Kind, decode: Kind, *, targets: LatencyTargets, workload: Workload) -> tuple[float, float]:
    """Returns how many prefill and decode workers the rate needs at least, as fractions."""
    mean_s = sum(prompt_s(prefill, prompt) for prompt, _ in workload.lengths) / len(workload.lengths)
    per_s, _ = most_per_s(decode, workload, step_target_s=step_target_s(prefill, targets=targets, workload=workload))
    return workload.rate_per_s * mean_s / MAX_UTILISATION, workload.rate_per_s / per_s
