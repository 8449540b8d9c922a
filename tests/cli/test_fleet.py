"""Workers are added to a running cluster and drained, as real processes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cli.children import GATEWAY, ROLES, ChildSpec, ModelPlan
from cli.fleet import Fleet, Resized
from cli.supervisor import Supervisor
from services.runtime.errors import ConfigError
from tests.cli.test_supervisor import SLEEP, spec, supervising, until
from tests.waiting import HANG_LIMIT_S

ONE = ModelPlan("one", Path("one"), 1, 2, "tandem")
TWO_OF_EACH = ModelPlan("one", Path("one"), 2, 2, "tandem")


def specs(plans: Sequence[ModelPlan]) -> list[ChildSpec]:
    return [
        spec("-".join(filter(None, (role, plan.label, str(number)))), SLEEP)
        for plan in plans
        for role, count in (("prefill", plan.num_prefill), ("decode", plan.num_decode))
        for number in range(count)
    ]


class Cluster:
    """What the gateway says: workers have the roles that their files name, after a while."""

    def __init__(self, folder: Path, *, is_stuck: bool = False) -> None:
        self.folder = folder
        self.is_stuck = is_stuck
        self.looks = 0

    async def ready(self) -> dict[str, str]:
        self.looks += 1
        files = {} if self.is_stuck else {file.stem: file.read_text() for file in self.folder.glob("*.role")}
        return {
            name: files.get(name, name.split("-")[0]) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")
        }


def make_fleet(
    supervisor: Supervisor,
    folder: Path,
    plans: Sequence[ModelPlan] = (ONE,),
    make_specs: Callable[[Sequence[ModelPlan]], Sequence[ChildSpec]] = specs,
    cluster: Cluster | None = None,
) -> Fleet:
    ready = (cluster or Cluster(folder)).ready
    return Fleet(supervisor, plans, make_specs=make_specs, roles=folder, ready=ready)


async def scale(fleet: Fleet, model: str | None, **numbers: int | None) -> Resized:
    done = fleet.resize(model, prefill=numbers["prefill"], decode=numbers["decode"])
    await fleet.finish(done, grace_s=5)
    return done


async def test_a_model_gets_more_workers_and_fewer(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec(GATEWAY, SLEEP), *specs([ONE])) as (supervisor, news):
        fleet = make_fleet(supervisor, tmp_path)
        done = await scale(fleet, None, prefill=2, decode=None)
        assert done == Resized(["prefill-1"], {}, [])
        await until(lambda: supervisor.children["prefill-1"].pid is not None)
        done = await scale(fleet, "one", prefill=0, decode=1)
        assert done == Resized([], {}, ["decode-1", "prefill-0", "prefill-1"])
        assert [child["name"] for child in fleet.children()] == [GATEWAY, "decode-0"]
        assert all(child["phase"] == "running" for child in fleet.children())
        assert any(line.startswith("decode-1 stopped") for line in news)


async def test_a_drained_worker_stays_away_until_the_cluster_is_scaled(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec(GATEWAY, SLEEP), *specs([ONE])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path)
        await until(lambda: supervisor.children["decode-0"].pid is not None)
        await fleet.drain("decode-0", grace_s=5)
        assert "decode-0" not in supervisor.children
        for name in ("decode-0", GATEWAY, "x"):
            with pytest.raises(ConfigError, match="those are decode-1, prefill-0"):
                await fleet.drain(name, grace_s=5)
        done = await scale(fleet, None, prefill=None, decode=2)
        assert done == Resized(["decode-0"], {}, [])
        await until(lambda: supervisor.children["decode-0"].pid is not None)


async def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    plans = [replace(ONE, label="one"), ModelPlan("two", Path("two"), 0, 1, "tandem", "two")]
    async with supervising(tmp_path, *specs(plans)) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, plans)
        for name in (None, "three"):
            with pytest.raises(ConfigError, match="one, two"):
                await scale(fleet, name, prefill=1, decode=None)
        done = await scale(fleet, "two", prefill=1, decode=1)
        assert done == Resized(["prefill-two-0"], {}, [])
        assert fleet.total_sizes == {role: fleet.sizes("one")[role] + fleet.sizes("two")[role] for role in ROLES}
        assert fleet.total_sizes["prefill"] == fleet.sizes("one")["prefill"] + 1


async def test_a_worker_that_is_wanted_again_while_it_drains_comes_back(tmp_path: Path) -> None:
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path)
        await until(lambda: supervisor.children["decode-1"].pid is not None)
        first = supervisor.children["decode-1"].pid
        done = fleet.resize(None, prefill=None, decode=1)
        draining = asyncio.create_task(fleet.finish(done, grace_s=5))
        await asyncio.sleep(0)
        assert fleet.resize(None, prefill=None, decode=2) == Resized([], {}, [])
        assert fleet.sizes(None) == {"prefill": 1, "decode": 2}
        await draining
        await until(lambda: supervisor.children["decode-1"].pid not in (None, first))


async def test_a_worker_that_comes_later_and_cannot_start_ends_nothing_else(tmp_path: Path) -> None:
    def with_a_broken_one(plans: Sequence[ModelPlan]) -> list[ChildSpec]:
        return [spec(one.name, "import sys; sys.exit(2)") if one.name == "decode-2" else one for one in specs(plans)]

    async with supervising(tmp_path, *specs([ONE])) as (supervisor, news):
        fleet = make_fleet(supervisor, tmp_path, make_specs=with_a_broken_one)
        fleet.resize(None, prefill=None, decode=3)
        await until(lambda: any("decode-2 ended with exit code 2; given up" in line for line in news))
        assert not supervisor.gave_up.is_set()
        assert supervisor.failed is None
        await scale(fleet, None, prefill=None, decode=2)
        assert "decode-2" not in supervisor.children


async def test_at_the_end_nothing_is_started(tmp_path: Path) -> None:
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path)
        fleet.close()
        fleet.resize(None, prefill=None, decode=5)
        assert "decode-4" not in supervisor.children


async def test_a_worker_changes_its_role_and_has_it_when_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "decode-0.role").write_text("prefill")  # of an earlier run in the same folder
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path)
        assert not (tmp_path / "decode-0.role").exists()
        assert await fleet.change_role("decode-1", "prefill", timeout_s=5, is_forced=False)
        assert (tmp_path / "decode-1.role").read_text() == "prefill"
        assert fleet.sizes(None) == {"prefill": 2, "decode": 1}
        assert not await fleet.change_role("decode-1", "prefill", timeout_s=5, is_forced=False)
        assert await fleet.change_role("decode-1", "decode", timeout_s=5, is_forced=False)
        assert not (tmp_path / "decode-1.role").exists(), "it has its first role again"
        assert fleet.sizes(None) == {"prefill": 1, "decode": 2}


async def test_what_cannot_change_its_role_is_refused_with_a_reason(tmp_path: Path) -> None:
    vllm = ModelPlan("two", Path("two"), 1, 2, "vllm", "two")
    shared = ModelPlan("three", Path("three"), 1, 1, "native", "three", sharers={"four": Path("four")})
    plans = [ONE, vllm, shared]
    async with supervising(tmp_path, spec(GATEWAY, SLEEP), *specs(plans)) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, plans)

        async def refused(name: str, role: str) -> str:
            with pytest.raises(ConfigError) as caught:
                await fleet.change_role(name, role, timeout_s=5, is_forced=False)
            return caught.value.message

        assert "no worker 'gateway' runs here" in await refused(GATEWAY, "decode")
        assert "no worker 'decode-7' runs here" in await refused("decode-7", "prefill")
        assert await refused("prefill-0", "decode") == (
            "prefill-0 is the only prefill worker of one: --force changes its role all the same"
        )
        assert "computes with vLLM" in await refused("decode-two-1", "prefill")
        assert "has one of the models three, four at a time" in await refused("decode-three-0", "prefill")
        for name in ("three", "four"):
            with pytest.raises(ConfigError, match="the workers of three are shared"):
                fleet.resize(name, prefill=2, decode=None)
        assert await fleet.change_role("prefill-0", "decode", timeout_s=5, is_forced=True)
        assert fleet.sizes("one") == {"prefill": 0, "decode": 3}
        draining = asyncio.create_task(fleet.drain("decode-1", grace_s=5))
        await asyncio.sleep(0)
        assert await refused("decode-1", "prefill") == "decode-1 is ending"
        await draining


async def test_one_change_at_a_time_and_one_that_takes_too_long_is_taken_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, is_stuck=True)
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, cluster=cluster)
        change = asyncio.create_task(fleet.change_role("decode-1", "prefill", timeout_s=0.5, is_forced=False))
        await until(lambda: cluster.looks > 0)
        with pytest.raises(ConfigError, match="is changing its role"):
            await fleet.change_role("decode-1", "decode", timeout_s=5, is_forced=False)
        assert (tmp_path / "decode-1.role").exists()
        with pytest.raises(ConfigError, match=r"no prefill worker after 0\.5 s and keeps its role"):
            await change
        assert not (tmp_path / "decode-1.role").exists()
        assert fleet.sizes(None) == {"prefill": 1, "decode": 2}
        cluster.is_stuck = False
        assert await fleet.change_role("decode-1", "prefill", timeout_s=5, is_forced=False)


async def test_a_worker_that_is_drained_in_the_middle_of_its_change_is_not_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, is_stuck=True)
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, cluster=cluster)
        change = asyncio.create_task(fleet.change_role("decode-1", "prefill", timeout_s=HANG_LIMIT_S, is_forced=False))
        await until(lambda: cluster.looks > 0)
        await fleet.drain("decode-1", grace_s=5)
        with pytest.raises(ConfigError, match="told otherwise"):
            await asyncio.wait_for(change, HANG_LIMIT_S)


async def test_where_one_role_has_too_many_and_the_other_too_few_workers_change(tmp_path: Path) -> None:
    async with supervising(tmp_path, *specs([TWO_OF_EACH])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, [TWO_OF_EACH])
        await until(lambda: all(child.pid is not None for child in supervisor.children.values()))
        pids = {name: child.pid for name, child in supervisor.children.items()}
        assert await scale(fleet, None, prefill=1, decode=3) == Resized([], {"prefill-1": "decode"}, [])
        assert fleet.sizes(None) == {"prefill": 1, "decode": 3}
        assert await scale(fleet, None, prefill=3, decode=1) == Resized(
            [], {"prefill-1": "prefill", "decode-1": "prefill"}, []
        )
        assert fleet.sizes(None) == {"prefill": 3, "decode": 1}
        assert {name: child.pid for name, child in supervisor.children.items()} == pids, "nothing was started again"
        assert await scale(fleet, None, prefill=2, decode=3) == Resized(["decode-2"], {"decode-1": "decode"}, [])
        assert fleet.sizes(None) == {"prefill": 2, "decode": 3}


async def test_a_worker_in_another_role_than_its_first_is_drained_first_and_its_name_is_free(tmp_path: Path) -> None:
    async with supervising(tmp_path, *specs([TWO_OF_EACH])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, [TWO_OF_EACH])
        await fleet.change_role("prefill-0", "decode", timeout_s=5, is_forced=False)
        assert await scale(fleet, None, prefill=None, decode=2) == Resized([], {}, ["prefill-0"])
        assert set(supervisor.children) == {"prefill-1", "decode-0", "decode-1"}
        assert fleet.sizes(None) == {"prefill": 1, "decode": 2}
        assert await scale(fleet, None, prefill=2, decode=None) == Resized(["prefill-0"], {}, [])
        assert not (tmp_path / "prefill-0.role").exists(), "it is what its name says"
        assert await scale(fleet, None, prefill=3, decode=None) == Resized(["prefill-2"], {}, [])
        assert await scale(fleet, None, prefill=0, decode=1) == Resized(
            [], {}, ["decode-1", "prefill-0", "prefill-1", "prefill-2"]
        )
        assert fleet.sizes(None) == {"prefill": 0, "decode": 1}


async def test_workers_of_vllm_are_started_and_drained_instead(tmp_path: Path) -> None:
    vllm = replace(TWO_OF_EACH, engine="vllm")
    async with supervising(tmp_path, *specs([vllm])) as (supervisor, _):
        fleet = make_fleet(supervisor, tmp_path, [vllm])
        assert await scale(fleet, None, prefill=1, decode=3) == Resized(["decode-2"], {}, ["prefill-1"])
