"""When a client needs its answer, and where it wants its prompt computed: what is said, and what comes of it."""

import asyncio
import logging
import math
from types import SimpleNamespace

import grpc
import pytest

from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from gateway.requests.placing import due_s
from gateway.wishes import MAX_MS, NO_WISHES, Wishes, read_wishes
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import InvalidRequest
from services.scheduling.entry import UNSAID_S
from services.scheduling.overload import Targets
from tests.waiting import HANG_LIMIT_S

MODES = {name: getattr(cluster_pb2, f"PREFILL_CHOICE_{name.upper()}") for name in ("auto", "local", "remote")}


@pytest.mark.parametrize(
    ("said", "wishes"),
    [
        ({}, NO_WISHES),
        ({"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"}, Wishes(None, Targets(0.25, 0.0125))),
        ({"x-tandem-prefill": "remote"}, Wishes(prefill="remote")),
        ({"x-tandem-residency": " us , eu,us "}, Wishes(residency=("eu", "us"))),
        ({"x-stainless-timeout": "30"}, Wishes(30.0)),
        ({"x-stainless-read-timeout": "2.5", "x-stainless-timeout": "30"}, Wishes(2.5)),
        ({"x-stainless-read-timeout": "NOT_GIVEN"}, NO_WISHES),  # nobody has asked for it: it is no mistake of theirs
        ({"x-stainless-timeout": "-1"}, NO_WISHES),
    ],
)
def test_what_is_said(said, wishes):
    assert read_wishes(said.get) == wishes


@pytest.mark.parametrize("name", ["X-Slo-Ttft-Ms", "X-Slo-Tpot-Ms", "X-Tandem-Prefill"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "1e3", " 5", str(MAX_MS + 1), "٣"])
def test_what_breaks_a_rule_is_named(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} must be") as caught:
        read_wishes({name.lower(): value}.get)
    assert caught.value.field == name


@pytest.mark.parametrize("value", ["", ",", "eu,", "eu us", "eu;us", "é", "x" * 65, ",".join(map(str, range(17)))])
def test_a_region_that_can_be_none_is_named(value):
    with pytest.raises(InvalidRequest, match="X-Tandem-Residency must be 1 to 16 names of regions"):
        read_wishes({"x-tandem-residency": value}.get)


def turn(wishes=NO_WISHES, *, deadline_s=600.0, is_own=False, service_s=2.0):
    spec = SimpleNamespace(
        wishes=wishes, arrived_s=100.0, deadline=SimpleNamespace(at_s=100 + deadline_s), has_own_deadline=is_own
    )
    return due_s(spec, service_s=service_s, prompt_s=0.5) - 100.0


def test_when_a_turn_is_due():
    assert turn() == math.inf, "the server's deadline says nothing of a client's haste"
    assert turn(deadline_s=30.0, is_own=True) == 28.0
    assert turn(Wishes(targets=Targets(3.0))) == 2.5
    assert turn(Wishes(targets=Targets(3.0)), deadline_s=4.0, is_own=True) == 2.0
    assert turn(Wishes(3.0)) == 1.0
    assert turn(Wishes(600.0)) == math.inf, "a library's default makes nobody wait longer than those that send none"
    assert turn(Wishes(UNSAID_S + 3.0), service_s=2.0) == math.inf
    assert turn(Wishes(3.0), deadline_s=30.0, is_own=True) == 28.0, "what the client said itself wins"


class Gated:
    """A decode worker's script: one request at a time, ended when it is let."""

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
async def full(make_system, worker_type):
    """Makes a gateway whose only place is taken."""
    tasks = []

    async def make(**settings):
        system, script = await make_system(**settings), Gated()
        worker = worker_type("decode", "decode-0", script.decode)
        worker.load.pages.free = 0
        await system.add(worker)
        tasks.append(asyncio.create_task(ask(system, 5)))
        await system.until(lambda: script.took == [5])
        return system, script

    yield make
    for task in tasks:
        task.cancel()


async def ask(system, number, headers=None, **body):
    """Sends a request; `number` is how the worker tells it from others."""
    body = {"prompt": [number], "max_tokens": 4, **body}
    return await system.http.post("/v1/completions", json=body, headers=headers or {})


async def test_who_waits_beyond_its_own_time_is_told_so(full):
    system, script = await full()
    for headers, body in (({"x-request-timeout-ms": "300"}, {}), ({}, {"request_timeout_ms": 300})):
        answer = await asyncio.wait_for(ask(system, 6, headers, **body), HANG_LIMIT_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    both = await ask(system, 6, {"x-request-timeout-ms": "300"}, request_timeout_ms=400)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "request_timeout_ms")
    for value in ("0", "-1", "soon", str(MAX_MS + 1)):
        error = await ask(system, 6, {"x-request-timeout-ms": value})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "X-Request-Timeout-Ms")
        assert "milliseconds" in error.json()["error"]["message"]
    for value in (0, True, 1.5, MAX_MS + 1):
        error = await ask(system, 6, request_timeout_ms=value)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "request_timeout_ms")
    assert script.took == [5]


async def test_a_time_that_an_idle_cluster_cannot_keep_is_no_overload(make_system, pair_type):
    """A retry would be in vain, so clients are not asked to come again."""
    system = await make_system()
    await system.add_pair(pair_type([5, 6]))
    refused = await ask(system, 6, {"x-request-timeout-ms": "1"}, max_tokens=400)
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "the deadline cannot be met" in refused.json()["error"]["message"]
    assert "retry-after" not in refused.headers


async def test_least_slack_goes_first_over_http_and_who_said_nothing_by_arrival(full):
    system, script = await full(queue_strategy="sla", max_request_s=500.0)
    asked = [
        (6, {"x-request-timeout-ms": "90000"}, {}),
        (7, {}, {"ignore_eos": True, "max_tokens": 4}),
        (8, {}, {"ignore_eos": True, "max_tokens": 100}),  # the longest: it would go first by the server's deadline
        (9, {}, {"request_timeout_ms": 30_000}),
        (10, {"x-slo-ttft-ms": "3000"}, {}),
        (11, {"x-stainless-read-timeout": "600"}, {}),
        (12, {"x-stainless-timeout": "2"}, {}),
    ]
    tasks = []
    for number, headers, body in asked:
        tasks.append(asyncio.create_task(ask(system, number, headers, **body)))
        await system.until(lambda: system.gateway.requests.num_queued == len(tasks))
    for _ in range(len(asked) + 1):
        script.ends.release()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * len(asked)
    assert script.took == [5, 12, 10, 7, 8, 11, 9, 6]


async def test_each_request_may_say_who_computes_its_prompt(make_system, pair_type):
    system, pair = await make_system(local_prefill_tokens=0), pair_type([9, 1])
    await system.add_pair(pair)

    async def is_local(choice=None):
        headers = {} if choice is None else {"x-tandem-prefill": choice}
        assert (await ask(system, 5, headers)).status_code == 200
        return system.workers["decode-0"].attempts[-1].request.local_prefill

    assert not await is_local()
    assert not await is_local("auto")
    assert not await is_local("remote")
    assert await is_local("local")
    refused = await ask(system, 5, {"x-tandem-prefill": "here"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Tandem-Prefill")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5]))
        request.sampling.max_tokens = 4
        await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(
            request, metadata=(("x-tandem-prefill", "local"),), timeout=HANG_LIMIT_S
        )
    assert system.workers["decode-0"].attempts[-1].request.local_prefill


async def test_an_operator_chooses_for_all_others_while_it_runs(make_system, pair_type, caplog):
    system, pair = await make_system(local_prefill_tokens=0), pair_type([9, 1])
    await system.add_pair(pair)

    async def is_local(headers=None):
        assert (await ask(system, 5, headers)).status_code == 200
        return system.workers["decode-0"].attempts[-1].request.local_prefill

    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        cluster = cluster_pb2_grpc.ClusterStub(channel)

        async def choose(name):
            return (
                await cluster.SetPrefill(cluster_pb2.SetPrefillRequest(choice=MODES[name]), timeout=HANG_LIMIT_S)
            ).before

        with caplog.at_level(logging.INFO, logger="gateway.edge.grpc_cluster"):
            assert await choose("local") == MODES["auto"]
        record = next(one for one in caplog.records if "an operator chose" in one.message)
        assert (record.before, record.now) == ("auto", "local")
        assert await is_local()
        assert not await is_local({"x-tandem-prefill": "remote"})
        assert not await is_local({"x-tandem-prefill": "auto"}), "as the flag has it"
        assert (await system.http.get("/cluster")).json()["prefill"] == "local"
        assert (await cluster.GetTopology(cluster_pb2.GetTopologyRequest(), timeout=HANG_LIMIT_S)).prefill == MODES[
            "local"
        ]
        assert await choose("auto") == MODES["local"]
        assert not await is_local()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.SetPrefill(cluster_pb2.SetPrefillRequest(), timeout=HANG_LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_without_a_prefill_worker_the_decode_worker_computes_it_whatever_is_said(make_system, worker_type):
    system, script = await make_system(), Gated()
    script.ends.release()
    await system.add(worker_type("decode", "decode-0", script.decode))
    assert (await ask(system, 5, {"x-tandem-prefill": "remote"})).status_code == 200
    assert system.workers["decode-0"].attempts[-1].request.local_prefill


async def test_only_keys_that_may_choose_do(make_system, pair_type, tmp_path):
    keys = {
        "plain": ApiKey("", "acme"),
        "chooser": ApiKey("", "acme", choose_prefill=True),
        "admin": ApiKey("", "ops", is_admin=True),
    }
    path = tmp_path / "keys.toml"
    path.write_text(
        "\n".join(
            toml_entry(
                ApiKey(
                    digest_of_key(f"key-of-{name}"),
                    key.tenant,
                    choose_prefill=key.choose_prefill,
                    is_admin=key.is_admin,
                )
            )
            for name, key in keys.items()
        )
    )
    system, pair = await make_system(api_keys=path), pair_type([9, 1])
    await system.add_pair(pair)

    def shows(name):
        return {"authorization": f"Bearer key-of-{name}"}

    for name, status in (("plain", 403), ("chooser", 200), ("admin", 200)):
        for choice in MODES:
            answer = await ask(system, 5, {**shows(name), "x-tandem-prefill": choice})
            assert answer.status_code == status, (name, choice)
            if status == 403:
                assert answer.json()["error"]["param"] == "X-Tandem-Prefill"
                assert "choose_prefill" in answer.json()["error"]["message"]
    assert (await ask(system, 5, shows("plain"))).status_code == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        cluster = cluster_pb2_grpc.ClusterStub(channel)
        request = cluster_pb2.SetPrefillRequest(choice=MODES["local"])
        for name, code in (
            ("plain", grpc.StatusCode.PERMISSION_DENIED),
            ("chooser", grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.SetPrefill(request, metadata=tuple(shows(name).items()), timeout=HANG_LIMIT_S)
            assert caught.value.code() == code
        await cluster.SetPrefill(request, metadata=tuple(shows("admin").items()), timeout=HANG_LIMIT_S)
