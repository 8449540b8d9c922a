"""The GPU that each worker of `tandem up` computes on. The plan is pure; the machine's GPUs are read here too.

A worker takes the first GPU that CUDA shows it, so each gets them in an order of its own. All stay visible: pages
go from one GPU to another one without the host's memory only where a process sees both.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
"""The driver's own list: device files may be missing until the first process asks for one."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """One worker's GPU, and the part of its memory that it may have: 1 divided by the workers there.

    `visible`: all GPUs as CUDA_VISIBLE_DEVICES has them, the worker's own first.
    """

    visible: str
    memory_share: float


def share_out_gpus(gpus: Sequence[str], num_workers: int) -> list[GpuShare | None]:
    """A share for each worker; None without a GPU.

    Where workers must share a GPU, these are neighbours: of one model, which they have there once, and of one role as
    far as possible, since prompts hold up what is decoded on the same GPU.
    """
    if not gpus:
        return [None] * num_workers
    own = [number * len(gpus) // num_workers if num_workers > len(gpus) else number for number in range(num_workers)]
    num_workers_on = Counter(own)
    return [GpuShare(",".join([*gpus[at:], *gpus[:at]]), 1 / num_workers_on[at]) for at in own]


def visible_gpus(
    environ: Mapping[str, str], devices: Path = DEVICES, driver_gpus: Path = DRIVER_GPUS
) -> tuple[str, ...]:
    """The names by which CUDA knows the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else numbers."""
    named = environ.get(VISIBLE_ENV)
    if named is None:
        nodes = [node for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
        # A container sees all GPUs of the host in that list, and has files of those that are its own.
        num_known = len(list(driver_gpus.iterdir())) if not nodes and driver_gpus.is_dir() else 0
        return tuple(map(str, range(len(nodes) or num_known)))
    names = []
    for name in map(str.strip, named.split(",")):
        if name in ("", "-1"):
            break  # CUDA looks no further either
        names.append(name)
    return tuple(names)
