"""Log files that only their owner may read, since they name tenants and requests. Knows nothing of their writers."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from services.runtime.errors import ConfigError

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
_WRITABLE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ACCESS_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_folder(folder: Path) -> None:
    """Makes the folder, or takes it as it is. One that holds logs only is closed to others; its parents stay open.

    Raises ConfigError for a folder into which somebody else could put a file that we would then write to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_FOR_OTHERS:
            raise ConfigError(
                f"--log-dir {folder} belongs to another user or can be written to by others; "
                "give a folder of your own with mode 0700, or one that does not exist yet"
            )
        if found.st_mode & _ACCESS_FOR_OTHERS and all(entry.suffix == ".log" for entry in folder.iterdir()):
            folder.chmod(PRIVATE_FOLDER)
    except OSError as error:
        raise ConfigError(f"--log-dir {folder} cannot be used: {error.strerror}") from None


def open_private(path: Path) -> BinaryIO:
    """Opens a file to append to it, closed to others whatever it was before. Raises OSError, also for a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE_FILE)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & _ACCESS_FOR_OTHERS:
            os.fchmod(descriptor, PRIVATE_FILE)
        return os.fdopen(descriptor, "ab")
    except BaseException:
        os.close(descriptor)
        raise
