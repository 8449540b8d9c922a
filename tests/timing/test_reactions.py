"""How soon a gateway, a worker or a client reacts."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.http.server import HttpServer
from protos import inference_pb2, inference_pb2_grpc
from services.runtime import otlp, rpc, telemetry
from services.runtime.errors import DeadlineExceeded, TransferFailed, WorkerUnavailable
from tests.gateway import test_faults as fault_tests
from tests.gateway import test_leaving_clients as leaving_tests
from tests.gateway import test_models as model_tests
from tests.gateway.access import test_door as door_tests
from tests.gateway.http.test_server import hello
from tests.kv_transfer import conftest as handoff_fixtures
from tests.kv_transfer import test_handoff as handoff_tests
from tests.services.runtime import conftest as rpc_fixtures
from tests.services.runtime import test_otlp as otlp_tests
from tests.services.runtime import test_rpc as rpc_tests
from tests.timing.limits import within, within_cpu
from tests.waiting import HANG_LIMIT_S
from tests.worker import test_gpu as gpu_tests

key_file, guarded = door_tests.key_file, door_tests.guarded
make_pair = handoff_fixtures.make_pair
folders, models_file, two_models = model_tests.folders, model_tests.models_file, model_tests.two_models
readings, servicer = gpu_tests.readings, rpc_fixtures.servicer


@pytest.fixture
def script() -> Any:
    return door_tests.Script([9, 10, 11, 12, 13, 1])


@pytest.mark.parametrize("api", leaving_tests.APIS)
@pytest.mark.parametrize("phase", leaving_tests.PHASES)
async def test_workers_cancel_when_the_client_leaves(make_system: Any, worker_type: Any, phase: str, api: str) -> None:
    system, workers = await make_system(), []
    prefill_script, decode_script = leaving_tests.PHASES[phase]
    if prefill_script is not None:
        workers.append(await system.add(worker_type("prefill", "prefill-0", prefill_script)))
    workers.append(await system.add(worker_type("decode", "decode-0", decode_script)))
    calls = leaving_tests.Calls(system, {})
    calling = asyncio.create_task(getattr(calls, api)())
    await system.until(lambda: all(len(worker.attempts) == calls.num_choices for worker in workers))
    calling.cancel()
    with within(1.5):
        for worker in workers:
            keys = {attempt.key for attempt in worker.attempts}
            await system.until(lambda worker=worker, keys=keys: set(worker.cancelled) == keys)
    await asyncio.gather(calling, return_exceptions=True)


async def test_a_request_without_a_decode_worker_fails_at_once(make_system: Any, worker_type: Any, pair: Any) -> None:
    system = await make_system()
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    with within(1.0):
        assert (await system.complete()).status_code == 503


async def test_a_deadline_ends_a_request(make_system: Any, worker_type: Any) -> None:
    system = await make_system(max_request_s=0.4)
    await system.add(worker_type("decode", "decode-0", fault_tests.never_answer))
    with within(3.0):
        assert (await system.complete()).status_code == 504


async def test_a_refusal_by_a_tenants_limit(guarded: Any) -> None:
    system = await guarded("[tenant.acme]\nrequests_per_minute = 1\n")
    await door_tests.post(system, "plain")
    with within(20 * 0.05):
        for _ in range(20):
            assert (await door_tests.post(system, "plain")).status_code == 429


async def test_a_server_without_connections_stops_at_once() -> None:
    server = HttpServer(hello)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{port}/")
    while server.connections.num_open:  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0.005)
    with within(0.08):
        await server.stop(1.0)


async def test_spans_that_no_collector_accepts_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        telemetry.setup("gateway", f"http://127.0.0.1:{silent.getsockname()[1]}")
        context = otlp_tests.root()
        with within_cpu(5):
            for _ in range(2 * otlp.MAX_QUEUED_SPANS):
                telemetry.export([otlp_tests.span("request", context)])
        with within(otlp.SHUTDOWN_TIMEOUT_S + 2):
            await asyncio.to_thread(telemetry.shutdown)


def test_a_worker_does_not_wait_for_a_gpu_reading_that_hangs(readings: Any) -> None:
    watch = gpu_tests.GpuWatch(readings.open, read_every_s=0.0)
    readings.one()
    assert readings.is_reading.wait(gpu_tests.LIMIT_S)
    with within(2.0):
        watch.release()
    readings.turns.release(100)


async def test_a_peer_that_acknowledges_no_ping_is_given_up(servicer: Any) -> None:
    async def quiet(request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse()
        await asyncio.sleep(HANG_LIMIT_S)

    servicer.stream = quiet
    profile = dataclasses.replace(rpc.INTERNAL, ping_timeout_ms=1500)  # 2.5 s until a peer is given up
    async with (
        rpc_tests.serving(servicer, profile) as (_, behind),
        rpc_tests.black_hole(behind) as (address, passes),
        rpc.make_channel(address, profile=profile) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(), wait_for_ready=True)
        await call.read()
        passes.clear()
        with within(4.5):
            with within(3.5):
                await rpc_tests.failure_of(call.read())
            await servicer.ended.wait()


async def test_a_fallback_does_not_extend_the_deadline(two_models: Any, worker_type: Any) -> None:
    system = await two_models(max_request_s=0.6, after_s=0.2)
    for name in ("large", "small"):
        await model_tests.add_decode(system, worker_type, name, model_tests.refuses)
    with within(5.0):
        assert (await model_tests.complete(system, allow_fallback=True)).status_code == 504


@pytest.mark.parametrize("phase", handoff_tests.PHASES)
async def test_the_end_of_a_receiver_fails_its_transfers(make_pair: Any, phase: str) -> None:
    pair = await make_pair("shm")
    _, sending = await handoff_tests._advance(pair, phase)
    closing = asyncio.create_task(pair.receiver.close())
    with within(2.0), pytest.raises((WorkerUnavailable, TransferFailed)):
        await sending
    for gate in pair.target.gates.values():
        gate.set()
    await closing


@pytest.mark.parametrize("phase", handoff_tests.PHASES)
async def test_the_deadline_of_a_transfer(make_pair: Any, phase: str) -> None:
    pair = await make_pair("shm")
    await (await pair.reserve(16)).abort(handoff_tests.CANCELLED)  # The Link is made, so only the transfer takes time.
    reserve = pair.reserve
    pair.reserve = lambda num_tokens: reserve(num_tokens, within_s=0.5)
    with within(3.0):
        _, sending = await handoff_tests._advance(pair, phase)
        with pytest.raises(DeadlineExceeded):
            await sending
    for gate in pair.target.gates.values():
        gate.set()
    await pair.wait_all_free()
