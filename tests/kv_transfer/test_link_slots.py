"""How many Links a receiver has, and which of them end for a new sender."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from kv_transfer import link_slots, receiving
from kv_transfer.link_end import LinkSetup
from kv_transfer.link_slots import KEPT_FREE, LinkSlots
from kv_transfer.protocol.counters import Reason
from kv_transfer.send_link import SendLink
from kv_transfer.sending import SendLinks
from kv_transfer.transports.base import AnyReceiveChannel
from services.engine.cache.pages import PageAllocator
from services.runtime.clock import ManualClock
from services.runtime.errors import LinkRefused, TransferFailed
from tests.kv_transfer.conftest import Pair, PairMaker, identity
from tests.waiting import HANG_LIMIT_S, until

SenderMaker = Callable[[], Pair]


@dataclass(eq=False)
class Link:
    """A Link whose sender ends it as soon as it is asked to, unless it is `deaf`."""

    slots: LinkSlots[Link]
    idle_since_s: float | None
    is_deaf: bool = False
    is_leaving: bool = False
    num_asked: int = field(default=0)

    def retire(self) -> None:
        self.num_asked += 1
        self.is_leaving = True
        if not self.is_deaf:
            asyncio.get_running_loop().call_soon(self.slots.remove, self)


async def opened(slots: LinkSlots[Link], idle_since_s: float | None, *, is_deaf: bool = False) -> Link:
    assert await slots.claim()
    link = Link(slots, idle_since_s, is_deaf)
    with slots.opening():
        slots.add(link)
    return link


async def test_the_link_that_is_idle_longest_ends_before_the_limit_is_reached() -> None:
    slots: LinkSlots[Link] = LinkSlots(2 * KEPT_FREE)
    links = [await opened(slots, float(since_s)) for since_s in (5, 3, 4, *range(6, 6 + 2 * KEPT_FREE - 5))]
    assert not any(link.num_asked for link in links)
    links += [await opened(slots, 90.0), await opened(slots, 91.0)]
    assert [link.idle_since_s for link in links if link.num_asked] == [3, 4]
    await until(lambda: slots.num_claimed == 2 * KEPT_FREE - 2)


async def test_a_link_in_use_is_not_ended() -> None:
    slots: LinkSlots[Link] = LinkSlots(2)
    busy = await opened(slots, None)
    idle = await opened(slots, 1.0)
    third = await opened(slots, None)
    assert (busy.num_asked, idle.num_asked) == (0, 1)
    assert set(slots.links) == {busy, third}
    assert not await slots.claim()
    assert slots.num_claimed == 2


async def test_links_that_are_being_opened_count() -> None:
    slots: LinkSlots[Link] = LinkSlots(1)
    assert await slots.claim()
    with slots.opening():
        assert not await slots.claim()
    assert slots.num_claimed == 0
    assert await slots.claim()


async def test_senders_that_come_together_do_not_share_a_slot() -> None:
    slots: LinkSlots[Link] = LinkSlots(3)
    for since_s in range(3):
        await opened(slots, float(since_s))
    claimed = await asyncio.gather(*(slots.claim() for _ in range(5)))
    assert sum(claimed) == 3
    assert slots.num_claimed == 3


async def test_a_sender_that_does_not_end_its_link_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_slots, "ROOM_TIMEOUT_S", 0.3)
    slots: LinkSlots[Link] = LinkSlots(1)
    deaf = await opened(slots, 1.0, is_deaf=True)
    assert not await slots.claim()
    assert (slots.links, deaf.num_asked) == ((deaf,), 1)


async def test_a_link_on_which_a_transfer_has_begun_is_replaced_by_another_one() -> None:
    slots: LinkSlots[Link] = LinkSlots(2)
    raced, other = await opened(slots, 1.0, is_deaf=True), await opened(slots, 2.0)
    claiming = asyncio.create_task(slots.claim())
    await until(lambda: raced.num_asked == 1)
    raced.is_leaving, raced.idle_since_s = False, None
    assert await claiming
    assert other.num_asked == 1


# --- real Links ---


def ignore_retire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders do not end a Link when they are asked to."""
    monkeypatch.setattr(SendLink, "retire", lambda self: None)


@pytest.fixture
async def one_link(make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SenderMaker]:
    """Makes senders of a receiver that accepts one Link."""
    monkeypatch.setattr(receiving, "MAX_LINKS", 1)
    pair = await make_pair("tcp")
    made: list[SendLinks] = []

    def make() -> Pair:
        allocator = PageAllocator(pair.source.num_pages)
        links = SendLinks(LinkSetup(identity(f"prefill-{len(made) + 1}"), pair.source, allocator, ("tcp",)))
        made.append(links)
        return Pair(links, pair.receiver, pair.target, pair.source, allocator, pair.address, pair.incarnation)

    yield make
    for links in made:
        await links.close()


async def test_senders_take_turns_at_a_receiver_that_accepts_one_link(
    one_link: SenderMaker, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = one_link(), one_link()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            for number, sender in enumerate((first, second)):
                sender.num_started += 100 * (number + 1)
                await sender.assert_works()
    assert len(first.receiver._links) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for counters in (first.links.counters, second.links.counters, first.receiver.counters):
        assert not counters.snapshot()


async def test_a_sender_is_refused_while_every_link_is_in_use(one_link: SenderMaker) -> None:
    first, second = one_link(), one_link()
    transfer = await first.reserve(16, request_id="first")
    with pytest.raises(LinkRefused, match="decode-0 already has 1 Links"):
        await second.reserve(16, request_id="second")
    transfer.send(0, [1])
    await transfer.seal(num_tokens=16, first_token_id=7, sampling_position=17)
    await second.reserve(16, request_id="second")


async def test_a_transfer_that_begins_while_its_idle_link_is_asked_to_end_continues(
    one_link: SenderMaker,
) -> None:
    """The question crosses the first message of the transfer."""
    sender = one_link()
    await sender.assert_works()
    (receive_link,) = sender.receiver._links
    transfer = await sender.ask(16, request_id="crosses")
    receive_link.retire()
    await transfer.granted()
    transfer.send(0, [1])
    await transfer.seal(num_tokens=16, first_token_id=7, sampling_position=17)
    assert sender.receiver._links == (receive_link,)
    assert not receive_link.is_leaving


async def test_a_link_whose_sender_does_not_end_it_counts_as_leaving_for_a_limited_time(
    one_link: SenderMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, clock = one_link(), ManualClock()
    await sender.assert_works()
    (receive_link,) = sender.receiver._links
    ignore_retire(monkeypatch)
    monkeypatch.setattr(receive_link, "_now", clock.monotonic)
    for _ in range(2):
        receive_link.retire()
        assert receive_link.idle_since_s == clock.monotonic(), "Links that were not asked yet are asked next"
        clock.advance(link_slots.ROOM_TIMEOUT_S - 0.1)
        assert receive_link.is_leaving
        clock.advance(0.1)
        assert not receive_link.is_leaving


@pytest.mark.parametrize("moment", ["claim", "channel"])
async def test_a_receiver_that_closes_while_a_link_is_made_opens_none(
    one_link: SenderMaker, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    first, second = one_link(), one_link()
    receiver, has_opened, may_continue = first.receiver, asyncio.Event(), asyncio.Event()
    await_channel = receiver._await_channel

    async def hold(opening: Future[AnyReceiveChannel]) -> AnyReceiveChannel:
        channel = await await_channel(opening)
        has_opened.set()
        await may_continue.wait()
        return channel

    if moment == "claim":
        await first.assert_works()
        ignore_retire(monkeypatch)
        monkeypatch.setattr(link_slots, "ROOM_TIMEOUT_S", HANG_LIMIT_S)
        asking = asyncio.create_task(second.reserve(16))
        await until(lambda: receiver._slots._num_waiting == 1)
    else:
        monkeypatch.setattr(receiver, "_await_channel", hold)
        asking = asyncio.create_task(second.reserve(16))
        await has_opened.wait()
    await receiver.close()
    may_continue.set()
    with pytest.raises(TransferFailed) as failed:
        await asking
    if moment == "claim":
        assert "the receiving worker is shutting down" in failed.value.message
    assert not receiver._links
    assert not receiver._listeners


async def test_a_transfer_is_begun_anew_on_another_link_if_its_own_retires_just_before(
    one_link: SenderMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = one_link()
    await sender.assert_works()
    link_to, num_calls = SendLinks._link_to, 0

    async def link_that_retires(self: SendLinks, address: str, incarnation: str) -> SendLink:
        nonlocal num_calls
        num_calls += 1
        link = await link_to(self, address, incarnation)
        if num_calls == 1:
            link.retire()
        return link

    monkeypatch.setattr(SendLinks, "_link_to", link_that_retires)
    sender.num_started = 50
    await sender.assert_works()
    assert num_calls > 1
    assert not sender.links.counters[Reason.LINK_LOST]
