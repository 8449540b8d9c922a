"""A worker whose GPU is in trouble gets nothing new with its next report, unless there is nothing better to use."""

import asyncio

import grpc
import pytest

from gateway.requests.dispatch import _slowed
from gateway.topology.watch import LEAST_WEIGHT, WorkerWatch
from protos import cluster_pb2, cluster_pb2_grpc
from services.runtime.clock import ManualClock
from services.runtime.gpu_facts import GpuFacts
from services.scheduling.gpu_judgement import GpuJudgement, GpuState
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from services.scheduling.routing.views import WorkerView
from worker.gpu import gpu_message

FINE = GpuFacts(temperature_c=50.0, slowdown_c=87.0, num_uncorrected=0)
HOT = GpuFacts(temperature_c=85.0, slowdown_c=87.0, num_uncorrected=0)
BROKEN = GpuFacts(temperature_c=50.0, slowdown_c=87.0, num_uncorrected=1)
LOST = GpuFacts(is_lost=True)


async def report(system, worker_id, facts, state):
    """The worker says what its GPU says; returns with the message in which the gateway hears it."""
    worker = system.workers[worker_id]
    worker.gpu = gpu_message(facts)
    worker.sessions.load_changed()
    (member,) = [member for member in system.gateway.topology.members() if member.record.id == worker_id]
    await system.until(lambda: member.gpu.state is state)


async def ask(system, num, **body):
    """Sends `num` requests, one after the other; returns how many each worker got."""
    before = {worker_id: len(worker.attempts) for worker_id, worker in system.workers.items()}
    for number in range(num):
        answer = await system.complete(prompt=[5 + number, 6, 7], max_tokens=4, **body)
        assert answer.status_code == 200
    return {worker_id: len(worker.attempts) - before[worker_id] for worker_id, worker in system.workers.items()}


@pytest.fixture
def make_cluster(make_system, pair_type):
    async def make(num, **settings):
        system = await make_system(**settings)
        await system.add_pair(pair_type([5, 6, 7, 8]), prefill=num, decode=num)
        return system

    return make


@pytest.mark.parametrize("facts", [BROKEN, LOST])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nothing_new_from_the_next_report_on_and_again_when_it_is_well(make_cluster, role, facts):
    system = await make_cluster(2, routing="round_robin")
    bad, good = f"{role}-0", f"{role}-1"
    got = await ask(system, 6)
    assert got[bad] > 0
    assert got[good] > 0
    await report(system, bad, facts, GpuState.OUT)
    got = await ask(system, 12)
    assert (got[bad], got[good]) == (0, 12)
    await report(system, bad, FINE, GpuState.OK)
    got = await ask(system, 6)
    assert got[bad] > 0
    assert got[good] > 0


async def test_the_last_worker_is_used_whatever_its_gpu_says(make_cluster):
    # A prediction that its weight makes worse must not refuse what was let in before.
    system = await make_cluster(1, itl_target_s=0.015, ttft_target_s=0.1)
    for worker_id in ("prefill-0", "decode-0"):
        await report(system, worker_id, LOST, GpuState.OUT)
    assert await ask(system, 3, service_class="normal") == {"prefill-0": 3, "decode-0": 3}


async def test_no_more_than_half_of_a_role_is_left_alone(make_cluster):
    system = await make_cluster(3, routing="round_robin")
    for worker_id in ("decode-0", "decode-1"):
        await report(system, worker_id, LOST, GpuState.OUT)
    got = await ask(system, 12)
    assert sorted(got[f"decode-{number}"] for number in range(3)) == [0, 6, 6]
    assert got["decode-2"] == 6
    await report(system, "decode-2", BROKEN, GpuState.OUT)
    got = await ask(system, 12)
    assert sorted(got[f"decode-{number}"] for number in range(3)) == [0, 6, 6]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_degraded_gpu_is_not_used_while_another_is_idle(make_cluster, role):
    system = await make_cluster(2)
    bad, good = f"{role}-1", f"{role}-0"
    got = await ask(system, 6)
    assert got[bad] > 0
    await report(system, bad, HOT, GpuState.DEGRADED)
    got = await ask(system, 12)
    assert (got[bad], got[good]) == (0, 12)
    await report(system, good, HOT, GpuState.DEGRADED)
    got = await ask(system, 6)
    assert got[bad] > 0
    assert got[good] > 0


async def test_what_runs_there_stays(make_system, pair_type):
    system, pair = await make_system(), pair_type(range(5, 205), step_s=0.005)
    await system.add_pair(pair, decode=2)
    answer = asyncio.create_task(system.complete(max_tokens=200))
    workers = system.workers["decode-0"], system.workers["decode-1"]
    await system.until(lambda: any(worker.attempts for worker in workers))
    (busy,) = [worker for worker in workers if worker.attempts]
    await report(system, busy.worker_id, LOST, GpuState.OUT)
    response = await answer
    assert response.json()["usage"]["completion_tokens"] == 200
    assert [len(worker.attempts) for worker in workers if worker is not busy] == [0]
    assert len(busy.attempts) == 1


async def test_another_process_of_the_worker_begins_without_its_past(make_cluster, worker_type, pair_type):
    system = await make_cluster(2, routing="round_robin")
    await report(system, "decode-0", LOST, GpuState.OUT)
    await system.workers.pop("decode-0").stop()
    await system.add(worker_type("decode", "decode-0", system.workers["decode-1"].script))
    got = await ask(system, 6)
    assert got["decode-0"] > 0
    assert system.gateway.requests._dispatcher.num_open_breakers == 0


async def test_what_operators_see(make_cluster, caplog):
    caplog.set_level("INFO", logger="gateway.topology.members")
    system = await make_cluster(2)

    def said():
        changes = [record for record in caplog.records if record.message == "the state of a worker's GPU has changed"]
        return [(record.levelname, record.worker, record.state, record.reasons) for record in changes]

    await report(system, "decode-0", FINE, GpuState.OK)
    await report(system, "decode-0", HOT, GpuState.DEGRADED)
    await report(system, "decode-0", GpuFacts(temperature_c=84.0, slowdown_c=87.0), GpuState.DEGRADED)
    await report(system, "decode-0", LOST, GpuState.OUT)
    out = {"state": "out", "weight": 0.0, "reasons": ["lost"]}
    workers = {worker["id"]: worker for worker in (await system.http.get("/cluster")).json()["workers"]}
    assert (workers["decode-0"]["gpu"], workers["decode-0"]["state"], workers["decode-1"]["gpu"]) == (
        out,
        "ready",
        None,
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        topology = await cluster_pb2_grpc.ClusterStub(channel).GetTopology(cluster_pb2.GetTopologyRequest())
    gpus = {worker.id: worker.gpu for worker in topology.workers if worker.HasField("gpu")}
    assert gpus == {"decode-0": cluster_pb2.GpuHealth(state=cluster_pb2.GPU_STATE_OUT, reasons=["lost"])}
    await system.until(lambda: system.gateway.metrics.circuit("decode-0") == "open")
    circuits = {worker["id"]: worker["circuit"] for worker in (await system.http.get("/cluster")).json()["workers"]}
    assert circuits["decode-1"] is None
    assert (circuits["decode-0"]["cause"], circuits["decode-0"]["words"]) == ("gpu", "its GPU: lost")
    lines = (await system.http.get("/metrics")).text.splitlines()
    shown = [line for line in lines if line.startswith("tandem_worker_gpu{")]
    assert sorted(shown) == [
        'tandem_worker_gpu{role="decode",state="degraded",worker="decode-0"} 0.0',
        'tandem_worker_gpu{role="decode",state="ok",worker="decode-0"} 0.0',
        'tandem_worker_gpu{role="decode",state="out",worker="decode-0"} 1.0',
    ]
    assert "tandem_open_breakers 1.0" in lines
    await report(system, "decode-0", FINE, GpuState.OK)
    assert said() == [
        ("WARNING", "decode-0", "degraded", ("hot",)),
        ("WARNING", "decode-0", "out", ("lost",)),
        ("INFO", "decode-0", "ok", ()),
    ]


def test_weights_are_against_the_best_of_the_group():
    watch = WorkerWatch(ManualClock())
    assert watch.gpu_weights(["a", "b"]) == {}
    watch.note_gpu("a", GpuJudgement(GpuState.DEGRADED, 0.5, ("hot",)))
    watch.note_gpu("b", GpuJudgement(GpuState.OUT, 0.0, ("lost",)))
    assert watch.gpu_weights(["a", "b", "c"]) == {"a": 0.5, "b": LEAST_WEIGHT}
    assert watch.gpu_weights(["a", "b"]) == {"b": LEAST_WEIGHT / 0.5}
    assert watch.gpu_weights(["b"]) == {}
    assert watch.gpu_weights([]) == {}


def test_a_worker_that_measured_that_it_is_throttled_is_not_slowed_twice():
    view = WorkerView(
        "a", "i", 1, 1, 0, 0, 1, prefill_speed=PrefillSpeed(0.3, 0.0), decode_speed=DecodeSpeed(0.01, 0.0)
    )
    slowed = _slowed(view, PrefillSpeed(0.1, 1e-5, 1e-9).times(2), DecodeSpeed(0.01, 1e-4, 1e-8).times(2))
    assert slowed.prefill_speed == PrefillSpeed(0.3, 0.0)
    assert slowed.decode_speed == DecodeSpeed(0.02, 2e-4, 2e-8)
    assert PrefillSpeed(0.1, 1e-5, 1e-9).times(2) == PrefillSpeed(0.2, 2e-5, 2e-9)
