"""Channel between two GPUs through NCCL.

Each channel has one communicator of two ranks: the sender is 0, the receiver 1.

The socket of the handshake stays open. It announces the content of each slot and shows whether the peer is alive, which
NCCL does not. The sender writes a frame into a staging slot, announces it, and sends it from there. The receiver
launches its receive only after the announcement, so that no kernel spins for data that may never arrive. Slot i of the
staging memory is free when slot i of the receiver's ring is free. `nccl_pair` handles everything else about a
communicator.

NCCL neither authenticates nor encrypts its traffic, and the communicator's unique ID crosses the socket in plain text.
Like `tcp`, this channel requires a private network of the cluster. Set NCCL_SOCKET_IFNAME in the workers' environment
to restrict NCCL to that network.

In tests without a GPU, it runs with a model of NCCL. It has never run between two GPUs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    AnySendChannel,
    ChannelBroken,
    ChannelEnded,
    ChannelKey,
    Countdown,
    DeviceFrame,
    DeviceReceiveChannel,
    DeviceSendChannel,
    Listener,
    RingSpec,
    Transport,
)
from kv_transfer.transports.handshake import READY, Acceptor, Finish, prove_to_receiver, receive_exactly
from kv_transfer.transports.nccl_library import UNIQUE_ID_BYTES
from kv_transfer.transports.nccl_pair import Limits, Nccl, NcclPair, Operation, Stream
from kv_transfer.transports.slots import Posted, ReceiverSlots, SenderSlots
from kv_transfer.transports.tcp import connect, listen

OPENED = b"\x02"
OPEN_TIMEOUT_S = 4.0
_WARM_UP_BYTES = 8
_POLL_S = 0.0001


class Device(Protocol):
    """The device on which frames are written and received."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns uint8 [num_bytes] that no previously launched work still touches. Raises ChannelBroken."""
        ...

    def stream(self) -> Stream:
        """Returns a stream for exclusive use. Raises ChannelBroken if all streams are in use."""
        ...


class NcclTransport(Transport):
    """Two NCCL ranks, with a TCP connection for announcements and liveness."""

    name = "nccl"

    def __init__(self, nccl: Nccl, device: Device, limits: Limits | None = None) -> None:
        self._nccl = nccl
        self._device = device
        self._limits = limits or Limits()

    def listen(self, host: str, port: int) -> Listener:
        """Listens on exactly this address. Port 0 selects a free port."""
        return _NcclListener(host, port, self._make_receive_channel)

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> AnySendChannel:
        """Opens a channel to `host:port`. Returns after the first bytes have passed through it."""
        countdown = Countdown(timeout_s)
        pair = NcclPair(self._nccl, self._device.stream(), self._limits)
        sock = connect(address, countdown)
        try:
            prove_to_receiver(sock, key, countdown)
            if receive_exactly(sock, len(READY), countdown) != READY:
                raise ChannelBroken("the receiver did not get ready")
            unique_id = self._nccl.unique_id()
            staging = self._device.memory(ring.num_slots * ring.slot_bytes + _WARM_UP_BYTES)
            pair.keep(staging)
            sock.sendall(unique_id)
            pair.open(unique_id, 0, timeout_s=min(countdown.remaining_s(), OPEN_TIMEOUT_S))
            pair.wait(pair.send(staging[-_WARM_UP_BYTES:]))
            if receive_exactly(sock, len(OPENED), countdown) != OPENED:
                raise ChannelBroken("the receiver did not open its side")
            return NcclSendChannel(sock, pair, staging, ring)
        except OSError as error:
            _give_up(sock, pair)
            raise ChannelBroken(f"the channel to {address} broke while it was opened: {error}") from error
        except RuntimeError as error:  # a GPU error in torch
            _give_up(sock, pair)
            raise ChannelBroken(f"the GPU failed while the channel was opened: {error}") from error
        except ChannelBroken:
            _give_up(sock, pair)
            raise

    def _make_receive_channel(self, sock: socket.socket, ring: RingSpec, _: ChannelKey) -> AnyReceiveChannel:
        pair = NcclPair(self._nccl, self._device.stream(), self._limits)
        return NcclReceiveChannel(sock, pair, self._device, ring)


class NcclSendChannel(DeviceSendChannel):
    """Writes frames into staging slots, announces them, and sends them."""

    def __init__(self, sock: socket.socket, pair: NcclPair, staging: torch.Tensor, ring: RingSpec) -> None:
        self._slots = SenderSlots(sock, ring)
        self._pair = pair
        self._staging: torch.Tensor | None = staging
        self._ring = ring

    def post(self, seq: int, num_bytes: int, fill: Callable[[torch.Tensor], bytes], *, timeout_s: float) -> None:
        """See DeviceSendChannel."""
        staging = self._staging
        if staging is None:
            raise ChannelBroken("the channel is closed")
        self._pair.check()
        slot = self._slots.take(num_bytes, timeout_s)
        start = slot * self._ring.slot_bytes
        target = staging[start : start + num_bytes]
        digest = fill(target)
        self._slots.post(Posted(seq, slot, num_bytes, digest))
        if num_bytes:
            # Do not wait: the slot returns when the frame has arrived, and the pair's watchdog enforces the timeout.
            self._pair.send(target)

    def shutdown(self) -> None:
        """See SendEnd."""
        self._slots.shutdown()
        self._pair.break_off(ChannelBroken("the channel was shut down"))

    def close(self) -> None:
        """Closes the channel; see SendEnd. The pair retains memory that kernels may touch until they have ended."""
        self._staging = None
        self._slots.close()


@dataclass(frozen=True, slots=True)
class _InFlight:
    """An announced frame. Without an operation, the frame is empty."""

    posted: Posted
    data: torch.Tensor
    operation: Operation | None

    def is_done(self) -> bool:
        return self.operation is None or self.operation.event.is_done()


class NcclReceiveChannel(DeviceReceiveChannel):
    """Owns the ring. Its communicator opens in the background; the first poll waits for it, or raises its error."""

    def __init__(self, sock: socket.socket, pair: NcclPair, device: Device, ring: RingSpec) -> None:
        self._socket = sock
        self._pair = pair
        self._device = device
        self._ring = ring
        self._memory: torch.Tensor | None = None
        self._slots: ReceiverSlots | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._ended: ChannelEnded | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._opened = threading.Event()
        self._opening = threading.Thread(target=self._open, name="tandem-nccl-open", daemon=True)
        self._opening.start()

    def poll(self, *, timeout_s: float) -> DeviceFrame | None:
        """See DeviceReceiveChannel."""
        end = time.monotonic() + timeout_s
        if not self._opened.wait(timeout_s):
            return None
        self._pair.check()
        slots, memory = self._slots, self._memory
        if slots is None or memory is None:
            raise ChannelBroken("the channel is closed")
        while True:
            self._take_announced(slots, memory, end)
            if self._in_flight and self._in_flight[0].is_done():
                self._pair.check()  # an abort also ends pending operations, without delivering data
                arrived = self._in_flight.popleft()
                posted = arrived.posted
                return DeviceFrame(posted.seq, posted.digest, posted.slot, arrived.data)
            self._pair.check()
            if self._ended is not None:
                raise self._ended
            if not self._in_flight and time.monotonic() >= end:
                return None
            if self._in_flight:
                time.sleep(_POLL_S)  # a GPU event cannot wake a thread

    def release(self, slot: int) -> None:
        """See ReceiveEnd."""
        if self._slots is not None:
            self._slots.release(slot)

    def shutdown(self) -> None:
        """See ReceiveEnd."""
        with contextlib.suppress(OSError):  # the socket is already disconnected or closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._pair.break_off(ChannelBroken("the channel was shut down"))

    def close(self) -> None:
        """Closes the channel; see ReceiveEnd. The pair retains memory that kernels may touch until they have ended."""
        self._in_flight.clear()
        with self._lock:
            self._is_closed = True
            self._memory = None
            if self._opened.is_set():  # otherwise the opening thread, which still reads the socket, closes it
                self._socket.close()

    def _take_announced(self, slots: ReceiverSlots, memory: torch.Tensor, end: float) -> None:
        """Launches a receive for every announced frame. Waits for an announcement only if no frame is in flight."""
        while self._ended is None:
            wait_s = 0.0 if self._in_flight else max(0.0, end - time.monotonic())
            try:
                posted = slots.next(wait_s)
            except ChannelEnded as ended:
                self._ended = ChannelEnded(ended.message)
                if any(not each.is_done() for each in self._in_flight):
                    self._pair.break_off(ChannelBroken("the sender closed the channel in the middle of a frame"))
                return
            if posted is None:
                return
            start = posted.slot * self._ring.slot_bytes
            data = memory[start : start + posted.num_bytes]
            operation = self._pair.receive(data) if posted.num_bytes else None
            self._in_flight.append(_InFlight(posted, data, operation))

    def _open(self) -> None:
        try:
            countdown = Countdown(OPEN_TIMEOUT_S)
            self._socket.settimeout(countdown.remaining_s())
            self._socket.sendall(READY)
            unique_id = receive_exactly(self._socket, UNIQUE_ID_BYTES, countdown)
            memory = self._device.memory(self._ring.num_slots * self._ring.slot_bytes + _WARM_UP_BYTES)
            self._pair.keep(memory)
            self._pair.open(unique_id, 1, timeout_s=countdown.remaining_s())
            self._pair.wait(self._pair.receive(memory[-_WARM_UP_BYTES:]))
            self._socket.sendall(OPENED)
            with self._lock:
                if not self._is_closed:  # the sender is ready, and may already have finished and left
                    self._memory = memory
                    self._slots = ReceiverSlots(self._socket, self._ring)
        except OSError as error:
            _give_up(self._socket, self._pair, ChannelBroken(f"the channel broke while it was opened: {error}"))
        except RuntimeError as error:  # a GPU error in torch
            _give_up(self._socket, self._pair, ChannelBroken(f"the GPU failed: {error}"))
        except ChannelBroken as error:
            _give_up(self._socket, self._pair, error)
        finally:
            with self._lock:
                self._opened.set()
                if self._is_closed:
                    self._socket.close()


class _NcclListener(Listener):
    def __init__(self, host: str, port: int, finish: Finish) -> None:
        sock = listen(host, port)
        self._address: tuple[str, int] = sock.getsockname()[:2]
        self._acceptor = Acceptor(sock, finish, name=f"nccl-{self._address[1]}")

    @property
    def address(self) -> str:
        host, port = self._address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        return self._acceptor.expect(key, ring)

    def close(self) -> None:
        self._acceptor.close()


def _give_up(sock: socket.socket, pair: NcclPair, error: ChannelBroken | None = None) -> None:
    pair.break_off(error or ChannelBroken("the channel could not be opened"))
    sock.close()
