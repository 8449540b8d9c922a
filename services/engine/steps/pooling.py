"""What a step makes of the hidden states of prompts that are embedded. Changes no sequence; no torch."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from services.engine.steps.sequence import Sequence
from services.engine.steps.step import NonFiniteLogits, PooledState, StepItem


def pooled_rows(items: SequenceOf[StepItem], ends: np.ndarray) -> list[np.ndarray]:
    """Returns, for each item that is pooled in this step, int64 [rows] of the tokens that are.

    `ends` are the rows at which the items end.
    """
    return [
        np.arange(end - item.num_pooled, end, dtype=np.int64)
        for item, end in zip(items, ends, strict=True)
        if item.num_pooled
    ]


def pooled_states(items: SequenceOf[StepItem], rows: np.ndarray | None) -> Iterator[PooledState | NonFiniteLogits]:
    """Yields what becomes of each item that is pooled; `rows` [rows, hidden] are the states of all of them in order.

    None: no item is pooled.
    """
    for item in items:
        if item.num_pooled and rows is not None:
            yield _pooled(item.sequence, rows[: item.num_pooled])
            rows = rows[item.num_pooled :]


def _pooled(sequence: Sequence, rows: np.ndarray) -> PooledState | NonFiniteLogits:
    if not np.isfinite(rows).all():
        return NonFiniteLogits("the model's hidden states are not finite")
    if sequence.pooling == "last":
        return PooledState(rows[-1].copy())
    before = sequence.pooled if sequence.num_computed_tokens else None  # None also once its pages were taken
    total = np.zeros_like(rows[0]) if before is None else before.copy()
    for row in rows:  # One after the other: the sum is the same however the prompt was cut into chunks.
        total += row
    return PooledState(total)
