"""A worker asks another one for a prefix: the pages come over a Link of the holder's, or nothing is held anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kv_transfer.prefixes import (
    MAX_GIVING,
    SERVICE_NAME,
    FoundPages,
    PrefixGiver,
    PrefixPeer,
    WantedPrefix,
    ask_for_prefix,
)
from kv_transfer.protocol.messages import TransferId
from protos import link_pb2_grpc
from services.runtime.clock import Deadline
from services.runtime.errors import (
    InvalidRequest,
    Overloaded,
    PeerUnreachable,
    StaleIncarnation,
    TandemError,
    TransferFailed,
)
from services.runtime.rpc import make_server
from tests.kv_transfer.conftest import Pair, PairMaker
from tests.waiting import until

PAGE_SIZE = 16
TOKENS = list(range(100, 170))


@dataclass(frozen=True)
class Found:
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass
class Holder:
    """The holder's cache: pages of the pair's source pool, which nobody holds."""

    pair: Pair
    num_pages: int
    asked: list[tuple[list[int], str]] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    may_find: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_find.set()
        self.page_ids = self.pair.allocator.allocate(self.num_pages, state="used")
        self.pair.allocator.release(self.page_ids, is_kept=True)

    async def find(self, token_ids: list[int], sharers: str) -> FoundPages:
        self.asked.append((token_ids, sharers))
        generations = self.pair.allocator.generations(self.page_ids)
        await self.may_find.wait()
        return Found(tuple(self.page_ids), generations)


@asynccontextmanager
async def giving(holder: Holder) -> AsyncIterator[PrefixPeer]:
    server = make_server([SERVICE_NAME])
    giver = PrefixGiver(holder.pair.links, holder.find, incarnation="9" * 32, page_size=PAGE_SIZE)
    link_pb2_grpc.add_PrefixesServicer_to_server(giver, server.server)
    port = await server.start("127.0.0.1", 0)
    try:
        yield PrefixPeer(f"127.0.0.1:{port}", "9" * 32)
    finally:
        await server.stop(0)


async def ask(pair: Pair, at: PrefixPeer, token_ids: list[int], *, name: str = "r", page_size: int = PAGE_SIZE) -> int:
    wanted = WantedPrefix(TransferId(name, 1), token_ids, "tenant", page_size)
    asker = PrefixPeer(pair.address, pair.incarnation)
    return await ask_for_prefix(wanted, holder=at, asker=asker, deadline=Deadline.after(10))


async def test_the_pages_that_are_found_arrive_and_the_holder_holds_none(make_pair: PairMaker) -> None:
    pair = await make_pair()
    holder = Holder(pair, num_pages=4)
    async with giving(holder) as at:
        num_bytes = await ask(pair, at, TOKENS[:65])
    assert holder.asked == [(TOKENS[:64], "tenant")]
    assert num_bytes == 4 * pair.source.layout.page_bytes
    transfer = type("Sent", (), {"id": TransferId("r", 1)})()
    pair.assert_arrived(transfer, holder.page_ids, 64)
    assert pair.allocator.num_used_pages == 0


async def test_a_holder_sends_what_it_has_in_whole_pages_of_the_other_side(make_pair: PairMaker) -> None:
    pair = await make_pair()
    holder = Holder(pair, num_pages=3)
    async with giving(holder) as at:
        await ask(pair, at, TOKENS, page_size=32)
        assert len(pair.target.committed[TransferId("r", 1)]) == 2
        with pytest.raises(TransferFailed, match="not here"):
            await ask(pair, at, TOKENS[:20], name="short", page_size=32)


async def test_pages_that_are_given_to_another_use_meanwhile_fail_the_transfer(make_pair: PairMaker) -> None:
    pair = await make_pair()
    holder = Holder(pair, num_pages=4)
    holder.may_find.clear()
    async with giving(holder) as at:
        asking = asyncio.create_task(ask(pair, at, TOKENS[:65]))
        await until(lambda: bool(holder.asked))
        pair.allocator.release(pair.allocator.allocate(pair.source.num_pages, state="used"))
        holder.may_find.set()
        with pytest.raises(TransferFailed):
            await asking
    await pair.wait_all_free()
    assert not pair.target.committed


async def test_whoever_stops_asking_ends_the_transfer(make_pair: PairMaker) -> None:
    pair = await make_pair()
    holder = Holder(pair, num_pages=4)
    pair.target.gate("commit")
    async with giving(holder) as at:
        asking = asyncio.create_task(ask(pair, at, TOKENS[:65]))
        await pair.target.arrived["commit"].wait()
        asking.cancel()
        await asyncio.wait([asking])
        # The commit is on its way when the end is heard of: the target is told that it was in vain.
        machines = [link._machine for link in pair.receiver._links]
        await until(lambda: any(each._given_up for machine in machines for each in machine.transfers))
        pair.target.gates["commit"].set()
        await until(lambda: len(pair.target.abandoned) == 1)
    await pair.wait_all_free()


async def test_a_worker_gives_few_at_a_time(make_pair: PairMaker) -> None:
    pair = await make_pair()
    holder = Holder(pair, num_pages=4)
    holder.may_find.clear()
    async with giving(holder) as at:
        asking = [asyncio.create_task(ask(pair, at, TOKENS[:65], name=f"r{i}")) for i in range(MAX_GIVING)]
        await until(lambda: len(holder.asked) == MAX_GIVING)
        with pytest.raises(Overloaded):
            await ask(pair, at, TOKENS[:65], name="one more")
        holder.may_find.set()
        await asyncio.gather(*asking)
        await ask(pair, at, TOKENS[:65], name="later")
    assert len(pair.target.committed) == MAX_GIVING + 1


async def test_the_refusal_of_the_worker_that_asks_is_told(make_pair: PairMaker) -> None:
    pair = await make_pair()
    pair.target.refuse = TransferFailed("no prefix is awaited")
    async with giving(Holder(pair, num_pages=4)) as at:
        with pytest.raises(TransferFailed, match="no prefix is awaited"):
            await ask(pair, at, TOKENS[:65])


@pytest.mark.parametrize("token_ids", [[], TOKENS[:1]])
async def test_a_question_without_a_prefix_is_refused(make_pair: PairMaker, token_ids: list[int]) -> None:
    pair = await make_pair()
    async with giving(Holder(pair, num_pages=4)) as at:
        with pytest.raises(TandemError) as caught:
            await ask(pair, at, token_ids)
    assert isinstance(caught.value, InvalidRequest)


async def test_another_life_of_the_holder_and_no_holder_are_told_apart_from_nothing(make_pair: PairMaker) -> None:
    pair = await make_pair()
    holder = Holder(pair, num_pages=4)
    async with giving(holder) as at:
        with pytest.raises(StaleIncarnation):
            await ask(pair, PrefixPeer(at.address, "8" * 32), TOKENS[:65])
    assert not holder.asked
    with pytest.raises(PeerUnreachable, match=at.address):
        await ask(pair, at, TOKENS[:65])
