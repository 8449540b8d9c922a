"""Manages one NCCL communicator between two ranks: opens it in time, watches it, aborts it, and never uses it again.

NCCL's failure behavior, and how this module handles it:

- The death of a peer is not an error in NCCL: the kernels of the surviving side spin forever, or an error arrives late.
  So every operation has a deadline, which a watchdog enforces. Code that detects the death in another way calls
  `break_off`.
- Opening waits for the other rank without a limit. So opening has a deadline, too, and can be broken off.
- Only an abort ends a spinning kernel. It is safe while no other thread is in a call on the communicator, so all calls
  take one lock. The watchdog's own thread aborts, because an abort may take long or never return. A thread that is
  stuck in a call gets a short time to return. After that, the abort proceeds anyway, because nothing else would free
  that thread.
- Memory that a kernel may still touch must not be reused. Memory passed to `keep` is released only when the abort has
  returned and the stream has finished. Otherwise it is never released, and that is logged.
- Calls on several communicators of a GPU must not run concurrently: `LAUNCH_LOCK` covers the whole process.

Does not depend on sockets or slots. `Nccl` and `Stream` are narrow, so that tests can run all of this with a model of
NCCL.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from kv_transfer.transports.base import ChannelBroken, ChannelTimeout, Countdown

SUCCESS, IN_PROGRESS = 0, 7
LAUNCH_LOCK = threading.Lock()
logger = logging.getLogger(__name__)
_left_behind: list[object] = []


class Nccl(Protocol):
    """The NCCL calls. A communicator is a number.

    Results are NCCL's codes: 0 for success and 7 for an operation in progress.
    """

    def unique_id(self) -> bytes:
        """Returns a new unique ID of a communicator, for both ranks. Raises OSError."""
        ...

    def start(self, unique_id: bytes, rank: int) -> int:
        """Starts opening a communicator of two ranks, the sender 0 and the receiver 1. Raises OSError."""
        ...

    def state(self, comm: int) -> int:
        """Returns 7 while the last call is in progress. Afterwards, returns 0 or an error that has occurred since."""
        ...

    def send(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        """Launches a send to rank 1."""
        ...

    def receive(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        """Launches a receive from rank 0."""
        ...

    def abort(self, comm: int) -> None:
        """Ends all running operations and the communicator. May block."""
        ...

    def explain(self, code: int) -> str:
        """Returns the message of an error code."""
        ...


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Returns whether the stream has reached this point. Raises ChannelBroken if the device has failed."""
        ...


class Stream(Protocol):
    """The stream in which a pair's kernels run, one after another."""

    @property
    def handle(self) -> int:
        """The stream's handle for NCCL."""
        ...

    def activate(self) -> None:
        """Makes the stream's device the current device of the calling thread."""
        ...

    def record(self) -> Event:
        """Returns an event behind all work launched so far."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits, in seconds."""

    operation_s: float = 5.0
    """Time from the launch of a send or a receive to its end."""
    leave_s: float = 1.0
    """Time for a thread to return from its current call before the communicator is aborted anyway."""
    settle_s: float = 2.0
    """Time for kernels to end after the abort."""
    watch_s: float = 0.02
    """Interval between the watchdog's checks."""
    poll_s: float = 0.0002
    """Interval between the checks of a waiting thread."""


class State(Enum):
    """State of a pair."""

    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Operation:
    """A launched send or receive."""

    event: Event
    deadline: float


class NcclPair:
    """One communicator. `open`, `send`, and `receive` belong to one thread at a time.

    Any thread may call the other methods.
    """

    def __init__(self, nccl: Nccl, stream: Stream, limits: Limits | None = None) -> None:
        self._nccl = nccl
        self._stream = stream
        self._limits = limits or Limits()
        self._changed = threading.Condition()
        # Held by the thread that is in a call on this communicator.
        self._calling = threading.Lock()
        self._comm: int | None = None
        self._state = State.OPENING
        self._error: ChannelBroken | None = None
        self._is_ending = False
        self._operations: deque[Operation] = deque()
        self._kept: list[object] = []
        self._watchdog: threading.Thread | None = None

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    def keep(self, *memory: torch.Tensor) -> None:
        """Retains memory that kernels of this pair touch, until no kernel can touch it."""
        with self._changed:
            self._kept += memory

    def open(self, unique_id: bytes, rank: int, *, timeout_s: float) -> None:
        """Opens the communicator; both sides must call it at about the same time.

        If it raises ChannelBroken, the pair is broken.
        """
        countdown = Countdown(timeout_s)
        self._watchdog = threading.Thread(target=self._watch, name="tandem-nccl", daemon=True)
        self._watchdog.start()
        try:
            self._stream.activate()
            with self._in_call(countdown):
                self._adopt(self._nccl.start(unique_id, rank))
            self._await_settled(countdown)
        except OSError as error:
            self.break_off(ChannelBroken(f"NCCL did not begin: {error}"))
        except ChannelBroken as error:
            self.break_off(error)
        with self._changed:
            if self._state is State.OPENING:
                self._state = State.OPEN
        self.check()

    def _adopt(self, comm: int) -> None:
        with self._changed:
            is_late = self._is_ending
            if not is_late:
                self._comm = comm
        if is_late:  # the watchdog gave up on this thread before there was anything to abort
            self._nccl.abort(comm)

    def check(self) -> None:
        """Raises the error that broke the pair, if it is broken."""
        with self._changed:
            if self._error is not None:
                raise type(self._error)(self._error.message)

    def send(self, memory: torch.Tensor) -> Operation:
        """Launches a send of this memory, which must be retained with `keep`. Raises ChannelBroken."""
        return self._launch(self._nccl.send, memory)

    def receive(self, memory: torch.Tensor) -> Operation:
        """Launches a receive into this memory, which must be retained with `keep`. Raises ChannelBroken."""
        return self._launch(self._nccl.receive, memory)

    def wait(self, operation: Operation) -> None:
        """Waits until an operation has ended. Raises ChannelBroken. The watchdog enforces the timeout."""
        while not operation.event.is_done():
            self.check()
            time.sleep(self._limits.poll_s)  # a GPU event cannot wake a thread
        self.check()

    def break_off(self, error: ChannelBroken) -> None:
        """Breaks the pair off, and aborts it in the background. Idempotent, does not block."""
        with self._changed:
            if self._state in (State.OPENING, State.OPEN):
                self._state = State.BROKEN
                self._error = type(error)(error.message)  # a copy: a raised error keeps its frames' objects alive
            if self._watchdog is None:
                self._state = State.GONE
                self._kept.clear()
            self._changed.notify_all()

    def wait_gone(self, timeout_s: float) -> bool:
        """Waits until nothing of the pair is left on the device. Returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state is State.GONE, timeout_s)

    def _launch(self, call: Callable[[int, int, int, int], int], memory: torch.Tensor) -> Operation:
        self.check()
        countdown = Countdown(self._limits.operation_s)
        if self._state is not State.OPEN:
            raise ChannelBroken("the communicator is not open")
        self._stream.activate()
        try:
            with self._in_call(countdown):
                code = call(self._own_comm(), memory.data_ptr(), memory.numel(), self._stream.handle)
                self._raise_for(code)
            # No other call is allowed before this call settles, and the event must be recorded after the kernel.
            self._await_settled(countdown)
            operation = Operation(self._stream.record(), time.monotonic() + self._limits.operation_s)
        except ChannelBroken as error:
            self.break_off(error)
            raise
        with self._changed:
            self._operations.append(operation)
            self._changed.notify_all()
        return operation

    def _await_settled(self, countdown: Countdown) -> None:
        """Waits until the last call is no longer in progress. Raises ChannelBroken."""
        while True:
            self.check()
            with self._in_call(countdown):
                code = self._nccl.state(self._own_comm())
            if code != IN_PROGRESS:
                self._raise_for(code)
                return
            time.sleep(min(self._limits.poll_s, countdown.remaining_s()))  # NCCL reports its state only to polls

    def _own_comm(self) -> int:
        """Returns the communicator.

        Call it while holding the locks, because an abort may happen while the caller waits for them.
        """
        comm = self._comm
        if comm is None:
            raise ChannelBroken("the communicator is not open")
        return comm

    def _raise_for(self, code: int) -> None:
        if code not in (SUCCESS, IN_PROGRESS):
            raise ChannelBroken(f"NCCL: {self._nccl.explain(code)} ({code})")

    def _in_call(self, countdown: Countdown) -> _Locks:
        return _Locks((self._calling, LAUNCH_LOCK), countdown)

    # --- the watchdog's thread ---

    def _watch(self) -> None:
        while not self._is_broken_after(self._limits.watch_s):
            self._look()
        self._end()

    def _is_broken_after(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._state is State.BROKEN, timeout_s)

    def _look(self) -> None:
        try:
            self._drop_ended()
            with self._changed:
                is_late = bool(self._operations) and time.monotonic() > self._operations[0].deadline
            if is_late:
                raise ChannelTimeout("the peer did not take part in a transfer in time")
            # A thread that is in a call detects errors itself.
            comm = self._comm
            if self._state is State.OPEN and comm is not None and self._calling.acquire(blocking=False):
                try:
                    code = self._nccl.state(comm)
                finally:
                    self._calling.release()
                self._raise_for(code)
        except ChannelBroken as error:
            self.break_off(error)

    def _drop_ended(self) -> None:
        with self._changed:
            waiting = list(self._operations)
        num_ended = 0
        for operation in waiting:
            if not operation.event.is_done():
                break
            num_ended += 1
        with self._changed:
            for _ in range(num_ended):
                self._operations.popleft()

    def _end(self) -> None:
        has_left = self._calling.acquire(timeout=self._limits.leave_s)
        try:
            if not has_left:
                logger.error("a thread is stuck in NCCL: the communicator is aborted under it")
            self._stream.activate()
            with self._changed:
                self._is_ending = True
                comm, self._comm = self._comm, None
            if comm is not None:
                self._nccl.abort(comm)
        finally:
            if has_left:
                self._calling.release()
        is_settled = self._settles()
        with self._changed:
            if not is_settled:
                logger.error("kernels of an aborted communicator still run: their memory is left to them for good")
                # Retain the stream too: work of its next user would wait behind these kernels.
                _left_behind.extend((*self._kept, self._stream))
            self._kept.clear()
            self._operations.clear()
            self._state = State.GONE
            self._changed.notify_all()

    def _settles(self) -> bool:
        countdown = Countdown(self._limits.settle_s)
        try:
            event = self._stream.record()
            while not event.is_done():
                time.sleep(min(self._limits.watch_s, countdown.remaining_s()))
        except ChannelBroken:
            return False
        return True


class _Locks:
    """Acquires locks in order, each within the remaining time."""

    def __init__(self, locks: tuple[threading.Lock, ...], countdown: Countdown) -> None:
        self._locks = locks
        self._countdown = countdown
        self._taken: list[threading.Lock] = []

    def __enter__(self) -> None:
        for lock in self._locks:
            try:
                is_taken = lock.acquire(timeout=self._countdown.remaining_s())
            except ChannelTimeout:
                is_taken = False
            if not is_taken:
                self.__exit__()
                raise ChannelTimeout("another thread does not come back from NCCL")
            self._taken.append(lock)

    def __exit__(self, *error: object) -> None:
        for lock in reversed(self._taken):
            lock.release()
        self._taken.clear()
