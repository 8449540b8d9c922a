"""Regions through a real gateway: what is held there goes nowhere else, and home comes first."""

import asyncio
import json
import struct

import grpc
import pytest

from gateway.access.keys import ApiKey, Tenant, digest_of_key, toml_entry, toml_tenant
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from tests.waiting import HANG_LIMIT_S

SECRETS = {tenant: f"tandem-{tenant}-0123456789" for tenant in ("free", "held", "both")}
RULES = {"held": ("eu",), "both": ("eu", "us")}
HELD = " in the region eu, to which the request's data is held"


def shows(tenant, *, residency=None):
    headers = {"authorization": f"Bearer {SECRETS[tenant]}"}
    return headers if residency is None else headers | {"x-tandem-residency": residency}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    entries = [toml_entry(ApiKey(digest_of_key(secret), tenant)) for tenant, secret in SECRETS.items()]
    entries += [toml_tenant(tenant, Tenant(residency=rule)) for tenant, rule in RULES.items()]
    path.write_text("\n".join(entries))
    return path


@pytest.fixture
def make(make_system, key_file):
    """Makes a gateway of a region that asks for keys."""

    async def make(region="eu", **settings):
        return await make_system(api_keys=key_file, region=region, failover_wait_s=0.5, **settings)

    return make


class Gated:
    """A decode worker that computes prompts itself: one token, and the rest when it is let."""

    def __init__(self, worker_type, region):
        self.gate = asyncio.Event()
        self.gate.set()
        self.prompts = []
        self.worker = worker_type("decode", f"decode-{region}", self.decode, region=region)

    async def decode(self, attempt):
        self.prompts.append(list(attempt.spec.prompt_token_ids))
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        for index in range(len(attempt.spec.emitted_token_ids), 3):
            if index:
                await self.gate.wait()
            attempt.tokens(index, [9 + index])
        attempt.finish(inference_pb2.FINISH_REASON_LENGTH)


async def two_regions(system, worker_type):
    eu, us = (Gated(worker_type, region) for region in ("eu", "us"))
    for one in (eu, us):
        await system.add(one.worker)
    return eu, us


async def ask(system, tenant, *, residency=None, **body):
    asked = {"prompt": [5, 6, 7], "max_tokens": 3, **body}
    return await system.http.post("/v1/completions", json=asked, headers=shows(tenant, residency=residency))


def ours(script, tenant_prompt):
    """How many requests with this prompt a worker has got; the gateway's own trials have another one."""
    return script.prompts.count(tenant_prompt)


def ours_at(system, worker_id):
    """What a scripted worker was asked, without the gateway's own trials."""
    specs = [attempt.spec for attempt in system.workers[worker_id].attempts]
    return [spec for spec in specs if list(spec.prompt_token_ids) == [5, 6, 7]]


async def test_a_tenant_is_served_in_its_region_only_and_refused_when_that_is_lost(make, worker_type):
    system = await make(routing="round_robin", ttft_target_s=0.0)
    eu, us = await two_regions(system, worker_type)
    for _ in range(6):
        assert (await ask(system, "held")).status_code == 200
        assert (await ask(system, "both", residency="eu")).status_code == 200
    assert (ours(eu, [5, 6, 7]), ours(us, [5, 6, 7])) == (12, 0)
    for _ in range(4):
        assert (await ask(system, "free", prompt=[8])).status_code == 200
    assert ours(us, [8]) > 0, "routing takes turns"
    await system.workers["decode-eu"].stop()
    await system.until(lambda: system.gateway.topology.num_ready("decode") == 1)
    for tenant, residency in (("held", None), ("both", "eu"), ("free", "eu")):
        refused = await ask(system, tenant, residency=residency)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == f"no decode worker is ready{HELD}"
        assert int(refused.headers["retry-after"]) >= 1
    for tenant in ("free", "both"):
        assert (await ask(system, tenant)).status_code == 200
    assert ours(us, [5, 6, 7]) == 2
    back = Gated(worker_type, "eu")
    await system.add(back.worker)
    assert (await ask(system, "held")).status_code == 200
    assert ours(back, [5, 6, 7]) == 1


async def test_an_answer_that_is_held_is_not_continued_elsewhere(make, worker_type):
    system = await make(max_attempts=5, ttft_target_s=60.0)
    eu, us = await two_regions(system, worker_type)
    eu.gate.clear()
    asked = {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True}
    tasks = [
        asyncio.create_task(system.http.post("/v1/completions", json=asked, headers=shows(tenant)))
        for tenant in ("held", "free")
    ]
    await system.until(lambda: ours(eu, [5, 6, 7]) == 2)
    await system.workers["decode-eu"].stop()
    held, free = await asyncio.gather(*tasks)
    assert (
        f"no worker came in time that has the weights and the arithmetic of the answer's beginning{HELD}" in held.text
    )
    assert "[DONE]" in free.text
    assert "error" not in free.text
    assert ours(us, [5, 6, 7]) == 1


async def test_prompts_and_prefixes_stay_in_the_region(make, worker_type, pair_type):
    system, pair = await make(routing="round_robin", ttft_target_s=0.0), pair_type([9, 1])
    for region in ("eu", "us"):
        for role, script in (("prefill", pair.prefill), ("decode", pair.decode)):
            await system.add(worker_type(role, f"{role}-{region}", script, region=region))
    for _ in range(4):
        assert (await ask(system, "held")).status_code == 200
    assert [len(ours_at(system, f"{role}-eu")) for role in ("prefill", "decode")] == [4, 4]
    assert [ours_at(system, f"{role}-us") for role in ("prefill", "decode")] == [[], []]
    assert (await ask(system, "free")).status_code == 200
    assert (await ask(system, "free", residency="eu")).status_code == 200
    salts = {spec.cache_salt for worker_id in system.workers for spec in ours_at(system, worker_id)}
    assert len(salts) == 3, "of one tenant, pages that are held have names of their own"


@pytest.mark.parametrize(("region", "where"), [("us", "in the region us"), ("", "in no region (--region)")])
async def test_a_gateway_elsewhere_refuses_and_names_the_rule_and_both_regions(make, worker_type, region, where):
    system = await make(region)
    await two_regions(system, worker_type)
    for tenant, residency, held in (
        ("held", None, "residency of tenant held"),
        ("held", "eu", "residency of tenant held"),
        ("free", "eu", "X-Tandem-Residency"),
    ):
        refused = await ask(system, tenant, residency=residency)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert error["code"] == "wrong_region"
        assert error["message"] == f"the request's data is held to the region eu ({held}), and this gateway is {where}"
    assert system.gateway.metrics._refusals.labels("wrong_region")._value.get() == 3
    for path in ("/v1/files", "/v1/batches", "/v1/models"):
        assert (await system.http.get(path, headers=shows("held"))).status_code == 403
    assert (await ask(system, "free")).status_code == 200


async def test_a_request_narrows_its_tenants_rule_and_does_not_widen_it(make, worker_type):
    system = await make()
    await two_regions(system, worker_type)
    assert (await ask(system, "both", residency="eu, us")).status_code == 200
    for tenant, residency in (("held", "eu,us"), ("held", "us"), ("both", "ap,eu")):
        refused = await ask(system, tenant, residency=residency)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "residency_too_wide"
        assert refused.json()["error"]["param"] == "X-Tandem-Residency"
        assert f"the data of tenant {tenant} is held to the region" in refused.json()["error"]["message"]


async def test_the_same_holds_over_grpc(make, worker_type):
    system = await make()
    eu, us = await two_regions(system, worker_type)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def generate(**metadata):
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
            pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
            pairs.append(("authorization", shows("free")["authorization"]))
            return [part async for part in stub.Generate(request, metadata=pairs)]

        for _ in range(3):
            assert await generate(x_tandem_residency="eu")
        assert (ours(eu, [5, 6, 7]), ours(us, [5, 6, 7])) == (3, 0)
        with pytest.raises(grpc.aio.AioRpcError, match="held to the region us") as caught:
            await generate(x_tandem_residency="us")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_tenant_elsewhere_is_refused_over_grpc_before_its_message_is_read(make, worker_type):
    system = await make("us")
    _, us = await two_regions(system, worker_type)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        pairs = [("authorization", shows("held")["authorization"])]
        words = r"held to the region eu \(residency of tenant held\), and this gateway is in the region us"
        for call in (
            stub.Tokenize(inference_pb2.TokenizeRequest(text="hi"), metadata=pairs),
            stub.Resume(inference_pb2.ResumeRequest(request_id="x"), metadata=pairs).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert us.prompts == []


async def test_a_named_answer_is_not_taken_over_by_a_gateway_elsewhere(make, worker_type):
    system, other = await make(), await make("us")
    eu, us = await two_regions(system, worker_type)
    await other.until(lambda: other.gateway.topology.num_ready("decode") == 2)
    headers = shows("free", residency="eu") | {"x-request-id": "r-1", "idempotency-key": "k-1"}
    asked = {"prompt": [5, 6, 7], "max_tokens": 3}
    assert (await system.http.post("/v1/completions", json=asked, headers=headers)).status_code == 200
    await system.flush_journals()
    del headers["x-tandem-residency"]
    taken_over = await other.http.post("/v1/completions", json=asked, headers=headers)
    assert (taken_over.status_code, taken_over.json()["error"]["code"]) == (403, "wrong_region")
    assert (ours(eu, [5, 6, 7]), ours(us, [5, 6, 7])) == (1, 0)


async def test_home_comes_first_while_it_keeps_the_target(make, worker_type):
    system = await make(ttft_target_s=20.0, itl_target_s=0.0, region_distance={("eu", "us"): 0.01, ("us", "eu"): 0.01})
    eu, us = await two_regions(system, worker_type)
    eu.worker.load.running = 20  # by prices alone, us would be cheaper
    eu.worker.sessions.load_changed()
    await system.until(lambda: system.gateway.topology.member("decode-eu").load.running == 20)
    for _ in range(4):
        assert (await ask(system, "free")).status_code == 200
    assert (ours(eu, [5, 6, 7]), ours(us, [5, 6, 7])) == (4, 0)
    eu.worker.load.waiting_tokens = 10_000_000
    eu.worker.sessions.load_changed()
    await system.until(lambda: system.gateway.topology.member("decode-eu").load.waiting_tokens > 0)
    assert (await ask(system, "free")).status_code == 200
    assert ours(us, [5, 6, 7]) == 1


async def batch_of(system, *, residency, num_rows=3):
    """Makes a batch of the tenant that is free, held to a region by its header."""
    body = {"prompt": [5, 6, 7], "max_tokens": 3}
    rows = [
        {"custom_id": f"row-{row}", "method": "POST", "url": "/v1/completions", "body": body} for row in range(num_rows)
    ]
    content = b"\n".join(json.dumps(row).encode() for row in rows)
    files = {"purpose": (None, b"batch"), "file": ("rows.jsonl", content)}
    sent = await system.http.post("/v1/files", files=files, headers=shows("free"))
    asked = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return await system.http.post("/v1/batches", json=asked, headers=shows("free", residency=residency))


async def test_a_batch_that_is_held_is_worked_on_by_a_gateway_of_its_region_only(make, worker_type):
    system, other = await make(batch_rows=0, ttft_target_s=0.0, routing="round_robin"), await make("us", batch_rows=0)
    eu, us = await two_regions(system, worker_type)
    assert (await batch_of(system, residency="us")).json()["error"]["code"] == "wrong_region"
    made = await batch_of(system, residency="eu")
    assert made.status_code == 200, made.text
    elsewhere = other.gateway.batches
    assert await elsewhere._claim(busy_tenants=[], full_tenants=[]) is None
    here = await make(ttft_target_s=0.0, routing="round_robin")
    await here.until(lambda: here.gateway.topology.num_ready("decode") == 2)
    status = ""
    async with asyncio.timeout(HANG_LIMIT_S):
        while status != "completed":
            shown = await here.http.get(f"/v1/batches/{made.json()['id']}", headers=shows("free"))
            status = shown.json()["status"]
            await asyncio.sleep(0.05)
    assert shown.json()["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert (ours(eu, [5, 6, 7]), ours(us, [5, 6, 7])) == (3, 0)


async def test_a_response_in_the_background_is_generated_by_a_gateway_of_its_region_only(make, worker_type):
    settings = {"ttft_target_s": 0.0, "routing": "round_robin"}
    system = await make(background_responses=0, **settings)
    other = await make("us", background_responses=0)
    eu, us = await two_regions(system, worker_type)
    asked = {"model": "tiny", "input": "hi", "background": True, "max_output_tokens": 3}
    for _ in range(3):
        made = await system.http.post("/v1/responses", json=asked, headers=shows("free", residency="eu"))
        assert made.status_code == 200, made.text
    assert await other.gateway.stored.background._claim(busy_tenants=[], full_tenants=[]) is None
    here = await make(**settings)
    await here.until(lambda: here.gateway.topology.num_ready("decode") == 2)
    await here.until(lambda: len(long_prompts(eu)) == 3)
    assert long_prompts(us) == []


async def test_texts_are_embedded_in_the_region_only(make, worker_type):
    system = await make(embeddings="on")

    async def embed(attempt):
        attempt.emit(worker_pb2.Embedded(vector=struct.pack("<4f", 1, 0, 0, 0)))

    for region in ("us", "eu"):
        await system.add(worker_type("prefill", f"prefill-{region}", embed, on_embed=embed, region=region))

    async def ask_vector(tenant, residency=None):
        asked = {"model": "tiny", "input": "hello"}
        return await system.http.post("/v1/embeddings", json=asked, headers=shows(tenant, residency=residency))

    for tenant, residency in (("held", None), ("free", "eu"), ("free", None)):
        answer = await ask_vector(tenant, residency)
        assert answer.status_code == 200, answer.text
    at_eu, at_us = (system.workers[f"prefill-{region}"].attempts for region in ("eu", "us"))
    assert (len(at_eu), len(at_us)) == (3, 0), "home is nearer"
    assert len({attempt.spec.cache_salt for attempt in at_eu}) == 3
    await system.workers["prefill-eu"].stop()
    await system.until(lambda: system.gateway.topology.num_ready("prefill") == 1)
    assert (await ask_vector("free")).status_code == 200
    refused = await ask_vector("held")
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, f"no prefill worker is ready{HELD}")


def long_prompts(script):
    """What a worker was asked that begins with a token of a text: trials have zeros."""
    return [prompt for prompt in script.prompts if any(prompt)]


async def test_where_a_request_is_and_which_regions_workers_have_is_told(make_system, worker_type):
    system = await make_system(region="eu")
    eu, _ = await two_regions(system, worker_type)
    eu.gate.clear()
    headers = {"x-request-id": "r-2"}
    asked = asyncio.create_task(
        system.http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3}, headers=headers)
    )
    found = {}
    async with asyncio.timeout(HANG_LIMIT_S):
        while found.get("decode_worker") != "decode-eu":
            answer = await system.http.get("/cluster/requests/r-2")
            found = answer.json() if answer.status_code == 200 else {}
            await asyncio.sleep(0.02)
    assert found["regions"] == {"prefill": "", "decode": "eu"}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        place = await stub.Locate(cluster_pb2.LocateRequest(request_id="r-2"), timeout=HANG_LIMIT_S)
        topology = await stub.GetTopology(cluster_pb2.GetTopologyRequest(), timeout=HANG_LIMIT_S)
    assert (place.prefill_region, place.decode_region) == ("", "eu")
    assert {worker.id: worker.region for worker in topology.workers} == {"decode-eu": "eu", "decode-us": "us"}
    eu.gate.set()
    assert (await asked).status_code == 200
    workers = (await system.http.get("/cluster")).json()["workers"]
    assert {worker["id"]: worker["region"] for worker in workers} == {"decode-eu": "eu", "decode-us": "us"}
