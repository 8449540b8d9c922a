"""Decides which requests a decode worker lets in, by what their answers are expected to need: pure bookkeeping.

Belongs to the event loop. Knows no tensor, no clock, no thread and no message.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from services.engine.cache.pool import num_pages_for
from services.runtime.errors import NoFreePages, Overloaded
from services.scheduling.chunks import DEFAULT_CLASS

NUM_CLASSES = 5
FORGET = 1 / 32
"""Weight of one ended answer in the mean of all."""
MIN_ANSWERS = 8
"""Until this many have ended, an answer is expected to take half of what it may."""
OUTLAST = 1.5
"""An answer that outlasts what was expected of it is expected to take this many times what it has."""


def watermark_pages(num_pages: int) -> int:
    """Pages of a pool that are left alone when something enters, so that those inside can grow."""
    return max(1, num_pages // 100)


class AnswerLengths:
    """Learns from answers that ended how many tokens answers have: the mean, and the mean deviation from it."""

    def __init__(self) -> None:
        self._num = 0
        self._mean = self._deviation = 0.0

    def note(self, num_tokens: int) -> None:
        """Notes an answer that ended by itself with this many tokens."""
        self._num += 1
        weight = max(FORGET, 1 / self._num)
        self._deviation += weight * (abs(num_tokens - self._mean) - self._deviation) if self._num > 1 else 0.0
        self._mean += weight * (num_tokens - self._mean)

    def expected(self, max_tokens: int) -> int:
        """Returns the tokens to count an answer of at most `max_tokens` for: the mean and one mean deviation."""
        expected = self._mean + self._deviation if self._num >= MIN_ANSWERS else max_tokens / 2
        return min(max_tokens, max(1, math.ceil(expected)))


@dataclass(slots=True)
class _Promise:
    service_class: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int
    num_pages: int


class AdmissionBook:
    """Lets requests in as long as what they are expected to need is free.

    The rule: a request is counted with the pages of its prompt and of the answer that is expected (AnswerLengths; more
    once it has outlasted that). One of class c is admitted if, with it, the requests of class c and more urgent ones
    are fewer than `max_admitted` and their pages, and the watermark, fit into the pool; less urgent ones do not count,
    since they are preempted. The only one of its class and more urgent ones is always admitted: the caller has checked
    that its worst case fits when it is alone. With `is_optimistic` false everything counts for its worst case.

    A promise stands until it is withdrawn: pages that the request has taken by then are part of it.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_admitted: int, is_optimistic: bool = True) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._max_admitted = max_admitted
        self._is_optimistic = is_optimistic
        self._watermark = watermark_pages(num_pages) if is_optimistic else 0
        self._answers = AnswerLengths()
        self._promises: dict[Hashable, _Promise] = {}
        self._pages_by_class = [0] * NUM_CLASSES
        self._num_by_class = [0] * NUM_CLASSES

    def __len__(self) -> int:
        """Requests with a promise."""
        return len(self._promises)

    @property
    def promised_pages(self) -> int:
        """Pages that all are expected to need, taken ones included."""
        return sum(self._pages_by_class)

    @property
    def pages_by_class(self) -> tuple[int, ...]:
        """Pages that all of a service class are expected to need, for each class."""
        return tuple(self._pages_by_class)

    @property
    def num_by_class(self) -> tuple[int, ...]:
        """Requests with a promise, for each service class."""
        return tuple(self._num_by_class)

    def promise(
        self,
        key: Hashable,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        num_emitted_tokens: int = 0,
        service_class: int = DEFAULT_CLASS,
    ) -> None:
        """Lets a request in. Raises Overloaded or NoFreePages when it cannot be let in now."""
        assert key not in self._promises, "a request is admitted once"
        worst = num_pages_for(num_prompt_tokens + max_tokens, self._page_size)
        assert worst <= self._num_pages, "the caller has checked that the request can ever fit"
        num_ahead = sum(self._num_by_class[: service_class + 1])
        if num_ahead >= self._max_admitted:
            raise Overloaded(f"the decode worker holds {num_ahead} requests that are as urgent already")
        expected = max_tokens
        if self._is_optimistic:
            expected = max(self._answers.expected(max_tokens), self._outlasting(num_emitted_tokens, max_tokens))
        promise = _Promise(service_class, num_prompt_tokens, max_tokens, expected, 0)
        num_pages = self._pages_of(promise)
        free = self._num_pages - self._watermark - sum(self._pages_by_class[: service_class + 1])
        if num_ahead and num_pages > free:
            raise NoFreePages(f"the request is expected to need {num_pages} pages and {max(free, 0)} are not promised")
        self._promises[key] = promise
        self._num_by_class[service_class] += 1
        self._resize(promise)

    def note_tokens(self, key: Hashable, num_answer_tokens: int) -> None:
        """Notes how long an answer is now: one that outlasts what was expected counts for more. O(1)."""
        promise = self._promises.get(key)
        if promise is not None and num_answer_tokens >= promise.expected_tokens < promise.max_tokens:
            promise.expected_tokens = self._outlasting(num_answer_tokens, promise.max_tokens)
            self._resize(promise)

    def note_end(self, num_answer_tokens: int) -> None:
        """Notes an answer that ended by itself: what is expected of the next ones follows it."""
        self._answers.note(num_answer_tokens)

    def withdraw(self, key: Hashable) -> None:
        """Ends a promise; the request holds no page now. Unknown keys are ignored."""
        promise = self._promises.pop(key, None)
        if promise is not None:
            self._num_by_class[promise.service_class] -= 1
            self._pages_by_class[promise.service_class] -= promise.num_pages

    @staticmethod
    def _outlasting(num_tokens: int, max_tokens: int) -> int:
        return min(max_tokens, math.ceil(OUTLAST * num_tokens) + 1)

    def _pages_of(self, promise: _Promise) -> int:
        return num_pages_for(promise.num_prompt_tokens + promise.expected_tokens, self._page_size)

    def _resize(self, promise: _Promise) -> None:
        num_pages = self._pages_of(promise)
        self._pages_by_class[promise.service_class] += num_pages - promise.num_pages
        promise.num_pages = num_pages
