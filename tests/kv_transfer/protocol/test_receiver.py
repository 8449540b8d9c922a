"""What the receiver's machine refuses, one rule at a time. The property tests have the interleavings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from kv_transfer.protocol.actions import (
    AbandonPages,
    Action,
    CommitPages,
    FailLink,
    Place,
    ReleasePages,
    ReportEnded,
    ReservePages,
    Revoke,
    Send,
    Supersede,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.frames import ChunkLost, ChunkPlaced, ChunkRevoked
from kv_transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Reserve,
    Retire,
    Seal,
    TransferId,
    WireLayout,
    seal_digest,
)
from kv_transfer.protocol.receiver import ReceiverLink, link_fault
from kv_transfer.protocol.receiver_transfer import LinkTerms
from kv_transfer.protocol.timing import Timeouts
from services.runtime.errors import (
    DeadlineExceeded,
    NoFreePages,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)

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
    """As good as it gets with these changes: the digest fits them, unless it is given."""
    good = Seal(ID, 2, 4, 4 * PAGE, NUM_TOKENS, b"", first_token_id=7, sampling_position=16)
    changed = dataclasses.replace(good, **changes)  # type: ignore[arg-type]
    return changed if "digest" in changes else dataclasses.replace(changed, digest=digest_of(changed))


def digest_of(sealed: Seal, digests: Sequence[bytes] = DIGESTS) -> bytes:
    headers = [chunk(index) for index in range(sealed.num_chunks)]
    return seal_digest(sealed, [(each.first_page, each.num_pages, digests[each.chunk_index]) for each in headers])


def sent(actions: list[Action], kind: type[Message]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def failed(actions: list[Action]) -> bool:
    return bool(sent(actions, Abort)) and Revoke(ID) in actions


def test_a_good_transfer_is_committed() -> None:
    harness = Harness()
    harness.stream()
    assert harness.hear(seal()) == [CommitPages(ID, 7, 16)]
    assert harness.link.committed(ID) == [Send(Committed(ID)), ReportEnded(ID, None)]
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
    ],
)
def test_a_seal_that_differs_in_anything_fails(changes: dict[str, object]) -> None:
    harness = Harness()
    harness.stream()
    actions = harness.hear(seal(**changes))
    assert failed(actions)
    assert any(isinstance(action, ReleasePages) for action in actions)
    assert harness.counters[Reason.SEAL_MISMATCH] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token_id": 8},
        {"sampling_position": 17},
        {"id": TransferId("another", 1)},
        {"id": TransferId(ID.request_id, ID.attempt + 1)},
        {"num_pages": 3},
        {"num_bytes": 1},
        {"num_tokens": 1},
    ],
)
def test_the_seals_digest_is_over_all_that_it_says(changes: dict[str, object]) -> None:
    assert seal(**changes).digest != seal().digest


def test_a_seal_over_other_chunks_fails() -> None:
    for digests in (DIGESTS[1::-1], (DIGESTS[0], DIGESTS[0])):
        harness = Harness()
        harness.stream()
        assert failed(harness.hear(seal(digest=digest_of(seal(), digests))))
        assert harness.counters[Reason.SEAL_MISMATCH] == 1


def test_pages_that_changed_places_fail() -> None:
    harness = Harness()
    harness.reserve()
    for index in range(2):
        harness.hear(chunk(index, first_page=2 - 2 * index))
        harness.link.placement(ChunkPlaced(ID, index, DIGESTS[index]))
    assert failed(harness.hear(seal()))
    assert harness.counters[Reason.SEAL_MISMATCH] == 1


def test_a_seal_over_missing_pages_fails() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0]))
    actions = harness.hear(seal(num_chunks=1, num_pages=2, num_bytes=2 * PAGE))
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
    # Frames that were announced and are nobody else's are claimed, so that the channel continues.
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
    ("changes", "words"),
    [
        (
            {"num_layers": 2, "dtype": "bfloat16"},
            "dtype is float32 here and bfloat16 there; num_layers is 1 here and 2 there",
        ),
        ({"fingerprint": "g"}, "the weights are others"),
        ({"fingerprint": "g", "arithmetic": "vllm/1"}, "they are computed by  here and vllm/1 there"),
    ],
)
def test_a_refusal_says_what_differs(changes: dict[str, object], words: str) -> None:
    assert LAYOUT.difference(dataclasses.replace(LAYOUT, **changes)) == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"page_size": 64}, True),
        ({"page_size": 1}, True),
        ({"page_size": 0}, False),
        ({"arithmetic": "other kernels"}, True),
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
    assert bool(LAYOUT.difference(other)) is not fits
    assert bool(other.difference(LAYOUT)) is not fits
    hello = Hello("p", "1", "2", other, ("tcp",), "h")
    expected = None if fits else Reason.LAYOUT_MISMATCH
    assert link_fault(hello, layout=LAYOUT, incarnation="2", protocol_version=PROTOCOL_VERSION) is expected
    assert (
        link_fault(hello, layout=LAYOUT, incarnation="3", protocol_version=PROTOCOL_VERSION) is Reason.STALE_INCARNATION
    )
    assert (
        link_fault(hello, layout=LAYOUT, incarnation="2", protocol_version=PROTOCOL_VERSION + 1)
        is Reason.LAYOUT_MISMATCH
    )


def ended(actions: list[Action]) -> list[TandemError | None]:
    return [action.error for action in actions if isinstance(action, ReportEnded)]


def test_more_cached_tokens_than_there_are_is_no_reservation() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    assert failed(harness.link.reserved(ID, 4, NUM_TOKENS + 1))
    whole = TransferId("whole", 1)
    harness.hear(Reserve(whole, 16, 10_000))
    assert harness.link.reserved(whole, 4, 16) == [Send(Granted(whole, 16))]


def test_a_refusal_says_when_to_ask_again() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    error = NoFreePages("full")
    error.retry_after_s = 0.25
    (abort,) = sent(harness.link.reserve_failed(ID, error), Abort)
    assert abort == Abort(ID, "NoFreePages", "full", retry_after_ms=250)


def test_a_refusal_of_what_was_aborted_meanwhile_is_not_told() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    harness.hear(Abort(ID, "RequestCancelled", "x"))
    actions = harness.link.reserve_failed(ID, NoFreePages("full"))
    assert [type(error) for error in ended(actions)] == [RequestCancelled]
    assert actions[1:] == [Send(AbortAck(ID))]


def test_a_repeated_reserve_is_answered_only_when_there_is_an_answer() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    assert harness.hear(Reserve(ID, NUM_TOKENS, 10_000)) == []
    harness.link.reserved(ID, 4, 0)
    assert harness.hear(Reserve(ID, NUM_TOKENS - 1, 10_000)) == []


@pytest.mark.parametrize("phase", ["failed", "committing"])
def test_a_chunk_after_the_end_is_discarded(phase: str) -> None:
    harness = Harness()
    harness.stream()
    if phase == "committing":
        harness.hear(seal())
    else:
        harness.hear(chunk(2, channel_seq=2, first_page=3, num_pages=2))  # out of the reservation
    before = harness.counters[Reason.LATE_MESSAGE]
    (place,) = harness.hear(chunk(3, channel_seq=9, first_page=0, num_pages=1))
    assert isinstance(place, Place)
    assert not place.is_wanted
    assert harness.counters[Reason.LATE_MESSAGE] == before + 1


def test_only_the_first_seal_counts() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    assert harness.hear(seal()) == []
    assert harness.counters[Reason.LATE_MESSAGE] == 1  # before there was anything to seal
    harness.link.reserved(ID, 4, 0)
    for index in range(2):
        harness.hear(chunk(index))
    harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0]))
    harness.hear(seal())
    assert harness.hear(seal(digest=bytes(16), first_token_id=8)) == []
    assert harness.counters[Reason.LATE_MESSAGE] == 2
    assert harness.link.placement(ChunkPlaced(ID, 1, DIGESTS[1])) == [CommitPages(ID, 7, 16)]
    assert harness.hear(seal()) == []
    assert harness.counters[Reason.LATE_MESSAGE] == 3


def test_while_the_worker_takes_the_pages_its_answer_stands() -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal())
    assert harness.link.abort(ID, RequestCancelled("x")) == []
    assert harness.link.link_lost(WorkerUnavailable("gone")) == []
    assert harness.link.committed(ID) == [Send(Committed(ID)), ReportEnded(ID, None)]


def test_the_deadline_does_not_touch_what_is_being_committed_or_has_failed() -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal(), now=9.9)
    harness.hear(Heartbeat(), now=10.0)
    harness.link.tick(10.0, 0)
    assert harness.counters[Reason.DEADLINE] == 0
    failing = Harness()
    failing.reserve()
    failing.hear(chunk(0))
    failing.hear(Abort(ID, "RequestCancelled", "x"), now=9.9)
    failing.link.tick(10.0, 1)
    assert failing.counters[Reason.DEADLINE] == 0


@pytest.mark.parametrize("outcome", ["committed", "refused"])
def test_a_sender_that_gave_up_during_the_commit_is_not_told_of_it(outcome: str) -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal())
    assert harness.hear(Abort(ID, "RequestCancelled", "first")) == []
    assert harness.hear(Abort(ID, "TransferFailed", "second")) == []
    if outcome == "committed":
        abandon, end, ack = harness.link.committed(ID)
        assert isinstance(abandon, AbandonPages)
        assert (type(abandon.error), abandon.error.message) == (RequestCancelled, "first")
        assert (end, ack) == (ReportEnded(ID, None), Send(AbortAck(ID)))
        return
    revoke, release = harness.link.commit_failed(ID, TransferFailed("no"))
    assert revoke == Revoke(ID)
    assert isinstance(release, ReleasePages)
    assert isinstance(release.error, RequestCancelled)
    actions = harness.link.released(ID)
    assert [type(error) for error in ended(actions)] == [RequestCancelled]
    assert actions[1:] == [Send(AbortAck(ID))]


def test_a_commit_that_fails_is_told() -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal())
    assert sent(harness.link.commit_failed(ID, TransferFailed("no")), Abort) == [Abort(ID, "TransferFailed", "no")]


def test_an_abort_that_crosses_the_commit_ends_what_was_begun() -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal())
    harness.link.committed(ID)
    for _ in range(2):
        abandon, ack = harness.hear(Abort(ID, "RequestCancelled", "x"))
        assert isinstance(abandon, AbandonPages)
        assert isinstance(abandon.error, RequestCancelled)
        assert ack == Send(AbortAck(ID))


def alive(harness: Harness, begin_s: int, end_s: int) -> list[Action]:
    """The actions of all ticks, once a second, of a Link whose sender is well."""
    actions: list[Action] = []
    for now in range(begin_s, end_s + 1):
        harness.hear(Heartbeat(), now=float(now))
        actions += [each for each in harness.link.tick(float(now), now) if each != Send(Heartbeat())]
    return actions


def test_a_worker_that_does_not_reserve_in_time_fails_the_transfer_and_gets_its_pages_back() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 100_000))
    assert alive(harness, 0, 7) == []
    (abort,) = sent(alive(harness, 8, 8), Abort)
    assert alive(harness, 9, 30) == []
    assert isinstance(abort, Abort)
    assert abort.code == "TransferFailed"
    assert harness.counters[Reason.WORKER_SILENT] == 1
    assert [type(action) for action in harness.link.reserved(ID, 4, 0)] == [ReleasePages]


@pytest.mark.parametrize("has_aborted", [False, True])
def test_a_commit_that_succeeds_too_late_is_abandoned(has_aborted: bool) -> None:
    harness = Harness()
    harness.stream()
    harness.hear(seal())
    if has_aborted:
        harness.hear(Abort(ID, "RequestCancelled", "x"))
    assert alive(harness, 0, 7) == []
    aborts = sent(alive(harness, 8, 30), Abort)
    assert len(aborts) == (0 if has_aborted else 1)
    assert harness.counters[Reason.WORKER_SILENT] == 1
    (abandon, *_) = harness.link.committed(ID)
    assert isinstance(abandon, AbandonPages)
    assert isinstance(abandon.error, RequestCancelled if has_aborted else TransferFailed)


def test_a_worker_that_does_not_release_is_counted_once_and_nobody_is_told_that_the_pages_are_free() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(Abort(ID, "RequestCancelled", "x"))
    assert alive(harness, 0, 30) == []
    assert harness.counters[Reason.WORKER_SILENT] == 1
    assert sent(harness.link.released(ID), AbortAck) == [AbortAck(ID)]


def test_a_worker_that_answered_owes_nothing() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 100_000))
    alive(harness, 0, 7)
    harness.link.reserved(ID, 4, 0)
    assert alive(harness, 8, 30) == []
    assert harness.counters[Reason.WORKER_SILENT] == 0


def test_the_third_wrong_checksum_ends_the_link_and_nothing_else_does() -> None:
    harness = Harness()
    for attempt in range(1, 8):
        transfer_id = TransferId("r", attempt)
        harness.hear(Reserve(transfer_id, NUM_TOKENS, 10_000))
        harness.link.reserved(transfer_id, 4, 0)
        harness.hear(dataclasses.replace(chunk(0, channel_seq=attempt), id=transfer_id))
        is_wrong = attempt > 4
        reason = Reason.CHECKSUM_MISMATCH if is_wrong else Reason.WRONG_SIZE
        actions = harness.link.placement(ChunkLost(transfer_id, 0, reason))
        assert any(isinstance(action, FailLink) for action in actions) is (attempt == 7)


def test_giving_up_what_is_not_known_is_nothing() -> None:
    harness = Harness()
    assert harness.link.abort(ID, RequestCancelled("x")) == []
    harness.reserve()
    assert failed(harness.link.abort(ID, RequestCancelled("x")))


@pytest.mark.parametrize("end", ["out of turn", "silent"])
def test_a_sender_at_fault_does_not_make_the_receiver_unavailable(end: str) -> None:
    """A worker that reports WorkerUnavailable reports its own failure."""
    harness = Harness()
    if end == "out of turn":
        (fail,) = harness.hear(Committed(ID))
    else:
        (fail,) = [harness.link.tick(tenth / 10, 0) for tenth in range(31)][-1]
    assert isinstance(fail, FailLink)
    assert type(fail.error) is TransferFailed


@pytest.mark.parametrize("moment", ["before the commit", "during the commit", "after the commit"])
def test_a_sender_that_is_unavailable_is_a_failed_transfer_here(moment: str) -> None:
    harness = Harness()
    harness.stream()
    if moment != "before the commit":
        harness.hear(seal())
    if moment == "after the commit":
        harness.link.committed(ID)
    actions = harness.hear(Abort(ID, "WorkerUnavailable", "the prefill worker failed"))
    if moment == "during the commit":
        actions = harness.link.committed(ID)
    errors = [action.error for action in actions if isinstance(action, ReleasePages | AbandonPages)]
    assert [type(error) for error in errors] == [TransferFailed]


def test_an_acknowledgement_ends_nothing() -> None:
    harness = Harness()
    harness.reserve()
    assert harness.hear(AbortAck(ID)) == []
    assert harness.hear(chunk(0))[0] == Place(ID, 0, 0, 1, 0, 2, is_wanted=True)


def test_a_lost_link_is_lost_once_and_says_nothing_more() -> None:
    harness = Harness()
    harness.reserve()
    actions = harness.link.link_lost(WorkerUnavailable("gone"))
    assert [type(action) for action in actions] == [Revoke, ReleasePages]
    assert harness.link.link_lost(WorkerUnavailable("gone")) == []
    assert harness.counters[Reason.LINK_LOST] == 1
    assert harness.link.tick(60.0, 0) == []


def test_a_link_is_asked_to_retire_only_while_it_is_idle() -> None:
    harness = Harness()
    assert harness.link.is_idle
    assert harness.link.retire() == [Send(Retire())]
    assert harness.link.is_retiring
    harness.reserve()
    assert not harness.link.is_idle
    assert not harness.link.is_retiring, "a transfer has begun, so the sender continues to use the Link"
    assert harness.link.retire() == []
    assert not harness.link.is_retiring


def test_the_end_of_a_link_that_was_asked_to_retire_is_no_fault() -> None:
    harness = Harness()
    harness.link.retire()
    assert harness.link.link_lost(WorkerUnavailable("the sender ended the Link")) == []
    assert harness.counters[Reason.LINK_LOST] == 0
    assert harness.link.retire() == [], "it is lost"


def test_the_receiver_beats_once_a_second() -> None:
    harness = Harness()
    beats = []
    for tenth in range(1, 31):
        harness.hear(Heartbeat(), now=tenth / 10)
        if Send(Heartbeat()) in harness.link.tick(tenth / 10, 0):
            beats.append(tenth / 10)
    assert beats == [1.0, 2.0, 3.0]


def test_a_transfer_has_at_least_one_token() -> None:
    harness = Harness()
    assert sent(harness.hear(Reserve(ID, 0, 10_000)), Abort)
    assert harness.counters[Reason.PROTOCOL_VIOLATION] == 1
    assert harness.hear(Reserve(ID, 1, 10_000)) == [ReservePages(ID, 1)]


def test_a_chunk_may_have_one_page() -> None:
    harness = Harness()
    harness.reserve()
    assert harness.hear(chunk(0, num_pages=1)) == [Place(ID, 0, 0, 1, 0, 1, is_wanted=True)]


def test_a_chunk_of_an_unknown_transfer_is_discarded_once() -> None:
    harness = Harness()
    harness.hear(chunk(0))
    assert harness.hear(chunk(0)) == []
    assert harness.counters[Reason.DUPLICATE_CHUNK] == 1
    assert harness.counters[Reason.LATE_MESSAGE] == 1


def test_a_channel_that_owes_nothing_is_not_stalled() -> None:
    harness = Harness()
    harness.reserve()
    for second in range(1, 9):
        harness.hear(Heartbeat(), now=float(second))
        assert not any(isinstance(action, FailLink) for action in harness.link.tick(float(second), 0))
    # Time in which nothing was owed does not count, also where nobody looked at the clock.
    harness.hear(chunk(0, num_pages=1), now=15.9)
    quiet = Harness()
    quiet.hear(Reserve(ID, NUM_TOKENS, 100_000))
    quiet.link.reserved(ID, 4, 0)
    quiet.hear(chunk(0), now=6.0)
    assert not any(isinstance(action, FailLink) for action in quiet.link.tick(6.1, 0))


def test_an_older_attempt_that_ended_is_not_superseded() -> None:
    harness = Harness()
    harness.hear(Reserve(ID, NUM_TOKENS, 10_000))
    harness.link.reserve_failed(ID, NoFreePages("full"))
    newer = TransferId(ID.request_id, 2)
    assert harness.hear(Reserve(newer, NUM_TOKENS, 10_000)) == [ReservePages(newer, NUM_TOKENS)]


def test_a_stale_generation_fails_the_transfer_and_is_counted() -> None:
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    assert failed(harness.link.placement(ChunkLost(ID, 0, Reason.STALE_GENERATION)))
    assert harness.counters[Reason.STALE_GENERATION] == 1


def test_a_chunk_that_was_placed_before_the_failure_is_not_committed_after_it() -> None:
    """The channel's answer and the abort cross between two threads."""
    harness = Harness()
    harness.reserve()
    harness.hear(chunk(0))
    harness.hear(chunk(1))
    harness.hear(seal())
    harness.hear(Abort(ID, "RequestCancelled", "x"))
    assert harness.link.placement(ChunkPlaced(ID, 0, DIGESTS[0])) == []
    assert [type(action) for action in harness.link.placement(ChunkPlaced(ID, 1, DIGESTS[1]))] == [ReleasePages]
