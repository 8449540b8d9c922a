"""Admission control of a decode worker, based on the expected length of responses.

Runs on the event loop. Has no dependency on tensors, clocks, threads, or messages.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from services.engine.cache.pool import num_pages_for
from services.runtime.errors import NoFreePages, Overloaded
from services.scheduling.chunks import DEFAULT_CLASS

NUM_CLASSES = 5
FORGET = 1 / 32
"""Weight of one finished response in the running mean."""
MIN_ANSWERS = 8
"""Number of finished responses before the mean is used. Until then, a response is expected to use half its maximum."""
OUTLAST = 1.5
"""Factor by which the expected length grows when a response exceeds it."""


def watermark_pages(num_pages: int) -> int:
    """Returns the number of pages that stay free when a sequence enters, so that running sequences can grow."""
    return max(1, num_pages // 100)


class AnswerLengths:
    """Learns the length of responses: the running mean and the mean absolute deviation, in tokens."""

    def __init__(self) -> None:
        self._num = 0
        self._mean = self._deviation = 0.0

    def note(self, num_tokens: int) -> None:
        """Records the length of a response that ended before its limit, in tokens."""
        self._num += 1
        weight = max(FORGET, 1 / self._num)
        self._deviation += weight * (abs(num_tokens - self._mean) - self._deviation) if self._num > 1 else 0.0
        self._mean += weight * (num_tokens - self._mean)

    def expected(self, max_tokens: int) -> int:
        """Returns the expected length of a response of at most `max_tokens`: the mean plus one mean deviation."""
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
    """Admits requests as long as the pages that they are expected to need are free.

    A request counts with the pages of its prompt and of its expected response (AnswerLengths, or more once the response
    exceeds that length). A request of class c is admitted if two conditions hold for the requests of class c and of
    more urgent classes, itself included. They are at most `max_admitted`, and their pages plus the watermark fit into
    the pool. Less urgent requests do not count because they are preempted. If no request of class c or of a more urgent
    class is admitted, the request is always admitted: the caller has checked that its worst case fits into an otherwise
    empty pool. If `is_optimistic` is false, every request counts with its worst case.

    A promise lasts until it is withdrawn. It includes the pages that the request already holds.
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
        """Returns the number of admitted requests."""
        return len(self._promises)

    @property
    def promised_pages(self) -> int:
        """Returns the number of pages that all admitted requests are expected to need, held pages included."""
        return sum(self._pages_by_class)

    @property
    def pages_by_class(self) -> tuple[int, ...]:
        """Returns the expected pages of the admitted requests, by service class."""
        return tuple(self._pages_by_class)

    @property
    def num_by_class(self) -> tuple[int, ...]:
        """Returns the number of admitted requests, by service class."""
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
        """Admits a request. Raises Overloaded or NoFreePages if it cannot be admitted now."""
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
        """Records the current length of a response. Increases the estimate if the response exceeds it. O(1)."""
        promise = self._promises.get(key)
        if promise is not None and num_answer_tokens >= promise.expected_tokens < promise.max_tokens:
            promise.expected_tokens = self._outlasting(num_answer_tokens, promise.max_tokens)
            self._resize(promise)

    def note_end(self, num_answer_tokens: int) -> None:
        """Records the length of a response that ended before its limit. Later estimates include it."""
        self._answers.note(num_answer_tokens)

    def withdraw(self, key: Hashable) -> None:
        """Ends a promise. The request must not hold pages. Ignores unknown keys."""
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
