"""The autoscaler at work, against gateways and Kubernetes that say anything, and Redis that comes and goes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planning.autoscaler.actors import Sizes
from planning.autoscaler.decisions import Begin, DecisionLog
from planning.autoscaler.gateways import Gateways
from planning.autoscaler.kubernetes import KubernetesActor
from planning.autoscaler.policy import AutoscalerSettings
from planning.autoscaler.service import Service
from planning.planner.question import LatencyTargets
from services.cluster.decision_board import DecisionBoard
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.leadership import Leadership
from services.cluster.redis_store import Store
from services.runtime.clock import ManualClock
from tests.planning.autoscaler.pages import FakeGateway, FakeKubernetes, worker
from tests.waiting import HANG_LIMIT_S, settle

LIMITS = AutoscalerSettings(
    start_up_s=20.0, interval_s=10.0, settle_s=20.0, max_workers=12, changes_roles=False, give_up_s=60.0
)


class World:
    """A gateway whose workers are the pods of Kubernetes, once they come."""

    def __init__(self, api: Any, folder: Path) -> None:
        self.clock = ManualClock()
        self.gateway = FakeGateway(api)
        self.kubernetes = FakeKubernetes(folder, prefill=1, decode=1)
        self.ended = 0.0
        self.comes = 100
        """The most pods of a role that come."""

    def service(self, leadership: Leadership | None = None, board: DecisionBoard | None = None) -> Service:
        actor = KubernetesActor(
            self.kubernetes.url,
            "statefulsets/tandem-prefill",
            "statefulsets/tandem-decode",
            account=self.kubernetes.account,
        )
        log = DecisionLog(None, Begin(settings=LIMITS, targets=LatencyTargets()), since_s=0.0)
        gateways = Gateways([self.gateway.url], clock=self.clock)
        gateways.look()
        made = Service(gateways, actor, log=log, targets=LatencyTargets(), leadership=leadership, clock=self.clock)
        made.board = board
        return made

    def pass_by(self, rate_per_s: float) -> None:
        """Ten seconds: what was ordered before has come, and requests came and ended."""
        self.clock.advance(10.0)
        self.ended += round(10 * rate_per_s)
        self.gateway.counts = {"ended": self.ended}
        replicas = self.kubernetes.replicas()
        self.gateway.workers = [worker(role) for role in replicas for _ in range(min(replicas[role], self.comes))]

    @property
    def sizes(self) -> Sizes:
        return Sizes(**self.kubernetes.replicas())


@pytest.fixture
def world(api: Any, tmp_path: Path) -> Iterator[World]:
    made = World(api, tmp_path)
    yield made
    made.kubernetes.close()


async def test_workers_follow_the_load_and_each_change_has_its_reason(world: World) -> None:
    service = world.service()
    sizes = []
    for rate in [1.0] * 2 + [6.0] * 6 + [0.0] * 14:
        world.pass_by(rate)
        look = await service.step()
        assert look is not None
        assert look.done == "nothing to do" or look.done.startswith(f"ordered {world.sizes} in place of ")
        assert "requests/s within 30 s, 450 in and 101 out" in look.decision.reason
        sizes.append(world.sizes)
    assert max(size.decode for size in sizes) >= 6
    assert sizes[-1] == Sizes(1, 1)


async def test_one_that_dies_between_two_orders_is_followed_by_one_that_completes_them(world: World) -> None:
    first = world.service()
    for _ in range(4):
        world.pass_by(6.0)
        await first.step()
    wanted = world.sizes
    world.kubernetes.set("decode", 1)  # it had ordered prefill workers only when it was killed
    second = world.service()
    for _ in range(3):
        world.pass_by(6.0)
        await second.step()
    assert world.sizes.decode >= wanted.decode - 1


async def test_of_two_copies_one_acts_until_it_is_gone(world: World) -> None:
    with EmbeddedRedis() as redis:
        stores = [Store(redis.url, cluster="test", timeout_s=2.0) for _ in range(2)]
        leases = [Leadership(store, store.keys.autoscaler, holder=f"copy-{n}") for n, store in enumerate(stores)]
        services = [world.service(lease) for lease in leases]
        for lease in leases:
            await lease.renew()
        for _ in range(4):
            world.pass_by(6.0)
            before = len(world.kubernetes.patches)
            other = await services[1].step()
            assert other is not None
            assert other.done in ("nothing: copy-0 acts", "nothing to do")
            assert len(world.kubernetes.patches) == before
            await services[0].step()
        assert world.sizes.decode > 3
        await leases[0].close()
        await leases[1].renew()
        for _ in range(10):
            world.pass_by(0.0)
            gone, follower = await services[0].step(), await services[1].step()
            assert gone is not None
            assert follower is not None
            assert not gone.done.startswith("ordered")
        assert world.sizes == Sizes(1, 1)
        await leases[1].close()
        await asyncio.gather(*(store.close() for store in stores))


async def test_gateways_see_what_was_ordered_and_why(world: World) -> None:
    with EmbeddedRedis() as redis:
        store = Store(redis.url, cluster="test", timeout_s=2.0)
        board = DecisionBoard(store)
        service, ordered = world.service(board=board), []
        for rate in [0.1] + [0.6] * 5:
            world.pass_by(rate)
            look = await service.step()
            assert look is not None
            if look.done.startswith("ordered"):
                ordered.insert(0, (look.seen.now_s, look.done, look.decision.reason))
        shown = [(one.at_unix_s, one.done, one.reason) for one in await board.read()]
        assert len(ordered) >= 2
        assert shown == ordered
        lease = Leadership(store, store.keys.autoscaler, holder="a")
        follower = world.service(lease, board)
        world.pass_by(0.0)
        await follower.step()
        assert len(await board.read()) == len(shown), "a copy that may not act has ordered nothing"
    world.pass_by(30.0)
    look = await service.step()
    assert look is not None
    assert look.done.startswith("ordered"), "without Redis nobody sees it, and it is done"
    await store.close()


async def test_without_redis_nothing_is_done_and_it_says_why(world: World) -> None:
    redis = EmbeddedRedis()
    with redis:
        store, clock = Store(redis.url, cluster="test", timeout_s=2.0), ManualClock()
        lease = Leadership(store, store.keys.autoscaler, holder="a", clock=clock)
        service = world.service(lease)
        await lease.renew()
    clock.advance(60.0)
    await lease.renew()
    world.pass_by(6.0)
    look = await service.step()
    assert look is not None
    assert look.done.startswith("nothing: Redis")
    assert world.sizes == Sizes(1, 1)
    await store.close()


async def test_a_gateway_that_lies_moves_nothing_beyond_the_limits(world: World) -> None:
    service = world.service()
    world.pass_by(0.1)
    assert await service.step() is not None
    before = world.sizes
    for _ in range(3):
        world.pass_by(1e12)
        assert await service.step() is None, "no gateway could have taken them"
    assert world.sizes == before
    for _ in range(3):  # what could be, and is not
        world.ended = 0.0
        world.pass_by(15_000.0)
        assert await service.step() is not None
        assert world.sizes.prefill + world.sizes.decode == 12, "the budget"


async def test_gateways_that_are_away_change_nothing(world: World) -> None:
    service = world.service()
    for _ in range(3):
        world.pass_by(6.0)
        await service.step()
    before = world.sizes
    world.gateway.page = b"<html>"
    for _ in range(10):
        world.clock.advance(10.0)
        assert await service.step() is None
    assert world.sizes == before


async def test_kubernetes_that_is_away_is_told_and_the_next_decision_acts(world: World) -> None:
    service = world.service()
    world.pass_by(6.0)
    token = world.kubernetes.token
    world.kubernetes.token = "another"
    assert await service.step() is None
    world.kubernetes.token = token
    world.pass_by(6.0)
    await service.step()
    assert world.sizes.decode > 3


async def test_pods_that_never_come_are_given_up_and_no_more_are_ordered(world: World) -> None:
    world.comes = 1
    service = world.service()
    looks = []
    for step in range(14):
        world.pass_by(0.5 if step < 6 else 1.0)
        looks.append(await service.step())
    ordered = world.sizes
    last = looks[-1]
    assert last is not None
    assert "workers do not come and are given up" in last.decision.reason
    assert ordered.decode > 1
    for _ in range(4):
        world.pass_by(50.0)
        await service.step()
        assert world.sizes.decode == ordered.decode
    world.comes = 100
    for _ in range(3):
        world.pass_by(50.0)
        await service.step()
    assert world.sizes.prefill + world.sizes.decode == 12


async def test_it_runs_until_it_is_stopped(world: World) -> None:
    service, stop = world.service(), asyncio.Event()
    task = asyncio.create_task(service.run(stop))
    await settle()
    assert not task.done()
    stop.set()
    await asyncio.wait_for(task, HANG_LIMIT_S)
