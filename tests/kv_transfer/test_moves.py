"""Pages between decode workers, each of which sends and receives: a prompt with the beginning of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import torch

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.counters import Counters
from kv_transfer.protocol.messages import TransferId
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.receiving import LinkReceiver, RingConfig
from kv_transfer.sending import SendLinks
from kv_transfer.wire import LinkIdentity
from services.engine.cache.pages import PageAllocator
from services.runtime.clock import Deadline
from services.runtime.errors import NoFreePages, RequestCancelled, TransferFailed
from tests.kv_transfer.conftest import Target, identity, make_pool, serving, tokens_of
from tests.waiting import HANG_LIMIT_S, until


@dataclass
class Answer:
    """A sequence that decodes somewhere: its attempt, its KV as it must be, and the pages that hold it."""

    request_id: str
    kv: torch.Tensor
    page_ids: list[int]
    attempt: int = 1

    @property
    def num_tokens(self) -> int:
        return self.kv.shape[3]


@dataclass
class Worker:
    """A decode worker: one pool, one allocator, one set of counters for both directions."""

    target: Target
    own: LinkIdentity
    receiver: LinkReceiver
    links: SendLinks
    address: str
    counters: Counters
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def allocator(self) -> PageAllocator:
        return self.target.allocator

    def begin(self, request_id: str, num_tokens: int) -> Answer:
        page_ids = self.allocator.allocate(self.target.pool.layout.num_pages_for(num_tokens), state="used")[::-1]
        for page_id in page_ids:
            self.target.pool.data[page_id].normal_()
        self.answers[request_id] = Answer(request_id, tokens_of(self.target.pool, page_ids, num_tokens), page_ids)
        return self.answers[request_id]

    async def move(self, request_id: str, to: Worker, *, pages_at_once: int = 3) -> None:
        """Hand an answer over. It is here or there, whatever happens."""
        answer = self.answers[request_id]
        transfer_id = TransferId(request_id, answer.attempt + 1)
        transfer = await self.links.reserve(
            to.address, to.own.incarnation, transfer_id, num_tokens=answer.num_tokens, deadline=Deadline.after(30)
        )
        for start in range(0, len(answer.page_ids), pages_at_once):
            transfer.send(start, answer.page_ids[start : start + pages_at_once])
        await transfer.seal(num_tokens=answer.num_tokens, first_token_id=7, sampling_position=answer.num_tokens + 1)
        del self.answers[request_id]
        self.allocator.release(answer.page_ids)
        page_ids = to.target.committed.pop(transfer_id)
        to.answers[request_id] = Answer(request_id, answer.kv, page_ids, transfer_id.attempt)

    def check(self) -> None:
        """Every answer is whole, and nothing else is held."""
        for answer in self.answers.values():
            assert torch.equal(tokens_of(self.target.pool, answer.page_ids, answer.num_tokens), answer.kv)
        held = sorted(page_id for answer in self.answers.values() for page_id in answer.page_ids)
        counts = self.allocator.counts()
        assert (counts.used, counts.reserved) == (len(held), 0)
        assert len(set(held)) == len(held)
        self.allocator.check_integrity()


WorkerMaker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def make_worker() -> AsyncIterator[WorkerMaker]:
    async with AsyncExitStack() as stack:

        async def make(name: str, transport: str, *, page_size: int = 16, timeouts: Timeouts | None = None) -> Worker:
            target = Target(make_pool(page_size=page_size, num_pages=400, seed=len(name)))
            own, counters = identity(name), Counters()
            times = timeouts or Timeouts()
            setup = LinkSetup(own, target.pool, target.allocator, (transport,), times, counters)
            receiver = LinkReceiver(setup, target, ring=RingConfig(slot_bytes=20_000, ring_bytes=80_000))
            address = await stack.enter_async_context(serving(receiver))
            links = SendLinks(setup)
            stack.push_async_callback(links.close)
            return Worker(target, own, receiver, links, address, counters)

        yield make


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("page_sizes", [(16, 16), (16, 64), (24, 16)])
async def test_answers_move_both_ways_at_once_and_back_again(
    make_worker: WorkerMaker, transport: str, page_sizes: tuple[int, int]
) -> None:
    one = await make_worker("decode-0", transport, page_size=page_sizes[0])
    two = await make_worker("decode-01", transport, page_size=page_sizes[1])
    sizes = (1, 15, 16, 17, 63, 64, 65, 200)
    for index, num_tokens in enumerate(sizes):
        one.begin(f"one-{index}", num_tokens)
        two.begin(f"two-{index}", num_tokens)
    one.check()
    two.check()

    async def travel(request_id: str, here: Worker, there: Worker) -> None:
        for hop in range(4):
            await here.move(request_id, there, pages_at_once=1 + hop)
            here, there = there, here

    async with asyncio.timeout(HANG_LIMIT_S):
        await asyncio.gather(
            *(travel(f"one-{index}", one, two) for index in range(len(sizes))),
            *(travel(f"two-{index}", two, one) for index in range(len(sizes))),
        )
    assert {*one.answers} == {f"one-{index}" for index in range(len(sizes))}
    assert {*two.answers} == {f"two-{index}" for index in range(len(sizes))}
    assert {answer.attempt for answer in (*one.answers.values(), *two.answers.values())} == {5}
    for worker in (one, two):
        worker.check()
        assert worker.counters.snapshot() == {}
        assert worker.receiver.num_transfers == 0


async def test_an_answer_that_finds_no_room_stays_where_it_is_and_moves_later(make_worker: WorkerMaker) -> None:
    one, two = await make_worker("decode-0", "shm"), await make_worker("decode-01", "shm")
    one.begin("r", 100)
    two.target.refuse = NoFreePages("full", retry_after_s=1.0)
    with pytest.raises(NoFreePages) as caught:
        await one.move("r", two)
    assert caught.value.retry_after_s == 1.0
    one.check()
    two.target.refuse = None
    one.answers["r"].attempt += 1  # each try has a number of its own
    await one.move("r", two)
    assert {*two.answers} == {"r"}
    one.check()
    two.check()


async def test_a_prompt_and_a_move_of_one_request_do_not_meet(make_worker: WorkerMaker) -> None:
    """The worker that received attempt 1 sends attempt 2: its own fence stands in neither's way."""
    one, two = await make_worker("decode-0", "tcp"), await make_worker("decode-01", "tcp")
    two.begin("r", 33)
    two.answers["r"].attempt = 0
    await two.move("r", one)  # as a prefill worker would
    await one.move("r", two)
    two.check()
    # What was committed at one is fenced off there: neither that attempt nor an older one begins again.
    stale = TransferId("r", 1)
    with pytest.raises(TransferFailed, match="attempt"):
        await two.links.reserve(one.address, one.own.incarnation, stale, num_tokens=33, deadline=Deadline.after(5))
    await two.move("r", one)
    one.check()
    two.check()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_link_one_way_that_breaks_leaves_the_other_way_alone(make_worker: WorkerMaker, transport: str) -> None:
    one, two = await make_worker("decode-0", transport), await make_worker("decode-01", transport)
    one.begin("there", 100)
    two.begin("back", 100)
    for worker in (one, two):
        worker.target.gate("commit")
    there, back = asyncio.create_task(one.move("there", two)), asyncio.create_task(two.move("back", one))
    for worker in (one, two):
        await worker.target.arrived["commit"].wait()
    (receiving,) = two.receiver._links
    receiving._placer._channel.shutdown()
    with pytest.raises(Exception, match=r"Link|channel|closed|ended"):
        await there
    for worker in (one, two):
        worker.target.gates["commit"].set()
    await back
    assert {*one.answers} == {"there", "back"}
    assert not two.answers
    one.check()
    # The commit at two was under way, and what it answered stood: the gateway's cancel would end it there.
    await until(lambda: len(two.target.committed) == 1)
    two.allocator.release(two.target.committed.popitem()[1])
    two.check()
    for worker in (one, two):
        worker.target.gates.clear()
    one.answers["there"].attempt += 1
    await one.move("there", two)
    two.check()


async def test_an_answer_whose_move_is_given_up_goes_on_where_it_was(make_worker: WorkerMaker) -> None:
    one, two = await make_worker("decode-0", "shm"), await make_worker("decode-01", "shm")
    answer = one.begin("r", 100)
    two.target.gate("commit")
    moving = asyncio.create_task(one.move("r", two))
    await two.target.arrived["commit"].wait()
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    # The pages may be written to again: nothing reads them, and what was copied is not to be used.
    for page_id in answer.page_ids:
        one.target.pool.data[page_id].zero_()
    answer.kv = torch.zeros_like(answer.kv)
    two.target.gates["commit"].set()
    await until(lambda: len(two.target.abandoned) == 1)
    assert isinstance(two.target.abandoned[0][1], RequestCancelled)
    one.check()
    two.check()
