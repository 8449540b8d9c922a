"""The other worker of a handoff, as a process of its own that a test may kill.

`receiver` serves Links and tells what was committed; `sender` hands over for ever; `asker` asks for pages and kills
itself. What it tells goes through a pipe.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
from multiprocessing.connection import Connection

import torch

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.messages import TransferId
from kv_transfer.receive_link import Reserved
from kv_transfer.receiving import LinkReceiver, RingConfig
from kv_transfer.sending import SendLinks
from kv_transfer.transports import registry
from kv_transfer.wire import SERVICE_NAME, LinkIdentity
from protos import link_pb2_grpc
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.runtime.clock import Deadline
from services.runtime.errors import TandemError
from services.runtime.rpc import make_server
from tests.kv_transfer.transports import models

NCCL_ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""With a NCCL_HOSTID of its own each of two processes on one GPU counts as a host, and they meet over sockets."""


class Target:
    def __init__(self, pool: PagePool, pipe: Connection) -> None:
        self._pool = pool
        self._pipe = pipe
        self._held: dict[TransferId, tuple[list[int], int]] = {}

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Reserved:
        page_ids = list(range(self._pool.layout.num_pages_for(num_tokens)))
        self._held[transfer_id] = page_ids, num_tokens
        self._pipe.send({"event": "reserved"})
        return Reserved(page_ids, 0)

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        page_ids, num_tokens = self._held.pop(transfer_id)
        kv = torch.cat([self._pool.data[page_id] for page_id in page_ids], dim=3)[:, :, :, :num_tokens]
        digest = hashlib.sha256(kv.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        self._pipe.send({"event": "committed", "digest": digest, "first_token_id": first_token_id})

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        self._held.pop(transfer_id)

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        self._pipe.send({"event": "abandoned"})


async def receive(pipe: Connection, settings: dict[str, str], pool: PagePool) -> None:
    identity = LinkIdentity("decode-0", secrets.token_hex(16), "f" * 32, True)
    receiver = LinkReceiver(
        LinkSetup(identity, pool, PageAllocator(pool.num_pages), (settings["transport"].partition("@")[0],)),
        Target(pool, pipe),
        ring=RingConfig(slot_bytes=20_000, ring_bytes=80_000),
    )
    server = make_server([SERVICE_NAME])
    link_pb2_grpc.add_LinkServicer_to_server(receiver, server.server)
    port = await server.start("127.0.0.1", 0)
    pipe.send({"event": "ready", "address": f"127.0.0.1:{port}", "incarnation": identity.incarnation})
    await asyncio.Event().wait()


def make_links(settings: dict[str, str], pool: PagePool) -> SendLinks:
    identity = LinkIdentity("prefill-0", secrets.token_hex(16), "f" * 32, True)
    transport = settings["transport"].partition("@")[0]
    return SendLinks(LinkSetup(identity, pool, PageAllocator(pool.num_pages), (transport,)))


async def ask_and_die(pipe: Connection, settings: dict[str, str], pool: PagePool) -> None:
    await make_links(settings, pool).ask(
        settings["address"],
        settings["incarnation"],
        TransferId(settings["request_id"], 1),
        num_tokens=16,
        deadline=Deadline.after(60),
    )
    os.kill(os.getpid(), signal.SIGKILL)


async def send(pipe: Connection, settings: dict[str, str], pool: PagePool) -> None:
    links = make_links(settings, pool)
    pipe.send({"event": "ready"})
    num_pages = pool.num_pages
    num_tokens = num_pages * pool.layout.page_size
    for number in range(1_000_000):
        transfer = await links.reserve(
            settings["address"],
            settings["incarnation"],
            TransferId(f"request-{number}", 1),
            num_tokens=num_tokens,
            deadline=Deadline.after(60),
        )
        for page in range(num_pages):
            transfer.send(page, [page])
            await asyncio.sleep(0.002)
        await transfer.seal(num_tokens=num_tokens, first_token_id=7, sampling_position=num_tokens + 1)


def main(pipe: Connection, settings: dict[str, str]) -> None:
    """Root of the process."""
    torch.set_num_threads(1)
    layout = PageLayout(
        num_layers=2, num_kv_heads=2, head_dim=8, page_size=int(settings["page_size"]), dtype=torch.float32
    )
    # `cuda_ipc` is a model of it, `cuda_ipc@cuda` the thing itself.
    name, _, device = settings["transport"].partition("@")
    if device:
        os.environ.update(NCCL_ON_ONE_GPU, NCCL_HOSTID="peer")
    elif name in registry.DEVICE_NAMES:
        models.install(name)
    pool = PagePool(layout, 64, device=device or "cpu")
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(3)))
    roles = {"receiver": receive, "sender": send, "asker": ask_and_die}
    asyncio.run(roles[settings["role"]](pipe, settings, pool))
