"""The processes of a worker's other ranks: started, watched and ended; knows nothing of what they compute.

Two socket pairs lead to each rank: one for commands, and one on which the rank says several times a second that it is
alive and, at the last, why it ends. A rank that ends, or is silent, is the end of all of them: the worker cannot
continue without it. And a rank ends with rank 0, however that ends: it sees the end of its sockets and, where the
system can do so, is killed by it, also while it is stopped.
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
"""A rank that was silent for this long while rank 0 was listening is dead."""
START_SILENCE_S = 60.0
"""While it loads libraries and a model: the system may be busy with its disk for long."""
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
    """Starts `num_ranks` - 1 processes and keeps watch over them in a thread of its own, until `close`.

    `program` is the module that they run, by `services.engine.parallel.rank.run_rank`.
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
        # Children are killed with the thread that started them, so it is this one, which lives as long as they may.
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """Returns when the processes exist. Raises WorkerLost where they cannot be made."""
        self._thread.start()
        self._has_started.wait()
        if self._start_error is not None:
            raise WorkerLost(f"the worker's ranks cannot be started: {self._start_error}") from self._start_error

    @property
    def commands(self) -> Sequence[socket.socket]:
        """The sockets to the ranks from 1 on."""
        return [rank.commands for rank in self._ranks]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks from 1 on."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def loss(self) -> TandemError | None:
        """Why the ranks have ended, once they have."""
        return self._loss

    def begin_serving(self) -> None:
        """Everything is loaded: from now on a silence is short."""
        self._is_serving = True

    def explain(self, error: BaseException, *, timeout_s: float = 2.0) -> TandemError:
        """Returns the cause of an error of talking to the ranks: the watch may need a moment to see which one ended."""
        self._has_ended.wait(timeout_s)
        return self._loss or WorkerLost(f"the ranks of the worker lost each other: {error}")

    def close(self) -> None:
        """Ends all ranks, once nobody talks to them. May be called again."""
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
                # Time in which this process did not run is nobody's silence.
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
        """Returns the end of a rank in words: its own, or the system's."""
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
            # Shut down, not closed: the engine may be reading or writing, and gets an end instead of another's file.
            with contextlib.suppress(OSError):
                rank.commands.shutdown(socket.SHUT_RDWR)
            # They hold nothing that must be given back.
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.life.close()
