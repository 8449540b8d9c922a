"""What a run came to: plain numbers, the same for the same run, and the tables that a terminal shows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planning.simulator.cluster import Run
from planning.simulator.jobs import Job
from planning.simulator.traces import Trace

DIGITS = 6
"""Decimals of the numbers in a report."""

MOONCAKE_LADDER = {"random": 92.07, "least_loaded": 60.41, "prefix_aware": 14.36, "hybrid": 6.26}
"""Mean TTFT in seconds of Mooncake's random, load-balancing, cache-aware and KVCache-centric scheduling: labels of
figure 8 in arXiv:2407.00079v4 (8 prefill + 8 decode instances, dummy LLaMA2-70B on 8 A800 each, 23,000 requests)."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Service level: seconds to the first token, and seconds for each later one."""

    ttft_s: float
    tpot_s: float


def ttft_s(job: Job) -> float:
    """Arrival to first token of a request that was answered."""
    assert job.first_token_s is not None
    return job.first_token_s - job.arrival_s


def tpot_s(job: Job) -> float:
    """Mean time of a token after the first; 0 where the answer has one token."""
    assert job.first_token_s is not None
    assert job.end_s is not None
    return (job.end_s - job.first_token_s) / (job.num_output_tokens - 1) if job.num_output_tokens > 1 else 0.0


def e2e_s(job: Job) -> float:
    """Arrival to last token."""
    assert job.end_s is not None
    return job.end_s - job.arrival_s


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile of ascending values, interpolated between neighbours; NaN without values."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles; None of no values."""
    ordered = sorted(values)
    found = {"mean": math.fsum(ordered) / len(ordered) if ordered else math.nan}
    found |= {f"p{round(share * 100)}": percentile(ordered, share) for share in (0.5, 0.9, 0.99)}
    return {name: _rounded(value) for name, value in found.items()}


def answered(run: Run) -> list[Job]:
    """Requests that got their whole answer."""
    return [job for job in run.jobs if job.end_s is not None]


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What a report says of its trace."""
    span_s = trace.requests[-1].arrival_s
    return {
        "name": trace.name,
        "format": trace.format,
        "requests": len(trace.requests),
        "span_s": _rounded(span_s),
        "rate_per_s": _rounded(len(trace.requests) / span_s) if span_s else None,
        "prompt_tokens": sum(request.num_prompt_tokens for request in trace.requests),
        "output_tokens": sum(request.num_output_tokens for request in trace.requests),
        "block_tokens": trace.block_tokens,
    }


def summary(run: Run, targets: Targets) -> dict[str, Any]:
    """All numbers of a run. A refused request has missed every target."""
    jobs = answered(run)
    met_ttft = [job for job in jobs if ttft_s(job) <= targets.ttft_s]
    met_tpot = [job for job in jobs if tpot_s(job) <= targets.tpot_s]
    num_good = sum(tpot_s(job) <= targets.tpot_s for job in met_ttft)
    num_all, end_s = len(run.jobs), run.end_s or 1.0
    prompt_tokens = sum(job.num_prompt_tokens for job in jobs)
    queue = run.queue.means(end_s)
    return {
        "policy": run.policy,
        "requests": {
            "all": num_all,
            "answered": len(jobs),
            "refused": dict(sorted(Counter(job.refusal for job in run.jobs if job.refusal).items())),
            "prefilled_remotely": sum(job.is_remote for job in jobs),
        },
        "end_s": _rounded(run.end_s),
        "ttft_s": spread([ttft_s(job) for job in jobs]),
        "tpot_s": spread([tpot_s(job) for job in jobs if job.num_output_tokens > 1]),
        "e2e_s": spread([e2e_s(job) for job in jobs]),
        "slo": {
            "ttft_s": targets.ttft_s,
            "tpot_s": targets.tpot_s,
            "met_ttft": _rounded(len(met_ttft) / num_all),
            "met_tpot": _rounded(len(met_tpot) / num_all),
            "met_both": _rounded(num_good / num_all),
        },
        "goodput_per_s": _rounded(num_good / end_s),
        "output_tokens_per_s": _rounded(sum(job.num_output_tokens for job in jobs) / end_s),
        "hit_rate": _rounded(sum(job.num_cached_tokens for job in jobs) / prompt_tokens) if jobs else 0.0,
        "utilisation": {name: _rounded(busy.total / end_s) for name, busy in sorted(run.busy.items())},
        "queue": {"mean": _rounded(run.queue.total / end_s), "peak": _rounded(max(queue, default=0.0))},
        "prompts_in_prefill": {"mean": _rounded(run.prefill_line.total / end_s)},
        "regions": {name: _of_region(run, name) for name in sorted({job.region for job in run.jobs} - {""})},
    }


def _of_region(run: Run, region: str) -> dict[str, Any]:
    """Returns what came of the requests from a region, wherever they were answered."""
    here = [job for job in run.jobs if job.region == region]
    jobs = [job for job in here if job.end_s is not None]
    refused = Counter(job.refusal for job in here if job.refusal)
    return {
        "requests": {"all": len(here), "answered": len(jobs), "refused": dict(sorted(refused.items()))},
        "ttft_s": spread([ttft_s(job) for job in jobs]),
    }


def series(run: Run) -> dict[str, Any]:
    """Means over the buckets of time: how busy the roles were, how many requests and prompts waited."""
    end_s = run.end_s or 1.0
    roles = {}
    for role, letter in (("prefill", "p"), ("decode", "d")):
        busy = [timeline.means(end_s) for name, timeline in run.busy.items() if name.startswith(letter)]
        roles[role] = [_rounded(sum(means) / len(means)) for means in zip(*busy, strict=True)]
    return {
        "bucket_s": run.bucket_s,
        "utilisation": roles,
        "queue": [_rounded(value) for value in run.queue.means(end_s)],
        "prompts_in_prefill": [_rounded(value) for value in run.prefill_line.means(end_s)],
    }


def cdf(values: Sequence[float], num_points: int = 200) -> list[tuple[float, float]]:
    """(value, share of values that are not greater), at most `num_points` of them."""
    ordered = sorted(values)
    places = sorted({round(step * (len(ordered) - 1) / (num_points - 1)) for step in range(num_points)})
    return [(ordered[place], (place + 1) / len(ordered)) for place in places] if ordered else []


def ladder_table(summaries: Sequence[Mapping[str, Any]], *, with_paper: bool) -> str:
    """One line for each policy; × is its mean TTFT over the last one's, PAPER × the same in Mooncake's figure 8."""
    headings = ["POLICY", "TTFT MEAN", "P50", "P90", "P99", "TPOT P50", "P99", "HIT", "SLO", "GOODPUT", "REFUSED", "×"]
    is_ladder = with_paper and {one["policy"] for one in summaries} >= set(MOONCAKE_LADDER)
    last = summaries[-1]["ttft_s"]["mean"]
    rows = [headings + (["PAPER ×"] if is_ladder else [])]
    for one in summaries:
        ttft, tpot = one["ttft_s"], one["tpot_s"]
        row = [one["policy"], *(_seconds(ttft[name]) for name in ("mean", "p50", "p90", "p99"))]
        row += [_milliseconds(tpot["p50"]), _milliseconds(tpot["p99"])]
        row += [f"{one['hit_rate']:.3f}", f"{one['slo']['met_both']:.3f}", f"{one['goodput_per_s']:.2f}/s"]
        row += [str(sum(one["requests"]["refused"].values()))]
        row.append(f"{ttft['mean'] / last:.2f}" if last and ttft["mean"] is not None else "-")
        if is_ladder:
            paper_s = MOONCAKE_LADDER.get(one["policy"])
            row.append("-" if paper_s is None else f"{paper_s / MOONCAKE_LADDER['hybrid']:.2f}")
        rows.append(row)
    return aligned(rows)


def details(one: Mapping[str, Any]) -> str:
    """What the table has no room for."""
    utilisation = "  ".join(f"{name} {share:.2f}" for name, share in one["utilisation"].items())
    queue, e2e = one["queue"], one["e2e_s"]
    return (
        f"{one['policy']}\n"
        f"  requests     {one['requests']['all']}, answered {one['requests']['answered']}, "
        f"refused {_refused(one['requests'])}, prefilled remotely {one['requests']['prefilled_remotely']}\n"
        f"  e2e          mean {_seconds(e2e['mean'])}  p50 {_seconds(e2e['p50'])}  p90 {_seconds(e2e['p90'])}  "
        f"p99 {_seconds(e2e['p99'])}\n"
        f"  slo          ttft {one['slo']['met_ttft']:.3f}  tpot {one['slo']['met_tpot']:.3f}  "
        f"both {one['slo']['met_both']:.3f}\n"
        f"  queue        mean {queue['mean']:.2f}  peak {queue['peak']:.2f}; prompts in prefill "
        f"{one['prompts_in_prefill']['mean']:.2f}\n"
        f"  utilisation  {utilisation}\n"
        + "".join(_region_line(name, region) for name, region in one["regions"].items())
    )


def _region_line(name: str, region: Mapping[str, Any]) -> str:
    counts, ttft = region["requests"], region["ttft_s"]
    return (
        f"  from {name:7s} {counts['all']}, answered {counts['answered']}, refused {_refused(counts)}; "
        f"ttft mean {_seconds(ttft['mean'])}  p99 {_seconds(ttft['p99'])}\n"
    )


def _refused(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts["refused"].items()) or "none"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, DIGITS)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f} ms"
