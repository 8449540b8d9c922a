"""Step-time models: how long a worker computes for a step of any mix of prompts and sequences.

A step has chunks of prompts, each behind tokens that are computed already, and sequences that get a token each. A
`StepLaw` gives the step's seconds, and the two lines that a gateway would measure of such a worker: policies get these,
never the law. Between two changes of a batch the steps' times form an arithmetic series, because `decode_at` gives a
line for each batch size: many steps are one event.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from planning.simulator.fitting import fitted
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed

Chunk = tuple[int, int]
"""Tokens of a prompt that a step computes, and the prompt's tokens before them."""


class StepLaw(Protocol):
    """Times of one worker's steps, in seconds."""

    @property
    def prefill(self) -> PrefillSpeed:
        """The line that a gateway would measure of steps with one prompt."""
        ...

    def decode_at(self, num_sequences: int) -> DecodeSpeed:
        """Returns the line of steps without prompts, for a batch of this size."""
        ...

    def step_s(self, chunks: Sequence[Chunk], *, num_sequences: int = 0, context_tokens: int = 0) -> float:
        """Returns the seconds of a step with prompts; the sequences look back on `context_tokens` tokens together."""
        ...


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """Closed forms: prompts and sequences cost what they would cost in steps of their own, and prompts share a start.

    A decode step of up to `max_small` sequences follows one line, of more another.
    """

    prefill: PrefillSpeed
    small: DecodeSpeed
    large: DecodeSpeed
    max_small: int = 0

    def decode_at(self, num_sequences: int) -> DecodeSpeed:
        """Returns the line that holds for a batch of this size."""
        return self.small if num_sequences <= self.max_small else self.large

    def step_s(self, chunks: Sequence[Chunk], *, num_sequences: int = 0, context_tokens: int = 0) -> float:
        """Returns what the prompts take, and what the sequences take."""
        start_s = self.prefill.overhead_s
        time_s = start_s + sum(self.prefill.time_s(num_tokens, before) - start_s for num_tokens, before in chunks)
        if num_sequences:
            time_s += self.decode_at(num_sequences).step_s(num_sequences, context_tokens)
        return time_s


class Table:
    """A function by its values at some places: linear between them and beyond them."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        self._places = [place for place, _ in ordered]
        self._values = [value for _, value in ordered]
        assert len(ordered) > 1, "a line has two points"

    def at(self, place: float) -> float:
        """Returns the interpolated value."""
        places, values = self._places, self._values
        above = min(max(bisect_left(places, place), 1), len(places) - 1)
        left, low = places[above - 1], values[above - 1]
        return low + (values[above] - low) * (place - left) / (places[above] - left)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Measured parts of a step of one worker, in seconds.

    `dense`: by tokens of the step, what does not depend on contexts; `outputs`: by tokens that are sampled;
    `prompt_attention`: overhead, per token, per pair of tokens as in `PrefillSpeed`, per token before;
    `decode_attention`: (batch size, overhead, per context token), in order of batch size.
    """

    dense: Table
    outputs: Table
    prompt_attention: tuple[float, ...]
    decode_attention: tuple[tuple[float, ...], ...]


class LayeredLaw:
    """A law from kernel times: all tokens of a step pass the dense layers together, contexts are paid for each.

    `scale` multiplies the kernels' times; `overhead_s` is what the host adds to every step. These two are what
    kernels cannot tell, and what is fitted to a running engine.
    """

    def __init__(self, times: LayerTimes, *, scale: float = 1.0, overhead_s: float = 0.0) -> None:
        self.times = times
        self.scale = scale
        self.overhead_s = overhead_s
        self._lines: dict[int, DecodeSpeed] = {}
        self._overheads = Table([(size, fixed) for size, fixed, _ in times.decode_attention])
        self._slopes = Table([(size, slope) for size, _, slope in times.decode_attention])
        self.prefill = line_of_prompts(lambda num_tokens, before: self.step_s([(num_tokens, before)]))

    def decode_at(self, num_sequences: int) -> DecodeSpeed:
        """Returns the line for a batch size, whose sequences have no term of their own left."""
        line = self._lines.get(num_sequences)
        if line is None:
            times, scale = self.times, self.scale
            fixed_s = times.dense.at(num_sequences) + times.outputs.at(num_sequences)
            fixed_s += max(0.0, self._overheads.at(num_sequences))
            slope_s = max(0.0, self._slopes.at(num_sequences))
            line = DecodeSpeed(self.overhead_s + scale * fixed_s, 0.0, scale * slope_s)
            self._lines[num_sequences] = line
        return line

    def step_s(self, chunks: Sequence[Chunk], *, num_sequences: int = 0, context_tokens: int = 0) -> float:
        """Returns the seconds of a mixed step. Each of its prompts counts as one that gives a token."""
        times, num_new = self.times, sum(num_tokens for num_tokens, _ in chunks)
        fixed_s, token_s, pair_s, before_s = times.prompt_attention
        kernels_s = times.dense.at(num_new + num_sequences) + times.outputs.at(num_sequences + len(chunks))
        for num_tokens, before in chunks:
            kernels_s += fixed_s + token_s * num_tokens + pair_s * num_tokens * (num_tokens + 2 * before)
            kernels_s += before_s * before
        if num_sequences:
            kernels_s += max(0.0, self._overheads.at(num_sequences))
            kernels_s += max(0.0, self._slopes.at(num_sequences)) * context_tokens
        return self.overhead_s + self.scale * kernels_s


class BatchedLaw:
    """A law by the tokens of a batch alone, as splitwise-sim has it: contexts cost nothing.

    `mixed_factor` is what a step with prompts takes longer where sequences decode in it.
    """

    def __init__(self, prompt: Table, token: Table, *, mixed_factor: float = 1.1) -> None:
        self._prompt = prompt
        self._token = token
        self._mixed_factor = mixed_factor
        self._lines: dict[int, DecodeSpeed] = {}
        self.prefill = line_of_prompts(lambda num_tokens, _: prompt.at(num_tokens))

    def decode_at(self, num_sequences: int) -> DecodeSpeed:
        """Returns a constant."""
        line = self._lines.get(num_sequences)
        if line is None:
            line = self._lines[num_sequences] = DecodeSpeed(self._token.at(num_sequences), 0.0)
        return line

    def step_s(self, chunks: Sequence[Chunk], *, num_sequences: int = 0, context_tokens: int = 0) -> float:
        """Returns the time of as many prompt tokens as the step has tokens."""
        del context_tokens  # cost nothing here
        prompt_s = self._prompt.at(sum(num_tokens for num_tokens, _ in chunks) + num_sequences)
        return prompt_s * (self._mixed_factor if num_sequences else 1.0)


def line_of_prompts(time_s: Callable[[int, int], float]) -> PrefillSpeed:
    """Returns the line closest to the times of single prompts of 64 to 8,192 tokens, as a gateway would measure it."""
    rows = [(num_tokens, 0) for num_tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
    amounts = [(1.0, float(n), float(n) * (n + 2 * before)) for n, before in rows]
    overhead_s, token_s, pair_s = fitted(amounts, [time_s(*row) for row in rows]).factors
    return PrefillSpeed(overhead_s, token_s, pair_s)
