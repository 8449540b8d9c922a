"""Channel between two processes of one host with pages on GPUs. The ring is device memory that both processes map.

The receiver allocates the ring and passes it as a file descriptor over a Unix socket, which then serves as the
doorbell. The sender writes each frame directly into a slot: a copy within one GPU, or over NVLink or PCIe between two.
The memory exists as long as one side maps it, so the death of one process does not crash the other's kernels. A ring is
never reused for a second channel, so a late write cannot corrupt data that is still read.

In tests without a GPU, it runs on host memory.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    AnySendChannel,
    ChannelBroken,
    ChannelKey,
    Countdown,
    DeviceFrame,
    DeviceReceiveChannel,
    DeviceSendChannel,
    Listener,
    RingSpec,
    Transport,
)
from kv_transfer.transports.handshake import READY, Acceptor, prove_to_receiver
from kv_transfer.transports.slots import Posted, ReceiverSlots, SenderSlots
from services.runtime.descriptors import receive_fds

_BACKLOG = 64


class SharedMemory(Protocol):
    """Memory that two processes map. Both methods raise OSError. Memory is unmapped together with its last tensor."""

    def make(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Returns new memory, uint8 [at least num_bytes], and its file descriptor, which the caller closes."""
        ...

    def map(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Maps memory that another process made with the same size. The caller closes the descriptor."""
        ...


class CudaIpcTransport(Transport):
    """Device memory that both sides map, with a socket as doorbell. Works within one host."""

    name = "cuda_ipc"

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def listen(self, host: str, port: int) -> Listener:
        """Starts a listener under a random abstract name."""
        return _CudaIpcListener(self._memory)

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> AnySendChannel:
        """Opens a channel on this host."""
        countdown = Countdown(timeout_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _connect(sock, address, countdown.remaining_s())
            prove_to_receiver(sock, key, countdown)
            sock.settimeout(countdown.remaining_s())
            return CudaIpcSendChannel(sock, _receive_ring(sock, ring, self._memory), ring)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch cannot use the memory
            sock.close()
            raise ChannelBroken(f"the receiver's device memory could not be opened: {error}") from error
        except ChannelBroken:
            sock.close()
            raise


class CudaIpcSendChannel(DeviceSendChannel):
    """Writes frames into free slots of the receiver's ring, and signals each on the doorbell."""

    def __init__(self, sock: socket.socket, memory: torch.Tensor, ring: RingSpec) -> None:
        self._slots = SenderSlots(sock, ring)
        self._memory: torch.Tensor | None = memory
        self._ring = ring

    def post(self, seq: int, num_bytes: int, fill: Callable[[torch.Tensor], bytes], *, timeout_s: float) -> None:
        """See DeviceSendChannel."""
        memory = self._memory
        if memory is None:
            raise ChannelBroken("the channel is closed")
        slot = self._slots.take(num_bytes, timeout_s)
        start = slot * self._ring.slot_bytes
        digest = fill(memory[start : start + num_bytes])
        self._slots.post(Posted(seq, slot, num_bytes, digest))

    def shutdown(self) -> None:
        """See SendEnd."""
        self._slots.shutdown()

    def close(self) -> None:
        """See SendEnd."""
        self._memory = None
        self._slots.close()


class CudaIpcReceiveChannel(DeviceReceiveChannel):
    """Owns the ring. Returns frames as views of their slots."""

    def __init__(self, sock: socket.socket, memory: torch.Tensor, ring: RingSpec) -> None:
        self._slots = ReceiverSlots(sock, ring)
        self._memory: torch.Tensor | None = memory
        self._ring = ring

    def poll(self, *, timeout_s: float) -> DeviceFrame | None:
        """See DeviceReceiveChannel."""
        memory = self._memory
        if memory is None:
            raise ChannelBroken("the channel is closed")
        posted = self._slots.next(timeout_s)
        if posted is None:
            return None
        start = posted.slot * self._ring.slot_bytes
        return DeviceFrame(posted.seq, posted.digest, posted.slot, memory[start : start + posted.num_bytes])

    def release(self, slot: int) -> None:
        """See ReceiveEnd."""
        self._slots.release(slot)

    def shutdown(self) -> None:
        """See ReceiveEnd."""
        self._slots.shutdown()

    def close(self) -> None:
        """See ReceiveEnd."""
        self._memory = None
        self._slots.close()


class _CudaIpcListener(Listener):
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._name = f"tandem-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(b"\0" + self._name.encode())
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        self._acceptor = Acceptor(sock, self._offer_ring, name=self._name[:14])

    @property
    def address(self) -> str:
        return self._name

    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        return self._acceptor.expect(key, ring)

    def close(self) -> None:
        self._acceptor.close()

    def _offer_ring(self, sock: socket.socket, ring: RingSpec, _: ChannelKey) -> AnyReceiveChannel:
        memory, fd = self._memory.make(ring.num_slots * ring.slot_bytes)
        try:
            socket.send_fds(sock, [READY], [fd])
        finally:
            os.close(fd)
        return CudaIpcReceiveChannel(sock, memory, ring)


def _connect(sock: socket.socket, address: str, timeout_s: float) -> None:
    # Use the kernel's timeout: with a Python timeout, a full backlog would be an immediate error instead of a wait.
    seconds = int(timeout_s)
    limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.connect(b"\0" + address.encode())


def _receive_ring(sock: socket.socket, ring: RingSpec, memory: SharedMemory) -> torch.Tensor:
    ready, fds = receive_fds(sock, len(READY), 1)
    try:
        if ready != READY or len(fds) != 1:
            raise ChannelBroken("the receiver did not offer its ring")
        return memory.map(fds[0], ring.num_slots * ring.slot_bytes)
    finally:
        for fd in fds:
            os.close(fd)
