"""Links that cannot be opened are tried again in the background, and no request waits for that."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer import link_retries
from kv_transfer.link_retries import LinkKey, LinkRetries
from services.runtime.clock import ManualClock
from services.runtime.errors import ChannelUnreachable, LinkRefused, PeerUnreachable, StaleIncarnation, TandemError
from tests.waiting import until

KEY = ("10.0.0.7:50052", "a" * 32)


class Opener:
    """Opens Links as told."""

    def __init__(self) -> None:
        self.outcomes: list[TandemError | None] = []
        self.num_tries = 0

    async def __call__(self, key: LinkKey) -> None:
        self.num_tries += 1
        outcome = self.outcomes.pop(0) if self.outcomes else ChannelUnreachable("still closed")
        if outcome is not None:
            raise outcome


class Delays(list[float]):
    """The delays before each try, none of which is waited for."""

    async def __call__(self, delay_s: float) -> None:
        self.append(delay_s)
        await asyncio.sleep(0)


def made(opener: Opener, clock: ManualClock | None = None, delays_s: Delays | None = None) -> LinkRetries:
    return LinkRetries(opener, clock=clock or ManualClock(), sleep=Delays() if delays_s is None else delays_s)


async def until_settled(retries: LinkRetries) -> None:
    failure = retries._failures.get(KEY)
    if failure is not None and failure.task is not None:
        await asyncio.wait([failure.task])


async def test_a_receiver_is_tried_again_until_a_link_is_open() -> None:
    opener, delays_s = Opener(), Delays()
    opener.outcomes = [ChannelUnreachable("closed")] * 5 + [None]
    retries = made(opener, delays_s=delays_s)
    retries.failed(KEY, ChannelUnreachable("closed"))
    assert isinstance(retries.error_for(KEY), ChannelUnreachable)
    await until_settled(retries)
    assert retries.error_for(KEY) is None
    assert delays_s == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_requests_get_the_error_of_the_last_try() -> None:
    opener = Opener()
    retries = made(opener)
    retries.failed(KEY, ChannelUnreachable("closed"))
    first = retries.error_for(KEY)
    assert first is not None
    assert first.message == "closed"
    await until(lambda: opener.num_tries >= 2)
    last = retries.error_for(KEY)
    assert last is not None
    assert last.message == "still closed"
    await retries.close()


@pytest.mark.parametrize("outcome", [LinkRefused("full"), StaleIncarnation("restarted")])
async def test_a_receiver_that_can_be_reached_is_left_to_requests(outcome: TandemError) -> None:
    opener = Opener()
    opener.outcomes = [outcome]
    retries = made(opener)
    retries.failed(KEY, PeerUnreachable("silent"))
    await until_settled(retries)
    assert (opener.num_tries, retries.error_for(KEY)) == (1, None)


async def test_a_receiver_that_no_request_wants_is_forgotten() -> None:
    opener, clock = Opener(), ManualClock()
    retries = made(opener, clock)
    retries.failed(KEY, ChannelUnreachable("closed"))
    clock.advance(link_retries.FORGET_S)
    await until_settled(retries)
    assert opener.num_tries == 0
    assert retries.error_for(KEY) is None
