"""Closed forms of a plan, against the same forms written out and against simulation."""

import pytest

from planning.planner.bounds import alone_s, impossible, least_workers, most_per_s, prompt_s
from planning.planner.question import Kind, LatencyTargets, Workload
from planning.planner.search import Shape, outcome
from planning.simulator.laws import LinearLaw
from planning.simulator.profiles import Profile
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from tests.planning.planner.small import KIND, question

STEP = DecodeSpeed(0.01, 1e-4, 1e-8)


def test_a_prompt_is_cut_into_steps() -> None:
    law = PrefillSpeed(0.01, 1e-4, 1e-9)
    assert prompt_s(KIND, 1000) == pytest.approx(law.time_s(1000))
    assert prompt_s(KIND, 20_000) == pytest.approx(law.time_s(8192) + law.time_s(8192, 8192) + law.time_s(3616, 16_384))


def test_alone_a_request_takes_its_prompt_and_its_steps() -> None:
    found = alone_s(KIND, targets=LatencyTargets(e2e_s=9.0), workload=Workload(1.0, [(1000, 100)]))
    assert found["e2e"] == pytest.approx(found["ttft"] + 99 * found["tpot"])


@pytest.mark.parametrize(
    ("targets", "constraint"),
    [
        (LatencyTargets(ttft_s=0.05), "TTFT"),
        (LatencyTargets(tpot_s=0.005), "TPOT"),
        (LatencyTargets(e2e_s=1.0), "E2E"),
        (LatencyTargets(ttft_s=1.0, tpot_s=0.05, e2e_s=2.0), None),
    ],
)
def test_what_no_number_of_workers_can_do_names_the_constraint_and_the_nearest_target(
    targets: LatencyTargets, constraint: str | None
) -> None:
    workload = Workload(1.0, [(1000, 100)])
    bound = impossible(KIND, KIND, targets=targets, workload=workload)
    assert (bound is None) == (constraint is None)
    if bound is not None and constraint is not None:
        assert bound.constraint.startswith(constraint)
        nearest = {f"{constraint.lower()}_s": bound.nearest_s}
        assert impossible(KIND, KIND, targets=LatencyTargets(**nearest), workload=workload) is None
        # And so it is: with next to no load, the nearest target is kept.
        asked = question(rate_per_s=0.01, targets=LatencyTargets(**nearest), lengths=[(1000, 100)])
        assert outcome(asked, Shape(KIND, KIND, 1, 1)).missed(asked.targets) == []


def test_a_sequence_that_fits_no_worker_is_impossible() -> None:
    bound = impossible(KIND, KIND, targets=LatencyTargets(ttft_s=1e9), workload=Workload(1.0, [(KIND.kv_tokens, 1)]))
    assert bound is not None
    assert bound.constraint.startswith("pages")


def test_a_batch_is_as_large_as_steps_and_pages_allow() -> None:
    workload = Workload(1.0, [(1000, 101)])
    per_s, batch = most_per_s(KIND, workload, step_target_s=0.015)
    context = 1000 + 101 / 2
    assert STEP.step_s(batch, batch * context) <= 0.015 < STEP.step_s(batch + 1, (batch + 1) * context)
    assert per_s == pytest.approx(batch / (100 * STEP.step_s(batch, batch * context)))
    small = Kind("small", KIND.profile, 1, 1.0, 1.0, 5500)
    assert most_per_s(small, workload, step_target_s=0.015)[1] == 4  # 1,101 tokens each


def test_least_workers_grow_with_the_rate() -> None:
    one = least_workers(KIND, KIND, targets=LatencyTargets(tpot_s=0.02), workload=Workload(10.0, [(1000, 100)]))
    ten = least_workers(KIND, KIND, targets=LatencyTargets(tpot_s=0.02), workload=Workload(100.0, [(1000, 100)]))
    assert ten == pytest.approx([10 * value for value in one])


def test_a_law_is_all_that_is_asked_of_a_profile() -> None:
    free = Profile("free", LinearLaw(PrefillSpeed(1e-9, 1e-9), STEP, STEP), 0)
    kind = Kind("free", free, 1, 1.0, 1.0, 10**6)
    assert prompt_s(kind, 100) == pytest.approx(1e-9 + 1e-7)
