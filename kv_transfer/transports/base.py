"""The interface of a payload path: a ring of slots at the receiver, filled by the sender one frame at a time.

A channel is one ordered queue between two workers. Frames arrive whole, in order, and exactly once, or the channel is
broken. A broken channel is closed and never used again. A channel does not interpret transfers or pages: it carries
buffers as frames.

The two kinds differ in the location of the ring. A host channel accepts flat buffers and copies them. A device channel
lets the caller write each frame directly into a slot on the GPU, so that gathering is the only copy.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from services.runtime.errors import TransferFailed, TransferStalled

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A flat, contiguous array of bytes."""

MAX_RING_BYTES = 2**30


class ChannelBroken(TransferFailed):
    """The channel failed and must be dropped: its peer disconnected, stalled, or cannot be trusted."""


class ChannelEnded(ChannelBroken):
    """The other side closed the channel between two frames: it closed its Link, or its process ended."""


class ChannelTimeout(ChannelBroken, TransferStalled):
    """The other side made no progress in time."""


class ChannelNotConnected(ChannelBroken):
    """No connection to the receiver's payload port could be opened."""


class LargePacketsLost(ChannelBroken):
    """Small packets reach the receiver, but full-size packets do not: the path's MTU is smaller than the sender's."""


@dataclass(frozen=True, slots=True)
class RingSpec:
    """Size of the receiving ring: the number of slots that may be in flight, and the bytes in each slot."""

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.slot_bytes < 1 or self.num_slots * self.slot_bytes > MAX_RING_BYTES:
            raise ChannelBroken(f"a ring of {self.num_slots} slots of {self.slot_bytes} bytes is out of bounds")


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """The right to open one channel once.

    `channel_id` identifies the channel, 16 bytes. `token` is proven by HMAC and never sent. `binding` contains
    everything else that both sides must agree on (incarnations, layout, protocol version), so that a token is useless
    for another pair. `padding_bytes` is the size of the padding after the sender's proof, or 0 for no padding.
    """

    channel_id: bytes
    token: bytes
    binding: bytes
    padding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that waits in a ring slot. `data` is the slot's memory, valid until the slot is released.

    `digest` is the sender's claim and has not been verified.
    """

    seq: int
    digest: bytes
    slot: int
    data: Bytes

    @property
    def num_bytes(self) -> int:
        """Size of the frame, in bytes."""
        return self.data.size


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """A frame in a ring on a GPU; see Frame.

    `data` is uint8 [bytes] on the GPU, complete, and readable on any stream.
    """

    seq: int
    digest: bytes
    slot: int
    data: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Size of the frame, in bytes."""
        return self.data.numel()


class SendEnd(ABC):
    """The sending end of either kind. One thread posts; any thread may call `shutdown`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the channel for both sides and wakes all threads that wait in it. Idempotent, does not block."""

    @abstractmethod
    def close(self) -> None:
        """Frees the channel's resources. Call only after `shutdown`, when no thread uses the channel. Idempotent."""


class ReceiveEnd(ABC):
    """The receiving end of either kind. One thread polls; any thread may call `release` and `shutdown`."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Frees the slot for a new frame. Its memory must not be read afterwards. Never raises on a broken channel."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the channel for both sides and wakes all threads that wait in it. Idempotent, does not block."""

    @abstractmethod
    def close(self) -> None:
        """Frees the channel's resources. Call only after `shutdown`, when no thread uses the channel. Idempotent."""


class SendChannel(SendEnd):
    """The sending end of a host channel."""

    @abstractmethod
    def post(self, seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        """Sends the buffers as one frame. They are no longer read once it returns.

        Together they must fit into one slot. Raises ChannelTimeout if there was no progress for `timeout_s`, and
        ChannelBroken if the peer disconnected. After either error the channel is unusable.
        """


class ReceiveChannel(ReceiveEnd):
    """The receiving end of a host channel."""

    @abstractmethod
    def poll(self, *, timeout_s: float) -> Frame | None:
        """Returns the next frame, or None if none arrived within `timeout_s`. Raises ChannelBroken.

        A frame that has started to arrive may take longer, as long as it makes progress.
        """


class DeviceSendChannel(SendEnd):
    """The sending end of a device channel."""

    @abstractmethod
    def post(self, seq: int, num_bytes: int, fill: Callable[[torch.Tensor], bytes], *, timeout_s: float) -> None:
        """Sends `num_bytes`, at most a slot, as one frame.

        `fill(target)` writes the bytes into uint8 [num_bytes] on the GPU and returns their digest once they are
        written. Raises ChannelTimeout if there was no progress for `timeout_s`, ChannelBroken if the peer disconnected,
        and the errors of `fill`. After any error the channel is unusable.
        """


class DeviceReceiveChannel(ReceiveEnd):
    """The receiving end of a device channel."""

    @abstractmethod
    def poll(self, *, timeout_s: float) -> DeviceFrame | None:
        """Returns the next frame; see ReceiveChannel.poll."""


AnySendChannel: TypeAlias = SendChannel | DeviceSendChannel
AnyReceiveChannel: TypeAlias = ReceiveChannel | DeviceReceiveChannel


class Listener(ABC):
    """The address at which senders open a receiver's channels of one kind."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address for senders."""

    @abstractmethod
    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        """Allows the holder of this key to open one channel. Cancel the future to withdraw the permission."""

    @abstractmethod
    def close(self) -> None:
        """Stops accepting channels. Open channels stay open."""


class Transport(ABC):
    """One kind of channel."""

    name: str

    @abstractmethod
    def listen(self, host: str, port: int) -> Listener:
        """Starts a listener. Raises OSError. Transports without a network address ignore host and port."""

    @abstractmethod
    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> AnySendChannel:
        """Opens a channel within `timeout_s`. Raises ChannelBroken.

        Blocks, so do not call it on an event loop's thread.
        """


class Countdown:
    """The remaining time of a limit given in seconds."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def remaining_s(self) -> float:
        """Returns the remaining time. Raises ChannelTimeout if the time is over."""
        remaining_s = self._end - time.monotonic()
        if remaining_s <= 0:
            raise ChannelTimeout("the other side of the channel did not move in time")
        return remaining_s
