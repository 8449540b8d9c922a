"""What `tandem up` holds while it runs, each as a scope that leaves nothing behind. Knows nothing of its children."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cli.log_files import make_private_folder
from cli.up_settings import UpSettings
from services.cluster.embedded_redis import EmbeddedRedis

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal was closed."""


@dataclass
class LogFolder:
    """Where the children's output goes."""

    path: Path
    is_worth_keeping: bool = False
    """Somebody will want to read what is in it, although it is a temporary one."""


@contextmanager
def log_folder(wanted: Path | None) -> Iterator[LogFolder]:
    """The wanted folder, or a temporary one that is removed unless something went wrong."""
    if wanted is not None:
        make_private_folder(wanted)
        yield LogFolder(wanted)
        return
    logs = LogFolder(Path(tempfile.mkdtemp(prefix="tandem-logs-")))
    try:
        yield logs
    finally:
        if not logs.is_worth_keeping:
            shutil.rmtree(logs.path, ignore_errors=True)


@contextmanager
def pid_file(path: Path | None) -> Iterator[None]:
    """Holds this process's id in a file while the scope lasts."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def own_redis(settings: UpSettings) -> Iterator[EmbeddedRedis | None]:
    """The embedded Redis, unless another one is given."""
    if settings.redis is not None:
        yield None
        return
    with EmbeddedRedis(max_memory_bytes=settings.gateway.storage_bounds.all_bytes) as redis:
        yield redis


@contextmanager
def early_signals() -> Iterator[list[int]]:
    """Collects signals that come before the event loop runs.

    They do not interrupt: between making a file or a process and taking charge of it, nobody would remove it.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    previous = {number: signal.signal(number, note) for number in END_SIGNALS}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@asynccontextmanager
async def end_signals(on_signal: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_signal` for each signal that means the end; after the scope nothing interrupts the tidying up."""
    loop = asyncio.get_running_loop()
    for number in END_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in END_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
