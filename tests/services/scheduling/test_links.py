"""Meters of links: what handoffs of many chunks teach, what a late one says, how changes are noticed, what is due."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.links import AGAIN_S, DOUBT_S, MAX_PEERS, TRUST_S, Carried, LinkMeter, LinkMeters, LinkOpinion
from services.scheduling.prediction import DEFAULT_LINK, LinkSpeed
from tests.examples import examples

SLOW = LinkSpeed(0.003, 30e6 / 8)
MIB = 2**20


class Wire:
    """A link that carries bytes in order, at one rate."""

    def __init__(self, speed):
        self.speed = speed
        self.free_s = 0.0

    def put(self, num_bytes, now_s):
        """Returns when they have arrived."""
        self.free_s = max(self.free_s, now_s) + num_bytes / self.speed.bytes_per_s
        return self.free_s + self.speed.latency_s


def hand_over(meter, wire, key, chunks, start_s, step_s):
    """A chunk each `step_s`; returns when the handoff has arrived."""
    now_s = start_s
    for num_bytes in chunks:
        now_s += step_s
        meter.sent(key, num_bytes, now_s)
        there_s = wire.put(num_bytes, now_s)
    meter.sealed(key)
    meter.arrived(key, there_s)
    return there_s


@settings(max_examples=examples(200), deadline=None)
@given(
    rate=st.floats(1e6, 1e10),
    latency_s=st.floats(0.0, 0.05),
    num_chunks=st.integers(1, 20),
    chunk_bytes=st.integers(100_000, 20_000_000),
    step_s=st.floats(0.001, 1.0),
)
def test_a_few_handoffs_of_any_number_of_chunks_teach_what_the_next_one_takes(
    rate, latency_s, num_chunks, chunk_bytes, step_s
):
    wire, meter, now_s = Wire(LinkSpeed(latency_s, rate)), LinkMeter(), 0.0
    meter.opinion.observe(2048, wire.speed.time_s(2048), 0.0)  # as a probe does after the first
    for number in range(6):
        now_s = hand_over(meter, wire, number, [chunk_bytes] * num_chunks, now_s, step_s)
    learnt = Wire(meter.speed(now_s))
    sent_s = [now_s + step_s * number for number in range(num_chunks)]
    ends_s = [max(way.put(chunk_bytes, at_s) for at_s in sent_s) - sent_s[-1] for way in (learnt, wire)]
    # What is not hidden behind the computation is a small difference of large times where they are nearly equal.
    whole_s = num_chunks * chunk_bytes / rate
    assert ends_s[0] == pytest.approx(ends_s[1], rel=0.1, abs=0.03 * whole_s)


@pytest.mark.parametrize("mbit", [30, 300, 3000])
def test_the_rate_is_the_links_whatever_the_sizes_are(mbit):
    rng, wire, meter, now_s = random.Random(mbit), Wire(LinkSpeed(0.002, mbit * 125_000)), LinkMeter(), 0.0
    for number in range(10):
        chunks = [rng.randrange(200_000, 6_000_000) for _ in range(rng.randrange(1, 9))]
        now_s = hand_over(meter, wire, number, chunks, now_s + rng.random(), rng.uniform(0.01, 0.2))
    assert meter.speed(now_s).bytes_per_s == pytest.approx(mbit * 125_000, rel=0.05)


def test_handoffs_that_share_a_link_are_not_taken_for_a_slower_one():
    wire, meter = Wire(LinkSpeed(0.001, 1e7)), LinkMeter()
    ends = []
    for key in range(4):
        meter.sent(key, 10**7, 0.1 * key)
        ends.append(wire.put(10**7, 0.1 * key))
        meter.sealed(key)
    assert meter.underway_bytes(0.3) > 2.9e7
    for key, end_s in enumerate(ends):
        meter.arrived(key, end_s)
    assert meter.speed(ends[-1]).bytes_per_s == pytest.approx(1e7, rel=0.02)
    assert meter.underway_bytes(ends[-1]) == 0


def test_what_is_under_way_becomes_less_with_time_and_is_nothing_at_the_end():
    wire, meter = Wire(SLOW), LinkMeter()
    now_s = hand_over(meter, wire, "first", [10**6] * 5, 0.0, 0.01)
    meter.sent("second", 4 * 10**6, now_s)
    there_s = wire.put(4 * 10**6, now_s)
    left = [meter.underway_bytes(now_s + share * (there_s - now_s)) for share in (0.0, 0.25, 0.5, 0.75)]
    assert left == sorted(left, reverse=True)
    assert left[2] == pytest.approx(2 * 10**6, rel=0.1)
    meter.arrived("second", there_s)
    assert meter.underway_bytes(there_s) == 0


def test_a_handoff_that_is_late_says_so_before_it_is_there():
    meter = LinkMeter()
    for chunk in range(10):
        meter.sent("r", 9_200_000, 0.1 * chunk)
    # While it is computed, silence says nothing.
    assert meter.speed(5.0) == DEFAULT_LINK
    meter.sealed("r")
    assert meter.speed(5.0).bytes_per_s <= 92e6 / 4
    assert meter.speed(20.0).time_s(92_000_000) > 18
    # And it is not forgotten if nobody waits for its end.
    meter.lost("r", 20.0)
    assert meter.speed(20.0).time_s(92_000_000) > 18


def test_a_worker_that_died_is_no_slow_link():
    meter = learnt(LinkSpeed(0.001, 1e9))
    for key in range(5):
        meter.sent(key, 10 * MIB, 1.0)
        meter.sealed(key)
    for key in range(5):
        meter.lost(key, 4.0, is_cut=True)
    assert meter.speed(4.0).time_s(10 * MIB) < 0.02
    assert meter.underway_bytes(4.0) == 0


def test_what_was_left_out_teaches_nothing():
    meter = LinkMeter()
    meter.sent("a", 50 * MIB, 0.0)
    meter.sent("b", MIB, 0.0)
    meter.lost("a", 0.001)
    assert meter.arrived("b", 0.01) is None
    assert meter.speed(0.01) == DEFAULT_LINK
    assert meter.arrived("b", 0.01) is None
    assert meter.arrived("c", 0.01) is None


def learnt(speed, at_s=0.0):
    meter = LinkMeter()
    for size in (2048, 5 * MIB, 10 * MIB, 20 * MIB):
        meter.opinion.observe(size, speed.time_s(size), at_s)
    assert meter.speed(at_s).bytes_per_s == pytest.approx(speed.bytes_per_s, rel=0.02)
    return meter


@pytest.mark.parametrize("now", [LinkSpeed(0.001, 1e9), LinkSpeed(0.003, 100e6 / 8), LinkSpeed(0.003, 3e6 / 8)])
def test_one_probe_after_a_while_is_believed(now):
    meter = learnt(SLOW)
    assert not meter.is_due(DOUBT_S - 0.1)
    assert meter.is_due(DOUBT_S)
    for size in (2048, 256 * 1024):
        meter.opinion.observe(size, now.time_s(size), DOUBT_S)
    assert meter.speed(DOUBT_S).time_s(20 * MIB) == pytest.approx(now.time_s(20 * MIB), rel=0.25)
    assert not meter.is_due(DOUBT_S + 1)


def test_under_load_the_second_surprise_on_one_side_is_believed_and_one_hiccup_is_not():
    meter = learnt(LinkSpeed(0.001, 1e9))
    for time_s in (1.0, 0.011):
        meter.opinion.observe(10 * MIB, time_s, 1.0)
    assert meter.speed(1.0).time_s(10 * MIB) < 0.03
    for _ in range(2):
        meter.opinion.observe(10 * MIB, 1.0, 2.0)
    assert meter.speed(2.0).time_s(10 * MIB) == pytest.approx(1.0, rel=0.05)


def test_a_probe_that_fails_is_made_again_later_and_without_any_the_opinion_fades():
    meter = learnt(SLOW)
    assert meter.is_due(DOUBT_S)
    meter.tried(DOUBT_S)
    assert not meter.is_due(DOUBT_S + AGAIN_S / 2)
    assert meter.is_due(DOUBT_S + AGAIN_S)
    times_s = [meter.speed(now_s).time_s(MIB) for now_s in (15.0, 25.0, 35.0, 200.0)]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] == pytest.approx(SLOW.time_s(MIB), rel=0.05)
    assert times_s[-1] < 0.01


def test_a_fast_link_is_tried_rarely_and_a_busy_one_never():
    meter = learnt(LinkSpeed(0.0001, 1e9))
    assert not meter.is_due(TRUST_S - 1)
    assert meter.is_due(TRUST_S)
    meter.sent("r", MIB, TRUST_S)
    assert not meter.is_due(TRUST_S)


def test_nothing_that_says_nothing_is_heeded():
    opinion = LinkOpinion()
    for num_bytes, time_s in ((0, 1.0), (-1, 1.0), (10**6, 0.0), (10**6, -1.0), (10**6, float("nan"))):
        opinion.observe(num_bytes, time_s, 0.0)
    assert opinion.speed is DEFAULT_LINK
    # A link that was not used up is at least as fast: never slower than was believed.
    opinion.observe_at_least(10**6, 1.0, 0.0)
    assert opinion.speed is DEFAULT_LINK


def test_small_messages_tell_the_latency_and_leave_the_rate_open():
    opinion = LinkOpinion()
    opinion.observe(2048, 0.08, 0.0)
    assert opinion.speed.latency_s == pytest.approx(0.08, rel=0.15)
    assert opinion.speed.bytes_per_s == DEFAULT_LINK.bytes_per_s


def test_one_meter_for_each_worker_and_not_one_for_all():
    meters = LinkMeters()
    assert meters.usual() is None
    for worker_id, speed in (("slow", SLOW), ("fast", LinkSpeed(0.001, 1e9)), ("faster", LinkSpeed(0.0005, 2e9))):
        for size in (2048, 5 * MIB, 20 * MIB):
            meters.to(worker_id).opinion.observe(size, speed.time_s(size), 0.0)
    assert meters.to("slow").speed(0.0).time_s(92e6) > 20
    assert meters.to("fast").speed(0.0).time_s(92e6) < 0.2
    assert meters.usual() == meters.to("fast").speed(0.0)
    assert [worker_id for worker_id, _ in meters] == ["slow", "fast", "faster"]
    for number in range(MAX_PEERS):
        meters.to(f"other-{number}")
    assert len(list(meters)) == MAX_PEERS


def test_the_critical_part_is_what_the_link_was_busy_with():
    meter = LinkMeter()
    meter.sent("r", MIB, 0.0)
    meter.sent("r", MIB, 10.0)
    meter.sealed("r")
    assert meter.arrived("r", 10.1) == Carried(MIB, pytest.approx(0.1))
