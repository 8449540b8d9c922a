"""The way of KV pages between two machines, tried by two doctors with the channels that workers use.

One serves the `Probe` of `tandem.v1.Link`, and nothing else of it: no Link can be made, no page set aside. The other
measures what workers measure. Both show the certificate of the process that they speak for.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import torch

from cli.preflight import PreflightSettings
from kv_transfer.link_end import LinkSetup
from kv_transfer.measure import Measured
from kv_transfer.protocol.messages import TransferId
from kv_transfer.receiving import ChannelAddress, LinkReceiver
from kv_transfer.sending import SendLinks
from kv_transfer.wire import SERVICE_NAME, LinkIdentity
from protos import link_pb2, link_pb2_grpc
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.runtime import process, rpc
from services.runtime.addresses import is_every_interface, join_host_port
from services.runtime.errors import ConfigError, TandemError, WorkerUnavailable
from services.runtime.tls import Identity, tls_files

INCARNATION = "d0c" * 10 + "d0"
"""All doctors are one incarnation: there is no life of theirs that another could be taken for."""
LAYOUT = PageLayout(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32)
STOP_GRACE_S = 1.0


class _NoPages:
    """The doctor's answer to a Link, none of which reaches it."""

    async def reserve(self, transfer_id: TransferId, num_tokens: int) -> Any:
        """Raises WorkerUnavailable."""
        raise WorkerUnavailable("a doctor takes no pages")

    async def commit(self, transfer_id: TransferId, *, first_token_id: int, sampling_position: int) -> None:
        """Raises WorkerUnavailable."""
        raise WorkerUnavailable("a doctor takes no pages")

    async def release(self, transfer_id: TransferId, error: TandemError) -> None:
        """Does nothing: no page was set aside."""

    async def abandon(self, transfer_id: TransferId, error: TandemError) -> None:
        """Does nothing: nothing was begun."""


class _ProbeOnly(link_pb2_grpc.LinkServicer):
    """The one method of a Link that needs no worker."""

    def __init__(self, receiver: LinkReceiver) -> None:
        self._receiver = receiver

    def Connect(
        self, request_iterator: AsyncIterator[link_pb2.LinkMessage], context: Any
    ) -> AsyncIterator[link_pb2.LinkMessage]:
        """Raises WorkerUnavailable."""
        raise WorkerUnavailable("a doctor takes no pages")

    async def Probe(
        self, request_iterator: AsyncIterator[link_pb2.LinkMessage], context: Any
    ) -> AsyncIterator[link_pb2.LinkMessage]:
        """See LinkReceiver."""
        async for message in self._receiver.Probe(request_iterator, context):
            yield message


def serve(settings: PreflightSettings) -> None:
    """Answers other doctors until a signal comes. Raises ConfigError."""
    if is_every_interface(settings.host) and settings.advertise_host is None:
        raise ConfigError(f"--host is {settings.host}, which others cannot connect to: give --advertise-host")
    process.run_async(_serve(settings))


async def _serve(settings: PreflightSettings) -> None:
    setup = _setup(settings)
    try:
        address = ChannelAddress(
            settings.host, settings.transfer_port, settings.advertise_host, settings.advertise_transfer_port
        )
        receiver = LinkReceiver(setup, _NoPages(), address=address)
    except OSError as error:
        raise ConfigError(
            f"--transfer-port is {settings.transfer_port}, which cannot be listened on: {error}"
        ) from error
    server = rpc.make_server([SERVICE_NAME], with_reflection=False)
    link_pb2_grpc.add_LinkServicer_to_server(_ProbeOnly(receiver), server.server)
    with process.stop_signals() as stop:
        port = await server.start(settings.host, settings.serve or 0)
        await server.set_serving(True)
        sys.stdout.write(
            f"ready {join_host_port(settings.advertise_host or settings.host, settings.advertise_port or port)}\n"
        )
        sys.stdout.flush()
        await stop.wait()
        await server.stop(STOP_GRACE_S)
        await receiver.close()


def measure(settings: PreflightSettings) -> Measured | str:
    """Returns what the channels to the peer carry, or why it could not be asked."""
    return asyncio.run(_measure(settings))


async def _measure(settings: PreflightSettings) -> Measured | str:
    assert settings.peer is not None, "it is only asked for where it is given"
    links = SendLinks(_setup(settings))
    try:
        return await links.measure((settings.peer, INCARNATION))
    except grpc.aio.AioRpcError as error:
        return rpc.obstacle_of(error).cause
    except TandemError as error:
        return error.message
    finally:
        await links.close()


def _setup(settings: PreflightSettings) -> LinkSetup:
    """What both ends of a Link are made of, with a pool of two small pages."""
    files = tls_files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    identity = None if files is None else Identity(files)
    rpc.set_identity(identity)
    pool = PagePool(LAYOUT, 2)
    return LinkSetup(
        LinkIdentity("doctor", INCARNATION, "d0c" * 10 + "d0", exact=False),
        pool,
        PageAllocator(2),
        (settings.transport,),
        tls=identity if identity is not None and identity.is_mutual else None,
    )
