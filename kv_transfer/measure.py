"""What the channels between two workers carry, measured soon after their first Link and again when that is long ago.

The sender opens each channel that both have, posts rounds of frames that mean nothing, and takes the time until the
receiver says that it has copied them out of its ring. The first round is tiny and tells the latency; the next ones
grow as long as one takes no more than `SLOW_ROUND_S`, so that a slow link is measured without being filled. The best of
the largest rounds counts, as on a busy machine the others say more about the machine. A channel that cannot be
opened is named with its error and left out.

Knows the channels and the messages of the Link's `Probe`, and neither pages nor transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
import torch

from kv_transfer.protocol.failures import error_from
from kv_transfer.protocol.messages import DIGEST_BYTES, Abort, Hello, HelloAck, Probed
from kv_transfer.transports.base import (
    AnyReceiveChannel,
    AnySendChannel,
    ChannelBroken,
    DeviceFrame,
    DeviceSendChannel,
    RingSpec,
)
from kv_transfer.wire import MalformedMessage, from_wire, to_wire
from protos import link_pb2
from services.runtime.errors import TransferFailed
from services.runtime.rpc import write_if_open
from services.scheduling.links import Carried, LinkOpinion

ROUND_BYTES = 32 * 2**20
"""The largest round."""
RETRY_BYTES = 2 * 2**20
"""Bytes where a link that is in use is only tried again."""
PING_BYTES, FIRST_BYTES, GROWTH = 2048, 128 * 1024, 4
"""The first round, the second, and how many times larger each further one is than the one before it."""
NUM_ROUNDS = 3
"""Rounds of the largest size."""
SLOW_ROUND_S = 0.1
"""A round that would take longer does not follow; one that did is long enough to be believed."""
RISING = 1.5
"""A connection that has carried this many times more in each second than a moment ago has not shown all it can do."""
LIMIT_S = 2.0
"""For measuring all channels of a pair, beside the time that one may take to open (NCCL's does take some)."""
OPENING_S = {"nccl": 4.0}
STALL_S = 1.0
AFTER_S = 5.0
"""Time after the first Link to a receiver was made until the transfer that it was made for has what it wanted."""
VALID_S = 600.0
"""How long a measurement is used for the Links of a pair."""

_Call = grpc.aio.StreamStreamCall[link_pb2.LinkMessage, link_pb2.LinkMessage]
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Measured:
    """What was measured of a pair's channels, and why others could not be. `rounds` are in the order of their sizes."""

    rounds: dict[str, list[Carried]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """The best rate of each channel."""
        return {name: max(one.num_bytes / one.time_s for one in seen) for name, seen in self.rounds.items()}

    def teach(self, opinion: LinkOpinion, transport: str, now_s: float) -> None:
        """Has the meter of the pair's link learn from what was measured of the channel in use."""
        seen = self.rounds.get(transport, [])
        if not seen:
            return
        if seen[0].num_bytes < FIRST_BYTES:
            opinion.observe(seen[0].num_bytes, seen[0].time_s, now_s)
        largest = [one for one in seen if one.num_bytes == seen[-1].num_bytes]
        best = min(largest, key=lambda one: one.time_s)
        if is_rising(seen):
            opinion.observe_at_least(best.num_bytes, best.time_s, now_s)
        else:
            opinion.observe(best.num_bytes, best.time_s, now_s)

    def __str__(self) -> str:
        rates = [f"{name} {rate / 1e9:.2f} GB/s" for name, rate in self.bytes_per_s.items()]
        return ", ".join(rates + [f"{name} failed ({why})" for name, why in self.failures.items()])


async def measure(
    begin: Callable[[], Awaitable[_Call]],
    hello: Hello,
    open_channel: Callable[[Hello, HelloAck], Awaitable[AnySendChannel]],
    *,
    most_bytes: int | None = None,
) -> Measured:
    """Measure the channels that the hello offers, over calls of `Probe` that `begin` makes.

    No round is larger than `most_bytes` (None: `ROUND_BYTES`).

    Returns what there is when the time is over. Raises the receiver's refusal where it refuses the pair as a whole,
    and grpc's error where it cannot be reached.
    """
    probe = _Probe(hello, open_channel, most_bytes=most_bytes or ROUND_BYTES)
    try:
        async with asyncio.timeout(LIMIT_S + max((OPENING_S.get(name, 0.0) for name in hello.transports), default=0.0)):
            while probe.left:
                call = await begin()
                try:
                    await probe.run(call)
                finally:
                    call.cancel()
    except TimeoutError:
        logger.info("no time was left to measure the channels %s", ", ".join(probe.left))
    return probe.measured


def next_round(seen: Sequence[Carried], most_bytes: int) -> int | None:
    """Bytes of the round that follows those that were seen; None: enough is known, or the link is too slow for more."""
    if len(seen) < 2:
        return min(FIRST_BYTES if seen else PING_BYTES, most_bytes)
    before, last = seen[-2:]
    if last.num_bytes >= most_bytes:
        return full_round([one for one in seen if one.num_bytes >= most_bytes], most_bytes)
    larger = min(GROWTH * last.num_bytes, most_bytes)
    expected_s = last.time_s + (larger - last.num_bytes) / _more_per_s(before, last)
    # Far away a round waits for acknowledgements first, and the rate shows with the larger ones only.
    is_far = last.time_s < LIMIT_S / 4 and (is_rising(seen) or (len(seen) == 2 and last.time_s < 8 * before.time_s))
    return larger if expected_s <= SLOW_ROUND_S or is_far else None


def full_round(seen: Sequence[Carried], most_bytes: int) -> int | None:
    """Returns the bytes of a full round, where all rounds are of one size."""
    is_slow = bool(seen) and seen[-1].time_s > SLOW_ROUND_S
    return None if is_slow or len(seen) >= NUM_ROUNDS else most_bytes


def is_rising(seen: Sequence[Carried]) -> bool:
    """Whether the last round was faster for its bytes than the one before: a larger one would be faster still."""
    if len(seen) < 3 or seen[-1].num_bytes == seen[-2].num_bytes:
        return False
    return _more_per_s(seen[-2], seen[-1]) > RISING * _more_per_s(seen[-3], seen[-2])


def _more_per_s(smaller: Carried, larger: Carried) -> float:
    more_s = larger.time_s - smaller.time_s
    return (larger.num_bytes - smaller.num_bytes) / max(more_s, larger.time_s / 100)


class _Probe:
    """The measurement of one pair. `left` are the channels that were not tried yet."""

    def __init__(
        self,
        hello: Hello,
        open_channel: Callable[[Hello, HelloAck], Awaitable[AnySendChannel]],
        *,
        most_bytes: int,
    ) -> None:
        self.left = hello.transports
        self._most_bytes = most_bytes
        self.measured = Measured()
        self._hello = hello
        self._open_channel = open_channel

    async def run(self, call: _Call) -> None:
        """Measure one channel after the other, up to the first that cannot be opened: the receiver waits for that."""
        while self.left:
            hello = replace(self._hello, transports=self.left)
            ack = await self._greet(call, hello)
            if ack is None:
                self.left = ()
                return
            self.left = tuple(name for name in self.left if name != ack.transport)
            try:
                channel = await self._open_channel(hello, ack)
            except TransferFailed as error:
                self.measured.failures[ack.transport] = error.message
                return
            await self._time_rounds(call, ack, channel)

    async def _greet(self, call: _Call, hello: Hello) -> HelloAck | None:
        """Return the answer to a hello, None where no channel is left that both have."""
        await write_if_open(call, to_wire(hello))
        wire = await call.read()
        if not isinstance(wire, link_pb2.LinkMessage):
            raise TransferFailed("the receiver ended the probe")
        match from_wire(wire):
            case HelloAck() as ack if ack.transport in hello.transports:
                return ack
            case Abort(id=None) as refusal:
                if hello.transports == self._hello.transports:
                    raise error_from(refusal)
                return None
            case _:
                raise MalformedMessage("the receiver did not introduce itself")

    async def _time_rounds(self, call: _Call, ack: HelloAck, channel: AnySendChannel) -> None:
        ring = RingSpec(ack.ring_slots, ack.ring_slot_bytes)
        loop = asyncio.get_running_loop()
        posting: asyncio.Future[None] | None = None
        most = max(1, min(frame_bytes(ring), self._most_bytes // num_frames(ring))) * num_frames(ring)
        # A receiver of a device's frames makes room for the first one, and none may be larger.
        choose = full_round if isinstance(channel, DeviceSendChannel) else next_round
        seen: list[Carried] = []
        num_posted = 0
        try:
            while (round_bytes := choose(seen, most)) is not None:
                each = max(1, round_bytes // num_frames(ring))
                started = time.perf_counter()
                posting = loop.run_in_executor(None, post_round, channel, ring, num_posted, each)
                num_posted += num_frames(ring)
                await asyncio.shield(posting)
                wire = await call.read()
                if not isinstance(wire, link_pb2.LinkMessage) or not isinstance(from_wire(wire), Probed):
                    raise ChannelBroken("the receiver did not say what arrived")
                seen.append(Carried(each * num_frames(ring), max(time.perf_counter() - started, 1e-9)))
                self.measured.rounds[ack.transport] = seen
        except (ChannelBroken, RuntimeError) as error:  # torch's, where a GPU has no memory left
            self.measured.rounds.pop(ack.transport, None)
            self.measured.failures[ack.transport] = error.message if isinstance(error, ChannelBroken) else str(error)
        finally:
            channel.shutdown()
            if posting is None or posting.done():
                channel.close()
            else:
                # The thread is on its way out of the channel.
                posting.add_done_callback(lambda done: (done.exception(), channel.close()))


def frame_bytes(ring: RingSpec) -> int:
    """Return the size of a probe's largest frame: a whole slot, if that is not more than a round."""
    return min(ring.slot_bytes, ROUND_BYTES)


def num_frames(ring: RingSpec) -> int:
    """Return the frames of a round, whatever their size; both sides count them."""
    return max(1, ROUND_BYTES // frame_bytes(ring))


def post_round(channel: AnySendChannel, ring: RingSpec, first_seq: int, num_bytes: int) -> None:
    """Post one round of frames of `num_bytes` bytes together. Raises ChannelBroken."""
    source: torch.Tensor | None = None
    stream = _Stream()

    def fill(target: torch.Tensor) -> bytes:
        nonlocal source
        with stream.of(target):
            if source is None:
                source = torch.zeros_like(target)
            target.copy_(source)
        return bytes(DIGEST_BYTES)

    buffer = np.zeros(num_bytes, dtype=np.uint8)
    for seq in range(first_seq, first_seq + num_frames(ring)):
        if isinstance(channel, DeviceSendChannel):
            channel.post(seq, num_bytes, fill, timeout_s=STALL_S)
        else:
            channel.post(seq, bytes(DIGEST_BYTES), [buffer], timeout_s=STALL_S)


def take_rounds(channel: AnyReceiveChannel, ring: RingSpec, on_round: Callable[[int], None]) -> None:
    """Copy frames out of the ring until the sender ends the channel or goes silent; tell of each round. Closes it."""
    try:
        copy: torch.Tensor | np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        stream = _Stream()
        num_taken = num_bytes = 0
        first_s = STALL_S + max(OPENING_S.values())
        while (frame := channel.poll(timeout_s=STALL_S if num_taken else first_s)) is not None:
            if isinstance(frame, DeviceFrame):
                with stream.of(frame.data):
                    copy = torch.empty_like(frame.data) if not isinstance(copy, torch.Tensor) else copy
                    copy[: frame.num_bytes].copy_(frame.data)
            else:
                copy = np.empty(frame_bytes(ring), dtype=np.uint8) if not isinstance(copy, np.ndarray) else copy
                copy[: frame.num_bytes] = frame.data[: copy.size]
            num_bytes += frame.num_bytes
            channel.release(frame.slot)
            num_taken += 1
            if num_taken % num_frames(ring) == 0:
                on_round(num_bytes)
                num_bytes = 0
    except ChannelBroken:
        return
    finally:
        channel.shutdown()
        channel.close()


async def answer_rounds(channel: AnyReceiveChannel, ring: RingSpec) -> AsyncIterator[link_pb2.LinkMessage]:
    """Take rounds in a thread; yield a message for each, until there are no more. Closing it ends the channel."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[int | None] = asyncio.Queue()

    def tell(num_bytes: int | None) -> None:
        try:
            loop.call_soon_threadsafe(told.put_nowait, num_bytes)
        except RuntimeError:
            return  # the loop is gone, and nobody is left to be told

    taking = loop.run_in_executor(None, take_rounds, channel, ring, tell)
    taking.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (num_bytes := await told.get()) is not None:
            yield to_wire(Probed(num_bytes))
    finally:
        channel.shutdown()


class _Stream:
    """Where one thread's copies on a GPU run: in the default stream they would wait for what the engine computes."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def of(self, tensor: torch.Tensor) -> Iterator[None]:
        """Launch on it what is launched in here, if the tensor is on a GPU; leaving waits for it."""
        if tensor.device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
