"""Plans: simulated, they keep their targets; with a worker less of a role, they do not."""

import functools
from dataclasses import replace

import pytest

from planning.planner import page
from planning.planner.question import CATALOGUE, LatencyTargets, kinds_for
from planning.planner.search import Answer, answer, outcome
from planning.simulator.laws import LinearLaw
from planning.simulator.profiles import Profile, profiles
from services.runtime.errors import ConfigError
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from tests.planning.planner.small import KIND, question

TARGETS = LatencyTargets(ttft_s=0.4, tpot_s=0.02)
PREFILL = PrefillSpeed(0.01, 1e-4, 1e-9)
SLOW_STEP = DecodeSpeed(0.0195, 1e-4, 1e-8)
"""A step that misses the target by a hair, of one sequence that is alone."""


@functools.cache
def answered(rate_per_s: float) -> Answer:
    """The answer to the small question at a rate; several tests look at it."""
    return answer(question(rate_per_s=rate_per_s, targets=TARGETS))


@pytest.mark.parametrize("rate_per_s", [8.0, 40.0])
def test_a_plan_keeps_its_targets_with_other_arrivals_too_and_is_no_larger_than_it_must_be(rate_per_s: float) -> None:
    asked = question(rate_per_s=rate_per_s, targets=TARGETS)
    found = answered(rate_per_s).best
    assert found is not None
    for seed in asked.seeds:
        assert outcome(asked, found.shape, seed=seed).missed(TARGETS) == []
    for name in ("num_prefill", "num_decode"):
        if (number := getattr(found.shape, name)) > 1:
            fewer = replace(found.shape, **{name: number - 1})
            assert any(outcome(asked, fewer, seed=seed).missed(TARGETS) for seed in asked.seeds), (
                f"{name}: one too many"
            )


def test_spare_workers_are_what_redundancy_means() -> None:
    asked = question(rate_per_s=20.0, targets=TARGETS, redundancy=1)
    found = answer(asked).best
    assert found is not None
    assert found.lost == {"prefill": [], "decode": []}


def test_a_limit_of_gpus_that_is_too_low_says_what_they_would_do() -> None:
    found = answer(question(rate_per_s=60.0, targets=TARGETS, max_gpus=4))
    assert found.best is None
    assert found.bound is not None
    assert found.bound.constraint.startswith("GPUs")
    assert found.bound.nearest_s > found.bound.target_s > 0


def test_what_more_gpus_could_do_is_not_called_impossible() -> None:
    slow = replace(KIND, name="slow", profile=Profile("slow", LinearLaw(PREFILL, SLOW_STEP, SLOW_STEP), 1000))
    asked = replace(question(rate_per_s=500.0, targets=TARGETS, max_gpus=4), kinds=[KIND, slow])
    found = answer(asked).bound
    assert found is not None
    assert found.constraint.startswith("GPUs: at least")
    assert found.nearest_s > found.target_s == 4


def test_what_is_impossible_is_said_and_the_nearest_target_is_possible() -> None:
    found = answer(question(rate_per_s=1.0, targets=LatencyTargets(tpot_s=0.005)))
    assert found.best is found.one_pool is None
    assert found.bound is not None
    assert answer(question(rate_per_s=1.0, targets=LatencyTargets(tpot_s=found.bound.nearest_s))).best is not None


def test_more_load_breaks_what_is_just_enough_and_the_report_says_so() -> None:
    found = answered(40.0)
    facts = page.facts(question(rate_per_s=40.0, targets=TARGETS), found)
    assert facts["separate"]["growth"]["2.0"], "twice the load is too much"
    assert "2.0 x misses" in page.text(facts)
    report = page.page(facts)
    assert report.count("<svg") == 3 * (1 + (found.one_pool is not None))
    tokens_per_h = 40.0 * 60 * 3600
    price = facts["separate"]["price_per_million_tokens"]
    assert price * tokens_per_h / 1e6 == pytest.approx(found.best.shape.price_per_h if found.best else None)


def test_kinds_have_what_memory_leaves_for_pages() -> None:
    kinds = {kind.name: kind for kind in kinds_for("llama-3.1-70b", profiles(), gpus=["h100"])}
    bf16 = kinds["h100-llama-3.1-70b-bf16-tp4"]
    assert bf16.kv_tokens == int((0.9 * 4 * 80e9 - 2 * 70.6e9) / (2 * 80 * 8 * 128 * 2))
    assert bf16.price_per_h == 4 * CATALOGUE["h100"].price_per_h
    assert kinds["h100-llama-3.1-70b-fp8-tp4"].kv_tokens > bf16.kv_tokens
    with pytest.raises(ConfigError, match="no step times of 'gpt-9'"):
        kinds_for("gpt-9", profiles(), gpus=["h100"])
