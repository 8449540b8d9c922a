"""Long work beside the event loop, in short steps on a few threads of its own: tenants take turns.

asyncio's own threads are for the rest of the process, which waits for a file or an address there: what one tenant's
texts keep busy must not hold that up.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

NUM_THREADS = 2
"""The number of threads: while one is in a step that cannot be divided, the other one serves short work."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields wherever others may have their turn, and returns its result."""


class Turns:
    """A few threads for one event loop.

    Work that was not over after its first step is long: it never has all of them, so that short work finds one and the
    rest of the machine keeps a core.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self.num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="turns")
        self._num_running = 0
        self._num_long_running = 0
        self._waiting: dict[str, _Waiting] = {}
        """Work by tenant, the tenant whose turn is next first."""

    @property
    def num_waiting(self) -> int:
        """Pieces of work that are not on a thread now."""
        return sum(map(len, self._waiting.values()))

    async def run(self, steps: Steps[T], *, tenant: str = "") -> T:
        """Returns or raises what `steps` does. Where the caller is cancelled, its next step is not begun."""
        job = _Job(steps, tenant, asyncio.get_running_loop().create_future())
        self._queue(job)
        self._start_next()
        result: T = await job.future
        return result

    async def call(self, work: Callable[[], T], *, tenant: str = "") -> T:
        """Returns or raises what `work` does, as one step."""
        return await self.run(_one_step(work), tenant=tenant)

    def _start_next(self) -> None:
        while self._num_running < self.num_threads and (job := self._take()):
            self._num_running += 1
            self._num_long_running += job.is_long
            step = asyncio.get_running_loop().run_in_executor(self._threads, job.step)
            step.add_done_callback(lambda done, job=job: self._end_step(job, done))  # type: ignore[misc]

    def _queue(self, job: "_Job") -> None:
        self._waiting.setdefault(job.tenant, _Waiting()).add(job)

    def _take(self) -> "_Job | None":
        may_be_long = self._num_long_running < max(1, self.num_threads - 1)
        for tenant, waiting in list(self._waiting.items()):
            job = waiting.take(may_be_long=may_be_long)
            if job is not None or not len(waiting):
                del self._waiting[tenant]
                if len(waiting):
                    self._waiting[tenant] = waiting  # behind all others
            if job is not None:
                return job
        return None

    def _end_step(self, job: "_Job", step: "asyncio.Future[bool]") -> None:
        self._num_running -= 1
        self._num_long_running -= job.is_long
        if not job.future.done():
            error = step.exception()
            if error is not None:
                job.future.set_exception(error)
            elif step.result():
                job.future.set_result(job.result)
            else:
                job.is_long = True
                self._queue(job)
        self._start_next()


class _Waiting:
    """One tenant's work that is not on a thread; its new work and its long work take turns."""

    def __init__(self) -> None:
        self._next: deque[_Job] = deque()
        """Work of the kind whose turn it is."""
        self._other: deque[_Job] = deque()
        self._is_long = False
        """Whether that kind is long work."""

    def __len__(self) -> int:
        return len(self._next) + len(self._other)

    def add(self, job: "_Job") -> None:
        """Puts it behind the others of its kind."""
        (self._next if job.is_long is self._is_long else self._other).append(job)

    def take(self, *, may_be_long: bool) -> "_Job | None":
        """Returns the next one whose caller still waits."""
        for _ in range(2):
            while self._next and (may_be_long or not self._is_long):
                job = self._next.popleft()
                if not job.future.done():
                    self._turn()
                    return job
            self._turn()
        return None

    def _turn(self) -> None:
        self._next, self._other, self._is_long = self._other, self._next, not self._is_long


class _Job:
    __slots__ = ("future", "is_long", "result", "steps", "tenant")

    def __init__(self, steps: Steps[Any], tenant: str, future: "asyncio.Future[Any]") -> None:
        self.steps = steps
        self.tenant = tenant
        self.future = future
        self.is_long = False
        self.result: Any = None

    def step(self) -> bool:
        """Returns whether it was the last one."""
        try:
            next(self.steps)
        except StopIteration as end:
            self.result = end.value
            return True
        return False


def at_once(steps: Steps[T]) -> T:
    """Returns or raises what `steps` does, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _one_step(work: Callable[[], T]) -> Steps[T]:
    yield from ()
    return work()
