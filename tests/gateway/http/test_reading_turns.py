"""Which connections may read on, in time that the test moves itself."""

import heapq
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http import reading_turns
from gateway.http.reading_turns import BURST_S, BYTES_PER_PART, MIN_READ_BYTES, SMALL_BYTES, Flow, Read, ReadingTurns

RATE = 2**20
PIECE = 256 * 1024


class Time:
    """An event loop that has only timers."""

    def __init__(self):
        self.now_s, self._timers = 100.0, []

    def time(self):
        return self.now_s

    def call_at(self, at_s, run):
        heapq.heappush(self._timers, (at_s, id(run), run))
        return run

    def pass_by(self, until_s, then):
        while self._timers and self._timers[0][0] <= until_s:
            self.now_s, _, run = heapq.heappop(self._timers)
            run()
            then()
        self.now_s = until_s


class Sender:
    """A connection whose client always has more to send."""

    def __init__(self, turns, *, is_wanted=True, piece_bytes=PIECE, num_left=-1, num_parts=1):
        self.num_parts = num_parts
        self.turns, self.is_wanted, self.piece_bytes, self.num_left = turns, is_wanted, piece_bytes, num_left
        self.num_bytes, self.is_reading = 0, True
        switch = SimpleNamespace(pause_reading=lambda: self.set(False), resume_reading=lambda: self.set(True))
        self.flow = Flow(switch)

    def set(self, is_reading):
        self.is_reading = is_reading

    def read(self):
        if self.is_reading:
            self.num_bytes += self.piece_bytes
            read = Read(self.piece_bytes, self.num_parts, num_left=self.num_left)
            self.turns.note_read(self.flow, read, is_wanted=self.is_wanted)


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr(reading_turns, "asyncio", SimpleNamespace(get_running_loop=lambda: time))
    return time


def run(time, senders, seconds):
    def read():
        for sender in senders:
            sender.read()

    read()
    time.pass_by(time.now_s + seconds, read)


def test_all_share_one_rate_evenly_and_use_it(time):
    turns = ReadingTurns(RATE)
    senders = [Sender(turns) for _ in range(8)]
    run(time, senders, 60.0)
    read = [sender.num_bytes for sender in senders]
    first = 8 * PIECE
    assert 60 * RATE - PIECE <= sum(read) <= (60 + BURST_S) * RATE + first
    assert max(read) - min(read) <= PIECE


def test_what_nobody_wants_is_read_after_what_somebody_wants(time):
    turns = ReadingTurns(RATE)
    senders = [Sender(turns, is_wanted=number == 7) for number in range(8)]
    run(time, senders, 60.0)
    assert senders[7].num_bytes > 0.9 * 60 * RATE
    turns.leave(senders[7].flow)
    run(time, senders[:7], 60.0)
    assert sum(sender.num_bytes for sender in senders[:7]) > 0.9 * 60 * RATE


def test_a_body_within_the_burst_never_waits(time):
    turns = ReadingTurns(RATE)
    sender = Sender(turns, piece_bytes=int(0.9 * BURST_S * RATE))
    for _ in range(10):
        sender.read()
        assert sender.is_reading
        time.pass_by(time.now_s + BURST_S, lambda: None)


def test_small_reads_are_not_free(time):
    turns = ReadingTurns(RATE)
    sender = Sender(turns, piece_bytes=1)
    run(time, [sender], 1.0)
    while sender.is_reading:
        sender.read()
    assert sender.num_bytes <= (1.0 + BURST_S) * RATE / MIN_READ_BYTES + 1


def test_what_is_dear_to_parse_counts_more_than_its_bytes(time):
    turns = ReadingTurns(RATE)
    dear, plain = Sender(turns, num_parts=4 * PIECE // BYTES_PER_PART), Sender(turns)
    run(time, [dear], 60.0)
    run(time, [plain], 60.0)
    assert abs(4 * dear.num_bytes - plain.num_bytes) <= 8 * PIECE


def test_what_waits_to_be_parsed_has_a_turn_of_its_own_also_where_there_is_time(time):
    turns, parsed = ReadingTurns(RATE), []
    sender = Sender(turns)

    def go_on():
        parsed.append(time.now_s)
        if len(parsed) < 3:
            turns.note_read(sender.flow, Read(1, is_cut=True), is_wanted=True)

    sender.flow.on_turn = go_on
    turns.note_read(sender.flow, Read(1, is_cut=True), is_wanted=True)
    assert not sender.is_reading
    time.pass_by(time.now_s + 1, lambda: None)
    assert len(parsed) == len(set(parsed)) == 3
    assert sender.is_reading


def test_one_that_has_ended_gets_no_turn(time):
    turns = ReadingTurns(RATE)
    sender = Sender(turns)
    sender.read()
    assert not sender.is_reading
    turns.leave(sender.flow)
    time.pass_by(time.now_s + 10, lambda: None)
    assert not sender.is_reading


@given(steps=st.lists(st.sampled_from(["pause_reading", "resume_reading", "lose_turn", "gain_turn"])))
def test_it_reads_where_it_is_wished_and_has_its_turn(steps):
    sender = Sender(None)
    is_wished = has_turn = True
    for step in steps:
        getattr(sender.flow, step)()
        is_wished = is_wished if step in ("lose_turn", "gain_turn") else step == "resume_reading"
        has_turn = has_turn if step in ("pause_reading", "resume_reading") else step == "gain_turn"
        assert sender.is_reading is (is_wished and has_turn)


def test_bodies_of_which_little_is_left_have_every_second_turn(time):
    """They wait for one large read, and not for one of each large body; and large ones get on beside many of them."""
    turns = ReadingTurns(RATE)
    large = [Sender(turns, num_left=num_left) for num_left in (SMALL_BYTES + 1, -1) * 20]
    small = [Sender(turns, piece_bytes=MIN_READ_BYTES, num_left=SMALL_BYTES) for _ in range(2)]
    run(time, large + small, 20.0)
    num_large = sum(sender.num_bytes for sender in large) // PIECE
    num_small = sum(sender.num_bytes for sender in small) // MIN_READ_BYTES
    assert num_large > 60
    assert abs(num_small - num_large) <= len(large) + 1  # each has a first read without a turn
