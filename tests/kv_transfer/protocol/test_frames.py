"""Which frames may be written where: the table's rules, one at a time."""

from __future__ import annotations

import pytest

from kv_transfer.protocol.actions import Place
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.frames import (
    ChunkLost,
    ChunkPlaced,
    ChunkRevoked,
    Drop,
    PlacementTable,
    Wait,
    Write,
)
from kv_transfer.protocol.messages import TransferId, chain_digest

A, B = TransferId("a", 1), TransferId("b", 1)
PAGE = 100
DIGESTS = [bytes([index]) * 16 for index in range(9)]


@pytest.fixture
def table() -> PlacementTable:
    return PlacementTable(frame_pages=2, page_bytes=PAGE)


def place(transfer_id: TransferId, first_seq: int, num_pages: int, *, is_wanted: bool = True) -> Place:
    return Place(transfer_id, 0, first_seq, -(-num_pages // 2), first_page=10, num_pages=num_pages, is_wanted=is_wanted)


def test_frames_of_a_chunk_go_to_its_pages_in_order(table: PlacementTable) -> None:
    assert table.add(place(A, 0, 5)) == []
    for seq, (first_page, num_pages) in enumerate([(10, 2), (12, 2), (14, 1)]):
        assert table.begin(seq, num_pages * PAGE) == (Write(A, first_page, num_pages), [])
        events = table.finish(seq, DIGESTS[seq])
    assert events == [ChunkPlaced(A, 0, chain_digest(DIGESTS[:3]))]
    assert len(table) == 0


def test_a_frame_waits_for_its_header(table: PlacementTable) -> None:
    assert table.begin(0, PAGE) == (Wait(), [])
    table.add(place(A, 0, 1))
    assert table.begin(0, PAGE) == (Write(A, 10, 1), [])


@pytest.mark.parametrize("num_bytes", [1, PAGE, 2 * PAGE - 1, 2 * PAGE + 1, 3 * PAGE])
def test_a_frame_of_the_wrong_size_loses_its_chunk(table: PlacementTable, num_bytes: int) -> None:
    table.add(place(A, 0, 4))
    assert table.begin(0, num_bytes) == (Drop(None), [ChunkLost(A, 0, Reason.WRONG_SIZE)])
    assert table.begin(1, 2 * PAGE) == (Drop(Reason.LATE_FRAME), [])


def test_a_gap_within_a_chunk_loses_it(table: PlacementTable) -> None:
    table.add(place(A, 0, 6))
    table.begin(0, 2 * PAGE)
    table.finish(0, DIGESTS[0])
    assert table.begin(2, 2 * PAGE) == (Drop(None), [ChunkLost(A, 0, Reason.LOST_FRAME)])
    assert len(table) == 0


def test_a_gap_over_a_chunk_loses_it_and_spares_the_next(table: PlacementTable) -> None:
    table.add(place(A, 0, 2))
    table.add(place(B, 1, 2))
    assert table.begin(1, 2 * PAGE) == (Write(B, 10, 2), [ChunkLost(A, 0, Reason.LOST_FRAME)])


@pytest.mark.parametrize("seq", [0, 1])
def test_a_number_that_went_by_is_dropped(table: PlacementTable, seq: int) -> None:
    table.add(place(A, 0, 6))
    for done in range(2):
        table.begin(done, 2 * PAGE)
        table.finish(done, DIGESTS[done])
    assert table.begin(seq, 2 * PAGE) == (Drop(Reason.REPLAYED_FRAME), [])
    assert table.begin(2, 2 * PAGE) == (Write(A, 14, 2), [])


def test_a_header_that_comes_after_its_frames_is_lost(table: PlacementTable) -> None:
    table.add(place(B, 5, 2))
    table.begin(5, 2 * PAGE)
    table.finish(5, DIGESTS[0])
    assert table.add(place(A, 4, 2)) == [ChunkLost(A, 0, Reason.LOST_FRAME)]
    assert len(table) == 0


def test_a_wrong_checksum_loses_the_chunk_at_once(table: PlacementTable) -> None:
    table.add(place(A, 0, 4))
    table.begin(0, 2 * PAGE)
    assert table.finish(0, None) == [ChunkLost(A, 0, Reason.CHECKSUM_MISMATCH)]
    assert table.begin(1, 2 * PAGE) == (Drop(Reason.LATE_FRAME), [])


def test_a_revoked_chunk_is_answered_at_once_and_its_frames_are_dropped(table: PlacementTable) -> None:
    table.add(place(A, 0, 2))
    table.add(place(B, 1, 2))
    assert table.revoke(A) == [ChunkRevoked(A, 0)]
    assert table.revoke(A) == []
    assert table.begin(0, 2 * PAGE) == (Drop(Reason.LATE_FRAME), [])
    assert table.begin(1, 2 * PAGE) == (Write(B, 10, 2), [])


def test_a_chunk_that_is_being_copied_is_answered_when_the_copy_ends(table: PlacementTable) -> None:
    table.add(place(A, 0, 4))
    table.begin(0, 2 * PAGE)
    assert table.revoke(A) == []
    assert table.finish(0, DIGESTS[0]) == [ChunkRevoked(A, 0)]


def test_an_empty_frame_ends_what_the_sender_left_out(table: PlacementTable) -> None:
    table.add(place(A, 0, 6))
    table.add(place(B, 3, 2))
    table.begin(0, 2 * PAGE)
    table.finish(0, DIGESTS[0])
    assert table.begin(2, 0) == (Drop(None), [ChunkRevoked(A, 0)])
    assert table.begin(1, 2 * PAGE) == (Drop(Reason.REPLAYED_FRAME), [])
    assert table.begin(3, 2 * PAGE) == (Write(B, 10, 2), [])


def test_unwanted_chunks_are_taken_from_the_channel_in_silence(table: PlacementTable) -> None:
    table.add(place(A, 0, 4, is_wanted=False))
    for seq in range(2):
        assert table.begin(seq, 2 * PAGE) == (Drop(Reason.LATE_FRAME), [])
    assert len(table) == 0


def test_a_closed_table_answers_for_all_and_takes_nothing_more(table: PlacementTable) -> None:
    table.add(place(A, 0, 2))
    table.add(place(B, 1, 2, is_wanted=False))
    assert table.close() == [ChunkRevoked(A, 0)]
    assert table.add(place(A, 2, 2)) == [ChunkRevoked(A, 0)]
    assert table.add(place(B, 3, 2, is_wanted=False)) == []


def test_a_page_that_was_given_away_loses_its_chunk_for_that_reason(table: PlacementTable) -> None:
    table.add(place(A, 0, 4))
    table.begin(0, 2 * PAGE)
    assert table.finish(0, None, Reason.STALE_GENERATION) == [ChunkLost(A, 0, Reason.STALE_GENERATION)]


def test_a_chunk_is_answered_at_once_between_two_copies(table: PlacementTable) -> None:
    table.add(place(A, 0, 4))
    table.begin(0, 2 * PAGE)
    table.finish(0, DIGESTS[0])
    assert table.revoke(A) == [ChunkRevoked(A, 0)]


def test_a_chunk_that_was_answered_is_not_answered_again(table: PlacementTable) -> None:
    table.add(place(A, 0, 2))
    table.add(place(B, 1, 2))
    table.revoke(A)
    assert table.begin(1, 2 * PAGE) == (Write(B, 10, 2), [])


def test_an_unwanted_chunk_that_is_left_out_is_not_answered(table: PlacementTable) -> None:
    table.add(place(A, 0, 4, is_wanted=False))
    assert table.begin(1, 0) == (Drop(None), [])
    assert len(table) == 0
    # Its numbers have gone by, even where they are claimed again.
    assert table.add(place(B, 2, 2)) == []
    assert table.begin(1, 2 * PAGE) == (Drop(Reason.REPLAYED_FRAME), [])


def test_an_unwanted_header_after_its_frames_is_not_answered(table: PlacementTable) -> None:
    table.add(place(B, 5, 2))
    table.begin(5, 2 * PAGE)
    table.finish(5, DIGESTS[0])
    assert table.add(place(A, 4, 2, is_wanted=False)) == []


def test_a_header_for_the_number_that_just_went_by_is_lost(table: PlacementTable) -> None:
    table.add(place(A, 0, 2))
    table.begin(0, 2 * PAGE)
    table.finish(0, DIGESTS[0])
    assert table.add(place(B, 0, 2)) == [ChunkLost(B, 0, Reason.LOST_FRAME)]


def test_a_closed_table_answers_for_a_chunk_whose_copy_was_revoked(table: PlacementTable) -> None:
    table.add(place(A, 0, 4))
    table.begin(0, 2 * PAGE)
    table.revoke(A)
    assert table.close() == [ChunkRevoked(A, 0)]
    assert table.close() == []
    assert len(table) == 0


def test_only_a_number_that_can_come_next_is_waited_for(table: PlacementTable) -> None:
    assert table.can_be_claimed(0, PAGE)
    assert not table.can_be_claimed(1, PAGE)
    table.add(place(A, 0, 4))
    assert table.can_be_claimed(2, PAGE)
    assert not table.can_be_claimed(3, PAGE)
    assert table.can_be_claimed(9, 0)  # the end of a chunk that was left out
    table.begin(1, 0)
    assert table.can_be_claimed(2, PAGE)


def test_a_frame_waits_for_its_header_also_where_a_later_one_came_first(table: PlacementTable) -> None:
    table.add(place(B, 1, 2))
    assert table.begin(0, 2 * PAGE) == (Wait(), [])
    table.add(place(A, 0, 2))
    assert table.begin(0, 2 * PAGE) == (Write(A, 10, 2), [])


def test_a_chunk_is_placed_with_its_last_frame_and_not_before(table: PlacementTable) -> None:
    table.add(place(A, 0, 4))
    table.begin(0, 2 * PAGE)
    assert table.finish(0, DIGESTS[0]) == []
    table.begin(1, 2 * PAGE)
    assert table.finish(1, DIGESTS[1]) == [ChunkPlaced(A, 0, chain_digest(DIGESTS[:2]))]
