"""Pools the hidden states of prompts that are embedded. Changes no sequence. Must not import torch."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from services.engine.steps.sequence import Sequence
from services.engine.steps.step import NonFiniteLogits, PooledState, StepItem


def pooled_rows(items: SequenceOf[StepItem], ends: np.ndarray) -> list[np.ndarray]:
    """Returns, for each item that is pooled in this step, the rows of its pooled tokens, int64 [rows].

    `ends` contains the end row of each item.
    """
    return [
        np.arange(end - item.num_pooled, end, dtype=np.int64)
        for item, end in zip(items, ends, strict=True)
        if item.num_pooled
    ]


def pooled_states(items: SequenceOf[StepItem], rows: np.ndarray | None) -> Iterator[PooledState | NonFiniteLogits]:
    """Yields the pooled state of each pooled item. `rows` [rows, hidden] contains their hidden states in order.

    `rows` is None if no item is pooled.
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
    before = sequence.pooled if sequence.num_computed_tokens else None  # also None after a preemption
    total = np.zeros_like(rows[0]) if before is None else before.copy()
    for row in rows:  # In token order, so that the sum does not depend on the chunks.
        total += row
    return PooledState(total)
