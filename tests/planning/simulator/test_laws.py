"""Step-time models: each says the same of a step however it is asked."""

import pytest

from planning.simulator.laws import BatchedLaw, LayeredLaw, LayerTimes, LinearLaw, Table
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed

PREFILL = PrefillSpeed(0.01, 1e-4, 1e-9)


def layered(*, scale: float = 1.0, overhead_s: float = 0.0) -> LayeredLaw:
    times = LayerTimes(
        dense=Table([(1, 0.010), (100, 0.012), (1000, 0.050), (2000, 0.100)]),
        outputs=Table([(1, 0.001), (256, 0.002)]),
        prompt_attention=(1e-5, 1e-7, 1e-10, 1e-9),
        decode_attention=((1, 1e-4, 1e-8), (64, 2e-4, 2e-8), (256, 1e-3, 3e-8)),
    )
    return LayeredLaw(times, scale=scale, overhead_s=overhead_s)


def test_a_table_is_linear_between_its_points_and_beyond_them() -> None:
    table = Table([(10, 1.0), (0, 0.0), (20, 3.0)])
    assert [table.at(place) for place in (0, 5, 10, 15, 20, 30, -10)] == pytest.approx([0, 0.5, 1, 2, 3, 5, -1])


def test_a_linear_step_is_a_prompt_and_a_decode_step_and_prompts_share_one_start() -> None:
    small, large = DecodeSpeed(0.01, 1e-4, 1e-7), DecodeSpeed(0.02, 1e-5, 1e-7)
    law = LinearLaw(PREFILL, small, large, 8)
    assert law.step_s([(100, 50)]) == pytest.approx(PREFILL.time_s(100, 50))
    assert law.step_s([(100, 0), (30, 7)]) == pytest.approx(PREFILL.time_s(100) + PREFILL.time_s(30, 7) - 0.01)
    assert law.step_s([(100, 0)], num_sequences=8, context_tokens=500) == pytest.approx(
        PREFILL.time_s(100) + small.step_s(8, 500)
    )
    assert law.step_s([(100, 0)], num_sequences=9, context_tokens=500) == pytest.approx(
        PREFILL.time_s(100) + large.step_s(9, 500)
    )


@pytest.mark.parametrize("num_sequences", [1, 2, 63, 64, 100, 256, 300])
def test_layers_give_the_same_decode_step_as_a_line_and_as_a_step(num_sequences: int) -> None:
    law = layered(scale=0.9, overhead_s=0.003)
    line = law.decode_at(num_sequences).step_s(num_sequences, 12_345)
    assert line == pytest.approx(law.step_s([], num_sequences=num_sequences, context_tokens=12_345))


def test_a_mixed_step_of_layers_is_cheaper_than_two_steps_and_dearer_than_either() -> None:
    law = layered()
    mixed = law.step_s([(200, 0)], num_sequences=50, context_tokens=50_000)
    alone = law.step_s([(200, 0)]), law.step_s([], num_sequences=50, context_tokens=50_000)
    assert max(alone) < mixed < sum(alone)


def test_scale_stretches_kernels_and_overhead_comes_once_a_step() -> None:
    assert layered(scale=2.0).step_s([(64, 0)], num_sequences=3, context_tokens=99) == pytest.approx(
        2 * layered().step_s([(64, 0)], num_sequences=3, context_tokens=99)
    )
    assert layered(overhead_s=0.5).step_s([(64, 0)], num_sequences=3, context_tokens=99) == pytest.approx(
        0.5 + layered().step_s([(64, 0)], num_sequences=3, context_tokens=99)
    )


def test_the_line_of_prompts_is_close_to_the_law_it_stands_for() -> None:
    law = layered()
    for num_tokens in (512, 1024, 2048):
        assert law.prefill.time_s(num_tokens) == pytest.approx(law.step_s([(num_tokens, 0)]), rel=0.15)


def test_a_batched_law_knows_tokens_only() -> None:
    law = BatchedLaw(Table([(100, 0.1), (1000, 1.0)]), Table([(1, 0.03), (101, 0.05)]))
    assert law.step_s([(150, 9999), (50, 0)]) == pytest.approx(0.2)
    assert law.step_s([(150, 0)], num_sequences=50, context_tokens=10**9) == pytest.approx(1.1 * 0.2)
    assert law.decode_at(51).step_s(51, 10**9) == pytest.approx(0.04)
