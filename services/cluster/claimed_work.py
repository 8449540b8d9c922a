"""Work that is claimed in Redis: one process at a time has a piece, renews its claim, and gives back what it leaves.

`ClaimedWork` looks for pieces that nobody has, up to a number in all and for each tenant; a `ClaimedRun` is one piece
while it is ours. What the work is, and how it is claimed and renewed, is the business of those that build on them
(batches, and responses in the background): this module knows neither.
"""

import abc
import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from services.runtime.background_tasks import supervise
from services.runtime.errors import StoreRefused, StoreUnavailable

POLL_S = 1.0
"""How often a process looks for work that nobody has."""
RENEWALS_PER_LEASE = 4
STORE_RETRY_S = 0.25
"""How often a Redis that is away is tried again."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Left(Exception):
    """The work is no longer ours, or no longer to be done."""


async def until_answered(call: Callable[[], Awaitable[T]], *, timeout_s: float | None = None) -> T:
    """Repeats a command until Redis replies. The command must be safe to repeat: it may have run before a time-out.

    Raises StoreRefused at once if Redis refuses the command, and StoreUnavailable if it has not replied after
    `timeout_s`. Without `timeout_s` it continues until it is cancelled.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        try:
            return await call()
        except StoreRefused:
            raise
        except StoreUnavailable:
            if timeout_s is not None and loop.time() - began_s >= timeout_s:
                raise
            await asyncio.sleep(STORE_RETRY_S)


class ClaimedRun(abc.ABC):
    """One piece of work while it is ours. `kind` names it in logs, as "a batch"; `identity` is added to each line."""

    def __init__(self, *, name: str, tenant: str, kind: str, identity: dict[str, object]) -> None:
        self.name = name
        self.tenant = tenant
        self._kind = kind
        self._identity = identity
        self._looks = asyncio.Event()
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_stopped = False

    async def run(self) -> None:
        """Works until the piece is complete, is another's, or is given back. Raises nothing."""
        self._task = asyncio.current_task()
        keeping = supervise(self._keep, name="claim", subject=self.name)
        try:
            await self._complete()
            logger.info("%s is over", self._kind, extra=self._identity)
        except (Left, asyncio.CancelledError):
            logger.info("%s was let go", self._kind, extra=self._identity)
            with contextlib.suppress(StoreUnavailable):
                await self._give_back()
        except Exception:  # the root of the task; nobody renews the claim now, so the work is tried again later
            logger.exception("%s cannot be worked on", self._kind, extra=self._identity)
            with contextlib.suppress(StoreUnavailable):
                await self._on_fault()
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))

    def leave(self) -> None:
        """Begins nothing more; the work is given back when what runs has ended."""
        self._leaving.set()

    def stop(self) -> None:
        """Ends the work at once."""
        self.leave()
        if self._task is not None and not self._has_stopped:
            self._has_stopped = True  # a second cancellation would interrupt what the first one ends
            self._task.cancel()

    def look(self) -> None:
        """Looks now whether the work is still to be done."""
        self._looks.set()

    async def _until_next_look(self, lease_s: float) -> None:
        """Waits until the claim has to be renewed, or `look` is called."""
        self._looks.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lease_s / RENEWALS_PER_LEASE):
                await self._looks.wait()

    @abc.abstractmethod
    async def _complete(self) -> None:
        """Does the work. Raises Left where it is no longer to be done."""

    @abc.abstractmethod
    async def _keep(self) -> None:
        """Renews the claim until it is cancelled, and calls `stop` where the work is another's."""

    @abc.abstractmethod
    async def _give_back(self) -> None:
        """Tells Redis that others may have the work. Raises StoreUnavailable."""

    @abc.abstractmethod
    async def _on_fault(self) -> None:
        """Takes note of a fault of this program in `_complete`. Raises StoreUnavailable."""


R = TypeVar("R", bound=ClaimedRun)


class ClaimedWork(abc.ABC, Generic[R]):
    """The work of one process: at most `max_runs` pieces, and `max_runs_of_tenant` of one tenant's. 0: none at all."""

    def __init__(self, *, kind: str, max_runs: int, max_runs_of_tenant: int) -> None:
        self.runs: dict[str, R] = {}
        """What is ours now, by name."""
        self.region = ""
        """Where this process is: work that is held to other regions is not claimed."""
        self.tenants_elsewhere: Callable[[], list[str]] = list
        """Gives the tenants whose work must not be here, as their rules are now."""
        self._kind = kind
        self._max_runs = max_runs
        self._max_runs_of_tenant = max_runs_of_tenant
        self._poll_s = POLL_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()

    def start(self) -> None:
        """Begins to look for work, on the running loop."""
        if self._max_runs:
            self._task = supervise(self._follow, name="claims", subject=self._kind)

    async def close(self, *, timeout_s: float = 0.0) -> None:
        """Begins nothing more, waits up to `timeout_s` for what runs, and gives everything back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if timeout_s:
            for run in self.runs.values():
                run.leave()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=timeout_s)
        for run in list(self.runs.values()):
            run.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def poke(self, name: str) -> None:
        """Looks at work that has changed: it is new, or its end was asked for."""
        self._has_news.set()
        if name in self.runs:
            self.runs[name].look()

    @abc.abstractmethod
    async def _claim(self, *, busy_tenants: list[str], full_tenants: list[str]) -> R | None:
        """Claims a piece that may be in `region`, of no full tenant and rather of one that is not busy.

        Raises StoreUnavailable.
        """

    async def _follow(self) -> None:
        while True:
            self._has_news.clear()
            try:
                while len(self.runs) < self._max_runs and await self._begin_one():
                    pass
            except StoreUnavailable:
                pass
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._has_news.wait()

    async def _begin_one(self) -> bool:
        tenants = Counter(run.tenant for run in self.runs.values())
        full = [tenant for tenant, num_runs in tenants.items() if num_runs >= self._max_runs_of_tenant]
        run = await self._claim(busy_tenants=list(tenants), full_tenants=[*full, *self.tenants_elsewhere()])
        if run is None:
            return False
        if run.name in self.runs:
            # Our claim ended before we could renew it, and now it is ours anew: the run of before is out of date.
            self.runs.pop(run.name).stop()
        self.runs[run.name] = run
        task = asyncio.create_task(run.run(), name=f"{self._kind} {run.name}")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._forget, run))
        return True

    def _forget(self, run: R, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self.runs.get(run.name) is run:
            del self.runs[run.name]
            self._has_news.set()
