"""The kernel's memory limit, from the files of both versions of control groups."""

from pathlib import Path

import pytest

from services.runtime.memory_limit import MemoryLimit, memory_limit

MIB = 2**20
FIRST = {"memory.limit_in_bytes": "{limit}", "memory.usage_in_bytes": "{used}"}
SECOND = {"memory.max": "{limit}", "memory.current": "{used}"}


class Groups:
    """A tree of control groups."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "own"

    def add(self, path: str, files: dict[str, str], *, limit: str, used: int, stat: str = "") -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text.format(limit=limit, used=used) + "\n")
        (folder / "memory.stat").write_text(stat)

    def look(self, own: str) -> MemoryLimit | None:
        self.own.write_text(own)
        return memory_limit(cgroups=self.root, own_groups=self.own)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_the_second_version_counts_no_caches_of_files(groups: Groups) -> None:
    stat = f"anon {10 * MIB}\nfile {50 * MIB}\nshmem {20 * MIB}\nslab_reclaimable {5 * MIB}\n"
    groups.add("", SECOND, limit=str(100 * MIB), used=90 * MIB, stat=stat)
    assert groups.look("0::/\n") == MemoryLimit(100 * MIB, 55 * MIB)


def test_the_first_version_too(groups: Groups) -> None:
    stat = f"cache {MIB}\nshmem 0\ntotal_cache {50 * MIB}\ntotal_shmem {20 * MIB}\n"
    groups.add("memory/pod/one", FIRST, limit=str(100 * MIB), used=90 * MIB, stat=stat)
    groups.add("memory", FIRST, limit=str(2**63 - 4096), used=0)
    assert groups.look("5:cpu:/x\n4:memory:/pod/one\n0::/\n") == MemoryLimit(100 * MIB, 60 * MIB)


def test_the_group_with_the_least_room_counts(groups: Groups) -> None:
    groups.add("a.slice/b.service", SECOND, limit=str(100 * MIB), used=10 * MIB)
    groups.add("a.slice", SECOND, limit=str(120 * MIB), used=110 * MIB)
    groups.add("", SECOND, limit="max", used=0)
    found = groups.look("0::/a.slice/b.service\n")
    assert found == MemoryLimit(120 * MIB, 110 * MIB)
    assert found is not None
    assert (found.free_bytes, round(found.used_share, 2)) == (10 * MIB, 0.92)


def test_a_container_that_is_told_its_hosts_path_looks_at_its_root(groups: Groups) -> None:
    groups.add("memory", FIRST, limit=str(64 * MIB), used=MIB)
    assert groups.look("4:memory:/kubepods/x/y\n") == MemoryLimit(64 * MIB, MIB)
    assert groups.look("4:memory:/../../elsewhere\n") == MemoryLimit(64 * MIB, MIB)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096), "0"])
def test_no_limit_is_none(groups: Groups, limit: str) -> None:
    groups.add("", SECOND, limit=limit, used=5)
    assert groups.look("0::/\n") is None


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert memory_limit(cgroups=tmp_path / "none", own_groups=tmp_path / "neither") is None
