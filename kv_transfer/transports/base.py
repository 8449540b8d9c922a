"""What a payload path is: a ring of slots at the receiver, filled from the other side one frame at a time.

A channel is one ordered queue between two workers. Frames arrive whole, in order and once, or the channel is broken;
a broken channel is closed and never used again. It knows neither transfers nor pages: buffers go in, frames come out.

There are two kinds, which differ in where the ring is. A host channel takes flat buffers and copies them; a device
channel lets its user write each frame straight into a slot on the GPU, so that gathering is the only copy.
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
"""A flat, contiguous piece of memory."""

MAX_RING_BYTES = 2**30


class ChannelBroken(TransferFailed):
    """The channel failed and must be dropped: its peer is gone, stalled, or not to be trusted."""


class ChannelEnded(ChannelBroken):
    """The other side closed the channel, between two frames: it left, or its process ended."""


class ChannelTimeout(ChannelBroken, TransferStalled):
    """The other side did not move in time."""


class ChannelNotConnected(ChannelBroken):
    """No connection to the receiver's payload port could be opened."""


class LargePacketsLost(ChannelBroken):
    """Small packets reach the receiver, and full-size packets do not: the path's MTU is smaller than the sender's."""


@dataclass(frozen=True, slots=True)
class RingSpec:
    """Size of the receiving ring: how many slots may be in flight, and the bytes of one."""

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.slot_bytes < 1 or self.num_slots * self.slot_bytes > MAX_RING_BYTES:
            raise ChannelBroken(f"a ring of {self.num_slots} slots of {self.slot_bytes} bytes is out of bounds")


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """The right to open one channel once.

    `channel_id` names it, 16 bytes; `token` is proven by HMAC and never sent; `binding` is what else both sides must
    agree on (incarnations, layout, protocol version), so that a token cannot serve another pair. `padding_bytes` is the
    size of the padding that follows the sender's proof (0 sends none).
    """

    channel_id: bytes
    token: bytes
    binding: bytes
    padding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that waits in a ring slot. `data` is the slot's memory: valid until the slot is released.

    `digest` is what the sender claims; nothing was verified.
    """

    seq: int
    digest: bytes
    slot: int
    data: Bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the frame."""
        return self.data.size


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """As Frame, in a ring on a GPU: `data` is uint8 [bytes] there, has arrived, and may be read on any stream."""

    seq: int
    digest: bytes
    slot: int
    data: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the frame."""
        return self.data.numel()


class SendEnd(ABC):
    """The sending end of either kind. One thread posts; `shutdown` may come from any thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it for both sides and wake all that wait in it. Idempotent, does not block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. Only after `shutdown`, when no thread uses it. Idempotent."""


class ReceiveEnd(ABC):
    """The receiving end of either kind. One thread polls; `release` and `shutdown` may come from any thread."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Let the slot be filled again. Its memory must not be read from now on. Never raises on a broken channel."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it for both sides and wake all that wait in it. Idempotent, does not block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. Only after `shutdown`, when no thread uses it. Idempotent."""


class SendChannel(SendEnd):
    """The sending end of a host channel."""

    @abstractmethod
    def post(self, seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        """Send the buffers as one frame; when it returns, they are no longer read.

        Together they must fit into one slot. Raises ChannelTimeout if nothing moved for `timeout_s`, ChannelBroken
        if the peer is gone; after either the channel is of no more use.
        """


class ReceiveChannel(ReceiveEnd):
    """The receiving end of a host channel."""

    @abstractmethod
    def poll(self, *, timeout_s: float) -> Frame | None:
        """Return the next frame, or None if none came within `timeout_s`. Raises ChannelBroken.

        A frame that has begun to arrive may take longer, as long as it moves.
        """


class DeviceSendChannel(SendEnd):
    """The sending end of a device channel."""

    @abstractmethod
    def post(self, seq: int, num_bytes: int, fill: Callable[[torch.Tensor], bytes], *, timeout_s: float) -> None:
        """Send `num_bytes`, at most a slot, as one frame.

        `fill(target)` writes them into uint8 [num_bytes] on the GPU and returns their digest; when it returns, they
        have been written. Raises ChannelTimeout if nothing moved for `timeout_s`, ChannelBroken if the peer is gone,
        and what `fill` raises; after any of them the channel is of no more use.
        """


class DeviceReceiveChannel(ReceiveEnd):
    """The receiving end of a device channel."""

    @abstractmethod
    def poll(self, *, timeout_s: float) -> DeviceFrame | None:
        """As ReceiveChannel.poll."""


AnySendChannel: TypeAlias = SendChannel | DeviceSendChannel
AnyReceiveChannel: TypeAlias = ReceiveChannel | DeviceReceiveChannel


class Listener(ABC):
    """Where a receiver's channels of one kind are opened."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where a sender opens the channel."""

    @abstractmethod
    def expect(self, key: ChannelKey, ring: RingSpec) -> Future[AnyReceiveChannel]:
        """Let the holder of this key open one channel; cancel the future to withdraw it."""

    @abstractmethod
    def close(self) -> None:
        """Accept no more. Channels that are open stay open."""


class Transport(ABC):
    """One kind of channel."""

    name: str

    @abstractmethod
    def listen(self, host: str, port: int) -> Listener:
        """Start a listener. Raises OSError. Kinds without an address of their own ignore host and port."""

    @abstractmethod
    def open(self, address: str, key: ChannelKey, ring: RingSpec, *, timeout_s: float) -> AnySendChannel:
        """Open a channel within `timeout_s`. Raises ChannelBroken. Blocks: not for an event loop's thread."""


class Countdown:
    """Time that is left of a limit given in seconds."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def remaining_s(self) -> float:
        """Return what is left. Raises ChannelTimeout when nothing is."""
        remaining_s = self._end - time.monotonic()
        if remaining_s <= 0:
            raise ChannelTimeout("the other side of the channel did not move in time")
        return remaining_s
