"""Prompts whose tokens are reported, in the background of all else: pure bookkeeping.

The log-probabilities of a prompt cost several times what computing it does, and every sequence in a step waits for the
whole step. So a step has few such tokens, and while a worker has anything else to do, the steps with such tokens take
at most `SHARE` of the time.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the prompt `key`: `num_tokens` tokens from position `start`; `is_last` when they end the prompt."""

    key: Hashable
    start: int
    num_tokens: int
    is_last: bool


@dataclass(slots=True)
class BackgroundPrompts:
    """The better service class first (the lower number), and within a class the one that came first.

    `most_tokens`: the most tokens of a step.
    """

    most_tokens: int
    _spans: dict[int, dict[Hashable, tuple[int, int]]] = field(default_factory=dict)
    """By class and key, the uncomputed positions of a prompt: the first one, and the end."""
    _resumes_s: float = 0.0

    def __len__(self) -> int:
        """Returns how many prompts have uncomputed tokens."""
        return sum(map(len, self._spans.values()))

    def __contains__(self, key: Hashable) -> bool:
        return any(key in spans for spans in self._spans.values())

    def add(self, key: Hashable, *, start: int, end: int, service_class: int) -> None:
        """Adds a prompt whose tokens from `start` to `end` are to be computed."""
        self._spans.setdefault(service_class, {})[key] = (start, end)

    def remove(self, key: Hashable) -> None:
        """Forgets a prompt; unknown keys are ignored."""
        for service_class, spans in self._spans.items():
            if spans.pop(key, None) is not None:
                if not spans:
                    del self._spans[service_class]
                return

    def next_chunks(self, max_tokens: int, *, now_s: float, is_busy: bool) -> list[Chunk]:
        """Returns what the next step has of them; it counts as computed from here on.

        `is_busy`: others have work in the step. They keep half of its `max_tokens`, unless that is a single one.
        """
        if is_busy and now_s < self._resumes_s:
            return []
        left = min(self.most_tokens, max(1, max_tokens // 2) if is_busy else max_tokens)
        chunks: list[Chunk] = []
        while left and self._spans:
            spans = self._spans[min(self._spans)]
            key, (start, end) = next(iter(spans.items()))
            num_tokens = min(left, end - start)
            left -= num_tokens
            chunks.append(Chunk(key, start, num_tokens, start + num_tokens == end))
            if chunks[-1].is_last:
                self.remove(key)
            else:
                spans[key] = (start + num_tokens, end)
        return chunks

    def note_step(self, time_s: float, *, now_s: float) -> None:
        """Notes that a step with some of their tokens has ended, and took `time_s`."""
        self._resumes_s = now_s + time_s * (1 / SHARE - 1)
