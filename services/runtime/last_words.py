"""The last words of a process: the line that says why it ended, in a file that its starter shows.

Kubernetes shows what a container leaves in its `terminationMessagePath`, by default /dev/termination-log. The file is
emptied at the start, so that no earlier life speaks for this one, and written when the process ends with an error. It
stays empty after an end in order, and where the process was killed from outside: nobody can say then what it does not
know. The one killer that announces itself is the kernel, for memory: near its limit the file says so, and is emptied
again should the process get away from it.
"""

import contextlib
import errno
import os
import traceback
from pathlib import Path

from services.runtime.errors import TandemError
from services.runtime.memory_limit import MemoryLimit, memory_limit

FILE_ENV = "TANDEM_TERMINATION_LOG"
"""Names the file; empty: none."""
DEFAULT_FILE = Path("/dev/termination-log")
"""Used where it exists; Kubernetes makes it."""
MAX_BYTES = 2048
"""Kubernetes shows 4 KiB of a container, and 12 KiB of all containers of a pod."""
LOOK_EVERY_S = 1.0
NEAR_LIMIT, FAR_FROM_LIMIT = 0.95, 0.9
"""Used shares of the memory limit from which on, and below which, an end for memory is, or is not, to be expected."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NO_MEMORY = ("can't allocate memory", "out of memory")
"""What torch says, with another class than Python's, when an allocation is refused."""


def begin() -> None:
    """Empties the file: what was left in it is of an earlier process."""
    _write("")


def leave(words: str, exit_code: int) -> None:
    """Writes why the process ends, with its exit code. Never raises."""
    _write(f"{words} (exit code {exit_code})\n")


def words_for(error: BaseException) -> str:
    """Returns one line for the error that ends a process, without anything that a request may have brought."""
    if isinstance(error, TandemError):
        return " ".join(error.message.split())
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
        limit = memory_limit()
        under = "" if limit is None else f", under a limit of {limit.limit_bytes / 2**30:.3g} GiB"
        return f"out of memory: an allocation was refused{under}{_place(error)}"
    if isinstance(error, OSError):
        what = "the disk is full" if error.errno in _FULL_DISK else os.strerror(error.errno or 0).lower()
        return f"{what}{'' if error.filename is None else f': {error.filename}'}{_place(error)}"
    return f"{type(error).__name__}{_place(error)}; the log has the rest"


async def watch_memory() -> None:
    """Writes it down while the process is near its memory limit; until cancelled. Without a file or a limit it ends."""
    import asyncio  # 17 ms of each command's start, which has no event loop

    is_near = False
    while _file() is not None and (limit := memory_limit()) is not None:
        if not is_near and limit.used_share >= NEAR_LIMIT:
            is_near = True
            _write(_near(limit))
        elif is_near and limit.used_share < FAR_FROM_LIMIT:
            is_near = False
            _write("")
        await asyncio.sleep(LOOK_EVERY_S)


def _near(limit: MemoryLimit) -> str:
    return (
        f"{limit.used_share:.0%} of the memory limit of {limit.limit_bytes / 2**30:.3g} GiB were in use: if the "
        "process was killed (exit code 137), the kernel did it for memory\n"
    )


def _place(error: BaseException) -> str:
    """Where an error came from: the last place in its trace."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _file() -> Path | None:
    name = os.environ.get(FILE_ENV)
    if name is not None:
        return Path(name) if name else None
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _write(text: str) -> None:
    """A file that cannot be written to changes nothing: the log and the exit code remain."""
    file = _file()
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.write_bytes(text.encode()[:MAX_BYTES])
