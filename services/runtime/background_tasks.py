"""Background tasks: endless loops of a process under one root that logs a failure, waits, and restarts the loop.

`supervise` starts every such loop. A task created in any other way ends silently with its first unexpected error
(`tests/test_background_loops.py` finds such tasks). Does not know what the loops do.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import InvariantViolated
from services.runtime.last_words import words_for

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""Pause before the first restart. Each further failure in a row doubles it, up to the maximum."""
RECOVERED_S = 10.0
"""A loop that runs for this long, and for twice as long as before its last failure, has recovered."""
FAILING_AFTER = 3
"""Number of failures in a row after which a loop keeps failing."""
LOG_EVERY_S = 60.0
"""Minimum time between two log lines about failures of the same class in loops of the same name."""

logger = logging.getLogger(__name__)

Loop = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class FailingTask:
    """A background task that keeps failing.

    `subject` is the part of the cluster that it works for, such as a worker ID. It is empty if there is only one task
    of that name. `failures` is the number of failures in a row. `error` contains nothing from a request.
    """

    name: str
    subject: str
    failures: int
    error: str
    since_unix_s: float


@dataclass(slots=True)
class _State:
    """Failures of one loop. The times are those of the monotonic clock."""

    name: str
    subject: str
    is_vital: bool
    started_at_s: float = 0.0
    is_waiting: bool = False
    last_run_s: float = 0.0
    num_in_a_row: int = 0
    error: str = ""
    since_unix_s: float = 0.0

    def has_recovered(self, now_s: float) -> bool:
        """Returns whether the loop has run for long enough since its last failure."""
        return not self.is_waiting and now_s - self.started_at_s >= max(RECOVERED_S, 2 * self.last_run_s)

    def is_failing(self, now_s: float) -> bool:
        """Returns whether the loop keeps failing."""
        return self.num_in_a_row >= FAILING_AFTER and not self.has_recovered(now_s)


class BackgroundTasks:
    """The supervised loops of one process. Use it on one event loop at a time."""

    def __init__(
        self, *, clock: Clock = SYSTEM_CLOCK, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._states: dict[asyncio.Task[None], _State] = {}
        self._num_failures: Counter[str] = Counter()
        self._logged_at_s: dict[tuple[str, type[BaseException]], float] = {}
        self._end_process: Callable[[InvariantViolated], object] | None = None

    @property
    def num_failures(self) -> Mapping[str, int]:
        """Number of failures since the start of the process, by name of the loop."""
        return self._num_failures

    def failing(self) -> list[FailingTask]:
        """Returns the loops that keep failing, sorted by name and subject."""
        now_s = self._clock.monotonic()
        found = [
            FailingTask(state.name, state.subject, state.num_in_a_row, state.error, state.since_unix_s)
            for state in self._states.values()
            if state.is_failing(now_s)
        ]
        return sorted(found, key=lambda task: (task.name, task.subject))

    def is_vital_failing(self) -> bool:
        """Returns whether a loop without which nothing can be served keeps failing."""
        now_s = self._clock.monotonic()
        return any(state.is_vital and state.is_failing(now_s) for state in self._states.values())

    def on_invariant_violated(self, end_process: Callable[[InvariantViolated], object]) -> None:
        """Calls `end_process` if a loop raises InvariantViolated, after which the process cannot be trusted."""
        self._end_process = end_process

    def start(self, run: Loop, *, name: str, subject: str = "", is_vital: bool = False) -> "asyncio.Task[None]":
        """Runs a loop as a task, and restarts it after each unexpected error.

        The task ends if it is canceled, if `run` returns, or with InvariantViolated. Each restart calls `run` again, so
        `run` must begin from the state that a half-done iteration may leave. Set `is_vital` if the process can serve
        nothing without the loop.
        """
        state = _State(name, subject, is_vital)
        task = asyncio.create_task(self._keep_running(run, state), name=f"{name}-{subject}" if subject else name)
        self._states[task] = state
        task.add_done_callback(self._forget)
        return task

    async def _keep_running(self, run: Loop, state: _State) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            state.started_at_s, state.is_waiting = self._clock.monotonic(), False
            try:
                await run()
                return
            except InvariantViolated as error:
                if self._end_process is not None:
                    self._end_process(error)
                raise
            except (Exception, asyncio.CancelledError) as error:
                # A call that the loop awaits may be canceled too. Only a request to cancel this task ends it.
                if task.cancelling():
                    raise
                backoff_s = self._note_failure(state, error)
            await self._sleep(backoff_s)

    def _note_failure(self, state: _State, error: BaseException) -> float:
        """Records and logs a failure. Returns the time until the restart, in seconds."""
        now_s = self._clock.monotonic()
        if state.has_recovered(now_s) or not state.num_in_a_row:
            state.num_in_a_row, state.since_unix_s = 0, self._clock.unix_ns() / 1e9
        state.last_run_s, state.is_waiting = now_s - state.started_at_s, True
        state.num_in_a_row += 1
        state.error = words_for(error)
        self._num_failures[state.name] += 1
        backoff_s = min(MAX_BACKOFF_S, math.ldexp(FIRST_BACKOFF_S, min(state.num_in_a_row - 1, 16)))
        kind = state.name, type(error)
        if now_s - self._logged_at_s.get(kind, -math.inf) >= LOG_EVERY_S:
            self._logged_at_s[kind] = now_s
            facts = {"task": state.name, "subject": state.subject, "failures": state.num_in_a_row}
            logger.error("background task failed", exc_info=error, extra={**facts, "restart_in_s": backoff_s})
        return backoff_s

    def _forget(self, task: "asyncio.Task[None]") -> None:
        state = self._states.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            facts = {"task": state.name, "subject": state.subject}
            logger.critical("background task ended with an error", exc_info=error, extra=facts)


PROCESS_TASKS = BackgroundTasks()
"""The background tasks of this process."""


def supervise(run: Loop, *, name: str, subject: str = "", is_vital: bool = False) -> "asyncio.Task[None]":
    """Runs an endless loop as a supervised task of this process; see `BackgroundTasks.start`."""
    return PROCESS_TASKS.start(run, name=name, subject=subject, is_vital=is_vital)
