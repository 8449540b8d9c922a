import asyncio
from typing import Any

import pytest

from services.runtime.errors import (
    InvariantViolated,
)
from tests.waiting import HANG_LIMIT_S, settle, until
from worker import host as worker_host
from worker.metrics import Load


class FakeSessions:
    def __init__(self) -> None:
        self.first = asyncio.Event()


class FakeWorker:
    def __init__(self) -> None:
        self.drain_requested = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.calls: list[str] = []
        self.looks: list[float] = []
        self.is_stuck = False
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.sessions = FakeSessions()
        self.sessions.first.set()

    def check_engine(self, elapsed_s: float) -> None:
        self.looks.append(elapsed_s)
        if self.is_stuck and not self.failed.done():
            self.failed.set_exception(InvariantViolated("stuck"))
            self.may_close.set()

    def begin_drain(self) -> None:
        self.calls.append("drain")

    def end_drain(self) -> None:
        self.calls.append("again")

    def load(self) -> Load:
        return Load(8, 8, 0, 0, 0)

    async def wait_idle(self) -> None:
        await self.idle.wait()

    async def close(self) -> None:
        self.calls.append("close")
        await self.may_close.wait()


class FakeServer:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def set_serving(self, is_serving: bool) -> None:
        self.calls.append(is_serving)

    async def stop(self, grace_s: float) -> None:
        self.calls.append("stop")


class FakeLease:
    def __init__(self) -> None:
        self.states: list[str] = []
        self.fields: dict[str, Any] = {}
        self.is_redis_there = True

    @property
    def confirmed_state(self) -> str | None:
        return self.states[-1] if self.states and self.is_redis_there else None

    def update(self, **changes: Any) -> None:
        self.fields |= changes
        if "state" in changes:
            self.states.append(changes["state"])

    def release(self) -> None:
        self.states.append("released")


@pytest.mark.parametrize("how", ["signal", "command"])
async def test_a_life_goes_from_ready_over_draining_to_closed(how: str) -> None:
    worker, server, lease, stop = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, lease, stop))  # type: ignore[arg-type]
    await until(lambda: (lease.states, server.calls, worker.calls) == (["ready"], [True], []))
    assert lease.fields["pages_free"] == 8
    (stop if how == "signal" else worker.drain_requested).set()
    await until(lambda: (lease.states, server.calls, worker.calls) == (["ready", "draining"], [True, False], ["drain"]))
    worker.idle.set()
    await life
    assert (lease.states[-1], server.calls[-1], worker.calls[-1]) == ("draining", "stop", "close")


@pytest.mark.parametrize("how", ["found", "signal"])
async def test_a_worker_that_no_gateway_can_find_is_not_ready(how: str) -> None:
    worker, server, lease, stop = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event()
    lease.is_redis_there = False
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, lease, stop))  # type: ignore[arg-type]
    await until(lambda: lease.states == ["ready"])
    await settle()
    assert server.calls == []
    if how == "found":
        lease.is_redis_there = True
        await until(lambda: server.calls == [True])
        lease.is_redis_there = False  # Gateways know the worker by now.
        await settle()
        assert server.calls == [True]
    stop.set()
    worker.idle.set()
    await life
    assert server.calls == ([True] if how == "found" else []) + [False, "stop"]


@pytest.mark.parametrize("comes", [True, False])
async def test_a_worker_is_ready_when_a_gateway_has_found_it_or_none_comes(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_host, "FIRST_SESSION_S", 60.0 if comes else 0.1)
    worker, server, lease, stop = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event()
    worker.sessions.first.clear()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, lease, stop))  # type: ignore[arg-type]
    await until(lambda: lease.states == ["ready"])
    if comes:
        await settle()
        assert server.calls == []
        worker.sessions.first.set()
    await until(lambda: server.calls == [True])
    stop.set()
    worker.idle.set()
    await life


async def test_a_worker_says_that_no_gateway_comes_and_when_one_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(worker_host, "UNFOUND_S", 0.05)
    monkeypatch.setattr(worker_host, "FIRST_SESSION_S", 0.01)
    worker, lease, stop = FakeWorker(), FakeLease(), asyncio.Event()
    worker.sessions.first.clear()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, FakeServer(), lease, stop))  # type: ignore[arg-type]

    async def said(message: str) -> None:
        await until(lambda: message in [record.message for record in caplog.records])

    await said("no gateway has connected")
    assert "a gateway has connected" not in [record.message for record in caplog.records]
    worker.sessions.first.set()
    await said("a gateway has connected")
    stop.set()
    worker.idle.set()
    await life


class FakeChange:
    def __init__(self) -> None:
        self.is_due = asyncio.Event()
        self.is_withdrawn = asyncio.Event()

    async def due(self) -> None:
        await self.is_due.wait()

    async def withdrawn(self) -> None:
        await self.is_withdrawn.wait()


async def test_a_change_drains_the_worker_and_one_that_is_withdrawn_makes_it_ready_again() -> None:
    worker, server, lease, stop, change = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event(), FakeChange()
    life = asyncio.create_task(
        worker_host.serve_until_drained(worker, server, lease, stop, change=change)  # type: ignore[arg-type]
    )
    await until(lambda: (lease.states, server.calls, worker.calls) == (["ready"], [True], []))
    change.is_due.set()
    await until(lambda: (lease.states, server.calls, worker.calls) == (["ready", "draining"], [True, False], ["drain"]))
    change.is_due.clear()
    change.is_withdrawn.set()
    await until(lambda: lease.states == ["ready", "draining", "ready"])
    await settle()
    assert (server.calls, worker.calls) == ([True, False, True], ["drain", "again"])
    change.is_withdrawn.clear()
    change.is_due.set()
    await until(lambda: lease.states[-1] == "draining")
    assert not life.done()
    worker.idle.set()
    await life
    assert (lease.states[-1], server.calls[-1], worker.calls[-1]) == ("draining", "stop", "close")


@pytest.mark.parametrize("how", ["signal", "command"])
async def test_a_worker_that_is_told_to_leave_while_it_changes_leaves_when_it_is_drained(how: str) -> None:
    worker, server, lease, stop, change = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event(), FakeChange()
    life = asyncio.create_task(
        worker_host.serve_until_drained(worker, server, lease, stop, change=change)  # type: ignore[arg-type]
    )
    change.is_due.set()
    await until(lambda: worker.calls == ["drain"])
    (stop if how == "signal" else worker.drain_requested).set()
    await settle()
    change.is_withdrawn.set()
    await settle()
    assert (life.done(), worker.calls, lease.states[-1]) == (False, ["drain"], "draining")
    worker.idle.set()
    await life
    assert (server.calls[-1], worker.calls[-1]) == ("stop", "close")


async def test_a_change_whose_drain_takes_too_long_goes_on_without_what_is_left() -> None:
    worker, server, lease, stop, change = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event(), FakeChange()
    change.is_due.set()
    life = worker_host.serve_until_drained(
        worker,  # type: ignore[arg-type]
        server,  # type: ignore[arg-type]
        lease,  # type: ignore[arg-type]
        stop,
        drain_timeout_s=0.02,
        change=change,
    )
    await asyncio.wait_for(life, HANG_LIMIT_S)
    assert worker.calls == ["drain", "close"]


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_worker_that_fails_ends_its_life_with_its_error(is_draining: bool) -> None:
    worker, server, stop = FakeWorker(), FakeServer(), asyncio.Event()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, None, stop))  # type: ignore[arg-type]
    if is_draining:
        stop.set()
    await settle()
    worker.failed.set_exception(InvariantViolated("the books are wrong"))
    with pytest.raises(InvariantViolated):
        await life
    assert (worker.calls[-1], server.calls[-1]) == ("close", "stop")


async def test_a_drain_ends_at_its_limit_with_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    worker, server, lease, stop = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event()
    stop.set()
    life = worker_host.serve_until_drained(worker, server, lease, stop, drain_timeout_s=0.02)  # type: ignore[arg-type]
    await asyncio.wait_for(life, HANG_LIMIT_S)
    assert (worker.calls, server.calls[-1], lease.states[-1]) == (["drain", "close"], "stop", "draining")
    assert "longer than its limit" in caplog.text


@pytest.mark.parametrize("is_draining", [False, True])
async def test_an_engine_that_hangs_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch, is_draining: bool) -> None:
    monkeypatch.setattr(worker_host, "WATCH_INTERVAL_S", 0.01)
    worker, server, stop = FakeWorker(), FakeServer(), asyncio.Event()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, None, stop))  # type: ignore[arg-type]
    if is_draining:
        stop.set()
    await until(lambda: len(worker.looks) >= 3)
    assert set(worker.looks) == {0.01}
    worker.is_stuck = True
    with pytest.raises(InvariantViolated):
        await asyncio.wait_for(life, HANG_LIMIT_S)
    assert worker.calls[-1] == "close"


async def test_an_engine_that_hangs_while_the_worker_closes_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "WATCH_INTERVAL_S", 0.01)
    worker, server, stop = FakeWorker(), FakeServer(), asyncio.Event()
    worker.may_close.clear()
    stop.set()
    life = worker_host.serve_until_drained(worker, server, None, stop, drain_timeout_s=0.0)  # type: ignore[arg-type]
    worker.is_stuck = True
    with pytest.raises(InvariantViolated):
        await asyncio.wait_for(life, HANG_LIMIT_S)
    assert (worker.calls[-1], server.calls[-1]) == ("close", "stop")


@pytest.mark.parametrize("broken", ["check_engine", "load"])
async def test_what_runs_behind_a_worker_does_not_fail_unnoticed(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(worker_host, "WATCH_INTERVAL_S", 0.01)
    worker, server, lease = FakeWorker(), FakeServer(), FakeLease()

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(worker, broken, fail)
    life = worker_host.serve_until_drained(worker, server, lease, asyncio.Event())  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="a bug"):
        await asyncio.wait_for(life, HANG_LIMIT_S)
    assert (worker.calls[-1], server.calls[-1]) == ("close", "stop")


async def test_a_load_that_ends_before_a_signal_is_used() -> None:
    assert await worker_host.load_or_stop(lambda: 42, None, asyncio.Event()) == 42
    with pytest.raises(ZeroDivisionError):
        await worker_host.load_or_stop(lambda: 1 // 0, None, asyncio.Event())
