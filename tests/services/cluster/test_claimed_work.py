"""Work that is claimed, against a table in memory: whose it is, how it ends, and what others get to do."""

import asyncio

import pytest

from services.cluster import claimed_work
from services.cluster.claimed_work import ClaimedRun, ClaimedWork, Left, until_answered
from services.runtime.errors import StoreRefused, StoreUnavailable
from tests.waiting import until


class Run(ClaimedRun):
    def __init__(self, name: str, tenant: str, table: "Work") -> None:
        super().__init__(name=name, tenant=tenant, kind="a piece", identity={"piece": name})
        self.table = table
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def _complete(self) -> None:
        self.table.begun.append(self.name)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        self.table.told.append(("done", self.name))

    async def _keep(self) -> None:
        while True:
            if self.table.owners.get(self.name, self) is not self:
                self.stop()
                return
            await self._until_next_look(60)

    async def _give_back(self) -> None:
        if self.table.is_away:
            raise StoreUnavailable("away")
        self.table.told.append(("given back", self.name))

    async def _on_fault(self) -> None:
        self.table.told.append(("fault", self.name))


class Work(ClaimedWork[Run]):
    def __init__(self, waiting: list[tuple[str, str]], *, max_runs: int = 8, max_runs_of_tenant: int = 8) -> None:
        super().__init__(kind="a piece", max_runs=max_runs, max_runs_of_tenant=max_runs_of_tenant)
        self.waiting = waiting
        self.owners: dict[str, Run] = {}
        self.begun: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.is_away = False

    async def _claim(self, *, busy_tenants: list[str], full_tenants: list[str]) -> Run | None:
        if self.is_away:
            raise StoreUnavailable("away")
        for name, tenant in self.waiting:
            if tenant not in full_tenants:
                self.waiting.remove((name, tenant))
                run = self.owners[name] = Run(name, tenant, self)
                return run
        return None


async def test_pieces_are_claimed_up_to_the_shares_and_a_place_that_is_free_is_used_at_once() -> None:
    work = Work([("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")], max_runs=3, max_runs_of_tenant=2)
    work.start()
    await until(lambda: len(work.begun) == 3)
    assert work.begun == ["a1", "a2", "b1"]
    work.runs["a1"].may_end.set()
    await until(lambda: len(work.begun) == 4)  # before the next look, a second later
    assert work.begun[3] == "a3"
    assert work.told == [("done", "a1")]
    await work.close()
    assert sorted(work.told[1:]) == [("given back", name) for name in ("a2", "a3", "b1")]
    assert not work.runs


async def test_work_that_comes_is_begun_when_it_is_told() -> None:
    work = Work([])
    work._poll_s = 60
    work.start()
    await asyncio.sleep(0)
    work.waiting.append(("a1", "a"))
    work.poke("a1")
    await until(lambda: work.begun == ["a1"])
    await work.close()


async def test_work_that_another_has_is_stopped_when_it_is_looked_at() -> None:
    work = Work([("a1", "a")])
    work.start()
    await until(lambda: work.begun == ["a1"])
    work.owners["a1"] = Run("a1", "a", work)
    work.poke("a1")
    await until(lambda: not work.runs)
    await work.close()


async def test_what_is_ours_anew_takes_the_place_of_the_run_of_before() -> None:
    work = Work([("a1", "a")])
    work.start()
    await until(lambda: work.begun == ["a1"])
    first = work.runs["a1"]
    work.waiting.append(("a1", "a"))
    work.poke("a2")
    await until(lambda: work.begun == ["a1", "a1"])
    assert work.runs["a1"] is not first
    await until(lambda: work.told == [("given back", "a1")])
    await work.close()


@pytest.mark.parametrize(
    ("error", "told"), [(Left(), [("given back", "a1")]), (RuntimeError("a fault"), [("fault", "a1")])]
)
async def test_a_fault_is_told_and_not_given_back(error: Exception, told: list[tuple[str, str]]) -> None:
    work = Work([("a1", "a")])
    work.start()
    await until(lambda: work.begun == ["a1"])
    work.runs["a1"].error = error
    work.runs["a1"].may_end.set()
    await until(lambda: not work.runs)
    assert work.told == told
    await work.close()


async def test_leaving_waits_for_what_runs_and_then_stops_it() -> None:
    work = Work([("a1", "a"), ("a2", "a")])
    work.start()
    await until(lambda: len(work.begun) == 2)
    quick = work.runs["a1"]
    closing = asyncio.create_task(work.close(timeout_s=0.05))
    await quick._leaving.wait()
    quick.may_end.set()
    await closing
    assert work.told == [("done", "a1"), ("given back", "a2")]


async def test_work_of_tenants_that_must_be_elsewhere_is_left_to_others() -> None:
    work = Work([("a1", "a"), ("b1", "b")])
    elsewhere = ["a"]
    work.tenants_elsewhere = lambda: elsewhere
    work.start()
    await until(lambda: len(work.begun) == 1)
    assert (work.begun, work.waiting) == (["b1"], [("a1", "a")])
    elsewhere.clear()
    work.poke("a1")
    await until(lambda: work.begun == ["b1", "a1"])
    await work.close()


async def test_a_store_that_is_away_keeps_nobody_from_closing() -> None:
    work = Work([("a1", "a")])
    work.start()
    await until(lambda: work.begun == ["a1"])
    work.is_away = True
    work.poke("a2")
    await work.close()
    assert work.told == []
    assert not work.runs


async def test_a_process_with_no_places_claims_nothing() -> None:
    work = Work([("a1", "a")], max_runs=0)
    work.start()
    await asyncio.sleep(0.01)
    await work.close()
    assert work.begun == []


async def test_a_command_is_repeated_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed_work, "STORE_RETRY_S", 0.001)
    tries = 0

    async def call() -> int:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise StoreUnavailable("away")
        return tries

    assert await until_answered(call) == 4


async def test_a_command_without_an_answer_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed_work, "STORE_RETRY_S", 0.001)

    async def call() -> int:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        await until_answered(call, timeout_s=0.01)


async def test_what_redis_refuses_is_not_repeated() -> None:
    num_calls = 0

    async def call() -> None:
        nonlocal num_calls
        num_calls += 1
        raise StoreRefused("no")

    with pytest.raises(StoreRefused):
        await until_answered(call)
    assert num_calls == 1
