"""Which prompts go to a prefill worker."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.disaggregation import (
    DisaggregationSettings,
    PrefillWays,
    decide,
)
from services.scheduling.prediction import PrefillSpeed

BY_PRICE = DisaggregationSettings()
IDLE = PrefillWays(num_prompt_tokens=4000, transfer_s=0.05)

SPEEDS = st.builds(PrefillSpeed, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-7))


@st.composite
def all_ways(draw):
    num_tokens = draw(st.integers(1, 10_000))
    cached = st.integers(0, num_tokens - 1)
    seconds = st.floats(0, 10)
    return PrefillWays(
        num_prompt_tokens=num_tokens,
        has_prefill_worker=draw(st.booleans()),
        cached_on_prefill=draw(cached),
        cached_on_decode=draw(cached),
        prefill_queue_s=draw(seconds),
        decode_queue_s=draw(seconds),
        prefill_speed=draw(SPEEDS),
        local_speed=draw(SPEEDS),
        transfer_s=draw(seconds),
        remote_extra_s=draw(seconds),
        num_running=draw(st.integers(0, 50)),
        step_s=draw(st.floats(0, 1)),
    )


@pytest.mark.parametrize(
    ("facts", "is_remote"),
    [
        ({}, True),  # a long prompt leaves even an idle decode worker
        ({"num_prompt_tokens": 200}, False),  # computed before the handoff would be done
        ({"num_prompt_tokens": 200, "num_running": 30, "step_s": 0.01}, True),  # but not in thirty others' way
        ({"cached_on_decode": 3900}, False),
        ({"cached_on_decode": 3900, "cached_on_prefill": 3900}, False),
        ({"prefill_queue_s": 0.5}, False),  # everybody waits there
        ({"prefill_queue_s": 0.5, "num_running": 4}, True),
        ({"prefill_queue_s": 0.5, "decode_queue_s": 2.0}, True),  # here too
        ({"transfer_s": 3.0}, False),  # the link is slower than the model
        ({"local_speed": PrefillSpeed(0.01, 1e-5)}, False),
        ({"remote_extra_s": 5.0}, False),
    ],
)
def test_the_cheaper_way(facts, is_remote):
    decision = decide(dataclasses.replace(IDLE, **facts), BY_PRICE)
    assert decision.is_remote is is_remote
    assert decision.reason == ("remote_is_cheaper" if is_remote else "local_is_cheaper")


def test_what_the_decision_was_made_of():
    speed = PrefillSpeed(0.01, 1e-4, 1e-8)
    ways = PrefillWays(
        num_prompt_tokens=2000,
        cached_on_prefill=1600,
        cached_on_decode=1000,
        cached_on_any_prefill=1700,
        cached_anywhere=1900,
        prefill_queue_s=0.3,
        decode_queue_s=0.2,
        prefill_speed=speed,
        local_speed=speed,
        transfer_s=0.07,
        num_running=3,
        step_s=0.02,
    )
    decision = decide(ways, BY_PRICE)
    remote_prefill_s = 0.01 + 0.04 + 1e-8 * (2000**2 - 1600**2)
    local_prefill_s = 0.01 + 0.1 + 1e-8 * (2000**2 - 1000**2)
    assert decision.remote_ttft_s == pytest.approx(0.3 + remote_prefill_s)
    # Half of what a step takes is for prompts.
    num_steps = (local_prefill_s - 0.01) / 0.01
    assert num_steps > 2
    assert decision.local_ttft_s == pytest.approx(0.2 + local_prefill_s + num_steps * 0.02)
    assert decision.itl_cost_s == pytest.approx(3 * local_prefill_s)
    assert decision.local_itl_s == pytest.approx(0.02 + local_prefill_s / num_steps)
    assert decision.remote_redone_s == pytest.approx(0.02 + 1e-8 * (1900**2 - 1700**2))
    assert decision.local_redone_s == pytest.approx(0.09 + 1e-8 * (1900**2 - 1000**2))
    assert decision.remote_cost_s == pytest.approx(0.3 + remote_prefill_s + decision.remote_redone_s + 0.07 + 0.1)
    assert decision.local_cost_s == pytest.approx(decision.local_ttft_s + decision.local_redone_s + decision.itl_cost_s)
    assert decision.ways is ways


def test_what_the_decode_worker_alone_holds_is_not_computed_twice_for_a_little_time():
    # The turn after an answer of 400 tokens, which no prefill worker has seen, to a decode worker with two others.
    ways = PrefillWays(
        num_prompt_tokens=1600, cached_on_prefill=1000, cached_on_decode=1400, num_running=2, transfer_s=0.002
    )
    seen = {"cached_on_any_prefill": 1000, "cached_anywhere": 1400}
    assert decide(ways, BY_PRICE).is_remote
    assert not decide(dataclasses.replace(ways, **seen), BY_PRICE).is_remote
    assert decide(dataclasses.replace(ways, **seen), DisaggregationSettings(redone_weight=0)).is_remote
    assert decide(dataclasses.replace(ways, **seen, num_running=3), BY_PRICE).is_remote


@pytest.mark.parametrize(
    ("cached", "threshold", "is_remote"),
    [(0, 0, True), (3999, 0, True), (0, 4000, False), (0, 3999, True), (3000, 1000, False), (2999, 1000, True)],
)
def test_a_fixed_threshold_has_the_last_word(cached, threshold, is_remote):
    how = DisaggregationSettings(local_prefill_tokens=threshold)
    for facts in ({}, {"prefill_queue_s": 100.0}, {"num_running": 100}):
        decision = decide(dataclasses.replace(IDLE, cached_on_decode=cached, **facts), how)
        assert (decision.is_remote, decision.reason) == (is_remote, "long_prompt" if is_remote else "short_prompt")


def test_a_limit_on_the_gaps_of_running_answers():
    how = DisaggregationSettings(max_itl_s=0.03)
    busy = dataclasses.replace(IDLE, num_running=1, step_s=0.02, prefill_queue_s=60.0)
    assert decide(busy, how).reason == "local_itl_too_long"
    assert decide(busy, BY_PRICE).reason == "local_is_cheaper"
    assert decide(dataclasses.replace(busy, num_running=0), how).reason == "local_is_cheaper"
    assert decide(busy, DisaggregationSettings(max_itl_s=0.03, chunk_tokens=64)).reason == "local_is_cheaper"


def test_a_busy_decode_worker_computes_a_little_of_a_prompt_in_each_step():
    # 0.4 s of computing: 40 steps of 20 ms that may take 10 more.
    busy = dataclasses.replace(IDLE, num_running=1, step_s=0.02)
    assert decide(busy, BY_PRICE).local_ttft_s == pytest.approx(0.01 + 0.4 + 40 * 0.02)
    assert decide(dataclasses.replace(busy, num_running=0), BY_PRICE).local_ttft_s == pytest.approx(0.01 + 0.4)
    # Chunks of few tokens are more steps.
    how = DisaggregationSettings(chunk_tokens=40)
    assert decide(busy, how).local_ttft_s == pytest.approx(0.01 + 0.4 + 100 * 0.02)


@given(all_ways(), st.sampled_from([BY_PRICE, DisaggregationSettings(local_prefill_tokens=500)]))
def test_without_a_prefill_worker_nothing_goes_away(ways, how):
    decision = decide(dataclasses.replace(ways, has_prefill_worker=False), how)
    assert (decision.is_remote, decision.reason) == (False, "no_prefill_worker")


@given(all_ways(), st.data())
def test_what_speaks_for_a_way_never_turns_the_decision_against_it(ways, data):
    def less(seconds):
        return data.draw(st.floats(0, seconds))

    here = decide(ways, BY_PRICE)
    to_remote = dataclasses.replace(
        ways,
        prefill_queue_s=less(ways.prefill_queue_s),
        transfer_s=less(ways.transfer_s),
        remote_extra_s=less(ways.remote_extra_s),
        cached_on_prefill=data.draw(st.integers(ways.cached_on_prefill, ways.num_prompt_tokens - 1)),
        num_running=data.draw(st.integers(ways.num_running, 100)),
    )
    to_local = dataclasses.replace(
        ways,
        decode_queue_s=less(ways.decode_queue_s),
        cached_on_decode=data.draw(st.integers(ways.cached_on_decode, ways.num_prompt_tokens - 1)),
        num_running=data.draw(st.integers(0, ways.num_running)),
        transfer_s=data.draw(st.floats(ways.transfer_s, 20)),
    )
    tolerance_s = 1e-9 * (1 + here.remote_cost_s + here.local_cost_s)
    if here.remote_cost_s < here.local_cost_s - tolerance_s and ways.has_prefill_worker:
        assert decide(to_remote, BY_PRICE).is_remote
    elif here.remote_cost_s > here.local_cost_s + tolerance_s:
        assert not decide(to_local, BY_PRICE).is_remote


def test_answers_that_are_about_to_end_do_not_stretch_a_whole_prompt():
    busy = dataclasses.replace(IDLE, num_running=1, step_s=0.02)
    for steps_left, num_stretched in [(0, 0), (7, 7), (1000, 40)]:
        decided = decide(dataclasses.replace(busy, steps_left=steps_left), BY_PRICE)
        assert decided.local_ttft_s == pytest.approx(0.01 + 0.4 + num_stretched * 0.02)
