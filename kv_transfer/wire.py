"""The Link over gRPC: protobuf conversion, the identity of a worker, and the code that both ends of a stream share.

Does not depend on pages, channels, or the state of a transfer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kv_transfer.protocol.messages import (
    DIGEST_BYTES,
    DTYPE_BYTES,
    MAX_ARITHMETIC_CHARS,
    MAX_PAGE_BYTES,
    MAX_REQUEST_ID_CHARS,
    TOKEN_BYTES,
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Heartbeat,
    Hello,
    HelloAck,
    Message,
    Probed,
    Reserve,
    Retire,
    Seal,
    TransferId,
    WireLayout,
)
from kv_transfer.transports.base import ChannelKey
from kv_transfer.transports.handshake import MAX_PADDING_BYTES
from kv_transfer.transports.registry import local_host_id
from protos import link_pb2
from services.runtime.errors import TransferFailed

SERVICE_NAME = "tandem.v1.Link"
TICK_S = 0.1
# Maximum number of queued control messages. If more pile up, the peer is not reading.
MAX_OUTBOX = 4096
_MAX_UINT32 = 2**32 - 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """The identity of a worker for its peers.

    `host_id` identifies the scope of shared memory, `arithmetic` the kernels.
    """

    worker_id: str
    incarnation: str
    layout_fingerprint: str
    exact: bool
    host_id: str = field(default_factory=local_host_id)
    arithmetic: str = ""
    tensor_parallel: int = 0
    pipeline_parallel: int = 0


class MalformedMessage(TransferFailed):
    """The peer sent a message that no version of this program sends."""


class Outbox:
    """Queue of outgoing messages. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._is_closed = False

    def put(self, message: Message) -> None:
        """Queues a message. Raises TransferFailed if the peer has stopped reading."""
        if self._is_closed:
            return
        if self._queue.qsize() >= MAX_OUTBOX:
            raise TransferFailed("the peer does not read its Link")
        self._queue.put_nowait(message)

    def close(self) -> None:
        """Ends the stream of messages after the queued messages."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[link_pb2.LinkMessage]:
        while (message := await self._queue.get()) is not None:
            yield to_wire(message)


async def tick_until_cancelled(tick: Callable[[], None]) -> None:
    """Calls a state machine's `tick` several times a second."""
    while True:
        await asyncio.sleep(TICK_S)
        tick()


def note_arithmetic(own: WireLayout, peer: WireLayout, peer_id: str) -> None:
    """Logs that both sides are exact but compute different bits.

    This is not an error, because the pages are compatible.
    """
    if own.exact and peer.exact and own.arithmetic != peer.arithmetic:
        logger.info("%s computes with %r, this worker with %r", peer_id, peer.arithmetic, own.arithmetic)


def channel_key(hello: Hello, ack: HelloAck) -> ChannelKey:
    """Returns the key of the channel that an acknowledgement offers. Both ends compute the same key.

    Raises MalformedMessage.
    """
    try:
        channel_id = bytes.fromhex(ack.channel_id)
    except ValueError:
        raise MalformedMessage("the channel's id is not hexadecimal") from None
    parts: tuple[str, ...] = (
        str(hello.protocol_version),
        hello.incarnation,
        ack.incarnation,
        ack.layout.fingerprint,
        ack.transport,
        str(ack.ring_slots),
        str(ack.ring_slot_bytes),
    )
    if not 0 <= ack.padding_bytes <= MAX_PADDING_BYTES:
        raise MalformedMessage(f"{ack.padding_bytes} bytes of padding are more than {MAX_PADDING_BYTES}")
    if ack.padding_bytes:
        parts += (str(ack.padding_bytes),)
    return ChannelKey(channel_id, ack.channel_token, "\0".join(parts).encode(), ack.padding_bytes)


def to_wire(message: Message) -> link_pb2.LinkMessage:
    """Returns the protobuf form of a message."""
    match message:
        case Hello():
            return link_pb2.LinkMessage(hello=_hello_to_wire(message))
        case HelloAck():
            return link_pb2.LinkMessage(hello_ack=_ack_to_wire(message))
        case Reserve():
            reserve = link_pb2.Reserve(
                id=_id_to_wire(message.id),
                num_tokens=message.num_tokens,
                deadline_ms=min(message.deadline_ms, _MAX_UINT32),
            )
            return link_pb2.LinkMessage(reserve=reserve)
        case Granted():
            granted = link_pb2.Granted(id=_id_to_wire(message.id), num_cached_tokens=message.num_cached_tokens)
            return link_pb2.LinkMessage(granted=granted)
        case ChunkHeader():
            return link_pb2.LinkMessage(chunk=_chunk_to_wire(message))
        case Seal():
            return link_pb2.LinkMessage(seal=_seal_to_wire(message))
        case Committed():
            return link_pb2.LinkMessage(committed=link_pb2.Committed(id=_id_to_wire(message.id)))
        case Abort():
            transfer_id = None if message.id is None else _id_to_wire(message.id)
            abort = link_pb2.Abort(
                id=transfer_id, code=message.code, message=message.message, retry_after_ms=message.retry_after_ms
            )
            return link_pb2.LinkMessage(abort=abort)
        case AbortAck():
            return link_pb2.LinkMessage(abort_ack=link_pb2.AbortAck(id=_id_to_wire(message.id)))
        case Heartbeat():
            return link_pb2.LinkMessage(heartbeat=link_pb2.Heartbeat())
        case Retire():
            return link_pb2.LinkMessage(retire=link_pb2.Retire())
        case Probed():
            return link_pb2.LinkMessage(probed=link_pb2.Probed(num_bytes=message.num_bytes))


def from_wire(wire: link_pb2.LinkMessage) -> Message:
    """Returns the message of a protobuf, with all checks that need no context. Raises MalformedMessage."""
    match wire.WhichOneof("message"):
        case "hello":
            return _hello_from_wire(wire.hello)
        case "hello_ack":
            return _ack_from_wire(wire.hello_ack)
        case "reserve":
            return Reserve(_id_from_wire(wire.reserve.id), wire.reserve.num_tokens, wire.reserve.deadline_ms)
        case "granted":
            return Granted(_id_from_wire(wire.granted.id), wire.granted.num_cached_tokens)
        case "chunk":
            return _chunk_from_wire(wire.chunk)
        case "seal":
            return _seal_from_wire(wire.seal)
        case "committed":
            return Committed(_id_from_wire(wire.committed.id))
        case "abort":
            transfer_id = _id_from_wire(wire.abort.id) if wire.abort.HasField("id") else None
            return Abort(transfer_id, wire.abort.code, wire.abort.message, wire.abort.retry_after_ms)
        case "abort_ack":
            return AbortAck(_id_from_wire(wire.abort_ack.id))
        case "heartbeat":
            return Heartbeat()
        case "retire":
            return Retire()
        case "probed":
            return Probed(wire.probed.num_bytes)
        case _:
            raise MalformedMessage("the peer sent an empty message or one of a later protocol")


def _hello_to_wire(hello: Hello) -> link_pb2.LinkHello:
    return link_pb2.LinkHello(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        peer_incarnation=hello.peer_incarnation,
        layout=_layout_to_wire(hello.layout),
        transports=hello.transports,
        host_id=hello.host_id,
        protocol_version=hello.protocol_version,
        gpu_id=hello.gpu_id,
        nccl=hello.nccl,
        sends_padding=hello.sends_padding,
    )


def _hello_from_wire(wire: link_pb2.LinkHello) -> Hello:
    return Hello(
        worker_id=wire.worker_id,
        incarnation=wire.incarnation,
        peer_incarnation=wire.peer_incarnation,
        layout=_layout_from_wire(wire.layout),
        transports=tuple(wire.transports),
        host_id=wire.host_id,
        protocol_version=wire.protocol_version,
        gpu_id=wire.gpu_id,
        nccl=wire.nccl,
        sends_padding=wire.sends_padding,
    )


def _ack_to_wire(ack: HelloAck) -> link_pb2.LinkHelloAck:
    return link_pb2.LinkHelloAck(
        worker_id=ack.worker_id,
        incarnation=ack.incarnation,
        layout=_layout_to_wire(ack.layout),
        transport=ack.transport,
        channel_address=ack.channel_address,
        channel_id=ack.channel_id,
        channel_token=ack.channel_token,
        ring_slots=ack.ring_slots,
        ring_slot_bytes=ack.ring_slot_bytes,
        padding_bytes=ack.padding_bytes,
    )


def _ack_from_wire(wire: link_pb2.LinkHelloAck) -> HelloAck:
    if len(wire.channel_token) != TOKEN_BYTES:
        raise MalformedMessage("the channel's token has the wrong length")
    return HelloAck(
        worker_id=wire.worker_id,
        incarnation=wire.incarnation,
        layout=_layout_from_wire(wire.layout),
        transport=wire.transport,
        channel_address=wire.channel_address,
        channel_id=wire.channel_id,
        channel_token=wire.channel_token,
        ring_slots=wire.ring_slots,
        ring_slot_bytes=wire.ring_slot_bytes,
        padding_bytes=wire.padding_bytes,
    )


def _layout_to_wire(layout: WireLayout) -> link_pb2.PageLayout:
    return link_pb2.PageLayout(
        fingerprint=layout.fingerprint,
        page_size=layout.page_size,
        dtype=layout.dtype,
        num_kv_heads=layout.num_kv_heads,
        num_layers=layout.num_layers,
        head_dim=layout.head_dim,
        exact=layout.exact,
        arithmetic=layout.arithmetic,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
    )


def _layout_from_wire(wire: link_pb2.PageLayout) -> WireLayout:
    if wire.dtype not in DTYPE_BYTES:
        raise MalformedMessage(f"pages of dtype {wire.dtype!r} are not known")
    layout = WireLayout(
        fingerprint=wire.fingerprint,
        page_size=wire.page_size,
        dtype=wire.dtype,
        num_kv_heads=wire.num_kv_heads,
        num_layers=wire.num_layers,
        head_dim=wire.head_dim,
        exact=wire.exact,
        arithmetic=wire.arithmetic,
        tensor_parallel=wire.tensor_parallel,
        pipeline_parallel=wire.pipeline_parallel,
    )
    if len(layout.arithmetic) > MAX_ARITHMETIC_CHARS:
        raise MalformedMessage("the name of an arithmetic is too long")
    if not 0 < layout.page_bytes <= MAX_PAGE_BYTES:
        raise MalformedMessage(f"a page of {layout.page_bytes} bytes is out of bounds")
    return layout


def _chunk_to_wire(header: ChunkHeader) -> link_pb2.ChunkHeader:
    return link_pb2.ChunkHeader(
        id=_id_to_wire(header.id),
        chunk_index=header.chunk_index,
        channel_seq=header.channel_seq,
        first_page=header.first_page,
        num_pages=header.num_pages,
        num_bytes=header.num_bytes,
    )


def _chunk_from_wire(wire: link_pb2.ChunkHeader) -> ChunkHeader:
    return ChunkHeader(
        id=_id_from_wire(wire.id),
        chunk_index=wire.chunk_index,
        channel_seq=wire.channel_seq,
        first_page=wire.first_page,
        num_pages=wire.num_pages,
        num_bytes=wire.num_bytes,
    )


def _seal_to_wire(seal: Seal) -> link_pb2.Seal:
    return link_pb2.Seal(
        id=_id_to_wire(seal.id),
        num_chunks=seal.num_chunks,
        num_pages=seal.num_pages,
        num_bytes=seal.num_bytes,
        num_tokens=seal.num_tokens,
        digest=seal.digest,
        first_token_id=seal.first_token_id,
        sampling_position=seal.sampling_position,
    )


def _seal_from_wire(wire: link_pb2.Seal) -> Seal:
    if len(wire.digest) != DIGEST_BYTES:
        raise MalformedMessage("the seal's digest has the wrong length")
    return Seal(
        id=_id_from_wire(wire.id),
        num_chunks=wire.num_chunks,
        num_pages=wire.num_pages,
        num_bytes=wire.num_bytes,
        num_tokens=wire.num_tokens,
        digest=wire.digest,
        first_token_id=wire.first_token_id,
        sampling_position=wire.sampling_position,
    )


def _id_to_wire(transfer_id: TransferId) -> link_pb2.TransferId:
    return link_pb2.TransferId(request_id=transfer_id.request_id, attempt=transfer_id.attempt)


def _id_from_wire(wire: link_pb2.TransferId) -> TransferId:
    if not 0 < len(wire.request_id) <= MAX_REQUEST_ID_CHARS or wire.attempt < 1:
        raise MalformedMessage("a transfer needs a request id and an attempt")
    return TransferId(wire.request_id, wire.attempt)
