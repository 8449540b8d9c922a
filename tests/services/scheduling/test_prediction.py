"""Laws of time and their meters: they find the law, whatever the noise, and stay sane whatever they are told."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DEFAULT_PREFILL,
    DecodeMeter,
    DecodeSpeed,
    LinkSpeed,
    PrefillMeter,
    PrefillSpeed,
    TransferMeter,
)

GPU = PrefillSpeed(overhead_s=0.012, s_per_token=6e-5, s_per_token_squared=4e-9)


def prefills(speed, *, num, seed=0, noise=0.0, start_s=0.0, gap_s=0.05):
    rng = random.Random(seed)
    for i in range(num):
        num_tokens, num_cached = rng.randint(1, 4000), rng.choice([0, 0, rng.randint(0, 16000)])
        yield num_tokens, num_cached, speed.time_s(num_tokens, num_cached) * rng.gauss(1, noise), start_s + i * gap_s


def fed(meter, observations):
    for observation in observations:
        meter.observe(*observation)
    return meter.speed


def test_a_prompt_costs_as_much_in_one_go_as_in_chunks_but_for_the_overhead():
    whole = GPU.time_s(4096)
    chunks = sum(GPU.time_s(512, start) for start in range(0, 4096, 512))
    assert chunks - whole == pytest.approx(7 * GPU.overhead_s)


def test_laws():
    assert PrefillSpeed(1.0, 2.0, 3.0).time_s(4, 5) == 1 + 2 * 4 + 3 * (16 + 40)
    assert DecodeSpeed(1.0, 2.0, 3.0).step_s(4, 5) == 1 + 8 + 15
    assert LinkSpeed(1.0, 4.0).time_s(8) == 3.0


def test_before_the_first_observation_the_default():
    assert PrefillMeter().speed == DEFAULT_PREFILL
    assert DecodeMeter().speed == DEFAULT_DECODE
    assert TransferMeter().speed == DEFAULT_LINK
    assert PrefillMeter(GPU).speed == GPU


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_prefill_meter_finds_the_speed(noise):
    speed = fed(PrefillMeter(), prefills(GPU, num=600, noise=noise))
    for num_tokens, num_cached in [(64, 0), (512, 0), (512, 8192), (4000, 0), (4000, 16000)]:
        assert speed.time_s(num_tokens, num_cached) == pytest.approx(GPU.time_s(num_tokens, num_cached), rel=0.06)


def test_a_decode_meter_finds_the_speed():
    true, rng, meter = DecodeSpeed(0.006, 4e-5, 3e-8), random.Random(1), DecodeMeter()
    for i in range(1000):
        num = rng.randint(1, 128)
        context = sum(rng.randint(10, 4000) for _ in range(num))
        meter.observe(num, context, true.step_s(num, context) * rng.gauss(1, 0.1), i * 0.02)
    for num, context in [(1, 100), (32, 40_000), (128, 256_000)]:
        assert meter.speed.step_s(num, context) == pytest.approx(true.step_s(num, context), rel=0.06)


def test_a_link_meter_finds_the_speed():
    true, rng, meter = LinkSpeed(0.0005, 2e8), random.Random(2), TransferMeter()
    for i in range(500):
        num_bytes = rng.randint(1000, 10_000_000)
        meter.observe(num_bytes, true.time_s(num_bytes) * rng.gauss(1, 0.1), i * 0.02)
    for num_bytes in (10_000, 1_000_000, 10_000_000):
        assert meter.speed.time_s(num_bytes) == pytest.approx(true.time_s(num_bytes), rel=0.06)


@pytest.mark.parametrize("factor", [0.001, 0.1, 10.0, 1000.0])
def test_one_observation_outweighs_a_wrong_default(factor):
    true = PrefillSpeed(*(factor * value for value in (0.01, 1e-4, 0.0)))
    meter = PrefillMeter(DEFAULT_PREFILL)
    meter.observe(512, 0, true.time_s(512), 0.0)
    assert meter.speed.time_s(512) == pytest.approx(true.time_s(512), rel=0.01)
    assert meter.speed.time_s(2048) == pytest.approx(true.time_s(2048), rel=0.01), "shared out as in the default"


def test_outliers_change_little():
    rng = random.Random(3)
    spoiled = (
        (tokens, cached, time_s * (100 if rng.random() < 0.05 else 1), now_s)
        for tokens, cached, time_s, now_s in prefills(GPU, num=600, noise=0.05)
    )
    speed = fed(PrefillMeter(), spoiled)
    for num_tokens in (64, 512, 4000):
        assert speed.time_s(num_tokens) == pytest.approx(GPU.time_s(num_tokens), rel=0.15)


@pytest.mark.parametrize("factor", [0.02, 0.5, 3.0, 50.0])
def test_a_worker_that_changes_is_followed(factor):
    meter = PrefillMeter()
    fed(meter, prefills(GPU, num=400))
    changed = PrefillSpeed(GPU.overhead_s * factor, GPU.s_per_token * factor, GPU.s_per_token_squared * factor)
    speed = fed(meter, prefills(changed, num=2400, seed=1, start_s=20.0))
    assert speed.time_s(1000) == pytest.approx(changed.time_s(1000), rel=0.1)


def test_a_pause_forgets_nothing_but_what_comes_after_it_counts():
    meter = PrefillMeter()
    before = fed(meter, prefills(GPU, num=400))
    slower = PrefillSpeed(2 * GPU.overhead_s, 2 * GPU.s_per_token, 2 * GPU.s_per_token_squared)
    one_more = next(prefills(slower, num=1, seed=9, start_s=1e6))
    after = fed(meter, [one_more])
    assert before.time_s(1000) < after.time_s(1000) < 1.5 * before.time_s(1000)
    assert fed(meter, prefills(slower, num=40, seed=10, start_s=1e6 + 1)).time_s(1000) == pytest.approx(
        slower.time_s(1000), rel=0.25
    )


@pytest.mark.parametrize("time_s", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_say_nothing(time_s):
    prefill, decode, link = PrefillMeter(), DecodeMeter(), TransferMeter()
    prefill.observe(10, 0, time_s, 1.0)
    decode.observe(10, 10, time_s, 1.0)
    link.observe(10, time_s, 1.0)
    assert (prefill.speed, decode.speed, link.speed) == (DEFAULT_PREFILL, DEFAULT_DECODE, DEFAULT_LINK)


def test_no_work_says_nothing():
    prefill, decode, link = PrefillMeter(), DecodeMeter(), TransferMeter()
    prefill.observe(0, 100, 1.0, 1.0)
    decode.observe(0, 0, 1.0, 1.0)
    link.observe(0, 1.0, 1.0)
    assert (prefill.speed, decode.speed, link.speed) == (DEFAULT_PREFILL, DEFAULT_DECODE, DEFAULT_LINK)


amounts = st.integers(0, 1_000_000)
times = st.floats(1e-7, 1e4)
observations = st.lists(st.tuples(amounts, amounts, times, st.floats(-1e3, 1e5)), max_size=60)


@given(observations)
def test_no_speed_is_ever_negative_or_not_a_number(seen):
    prefill, decode, link = PrefillMeter(), DecodeMeter(), TransferMeter()
    for first, second, time_s, now_s in seen:
        prefill.observe(first, second, time_s, now_s)
        decode.observe(first, second, time_s, now_s)
        link.observe(first, time_s, now_s)
        for speed in (prefill.speed, decode.speed):
            factors = [getattr(speed, name) for name in speed.__slots__]
            assert all(math.isfinite(factor) and factor >= 0 for factor in factors)
            assert sum(factors) > 0
        assert math.isfinite(link.speed.latency_s)
        assert link.speed.latency_s >= 0
        assert 0 < link.speed.bytes_per_s <= TransferMeter.MAX_BYTES_PER_S


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.5, 2.0)), min_size=1, max_size=60))
def test_predictions_stay_within_what_was_seen(seen):
    """One length only: the prediction for it lies between the shortest and the longest time seen."""
    num_tokens = seen[0][0]
    meter = PrefillMeter()
    for i, (_, factor) in enumerate(seen):
        meter.observe(num_tokens, 0, factor * GPU.time_s(num_tokens), float(i))
    low, high = (pick(factor for _, factor in seen) for pick in (min, max))
    predicted = meter.speed.time_s(num_tokens) / GPU.time_s(num_tokens)
    assert 0.99 * low <= predicted <= 1.01 * high


def test_the_pace_follows_a_machine_within_seconds_and_the_law_does_not():
    meter = PrefillMeter()
    fed(meter, prefills(GPU, num=600, noise=0.1))
    for num_tokens, num_cached, time_s, now_s in prefills(GPU, num=60, seed=1, noise=0.1, start_s=30.0):
        meter.observe(num_tokens, num_cached, 2 * time_s, now_s)
    assert meter.speed_now.time_s(1200) == pytest.approx(2 * GPU.time_s(1200), rel=0.2)
    assert meter.speed.time_s(1200) < 1.5 * GPU.time_s(1200)
    fed(meter, prefills(GPU, num=100, seed=2, noise=0.1, start_s=60.0))
    assert meter.speed_now.time_s(1200) == pytest.approx(GPU.time_s(1200), rel=0.15)


def test_at_the_pace_a_sum_of_uneven_steps_is_right_where_the_law_is_too_short():
    rng, meter, took_s = random.Random(3), PrefillMeter(), 0.0
    for step in range(400):
        time_s = GPU.time_s(300) * (3.0 if rng.random() < 0.2 else 1.0)
        took_s += time_s
        meter.observe(300, 0, time_s, step * 0.05)
    assert meter.speed.time_s(300) < 0.9 * took_s / 400
    assert meter.speed_now.time_s(300) == pytest.approx(took_s / 400, rel=0.15)
