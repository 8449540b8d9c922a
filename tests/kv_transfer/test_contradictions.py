"""A Link whose books are wrong, which should not be: it ends, and with it everything that it held."""

import asyncio

import pytest

from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.receiver import ReceiverLink
from kv_transfer.protocol.sender import SenderLink
from services.runtime.errors import RequestCancelled, TandemError
from tests.kv_transfer.conftest import PairMaker
from tests.waiting import HANG_LIMIT_S, until


def contradict(*args: object, **more: object) -> None:
    raise ValueError("impossible")


@pytest.mark.parametrize(("machine", "event"), [(SenderLink, "chunk_posted"), (ReceiverLink, "placement")])
async def test_an_answer_that_is_lost_holds_no_page(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, machine: type, event: str
) -> None:
    pair = await make_pair("shm")
    transfer = await pair.reserve(64)
    with monkeypatch.context() as patch:
        patch.setattr(machine, event, contradict)
        transfer.send(0, [1, 2])
        await until(lambda: transfer.error is not None)
    async with asyncio.timeout(HANG_LIMIT_S):
        await transfer.abort(RequestCancelled("it is over"))
    assert transfer.released.is_set()
    await pair.wait_all_free()
    async with asyncio.timeout(HANG_LIMIT_S):
        await pair.links.close()


async def test_one_transfers_trouble_does_not_keep_the_others_from_ending(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    one, other = await pair.reserve(20), await pair.reserve(20)
    link = one._link
    del link._handles[one.id]
    link._loop.call_soon(link._tell, lambda: link._handles[one.id])
    await until(lambda: isinstance(other.error, TandemError))
    async with asyncio.timeout(HANG_LIMIT_S):
        await other.released.wait()
        await pair.links.close()
    await pair.wait_all_free()


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
async def test_a_link_that_ends_in_order_is_no_broken_channel(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport)
    pages = pair.allocator.allocate(3, state="used")
    await pair.hand_over(pages, 3 * pair.source.layout.page_size)
    await pair.links.close()
    await until(lambda: not pair.receiver._links)
    assert pair.receiver.counters.snapshot() == {Reason.LINK_LOST: 1}
