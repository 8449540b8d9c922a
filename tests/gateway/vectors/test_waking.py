"""Calls whose model sleeps: how long they wait for it, how many may, and what ends them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.vectors.waking import Waking
from services.runtime.clock import Deadline
from services.runtime.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from tests.waiting import HANG_LIMIT_S


class Cluster:
    """One model that sleeps until it is woken by hand; stands for `ModelTurns` and `Topology`."""

    def __init__(self) -> None:
        self.sleeps = True
        self.notes: list[Callable[[], None]] = []
        self.source: Callable[[], Iterable[Any]] = tuple
        self.waking = Waking(self, self)  # type: ignore[arg-type]

    def add_source(self, source: Callable[[], Iterable[Any]]) -> None:
        self.source = source

    def is_asleep(self, model: str) -> bool:
        return self.sleeps

    def not_awake(self, model: str) -> WorkerUnavailable:
        return WorkerUnavailable(f"{model} is not awake", retry_after_s=3.0)

    @contextlib.contextmanager
    def watched(self, note: Callable[[], None]) -> Iterator[None]:
        self.notes.append(note)
        yield
        self.notes.remove(note)

    def tell(self, **changes: bool) -> None:
        self.__dict__.update(changes)
        for note in self.notes:
            note()

    def wait(self, wait_s: float = 30.0, *, deadline_s: float = 60.0, **more: Any) -> "asyncio.Task[None]":
        spec: Any = SimpleNamespace(model="a", deadline=Deadline.after(deadline_s))
        patience = spec.deadline.sooner(Deadline.after(wait_s))
        return asyncio.create_task(self.waking.until_awake(spec, patience, **more))


@pytest.fixture
async def cluster() -> Cluster:
    return Cluster()


async def test_a_call_waits_until_its_model_is_awake(cluster: Cluster) -> None:
    waits = [cluster.wait(), cluster.wait()]
    await asyncio.sleep(0)
    for _ in range(3):
        cluster.tell()
        await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    cluster.tell(sleeps=False)
    await asyncio.wait_for(asyncio.gather(*waits), HANG_LIMIT_S)
    await asyncio.wait_for(cluster.wait(), HANG_LIMIT_S)
    assert not cluster.notes
    assert not +cluster.waking._waiting


async def test_what_does_not_wake_in_time_is_told_with_the_time_of_a_switch(cluster: Cluster) -> None:
    with pytest.raises(WorkerUnavailable) as told:
        await cluster.wait(0.01)
    assert told.value.retry_after_s == 3.0
    with pytest.raises(DeadlineExceeded):
        await cluster.wait(deadline_s=0.01)


async def test_only_so_many_wait(cluster: Cluster) -> None:
    first = cluster.wait(max_waiting=1)
    await asyncio.sleep(0)
    with pytest.raises(WorkerUnavailable, match="a is not awake"):
        await cluster.wait(max_waiting=1)
    first.cancel()
    await asyncio.wait([first])
    second = cluster.wait(max_waiting=1)
    await asyncio.sleep(0)
    cluster.tell(sleeps=False)
    await asyncio.wait_for(second, HANG_LIMIT_S)


async def test_a_gateway_that_leaves_ends_them(cluster: Cluster) -> None:
    wait = cluster.wait()
    await asyncio.sleep(0)
    cluster.waking.end_all(Overloaded("leaving"))
    for each in (wait, cluster.wait()):
        with pytest.raises(Overloaded, match="leaving"):
            await asyncio.wait_for(each, HANG_LIMIT_S)


async def test_a_model_is_wanted_for_as_long_as_its_call_is_open(cluster: Cluster) -> None:
    spec: Any = SimpleNamespace(request_id="x", model="a")
    with cluster.waking.wanted(spec):
        assert list(cluster.source()) == [spec]
    assert list(cluster.source()) == []
