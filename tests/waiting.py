"""Waiting in tests: for a condition, with one limit that only a hang reaches.

A test waits for an event or a condition, never for a time. How long that takes is a property of the machine, so a wait
ends early only if the condition holds. `HANG_LIMIT_S` turns a hang into a failure.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

HANG_LIMIT_S = 300.0 * float(os.environ.get("TANDEM_TEST_HANG_SCALE", "1"))
"""Limit of every wait, in seconds. Set TANDEM_TEST_HANG_SCALE above 1 on a machine with little CPU time."""

POLL_S = 0.005


async def until(holds: Callable[[], Any | Awaitable[Any]], what: str = "the condition") -> None:
    """Waits until `holds()` or its awaited result is true. Raises AssertionError after `HANG_LIMIT_S`."""
    give_up_at_s = time.monotonic() + HANG_LIMIT_S
    while True:
        result = holds()
        if await result if inspect.isawaitable(result) else result:
            return
        assert time.monotonic() < give_up_at_s, f"{what} did not hold within {HANG_LIMIT_S:g} s"
        await asyncio.sleep(POLL_S)


def wait_until(holds: Callable[[], Any], what: str = "the condition") -> None:
    """Waits as `until` does, in a test without an event loop."""
    give_up_at_s = time.monotonic() + HANG_LIMIT_S
    while not holds():
        assert time.monotonic() < give_up_at_s, f"{what} did not hold within {HANG_LIMIT_S:g} s"
        time.sleep(POLL_S)


async def settle() -> None:
    """Lets every task that can run do so, before a test asserts that something has not happened."""
    for _ in range(100):
        await asyncio.sleep(0)
