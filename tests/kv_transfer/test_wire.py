"""Messages survive the way over protobuf, and what no program of ours sends is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.failures import abort_of, code_of, error_from
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Heartbeat,
    Hello,
    HelloAck,
    Message,
    Reserve,
    Seal,
    TransferId,
    WireLayout,
)
from kv_transfer.transports.base import ChannelTimeout
from kv_transfer.wire import MAX_OUTBOX, MalformedMessage, Outbox, channel_key, from_wire, to_wire
from protos import link_pb2, link_pb2_grpc
from services.runtime import errors
from services.runtime.rpc import make_channel
from tests.kv_transfer.conftest import Pair, PairMaker
from tests.waiting import HANG_LIMIT_S

ID = TransferId("request", 3)
LAYOUT = WireLayout("f" * 32, 16, "bfloat16", 8, 32, 128, True, "avx2", 4, 2)
HELLO = Hello("prefill-0", "a" * 32, "b" * 32, LAYOUT, ("shm", "tcp"), "host")
ACK = HelloAck("decode-0", "b" * 32, LAYOUT, "tcp", "127.0.0.1:1", "cd" * 16, b"t" * 32, 8, 2**20)
MESSAGES: list[Message] = [
    HELLO,
    ACK,
    Reserve(ID, 100, 5000),
    Granted(ID, 32),
    ChunkHeader(ID, 1, 2**40, 3, 4, 5),
    Seal(ID, 1, 2, 3, 4, b"d" * 16, 5, 6),
    Committed(ID),
    Abort(ID, "TransferFailed", "why"),
    Abort(ID, "NoFreePages", "why", 2500),
    Abort(None, "LayoutMismatch", "why"),
    AbortAck(ID),
    Heartbeat(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert _over_the_wire(message) == message


def _over_the_wire(message: Message) -> Any:
    return from_wire(link_pb2.LinkMessage.FromString(to_wire(message).SerializeToString()))


def _hello(**changes: object) -> link_pb2.LinkMessage:
    wire = to_wire(HELLO)
    for name, value in changes.items():
        setattr(wire.hello.layout, name, value)
    return wire


@pytest.mark.parametrize(
    "wire",
    [
        link_pb2.LinkMessage(),
        link_pb2.LinkMessage(reserve=link_pb2.Reserve(num_tokens=1)),
        link_pb2.LinkMessage(committed=link_pb2.Committed(id=link_pb2.TransferId(request_id="x"))),
        link_pb2.LinkMessage(committed=link_pb2.Committed(id=link_pb2.TransferId(request_id="x" * 257, attempt=1))),
        link_pb2.LinkMessage(seal=link_pb2.Seal(id=link_pb2.TransferId(request_id="x", attempt=1), digest=b"short")),
        link_pb2.LinkMessage(hello_ack=link_pb2.LinkHelloAck(channel_token=b"short")),
        _hello(dtype="float8"),
        _hello(page_size=0),
        _hello(arithmetic="x" * 257),
        _hello(page_size=2**31, num_layers=2**31, head_dim=2**31),
    ],
)
def test_what_nobody_sends_is_refused(wire: link_pb2.LinkMessage) -> None:
    with pytest.raises(MalformedMessage):
        from_wire(wire)


def test_a_channels_key_is_bound_to_the_pair() -> None:
    key = channel_key(HELLO, ACK)
    assert (key.channel_id, key.token) == (bytes.fromhex("cd" * 16), b"t" * 32)
    other = Hello("prefill-0", "c" * 32, "b" * 32, LAYOUT, ("shm", "tcp"), "host")
    assert channel_key(other, ACK).binding != key.binding


def test_errors_keep_their_class_over_the_link() -> None:
    for cls in (errors.NoFreePages, errors.LayoutMismatch, errors.RequestCancelled, errors.DeadlineExceeded):
        error = error_from(abort_of(ID, cls("text")))
        assert type(error) is cls
        assert error.message == "text"
        assert error.retry_after_s is None
    assert code_of(ChannelTimeout("late")) == "TransferStalled"
    assert code_of(errors.RateLimited("other")) == "TransferFailed"
    assert type(error_from(Abort(ID, "SystemExit", "x"))) is errors.TransferFailed


@pytest.mark.parametrize(
    ("retry_after_s", "told_ms"), [(1.5, 1500), (0.0001, 1), (None, 0), (0.0, 0), (-1.0, 0), (1e12, 86_400_000)]
)
def test_errors_keep_the_time_after_which_to_ask_again(retry_after_s: float | None, told_ms: int) -> None:
    abort = abort_of(ID, errors.NoFreePages("full", retry_after_s=retry_after_s))
    assert abort.retry_after_ms == told_ms
    arrived = error_from(_over_the_wire(abort))
    assert type(arrived) is errors.NoFreePages
    assert arrived.retry_after_s == (told_ms / 1000 or None)
    assert arrived.again().retry_after_s == arrived.retry_after_s


async def test_an_outbox_that_nobody_reads_is_an_error() -> None:
    outbox = Outbox()
    for _ in range(MAX_OUTBOX):
        outbox.put(Heartbeat())
    with pytest.raises(errors.TransferFailed):
        outbox.put(Heartbeat())


# --- a peer that speaks nonsense to a real receiver ---


async def _converse(pair: Pair, messages: list[link_pb2.LinkMessage]) -> list[link_pb2.LinkMessage]:
    """Send these at once; return all answers up to the end of the stream."""

    async def requests() -> AsyncIterator[link_pb2.LinkMessage]:
        for message in messages:
            yield message
        await asyncio.sleep(20)

    channel = make_channel(pair.address)
    answers = []
    call = link_pb2_grpc.LinkStub(channel).Connect(requests())
    async with asyncio.timeout(HANG_LIMIT_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for answer in call:
                answers.append(answer)
    await channel.close()
    return answers


@pytest.mark.parametrize(
    "first", [link_pb2.LinkMessage(), to_wire(Heartbeat()), to_wire(Reserve(ID, 1, 1)), _hello(dtype="int3")]
)
async def test_a_link_that_does_not_begin_with_a_good_hello_ends(
    make_pair: PairMaker, first: link_pb2.LinkMessage
) -> None:
    pair = await make_pair("shm")
    assert await _converse(pair, [first]) == []
    assert pair.receiver.counters[Reason.PROTOCOL_VIOLATION] == 1
    await pair.hand_over([1], 16)


async def test_a_hello_that_is_never_followed_by_a_channel_ends(make_pair: PairMaker) -> None:
    from kv_transfer.protocol.timing import Timeouts

    pair = await make_pair("shm", timeouts=Timeouts(connect_s=0.3))
    layout = pair.links._setup.layout
    hello = Hello("prefill-9", "9" * 32, pair.incarnation, layout, ("shm",), "here")
    answers = await _converse(pair, [to_wire(hello)])
    assert [answer.WhichOneof("message") for answer in answers] == ["hello_ack"]
    assert not pair.receiver._links
