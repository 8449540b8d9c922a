"""Prefix fetch: one worker requests a cached prefix from another worker, which sends it in a handoff.

The holder sends, so the pages travel over a Link from the holder to the requesting worker, as in any other handoff. The
seal's first token is the token after the prefix. The holder does not pin the pages: if one is reused while it is read,
the transfer fails. So the holder's own requests never wait for a page because of a prefix fetch.

Does not depend on the engine or on worker roles: the worker passes a function that looks up pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from kv_transfer.link_errors import call_error
from kv_transfer.protocol.messages import TransferId
from kv_transfer.send_link import HandoffStats
from kv_transfer.sending import SendLinks
from protos import link_pb2, link_pb2_grpc
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import InvalidRequest, Overloaded, PeerUnreachable, StaleIncarnation, TransferFailed
from services.runtime.rpc import check_answer, make_channel, metadata_of, prove, write_if_open

SERVICE_NAME = "tandem.v1.Prefixes"
GIVE = "/tandem.v1.Prefixes/Give"
"""Name of the method in proofs."""
MAX_GIVING = 4
"""Number of prefixes that a worker sends at the same time.

Beyond it, the requesting worker computes its prefix itself.
"""
MAX_TOKENS = 1 << 20
HEAR_S = 5.0
"""Timeout for the caller's request message, in seconds."""


class FoundPages(Protocol):
    """Pages of a pool, and their generations at lookup."""

    @property
    def page_ids(self) -> tuple[int, ...]:
        """The page IDs, in the order of the tokens."""
        ...

    @property
    def generations(self) -> tuple[int, ...]:
        """The generation of each page."""
        ...


FindPages = Callable[[list[int], str], Awaitable[FoundPages]]
"""Returns the cached pages of the longest prefix of the tokens. The string names the group that may share the pages."""


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """A prefix to fetch. `token_ids` has one token more than the prefix.

    `page_size` is the page size of the requesting worker. `sharers` names the group that may share the pages.
    """

    transfer_id: TransferId
    token_ids: Sequence[int]
    sharers: str
    page_size: int


@dataclass(frozen=True, slots=True)
class PrefixPeer:
    """One of the two workers: the address of its gRPC server, and its expected incarnation."""

    address: str
    incarnation: str


async def ask_for_prefix(wanted: WantedPrefix, *, holder: PrefixPeer, asker: PrefixPeer, deadline: Deadline) -> int:
    """Fetches a prefix from the worker that caches it. Returns the number of bytes once the pages are committed.

    `asker` is this worker. Cancelling the call ends the transfer. Raises PeerUnreachable if the holder cannot be
    reached or cannot reach this worker. Raises StaleIncarnation, NotProven, or LayoutMismatch if the holder is not the
    expected worker. Also raises TransferFailed, Overloaded, and InvalidRequest.
    """
    channel = make_channel(holder.address)
    call = None
    try:
        proof = await prove(channel, GIVE, incarnation=holder.incarnation)
        call = link_pb2_grpc.PrefixesStub(channel).Give(metadata=metadata_of(proof))
        await check_answer(proof, call)
        await write_if_open(
            call,
            link_pb2.GivePrefix(
                id=link_pb2.TransferId(request_id=wanted.transfer_id.request_id, attempt=wanted.transfer_id.attempt),
                giver_incarnation=holder.incarnation,
                address=asker.address,
                incarnation=asker.incarnation,
                token_ids=wanted.token_ids,
                cache_salt=wanted.sharers,
                page_size=wanted.page_size,
                deadline_ms=max(1, deadline.remaining_ms()),
            ),
        )
        given = await call.read()
    except grpc.aio.AioRpcError as error:
        raise call_error(error, holder.address) from error
    finally:
        if call is not None:
            call.cancel()
        await channel.close()
    if not isinstance(given, link_pb2.PrefixGiven):
        raise PeerUnreachable(f"the holder at {holder.address} ended the call")
    return given.num_bytes


class PrefixGiver(link_pb2_grpc.PrefixesServicer):
    """Serves `tandem.v1.Prefixes` for a worker with pages of `page_size` tokens."""

    def __init__(
        self, links: SendLinks, find: FindPages, *, incarnation: str, page_size: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._links = links
        self._find = find
        self._incarnation = incarnation
        self._page_size = page_size
        self._clock = clock
        self._num_giving = 0

    async def Give(
        self,
        request_iterator: AsyncIterator[link_pb2.GivePrefix],
        context: grpc.aio.ServicerContext[link_pb2.GivePrefix, link_pb2.PrefixGiven],
    ) -> AsyncIterator[link_pb2.PrefixGiven]:
        """Sends the cached pages of the requested prefix to the caller."""
        if self._num_giving >= MAX_GIVING:
            raise Overloaded(f"the worker gives {MAX_GIVING} prefixes already")
        self._num_giving += 1
        try:
            asked = await _heard(request_iterator)
            if asked.giver_incarnation != self._incarnation:
                raise StaleIncarnation("the holder is not the incarnation that was meant")
            num_tokens, stats = await self._give(asked)
            yield link_pb2.PrefixGiven(num_tokens=num_tokens, num_bytes=stats.num_bytes)
        finally:
            self._num_giving -= 1

    async def _give(self, asked: link_pb2.GivePrefix) -> tuple[int, HandoffStats]:
        token_ids = list(asked.token_ids)
        found = await self._find(token_ids[:-1], asked.cache_salt)
        num_tokens = min(len(found.page_ids) * self._page_size, len(token_ids) - 1)
        num_tokens -= num_tokens % asked.page_size
        if not num_tokens:
            raise TransferFailed("the prefix is not here")
        num_pages = -(-num_tokens // self._page_size)
        transfer = await self._links.reserve(
            asked.address,
            asked.incarnation,
            TransferId(asked.id.request_id, asked.id.attempt),
            num_tokens=num_tokens,
            deadline=Deadline.from_remaining_ms(asked.deadline_ms, clock=self._clock),
        )
        try:
            transfer.send(0, found.page_ids[:num_pages], generations=found.generations[:num_pages])
            stats = await transfer.seal(
                num_tokens=num_tokens, first_token_id=token_ids[num_tokens], sampling_position=num_tokens + 1
            )
        except BaseException:
            transfer.give_up(TransferFailed("the prefix could not be given"))
            raise
        return num_tokens, stats


async def _heard(requests: AsyncIterator[link_pb2.GivePrefix]) -> link_pb2.GivePrefix:
    """Returns the caller's request. Raises InvalidRequest if it is malformed or does not arrive in time."""
    try:
        async with asyncio.timeout(HEAR_S):
            asked = await anext(aiter(requests))
    except (TimeoutError, StopAsyncIteration):
        raise InvalidRequest("the caller did not send its request in time", field="id") from None
    is_sized = 2 <= len(asked.token_ids) <= MAX_TOKENS
    if not is_sized or not asked.id.request_id or not asked.id.attempt or not asked.page_size or not asked.deadline_ms:
        raise InvalidRequest("a prefix needs an id, tokens, a page size and a deadline", field="id")
    return asked
