"""Long work beside the event loop, in short steps on a few threads of its own: tenants take turns. Knows no request.

asyncio's own threads are for the rest of the process, which waits for a file or an address there: what one tenant's
texts keep busy must not hold that up.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

NUM_THREADS = 2
"""While one of them is in a step that cannot be divided, the other one serves the short ones."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields wherever others may have their turn, and returns its result."""


class Turns:
    """A few threads. To be used on one event loop."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self.num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="turns")
        self._num_running = 0
        self._waiting: dict[str, deque[_Job]] = {}
        """By tenant, the one whose turn is next first."""

    @property
    def num_waiting(self) -> int:
        """Pieces of work that are not on a thread now."""
        return sum(map(len, self._waiting.values()))

    async def run(self, steps: Steps[T], *, tenant: str = "") -> T:
        """What `steps` returns or raises. Where the caller is cancelled, its next step is not begun."""
        job = _Job(steps, tenant, asyncio.get_running_loop().create_future())
        self._queue(job)
        self._start_next()
        result: T = await job.future
        return result

    async def call(self, work: Callable[[], T], *, tenant: str = "") -> T:
        """The same for work that is one step."""
        return await self.run(_one_step(work), tenant=tenant)

    def _queue(self, job: "_Job") -> None:
        self._waiting.setdefault(job.tenant, deque()).append(job)

    def _start_next(self) -> None:
        while self._waiting and self._num_running < self.num_threads:
            tenant = next(iter(self._waiting))
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind all others
            if job.future.done():
                continue
            self._num_running += 1
            step = asyncio.get_running_loop().run_in_executor(self._threads, job.step)
            step.add_done_callback(lambda done, job=job: self._end_step(job, done))  # type: ignore[misc]

    def _end_step(self, job: "_Job", step: "asyncio.Future[bool]") -> None:
        self._num_running -= 1
        if not job.future.done():
            error = step.exception()
            if error is not None:
                job.future.set_exception(error)
            elif step.result():
                job.future.set_result(job.result)
            else:
                self._queue(job)
        self._start_next()


class _Job:
    __slots__ = ("future", "result", "steps", "tenant")

    def __init__(self, steps: Steps[Any], tenant: str, future: "asyncio.Future[Any]") -> None:
        self.steps = steps
        self.tenant = tenant
        self.future = future
        self.result: Any = None

    def step(self) -> bool:
        """Whether it was the last one."""
        try:
            next(self.steps)
        except StopIteration as end:
            self.result = end.value
            return True
        return False


def _one_step(work: Callable[[], T]) -> Steps[T]:
    yield from ()
    return work()
