"""Program of every rank except rank 0: loads its part, then computes the steps that rank 0 sends.

`python -m services.engine.parallel.rank RANK PARENT_PID COMMANDS_FD LIFE_FD`. Only rank 0 starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from services.engine.parallel.processes import BEAT_S
from services.runtime.errors import TandemError, WorkerLost

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class Life:
    """Sends heartbeats from a separate thread, and ends the process when rank 0 ends."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._has_spoken = False

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="life", daemon=True).start()

    def end(self, words: dict[str, str]) -> None:
        """Reports why the process ends, and stops the heartbeats."""
        with self._lock, contextlib.suppress(OSError):
            self._has_spoken = True
            self._peer.setblocking(True)
            self._peer.sendall(json.dumps(words).encode())

    def _run(self) -> None:
        self._peer.settimeout(BEAT_S)
        while True:
            with self._lock:
                if self._has_spoken:
                    return
                # If rank 0 is stopped and does not read, drop the heartbeat.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    self._peer.send(b"\n", socket.MSG_DONTWAIT)
            try:
                if not self._peer.recv(1):
                    os._exit(1)  # rank 0 has ended, so nothing needs the main thread's work
            except TimeoutError:
                continue
            except OSError:
                os._exit(1)


def run_rank(arguments: list[str], serve: Callable[[int, socket.socket], None]) -> NoReturn:
    """Runs a rank's program: calls `serve` with the rank and the socket for commands from rank 0."""
    code = _run(arguments, serve)
    sys.stderr.flush()
    # Skip finalizers: connections to ranks that have ended could block them, and nothing needs them.
    os._exit(code)


def _run(arguments: list[str], serve: Callable[[int, socket.socket], None]) -> int:
    """Runs the program. Returns the exit code."""
    rank, parent_pid, commands_fd, life_fd = map(int, arguments)
    _die_with(parent_pid)
    # A signal from the worker's terminal is meant for rank 0, which stops the other ranks once it has finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(levelname)s %(name)s: %(message)s")
    life = Life(socket.socket(fileno=life_fd))
    life.start()
    try:
        serve(rank, socket.socket(fileno=commands_fd))
    except WorkerLost:
        return 1  # rank 0 has ended, or another rank has, and rank 0 reports the cause
    except TandemError as error:
        life.end({"kind": type(error).__name__, "message": error.message})
        return 1
    except Exception as error:  # the outermost frame: reports to rank 0 and logs the details
        logger.exception("the rank failed")
        life.end({"kind": type(error).__name__, "message": "see the worker's log"})
        return 1
    return 0


def _serve(rank: int, commands: socket.socket) -> None:
    # Import the libraries after the heartbeats have started.
    from services.engine.parallel.messages import acknowledge_step, receive_object, receive_step, send_object
    from services.engine.parallel.part import RankPart

    settings, _ = receive_object(commands)
    part = RankPart.load(settings, rank)
    send_object(commands, part.facts())
    receive_object(commands)  # all other ranks have loaded their parts
    part.connect(Path(settings["store"]))
    send_object(commands, {})
    layout, fds = receive_object(commands, max_fds=1)
    part.use_pool(map_pool(fds[0], layout["num_bytes"]), layout)
    while (step := receive_step(commands)) is not None:
        part.compute(step)
        acknowledge_step(commands)


def map_pool(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps the memory of the worker's pages, which rank 0 has allocated. Closes the file descriptor."""
    try:
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def _die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, if supported."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    run_rank(sys.argv[1:], _serve)
