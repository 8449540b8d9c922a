"""Retries Links in the background after a slow failure or an unreachable payload channel.

No request waits for a retry. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.runtime.clock import Clock
from services.runtime.errors import LinkRefused, PeerUnreachable, TandemError

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 8.0
"""Delay before the first retry, and the longest delay, in seconds. Each failure doubles the delay."""
FORGET_S = 120.0
"""Time without a request for a receiver after which its retries stop, in seconds."""

LinkKey = tuple[str, str]
"""Address and incarnation of a receiver."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failure:
    error: PeerUnreachable
    wanted_s: float
    task: asyncio.Task[None] | None = None


class LinkRetries:
    """Retries the receivers that are currently unreachable.

    `open_link` opens a Link, or raises the reason for its failure.
    """

    def __init__(
        self,
        open_link: Callable[[LinkKey], Awaitable[None]],
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._open_link = open_link
        self._clock = clock
        self._sleep = sleep
        self._failures: dict[LinkKey, _Failure] = {}

    def error_for(self, key: LinkKey) -> PeerUnreachable | None:
        """Returns the error of the last attempt, for a request that needs a Link now.

        Returns None if no retry is pending.
        """
        failure = self._failures.get(key)
        if failure is None:
            return None
        failure.wanted_s = self._clock.monotonic()
        return failure.error.again()

    def failed(self, key: LinkKey, error: PeerUnreachable) -> None:
        """Records a failed attempt, and starts retrying."""
        failure = self._failures[key] = _Failure(error, self._clock.monotonic())
        failure.task = asyncio.create_task(self._retry(key, failure), name=f"retry Link to {key[0]}")

    async def close(self) -> None:
        """Stops all retries."""
        tasks = [failure.task for failure in self._failures.values() if failure.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _retry(self, key: LinkKey, failure: _Failure) -> None:
        delay_s = FIRST_RETRY_S
        try:
            while self._clock.monotonic() - failure.wanted_s < FORGET_S:
                await self._sleep(delay_s)
                try:
                    await self._open_link(key)
                except LinkRefused:
                    return  # the receiver is reachable again
                except PeerUnreachable as error:
                    failure.error = error.again()
                    delay_s = min(2 * delay_s, MAX_RETRY_S)
                else:
                    logger.info("peer reachable again", extra={"address": key[0]})
                    return
        except TandemError as error:  # the next request gets this error without a delay
            logger.info("retries of a Link ended", extra={"address": key[0], "error": error.message})
        except Exception:
            logger.exception("retrying a Link failed", extra={"address": key[0]})
        finally:
            del self._failures[key]
