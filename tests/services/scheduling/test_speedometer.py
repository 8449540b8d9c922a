import pytest

from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from services.scheduling.speedometer import MIN_STEPS, Speedometer, numbers

PREFILL = PrefillSpeed(0.004, 0.0002, 1e-6)
DECODE = DecodeSpeed(0.003, 0.0005, 1e-6)
LINK = LinkSpeed(0.001, 5e8)


def decode_step(speedometer: Speedometer, number: int) -> None:
    contexts = [50 + 37 * (number + place) % 400 for place in range(1 + number % 7)]
    time_s = DECODE.step_s(len(contexts), sum(contexts))
    speedometer.observe_step([(context, 1, False) for context in contexts], time_s, number * 0.01)


def test_before_anything_was_measured_nothing_is_said() -> None:
    speedometer = Speedometer()
    speedometer.observe_step([], 1.0, 0.0)
    speedometer.observe_transfer(0, 1.0, 0.0)
    assert (speedometer.prefill, speedometer.decode, speedometer.link) == (None, None, None)
    assert numbers(speedometer.link) is None


def test_one_slow_prompt_makes_nobody_slow() -> None:
    speedometer = Speedometer()
    speedometer.observe_step([(0, 60, True)], 20 * PREFILL.time_s(60), 0.0)
    for number in range(MIN_STEPS - 1):
        assert speedometer.prefill is None
        speedometer.observe_step([(0, 60 + number, True)], PREFILL.time_s(60 + number), 0.01 * (1 + number))
    assert speedometer.prefill is not None
    assert speedometer.prefill.time_s(60) < 3 * PREFILL.time_s(60)


def test_steps_that_say_nothing_of_prompts_are_not_counted() -> None:
    speedometer = Speedometer()
    speedometer.observe_step([(100, 1, False)], 1.0, 0.0)
    for number in range(2 * MIN_STEPS):
        # Faster than decoding alone was taken to be.
        speedometer.observe_step([(100, 1, False), (0, 20, True)], 0.001, 0.1 * number)
    assert speedometer.prefill is None


def test_each_law_is_found_from_what_obeys_it() -> None:
    speedometer = Speedometer()
    for number in range(200):
        decode_step(speedometer, number)
        chunks = [(64 * place, 16 + 61 * (number + place) % 500, True) for place in range(1 + number % 3)]
        time_s = PREFILL.overhead_s + sum(PREFILL.time_s(num, start) - PREFILL.overhead_s for start, num, _ in chunks)
        speedometer.observe_step(chunks, time_s, number * 0.01)
        num_bytes = 1000 * (1 + number % 50) ** 2
        speedometer.observe_transfer(num_bytes, LINK.time_s(num_bytes), number * 0.01)
    assert speedometer.prefill is not None
    assert speedometer.decode is not None
    assert speedometer.link is not None
    assert speedometer.prefill.time_s(300, 500) == pytest.approx(PREFILL.time_s(300, 500), rel=0.02)
    assert speedometer.prefill.time_s(20) == pytest.approx(PREFILL.time_s(20), rel=0.02)
    assert speedometer.decode.step_s(4, 900) == pytest.approx(DECODE.step_s(4, 900), rel=0.02)
    assert speedometer.link.time_s(10**6) == pytest.approx(LINK.time_s(10**6), rel=0.02)
    assert numbers(speedometer.link) == (speedometer.link.latency_s, speedometer.link.bytes_per_s)


def test_of_a_mixed_step_the_chunks_took_what_decoding_alone_does_not() -> None:
    speedometer = Speedometer()
    for number in range(100):
        decode_step(speedometer, number)
    for number in range(100):
        num_tokens = 16 + 61 * number % 500
        time_s = DECODE.step_s(3, 600) + PREFILL.time_s(num_tokens)
        speedometer.observe_step(
            [(100, 1, False), (200, 1, False), (300, 1, False), (0, num_tokens, True)], time_s, 1 + number * 0.01
        )
    assert speedometer.prefill is not None
    assert speedometer.decode is not None
    assert speedometer.prefill.time_s(300) == pytest.approx(PREFILL.time_s(300), rel=0.05)
    assert speedometer.decode.step_s(3, 600) == pytest.approx(DECODE.step_s(3, 600), rel=0.02)


def test_a_chunk_of_one_token_says_what_an_empty_step_of_prompts_takes() -> None:
    speedometer = Speedometer()
    for number in range(200):
        num_tokens = 1 if number % 2 else 16 + number
        speedometer.observe_step([(0, num_tokens, True)], PREFILL.time_s(num_tokens), number * 0.01)
    assert speedometer.decode is None
    assert speedometer.prefill is not None
    assert speedometer.prefill.time_s(1) == pytest.approx(PREFILL.time_s(1), rel=0.02)


def test_what_is_told_is_at_the_pace_of_the_last_seconds_and_steps_are_made_by_the_law() -> None:
    speedometer = Speedometer()
    assert (speedometer.prefill_now, speedometer.decode_now) == (None, None)
    for number in range(300):
        slowness = 1.0 if number < 200 else 2.0
        chunk = (64, 16 + 61 * number % 500, True)
        speedometer.observe_step([chunk], slowness * PREFILL.time_s(chunk[1], chunk[0]), number * 0.02)
        speedometer.observe_step([(100, 1, False)], slowness * 0.01, number * 0.02)
    assert speedometer.prefill is not None
    assert speedometer.prefill_now is not None
    assert speedometer.prefill_now.time_s(300) > 1.6 * PREFILL.time_s(300) > speedometer.prefill.time_s(300)
    assert speedometer.decode is not None
    assert speedometer.decode_now is not None
    assert speedometer.decode_now.step_s(1, 100) > speedometer.decode.step_s(1, 100)
