"""Measures the channels between two workers: soon after their first Link, and again once the measurement is old.

The sender opens each channel that both workers have, and posts rounds of dummy frames. It times each round until the
receiver reports that it has copied the frames out of its ring. The first round is tiny and shows the latency. Later
rounds grow as long as one takes at most `SLOW_ROUND_S`, so a slow link is measured without being saturated. The best of
the largest rounds counts, because on a busy machine the other rounds reflect the machine's load. A channel that fails
to open is reported with its error and skipped.

Depends on the channels and on the messages of the Link's `Probe`, not on pages or transfers.
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
"""Size of the largest round, in bytes."""
RETRY_BYTES = 2 * 2**20
"""Size of the largest round when a link in use is probed again, in bytes."""
PING_BYTES, FIRST_BYTES, GROWTH = 2048, 128 * 1024, 4
"""Sizes of the first and the second round, in bytes, and the factor by which each later round grows."""
NUM_ROUNDS = 3
"""Number of rounds of the largest size."""
SLOW_ROUND_S = 0.1
"""Longest duration of a round, in seconds. A larger round is skipped if it would take longer.

One full-size round that takes longer is reliable enough on its own.
"""
RISING = 1.5
"""Growth of the marginal rate between rounds above which a connection has not yet reached its full rate."""
LIMIT_S = 2.0
"""Time limit for measuring all channels of a pair, in seconds. `OPENING_S` extends it for channels that open slowly."""
OPENING_S = {"nccl": 4.0}
STALL_S = 1.0
AFTER_S = 5.0
"""Delay before the channels of a new Link are measured, in seconds: the transfer that needed the Link goes first."""
VALID_S = 600.0
"""How long a measurement is used for the Links of a pair, in seconds."""

_Call = grpc.aio.StreamStreamCall[link_pb2.LinkMessage, link_pb2.LinkMessage]
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Measured:
    """Measured rounds of a pair's channels, and the errors of the channels that failed. `rounds` are sorted by size."""

    rounds: dict[str, list[Carried]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """The best rate of each channel."""
        return {name: max(one.num_bytes / one.time_s for one in seen) for name, seen in self.rounds.items()}

    def teach(self, opinion: LinkOpinion, transport: str, now_s: float) -> None:
        """Updates the estimate of the pair's link with the measurement of the channel in use."""
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
    """Measures the channels that the hello offers, over `Probe` calls that `begin` opens.

    The largest round has `most_bytes`, or `ROUND_BYTES` if it is None. Returns the results so far when the time limit
    is reached. Raises the receiver's refusal if it rejects the pair as a whole, and gRPC's error if the receiver is
    unreachable.
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
    """Returns the bytes of the next round.

    Returns None if the measurement is complete, or the link too slow for more rounds.
    """
    if len(seen) < 2:
        return min(FIRST_BYTES if seen else PING_BYTES, most_bytes)
    before, last = seen[-2:]
    if last.num_bytes >= most_bytes:
        return full_round([one for one in seen if one.num_bytes >= most_bytes], most_bytes)
    larger = min(GROWTH * last.num_bytes, most_bytes)
    expected_s = last.time_s + (larger - last.num_bytes) / _more_per_s(before, last)
    # On a long round trip, small rounds mostly wait for acknowledgements. Only larger rounds show the rate.
    is_far = last.time_s < LIMIT_S / 4 and (is_rising(seen) or (len(seen) == 2 and last.time_s < 8 * before.time_s))
    return larger if expected_s <= SLOW_ROUND_S or is_far else None


def full_round(seen: Sequence[Carried], most_bytes: int) -> int | None:
    """Returns the bytes of the next round, of the largest size. Returns None if the measurement is complete."""
    is_slow = bool(seen) and seen[-1].time_s > SLOW_ROUND_S
    return None if is_slow or len(seen) >= NUM_ROUNDS else most_bytes


def is_rising(seen: Sequence[Carried]) -> bool:
    """Returns whether the marginal rate grew in the last round, so that a larger round would be faster still."""
    if len(seen) < 3 or seen[-1].num_bytes == seen[-2].num_bytes:
        return False
    return _more_per_s(seen[-2], seen[-1]) > RISING * _more_per_s(seen[-3], seen[-2])


def _more_per_s(smaller: Carried, larger: Carried) -> float:
    more_s = larger.time_s - smaller.time_s
    return (larger.num_bytes - smaller.num_bytes) / max(more_s, larger.time_s / 100)


class _Probe:
    """The measurement of one pair. `left` lists the channels that have not been tried."""

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
        """Measures the channels in sequence.

        Stops at the first that fails to open, because the receiver still waits for it.
        """
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
        """Returns the receiver's acknowledgement, or None if both workers have no further channel in common."""
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
        # A device receiver allocates memory for the first frame, and no later frame may be larger.
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
        except (ChannelBroken, RuntimeError) as error:  # RuntimeError: torch is out of GPU memory
            self.measured.rounds.pop(ack.transport, None)
            self.measured.failures[ack.transport] = error.message if isinstance(error, ChannelBroken) else str(error)
        finally:
            channel.shutdown()
            if posting is None or posting.done():
                channel.close()
            else:
                # The thread is about to leave the channel.
                posting.add_done_callback(lambda done: (done.exception(), channel.close()))


def frame_bytes(ring: RingSpec) -> int:
    """Returns the size of a probe's largest frame, in bytes: a whole slot, but at most one round."""
    return min(ring.slot_bytes, ROUND_BYTES)


def num_frames(ring: RingSpec) -> int:
    """Returns the number of frames in a round, which does not depend on their size. Both sides count to it."""
    return max(1, ROUND_BYTES // frame_bytes(ring))


def post_round(channel: AnySendChannel, ring: RingSpec, first_seq: int, num_bytes: int) -> None:
    """Posts one round of frames, each of `num_bytes` bytes. Raises ChannelBroken."""
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
    """Copies frames out of the ring until the sender ends the channel or falls silent, then closes the channel.

    Calls `on_round` with the bytes of each round.
    """
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
    """Receives rounds in a thread, and yields a message for each until the channel ends.

    Closing the iterator ends the channel.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[int | None] = asyncio.Queue()

    def tell(num_bytes: int | None) -> None:
        try:
            loop.call_soon_threadsafe(told.put_nowait, num_bytes)
        except RuntimeError:
            return  # the event loop is closed, so no task waits for the result

    taking = loop.run_in_executor(None, take_rounds, channel, ring, tell)
    taking.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (num_bytes := await told.get()) is not None:
            yield to_wire(Probed(num_bytes))
    finally:
        channel.shutdown()


class _Stream:
    """The CUDA stream for one thread's copies. On the default stream they would wait for the engine's work."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def of(self, tensor: torch.Tensor) -> Iterator[None]:
        """Runs the copies of its body on this stream if the tensor is on a GPU. Waits for them on exit."""
        if tensor.device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
