"""Stands for kv_transfer.sending in tests of the workers: no network, and every wait ends when the test says so."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kv_transfer.protocol.messages import TransferId
from protos import worker_pb2
from services.runtime.clock import Deadline
from services.runtime.errors import TandemError
from services.scheduling.links import Carried, LinkMeters

CARRIED = Carried(3_000_000, 0.01)


@dataclass
class FakeTransfer:
    """A transfer whose end the test decides."""

    transfer_id: TransferId
    num_tokens: int
    sent: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    sealed: dict[str, int] = field(default_factory=dict)
    may_commit: asyncio.Event = field(default_factory=asyncio.Event)
    may_abort: asyncio.Event = field(default_factory=asyncio.Event)
    error: TandemError | None = None
    abort_reason: TandemError | None = None
    links: "FakeLinks | None" = None
    """Whose word is waited for."""

    async def granted(self) -> None:
        assert self.links is not None
        await self.links.may_reserve.wait()
        if self.links.error is not None:
            self.may_abort.set()  # a refusal holds nothing
            raise self.links.error

    def send(self, first_page: int, page_ids: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((first_page, tuple(page_ids)))

    async def seal(self, **manifest: int) -> Any:
        self.sealed = manifest
        await self.may_commit.wait()
        if self.error is not None:
            raise self.error
        num_pages = sum(len(pages) for _, pages in self.sent)
        return SimpleNamespace(
            num_pages=num_pages, num_bytes=64 * num_pages, exposed_s=0.5, transport="fake", carried=CARRIED
        )

    async def abort(self, error: TandemError) -> None:
        self.abort_reason = error
        await self.may_abort.wait()


class FakeLinks:
    """Stands for SendLinks.

    Questions are not sent while `may_ask` is cleared, and not answered while `may_reserve` is; `ask_error` is raised
    instead of sending them, and `error` refuses them. `is_open` says whether there is a Link to each receiver.
    """

    def __init__(self) -> None:
        self.meters = LinkMeters()
        self.may_ask = asyncio.Event()
        self.may_ask.set()
        self.may_reserve = asyncio.Event()
        self.may_reserve.set()
        self.ask_error: Exception | None = None
        self.error: Exception | None = None
        self.is_open = True
        self.holds_commits = False
        self.holds_aborts = False
        self.transfers: dict[TransferId, FakeTransfer] = {}
        self.wanted: list[TransferId] = []
        self.asked: list[tuple[str, str, TransferId]] = []

    def has_link(self, address: str, peer_incarnation: str) -> bool:
        return self.is_open

    async def ask(
        self, address: str, peer_incarnation: str, transfer_id: TransferId, *, num_tokens: int, deadline: Deadline
    ) -> FakeTransfer:
        self.wanted.append(transfer_id)
        await self.may_ask.wait()
        if self.ask_error is not None:
            raise self.ask_error
        self.asked.append((address, peer_incarnation, transfer_id))
        transfer = FakeTransfer(transfer_id, num_tokens, links=self)
        if not self.holds_commits:
            transfer.may_commit.set()
        if not self.holds_aborts:
            transfer.may_abort.set()
        self.transfers[transfer_id] = transfer
        return transfer

    async def reserve(self, *where: Any, num_tokens: int, deadline: Deadline) -> FakeTransfer:
        transfer = await self.ask(*where, num_tokens=num_tokens, deadline=deadline)
        await transfer.granted()
        return transfer

    def peer_links(self) -> list[worker_pb2.PeerLink]:
        return []

    async def close(self) -> None:
        pass
