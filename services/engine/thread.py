"""A thread that owns the engine's mutable state. It runs commands between steps, and steps while there is work.

Does not depend on models, pages, or requests. Other threads change the owned state only through `submit`, and never
wait for a lock of this thread.
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
# Every submit wakes the thread. This limit only bounds the delay of a lost wake-up.
_LONGEST_SLEEP_S = 1.0


class EngineThread:
    """Runs `step` in its own thread as long as it returns true (more work remains), and again after each command.

    If a command raises, its future receives the error and nothing else is affected, unless the error is
    InvariantViolated. InvariantViolated from a command, and any error from `step` or `on_idle`, is fatal: the thread
    ends, all futures fail with WorkerUnavailable, and the engine thread calls `on_fatal(error)` once.

    `on_idle` is called once after IDLE_S seconds without work. New work waits until it returns.
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
        # A daemon thread, so that a step that never returns cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread, which first runs the commands submitted so far."""
        self._thread.start()

    def submit(self, command: Callable[[], Result]) -> Future[Result]:
        """Runs `command` on the engine thread before its next step, in order of submission. Callable from any thread.

        The future fails with WorkerUnavailable if the thread ends before it runs the command. The future can be
        cancelled until the command starts. The engine thread must not wait for the future, because it would deadlock.
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
        """Makes an idle thread call `step` again, after a change outside the thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def settle(self, *, timeout_s: float) -> None:
        """Waits up to `timeout_s` until all earlier commands have run or failed. Not callable on the engine thread."""
        with contextlib.suppress(WorkerUnavailable, TimeoutError):
            self.submit(lambda: None).result(timeout_s)

    def stop(self, *, timeout_s: float) -> None:
        """Ends the thread after its current command or step. Queued commands fail with WorkerUnavailable.

        Idempotent. Does not wait if called on the engine thread itself (for example from `on_fatal`) or after
        `abandon`.

        Raises:
            DeadlineExceeded: The thread still runs after `timeout_s`.
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
        """Gives up a thread whose step does not return. Queued and future commands fail with WorkerUnavailable.

        If the step returns later, the thread ends. The caller must no longer use the state that the thread owns.
        """
        with self._changed:
            self._is_stopping = self._is_abandoned = True
            self._changed.notify()
        self._refuse_all(reason)

    @property
    def current_run(self) -> int | None:
        """Number of the current iteration (commands and one step). None while the thread is idle."""
        return self._run_number if self._is_running else None

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the engine thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001  root of the thread: any error must fail the futures
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
        """Sleeps, if idle, until there is work. Returns false if the thread must end."""
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
        # Run only the commands that are queued now. Commands that submit commands must not delay the next step.
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
    """Detects a step that does not end. Has no clock: each check receives the time elapsed since the previous check.

    As a result, the time in which the whole process was suspended does not count against the step.
    """

    def __init__(self, engine: EngineThread, *, timeout_s: float) -> None:
        """Disables the check if `timeout_s` is 0."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._run: int | None = None
        self._age_s = 0.0

    def is_stuck(self, elapsed_s: float) -> bool:
        """Returns whether the checks have seen the same step running for longer than the timeout."""
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
        except BaseException as error:  # the code that waits for the future handles the error
            self.future.set_exception(error)
            if isinstance(error, InvariantViolated) or not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(result)

    def refuse(self, refusal: WorkerUnavailable) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(refusal)
