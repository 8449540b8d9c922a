"""A worker that gets no time on a busy machine is not taken for dead; one that stopped is, as soon as before."""

import asyncio
import contextlib

import pytest

from protos import worker_pb2
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.registry import watch_workers
from tests.waiting import HANG_LIMIT_S


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("gateway.topology.session.SILENCE_LIMIT_S", 1.5)
    monkeypatch.setattr("gateway.topology.keeper.RENEWED_S", 1.4)
    monkeypatch.setattr("gateway.assembly.watch_workers", _watch_often)


def _watch_often(store, **arguments):
    return watch_workers(store, poll_s=0.1, **arguments)


class Stalled:
    """A decode worker that holds its answers, and whose event loop can be made to say nothing."""

    def __init__(self, worker, monkeypatch, *, beat_s=0.2):
        self.worker = worker
        self.may_speak = asyncio.Event()
        self._monkeypatch = monkeypatch
        worker.lease._beat_s = beat_s

    def stall(self):
        async def wait(session):
            await self.may_speak.wait()

        self._monkeypatch.setattr(self.worker.sessions, "_wait", wait)
        for session in self.worker.sessions.sessions:
            session.wake = asyncio.Event()
            session.wake.set = lambda: None

    def stop_renewing(self):
        """Has the lease's thread do nothing, as in a process that was stopped."""
        self._monkeypatch.setattr(self.worker.lease, "_renew", lambda: None)


async def hold(attempt):
    attempt.emit(worker_pb2.Admitted())
    attempt.emit(worker_pb2.DecodeStarted())
    attempt.tokens(0, [40])


@pytest.fixture
async def stalled(make_system, worker_type, monkeypatch):
    async with under_way(await make_system(), worker_type, monkeypatch) as parts:
        yield parts


@contextlib.asynccontextmanager
async def under_way(system, worker_type, monkeypatch):
    """A system, its only worker, which holds an answer, and the session to it."""
    worker = await system.add(worker_type("decode", "decode-0", hold))
    stalled = Stalled(worker, monkeypatch)
    request = asyncio.create_task(system.complete(max_tokens=100))
    await system.until(lambda: len(worker.attempts) == 1)
    yield system, stalled, system.gateway.topology.decode_session("decode-0")
    stalled.may_speak.set()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def silent_for(session, seconds):
    """Waits until the session has had no word from the worker for `seconds`, or is broken."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANG_LIMIT_S):
        while session.is_up and session.has_spoken_since(loop.time() - seconds):  # noqa: ASYNC110 - nothing tells of silence
            await asyncio.sleep(0.02)


async def test_a_worker_that_renews_its_lease_is_not_given_up_at_once(stalled, monkeypatch):
    system, worker, session = stalled
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 60.0)
    worker.stall()
    await silent_for(session, 3.0)
    assert session.is_up, "it was given up though its lease was renewed"
    assert system.gateway.topology.num_ready("decode") == 1


async def test_a_worker_that_only_renews_its_lease_is_given_up_at_last(stalled, monkeypatch):
    _, worker, session = stalled
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 2.5)
    worker.stall()
    await silent_for(session, 20.0)
    assert not session.is_up


async def test_a_worker_that_does_neither_is_given_up_before_its_lease_is_over(stalled, monkeypatch):
    system, worker, session = stalled
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 60.0)
    worker.stall()
    worker.stop_renewing()
    await silent_for(session, 20.0)
    assert not session.is_up
    assert system.gateway.topology.members()[0].is_listed, "the lease had time left"


async def test_without_redis_silence_decides(make_system, worker_type, monkeypatch):
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 60.0)
    with EmbeddedRedis() as redis:
        system = await make_system(redis=redis.url)
        async with under_way(system, worker_type, monkeypatch) as (_, worker, session):
            redis.kill()
            worker.stall()
            await silent_for(session, 20.0)
            assert not session.is_up
            redis.start()
