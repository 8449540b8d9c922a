"""Who gets a place on a decode worker, and what its next step computes: pure bookkeeping.

`AdmissionBook` belongs to the event loop: it promises pages. `BatchScheduler` belongs to the engine thread: it fills
the batch and mixes decode, replay and local prefill in a step. Neither knows a tensor, a clock, a thread or a message.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from services.runtime.errors import NoFreePages, Overloaded


@dataclass(slots=True)
class Progress:
    """How far a sequence is.

    Positions below `num_chunked_tokens`, at least the prompt's, may be computed in chunks; those from there to
    `num_tokens` in single-token steps. The step that reaches `num_tokens` samples.
    """

    num_chunked_tokens: int
    num_tokens: int
    num_computed_tokens: int


class Work(NamedTuple):
    """The next `num_tokens` tokens of a sequence, from position `start`; `samples` when a new token comes out."""

    key: Hashable
    start: int
    num_tokens: int
    samples: bool


class AdmissionBook:
    """Promises pages for the worst case of each request, so that an admitted one never waits for a page or loses one.

    The promise of a request covers its prompt and all tokens that it may generate, and stands until it is withdrawn:
    pages that the request has taken by then are part of it.
    """

    def __init__(self, *, num_pages: int, max_admitted: int) -> None:
        self._num_pages = num_pages
        self._max_admitted = max_admitted
        self._promises: dict[Hashable, int] = {}
        self._promised_pages = 0

    def __len__(self) -> int:
        """Requests with a promise."""
        return len(self._promises)

    @property
    def promised_pages(self) -> int:
        """Pages promised in all, taken ones included."""
        return self._promised_pages

    def promise(self, key: Hashable, *, num_pages: int) -> None:
        """Promises pages. Raises Overloaded or NoFreePages when they cannot be promised now."""
        assert key not in self._promises, "a request is admitted once"
        assert num_pages <= self._num_pages, "who asks has checked that the request can ever fit"
        if len(self._promises) >= self._max_admitted:
            raise Overloaded(f"the decode worker holds {self._max_admitted} requests already")
        free = self._num_pages - self._promised_pages
        if num_pages > free:
            raise NoFreePages(f"the request may need {num_pages} pages and {free} are not promised")
        self._promises[key] = num_pages
        self._promised_pages += num_pages

    def withdraw(self, key: Hashable) -> None:
        """Ends a promise; the request holds no page any more. Unknown keys are ignored."""
        self._promised_pages -= self._promises.pop(key, 0)


class BatchScheduler:
    """Continuous batching: a sequence enters the batch when there is a place, and leaves when it ends.

    Each step gives every decoding or replaying sequence one token, and the rest of the budget to prompts that are
    computed here, first come first served. Decoding never waits for prompts; prompts always get at least
    `min_prefill_tokens`, so that a full batch cannot starve them.
    """

    def __init__(self, *, max_batch: int, step_tokens: int, min_prefill_tokens: int = 16) -> None:
        assert min(max_batch, step_tokens, min_prefill_tokens) > 0, "a step computes something"
        self._max_batch = max_batch
        self._step_tokens = step_tokens
        self._min_prefill_tokens = min(min_prefill_tokens, step_tokens)
        self._waiting: dict[Hashable, Progress] = {}  # in order of arrival
        self._prompts: dict[Hashable, Progress] = {}  # in the batch, prompt not computed; in order of entry
        self._decoding: dict[Hashable, Progress] = {}  # in the batch, prompt computed
        self._waiting_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._prompts) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences without a place."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts, and of answers that are computed again, that are still to be computed in chunks."""
        return self._waiting_tokens

    def add(self, key: Hashable, progress: Progress) -> None:
        """Adds a sequence with at least one uncomputed token."""
        known = (self._waiting, self._prompts, self._decoding)
        assert not any(key in places for places in known), "a sequence is added once"
        assert progress.num_computed_tokens < progress.num_tokens, "a sequence has something to compute"
        assert progress.num_chunked_tokens <= progress.num_tokens, "the chunks are part of the sequence"
        self._waiting[key] = progress
        self._waiting_tokens += _uncomputed_in_chunks(progress)

    def remove(self, key: Hashable) -> None:
        """Forgets a sequence, ended or cancelled. O(1); unknown keys are ignored."""
        for places in (self._waiting, self._prompts, self._decoding):
            progress = places.pop(key, None)
            if progress is not None:
                self._waiting_tokens -= _uncomputed_in_chunks(progress)

    def next_step(self) -> list[Work]:
        """What the next step computes; it counts as computed from here on. Empty: there is nothing to do.

        A sequence whose work `samples` gets its new token here too: it has one more token to compute in the step after,
        unless it is removed before.
        """
        self._fill_batch()
        step = [_advance(key, progress, 1) for key, progress in self._decoding.items()]
        if self._prompts:
            step += self._prefill_chunks(max(self._step_tokens - len(step), self._min_prefill_tokens))
        return step

    def _fill_batch(self) -> None:
        while self._waiting and self.num_running < self._max_batch:
            key = next(iter(self._waiting))
            progress = self._waiting.pop(key)
            place = self._prompts if _uncomputed_in_chunks(progress) else self._decoding
            place[key] = progress

    def _prefill_chunks(self, budget: int) -> list[Work]:
        chunks = []
        for key, progress in self._prompts.items():
            if budget == 0:
                break
            num_tokens = min(budget, _uncomputed_in_chunks(progress))
            budget -= num_tokens
            chunks.append(_advance(key, progress, num_tokens))
        self._waiting_tokens -= sum(chunk.num_tokens for chunk in chunks)
        for chunk in chunks:
            if not _uncomputed_in_chunks(self._prompts[chunk.key]):
                self._decoding[chunk.key] = self._prompts.pop(chunk.key)
        return chunks


def _uncomputed_in_chunks(progress: Progress) -> int:
    return max(progress.num_chunked_tokens - progress.num_computed_tokens, 0)


def _advance(key: Hashable, progress: Progress, num_tokens: int) -> Work:
    start = progress.num_computed_tokens
    end = progress.num_computed_tokens = start + num_tokens
    samples = end == progress.num_tokens
    progress.num_tokens += samples
    return Work(key, start, num_tokens, samples)
