"""Which rows of a step are pooled, and what becomes of them; `tests/prefill_worker/test_embeddings.py` has a model."""

import numpy as np
import pytest

from services.engine.steps.pooling import pooled_rows, pooled_states
from services.engine.steps.sequence import Pooling, Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, PooledState, StepItem


def item(pooling: Pooling | None, *, start: int, num_tokens: int) -> StepItem:
    sequence = Sequence(0, range(1, 11), sampling=Sampling(max_tokens=1))
    sequence.pooling, sequence.num_computed_tokens = pooling, start
    return StepItem(sequence, num_tokens, wants_token=pooling is None)


def test_a_mean_takes_all_rows_and_the_last_token_one_at_the_end() -> None:
    items = [
        item("mean", start=0, num_tokens=3),
        item(None, start=0, num_tokens=2),
        item("last", start=0, num_tokens=2),
        item("last", start=7, num_tokens=3),
    ]
    rows = pooled_rows(items, np.array([3, 5, 7, 10], np.int32))
    assert [each.tolist() for each in rows] == [[0, 1, 2], [9]]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_sum_of_chunks_is_that_of_the_whole_bit_by_bit(cut: int) -> None:
    states = np.random.default_rng(cut).standard_normal((4, 8)).astype(np.float32) * [[1e4], [1], [1e-4], [1]]
    states = states.astype(np.float32)
    (whole,) = pooled_states([item("mean", start=0, num_tokens=4)], states)
    first = item("mean", start=0, num_tokens=cut)
    (begun,) = pooled_states([first], states[:cut])
    assert isinstance(begun, PooledState)
    rest = item("mean", start=cut, num_tokens=4 - cut)
    rest.sequence.pooled = begun.state
    (ended,) = pooled_states([rest], states[cut:])
    assert isinstance(whole, PooledState)
    assert isinstance(ended, PooledState)
    assert ended.state.tobytes() == whole.state.tobytes()
    assert begun.state is not ended.state


def test_each_gets_its_own_rows_and_its_own_failure() -> None:
    items = [item("mean", start=0, num_tokens=2), item("last", start=9, num_tokens=1)]
    bad, good = pooled_states(items, np.array([[1, np.inf], [1, 1], [2, 3]], np.float32))
    assert isinstance(bad, NonFiniteLogits)
    assert isinstance(good, PooledState)
    assert good.state.tolist() == [2, 3]
