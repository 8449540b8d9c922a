"""What the state machines ask their surroundings to do.

An action is carried out in the order of the list that holds it. Those that take time answer with an event: a call of
the machine that is named beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.protocol.messages import Message, TransferId
from services.runtime.errors import TandemError


@dataclass(frozen=True, slots=True)
class Send:
    """Write this message to the Link."""

    message: Message


@dataclass(frozen=True, slots=True)
class FailLink:
    """The peer or the channel cannot be trusted: drop both; then call `link_lost(error)`."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class RetireLink:
    """Sender: end the Link, on which no transfer runs. The next transfer makes another one."""


@dataclass(frozen=True, slots=True)
class PostChunk:
    """Sender: put these pages on the channel, in frames from `first_seq` on.

    Answer: `chunk_posted`, `chunk_skipped` or `chunk_stale`.
    """

    id: TransferId
    chunk_index: int
    first_seq: int
    first_page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SkipChunks:
    """Sender: leave out what was not posted yet of this transfer. Each of its chunks is still answered."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class ReportGranted:
    """Sender: the caller may stream; the first `num_cached_tokens` tokens need not be sent."""

    id: TransferId
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReportCommitted:
    """Sender: the handoff is complete."""

    id: TransferId
    num_pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Sender: the transfer failed. Its pages may still be read until ReportReleased."""

    id: TransferId
    error: TandemError


@dataclass(frozen=True, slots=True)
class ReportReleased:
    """Sender: nothing reads the transfer's pages from now on. Given exactly once."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class ReservePages:
    """Receiver: set pages aside. Answer: `reserved` or `reserve_failed`."""

    id: TransferId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """Receiver: frames `first_seq` … belong to this chunk; copy them into its pages. Discard them if not `is_wanted`.

    Pages are counted in the sender's page table. Answer, if wanted: `chunk_placed`, `chunk_lost` or `chunk_revoked`.
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
    """Receiver: copy nothing more for this transfer. Each chunk that was to be placed is still answered."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class CommitPages:
    """Receiver: hand the verified pages over. Answer: `committed` or `commit_failed`."""

    id: TransferId
    first_token_id: int
    sampling_position: int


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Receiver: nothing writes to the pages from now on; give them back. Answer: `released`. Given exactly once."""

    id: TransferId
    error: TandemError


@dataclass(frozen=True, slots=True)
class AbandonPages:
    """Receiver: the sender gave up before it knew of the commit: end what was begun with the pages. No answer.

    May be given more than once.
    """

    id: TransferId
    error: TandemError


@dataclass(frozen=True, slots=True)
class Supersede:
    """Receiver: a newer attempt arrived; abort this older one, on whatever Link it is."""

    id: TransferId


@dataclass(frozen=True, slots=True)
class ReportEnded:
    """Receiver: nothing is left of the transfer here. `error` is None after a commit."""

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
