"""Device channels without a GPU: memory of the host in place of a GPU's, and a model of NCCL with its bad manners.

The model does what NCCL does where it hurts: a send or receive whose peer is dead never ends and is no error, or one
that comes late; opening waits for the other rank for ever; a call may get stuck; only an abort ends what runs, and that
may take long. It notes what would crash or corrupt in reality: two threads in one communicator, a call on one that was
aborted, a kernel that touches memory which was given back.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kv_transfer.transports import registry
from kv_transfer.transports.base import Transport
from kv_transfer.transports.cuda_ipc import CudaIpcTransport
from kv_transfer.transports.nccl import NcclTransport
from kv_transfer.transports.nccl_pair import IN_PROGRESS, SUCCESS, Limits

REMOTE_ERROR = 6
INVALID_USAGE = 5
QUICK = Limits(operation_s=0.4, leave_s=0.15, settle_s=0.15, watch_s=0.005, poll_s=0.0002)


class MemfdMemory:
    """`cuda_ipc.SharedMemory` of the host: two processes can map it, and it outlives either."""

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        fd = os.memfd_create("tandem-ring-model")
        os.ftruncate(fd, num_bytes)
        return self.map(fd, num_bytes), fd

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        if os.fstat(fd).st_size != num_bytes:
            raise OSError("the memory has another size")
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


def cuda_ipc_model() -> CudaIpcTransport:
    return CudaIpcTransport(MemfdMemory())


def nccl_model(limits: Limits | None = None) -> NcclTransport:
    device = ModelDevice()
    return NcclTransport(ModelNccl(device), device, limits or Limits())


class ModelDevice:
    """Hands out memory of the host and knows which of it is still somebody's."""

    def __init__(self) -> None:
        self.streams: dict[int, ModelStream] = {}
        self._memory: list[tuple[int, int, weakref.ref[torch.Tensor]]] = []
        self._handles = itertools.count(1)
        self._lock = threading.Lock()

    def memory(self, num_bytes: int) -> torch.Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        with self._lock:
            self._memory.append((memory.data_ptr(), num_bytes, weakref.ref(memory)))
        return memory

    def stream(self) -> ModelStream:
        stream = ModelStream(next(self._handles))
        self.streams[stream.handle] = stream
        return stream

    def is_alive(self, address: int, num_bytes: int) -> bool:
        with self._lock:
            return any(
                start <= address and address + num_bytes <= start + size and owner() is not None
                for start, size, owner in self._memory
            )

    def num_alive(self) -> int:
        with self._lock:
            return sum(owner() is not None for _, _, owner in self._memory)


@dataclass
class _Kernel:
    address: int
    num_bytes: int
    is_done: bool = False


class ModelStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.kernels: list[_Kernel] = []

    def activate(self) -> None:
        pass

    def record(self) -> ModelEvent:
        return ModelEvent(list(self.kernels))


class ModelEvent:
    def __init__(self, kernels: list[_Kernel]) -> None:
        self._kernels = kernels

    def is_done(self) -> bool:
        return all(kernel.is_done for kernel in self._kernels)


@dataclass
class Faults:
    """What goes wrong, for one rank of the next communicators."""

    never_opens: bool = False
    open_fails: bool = False
    opening_is_stuck_s: float = 0.0
    call_is_stuck_at: int = -1
    call_fails_at: int = -1
    dies_at: int = -1
    late_error_s: float | None = None
    abort_takes_s: float = 0.0


@dataclass
class _Comm:
    unique_id: bytes
    rank: int
    faults: Faults
    opened_at: float | None = None
    queue: list[_Kernel] = field(default_factory=list)
    kernels: list[_Kernel] = field(default_factory=list)
    num_calls: int = 0
    died_at: float | None = None
    is_aborted: bool = False
    inside: int = 0


class ModelNccl:
    """Both ranks' NCCL. `faults[rank]` is for the communicators that begin from now on."""

    def __init__(self, device: ModelDevice) -> None:
        self.faults = {0: Faults(), 1: Faults()}
        self.violations: list[str] = []
        self.comms: dict[int, _Comm] = {}
        self.stuck = threading.Event()  # set: calls that are stuck come back
        self._device = device
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)

    def unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def start(self, unique_id: bytes, rank: int) -> int:
        faults = self.faults[rank]
        if faults.open_fails:
            raise OSError("Duplicate GPU detected")
        if faults.opening_is_stuck_s:
            self.stuck.wait(faults.opening_is_stuck_s)
        with self._lock:
            number = next(self._numbers)
            self.comms[number] = _Comm(unique_id, rank, faults)
            peer = self._peer(self.comms[number])
            if peer is not None and not faults.never_opens and not peer.faults.never_opens:
                self.comms[number].opened_at = peer.opened_at = time.monotonic() + 0.002
            return number

    def state(self, comm: int) -> int:
        with self._entered(comm, "state") as one:
            if one.opened_at is None or time.monotonic() < one.opened_at:
                return IN_PROGRESS
            peer = self._peer(one)
            if peer is None or peer.died_at is None or peer.faults.late_error_s is None:
                return SUCCESS
            is_noticed = time.monotonic() > peer.died_at + peer.faults.late_error_s
            return REMOTE_ERROR if is_noticed else SUCCESS

    def send(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        return self._transfer(comm, address, num_bytes, stream)

    def receive(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        return self._transfer(comm, address, num_bytes, stream)

    def abort(self, comm: int) -> None:
        one = self.comms[comm]
        if one.faults.abort_takes_s:
            self.stuck.wait(one.faults.abort_takes_s)
        with self._lock:
            if one.is_aborted:
                self.violations.append("aborted twice")
            one.is_aborted = True
            for kernel in one.kernels:
                kernel.is_done = True
            one.queue.clear()

    def explain(self, code: int) -> str:
        return {REMOTE_ERROR: "remote process exited", INVALID_USAGE: "invalid usage"}[code]

    def _transfer(self, comm: int, address: int, num_bytes: int, stream: int) -> int:
        with self._entered(comm, "transfer") as one:
            number, one.num_calls = one.num_calls, one.num_calls + 1
            if number == one.faults.dies_at:
                one.died_at = time.monotonic()
            if number == one.faults.call_fails_at:
                return INVALID_USAGE
            if number == one.faults.call_is_stuck_at:
                self.stuck.wait(5)
                return SUCCESS
            with self._lock:
                kernel = _Kernel(address, num_bytes)
                one.kernels.append(kernel)
                self._device.streams[stream].kernels.append(kernel)
                if one.died_at is None:
                    one.queue.append(kernel)
                    self._match(one)
            return SUCCESS

    def _match(self, one: _Comm) -> None:
        peer = self._peer(one)
        if peer is None or peer.died_at is not None:
            return
        sends, receives = (one, peer) if one.rank == 0 else (peer, one)
        while sends.queue and receives.queue:
            source, target = sends.queue.pop(0), receives.queue.pop(0)
            for kernel in (source, target):
                if not self._device.is_alive(kernel.address, kernel.num_bytes):
                    self.violations.append("a kernel touched memory that was given back")
                    return
            ctypes.memmove(target.address, source.address, min(source.num_bytes, target.num_bytes))
            source.is_done = target.is_done = True

    def _peer(self, one: _Comm) -> _Comm | None:
        for other in self.comms.values():
            if other.unique_id == one.unique_id and other.rank != one.rank and not other.is_aborted:
                return other
        return None

    def _entered(self, comm: int, what: str) -> _Entered:
        return _Entered(self, self.comms[comm], what)


class _Entered:
    def __init__(self, nccl: ModelNccl, comm: _Comm, what: str) -> None:
        self._nccl, self._comm, self._what = nccl, comm, what

    def __enter__(self) -> _Comm:
        with self._nccl._lock:
            if self._comm.is_aborted:
                self._nccl.violations.append(f"{self._what} on a communicator that was aborted")
            if self._comm.inside:
                self._nccl.violations.append(f"{self._what} while another thread is in the communicator")
            self._comm.inside += 1
        return self._comm

    def __exit__(self, *error: object) -> None:
        with self._nccl._lock:
            self._comm.inside -= 1


def install(name: str, put: Callable[[object, str, object], None] = setattr) -> None:
    """Let pools in host memory use a device channel over its model, as if they were on a GPU."""
    made: Transport = cuda_ipc_model() if name == "cuda_ipc" else nccl_model()
    put(registry, "device_transports", lambda device: {name: made})
    # The other side's seems to be another GPU, which NCCL wants.
    put(registry.Reach, "at", lambda self, device: registry.Reach(self.host_id, secrets.token_hex(4), "1@"))
