"""An engine's first steps: timed before anybody asks, and without a trace in its pages."""

import pytest

from services.engine.rehearsal import PROMPTS_TOKENS, load_rehearsed_engine, rehearse
from services.scheduling.speedometer import Speedometer


@pytest.fixture
def parts(checkpoint):
    parts = load_rehearsed_engine(checkpoint("llama-mha"), device="cpu", num_pages=64)
    yield parts
    parts.close()


def test_a_worker_knows_its_speeds_before_its_first_request(parts):
    speedometer = Speedometer()
    assert speedometer.prefill is None
    speedometer.observe_steps(parts.first_steps, 0.0)
    assert speedometer.prefill is not None
    assert speedometer.decode is not None
    assert 0 < speedometer.decode.step_s(1) < 60
    steps = [work for work, _ in parts.first_steps]
    assert [step[0] for step in steps[: len(PROMPTS_TOKENS)]] == [(0, num, True) for num in PROMPTS_TOKENS]
    assert any(len(step) > 1 and not any(is_prompt for _, _, is_prompt in step) for step in steps)


def test_it_leaves_the_pages_as_they_were(parts):
    before = parts.allocator.counts()
    assert list(rehearse(parts))
    assert parts.allocator.counts() == before
    assert before.free == parts.pool.num_pages


def test_a_slow_engine_is_not_kept_from_its_work(parts):
    assert len(list(rehearse(parts, max_s=0.0))) == 0


@pytest.mark.parametrize(("page_size", "num_pages"), [(16, 1), (16, 3)])
def test_nor_is_one_whose_pool_is_small(checkpoint, page_size, num_pages):
    parts = load_rehearsed_engine(checkpoint("llama-mha"), device="cpu", page_size=page_size, num_pages=num_pages)
    assert parts.allocator.counts().free == num_pages
    parts.close()
