"""One thread that owns the engine's mutable state: it runs commands between steps and steps while there is work.

Knows nothing of models, pages or requests. Others change what it owns only by `submit`, and never wait on a lock of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from services.runtime.errors import DeadlineExceeded, InvariantViolated, WorkerUnavailable

Result = TypeVar("Result")

IDLE_S = 0.25
# Every submit wakes the thread; this only bounds the harm of a lost wake-up.
_LONGEST_SLEEP_S = 1.0


class EngineThread:
    """Runs `step` in its own thread as long as it returns true (there is more work), and again after each command.

    A command that raises gives its error to its future and harms nothing else, unless that is InvariantViolated. Any
    error of `step` and `on_idle`, and InvariantViolated of a command, is fatal: the thread ends, all futures fail with
    WorkerUnavailable, and `on_fatal(error)` is called, once, on the engine thread.

    `on_idle` is called, once, when there has been nothing to do for IDLE_S: what comes then waits for it.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        *,
        on_fatal: Callable[[BaseException], None],
        on_idle: Callable[[], None] = lambda: None,
        name: str = "engine",
    ) -> None:
        self._step = step
        self._on_fatal = on_fatal
        self._on_idle = on_idle
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._is_woken = False
        self._is_stopping = False
        self._is_abandoned = False
        self._run_number = 0
        self._is_running = False
        self._refusal: WorkerUnavailable | None = None
        # A daemon, so that a step that never returns cannot keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to run. Commands submitted before wait until here."""
        self._thread.start()

    def submit(self, command: Callable[[], Result]) -> Future[Result]:
        """Runs `command` on the engine thread before its next step, in order of submission, from any thread.

        The future fails with WorkerUnavailable when the thread has ended or ends first. It can be cancelled until the
        command begins. Waiting for it on the engine thread itself would never end.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._refusal is None:
                self._commands.append(_Command(command, future))
                self._changed.notify()
                return future
            refusal = self._refusal
        future.set_exception(refusal)
        return future

    def wake(self) -> None:
        """Makes an idle thread call `step` once more: something outside has changed."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def settle(self, *, timeout_s: float) -> None:
        """Waits until all that was submitted so far has run or was refused, at most `timeout_s`; not on the thread."""
        with contextlib.suppress(WorkerUnavailable, TimeoutError):
            self.submit(lambda: None).result(timeout_s)

    def stop(self, *, timeout_s: float) -> None:
        """Lets the current command or step finish, then ends; what is still queued fails with WorkerUnavailable.

        May be called again. On the engine thread itself (from `on_fatal`, say), and after `abandon`, it does not wait.

        Raises:
            DeadlineExceeded: the thread still runs after `timeout_s`.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is None:
            self._refuse_all("the engine was stopped before it began")
            return
        if self.is_current or self._is_abandoned:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine thread did not end within {timeout_s} s")

    def abandon(self, reason: str) -> None:
        """Gives up a thread whose step does not return: what is queued, and what comes, fails with WorkerUnavailable.

        Should the step return after all, the thread ends. What the thread owns must not be used from then on.
        """
        with self._changed:
            self._is_stopping = self._is_abandoned = True
            self._changed.notify()
        self._refuse_all(reason)

    @property
    def current_run(self) -> int | None:
        """Number of the round of commands and a step that runs now; None while the thread is idle."""
        return self._run_number if self._is_running else None

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the engine thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001  root of the thread: whatever it is, nobody may wait for ever
            reason = f"the engine failed: {type(error).__name__}"
            self._refuse_all(reason)
            self._on_fatal(error)
        finally:
            self._is_running = False
            self._refuse_all(reason)

    def _loop(self) -> None:
        has_work = False
        while self._wait(is_idle=not has_work):
            self._begin_run()
            self._run_commands()
            if self._is_stopping:
                return
            has_work = self._step()
            self._is_running = False

    def _begin_run(self) -> None:
        self._run_number += 1
        self._is_running = True

    def _wait(self, *, is_idle: bool) -> bool:
        """Sleep, if idle, until there is something to do; return false at the end."""
        if is_idle and not self._has_come(IDLE_S):
            self._begin_run()
            self._on_idle()
            self._is_running = False
            while not self._has_come(_LONGEST_SLEEP_S):
                pass
        with self._changed:
            self._is_woken = False
            return not self._is_stopping

    def _has_come(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._commands) or self._is_woken or self._is_stopping, timeout_s
            )

    def _run_commands(self) -> None:
        # Only those that have come by now: commands that submit commands must not keep the next step from coming.
        for _ in range(len(self._commands)):
            with self._changed:
                if self._is_stopping:
                    return
                command = self._commands.popleft()
            command.run()

    def _refuse_all(self, reason: str) -> None:
        with self._changed:
            if self._refusal is None:
                self._refusal = WorkerUnavailable(reason)
            refusal = self._refusal
            commands, self._commands = self._commands, deque()
        for command in commands:
            command.refuse(refusal)


class StepWatch:
    """Notices a step that does not end. Has no clock: each look says how much time has passed since the last.

    So the time in which the whole process was stopped does not count against the step.
    """

    def __init__(self, engine: EngineThread, *, timeout_s: float) -> None:
        """`timeout_s` of 0 never finds anything."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._run: int | None = None
        self._age_s = 0.0

    def is_stuck(self, elapsed_s: float) -> bool:
        """Look: whether the same step has been seen running for longer than the limit."""
        run = self._engine.current_run
        self._age_s = self._age_s + elapsed_s if run is not None and run == self._run else 0.0
        self._run = run
        return 0 < self._timeout_s < self._age_s


@dataclass(frozen=True, slots=True)
class _Command:
    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:  # the error belongs to the code that waits for the future
            self.future.set_exception(error)
            if isinstance(error, InvariantViolated) or not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(result)

    def refuse(self, refusal: WorkerUnavailable) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(refusal)
