"""`benchmarks.gpu_batching` on a CPU, with a tiny model; its figures mean nothing here."""

import time

import pytest

from benchmarks import gpu_batching
from benchmarks.gpu import Shape
from benchmarks.gpu_batching import Workload, measure

WORKLOAD = Workload(requests=3, prompt_tokens=20, new_tokens=4)


def test_figures_are_those_of_the_tokens_times():
    def run(prompts, num_new):
        began_s = time.perf_counter()
        return [[began_s + first_s + 0.01 * n for n in range(num_new)] for first_s in (0.5, 1.0, 1.97)]

    figures = measure(run, WORKLOAD, WORKLOAD.prompts(100, 0))
    assert figures.tokens_per_s == pytest.approx(12 / 2.0, rel=0.01)
    assert figures.ttft_p50_s == pytest.approx(1.0, rel=0.01)
    assert (figures.itl_p50_s, figures.itl_p99_s) == pytest.approx((0.01, 0.01))
    assert "first token p50" in str(figures)


@pytest.mark.parametrize("lengths", [(4, 4), (4, 4, 3)])
def test_answers_that_are_missing_or_short_are_no_figure(lengths):
    with pytest.raises(RuntimeError, match="answers of"):
        measure(lambda prompts, num_new: [[1.0] * length for length in lengths], WORKLOAD, [])


def test_prompts_differ():
    prompts = WORKLOAD.prompts(100, 0) + WORKLOAD.prompts(100, 1)
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert {len(prompt) for prompt in prompts} == {20}


@pytest.mark.slow
def test_both_engines_answer(capsys):
    figures = gpu_batching.compare(Shape("tiny", 64, 128, 2, 4, 2, 16, 331, has_qk_norm=True), "cpu", WORKLOAD, 1)
    assert set(figures) == {"ours", "transformers", "ratios"}
    assert all(value > 0 for part in figures.values() for value in part.values())
    assert "ours to theirs" in capsys.readouterr().out
