"""An engine's first steps: timed before anybody asks, and without a trace in its pages."""

import gc
import weakref

import pytest

from services.engine import rehearsal
from services.engine.engine import Engine
from services.engine.rehearsal import PROMPTS_TOKENS, load_rehearsed_engine, rehearse
from services.engine.steps.sequence import Sampling
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


def scripted(monkeypatch, times_s):
    """Has rehearsed prompts take these seconds, by length and in turn."""
    left = {num_tokens: list(times) for num_tokens, times in times_s.items()}

    def timed(parts, prompts_tokens, *, num_new):
        if num_new == 1:
            yield [(0, prompts_tokens[0], True)], left[prompts_tokens[0]].pop(0)

    monkeypatch.setattr(rehearsal, "_timed", timed)


def test_a_neighbour_that_makes_some_steps_slow_does_not_hide_what_tokens_cost(parts, monkeypatch):
    # A neighbour of a worker that starts: as seen on two cores on which eight programs started.
    scripted(monkeypatch, {16: [0.0125, 0.0017, 0.0103], 64: [0.0046, 0.0117, 0.0034], 256: [0.025, 0.0145, 0.016]})
    speedometer = Speedometer()
    speedometer.observe_steps(rehearse(parts), 0.0)
    assert speedometer.prefill.time_s(256) == pytest.approx(0.0145, rel=0.1)
    assert 0.05 < speedometer.prefill.time_s(1200) < 0.2


def test_longer_prompts_are_left_out_where_they_would_take_too_long(parts, monkeypatch):
    scripted(monkeypatch, {16: [0.2] * 3, 64: [0.3] * 3, 256: []})
    assert [work[0][1] for work, _ in rehearse(parts)] == [16, 64, 16, 64, 16, 64]


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


def test_kept_weights_get_new_pages_and_give_the_tokens_that_they_gave(parts, checkpoint):
    prompts, sampling = [[5, 7, 9] * 8, [11, 3] * 5], Sampling(max_tokens=12)
    expected = Engine(parts).generate(prompts, sampling)
    kept, pool = parts.weights, weakref.ref(parts.pool)
    again = load_rehearsed_engine(checkpoint("llama-mha"), kept=kept, device="cpu", num_pages=32)
    assert again.model is parts.model
    assert again.pool is not parts.pool
    assert (again.first_steps, again.fingerprint, again.pool.num_pages) == (parts.first_steps, parts.fingerprint, 32)
    assert Engine(again).generate(prompts, sampling) == expected
    before = weakref.ref(again.pool)
    assert again.weights == kept
    del again
    gc.collect()
    assert before() is None, "kept weights keep no pages"
    assert pool() is parts.pool
