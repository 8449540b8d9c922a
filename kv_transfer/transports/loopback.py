"""Channel between two ends in one process, for tests and for a pool that hands over to itself.

It follows the rules of the real channels: a bounded ring, a copy into it, single-use keys, and a shutdown that both
sides notice.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError

import numpy as np

from kv_transfer.transports.base import (
    AnyReceiveChannel,
    Bytes,
    ChannelBroken,
    ChannelEnded,
    ChannelKey,
    ChannelTimeout,
    Frame,
    Listener,
    ReceiveChannel,
    RingSpec,
    SendChannel,
    Transport,
)

_listeners: dict[str, _LoopbackListener] = {}
_listeners_lock = threading.Lock()


class LoopbackTransport(Transport):
    """Channels in the memory of this process."""

    name = "loopback"

    def listen(self, host: str, port: int) -> Listener:
        """Starts a listener that only this process can find."""
        return _LoopbackListener()

    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> SendChannel:
        """Opens a channel within this process."""
        with _listeners_lock:
            listener = _listeners.get(address)
        if listener is None:
            raise ChannelBroken("no such listener in this process")
        return listener.connect(key, ring)


class _Ring:
    """State that both ends share."""

    def __init__(self, spec: RingSpec) -> None:
        self.spec = spec
        self.memory: Bytes = np.zeros((spec.num_slots, spec.slot_bytes), dtype=np.uint8)
        self.changed = threading.Condition()
        self.free = list(range(spec.num_slots))
        self.posted: deque[Frame] = deque()
        self.is_shut = False

    def shutdown(self) -> None:
        with self.changed:
            self.is_shut = True
            self.changed.notify_all()


class LoopbackSendChannel(SendChannel):
    """Copies frames into the shared ring."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring

    def post(self, seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        """See SendChannel."""
        num_bytes = sum(buffer.size for buffer in buffers)
        if num_bytes > self._ring.spec.slot_bytes:
            raise ValueError("the buffers of a frame do not fit into one slot")
        with self._ring.changed:
            self._ring.changed.wait_for(lambda: self._ring.free or self._ring.is_shut, timeout_s)
            if self._ring.is_shut:
                raise ChannelBroken("the channel was shut down")
            if not self._ring.free:
                raise ChannelTimeout("the receiver released no ring slot in time")
            slot = self._ring.free.pop()
        start = 0
        for buffer in buffers:
            self._ring.memory[slot, start : start + buffer.size] = buffer
            start += buffer.size
        with self._ring.changed:
            self._ring.posted.append(Frame(seq, digest, slot, self._ring.memory[slot, :num_bytes]))
            self._ring.changed.notify_all()

    def shutdown(self) -> None:
        """See SendChannel."""
        self._ring.shutdown()

    def close(self) -> None:
        """See SendChannel."""
        self._ring.shutdown()


class LoopbackReceiveChannel(ReceiveChannel):
    """Returns frames from the shared ring."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring

    def poll(self, *, timeout_s: float) -> Frame | None:
        """See ReceiveChannel."""
        deadline = time.monotonic() + timeout_s
        with self._ring.changed:
            while not self._ring.posted:
                if self._ring.is_shut:
                    raise ChannelEnded("the channel was shut down")
                if not self._ring.changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            return self._ring.posted.popleft()

    def release(self, slot: int) -> None:
        """See ReceiveChannel."""
        with self._ring.changed:
            if slot in self._ring.free:
                raise ValueError(f"ring slot {slot} was released twice")
            self._ring.free.append(slot)
            self._ring.changed.notify_all()

    def shutdown(self) -> None:
        """See ReceiveChannel."""
        self._ring.shutdown()

    def close(self) -> None:
        """See ReceiveChannel."""
        self._ring.shutdown()


class _LoopbackListener(Listener):
    def __init__(self) -> None:
        self._address = f"loopback-{secrets.token_hex(16)}"
        self._lock = threading.Lock()
        self._expected: dict[bytes, tuple[ChannelKey, Future[AnyReceiveChannel]]] = {}
        with _listeners_lock:
            _listeners[self._address] = self

    @property
    def address(self) -> str:
        return self._address

    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        channel: Future[AnyReceiveChannel] = Future()
        with self._lock:
            self._expected[key.channel_id] = (key, channel)
        return channel

    def connect(self, key: ChannelKey, ring: RingSpec) -> SendChannel:
        with self._lock:
            expected, channel = self._expected.pop(key.channel_id, (None, None))
        if expected is None or channel is None:
            raise ChannelBroken("no channel is expected under this id")
        if not hmac.compare_digest(expected.token, key.token) or expected.binding != key.binding:
            error = ChannelBroken("the sender did not prove that it holds the channel's token")
            if channel.set_running_or_notify_cancel():
                channel.set_exception(error)
            raise error
        shared = _Ring(ring)
        try:
            channel.set_result(LoopbackReceiveChannel(shared))
        except InvalidStateError:
            raise ChannelBroken("the channel was withdrawn") from None
        return LoopbackSendChannel(shared)

    def close(self) -> None:
        with _listeners_lock:
            _listeners.pop(self._address, None)
        with self._lock:
            withdrawn = [channel for _, channel in self._expected.values()]
            self._expected.clear()
        for channel in withdrawn:
            channel.cancel()
