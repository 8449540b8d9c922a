"""Messages of the Link, as plain data.

Does not depend on protobuf, sockets, or tensors; `kv_transfer.wire` translates. See docs/protocol.md for the protocol.
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
# A larger page indicates a broken or hostile layout. It is rejected before any memory is allocated.
MAX_PAGE_BYTES = 256 * 2**20
MAX_REQUEST_ID_CHARS = 256
MAX_ARITHMETIC_CHARS = 256
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TransferId:
    """One attempt of a transfer. Attempts are numbered from 1."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Shape of one side's pages, in the form that is sent to the peer. `dtype` is a key of DTYPE_BYTES.

    `arithmetic` names the numeric kernels: two workers that are `exact` and have the same arithmetic compute the same
    bits. `tensor_parallel` is the number of processes that share a layer, and `pipeline_parallel` the number of stages.
    A value of 0 means unknown. Neither affects the pages, which always contain all heads and layers.
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
        """Size of one page, in bytes."""
        return self.num_kv_heads * self.num_layers * 2 * self.page_size * self.head_dim * DTYPE_BYTES[self.dtype]

    def num_pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def difference(self, other: WireLayout) -> str:
        """Returns why pages of one layout cannot be used with the other layout, or an empty string if they can.

        Everything except page size and exactness must be equal. Two engines have different fingerprints, and so do two
        builds of one engine.
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
    """The sender's introduction. `transports` lists the transports it can send on, best first.

    `host_id`, `gpu_id`, and `nccl` locate its pages; see transports.registry.Reach.
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
    """The receiver's acceptance of the pair, and the parameters for opening the channel.

    `padding_bytes` of padding follow the sender's proof on the channel if the hello offered padding.
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
    """Requests pages for `num_tokens` tokens. `deadline_ms` is the time left until the request's deadline.

    A prefill worker hands over a prompt. A decode worker hands over a prompt and all emitted tokens except the last.
    """

    id: TransferId
    num_tokens: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The pages are reserved. The first `num_cached_tokens` tokens are already cached and must not be sent."""

    id: TransferId
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Announces pages that follow on the channel in the frames `channel_seq`, `channel_seq + 1`, …

    Pages are counted in the sender's page table. The ring slot size determines how many pages a frame carries.
    """

    id: TransferId
    chunk_index: int
    channel_seq: int
    first_page: int
    num_pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Seal:
    """The sender's manifest, sent after all pages, with the values that decoding needs to continue."""

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
    """The receiver has verified the pages and owns them."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class Abort:
    """The transfer ended without a commit. `code` names an error class.

    Without an ID, the message rejects the whole Link.

    `retry_after_ms` is the recommended delay before a retry, or 0 if unknown.
    """

    id: TransferId | None
    code: str
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class AbortAck:
    """Acknowledges an abort. The side that sends it no longer holds anything for the transfer."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Requests that the sender end an idle Link.

    A sender that has started a transfer on the Link ignores the message.
    """


@dataclass(frozen=True, slots=True)
class Probed:
    """Reports that the receiver has consumed this number of bytes of a probe's frames."""

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
    """Returns the number of the sender's whole pages in one frame. Both sides must compute the same number."""
    return max(1, slot_bytes // page_bytes)


def chain_digest(digests: Iterable[bytes]) -> bytes:
    """Returns the digest over the digests of a chunk's frames, in order."""
    state = xxhash.xxh3_128()
    for digest in digests:
        state.update(digest)
    return state.digest()


def seal_digest(seal: Seal, chunks: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Returns the digest over all fields of a seal except its digest, and (first page, pages, digest) of each chunk.

    It covers the position of the pages and the next token because both matter as much as the content of the pages.
    """
    state = xxhash.xxh3_128(seal.id.request_id.encode())
    counts = (seal.num_chunks, seal.num_pages, seal.num_bytes, seal.num_tokens)
    state.update(struct.pack("<7Q", seal.id.attempt, *counts, seal.first_token_id, seal.sampling_position))
    for first_page, num_pages, digest in chunks:
        state.update(struct.pack("<2Q", first_page, num_pages))
        state.update(digest)
    return state.digest()
