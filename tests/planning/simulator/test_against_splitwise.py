"""Our simulator under the rules of splitwise-sim: the highest rates that keep its nine limits, on a grid of 10/s.

Both have BLOOM-176B's measured times by the tokens of a batch, whole prompts before sequences, at most 2,048 tokens and
512 sequences in a step. Ours routes by load, theirs by waiting tokens. Their Splitwise-HH lets prompt machines
generate too once the others' memory is full; ours has no such pool, so that it is held to its rate without a limit of
memory, and to being no worse than machines that do both.
"""

import csv
from functools import cache

import pytest

from planning.simulator.cluster import simulate
from planning.simulator.report import e2e_s, percentile, ttft_s
from tests.planning.simulator.splitwise import FOLDER, law, machines, requests

SHARES = (0.5, 0.9, 0.99)
LIMITS = {"ttft": (2, 3, 6), "tbt": (1.25, 1.5, 5), "e2e": (1.25, 1.5, 5)}
"""Slowdowns against a DGX-A100 that has nothing else to do."""
pytestmark = pytest.mark.slow


@cache
def slowdowns(design: str, rate: int) -> dict[str, tuple[float, ...]]:
    jobs = simulate(requests(rate), machines(design), "least_loaded").jobs
    free = law("a100")
    first_s = [free.step_s([(job.num_prompt_tokens, 0)]) for job in jobs]
    next_s = [free.decode_at(job.num_prompt_tokens).overhead_s for job in jobs]  # looked up at the prompt's size
    rows = list(zip(jobs, first_s, next_s, strict=True))
    found = {
        "ttft": [ttft_s(job) / first for job, first, _ in rows],
        "tbt": [(e2e_s(job) - ttft_s(job)) / job.num_output_tokens / step for job, _, step in rows],
        "e2e": [e2e_s(job) / (first + (job.num_output_tokens - 1) * step) for job, first, step in rows],
    }
    return {name: tuple(percentile(sorted(values), share) for share in SHARES) for name, values in found.items()}


def keeps_all(design: str, rate: int) -> bool:
    found = slowdowns(design, rate)
    return all(value <= limit for name in LIMITS for value, limit in zip(found[name], LIMITS[name], strict=True))


@pytest.mark.parametrize(("design", "rate"), [("Baseline-A100", 50), ("Baseline-H100", 120)])
def test_the_highest_rates_are_theirs(design: str, rate: int) -> None:
    assert keeps_all(design, rate)
    assert not keeps_all(design, rate + 10)
    for checked in (rate, rate + 10):
        (row,) = [one for one in rows() if (one["design"], one["rate"]) == (design, str(checked))]
        assert (row["meets_all_slos"] == "True") == (checked == rate)
        for name in LIMITS:
            expected = [float(row[f"{name}_slow_p{round(100 * share)}"]) for share in SHARES]
            assert slowdowns(design, checked)[name] == pytest.approx(expected, rel=0.08)


def test_separate_machines_do_at_least_as_well_as_the_same_machines_that_do_both() -> None:
    assert keeps_all("Splitwise-HH(25P,15T)", 120)
    for name in ("tbt", "e2e"):
        apart, together = slowdowns("Splitwise-HH(25P,15T)", 120)[name], slowdowns("Baseline-H100", 120)[name]
        assert all(one < other for one, other in zip(apart, together, strict=True))


def rows() -> list[dict[str, str]]:
    with (FOLDER / "summary.csv").open() as text:
        return list(csv.DictReader(text))
