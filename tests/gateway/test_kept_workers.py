"""Workers kept for tenants or pools: requests that may not use them are not delayed by those waiting for them."""

import asyncio
import collections

import grpc
import pytest

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, worker_pb2
from tests.waiting import HANG_LIMIT_S

NUM_WAITING = 20


class Gated:
    """A decode worker's script that computes prompts itself: ends each answer when it is let."""

    def __init__(self):
        self.ends = asyncio.Semaphore(0)
        self.took = []

    async def decode(self, attempt):
        self.took.append(attempt.spec.prompt_token_ids[0])
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        await self.ends.acquire()
        attempt.tokens(0, [9])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)


@pytest.fixture
def add(worker_type):
    """Adds a decode worker that has one request at a time where none of its pages is free."""

    async def add(system, worker_id, *tenants, pool="", free=0):
        script = Gated()
        worker = worker_type("decode", worker_id, script.decode, tenants=tenants, pool=pool)
        worker.load.pages.free = free
        await system.add(worker)
        return script

    return add


async def ask(system, tenant, number=5, service_class="normal"):
    """The request's status; `number` is how a worker tells it from others."""
    response = await system.complete(prompt=[number], max_tokens=4, tenant=tenant, service_class=service_class)
    return response.status_code


async def fill(system, script, tenant, service_class="critical"):
    """Sends requests until one runs and NUM_WAITING wait behind it."""
    tasks = [asyncio.create_task(ask(system, tenant, service_class=service_class)) for _ in range(NUM_WAITING + 1)]
    await system.until(lambda: len(script.took) == 1 and system.gateway.requests.num_queued == NUM_WAITING)
    return tasks


async def finish(script, tasks):
    for _ in tasks:
        script.ends.release()
    assert collections.Counter(await asyncio.gather(*tasks)) == {200: len(tasks)}


async def report(system, worker_id, *, num_free=None, num_waiting=None):
    """Changes a worker's free pages or waiting tokens, and waits until the gateway knows."""
    worker = system.workers[worker_id]
    if num_free is not None:
        worker.load.pages.free = num_free
    if num_waiting is not None:
        worker.load.waiting_tokens = num_waiting
    worker.sessions.load_changed()

    def is_known():
        (load,) = [member.load for member in system.gateway.topology.members() if member.record.id == worker_id]
        return (load.pages_free, load.waiting_tokens) == (worker.load.pages.free, worker.load.waiting_tokens)

    await system.until(is_known)


@pytest.mark.parametrize("service_class", ["critical", "normal", "batch"])
async def test_a_tenant_whose_workers_are_full_delays_nobody_else(make_system, add, service_class):
    system = await make_system()
    of_a, of_b = await add(system, "decode-a", "a"), await add(system, "decode-b", "b", free=100)
    tasks = await fill(system, of_a, "a")
    await finish(of_b, [asyncio.create_task(ask(system, "b", service_class=service_class)) for _ in range(3)])
    assert system.gateway.requests.num_queued == NUM_WAITING
    await finish(of_a, tasks)


async def test_nor_does_it_where_both_use_the_same_prefill_worker(make_system, add, worker_type, pair_type):
    system, pair = await make_system(), pair_type([9, 1])
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    of_a = await add(system, "decode-a", "a")
    await system.add(worker_type("decode", "decode-b", pair.decode, tenants=("b",)))
    tasks = await fill(system, of_a, "a")
    assert await ask(system, "b") == 200
    assert system.workers["prefill-0"].attempts[-1].spec.id.request_id in {
        attempt.spec.id.request_id for attempt in system.workers["decode-b"].attempts
    }
    await finish(of_a, tasks)


async def test_who_has_a_free_worker_of_its_own_passes_those_that_wait_for_shared_ones(make_system, add):
    system = await make_system()
    shared = await add(system, "decode-0")
    tasks = await fill(system, shared, "x")
    of_a = await add(system, "decode-a", "a")
    first = asyncio.create_task(ask(system, "a"))
    second = asyncio.create_task(ask(system, "a", number=6))
    await system.until(lambda: len(of_a.took) == 1)
    assert (len(shared.took), system.gateway.requests.num_queued) == (1, NUM_WAITING + 1)
    # The other request of tenant a waits for both workers. On the shared one all critical requests go before it.
    of_a.ends.release()
    await system.until(lambda: len(of_a.took) == 2)
    of_a.ends.release()
    assert await asyncio.gather(first, second) == [200, 200]
    await finish(shared, tasks)


async def test_a_tenant_whose_own_worker_is_full_takes_a_shared_one(make_system, add):
    system = await make_system()
    of_a, shared = await add(system, "decode-a", "a", free=100), await add(system, "decode-0", free=100)
    tasks = [asyncio.create_task(ask(system, "a", 1))]
    await system.until(lambda: of_a.took == [1])
    await report(system, "decode-a", num_free=0)
    tasks.append(asyncio.create_task(ask(system, "a", 2)))
    await system.until(lambda: shared.took == [2])
    await finish(of_a, tasks[:1])
    await finish(shared, tasks[1:])


async def test_classes_are_strict_among_tenants_that_compete_for_a_worker(make_system, add):
    system = await make_system()
    script = await add(system, "decode-0", "a", "b")
    asked = [
        ("a", "normal"),
        ("a", "normal"),
        ("b", "interactive"),
        ("a", "critical"),
        ("b", "critical"),
        ("b", "normal"),
    ]
    tasks = []
    for number, (tenant, service_class) in enumerate(asked):
        tasks.append(asyncio.create_task(ask(system, tenant, number, service_class)))
        await system.until(lambda number=number: len(script.took) + system.gateway.requests.num_queued == number + 1)
    for num_taken in range(1, len(asked)):
        assert len(script.took) == num_taken
        script.ends.release()
        await system.until(lambda num_taken=num_taken: len(script.took) == num_taken + 1)
    await finish(script, tasks)
    assert script.took == [0, 3, 4, 2, 1, 5]


async def test_nobody_takes_what_one_before_it_waits_for(make_system, add):
    """A large request waits for pages of a worker; a small one of another tenant would find room there."""
    system = await make_system()
    of_both, of_c = await add(system, "decode-0", "a", "b"), await add(system, "decode-c", "c")
    await report(system, "decode-0", num_free=5)
    tasks = [asyncio.create_task(ask(system, "a", 1))]
    await system.until(lambda: of_both.took == [1])
    tasks.append(asyncio.create_task(system.complete(prompt=[2], max_tokens=400, tenant="b")))
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    tasks.append(asyncio.create_task(ask(system, "a", 3)))
    await system.until(lambda: system.gateway.requests.num_queued == 2)
    tasks.append(asyncio.create_task(ask(system, "c", 4)))
    # When it goes, those before it have been looked at.
    await system.until(lambda: of_c.took == [4])
    assert (of_both.took, system.gateway.requests.num_queued) == ([1], 2)
    await report(system, "decode-0", num_free=100)
    await system.until(lambda: len(of_both.took) == 3)
    assert of_both.took == [1, 2, 3]
    for script in (of_both, of_c):
        for _ in tasks:
            script.ends.release()
    await asyncio.gather(*tasks)


async def test_a_fair_queue_is_fair_to_tenants_of_different_lanes(make_system, add):
    """One tenant has more workers than the other; on the workers that both may use, their turns alternate."""
    system = await make_system(queue_strategy="fair")
    shared, of_a = await add(system, "decode-0"), await add(system, "decode-a", "a")
    tasks = [asyncio.create_task(ask(system, "a", 7))]
    await system.until(lambda: of_a.took == [7])
    # Its own worker has so much to compute that the tenant's requests wait for the shared one.
    await report(system, "decode-a", num_waiting=1_000_000)
    tasks.append(asyncio.create_task(ask(system, "a", 7)))
    await system.until(lambda: len(shared.took) == 1)
    for tenant, number in (("a", 7), ("x", 8)):
        tasks += [asyncio.create_task(ask(system, tenant, number)) for _ in range(NUM_WAITING)]
    await system.until(lambda: system.gateway.requests.num_queued == 2 * NUM_WAITING)
    for num_taken in range(1, NUM_WAITING):
        shared.ends.release()
        await system.until(lambda num_taken=num_taken: len(shared.took) == num_taken + 1)
    counts = collections.Counter(shared.took[1:])
    assert abs(counts[7] - counts[8]) <= 2, counts
    assert of_a.took == [7]
    for script in (shared, of_a):
        for _ in tasks:
            script.ends.release()
    assert collections.Counter(await asyncio.gather(*tasks)) == {200: len(tasks)}


@pytest.fixture
def make_pools(make_system, tmp_path):
    """Makes a gateway with a pools file."""

    async def make(*pools, **settings):
        (tmp_path / "pools.toml").write_text("".join(f"[[pool]]\n{pool}\n" for pool in pools))
        return await make_system(pools=tmp_path / "pools.toml", **settings)

    return make


async def test_a_strict_pool_and_all_others_leave_each_other_alone(make_pools, add):
    system = await make_pools('name = "slow"\nclasses = ["critical", "low"]\nrule = "strict"')
    kept, others = await add(system, "decode-a", pool="slow"), await add(system, "decode-0")
    tasks = await fill(system, kept, "")
    assert others.took == []
    await finish(others, [asyncio.create_task(ask(system, "")) for _ in range(3)])
    assert (len(kept.took), system.gateway.requests.num_queued) == (1, NUM_WAITING)
    await finish(kept, tasks)
    assert (len(kept.took), len(others.took)) == (NUM_WAITING + 1, 3)


async def test_a_strict_pool_is_not_left_however_busy_its_workers_are(make_pools, add):
    """The others' workers are idle, and its own have more to compute than may wait there."""
    system = await make_pools('name = "slow"\nclasses = ["critical"]\nrule = "strict"')
    kept, others = await add(system, "decode-a", pool="slow"), await add(system, "decode-0")
    await report(system, "decode-a", num_waiting=1_000_000)
    task = asyncio.create_task(ask(system, "", service_class="critical"))
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    # All that wait have been looked at again by the time that another one has been served.
    await finish(others, [asyncio.create_task(ask(system, ""))])
    assert (kept.took, len(others.took), system.gateway.requests.num_queued) == ([], 1, 1)
    await report(system, "decode-a", num_waiting=0)
    await finish(kept, [task])


async def test_a_strict_pool_without_a_worker_is_unavailable_and_is_named(make_pools, add):
    system = await make_pools('name = "slow"\nclasses = ["batch"]\nrule = "strict"')
    others = await add(system, "decode-0")
    refused = await system.complete(service_class="batch")
    assert (refused.status_code, "for the pool slow" in refused.text) == (503, True)
    await finish(others, [asyncio.create_task(ask(system, ""))])


async def test_long_prompts_prefer_their_pool_and_overflow_into_others(make_pools, add):
    system = await make_pools('name = "long"\nmin_prompt_tokens = 20')
    long, others = await add(system, "decode-a", pool="long", free=100), await add(system, "decode-0", free=100)

    def ask_long(number):
        return asyncio.create_task(system.complete(prompt=[number] * 20, max_tokens=4))

    tasks = [ask_long(1), asyncio.create_task(ask(system, "", 2))]
    await system.until(lambda: long.took == [1] and others.took == [2])
    await report(system, "decode-a", num_free=0)
    others.ends.release()
    assert await tasks[1] == 200
    tasks.append(ask_long(3))
    await system.until(lambda: others.took == [2, 3])
    for script in (long, others):
        script.ends.release()
    assert {(await task).status_code for task in (tasks[0], tasks[2])} == {200}


async def test_prompts_of_a_strict_pool_are_computed_in_it(make_pools, add, worker_type, pair_type):
    system = await make_pools('name = "slow"\nclasses = ["batch"]\nrule = "strict"', local_prefill_tokens=0)
    pair = pair_type([9, 1])
    for name, pool in (("a", "slow"), ("0", "")):
        await system.add(worker_type("prefill", f"prefill-{name}", pair.prefill, pool=pool))
        await system.add(worker_type("decode", f"decode-{name}", pair.decode, pool=pool))
    asked = [("batch", "a"), ("normal", "0")] * 3
    for service_class, _ in asked:
        body = {"prompt": [5, 6, 7], "service_class": service_class}
        assert (await system.http.post("/v1/completions", json=body)).status_code == 200
    for role in ("prefill", "decode"):
        assert [len(system.workers[f"{role}-{name}"].attempts) for name in ("a", "0")] == [3, 3]
    await report(system, "prefill-a", num_waiting=1_000_000)
    waiting = asyncio.create_task(ask(system, "", service_class="batch"))
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    assert await ask(system, "") == 200
    assert [len(system.workers[f"prefill-{name}"].attempts) for name in ("a", "0")] == [3, 4]
    await report(system, "prefill-a", num_waiting=0)
    assert await waiting == 200
    assert [len(system.workers[f"prefill-{name}"].attempts) for name in ("a", "0")] == [4, 4]
    shown = (await system.http.get("/cluster")).json()
    assert {worker["id"]: worker["pool"] for worker in shown["workers"]}["prefill-a"] == "slow"
    (pool,) = shown["pools"]
    assert pool == {"name": "slow", "classes": ["batch"], "min_prompt_tokens": 0, "rule": "strict"}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        topology = await stub.GetTopology(cluster_pb2.GetTopologyRequest(), timeout=HANG_LIMIT_S)
    assert {worker.id: worker.pool for worker in topology.workers}["prefill-a"] == "slow"
    assert list(topology.pools) == [cluster_pb2.Pool(name="slow", classes=["batch"], rule="strict")]
