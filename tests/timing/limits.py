"""Limits on elapsed time and on CPU time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Asserts that the block takes less than `limit_s`."""
    yield from _within(limit_s, time.monotonic)


@contextmanager
def within_cpu(limit_s: float) -> Iterator[None]:
    """Asserts that the block takes less than `limit_s` of this thread's CPU time."""
    yield from _within(limit_s, time.thread_time)


def _within(limit_s: float, clock: Callable[[], float]) -> Iterator[None]:
    began_s = clock()
    yield
    assert clock() - began_s < limit_s
