"""Looks at Redis' memory every few seconds: gives back what has expired, counts each kind, and warns of what is wrong.

Knows neither requests nor what is in a key.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from services.cluster.answers import AnswerStore
from services.cluster.connections import end_task
from services.cluster.files import FileStore
from services.cluster.memory import Complaint, MemoryUse, StorageBounds, complaints, memory_use
from services.cluster.redis_store import Store
from services.runtime.background_tasks import supervise
from services.runtime.errors import StoreUnavailable

INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


class StorageWatch:
    """`on_use` and `on_complaints` take each look; `bounds` are what the counted kinds may take."""

    def __init__(
        self,
        store: Store,
        *,
        files: FileStore,
        answers: AnswerStore,
        bounds: StorageBounds,
        on_use: Callable[[MemoryUse, StorageBounds], None],
        on_complaints: Callable[[Sequence[Complaint]], None],
    ) -> None:
        self._store = store
        self._files = files
        self._answers = answers
        self._bounds = bounds
        self._on_use = on_use
        self._on_complaints = on_complaints
        self._num_evicted_keys: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look, on the running loop."""
        self._task = supervise(self._follow, name="storage")

    async def close(self) -> None:
        """Stops looking."""
        if self._task is not None:
            await end_task(self._task)

    async def look(self) -> None:
        """Looks once. Raises StoreUnavailable."""
        use = await memory_use(self._store, files=self._files, answers=self._answers)
        self._on_use(use, self._bounds)
        self._on_complaints(list(complaints(use, self._bounds)))
        before, self._num_evicted_keys = self._num_evicted_keys, use.num_evicted_keys
        if before is not None and use.num_evicted_keys > before:
            logger.warning("Redis has evicted keys", extra={"num_keys": use.num_evicted_keys - before})

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):  # A caller that needs Redis gets the error elsewhere.
                await self.look()
            await asyncio.sleep(INTERVAL_S)
