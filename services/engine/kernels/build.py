"""Compiles the kernels at first use and stores the library in the user's cache. Does not depend on their content.

The library is built for the current processor, so its file name is a hash of the processor's features, the compiler,
and the sources. If several processes need it at once, one process compiles and the others wait.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.runtime.errors import TandemError

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
LIBRARY_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden")
THREAD_FLAGS = ("-fopenmp",)

COMPILE_LIMIT_S = 120.0
_POLL_S = 0.05


class KernelsUnavailable(TandemError):
    """The kernels cannot be built or loaded.

    The message contains the reason. The engine then computes through torch.
    """


def build_library(
    *, cache_dir: Path | None = None, compiler: str | None = None, extra_flags: Sequence[str] = ()
) -> Path:
    """Returns the path of the compiled library. Compiles it if the cache does not contain it.

    `cache_dir` defaults to the user's cache. `compiler` defaults to the first compiler found, with the variable CXX
    taking precedence. `extra_flags` are appended last, so that tests can select other instruction sets.

    Raises KernelsUnavailable.
    """
    command = [compiler or _find_compiler(), *FLAGS, *LIBRARY_FLAGS, *extra_flags]
    folder = cache_dir or _default_cache_dir()
    _make_private(folder)
    path = folder / f"tandem-{_key(command)}.so"
    if not _is_intact(path):
        with _lock(path.with_suffix(".lock")):
            if not _is_intact(path):
                _compile(command, path)
    return path


def source_digest() -> str:
    """Returns a digest of the sources and the flags that affect arithmetic. Equal digests mean equal kernels."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _sources() -> list[Path]:
    return sorted([*SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cpp")])


def _find_compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise KernelsUnavailable("there is no C++ compiler (g++, c++ or clang++) on the path")


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "tandem" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # no home directory, or a read-only one: common in containers
    return Path(tempfile.gettempdir()) / f"tandem-kernels-{os.getuid()}"


def _make_private(folder: Path) -> None:
    """Creates the cache directory. A library is code, so the directory must not be writable by other users."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise KernelsUnavailable(f"the cache folder {folder} cannot be made ({error.strerror})") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelsUnavailable(f"the cache folder {folder} can be written by other users")


def _key(command: Sequence[str]) -> str:
    version = _run([command[0], "--version"], limit_s=20.0).stdout
    parts = (source_digest(), list(command), THREAD_FLAGS, version, _cpu_features())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    described = ("model name", "flags", "Features", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if line.startswith(described)}
    return repr(sorted(first.items()))


def _is_intact(path: Path) -> bool:
    """Returns whether the library matches its stored digest. Loading a truncated library crashes the process."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _digest_path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return False


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds a lock that one process at a time can acquire. The OS releases it if the process dies."""
    deadline = time.monotonic() + COMPILE_LIMIT_S
    try:
        file = path.open("w")
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be written ({error.strerror})") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelsUnavailable("another process has been compiling the kernels for too long") from None
                time.sleep(_POLL_S)
        yield


def _compile(command: Sequence[str], path: Path) -> None:
    started = time.monotonic()
    sources = [str(source) for source in _sources() if source.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        made = Path(folder) / path.name
        common = [*command, *sources, "-o", str(made)]
        result = _run([*common, *THREAD_FLAGS], limit_s=COMPILE_LIMIT_S)
        if result.returncode:
            logger.warning("the compiler has no OpenMP: the kernels use one thread")
            result = _run(common, limit_s=COMPILE_LIMIT_S)
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise KernelsUnavailable(f"{command[0]} failed: {lines[0]}")
        # Each file is renamed once it is complete. A process that reads between the two renames sees a digest mismatch
        # and waits for the lock.
        digest = _digest_path(made)
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
        os.replace(digest, _digest_path(path))
        os.replace(made, path)
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _run(command: Sequence[str], *, limit_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)  # noqa: S603 - the compiler, with our flags
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run ({error})") from error
