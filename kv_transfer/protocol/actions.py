"""Actions that the state machines request from their caller.

The caller executes the actions of a list in order. Actions that take time complete with an event: a call of the
machine's method that their docstring names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.protocol.messages import Message, TransferId
from services.runtime.errors import TandemError


@dataclass(frozen=True, slots=True)
class Send:
    """Writes a message to the Link."""

    message: Message


@dataclass(frozen=True, slots=True)
class FailLink:
    """Closes the Link and the channel, because the peer or the channel cannot be trusted.

    Completes with `link_lost(error)`.
    """

    error: TandemError


@dataclass(frozen=True, slots=True)
class RetireLink:
    """Sender: ends the idle Link. The next transfer opens a new Link."""


@dataclass(frozen=True, slots=True)
class PostChunk:
    """Sender: posts these pages on the channel, in frames numbered from `first_seq`.

    Completes with `chunk_posted`, `chunk_skipped`, or `chunk_stale`.
    """

    id: TransferId
    chunk_index: int
    first_seq: int
    first_page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SkipChunks:
    """Sender: skips all chunks of this transfer that are not posted. Each of them still completes with an event."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class ReportGranted:
    """Sender: reports that the caller may stream. The receiver already caches the first `num_cached_tokens` tokens."""

    id: TransferId
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReportCommitted:
    """Sender: reports that the handoff is complete."""

    id: TransferId
    num_pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Sender: reports that the transfer failed. Its pages may still be read until ReportReleased."""

    id: TransferId
    error: TandemError


@dataclass(frozen=True, slots=True)
class ReportReleased:
    """Sender: reports that the transfer's pages are no longer read. Emitted exactly once."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class ReservePages:
    """Receiver: reserves pages. Completes with `reserved` or `reserve_failed`."""

    id: TransferId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """Receiver: copies the frames from `first_seq` on into this chunk's pages, or discards them if not `is_wanted`.

    Pages are counted in the sender's page table. If wanted, completes with `placement(event)`, where the event is
    `ChunkPlaced`, `ChunkLost`, or `ChunkRevoked`.
    """

    id: TransferId
    chunk_index: int
    first_seq: int
    num_frames: int
    first_page: int
    num_pages: int
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    """Receiver: stops copying for this transfer. Each of its pending chunks still completes with an event."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class CommitPages:
    """Receiver: transfers ownership of the verified pages to the worker.

    Completes with `committed` or `commit_failed`.
    """

    id: TransferId
    first_token_id: int
    sampling_position: int


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Receiver: frees the pages, which are no longer written to. Completes with `released`. Emitted exactly once."""

    id: TransferId
    error: TandemError


@dataclass(frozen=True, slots=True)
class AbandonPages:
    """Receiver: stops the work on committed pages, because the sender gave up before it received the commit.

    Completes without an event. May be emitted more than once.
    """

    id: TransferId
    error: TandemError


@dataclass(frozen=True, slots=True)
class Supersede:
    """Receiver: aborts this attempt, on any Link, because a newer attempt arrived."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class ReportEnded:
    """Receiver: reports that the transfer has ended and owns nothing here. `error` is None after a commit."""

    id: TransferId
    error: TandemError | None


Action: TypeAlias = (
    Send
    | FailLink
    | RetireLink
    | PostChunk
    | SkipChunks
    | ReportGranted
    | ReportCommitted
    | ReportFailed
    | ReportReleased
    | ReservePages
    | Place
    | Revoke
    | CommitPages
    | ReleasePages
    | AbandonPages
    | Supersede
    | ReportEnded
)
