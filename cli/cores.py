"""Which processor cores each worker of `tandem up` keeps to. The plan is pure; how the machine looks is read here too.

A prompt computed on the core that decodes would hold up every answer, so workers that compute at the same time get
cores of their own, as equal shares as there can be. What is left over, and all time that workers leave, is for the
gateway and Redis, which are not kept to any core.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYS_CPU = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")

Core = tuple[int, ...]
"""The numbers by which the kernel knows a physical core: one for each of its hardware threads that we may use."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use: cores in the order of sockets, and how many of them at a time, where that is less.

    `can_pin`: processes can be kept to cores here.
    """

    cores: tuple[Core, ...]
    quota: float = math.inf
    can_pin: bool = True

    @property
    def num_cores(self) -> int:
        """Physical cores' worth of time, at least 1."""
        return max(1, math.floor(min(len(self.cores), self.quota)))


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part. `cpus`: the kernel's numbers that it keeps to; empty: any."""

    threads: int
    cpus: tuple[int, ...] = ()


def share_out(machine: Machine, num_workers: int) -> list[Share]:
    """A share for each worker: whole physical cores, or hardware threads where these are too few.

    No worker is kept to a core where cores are fewer than workers, nor in a container whose time is less than its
    cores: others of the same machine would choose the same ones. A worker alone may use every core.
    """
    cpus: list[Core] = [(cpu,) for core in machine.cores for cpu in core]
    is_quota = machine.quota < len(cpus)
    units = cpus if len(machine.cores) < num_workers <= len(cpus) else list(machine.cores)
    if num_workers > len(units) or is_quota or not machine.can_pin:
        return [Share(max(1, machine.num_cores // num_workers))] * num_workers
    size = len(units) // num_workers
    if num_workers == 1:
        return [Share(size)]
    parts = [units[n * size : (n + 1) * size] for n in range(num_workers)]
    return [Share(size, tuple(sorted(cpu for unit in part for cpu in unit))) for part in parts]


def this_machine(sys_cpu: Path = SYS_CPU, cgroup: Path = CGROUP) -> Machine:
    """The cores that this process may use. Where the kernel says nothing of their threads, each number is a core."""
    if not hasattr(os, "sched_getaffinity"):
        return Machine(tuple((cpu,) for cpu in range(os.cpu_count() or 1)), can_pin=False)
    return Machine(physical_cores(sorted(os.sched_getaffinity(0)), sys_cpu), quota=_quota(cgroup))


def physical_cores(cpus: Sequence[int], sys_cpu: Path = SYS_CPU) -> tuple[Core, ...]:
    """The kernel's numbers by the core that they are threads of, cores of one socket side by side."""
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in cpus:
        topology = sys_cpu / f"cpu{cpu}" / "topology"
        try:
            place = (
                int((topology / "physical_package_id").read_text()),
                (topology / "thread_siblings_list").read_text(),
            )
        except (OSError, ValueError):
            return tuple((cpu,) for cpu in cpus)
        cores.setdefault(place, []).append(cpu)
    in_order = sorted(cores, key=lambda place: (place[0], cores[place]))
    return tuple(tuple(cores[place]) for place in in_order)


def _quota(cgroup: Path) -> float:
    """Cores' worth of time that a container may use (control groups, version 2); infinite: no bound."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
