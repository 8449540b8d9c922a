"""Frames and messages that are damaged, forged or replayed on the real sockets of a handoff.

Whatever is done to them: it is detected and counted, no wrong page is ever committed, nothing leaks, and the next
transfer works.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import torch

from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.messages import ChunkHeader, Granted, Message, Reserve, Seal, TransferId
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.send_link import SendTransfer
from kv_transfer.transports.shm import ShmSendChannel
from kv_transfer.transports.tcp import TcpSendChannel
from services.runtime.errors import TransferFailed, WorkerUnavailable
from tests.kv_transfer.conftest import Pair, PairMaker, tokens_of
from tests.waiting import HANG_LIMIT_S, until

TRANSPORTS = ("shm", "tcp")
TABLE = [8, 7, 6, 5, 0, 1, 2, 3, 4]  # frames hold pages 8 7 6 5, then 0 1 2 3, then 4
NUM_TOKENS = 140
PAGE_BYTES = 4096
SLOT_BYTES = 20_000
DAMAGED_FRAME = 1
# Long enough for a busy machine, short enough to wait for where a frame that never comes is the damage.
TIMEOUTS = Timeouts(connect_s=30.0, stall_s=2.5)
HEADERS = {"shm": struct.Struct("<QIQ16s"), "tcp": struct.Struct("<QQ16s")}
FAILURES = (TransferFailed, WorkerUnavailable)

# Takes (header, payload) of a frame; what it returns goes out in its place, one after the other.
Damage = Callable[[bytes, bytes], list[tuple[bytes, bytes]]]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class DamagingSocket:
    """Between a sending channel and its socket: every frame passes through `damage` as it is on the wire."""

    def __init__(self, channel: ShmSendChannel | TcpSendChannel, damage: Callable[[int], Damage | None]) -> None:
        self._channel = channel
        self._socket = channel._socket
        self._damage = damage
        self._num_frames = 0

    def sendmsg(self, pieces: list[memoryview], ancillary: list[Any], flags: int) -> int:
        """Sends a whole frame of the TCP channel, as no other way of sending one is left."""
        header, payload = bytes(pieces[0]), b"".join(pieces[1:])
        for new_header, new_payload in self._damaged(header, payload):
            self._socket.sendall(new_header + new_payload)
        return len(header) + len(payload)

    def send(self, message: bytes, flags: int) -> None:
        """Sends the shared memory channel's bell for a slot that has been filled."""
        _, slot, num_bytes, _ = HEADERS["shm"].unpack(message)
        slots, start = self._channel._slots, slot * SLOT_BYTES
        payload = slots[start : start + num_bytes].tobytes()
        for new_header, new_payload in self._damaged(message, payload):
            slots[start : start + len(new_payload)] = bytearray(new_payload)
            self._socket.send(new_header, flags)

    def _damaged(self, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        damage = self._damage(self._num_frames)
        self._num_frames += 1
        return [(header, payload)] if damage is None else damage(header, payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _only(frame: int, damage: Damage) -> Callable[[int], Damage | None]:
    return lambda number: damage if number == frame else None


async def _damage_frames(pair: Pair, damage: Callable[[int], Damage | None]) -> None:
    """From now on, and on this Link only."""
    link = await next(iter(pair.links._links.values()))
    channel = link._opened.channel
    channel._socket = DamagingSocket(channel, damage)  # type: ignore[attr-defined]


def _flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


async def _make(make_pair: PairMaker, transport: str) -> Pair:
    pair = await make_pair(transport, slot_bytes=SLOT_BYTES, timeouts=TIMEOUTS)
    commit = pair.target.commit

    async def commit_what_was_sent(transfer_id: TransferId, **seal: int) -> None:
        arrived = tokens_of(pair.target.pool, pair.target.held[transfer_id], NUM_TOKENS)
        assert torch.equal(arrived, tokens_of(pair.source, TABLE, NUM_TOKENS)), "wrong pages were committed"
        await commit(transfer_id, **seal)

    pair.target.commit = commit_what_was_sent  # type: ignore[method-assign]
    return pair


async def _hand_over(pair: Pair) -> SendTransfer:
    """In one chunk of three frames."""
    transfer = await pair.reserve(NUM_TOKENS)
    transfer.send(0, TABLE)
    await transfer.seal(num_tokens=NUM_TOKENS, first_token_id=7, sampling_position=NUM_TOKENS + 1)
    return transfer


def _count(pair: Pair) -> int:
    return sum(sum(counters.snapshot().values()) for counters in (pair.links.counters, pair.receiver.counters))


async def _fails_and_recovers(pair: Pair) -> None:
    """A transfer is under way that must not succeed; after it everything is as before."""
    with pytest.raises(FAILURES):
        await _hand_over(pair)
    await until(lambda: _count(pair) > 0)
    assert not pair.target.committed, "committed in spite of the damage"
    await pair.wait_all_free()
    await _works_again(pair)


async def _works_again(pair: Pair) -> None:
    """At once, or with the second try where the first one met a Link that was about to end."""
    try:
        transfer = await _hand_over(pair)
    except FAILURES:
        assert pair.links.counters[Reason.LINK_LOST] == 1
        await pair.wait_all_free()
        transfer = await _hand_over(pair)
    pair.assert_arrived(transfer, TABLE, NUM_TOKENS)


async def _each(cases: Iterable[Any], run: Callable[[Any], Awaitable[None]], *, at_once: int = 8) -> None:
    """Run all cases, a few at once: some of them are waits. Tell which of them failed."""
    turns = asyncio.Semaphore(at_once)

    async def one(case: Any) -> None:
        async with turns:
            try:
                async with asyncio.timeout(HANG_LIMIT_S):
                    await run(case)
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(f"case {case}: {error!r}") from error

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(one(case))


# --- bit flips ---


async def test_a_flipped_bit_anywhere_in_a_frame_is_detected(make_pair: PairMaker, transport: str) -> None:
    """One bit of every byte of the header, and bits all over the payload."""
    header_bits = [byte * 8 + random.Random(byte).randrange(8) for byte in range(HEADERS[transport].size)]
    payload_bits = [0, 7, 4 * PAGE_BYTES * 8 - 1, *random.Random(1).sample(range(4 * PAGE_BYTES * 8), 9)]

    async def run(case: tuple[str, int]) -> None:
        part, bit = case

        def damage(header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
            assert len(payload) == 4 * PAGE_BYTES
            if part == "header":
                return [(_flip(header, bit), payload)]
            return [(header, _flip(payload, bit))]

        pair = await _make(make_pair, transport)
        await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
        await _damage_frames(pair, _only(DAMAGED_FRAME, damage))
        await _fails_and_recovers(pair)
        if part == "payload":
            assert pair.receiver.counters.snapshot()["checksum_mismatch"] == 1

    cases = [*(("header", bit) for bit in header_bits), *(("payload", bit) for bit in payload_bits)]
    # Each has a connection to make, for which gRPC allows half a second.
    await _each(cases, run, at_once=4)


# --- forged, cut and replayed frames ---


def _with(transport: str, header: bytes, *, seq: int | None = None, num_bytes: int | None = None) -> bytes:
    fields = list(HEADERS[transport].unpack(header))
    fields[0] = fields[0] if seq is None else seq
    fields[-2] = fields[-2] if num_bytes is None else num_bytes
    return HEADERS[transport].pack(*fields)


def _damages(transport: str) -> dict[str, tuple[Damage, Reason]]:
    def forge(**fields: int) -> Damage:
        return lambda header, payload: [(_with(transport, header, **fields), payload)]

    def shorten(num_bytes: int) -> Damage:
        """A short write that says so: header and payload agree."""
        return lambda header, payload: [(_with(transport, header, num_bytes=num_bytes), payload[:num_bytes])]

    return {
        "frame of an earlier number": (forge(seq=0), Reason.LOST_FRAME),
        "frame of the next number": (forge(seq=2), Reason.LOST_FRAME),
        "frame of a number far away": (forge(seq=2**40), Reason.LOST_FRAME),
        "one page less": (shorten(3 * PAGE_BYTES), Reason.WRONG_SIZE),
        "one byte less": (shorten(4 * PAGE_BYTES - 1), Reason.WRONG_SIZE),
        "one byte": (shorten(1), Reason.WRONG_SIZE),
        "an empty frame": (shorten(0), Reason.SEAL_MISMATCH),
        "larger than a slot": (forge(num_bytes=SLOT_BYTES + 1), Reason.CHANNEL_BROKEN),
        "of no size that there is": (forge(num_bytes=2**64 - 1), Reason.CHANNEL_BROKEN),
        "lost": (lambda header, payload: [], Reason.LOST_FRAME),
        "cut in its header": (lambda header, payload: [(header[:-1], b"")], Reason.CHANNEL_BROKEN),
    }


async def test_a_frame_that_is_forged_or_cut_is_detected(make_pair: PairMaker, transport: str) -> None:
    async def run(case: str) -> None:
        damage, reason = _damages(transport)[case]
        pair = await _make(make_pair, transport)
        await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
        await _damage_frames(pair, _only(DAMAGED_FRAME, damage))
        await _fails_and_recovers(pair)
        if (case, transport) == ("cut in its header", "tcp"):
            # The next frame's first byte was taken for this one's last: only what comes of it is seen.
            return
        assert pair.receiver.counters[reason] >= 1

    await _each(_damages(transport), run)


async def test_a_sender_that_stops_in_the_middle_of_a_frame_is_given_up(make_pair: PairMaker) -> None:
    pair = await _make(make_pair, "tcp")
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    channel = (await next(iter(pair.links._links.values())))._opened.channel

    def stop(header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload[:5000])]

    # Nothing more after it: frames that followed would be taken for the rest.
    await _damage_frames(pair, lambda number: stop if number == 1 else (lambda *_: []) if number > 1 else None)
    assert isinstance(channel, TcpSendChannel)
    await _fails_and_recovers(pair)
    assert pair.receiver.counters[Reason.CHANNEL_BROKEN] == 1


async def test_a_frame_that_nothing_announces_does_not_hold_up_the_channel_for_ever(make_pair: PairMaker) -> None:
    """Though other chunks are announced all the time, and each of them is lost behind it."""
    transport = "tcp"
    pair = await _make(make_pair, transport)
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))

    def withdraw_what_is_not_there(header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(_with(transport, header, seq=2**40, num_bytes=0), b"")]

    await _damage_frames(pair, _only(DAMAGED_FRAME, withdraw_what_is_not_there))
    async with asyncio.timeout(TIMEOUTS.stall_s + 15):
        while not pair.links.counters[Reason.LINK_LOST]:
            with contextlib.suppress(*FAILURES):
                await _hand_over(pair)
            # Slowly, so that what piles up does not fill the channel, which has a limit of its own for that.
            await asyncio.sleep(0.5)
    await pair.wait_all_free()
    await _works_again(pair)


async def test_recorded_frames_that_come_again_are_dropped_and_counted(make_pair: PairMaker) -> None:
    pair = await _make(make_pair, "tcp")
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    recorded: list[tuple[bytes, bytes]] = []

    def record_then_replay(number: int) -> Damage:
        def damage(header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
            if number < 3:
                recorded.append((header, payload))
                return [(header, payload)]
            return [*recorded, (header, payload)]

        return damage

    await _damage_frames(pair, record_then_replay)
    for _ in range(2):
        transfer = await _hand_over(pair)
        pair.assert_arrived(transfer, TABLE, NUM_TOKENS)
    assert pair.receiver.counters.snapshot() == {"replayed_frame": 9}
    await pair.wait_all_free()


async def test_a_slot_that_is_announced_again_ends_the_channel(make_pair: PairMaker) -> None:
    """With shared memory a replay names a slot that is no longer the sender's; that is no accident of a network."""
    pair = await _make(make_pair, "shm")
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    await _damage_frames(pair, _only(DAMAGED_FRAME, lambda header, payload: [(header, payload), (header, payload)]))
    with contextlib.suppress(*FAILURES):
        transfer = await _hand_over(pair)
        pair.assert_arrived(transfer, TABLE, NUM_TOKENS)
        pair.target.allocator.release(pair.target.committed.pop(transfer.id))
    assert not pair.target.committed
    await until(lambda: _count(pair) > 0)
    await pair.wait_all_free()
    await _works_again(pair)


@pytest.mark.parametrize("same_link", [True, False])
async def test_recorded_frames_with_new_numbers_are_not_what_was_sealed(
    make_pair: PairMaker, transport: str, *, same_link: bool
) -> None:
    """Each frame is right in itself, of another transfer: the seal, which goes another way, does not fit it."""
    pair = await _make(make_pair, transport)
    other_table = [20, 21, 22, 23, 24, 25, 26, 27, 28]
    recorded: list[tuple[bytes, bytes]] = []

    def record(header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        recorded.append((header, payload))
        return [(header, payload)]

    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    await _damage_frames(pair, lambda _: record)
    transfer = await pair.reserve(NUM_TOKENS)
    transfer.send(0, other_table)
    await until(lambda: len(recorded) == 3)
    await transfer.abort(TransferFailed("it was only to be recorded"))
    await pair.wait_all_free()
    if not same_link:
        (await next(iter(pair.links._links.values()))).fail(WorkerUnavailable("the Link is made anew"))
        await until(lambda: not pair.receiver._links)
        await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))

    def replay(header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        fields = list(HEADERS[transport].unpack(header))
        old_header, old_payload = recorded[1]
        fields[-1] = HEADERS[transport].unpack(old_header)[-1]
        return [(HEADERS[transport].pack(*fields), old_payload)]

    await _damage_frames(pair, _only(DAMAGED_FRAME, replay))
    before = pair.receiver.counters[Reason.SEAL_MISMATCH]
    await _fails_and_recovers(pair)
    assert pair.receiver.counters[Reason.SEAL_MISMATCH] == before + 1


# --- messages of the Link ---


def _forge_messages(link: Any, forge: Callable[[Message], list[Message]]) -> None:
    put = link.outbox.put

    def put_forged(message: Message) -> None:
        for forged in forge(message):
            put(forged)

    link.outbox.put = put_forged


def _changed(message: Message, **fields: Any) -> Message:
    copied = {name: getattr(message, name) for name in message.__dataclass_fields__}
    return type(message)(**{**copied, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (ChunkHeader, {"first_page": 1}, Reason.OUTSIDE_RESERVATION),
        (ChunkHeader, {"first_page": 2**31}, Reason.OUTSIDE_RESERVATION),
        (ChunkHeader, {"num_pages": 10, "num_bytes": 10 * PAGE_BYTES}, Reason.OUTSIDE_RESERVATION),
        (ChunkHeader, {"num_pages": 2**31, "num_bytes": 2**31 * PAGE_BYTES}, Reason.OUTSIDE_RESERVATION),
        (ChunkHeader, {"num_pages": 8, "num_bytes": 8 * PAGE_BYTES}, Reason.SEAL_MISMATCH),
        (ChunkHeader, {"num_bytes": 9 * PAGE_BYTES - 1}, Reason.WRONG_SIZE),
        (ChunkHeader, {"num_pages": 0}, Reason.PROTOCOL_VIOLATION),
        (ChunkHeader, {"chunk_index": 1}, Reason.SEAL_MISMATCH),
        (ChunkHeader, {"id": TransferId("nobody's", 1)}, Reason.LATE_MESSAGE),
        (Seal, {"digest": bytes(16)}, Reason.SEAL_MISMATCH),
        (Seal, {"num_pages": 8}, Reason.SEAL_MISMATCH),
        (Seal, {"num_bytes": 1}, Reason.SEAL_MISMATCH),
        (Seal, {"num_tokens": NUM_TOKENS - 1}, Reason.SEAL_MISMATCH),
        (Seal, {"num_chunks": 0}, Reason.SEAL_MISMATCH),
        (Seal, {"id": TransferId("nobody's", 1)}, Reason.UNKNOWN_TRANSFER),
        (Reserve, {"num_tokens": 16}, Reason.OUTSIDE_RESERVATION),
        (Reserve, {"num_tokens": 0}, Reason.PROTOCOL_VIOLATION),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else getattr(value, "__name__", str(value)),
)
async def test_a_forged_message_commits_nothing(
    make_pair: PairMaker, transport: str, kind: type[Message], fields: dict[str, Any], reason: Reason
) -> None:
    pair = await make_pair(
        transport, slot_bytes=SLOT_BYTES, timeouts=Timeouts(stall_s=2.5, commit_s=2.5, reserve_s=2.5)
    )
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    link = await next(iter(pair.links._links.values()))
    _forge_messages(link, lambda message: [_changed(message, **fields)] if isinstance(message, kind) else [message])
    with pytest.raises(FAILURES):
        await _hand_over(pair)
    await until(lambda: pair.receiver.counters[reason] == 1)
    assert not pair.target.committed
    await pair.wait_all_free()
    link.fail(WorkerUnavailable("the forger is gone"))
    await until(lambda: not pair.receiver._links)
    await pair.assert_works()


async def test_a_page_that_was_never_sent_is_missed(make_pair: PairMaker, transport: str) -> None:
    """Everything fits, digest included, but a page of the reservation was left as it is."""
    pair = await make_pair(transport, slot_bytes=SLOT_BYTES)
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    link = await next(iter(pair.links._links.values()))

    def ask_for_more(message: Message) -> list[Message]:
        is_asked = isinstance(message, Reserve | Seal)
        return [_changed(message, num_tokens=NUM_TOKENS + 16) if is_asked else message]

    _forge_messages(link, ask_for_more)
    with pytest.raises(TransferFailed, match="not what was sealed"):
        await _hand_over(pair)
    assert pair.receiver.counters.snapshot() == {"seal_mismatch": 1}
    assert not pair.target.committed
    await pair.wait_all_free()


@pytest.mark.parametrize("kind", [Reserve, ChunkHeader, Seal])
async def test_a_repeated_message_changes_nothing(make_pair: PairMaker, transport: str, kind: type[Message]) -> None:
    pair = await _make(make_pair, transport)
    await (await pair.reserve(16)).abort(TransferFailed("only to make the Link"))
    link = await next(iter(pair.links._links.values()))
    _forge_messages(link, lambda message: [message] * 3 if isinstance(message, kind) else [message])
    transfer = await _hand_over(pair)
    pair.assert_arrived(transfer, TABLE, NUM_TOKENS)
    assert len(pair.target.committed) == 1
    await pair.wait_all_free()


async def test_a_chunk_in_the_cached_prefix_is_refused(make_pair: PairMaker) -> None:
    """The receiver shares these pages with other sequences: a sender that ignores it must not write there."""
    pair = await make_pair("shm", slot_bytes=SLOT_BYTES)
    pair.target.num_cached_tokens = 32
    await (await pair.reserve(16 * 9)).abort(TransferFailed("only to make the Link"))
    link = await next(iter(pair.links._links.values()))
    heard = link._machine.on_message

    def hear_of_no_prefix(message: Message, now: float) -> Any:
        return heard(Granted(message.id, 0) if isinstance(message, Granted) else message, now)

    link._machine.on_message = hear_of_no_prefix
    before = pair.target.pool.data.clone()
    with pytest.raises(FAILURES):
        await _hand_over(pair)
    assert pair.receiver.counters[Reason.OUTSIDE_RESERVATION] == 1
    assert torch.equal(pair.target.pool.data, before)
    await pair.wait_all_free()
