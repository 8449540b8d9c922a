"""What the sender's machine does, one rule at a time. The property tests have the interleavings."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.protocol.actions import (
    Action,
    FailLink,
    PostChunk,
    ReportCommitted,
    ReportFailed,
    ReportGranted,
    ReportReleased,
    RetireLink,
    Send,
    SkipChunks,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.messages import (
    Abort,
    AbortAck,
    ChunkHeader,
    Committed,
    Granted,
    Heartbeat,
    Reserve,
    Retire,
    Seal,
    TransferId,
    WireLayout,
    seal_digest,
)
from kv_transfer.protocol.sender import SenderLink
from kv_transfer.protocol.timing import Timeouts
from services.runtime.errors import DeadlineExceeded, NoFreePages, RequestCancelled, TransferFailed, WorkerUnavailable

LAYOUT = WireLayout("f", 4, "float32", 1, 1, 1, True)
ID = TransferId("r", 1)
NUM_TOKENS = 15
DIGESTS = [bytes([index]) * 16 for index in range(4)]
CANCELLED = RequestCancelled("cancelled")


@pytest.fixture
def link() -> SenderLink:
    return SenderLink(layout=LAYOUT, frame_pages=2, timeouts=Timeouts(), counters=Counters(), now=0.0)


def grant(link: SenderLink, num_cached_tokens: int = 0, deadline: float = 100.0) -> None:
    assert link.reserve(ID, NUM_TOKENS, deadline=deadline, now=0.0) == [
        Send(Reserve(ID, NUM_TOKENS, int(deadline * 1000)))
    ]
    assert link.on_message(Granted(ID, num_cached_tokens), 0.0) == [ReportGranted(ID, num_cached_tokens)]


def seal(link: SenderLink) -> list[Action]:
    return link.seal(ID, num_tokens=NUM_TOKENS, first_token_id=7, sampling_position=16, now=0.0)


def errors(actions: list[Action]) -> list[type]:
    return [type(action.error) for action in actions if isinstance(action, ReportFailed)]


def test_a_good_transfer(link: SenderLink) -> None:
    grant(link)
    page = LAYOUT.page_bytes
    assert link.send(ID, 0, [5, 6, 7]) == [
        Send(ChunkHeader(ID, 0, 0, 0, 3, 3 * page)),
        PostChunk(ID, 0, 0, 0, (5, 6, 7)),
    ]
    # Three pages took two frames, so the next chunk begins at the third.
    assert link.send(ID, 3, [1]) == [Send(ChunkHeader(ID, 1, 2, 3, 1, page)), PostChunk(ID, 1, 2, 3, (1,))]
    assert seal(link) == []
    assert link.chunk_posted(ID, 0, DIGESTS[0], 0.0) == []
    (sealed,) = link.chunk_posted(ID, 1, DIGESTS[1], 0.0)
    manifest = Seal(ID, 2, 4, 4 * page, NUM_TOKENS, b"", 7, 16)
    digest = seal_digest(manifest, [(0, 3, DIGESTS[0]), (3, 1, DIGESTS[1])])
    assert sealed == Send(dataclasses.replace(manifest, digest=digest))
    assert link.on_message(Committed(ID), 0.0) == [ReportCommitted(ID, 4, 4 * page), ReportReleased(ID)]
    assert not link.transfers


def test_cached_pages_are_left_out_wherever_the_first_send_begins(link: SenderLink) -> None:
    grant(link, num_cached_tokens=8)
    assert link.send(ID, 0, [1, 2]) == []
    post = link.send(ID, 1, [2, 3])[1]
    assert isinstance(post, PostChunk)
    assert (post.first_page, post.page_ids) == (2, (3,))


@pytest.mark.parametrize("num_cached_tokens", [3, 16, 2**32 - 1])
def test_an_impossible_grant_fails_the_transfer(link: SenderLink, num_cached_tokens: int) -> None:
    link.reserve(ID, NUM_TOKENS, deadline=100.0, now=0.0)
    assert errors(link.on_message(Granted(ID, num_cached_tokens), 0.0)) == [TransferFailed]


def test_a_refusal_has_the_receivers_class_and_is_acknowledged(link: SenderLink) -> None:
    link.reserve(ID, NUM_TOKENS, deadline=100.0, now=0.0)
    actions = link.on_message(Abort(ID, "NoFreePages", "full"), 0.0)
    assert errors(actions) == [NoFreePages]
    assert actions[-2:] == [ReportReleased(ID), Send(AbortAck(ID))]


def test_pages_are_released_only_when_nothing_reads_them(link: SenderLink) -> None:
    grant(link)
    link.send(ID, 0, [1, 2])
    link.send(ID, 2, [3, 4])
    actions = link.abort(ID, CANCELLED, 0.0)
    assert SkipChunks(ID) in actions
    assert ReportReleased(ID) not in actions
    assert link.chunk_posted(ID, 0, DIGESTS[0], 0.0) == []
    assert link.chunk_skipped(ID) == [ReportReleased(ID)]
    assert link.abort(ID, CANCELLED, 0.0) == []
    # It is remembered until the receiver has answered, and the answer changes nothing more.
    assert link.on_message(AbortAck(ID), 0.0) == []
    assert not link.transfers


def test_a_receivers_abort_is_acknowledged_when_nothing_is_read(link: SenderLink) -> None:
    grant(link)
    link.send(ID, 0, [1])
    assert Send(AbortAck(ID)) not in link.on_message(Abort(ID, "RequestCancelled", "x"), 0.0)
    assert link.chunk_skipped(ID) == [ReportReleased(ID), Send(AbortAck(ID))]
    assert link.on_message(Abort(ID, "RequestCancelled", "x"), 0.0) == [Send(AbortAck(ID))]


def test_what_comes_for_an_ended_transfer_is_ignored(link: SenderLink) -> None:
    grant(link)
    link.abort(ID, CANCELLED, 0.0)
    assert link.on_message(Committed(ID), 0.0) == []
    assert link.on_message(Granted(ID, 4), 0.0) == []
    with pytest.raises(RequestCancelled):
        link.send(ID, 0, [1])
    with pytest.raises(RequestCancelled):
        seal(link)


def test_a_commit_that_was_not_asked_for_is_ignored(link: SenderLink) -> None:
    grant(link)
    assert link.on_message(Committed(ID), 0.0) == []


@pytest.mark.parametrize("phase", ["reserving", "streaming", "sealed"])
def test_the_deadline_is_kept_without_the_receiver(link: SenderLink, phase: str) -> None:
    link.reserve(ID, NUM_TOKENS, deadline=2.0, now=0.0)
    if phase != "reserving":
        link.on_message(Granted(ID, 0), 0.0)
        link.send(ID, 0, [1, 2, 3, 4])
        link.chunk_posted(ID, 0, DIGESTS[0], 0.0)
    if phase == "sealed":
        seal(link)
    assert errors(link.tick(1.9)) == []
    assert errors(link.tick(2.0)) == [DeadlineExceeded]


def test_a_receiver_that_is_slow_to_answer_is_given_up(link: SenderLink) -> None:
    link.reserve(ID, NUM_TOKENS, deadline=100.0, now=0.0)
    for now in range(1, 11):
        link.on_message(Heartbeat(), float(now))
        actions = link.tick(float(now))
        assert errors(actions) == ([TransferFailed] if now == 10 else [])


def test_an_abort_without_an_answer_is_forgotten_after_a_while(link: SenderLink) -> None:
    grant(link)
    link.abort(ID, CANCELLED, 0.0)
    assert link.transfers
    link.on_message(Heartbeat(), 3.0)
    link.tick(3.0)
    assert not link.transfers


def test_a_silent_receiver_is_dead_after_three_seconds(link: SenderLink) -> None:
    for tenth in range(1, 30):
        assert not any(isinstance(action, FailLink) for action in link.tick(tenth / 10))
    assert any(isinstance(action, FailLink) for action in link.tick(3.0))


def test_it_beats_once_a_second(link: SenderLink) -> None:
    beats = []
    for tenth in range(1, 51):
        link.on_message(Heartbeat(), tenth / 10)
        if Send(Heartbeat()) in link.tick(tenth / 10):
            beats.append(tenth / 10)
    assert beats == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_lost_link_fails_everything_and_takes_nothing_more(link: SenderLink) -> None:
    grant(link)
    link.send(ID, 0, [1])
    assert errors(link.link_lost(WorkerUnavailable("gone"))) == [WorkerUnavailable]
    assert link.link_lost(WorkerUnavailable("gone")) == []
    assert link.tick(50.0) == []
    assert link.chunk_skipped(ID) == [ReportReleased(ID)]
    with pytest.raises(WorkerUnavailable):
        link.reserve(TransferId("other", 1), 4, deadline=100.0, now=0.0)


def test_an_idle_link_retires_when_the_receiver_asks_for_it(link: SenderLink) -> None:
    assert link.on_message(Retire(), 0.0) == [RetireLink()]


def test_a_link_with_a_transfer_does_not_retire(link: SenderLink) -> None:
    """Its first message may cross the question."""
    link.reserve(ID, NUM_TOKENS, deadline=100.0, now=0.0)
    assert link.on_message(Retire(), 0.0) == []
    assert link.transfers


def test_a_receiver_that_is_unavailable_is_a_failed_transfer_here(link: SenderLink) -> None:
    grant(link)
    actions = link.on_message(Abort(ID, "WorkerUnavailable", "the decode worker failed"), 0.0)
    assert errors(actions) == [TransferFailed]
    (fail,) = link.on_message(Abort(None, "WorkerUnavailable", "shutting down"), 0.0)
    assert isinstance(fail, FailLink)
    assert type(fail.error) is TransferFailed


def test_a_message_out_of_turn_ends_the_link() -> None:
    counters = Counters()
    link = SenderLink(layout=LAYOUT, frame_pages=2, timeouts=Timeouts(), counters=counters, now=0.0)
    assert [type(action) for action in link.on_message(Reserve(ID, 1, 1), 0.0)] == [FailLink]
    assert counters[Reason.PROTOCOL_VIOLATION] == 1


def test_a_refusal_says_when_to_ask_again(link: SenderLink) -> None:
    link.reserve(ID, NUM_TOKENS, deadline=100.0, now=0.0)
    actions = link.on_message(Abort(ID, "NoFreePages", "full", retry_after_ms=250), 0.0)
    (error,) = [action.error for action in actions if isinstance(action, ReportFailed)]
    assert error.retry_after_s == 0.25


def test_pages_that_were_given_away_fail_the_transfer() -> None:
    counters = Counters()
    link = SenderLink(layout=LAYOUT, frame_pages=2, timeouts=Timeouts(), counters=counters, now=0.0)
    grant(link)
    link.send(ID, 0, [1, 2])
    link.send(ID, 2, [3, 4])
    actions = link.chunk_stale(ID, 0.0)
    assert errors(actions) == [TransferFailed]
    assert any(isinstance(action, Send) and isinstance(action.message, Abort) for action in actions)
    assert ReportReleased(ID) not in actions
    assert counters[Reason.STALE_GENERATION] == 1
    assert link.chunk_skipped(ID) == [ReportReleased(ID)]
