"""The life of one NCCL communicator between two ranks: opened in time, watched, aborted from outside, never used again.

What NCCL does when something is wrong, and what is done about it here:

- A peer that dies is no error: its kernels' counterparts spin for ever, or an error comes late. So every operation has
  a deadline, which a watchdog keeps, and code that learns of the death otherwise calls `break_off`.
- Opening waits for the other rank without end. So it has a deadline, too, and can be broken off.
- Only an abort ends what spins. It is safe while no other thread is in a call on the communicator: all calls take one
  lock. It is done by the watchdog's own thread, as it may take long or for ever. A thread that is stuck in a call is
  given a moment to leave; then it is aborted all the same, as nothing else would free that thread.
- What a kernel may still touch must not be given to another use. Memory that was handed to `keep` is let go only when
  the abort has returned and the stream has ended; otherwise never, and that is logged.
- Calls on several communicators of a GPU must not be made at the same time: `LAUNCH_LOCK` is for the whole process.

Knows neither sockets nor slots. `Nccl` and `Stream` are narrow, so that tests drive all of this with a model of them.
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
    """The calls. A communicator is a number; results are NCCL's, 0 for success and 7 for what is still in progress."""

    def unique_id(self) -> bytes:
        """Return a new name of a communicator, for both ranks. Raises OSError."""
        ...

    def start(self, unique_id: bytes, rank: int) -> int:
        """Begin to open a communicator of two ranks, the sender 0 and the receiver 1. Raises OSError."""
        ...

    def state(self, comm: int) -> int:
        """Return 7 while the last call is in progress, else 0, or the error that came since."""
        ...

    def send(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        """Launch a send to rank 1."""
        ...

    def receive(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        """Launch a receive from rank 0."""
        ...

    def abort(self, comm: int) -> None:
        """End what runs, and the communicator. May block."""
        ...

    def explain(self, code: int) -> str:
        """Return an error's text."""
        ...


class Event(Protocol):
    """A moment of a stream."""

    def is_done(self) -> bool:
        """Whether the stream has come that far. Raises ChannelBroken where the device has failed."""
        ...


class Stream(Protocol):
    """Where a pair's kernels run, one after the other."""

    @property
    def handle(self) -> int:
        """As NCCL wants it."""
        ...

    def activate(self) -> None:
        """Make the stream's device that of the calling thread."""
        ...

    def record(self) -> Event:
        """Return the moment in which all that was launched has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds."""

    operation_s: float = 5.0
    """From the launch of a send or receive to its end."""
    leave_s: float = 1.0
    """For a thread to leave the call that it is in, before the communicator is aborted under it."""
    settle_s: float = 2.0
    """For kernels to end after the abort."""
    watch_s: float = 0.02
    """Between two looks of the watchdog."""
    poll_s: float = 0.0002
    """Between two looks of a thread that waits."""


class State(Enum):
    """Where a pair is in its life."""

    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Operation:
    """A send or receive that was launched."""

    event: Event
    deadline: float


class NcclPair:
    """One communicator. `open`, `send` and `receive` belong to one thread at a time, the rest may come from any."""

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
        """Where it is in its life."""
        return self._state

    def keep(self, *memory: torch.Tensor) -> None:
        """Hold memory that kernels of this pair touch until none can."""
        with self._changed:
            self._kept += memory

    def open(self, unique_id: bytes, rank: int, *, timeout_s: float) -> None:
        """Open it, both sides at about the same time. Raises ChannelBroken, and is broken then."""
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
        if is_late:  # the watchdog has given up on this thread, and found nothing to abort
            self._nccl.abort(comm)

    def check(self) -> None:
        """Raise what broke it, if anything did."""
        with self._changed:
            if self._error is not None:
                raise type(self._error)(self._error.message)

    def send(self, memory: torch.Tensor) -> Operation:
        """Launch a send of this memory, which must be kept. Raises ChannelBroken."""
        return self._launch(self._nccl.send, memory)

    def receive(self, memory: torch.Tensor) -> Operation:
        """Launch a receive into this memory, which must be kept. Raises ChannelBroken."""
        return self._launch(self._nccl.receive, memory)

    def wait(self, operation: Operation) -> None:
        """Wait until an operation has ended. Raises ChannelBroken; the watchdog keeps the time."""
        while not operation.event.is_done():
            self.check()
            time.sleep(self._limits.poll_s)  # a GPU's event wakes nobody
        self.check()

    def break_off(self, error: ChannelBroken) -> None:
        """Give it up; it is aborted in the background. Idempotent, does not block."""
        with self._changed:
            if self._state in (State.OPENING, State.OPEN):
                self._state = State.BROKEN
                self._error = type(error)(error.message)  # one that is raised holds on to what its frames hold
            if self._watchdog is None:
                self._state = State.GONE
                self._kept.clear()
            self._changed.notify_all()

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until nothing of it is left on the device; return whether that is so."""
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
            # Nothing else may be called before it is settled, and the event must come behind the kernel.
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
        """Wait until the last call is no more in progress. Raises ChannelBroken."""
        while True:
            self.check()
            with self._in_call(countdown):
                code = self._nccl.state(self._own_comm())
            if code != IN_PROGRESS:
                self._raise_for(code)
                return
            time.sleep(min(self._limits.poll_s, countdown.remaining_s()))  # NCCL tells its state only when asked

    def _own_comm(self) -> int:
        """The communicator. To be asked for in a call, as it may be aborted while its locks are waited for."""
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
            # A thread in a call finds its errors itself.
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
                # The stream too: its next user would wait behind them.
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
    """Locks that are taken in order, each within what is left of a time."""

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
