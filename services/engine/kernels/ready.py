"""Precompiled libraries of the CPU kernels, for machines without a compiler, such as containers.

`python -m services.engine.kernels.ready FOLDER` compiles a library for each processor level. In a container image, the
folder is READY_DIR. Does not depend on the content of the libraries.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from services.engine.kernels.build import build_library, source_digest

READY_DIR = Path(__file__).parent / "ready_libraries"
"""Folder of an installation's libraries. Missing if the machine compiles its own library."""
CPU_INFO = Path("/proc/cpuinfo")
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """A processor level: the compiler flags that target it, and the CPU features that they require."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


LEVELS = (
    # AMX is used if the processor supports it. The library checks at run time.
    Level("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), _V4 | {"avx512_bf16"}),
    Level("avx512", ("-march=x86-64-v4",), _V4),
    Level("avx2", ("-march=x86-64-v3",), _V3),
)
"""Levels, best first. A library of a level computes the same results as a library compiled on such a processor."""


def ready_library(folder: Path = READY_DIR, *, cpu_info: Path = CPU_INFO) -> Path | None:
    """Returns the best library for this processor and these sources, or None if the folder has no such library."""
    if not folder.is_dir():
        return None
    features = processor_features(cpu_info)
    fitting = (_path(folder, level) for level in LEVELS if level.features <= features)
    return next((path for path in fitting if path.is_file()), None)


def make_libraries(folder: Path) -> None:
    """Compiles a library for each of LEVELS into the folder. Raises KernelsUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        for level in LEVELS:
            # Link the compiler's runtime statically, because the image may lack it. The system provides OpenMP.
            flags = (*level.flags, "-static-libstdc++", "-static-libgcc")
            shutil.copy(build_library(cache_dir=Path(cache), extra_flags=flags), _path(folder, level))


def processor_features(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Returns the CPU features that the kernel reports. Empty if they are unavailable."""
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _path(folder: Path, level: Level) -> Path:
    return folder / f"{level.name}-{source_digest()}.so"


if __name__ == "__main__":
    make_libraries(Path(sys.argv[1]))
