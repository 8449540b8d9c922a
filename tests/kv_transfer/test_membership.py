"""Links and probes between workers that hold their cluster's secret, and with strangers on either side."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from kv_transfer.protocol.messages import TransferId
from kv_transfer.wire import SERVICE_NAME
from protos import link_pb2_grpc
from services.runtime import rpc
from services.runtime.clock import Deadline
from services.runtime.errors import NotProven
from services.runtime.membership import Member
from tests.kv_transfer.conftest import Pair, PairMaker

OURS, OTHERS = b"o" * 32, b"x" * 32


@pytest.fixture(autouse=True)
def _no_member_is_left() -> Iterator[None]:
    yield
    rpc.set_member(None)


def become(secret: bytes | None, role: str) -> None:
    rpc.set_member(None if secret is None else Member(lambda: (secret,), role))


@contextlib.asynccontextmanager
async def guarded(pair: Pair, secret: bytes | None) -> AsyncIterator[str]:
    """The pair's receiver at one more address, where a worker with this secret answers."""
    become(secret, "decode")
    server = rpc.make_server([SERVICE_NAME], incarnation=pair.incarnation)
    link_pb2_grpc.add_LinkServicer_to_server(pair.receiver, server.server)
    port = await server.start("127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def reserve(pair: Pair, address: str, *, incarnation: str = "") -> None:
    transfer = await pair.links.reserve(
        address, incarnation or pair.incarnation, TransferId("r", 1), num_tokens=16, deadline=Deadline.after(10)
    )
    await transfer.abort(NotProven("the test is over"))


async def test_members_make_links_and_measure_their_channels(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    async with guarded(pair, OURS) as address:
        become(OURS, "prefill")
        await reserve(pair, address)
        measured = await pair.links.measure((address, pair.incarnation))
        assert list(measured.bytes_per_s) == ["shm"]


@pytest.mark.parametrize("secret", [None, OTHERS])
async def test_a_stranger_gets_neither_link_nor_probe(make_pair: PairMaker, secret: bytes | None) -> None:
    pair = await make_pair("shm")
    async with guarded(pair, OURS) as address:
        become(secret, "prefill")
        with pytest.raises(NotProven, match="--cluster-secret-file"):
            await reserve(pair, address)
        with pytest.raises(Exception, match=r"not proven that it is one|not one of this worker's"):
            await pair.links.measure((address, pair.incarnation))
        assert not pair.receiver._links
        assert not pair.receiver._listeners


@pytest.mark.parametrize("secret", [None, OTHERS])
async def test_a_worker_that_is_told_to_dial_a_stranger_says_nothing_to_it(
    make_pair: PairMaker, secret: bytes | None
) -> None:
    pair = await make_pair("shm")
    async with guarded(pair, secret) as address:
        become(OURS, "prefill")
        with pytest.raises(NotProven):
            await reserve(pair, address)
        assert not pair.receiver._listeners


async def test_a_gateway_may_not_make_a_link(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    async with guarded(pair, OURS) as address:
        become(OURS, "gateway")
        with pytest.raises(NotProven, match="no role"):
            await reserve(pair, address)
