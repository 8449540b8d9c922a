"""A gateway and workers that are not of one cluster: nothing is said to them, and one line in the log says why."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gateway.topology.members import Topology
from services.runtime import rpc
from services.runtime.membership import Member
from tests.waiting import HANG_LIMIT_S

OURS, OTHERS = b"o" * 32, b"x" * 32


@pytest.fixture(autouse=True)
def _no_member_is_left() -> Iterator[None]:
    yield
    rpc.set_member(None)


async def answer_nothing(attempt: Any) -> None:
    """The script of a worker that nobody asks for anything."""


def become(secret: bytes | None, role: str) -> None:
    rpc.set_member(None if secret is None else Member(lambda: (secret,), role))


@contextlib.asynccontextmanager
async def looking_at(worker: Any, redis_url: str, cluster_name: str) -> AsyncIterator[Topology]:
    await worker.start(redis_url, cluster_name)
    topology = Topology(gateway_incarnation="0" * 32, on_change=lambda: None)
    try:
        topology.take_membership([worker.lease._record])
        yield topology
    finally:
        await topology.close()
        await worker.stop()


def guard_servers(monkeypatch: pytest.MonkeyPatch, incarnation: str) -> None:
    """Has workers of these tests ask for proofs, as those of a worker's program do."""
    make_server = rpc.make_server
    monkeypatch.setattr(rpc, "make_server", lambda names: make_server(names, incarnation=incarnation))


@pytest.mark.parametrize(
    ("workers", "gateways", "why"),
    [
        (OURS, None, "has not proven that it is one"),
        (OURS, OTHERS, "not one of this worker's cluster"),
        (None, OURS, "of an earlier version"),
    ],
)
async def test_strangers_are_not_used_and_named_once(
    worker_type: Any, redis_url: str, cluster_name: str, monkeypatch: Any, caplog: Any,
    workers: bytes | None, gateways: bytes | None, why: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    num_tries = 0
    really_prove = rpc.prove

    async def prove(*args: Any, **options: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        return await really_prove(*args, **options)

    monkeypatch.setattr(rpc, "prove", prove)
    worker = worker_type("decode", "decode-0", answer_nothing)
    guard_servers(monkeypatch, worker.incarnation)
    become(workers, "decode")
    async with looking_at(worker, redis_url, cluster_name) as topology:
        become(gateways, "gateway")
        async with asyncio.timeout(HANG_LIMIT_S):
            while num_tries < 3:  # noqa: ASYNC110 - what is waited for is other code's state
                await asyncio.sleep(0.01)
        assert topology.num_ready("decode") == 0
    told = [record for record in caplog.records if "not of one cluster" in record.message]
    # On a busy machine a try may end by its time, and what the next one ends by is news then.
    broken = [record for record in caplog.records if record.message == "session ended"]
    assert 1 <= len(told) <= 1 + len(broken)
    assert {(record.levelname, record.worker) for record in told} == {("WARNING", "decode-0")}
    assert why in told[0].reason


async def test_a_member_is_used(
    worker_type: Any, redis_url: str, cluster_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_type("decode", "decode-0", answer_nothing)
    guard_servers(monkeypatch, worker.incarnation)
    become(OURS, "decode")
    async with looking_at(worker, redis_url, cluster_name) as topology:
        become(OURS, "gateway")
        async with asyncio.timeout(HANG_LIMIT_S), contextlib.aclosing(topology.changes()) as changes:
            async for _ in changes:
                if topology.num_ready("decode") == 1:
                    break
