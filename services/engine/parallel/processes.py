"""Starts, watches, and stops the processes of a worker's other ranks. Does not depend on their computation.

Two socket pairs lead to each rank. One carries commands. On the other, the rank sends several heartbeats a second and,
at the end, the reason for its exit. If a rank ends or is silent for too long, all ranks are stopped, because the worker
cannot continue without it. A rank also ends whenever rank 0 ends, for any reason: it detects the closed sockets. In
addition, where the system supports it, the kernel kills the rank, even if it is suspended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.errors import ConfigError, ModelError, TandemError, WorkerLost

BEAT_S = 0.25
SILENCE_S = 3.0
"""Maximum silence of a rank while rank 0 is listening, in seconds. After it, the rank counts as dead."""
START_SILENCE_S = 60.0
"""Maximum silence while a rank loads libraries and a model, which can block on the disk for long."""
EXIT_TIMEOUT_S = 2.0
MAX_LAST_WORDS_BYTES = 1 << 16

_SOURCE_ROOT = Path(__file__).resolve().parents[3]
_ERRORS: dict[str, type[TandemError]] = {"ModelError": ModelError, "ConfigError": ConfigError}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    commands: socket.socket
    life: socket.socket
    silent_s: float = 0.0
    heard: bytearray = field(default_factory=bytearray)


class RankProcesses:
    """Starts `num_ranks` - 1 processes, and watches them in a dedicated thread until `close`.

    `program` is the module that each process runs. It must call `services.engine.parallel.rank.run_rank`.
    """

    def __init__(self, num_ranks: int, *, program: str = "services.engine.parallel.rank") -> None:
        self._num_ranks = num_ranks
        self._program = program
        self._ranks: list[_RankProcess] = []
        self._has_started = threading.Event()
        self._start_error: OSError | None = None
        self._is_serving = False
        self._is_closing = False
        self._has_ended = threading.Event()
        self._loss: TandemError | None = None
        self._wakened, self._waker = socket.socketpair()
        # The kernel kills children when the thread that started them ends. This thread outlives them.
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """Returns once the processes exist. Raises WorkerLost if they cannot be started."""
        self._thread.start()
        self._has_started.wait()
        if self._start_error is not None:
            raise WorkerLost(f"the worker's ranks cannot be started: {self._start_error}") from self._start_error

    @property
    def commands(self) -> Sequence[socket.socket]:
        """Command sockets of the ranks, from rank 1."""
        return [rank.commands for rank in self._ranks]

    @property
    def pids(self) -> list[int]:
        """Process IDs of the ranks, from rank 1."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def loss(self) -> TandemError | None:
        """Reason why the ranks ended. None while they run."""
        return self._loss

    def begin_serving(self) -> None:
        """Marks loading as complete. From now on, the shorter silence limit applies."""
        self._is_serving = True

    def explain(self, error: BaseException, *, timeout_s: float = 2.0) -> TandemError:
        """Returns the cause of a communication error.

        Waits briefly, because detecting the ended rank takes a moment.
        """
        self._has_ended.wait(timeout_s)
        return self._loss or WorkerLost(f"the ranks of the worker lost each other: {error}")

    def close(self) -> None:
        """Stops all ranks. Call it once no thread uses their sockets. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join()
        for end in (self._waker, self._wakened, *self.commands):
            end.close()

    def _run(self) -> None:
        try:
            self._start_all()
        except OSError as error:
            self._start_error = error
        self._has_started.set()
        try:
            if self._start_error is None:
                self._watch()
        finally:
            self._end_all()
            self._has_ended.set()

    def _start_all(self) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_SOURCE_ROOT), environment.get("PYTHONPATH", "")])
        )
        for rank in range(1, self._num_ranks):
            commands, their_commands = socket.socketpair()
            life, their_life = socket.socketpair()
            fds = (their_commands.fileno(), their_life.fileno())
            arguments = [str(rank), str(os.getpid()), *map(str, fds)]
            command = [sys.executable, "-P", "-m", self._program, *arguments]
            with their_commands, their_life:
                process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - our own program
            self._ranks.append(_RankProcess(rank, process, commands, life))

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakened, selectors.EVENT_READ)
            for rank in self._ranks:
                rank.life.setblocking(False)
                selector.register(rank.life, selectors.EVENT_READ, rank)
            looked_at_s = time.monotonic()
            while not self._is_closing:
                ready = [key.data for key, _ in selector.select(BEAT_S) if key.data is not None]
                now_s = time.monotonic()
                # Do not count time in which this process itself was suspended.
                elapsed_s = min(now_s - looked_at_s, 2 * BEAT_S)
                looked_at_s = now_s
                for rank in self._ranks:
                    if rank in ready:
                        self._hear(rank)
                    else:
                        self._miss(rank, elapsed_s)
                    if self._loss is not None:
                        return

    def _hear(self, rank: _RankProcess) -> None:
        try:
            heard = rank.life.recv(MAX_LAST_WORDS_BYTES)
        except OSError:
            heard = b""
        rank.silent_s = 0.0
        rank.heard += heard.replace(b"\n", b"")
        if not heard:
            self._loss = self._why(rank)
        elif len(rank.heard) > MAX_LAST_WORDS_BYTES:
            self._loss = WorkerLost(f"rank {rank.rank} of the worker says what it must not")

    def _miss(self, rank: _RankProcess, elapsed_s: float) -> None:
        rank.silent_s += elapsed_s
        limit_s = SILENCE_S if self._is_serving else START_SILENCE_S
        if rank.silent_s > limit_s:
            self._loss = WorkerLost(f"nothing was heard of rank {rank.rank} of the worker for {limit_s:g} s")

    def _why(self, rank: _RankProcess) -> TandemError:
        """Returns the cause of a rank's end: its own report, or its exit status."""
        if rank.heard:
            try:
                words = json.loads(bytes(rank.heard))
                kind, message = str(words["kind"]), str(words["message"])
            except (ValueError, KeyError, TypeError):
                kind, message = "", "it said something unreadable"
            error = _ERRORS.get(kind)
            return error(message) if error else WorkerLost(f"rank {rank.rank} of the worker failed: {kind}: {message}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = rank.process.wait(EXIT_TIMEOUT_S)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return WorkerLost(f"rank {rank.rank} of the worker has ended with {how}")
        return WorkerLost(f"rank {rank.rank} of the worker has closed its sockets")

    def _end_all(self) -> None:
        if self._loss is not None:
            logger.critical("the worker has lost its ranks: %s", self._loss.message)
        for rank in self._ranks:
            # Shut down instead of close: the engine may be using the socket. It gets end-of-file instead of a reused
            # descriptor.
            with contextlib.suppress(OSError):
                rank.commands.shutdown(socket.SHUT_RDWR)
            # The ranks own nothing that needs cleanup.
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.life.close()
