"""What the two sides of a handoff say to each other on the Link, as plain data.

Knows nothing of protobuf, sockets or tensors; `kv_transfer.wire` translates. docs/protocol.md tells the whole story.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

PROTOCOL_VERSION = 2
DIGEST_BYTES = 16
TOKEN_BYTES = 32
# A page larger than this is a broken or hostile layout, refused before any memory is taken.
MAX_PAGE_BYTES = 256 * 2**20
MAX_REQUEST_ID_CHARS = 256
MAX_ARITHMETIC_CHARS = 256
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TransferId:
    """One try of a transfer. Attempts count from 1."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Shape of one side's pages, in words that travel. `dtype` is a key of DTYPE_BYTES.

    `arithmetic` names how one side computes: two that are `exact` and have the same one compute the same bits.
    `tensor_parallel` and `pipeline_parallel` say how many processes compute a layer and how many stages there are (0:
    unknown); pages are whole whatever they are.
    """

    fingerprint: str
    page_size: int
    dtype: str
    num_kv_heads: int
    num_layers: int
    head_dim: int
    exact: bool
    arithmetic: str = ""
    tensor_parallel: int = 0
    pipeline_parallel: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_kv_heads * self.num_layers * 2 * self.page_size * self.head_dim * DTYPE_BYTES[self.dtype]

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def difference(self, other: WireLayout) -> str:
        """What keeps pages of one from becoming pages of the other; empty: nothing does.

        All but page size and exactness must be equal. Two engines, or one in two builds, have different fingerprints.
        """
        names = ("dtype", "num_kv_heads", "num_layers", "head_dim")
        found = [
            f"{name} is {mine} here and {its} there"
            for name in names
            if (mine := getattr(self, name)) != (its := getattr(other, name))
        ]
        if min(self.page_size, other.page_size) < 1:
            found.append("a page has at least one token")
        if self.fingerprint != other.fingerprint:
            is_computed_alike = self.arithmetic == other.arithmetic
            computed = f"they are computed by {self.arithmetic} here and {other.arithmetic} there"
            found.append("the weights are others" if is_computed_alike else computed)
        return "; ".join(found)


@dataclass(frozen=True, slots=True)
class Hello:
    """The sender introduces itself. `transports` are those it can send on, best first.

    `host_id`, `gpu_id` and `nccl` say where its pages are: see transports.registry.Reach.
    """

    worker_id: str
    incarnation: str
    peer_incarnation: str
    layout: WireLayout
    transports: tuple[str, ...]
    host_id: str
    protocol_version: int = PROTOCOL_VERSION
    gpu_id: str = ""
    nccl: str = ""
    sends_padding: bool = False


@dataclass(frozen=True, slots=True)
class HelloAck:
    """The receiver accepts the pair and describes how to open the channel.

    The sender's proof on the channel is followed by `padding_bytes` of padding, if the hello offered that.
    """

    worker_id: str
    incarnation: str
    layout: WireLayout
    transport: str
    channel_address: str
    channel_id: str
    channel_token: bytes
    ring_slots: int
    ring_slot_bytes: int
    padding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Asks for the pages of `num_tokens` tokens. `deadline_ms` is the time the request has left.

    A prefill worker hands over a prompt, a decode worker a prompt and all tokens that it emitted but the last.
    """

    id: TransferId
    num_tokens: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Pages are set aside. The first `num_cached_tokens` tokens are cached already and are not sent."""

    id: TransferId
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Announces pages that follow on the channel in frames `channel_seq`, `channel_seq + 1`, …

    Pages are counted in the sender's page table. How many pages a frame holds follows from the ring slot's size.
    """

    id: TransferId
    chunk_index: int
    channel_seq: int
    first_page: int
    num_pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Seal:
    """All was sent: the manifest, and what decoding needs to continue."""

    id: TransferId
    num_chunks: int
    num_pages: int
    num_bytes: int
    num_tokens: int
    digest: bytes
    first_token_id: int
    sampling_position: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything was verified and is the receiver's."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class Abort:
    """The transfer is over without a commit. `code` names an error class. Without an id it refuses the whole Link.

    `retry_after_ms` is the time after which it may be worth asking again; 0 is unknown.
    """

    id: TransferId | None
    code: str
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class AbortAck:
    """The abort was seen, and nothing is held for the transfer from now on."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Alive."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Asks the sender to end an idle Link. A sender that has begun a transfer on it ignores the message."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The receiver has taken this number of bytes of a probe's frames."""

    num_bytes: int


Message: TypeAlias = (
    Hello
    | HelloAck
    | Reserve
    | Granted
    | ChunkHeader
    | Seal
    | Committed
    | Abort
    | AbortAck
    | Heartbeat
    | Retire
    | Probed
)


def pages_per_frame(page_bytes: int, slot_bytes: int) -> int:
    """Return how many whole pages of the sender travel in one frame; both sides must agree on it."""
    return max(1, slot_bytes // page_bytes)


def chain_digest(digests: Iterable[bytes]) -> bytes:
    """Return the digest over the digests of a chunk's frames, in order."""
    state = xxhash.xxh3_128()
    for digest in digests:
        state.update(digest)
    return state.digest()


def seal_digest(seal: Seal, chunks: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return the digest over all that a seal says but its own digest, and (first page, pages, digest) of each chunk.

    Where the pages lie and which token continues from them matter as much as what is in them.
    """
    state = xxhash.xxh3_128(seal.id.request_id.encode())
    counts = (seal.num_chunks, seal.num_pages, seal.num_bytes, seal.num_tokens)
    state.update(struct.pack("<7Q", seal.id.attempt, *counts, seal.first_token_id, seal.sampling_position))
    for first_page, num_pages, digest in chunks:
        state.update(struct.pack("<2Q", first_page, num_pages))
        state.update(digest)
    return state.digest()
