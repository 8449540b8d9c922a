"""The memory that the kernel lets this process's container or unit have, by its control groups (version 1 or 2).

A limit holds for a group and all below it, so the least of those on the way to the root counts. A container sees its
own group as the root; where it is told another path, as with version 1, the root is looked at alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 62
"""Version 1 says "no limit" with a number beside which no memory is worth naming."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The narrowest limit. `used_bytes` is what cannot be taken back by dropping caches of files."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What may still be allocated."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def used_share(self) -> float:
        """The used part, from 0 to 1."""
        return self.used_bytes / self.limit_bytes


def memory_limit(*, cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> MemoryLimit | None:
    """Returns the limit under which the least is free; None where nothing limits this process."""
    found = [limit for folder in _folders(cgroups, own_groups) if (limit := _limit_of(folder)) is not None]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


def _folders(cgroups: Path, own_groups: Path) -> Iterator[Path]:
    """The folders of the process's memory groups, from its own to the root, as far as they can be seen."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            root = cgroups / "memory"
        elif not controllers:
            root = cgroups
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        yield from (root / folder for folder in (own, *own.parents) if ".." not in folder.parts)


def _limit_of(folder: Path) -> MemoryLimit | None:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _number(folder / limit_file)
        if limit is not None and 0 < limit < UNLIMITED_BYTES:
            return MemoryLimit(limit, max(0, (_number(folder / usage_file) or 0) - _reclaimable_bytes(folder)))
    return None


def _reclaimable_bytes(folder: Path) -> int:
    """The caches of files: of version 1 with all groups below, as its usage is counted."""
    try:
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    is_first = "total_cache" in stats
    cache, shmem = ("total_cache", "total_shmem") if is_first else ("file", "shmem")
    return max(0, int(stats.get(cache, 0)) - int(stats.get(shmem, 0))) + int(stats.get("slab_reclaimable", 0))


def _number(path: Path) -> int | None:
    """None for a file that is missing, or has the word `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
