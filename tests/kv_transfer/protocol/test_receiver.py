"""What the receiver's machine refuses, one rule at a time. The property tests have the interleavings."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.protocol.actions import (
    Action,
    CommitPages,
    FailLink,
    Place,
    ReleasePages,
    ReservePages,
    Revoke,
    Send,
    Supersede,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Hello,
    Message,
    Reserve,
    Seal,
    TransferId,
    WireLayout,
    chain_digest,
)
from kv_transfer.protocol.placement import ChunkLost, ChunkPlaced, ChunkRevoked
from kv_transfer.protocol.receiver import LinkTerms, ReceiverLink, layouts_fit, link_fault
from kv_transfer.protocol.timing import Timeouts
from services.runtime.errors import DeadlineExceeded, RequestCancelled

LAYOUT = WireLayout("f", 4, "float32", 1, 1, 1, True)
PAGE = LAYOUT.page_bytes
ID = TransferId("r", 1)
NUM_TOKENS = 15  # four pages
DIGESTS = [bytes([index]) * 16 for index in range(4)]


class Harness:
    def __init__(self, receiver_page_size: int = 4) -> None:
        terms = LinkTerms(LAYOUT, dataclasses.replace(LAYOUT, page_size=receiver_page_size), slot_bytes=2 * PAGE)
        self.counters = Counters()
        self.fence = Fence()
        self.link = ReceiverLink(terms=terms, fence=self.fence, timeouts=Timeouts(), counters=self.counters, now=0.0)

    def hear(self, message: Message, now: float = 0.0) -> list[Action]:
        return self.link.on_message(message, now)

    def reserve(self, num_cached_tokens: int = 0) -> list[Action]:
        assert self.hear(Reserve(ID, NUM_TOKENS, 10_000)) == [ReservePages(ID, NUM_TOKENS)]
        return self.link.reserved(ID, 4, num_cached_tokens)

    def stream(self) -> None:
        """All four pages in two chunks, placed."""
        self.reserve()
        for index in range(2):
            assert isinstance(self.hear(chunk(index))[0], Place)
            self.link.placement(ChunkPlaced(ID, index, DIGESTS[index]))


def chunk(index: int = 0, **changes: int) -> ChunkHeader:
    header = ChunkHeader(ID, index, channel_seq=index, first_page=2 * index, num_pages=2, num_bytes=2 * PAGE)
    header = dataclasses.replace(header, **changes)
    return header if "num_bytes" in changes else dataclasses.replace(header, num_bytes=header.num_pages * PAGE)


def seal(**changes: object) -> Seal:
    good = Seal(ID, 2, 4, 4 * PAGE, NUM_TOKENS, chain_digest(DIGESTS[:2]), first_token_id=7, sampling_position=16)
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


def sent(actions: list[Action], kind: type[Message]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def failed(actions: list[Action]) -> bool:
    return bool(sent(actions, Abort)) and Revoke(ID) in actions


def test_a_good_transfer_is_committed() -> None:
    harness = Harness()
    harness.stream()
    assert harness.hear(seal()) == [CommitPages(ID, 7, 16)]
    assert sent(harness.link.committed(ID), Committed) == [Committed(ID)]
    assert not harness.link.transfers
    assert harness.counters.snapshot() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_chunks": 1},
        {"num_pages": 3},
        {"num_pages": 5},
        {"num_bytes": 4 * PAGE - 1},
        {"num_tokens": NUM_TOKENS - 1},
        {"num_tokens": NUM_TOKENS + 1},
        {"digest": bytes(16)},
        {"digest": chain_digest(reversed(DIGESTS[:2]))},
    ],
)
def test_a_seal_that_differs_in_anything_fails(changes: dict[str, object]) -> None:
    harness = Harness()
    harness.stream()
    actions = harness.hear(seal(**changes))
    assert failed(actions)
    assert any(isinstance(action, ReleasePages) for action in actions)
    assert harness.counters[Reason.SEAL_MISMATCH] == 1


def test_a_seal_over_missing_pages_fails() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0]))
    actions = harness.hear(seal(num_chunks=1, num_pages=2, num_bytes=2 * PAGE, digest=chain_digest(DIGESTS[:1])))
    assert failed(actions)


def test_a_seal_waits_for_the_last_chunk() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.hear(chunk(1))
    assert harness.hear(seal()) == []
    assert harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0])) == []
    assert harness.link.placement(ChunkPlaced(ID, 1, DIGESTS[1])) == [CommitPages(ID, 7, 16)]


def test_a_seal_that_overtakes_a_header_waits_for_it() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0]))
    assert harness.hear(seal()) == []
    harness.hear(chunk(1))
    assert harness.link.placement(ChunkPlaced(ID, 1, DIGESTS[1])) == [CommitPages(ID, 7, 16)]


def test_a_chunk_that_was_left_out_is_not_sealed() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.hear(chunk(1))
    harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0]))
    assert harness.link.placement(ChunkRevoked(ID, 1)) == []
    assert failed(harness.hear(seal()))
    assert harness.counters[Reason.SEAL_MISMATCH] == 1


def test_a_newer_attempt_ends_the_older_one_wherever_it_is() -> None:
    harness = Harness()
    harness.reserve()
    newer = TransferId(ID.request_id, 2)
    assert harness.hear(Reserve(newer, NUM_TOKENS, 10_000)) == [Supersede(ID), ReservePages(newer, NUM_TOKENS)]
    assert harness.counters[Reason.SUPERSEDED_ATTEMPT] == 1


def test_a_lost_chunk_fails_even_after_the_seal() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.hear(chunk(1))
    harness.hear(seal())
    harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0]))
    assert failed(harness.link.placement(ChunkLost(ID, 1, Reason.CHECKSUM_MISMATCH)))
    assert harness.counters[Reason.CHECKSUM_MISMATCH] == 1


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (chunk(1, first_page=3), Reason.OUTSIDE_RESERVATION),
        (chunk(1, first_page=2**31), Reason.OUTSIDE_RESERVATION),
        (chunk(1, num_pages=2**31), Reason.OUTSIDE_RESERVATION),
        (chunk(1, num_bytes=2 * PAGE - 1), Reason.WRONG_SIZE),
        (chunk(1, num_bytes=0), Reason.WRONG_SIZE),
        (chunk(1, first_page=1), Reason.CONFLICTING_CHUNK),
        (chunk(0, channel_seq=5, first_page=2), Reason.CONFLICTING_CHUNK),
        (chunk(1, channel_seq=0), Reason.CONFLICTING_CHUNK),
    ],
)
def test_a_wrong_chunk_fails_the_transfer_and_is_counted(header: ChunkHeader, reason: Reason) -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    actions = harness.hear(header)
    assert failed(actions)
    assert harness.counters[reason] == 1
    # Frames that were announced and are nobody else's are claimed, so that the channel goes on.
    places = [action for action in actions if isinstance(action, Place)]
    assert [place.is_wanted for place in places] == ([False] if header.channel_seq >= 1 else [])


def test_a_chunk_of_cached_pages_is_outside_the_reservation() -> None:
    harness = Harness()
    harness.reserve(num_cached_tokens=8)
    assert failed(harness.hear(chunk(0, first_page=1, num_pages=2)))
    assert harness.counters[Reason.OUTSIDE_RESERVATION] == 1


def test_the_granted_prefix_ends_on_page_borders_of_both() -> None:
    harness = Harness(receiver_page_size=6)
    harness.hear(Reserve(ID, 30, 10_000))
    assert sent(harness.link.reserved(ID, 5, 18), Granted) == [Granted(ID, 12)]


def test_the_same_chunk_again_changes_nothing() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    assert harness.hear(chunk(0)) == []
    assert harness.counters[Reason.DUPLICATE_CHUNK] == 1


def test_a_chunk_before_the_grant_fails_the_transfer() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    assert sent(harness.hear(chunk(0)), Abort)
    released = harness.link.reserved(ID, 4, 0)
    assert [type(action) for action in released] == [ReleasePages]


def test_a_chunk_of_an_unknown_transfer_is_discarded() -> None:
    harness = Harness()
    (place,) = harness.hear(chunk(0))
    assert isinstance(place, Place)
    assert not place.is_wanted
    assert harness.counters[Reason.LATE_MESSAGE] == 1


def test_a_chunk_without_pages_ends_the_link() -> None:
    harness = Harness()
    harness.reserve()
    assert [type(action) for action in harness.hear(chunk(0, num_pages=0))] == [FailLink]


def test_a_reservation_too_small_is_given_back() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    actions = harness.link.reserved(ID, 3, 0)
    assert failed(actions)
    assert isinstance(actions[-1], ReleasePages)


def test_a_repeated_reserve_gets_the_same_answer_and_no_more_pages() -> None:
    harness = Harness()
    first = harness.reserve()
    assert harness.hear(Reserve(ID, NUM_TOKENS, 10_000)) == first
    assert harness.counters[Reason.DUPLICATE_RESERVE] == 1


def test_a_repeated_seal_after_the_commit_is_confirmed_again() -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal())
    harness.link.committed(ID)
    assert harness.hear(seal()) == [Send(Committed(ID))]


def test_a_seal_of_an_unknown_transfer_is_refused() -> None:
    harness = Harness()
    assert sent(harness.hear(seal()), Abort)
    assert harness.counters[Reason.UNKNOWN_TRANSFER] == 1


def test_pages_are_released_only_after_every_copy_ended() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.hear(chunk(1))
    assert harness.hear(Abort(ID, "RequestCancelled", "x")) == [Revoke(ID)]
    assert harness.link.placement(ChunkRevoked(ID, 0)) == []
    (release,) = harness.link.placement(ChunkRevoked(ID, 1))
    assert isinstance(release, ReleasePages)
    assert isinstance(release.error, RequestCancelled)
    # The acknowledgement says that nothing is held, so it waits for that.
    assert sent(harness.link.released(ID), AbortAck) == [AbortAck(ID)]


def test_an_abort_is_acknowledged_however_often_it_comes() -> None:
    harness = Harness()
    for _ in range(3):
        assert harness.hear(Abort(ID, "TransferFailed", "x")) == [Send(AbortAck(ID))]
    # Its Reserve, should it come now, is a replay.
    assert sent(harness.hear(Reserve(ID, NUM_TOKENS, 10_000)), Abort)
    assert harness.counters[Reason.STALE_ATTEMPT] == 1


def test_the_deadline_is_kept_without_the_sender() -> None:
    harness = Harness()
    harness.reserve()
    for now in range(1, 10):
        harness.hear(Reserve(ID, NUM_TOKENS, 10_000), now=float(now))  # a sign of life
        harness.link.tick(float(now), 0)
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000), now=10.0)
    actions = harness.link.tick(10.0, 0)
    (release,) = [action for action in actions if isinstance(action, ReleasePages)]
    assert isinstance(release.error, DeadlineExceeded)


def test_a_silent_sender_is_dead_after_three_seconds() -> None:
    harness = Harness()
    for tenth in range(1, 30):
        assert not any(isinstance(action, FailLink) for action in harness.link.tick(tenth / 10, 0))
    assert [type(action) for action in harness.link.tick(3.0, 0)] == [FailLink]
    assert harness.counters[Reason.PEER_SILENT] == 1


def test_a_receiver_that_was_itself_stopped_accuses_nobody_at_once() -> None:
    harness = Harness()
    harness.link.tick(0.1, 0)
    assert not any(isinstance(action, FailLink) for action in harness.link.tick(60.0, 0))
    assert not any(isinstance(action, FailLink) for action in harness.link.tick(60.5, 0))
    assert any(isinstance(action, FailLink) for action in harness.link.tick(61.1, 0) + harness.link.tick(61.2, 0))


def test_a_channel_that_owes_and_does_not_move_ends_the_link() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    for tenth in range(1, 100):
        harness.hear(Reserve(ID, NUM_TOKENS, 10_000), now=tenth / 10)
        actions = harness.link.tick(tenth / 10, num_frames_seen=min(tenth, 20))
        if any(isinstance(action, FailLink) for action in actions):
            assert tenth / 10 == pytest.approx(7.0)  # the last frame at 2 s, the limit 5 s later
            assert harness.counters[Reason.CHANNEL_BROKEN] == 1
            return
    raise AssertionError("the stall was not noticed")


def test_no_memory_is_taken_for_an_absurd_reserve() -> None:
    harness = Harness()
    assert harness.hear(Reserve(ID, 2**32 - 1, 10_000)) == [ReservePages(ID, 2**32 - 1)]
    assert len(harness.link.transfers[0]._covered) == 0


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"page_size": 64}, True),
        ({"exact": False}, True),
        ({"fingerprint": "g"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"num_layers": 2}, False),
        ({"num_kv_heads": 2}, False),
        ({"head_dim": 2}, False),
    ],
)
def test_which_layouts_fit(changes: dict[str, object], fits: bool) -> None:
    other = dataclasses.replace(LAYOUT, **changes)  # type: ignore[arg-type]
    assert layouts_fit(LAYOUT, other) is fits
    hello = Hello("p", "1", "2", other, ("tcp",), "h")
    expected = None if fits else Reason.LAYOUT_MISMATCH
    assert link_fault(hello, layout=LAYOUT, incarnation="2", protocol_version=1) is expected
    assert link_fault(hello, layout=LAYOUT, incarnation="3", protocol_version=1) is Reason.STALE_INCARNATION
    assert link_fault(hello, layout=LAYOUT, incarnation="2", protocol_version=2) is Reason.LAYOUT_MISMATCH
