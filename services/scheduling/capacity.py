"""How much a decode worker can do at most, by the law of its steps: closed forms, for plans and for what holds it back.

A larger batch never makes fewer tokens a second, so that the most are made with the largest batch that places, pages
and the time of a step allow.
"""

from collections.abc import Callable

from services.scheduling.prediction import DecodeSpeed

LineAt = Callable[[int], DecodeSpeed]
"""Gives the line that holds for a batch of this size."""


def largest_batch(line_at: LineAt, most: int, *, context_tokens: float, step_target_s: float | None) -> int:
    """Returns the largest batch, from 1 to `most`, whose step keeps the target; 1 where none does.

    `context_tokens` are those that one sequence looks back on.
    """
    if step_target_s is None:
        return max(1, most)
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if line_at(middle).step_s(middle, middle * context_tokens) <= step_target_s:
            low = middle
        else:
            high = middle - 1
    return low


def tokens_per_s(line: DecodeSpeed, num_sequences: float, *, context_tokens: float) -> float:
    """Returns the tokens that a worker generates in a second with a batch of this size; 0 without sequences."""
    step_s = line.step_s(num_sequences, num_sequences * context_tokens)
    return num_sequences / step_s if num_sequences > 0 and step_s > 0 else 0.0
