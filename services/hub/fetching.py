"""Brings files to this machine: room on the disk first, then each from where it was cut off, then its digest.

A file appears under its name only when it is whole and its digest is the one announced. Until then it is `NAME.part`,
which another process that wants it waits for, and which a later start continues.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import httpx2

from services.runtime.errors import ModelError

CHUNK_BYTES = 1 << 20
MAX_FAILURES = 6
"""Failures in a row, without a byte in between, after which a file is given up."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 15.0
TIMEOUT_S = 30.0
SPARE_BYTES = 64 << 20
"""What stays free on the disk beside the files."""

Report = Callable[["RemoteFile", int], None]
"""Called with a file and the number of its bytes that are here."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file elsewhere and its place here. `digest` is hexadecimal; `algorithm`: sha256, md5 or git; empty: not known.

    git: SHA-1 of the content behind a header with its size, which is how Git names it.
    """

    name: str
    size_bytes: int
    place: Path
    url: str
    algorithm: str = ""
    digest: str = ""
    headers: Callable[[], Mapping[str, str]] = field(default=dict, repr=False)
    """Called for each request: signatures hold for minutes."""


class NoRoom(ModelError):
    """The disk has no room for the files."""


class WrongDigest(ModelError):
    """A file is not what its source announces."""


class CutOff(ModelError):
    """A source does not answer, refuses or breaks off again and again."""


def fetch(
    files: Sequence[RemoteFile], *, report: Report, client: httpx2.Client, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Brings the files that are not here. Raises NoRoom before the first byte, WrongDigest and CutOff."""
    missing = [file for file in files if not file.place.exists()]
    if not missing:
        return
    check_room(missing)
    for file in missing:
        file.place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file) as part:
            if not file.place.exists():  # another process had the part, and has completed it
                _complete(part, report, client=client, sleep=sleep)
                part.check()
                os.replace(part.stream.name, file.place)


def check_room(files: Sequence[RemoteFile]) -> None:
    """Raises NoRoom where the disk would be full before all files are whole."""
    folder = files[0].place.parent
    while not folder.exists():
        folder = folder.parent
    here = sum(part.stat().st_size for file in files if (part := _part_of(file)).exists())
    needed = sum(file.size_bytes for file in files) - here
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise NoRoom(
            f"{_size(needed)} have to be downloaded and {folder} has {_size(free)} free: make room, or name another "
            "place with HF_HOME (the hub's files) or XDG_CACHE_HOME (those of S3)"
        )


def digest_of(file: RemoteFile, stream: BinaryIO) -> "hashlib._Hash":
    """Returns the hash of what the stream still holds, begun as the file's algorithm has it."""
    hashed = _new_hash(file)
    while chunk := stream.read(CHUNK_BYTES):
        hashed.update(chunk)
    return hashed


def _new_hash(file: RemoteFile) -> "hashlib._Hash":
    if file.algorithm == "git":
        return hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
    return hashlib.new(file.algorithm or "sha256", usedforsecurity=False)


def _part_of(file: RemoteFile) -> Path:
    return file.place.with_name(file.place.name + ".part")


class _Part:
    """What of a file is here, and its hash so far."""

    def __init__(self, file: RemoteFile, stream: BinaryIO) -> None:
        self.file, self.stream = file, stream
        stream.seek(0)
        self.hashed = digest_of(file, stream)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are here."""
        return self.stream.tell()

    def append(self, chunk: bytes) -> None:
        """Adds what came."""
        self.stream.write(chunk)
        self.hashed.update(chunk)

    def restart(self) -> None:
        """Forgets what is here."""
        self.stream.truncate(0)
        self.stream.seek(0)
        self.hashed = _new_hash(self.file)

    def check(self) -> None:
        """Raises WrongDigest, and removes the part, where it is not the file that was announced."""
        file, found = self.file, self.hashed.hexdigest()
        if self.num_bytes != file.size_bytes or (file.algorithm and found != file.digest):
            os.unlink(self.stream.name)
            raise WrongDigest(
                f"{file.name} is not what {file.url} announces: {self.num_bytes} bytes with "
                f"{file.algorithm or 'sha256'} {found}, not {file.size_bytes} with {file.digest or 'an unknown one'}; "
                "it was removed"
            )
        self.stream.flush()
        os.fsync(self.stream.fileno())


@contextlib.contextmanager
def _locked(file: RemoteFile) -> Iterator[_Part]:
    """The part, open for reading and appending, which no other process has meanwhile."""
    with _part_of(file).open("a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not os.path.exists(stream.name) and not file.place.exists():  # removed by the process that had it before
            raise CutOff(f"{file.name} was removed by another process that downloaded it; try again")
        yield _Part(file, stream)


def _complete(part: _Part, report: Report, *, client: httpx2.Client, sleep: Callable[[float], None]) -> None:
    """Continues until the file is whole; a source that breaks off is asked again."""
    file, num_failures, furthest = part.file, 0, part.num_bytes
    while part.num_bytes < file.size_bytes:
        try:
            _continue(part, report, client)
            trouble = "the connection ended early"
        except httpx2.TransportError as error:
            trouble = str(error) or type(error).__name__
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise NoRoom(f"the disk became full while {file.name} was downloaded; what came is kept") from error
        num_failures = 0 if part.num_bytes > furthest else num_failures + 1
        furthest = max(furthest, part.num_bytes)
        if num_failures >= MAX_FAILURES:
            raise CutOff(f"{file.name} cannot be downloaded from {file.url}: {trouble}; a later try continues it")
        if part.num_bytes < file.size_bytes:
            sleep(min(MAX_WAIT_S, FIRST_WAIT_S * 2**num_failures))


def _continue(part: _Part, report: Report, client: httpx2.Client) -> None:
    """Appends what comes, from where the part ends. Raises TransportError, and CutOff for a refusal."""
    file, start = part.file, part.num_bytes
    report(file, start)
    headers = {**file.headers(), "accept-encoding": "identity", **({"range": f"bytes={start}-"} if start else {})}
    with client.stream("GET", file.url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
        if response.status_code >= 500 or response.status_code in (408, 429):
            raise httpx2.ReadError(f"{response.status_code} {response.reason_phrase}")
        if response.status_code >= 400 and response.status_code != 416:
            raise CutOff(f"{file.url} answers {response.status_code} {response.reason_phrase}")
        is_continued = response.headers.get("content-range", "").startswith(f"bytes {start}-")
        if start and not (response.status_code == 206 and is_continued):
            part.restart()  # the source has no ranges, or a shorter file
        announced = response.headers.get("content-length")
        if announced is not None and part.num_bytes + int(announced) != file.size_bytes:
            part.restart()
            raise WrongDigest(f"{file.url} has another size than the {file.size_bytes} bytes that are announced")
        # Not in chunks of a size: what came before the connection broke would be lost with its chunk.
        for chunk in response.iter_raw():
            part.append(chunk)
            report(file, part.num_bytes)
            if part.num_bytes > file.size_bytes:
                return


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
