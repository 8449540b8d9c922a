"""Which rounds a probe makes, what a meter learns from them, and links that are tried again while nothing is sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import doubting
from kv_transfer import measure as probing
from kv_transfer.doubting import LinkDoubts
from kv_transfer.measure import LIMIT_S, RETRY_BYTES, ROUND_BYTES, SLOW_ROUND_S, Measured, next_round
from services.runtime.errors import WorkerUnavailable
from services.scheduling.links import DOUBT_S, Carried, LinkMeters
from services.scheduling.prediction import LinkSpeed
from tests.examples import examples
from tests.kv_transfer.conftest import PairMaker
from tests.waiting import until

MBIT = 125_000


def rounds_of(link: LinkSpeed, most_bytes: int = RETRY_BYTES) -> list[Carried]:
    seen: list[Carried] = []
    while (num_bytes := next_round(seen, most_bytes)) is not None:
        seen.append(Carried(num_bytes, link.time_s(num_bytes)))
    return seen


@pytest.mark.parametrize(("mbit", "most"), [(3, 400_000), (20, 200_000), (30, 200_000), (1000, 20 * 2**20)])
def test_a_slow_link_is_measured_without_being_filled(mbit: int, most: int) -> None:
    link = LinkSpeed(0.001, mbit * MBIT)
    seen = rounds_of(link, ROUND_BYTES)
    assert sum(one.num_bytes for one in seen) <= most
    measured = Measured({"tcp": seen})
    meters = LinkMeters()
    measured.teach(meters.to("d").opinion, "tcp", 0.0)
    assert meters.to("d").speed(0.0).bytes_per_s == pytest.approx(mbit * MBIT, rel=0.1)


def test_a_fast_link_is_measured_with_as_much_as_before() -> None:
    seen = rounds_of(LinkSpeed(0.0001, 5e9), ROUND_BYTES)
    assert [one.num_bytes for one in seen[-probing.NUM_ROUNDS :]] == [ROUND_BYTES] * probing.NUM_ROUNDS
    assert sum(one.num_bytes for one in rounds_of(LinkSpeed(0.0001, 5e9))) < 4 * RETRY_BYTES


def test_far_away_a_connection_gets_the_time_to_show_what_it_can_do() -> None:
    seen: list[Carried] = []
    while (num_bytes := next_round(seen, ROUND_BYTES)) is not None:
        # A tenth of a second for each doubling of what is on its way at once.
        window = 14_000 + sum(one.num_bytes for one in seen)
        trips = math.ceil(math.log2(1 + num_bytes / window))
        seen.append(Carried(num_bytes, 0.1 * trips + num_bytes / 1e9))
    assert seen[-1].num_bytes == ROUND_BYTES
    assert sum(one.time_s for one in seen) < 2 * LIMIT_S


@settings(max_examples=examples(200), deadline=None)
@given(latency_s=st.floats(0, 0.01), rate=st.floats(1e5, 1e11), most=st.sampled_from([RETRY_BYTES, ROUND_BYTES]))
def test_a_probe_ends_and_says_what_the_link_carries(latency_s: float, rate: float, most: int) -> None:
    link = LinkSpeed(latency_s, rate)
    seen = rounds_of(link, most)
    assert len(seen) < 12
    assert all(one.time_s < 4 * SLOW_ROUND_S for one in seen[2:])
    meters = LinkMeters()
    Measured({"tcp": seen}).teach(meters.to("d").opinion, "tcp", 0.0)
    last = seen[-1]
    assert meters.to("d").speed(0.0).time_s(last.num_bytes) == pytest.approx(last.time_s, rel=0.25)


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Prober:
    """Answers probes with what a link does."""

    def __init__(self) -> None:
        self.link: LinkSpeed | None = LinkSpeed(0.001, 30 * MBIT)
        self.asked: list[tuple[tuple[str, str], str]] = []

    async def __call__(self, key: tuple[str, str], transport: str) -> Measured:
        self.asked.append((key, transport))
        if self.link is None:
            raise WorkerUnavailable("nobody answers")
        return Measured({transport: rounds_of(self.link)})


@pytest.fixture
async def doubts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LinkDoubts, LinkMeters, Prober, HandClock]]:
    monkeypatch.setattr(doubting, "TICK_S", 0.002)
    meters, prober, clock = LinkMeters(), Prober(), HandClock()
    made = LinkDoubts(meters, prober, clock=clock)  # type: ignore[arg-type]
    yield made, meters, prober, clock
    await made.close()


async def test_a_recovered_link_is_noticed_while_nothing_is_sent(doubts: Any) -> None:
    made, meters, prober, clock = doubts
    for size in (2048, 10 * 2**20):
        meters.to("decode-0").opinion.observe(size, prober.link.time_s(size), 0.0)
    made.note("decode-0", ("there", "i"), "tcp")
    await asyncio.sleep(0.02)
    assert not prober.asked
    clock.now_s = DOUBT_S
    await until(lambda: len(prober.asked) == 1)
    assert meters.to("decode-0").speed(clock.now_s).bytes_per_s == pytest.approx(30 * MBIT, rel=0.1)
    prober.link = LinkSpeed(0.001, 1e9)
    clock.now_s = 2 * DOUBT_S + 0.1
    await until(lambda: len(prober.asked) == 2)
    await until(lambda: meters.to("decode-0").speed(clock.now_s).bytes_per_s > 5e8)
    assert prober.asked == [(("there", "i"), "tcp")] * 2


async def test_a_receiver_that_is_gone_is_forgotten_and_a_devices_channel_is_not_tried(
    doubts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, prober, clock = doubts
    monkeypatch.setattr(doubting, "MAX_FAILURES", 3)
    prober.link = None
    made.note("decode-0", ("there", "i"), "tcp")
    made.note("decode-1", ("there", "j"), "nccl")
    for number in range(1, 4):
        clock.now_s += 10.0
        await until(lambda number=number: len(prober.asked) == number)
    await until(lambda: not made._receivers)
    assert {key for key, _ in prober.asked} == {("there", "i")}
    made.note("decode-0", ("there", "k"), "tcp")
    clock.now_s += 10.0
    await until(lambda: len(prober.asked) == 4)


async def test_a_real_link_is_tried_again_with_little_traffic(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubting, "TICK_S", 0.01)
    monkeypatch.setattr(doubting, "SETTLED_S", 0.0)
    monkeypatch.setattr("services.scheduling.links.FIRST_S", 0.05)
    pair = await make_pair("tcp")
    assert pair.links.peer_links() == []
    await pair.hand_over([4, 2, 7], 40)
    (link,) = pair.links.peer_links()
    assert (link.worker_id, link.underway_bytes) == ("decode-0", 0)
    # A small handoff tells no latency: that is what the probe is for.
    await until(lambda: pair.links.meters.to("decode-0").opinion.has_latency)
    (told,) = pair.links.peer_links()
    assert told.speed.bytes_per_s > 1e6
    transfer = await pair.hand_over([4, 2, 7], 40)
    pair.assert_arrived(transfer, [4, 2, 7], 40)
