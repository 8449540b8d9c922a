"""Ends the wait of a watcher of the registry as soon as a change is published."""

import asyncio
import contextlib
from typing import Self

from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from services.cluster.connections import end_task
from services.cluster.redis_store import Store
from services.runtime.background_tasks import supervise

MIN_POLL_INTERVAL_S = 0.02


class Wakeups:
    """Ends a watcher's wait when a change is published; without it the next poll finds the change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._event = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    async def wait(self, timeout_s: float, *, is_store_available: bool) -> None:
        """Waits for a published change, at least MIN_POLL_INTERVAL_S and at most `timeout_s`."""
        if is_store_available and (self._listener is None or self._listener.done()):
            self._listener = supervise(self._listen, name="workers-changed")
        elif not is_store_available:
            await self._stop()
        await asyncio.sleep(MIN_POLL_INTERVAL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()

    async def aclose(self) -> None:
        """Ends the subscription."""
        await self._stop()

    async def _stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await end_task(listener)

    async def _listen(self) -> None:
        async with _Subscription(self._store.subscriber(), self._store.keys.workers_changed) as subscription:
            # What changed before the subscription stood was not heard.
            self._event.set()
            while await subscription.is_alive_after_message():
                self._event.set()


class _Subscription:
    """One subscribed channel."""

    def __init__(self, pubsub: PubSub, channel: str) -> None:
        self._pubsub = pubsub
        self._channel = channel

    async def __aenter__(self) -> Self:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.subscribe(self._channel)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.aclose()  # type: ignore[no-untyped-call]

    async def is_alive_after_message(self) -> bool:
        """Waits for a message. False: the connection is broken."""
        try:
            while True:
                message = await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=None)
                if message is not None:
                    return True
        except (RedisError, OSError, RuntimeError):
            return False
