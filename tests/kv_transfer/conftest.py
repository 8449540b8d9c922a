"""Two workers' ends of a handoff, over real gRPC in one process, with what a test may want to see of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.messages import TransferId
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.receive_link import Reserved
from kv_transfer.receiving import LinkReceiver, RingConfig
from kv_transfer.send_link import SendTransfer
from kv_transfer.sending import SendLinks
from kv_transfer.wire import SERVICE_NAME, LinkIdentity
from protos import link_pb2_grpc
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.runtime.clock import Deadline
from services.runtime.errors import (
    InvariantViolated,
    NoFreePages,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from services.runtime.rpc import make_server
from tests.waiting import HANG_LIMIT_S, until


def make_pool(
    *,
    page_size: int = 16,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> PagePool:
    layout = PageLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=page_size, dtype=dtype)
    pool = PagePool(layout, num_pages, device=device)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    return pool


def tokens_of(pool: PagePool, page_ids: list[int], num_tokens: int) -> torch.Tensor:
    """KV of the first tokens of a page table: [H, L, 2, tokens, D]."""
    return torch.cat([pool.data[page_id] for page_id in page_ids], dim=3)[:, :, :, :num_tokens]


@dataclass
class Target:
    """A decode worker that only keeps books. `gates` hold a step up until their event is set."""

    pool: PagePool
    num_cached_tokens: int = 0
    refuse: TandemError | None = None
    refuse_commit: TandemError | None = None
    pool_is_full: bool = False
    held: dict[TransferId, list[int]] = field(default_factory=dict)
    committed: dict[TransferId, list[int]] = field(default_factory=dict)
    released: list[tuple[TransferId, TandemError]] = field(default_factory=list)
    abandoned: list[tuple[TransferId, TandemError]] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    arrived: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.pool.num_pages)

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        if self.refuse is not None:
            raise self.refuse
        await self._pass("reserve")
        if self.pool_is_full:
            raise NoFreePages("full")
        # Taken from the front and turned around, so that neighbours in the prompt are not neighbours in memory.
        count = self.pool.layout.num_pages_for(num_tokens)
        page_ids = self.allocator.allocate(count, state="reserved")[::-1]
        self.held[transfer_id] = page_ids
        return Reserved(page_ids, self.num_cached_tokens)

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        await self._pass("commit")
        if self.refuse_commit is not None:
            raise self.refuse_commit
        self.committed[transfer_id] = self.held.pop(transfer_id)
        self.allocator.mark_used(self.committed[transfer_id])

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        await self._pass("release")
        if transfer_id not in self.held:
            raise InvariantViolated(f"{transfer_id} was released twice or after its commit")
        self.allocator.release(self.held.pop(transfer_id))
        self.released.append((transfer_id, error))

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        page_ids = self.committed.pop(transfer_id, None)
        if page_ids is not None:
            self.allocator.release(page_ids)
            self.abandoned.append((transfer_id, error))

    def gate(self, step: str) -> None:
        self.gates[step], self.arrived[step] = asyncio.Event(), asyncio.Event()

    async def _pass(self, step: str) -> None:
        if step in self.gates:
            self.arrived[step].set()
            await self.gates[step].wait()


@dataclass
class Pair:
    """A sender and a receiver that are connected. `allocator` has the books of the `source` pool."""

    links: SendLinks
    receiver: LinkReceiver
    target: Target
    source: PagePool
    allocator: PageAllocator
    address: str
    incarnation: str
    num_started: int = 0

    async def ask(
        self, num_tokens: int, *, request_id: str | None = None, attempt: int = 1, within_s: float = HANG_LIMIT_S
    ) -> SendTransfer:
        self.num_started += 1
        transfer_id = TransferId(request_id or f"request-{self.num_started}", attempt)
        return await self.links.ask(
            self.address, self.incarnation, transfer_id, num_tokens=num_tokens, deadline=Deadline.after(within_s)
        )

    async def reserve(
        self, num_tokens: int, *, request_id: str | None = None, attempt: int = 1, within_s: float = HANG_LIMIT_S
    ) -> SendTransfer:
        self.num_started += 1
        transfer_id = TransferId(request_id or f"request-{self.num_started}", attempt)
        return await self.links.reserve(
            self.address, self.incarnation, transfer_id, num_tokens=num_tokens, deadline=Deadline.after(within_s)
        )

    async def hand_over(self, page_ids: list[int], num_tokens: int, *, pages_at_once: int = 3) -> SendTransfer:
        transfer = await self.reserve(num_tokens)
        first = transfer.num_cached_tokens // self.source.layout.page_size
        for start in range(first, len(page_ids), pages_at_once):
            transfer.send(start, page_ids[start : start + pages_at_once])
        await transfer.seal(num_tokens=num_tokens, first_token_id=7, sampling_position=num_tokens + 1)
        return transfer

    def assert_arrived(self, transfer: SendTransfer, page_ids: list[int], num_tokens: int) -> None:
        sent = tokens_of(self.source, page_ids, num_tokens)
        arrived = tokens_of(self.target.pool, self.target.committed[transfer.id], num_tokens)
        assert torch.equal(sent, arrived)

    async def assert_works(self, *, may_begin_anew: bool = False) -> None:
        """After whatever happened, a handoff between the two still does what it should.

        At once; where a Link may be about to end (`may_begin_anew`), which the first try then meets, with the second.
        """
        self.target.gates.clear()
        table = [9, 3, 4][: self.source.layout.num_pages_for(40)]
        num_lost = self.links.counters[Reason.LINK_LOST]
        try:
            transfer = await self.hand_over(table, 40)
        except (TransferFailed, WorkerUnavailable):
            assert may_begin_anew
            assert self.links.counters[Reason.LINK_LOST] == num_lost + 1
            await self.wait_all_free()
            transfer = await self.hand_over(table, 40)
        self.assert_arrived(transfer, table, 40)

    async def wait_all_free(self) -> None:
        """The receiver holds nothing: everything was released or committed."""
        await until(lambda: not self.target.held and self.receiver.num_transfers == 0)
        counts = self.target.allocator.counts()
        assert counts.reserved == 0
        self.target.allocator.check_integrity()


PairMaker = Callable[..., Awaitable[Pair]]


def identity(
    name: str, *, fingerprint: str = "f" * 32, host_id: str = "here", exact: bool = True, arithmetic: str = ""
) -> LinkIdentity:
    return LinkIdentity(name, secrets.token_hex(16), fingerprint, exact, host_id, arithmetic)


@asynccontextmanager
async def serving(receiver: LinkReceiver) -> AsyncIterator[str]:
    server = make_server([SERVICE_NAME])
    link_pb2_grpc.add_LinkServicer_to_server(receiver, server.server)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await receiver.close()
        await server.stop(0)


@pytest.fixture
async def make_pair() -> AsyncIterator[PairMaker]:
    async with AsyncExitStack() as stack:

        async def make(
            transport: str = "shm",
            *,
            source: PagePool | None = None,
            pool: PagePool | None = None,
            slot_bytes: int = 20_000,
            timeouts: Timeouts | None = None,
            receiver_identity: LinkIdentity | None = None,
            sender_identity: LinkIdentity | None = None,
            receiver_transports: tuple[str, ...] | None = None,
        ) -> Pair:
            source = source or make_pool(seed=1)
            allocator = PageAllocator(source.num_pages)
            target = Target(pool or make_pool(seed=2))
            own = receiver_identity or identity("decode-0")
            transports = receiver_transports or (transport,)
            times = timeouts or Timeouts()
            receiver = LinkReceiver(
                LinkSetup(own, target.pool, target.allocator, transports, times),
                target,
                ring=RingConfig(slot_bytes=slot_bytes, ring_bytes=4 * slot_bytes, device_slot_bytes=slot_bytes),
            )
            address = await stack.enter_async_context(serving(receiver))
            sender = sender_identity or identity("prefill-0")
            links = SendLinks(LinkSetup(sender, source, allocator, (transport,), times))
            stack.push_async_callback(links.close)
            return Pair(links, receiver, target, source, allocator, address, own.incarnation)

        yield make
