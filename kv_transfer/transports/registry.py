"""Lists the transports, and decides which of them a pool can use and which of those connect it to another pool.

The choice is a pure function of facts about both sides. `kv_transfer.measure` supplies the measurements.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kv_transfer.transports.base import Transport
from kv_transfer.transports.cuda_ipc import CudaIpcTransport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.nccl import NcclTransport
from kv_transfer.transports.nccl_cuda import CudaDevice
from kv_transfer.transports.nccl_library import library_version, load_library
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tls import ChannelTls, TlsTransport
from services.engine.weights.mapped import CudaMemory
from services.runtime import cuda_memory
from services.runtime.errors import ConfigError

AUTO = "auto"
NAMES = ("cuda_ipc", "nccl", "shm", "tcp", "tls")
"""The transports that `auto` stands for, in the best order that is known without a measurement."""
UNENCRYPTED = ("nccl", "tcp")
"""Transports that send pages to other hosts unencrypted. With TLS, `tls` replaces both."""
HOST_NETWORK = ("tls", "tcp")
"""Transports between hosts for pages in host memory. A pool has one of them."""
NETWORK_NAMES = frozenset({*HOST_NETWORK, "nccl"})
"""Transports that cross a network between hosts."""
CLEARLY_FASTER = 1.25
"""Measured speedup that a transport needs to move ahead of an earlier one. Measurements are noisy."""
WORD_BYTES = 8
DEVICE_NAMES = frozenset({"cuda_ipc", "nccl"})


@dataclass(frozen=True, slots=True)
class Reach:
    """Location of one side's pages, as far as it determines which transports can reach them.

    `host_id` identifies the scope of shared memory. `gpu_id` identifies the GPU. It is empty for host memory. `nccl` is
    `version@name`, with the host's name as NCCL sees it. It is empty without NCCL.
    """

    host_id: str
    gpu_id: str = ""
    nccl: str = ""

    def at(self, device: torch.device) -> Reach:
        """Returns the location of pages on this device of the same host."""
        if device.type != "cuda":
            return self
        properties = torch.cuda.get_device_properties(device)
        version = library_version()
        nccl = f"{version}@{os.environ.get('NCCL_HOSTID', '')}" if version else ""
        return replace(self, gpu_id=str(properties.uuid), nccl=nccl)


class Transports:
    """The transports of one pool, by name. With `tls`, no page leaves the host unencrypted."""

    def __init__(self, device: torch.device, page_bytes: int, tls: ChannelTls | None = None) -> None:
        self._by_name = dict(_host_transports())
        self._is_encrypted = tls is not None
        if not ShmTransport.is_supported():
            del self._by_name["shm"]
        # The kernels move 64-bit words. Pages that are not a multiple of 8 bytes pass through host memory.
        if page_bytes % WORD_BYTES == 0:
            self._by_name.update(device_transports(device))
        if tls is not None:
            self._by_name["tls"] = TlsTransport(tls)
            for name in UNENCRYPTED:
                self._by_name.pop(name, None)

    def __getitem__(self, name: str) -> Transport:
        return self._by_name[name]

    def resolve(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the transports to offer, best first, with `auto` expanded to the transports available here.

        Raises ConfigError for an unknown name, and for a transport that these pages cannot use.
        """
        resolved: list[str] = []
        for name in names:
            if name not in (AUTO, "loopback", *NAMES):
                raise ConfigError(f"transport: {name!r} is not one of {', '.join((AUTO, 'loopback', *NAMES))}")
            if name == "tcp" and self._is_encrypted:
                resolved.append("tls")
            elif name == AUTO:
                resolved += [each for each in NAMES if each in self._by_name]
            elif name not in self._by_name:
                raise ConfigError(
                    f"transport: {name} cannot be used here: {_what_it_needs(name, is_encrypted=self._is_encrypted)}"
                )
            else:
                resolved.append(name)
        return tuple(dict.fromkeys(resolved))


def device_transports(device: torch.device) -> dict[str, Transport]:
    """Returns the transports that carry pages of this device without a copy through host memory."""
    found: dict[str, Transport] = {}
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if cuda_memory.is_supported(index):
            found["cuda_ipc"] = CudaIpcTransport(CudaMemory(index))
        if library_version():
            found["nccl"] = NcclTransport(load_library(), CudaDevice(torch.device("cuda", index)))
    return found


def transport_named(name: str) -> Transport:
    """Returns the host-memory transport of this name. Raises KeyError."""
    return _host_transports()[name]


def reaches(name: str, sender: Reach, receiver: Reach) -> bool:
    """Returns whether a transport that both sides have can connect them, judged by their locations alone."""
    is_same_host = sender.host_id == receiver.host_id
    if name in ("loopback", "shm"):
        return is_same_host
    if name in DEVICE_NAMES and not (sender.gpu_id and receiver.gpu_id):
        return False
    if name == "cuda_ipc":
        return is_same_host
    if name == "nccl":
        version, _, host = sender.nccl.partition("@")
        other_version, _, other_host = receiver.nccl.partition("@")
        # NCCL rejects two ranks on one GPU, unless NCCL_HOSTID makes them appear to be on different hosts.
        is_accepted = sender.gpu_id != receiver.gpu_id or host != other_host
        return bool(version) and version == other_version and is_accepted
    return True


def choose(offered: Sequence[str], available: Sequence[str], *, sender: Reach, receiver: Reach) -> str | None:
    """Returns the first offered transport that the receiver also has and that connects the two, or None."""
    for name in offered:
        if name in available and reaches(name, sender, receiver):
            return name
    return None


def in_order(names: Sequence[str], bytes_per_s: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the names, best first. A clearly faster measurement moves a name forward; unmeasured names are last.

    Device channels precede host channels, because the measurement of a host channel excludes the copies to and from the
    device.
    """
    measured = [name for name in names if name in bytes_per_s]
    on_device = _by_rate([name for name in measured if name in DEVICE_NAMES], bytes_per_s)
    on_host = _by_rate([name for name in measured if name not in DEVICE_NAMES], bytes_per_s)
    return (*on_device, *on_host, *(name for name in names if name not in bytes_per_s))


def _by_rate(names: Sequence[str], bytes_per_s: Mapping[str, float]) -> list[str]:
    left, ordered = [*names], []
    while left:
        best = left[0]
        for name in left[1:]:
            if bytes_per_s[name] > CLEARLY_FASTER * bytes_per_s[best]:
                best = name
        left.remove(best)
        ordered.append(best)
    return ordered


def local_host_id() -> str:
    """Returns an ID for the scope in which this process can share memory: the boot and the network namespace.

    Two containers on one machine share the boot, but not the network namespace, which contains the doorbell's socket.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        # Without Linux there is no shared memory either, so use an ID that differs from any other process's.
        return f"process-{os.getpid()}"
    return hashlib.sha256(f"{boot_id} {namespace}".encode()).hexdigest()[:32]


@functools.cache
def _host_transports() -> dict[str, Transport]:
    return {each.name: each for each in (LoopbackTransport(), ShmTransport(), TcpTransport())}


def _what_it_needs(name: str, *, is_encrypted: bool) -> str:
    if is_encrypted and name in UNENCRYPTED:
        return "it does not encrypt pages, as everything is with --tls-ca; --insecure lets them pass as they are"
    needs = {
        "cuda_ipc": "it needs pages on a GPU whose driver shares memory by file descriptors",
        "nccl": "it needs pages on a GPU, and NCCL",
        "shm": "it needs Linux",
        "tls": "it needs --tls-ca",
    }
    return needs[name]
