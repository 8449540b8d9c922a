"""Workers are added to a running cluster and drained, as real processes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cli.children import GATEWAY, ChildSpec, ModelPlan
from cli.fleet import Fleet
from services.runtime.errors import ConfigError
from tests.cli.test_supervisor import SLEEP, spec, supervising, until

ONE = ModelPlan("one", Path("one"), 1, 2, "tandem")


def specs(plans: Sequence[ModelPlan]) -> list[ChildSpec]:
    return [
        spec("-".join(filter(None, (role, plan.label, str(number)))), SLEEP)
        for plan in plans
        for role, count in (("prefill", plan.num_prefill), ("decode", plan.num_decode))
        for number in range(count)
    ]


async def scale(fleet: Fleet, model: str | None, **numbers: int | None) -> dict[str, list[str]]:
    done = fleet.resize(model, prefill=numbers["prefill"], decode=numbers["decode"])
    await fleet.retire(done["drained"], grace_s=5)
    return done


async def test_a_model_gets_more_workers_and_fewer(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec(GATEWAY, SLEEP), *specs([ONE])) as (supervisor, news):
        fleet = Fleet(supervisor, [ONE], make_specs=specs)
        done = await scale(fleet, None, prefill=2, decode=None)
        assert done == {"started": ["prefill-1"], "drained": []}
        await until(lambda: supervisor.children["prefill-1"].pid is not None)
        done = await scale(fleet, "one", prefill=0, decode=1)
        assert done == {"started": [], "drained": ["decode-1", "prefill-0", "prefill-1"]}
        assert [child["name"] for child in fleet.children()] == [GATEWAY, "decode-0"]
        assert all(child["phase"] == "running" for child in fleet.children())
        assert any(line.startswith("decode-1 stopped") for line in news)


async def test_a_drained_worker_stays_away_until_the_cluster_is_scaled(tmp_path: Path) -> None:
    async with supervising(tmp_path, spec(GATEWAY, SLEEP), *specs([ONE])) as (supervisor, _):
        fleet = Fleet(supervisor, [ONE], make_specs=specs)
        await until(lambda: supervisor.children["decode-0"].pid is not None)
        await fleet.drain("decode-0", grace_s=5)
        assert "decode-0" not in supervisor.children
        for name in ("decode-0", GATEWAY, "x"):
            with pytest.raises(ConfigError, match="those are decode-1, prefill-0"):
                await fleet.drain(name, grace_s=5)
        done = await scale(fleet, None, prefill=None, decode=2)
        assert done == {"started": ["decode-0"], "drained": []}
        await until(lambda: supervisor.children["decode-0"].pid is not None)


async def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    plans = [replace(ONE, label="one"), ModelPlan("two", Path("two"), 0, 1, "tandem", "two")]
    async with supervising(tmp_path, *specs(plans)) as (supervisor, _):
        fleet = Fleet(supervisor, plans, make_specs=specs)
        for name in (None, "three"):
            with pytest.raises(ConfigError, match="one, two"):
                await scale(fleet, name, prefill=1, decode=None)
        done = await scale(fleet, "two", prefill=1, decode=1)
        assert done == {"started": ["prefill-two-0"], "drained": []}


async def test_a_worker_that_is_wanted_again_while_it_drains_comes_back(tmp_path: Path) -> None:
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = Fleet(supervisor, [ONE], make_specs=specs)
        await until(lambda: supervisor.children["decode-1"].pid is not None)
        first = supervisor.children["decode-1"].pid
        done = fleet.resize(None, prefill=None, decode=1)
        draining = asyncio.create_task(fleet.retire(done["drained"], grace_s=5))
        await asyncio.sleep(0)
        assert fleet.resize(None, prefill=None, decode=2) == {"started": [], "drained": []}
        assert fleet.sizes(None) == {"prefill": 1, "decode": 2}
        await draining
        await until(lambda: supervisor.children["decode-1"].pid not in (None, first))


async def test_a_worker_that_comes_later_and_cannot_start_ends_nothing_else(tmp_path: Path) -> None:
    def with_a_broken_one(plans: Sequence[ModelPlan]) -> list[ChildSpec]:
        return [spec(one.name, "import sys; sys.exit(2)") if one.name == "decode-2" else one for one in specs(plans)]

    async with supervising(tmp_path, *specs([ONE])) as (supervisor, news):
        fleet = Fleet(supervisor, [ONE], make_specs=with_a_broken_one)
        fleet.resize(None, prefill=None, decode=3)
        await until(lambda: any("decode-2 ended with exit code 2; given up" in line for line in news))
        assert not supervisor.gave_up.is_set()
        assert supervisor.failed is None
        await scale(fleet, None, prefill=None, decode=2)
        assert "decode-2" not in supervisor.children


async def test_at_the_end_nothing_is_started(tmp_path: Path) -> None:
    async with supervising(tmp_path, *specs([ONE])) as (supervisor, _):
        fleet = Fleet(supervisor, [ONE], make_specs=specs)
        fleet.close()
        fleet.resize(None, prefill=None, decode=5)
        assert "decode-4" not in supervisor.children
