"""Pages over HTTP: models, probes, metrics and the cluster."""

from types import SimpleNamespace

import grpc
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.edge.pages import scrape_targets
from gateway.openapi.answers import RequestPlace
from protos import cluster_pb2, cluster_pb2_grpc
from services.cluster.placements import Placement, PlacementStore, State
from services.runtime.version import version
from tests.waiting import until

ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture
def answer(tokenizer):
    return tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids


async def test_models_health_readiness_metrics_cluster(make_system, pair_type, answer):
    system = await make_system()
    assert (await system.http.get("/health")).status_code == 200
    assert (await system.http.get("/ready")).status_code == 503
    await system.add_pair(pair_type([*answer, 1]))
    assert (await system.http.get("/ready")).status_code == 200
    model = (await system.http.get("/v1/models")).json()["data"][0]
    assert model["id"] == "tiny"
    assert (await system.http.get("/v1/models/tiny")).json() == model
    await system.complete(max_tokens=3)
    metrics = (await system.http.get("/metrics")).text
    assert 'tandem_generated_tokens_total{model="tiny"} 3.0' in metrics
    assert 'tandem_workers{role="decode",state="ready"} 1.0' in metrics
    assert (await system.http.head("/metrics")).status_code == 200
    assert (await system.http.get("/metrics/targets")).json() == [], "these workers serve no metrics"
    cluster = (await system.http.get("/cluster")).json()
    assert [worker["id"] for worker in cluster["workers"]] == ["decode-0", "prefill-0"]
    assert set(cluster["workers"][0]) == {
        *("id", "role", "pid", "host", "region", "address", "incarnation", "state", "model", "pool", "exact", "pages"),
        "transfer_address",
        *("running", "waiting", "arithmetic", "layout", "gpu", "version", "clock_ahead_s", "channels"),
        *("tensor_parallel", "pipeline_parallel", "identity", "left_out", "unreachable", "circuit", "counts", "pool"),
        *("page_tokens", "kv_bytes_per_token", "max_running", "waiting_tokens", "speed"),
    }
    assert cluster["workers"][0]["gpu"] is None
    assert cluster["workers"][0]["pages"] == {"total": 100, "free": 100, "cached": 0, "reserved": 0, "used": 0}
    assert cluster["workers"][0]["speed"] == {"prefill": None, "decode": None}
    assert cluster["requests"] == {"queued": 0, "running": 0}


async def test_a_request_is_found_wherever_it_is(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    said = (await system.complete(max_tokens=3)).json()
    found = await system.http.get(f"/cluster/requests/{said['id']}")
    assert found.status_code == 200
    told = found.json()
    assert (told["id"], told["state"], told["attempt"]) == (said["id"].removeprefix("cmpl-"), "finished", 1)
    assert (told["prefill_worker"], told["decode_worker"]) == ("prefill-0", "decode-0")
    assert msgspec.convert(told, RequestPlace).gateway == system.gateway.incarnation
    for prefix in ("", "chatcmpl-", "resp_", "msg_"):
        assert (await system.http.get(f"/cluster/requests/{prefix}{told['id']}")).json()["id"] == told["id"]
    for name in ("nobody", "x" * 5000):
        missing = await system.http.get(f"/cluster/requests/{name}")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "request_not_found"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        place = await stub.Locate(cluster_pb2.LocateRequest(request_id=said["id"]))
    assert (place.state, place.attempt, place.decode_worker) == ("finished", 1, "decode-0")


async def test_a_request_of_a_dead_gateway_is_interrupted_and_one_of_a_living_gateway_is_not(make_system):
    system = await make_system()
    placements = PlacementStore(system.gateway._store)
    for request_id, gateway in (("mine", system.gateway.incarnation), ("lost", "b" * 32)):
        await placements.move(Placement(request_id, 1, State.TRANSFERRING, gateway, "prefill-0", "decode-0", 1))

    async def place_of(request_id):
        return (await system.http.get(f"/cluster/requests/{request_id}")).json()

    async def is_interrupted():
        return (await place_of("lost"))["state"] == "interrupted"

    await until(is_interrupted)  # The gateway makes its presence known after its start.
    assert msgspec.convert(await place_of("lost"), RequestPlace).last_state == State.TRANSFERRING
    assert (await place_of("mine"))["state"] == "transferring"


PLAIN = "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS = f"application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,{PLAIN}"


async def test_a_scraper_gets_openmetrics_if_it_takes_it(make_system, pair_type, answer):
    system = await make_system()
    await system.add_pair(pair_type([*answer, 1]))
    await system.complete(max_tokens=3)
    page = await system.http.get("/metrics", headers={"accept": PROMETHEUS})
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    (tokens,) = families["tandem_generated_tokens"].samples
    assert (tokens.name, tokens.labels, tokens.value) == ("tandem_generated_tokens_total", {"model": "tiny"}, 3.0)
    for accept in (PLAIN, "*/*", ""):
        plain = await system.http.get("/metrics", headers={"accept": accept})
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "# TYPE tandem_generated_tokens_total counter" in plain.text
        assert "_created" not in plain.text


def test_targets_are_the_workers_that_serve_metrics():
    def member(worker_id, role, address):
        return SimpleNamespace(record=SimpleNamespace(id=worker_id, role=role, model="tiny", metrics_address=address))

    members = [member("d-0", "decode", "10.0.0.7:9100"), member("d-1", "decode", ""), member("p-0", "prefill", "h:1")]
    assert scrape_targets(members) == [
        {"targets": ["10.0.0.7:9100"], "labels": {"role": "decode", "model": "tiny"}},
        {"targets": ["h:1"], "labels": {"role": "prefill", "model": "tiny"}},
    ]


async def test_what_clients_ask_of_the_server_and_its_tokenizer(make_system):
    system = await make_system()
    assert (await system.http.get("/version")).json() == {"version": version()}
    told = (await system.http.get("/tokenizer_info")).json()
    assert "add_generation_prompt" in told["chat_template"]
    assert (told["bos_token"], told["eos_token"]) == ("<|bos|>", "<|end|>")
    assert (await system.http.get("/tokenizer_info?model=nope")).status_code == 404


async def test_models_are_listed_for_the_clients_of_two_apis(make_system):
    listed = (await (await make_system()).http.get("/v1/models")).json()
    assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
        "list",
        False,
        "tiny",
        "tiny",
    )
    (model,) = listed["data"]
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "tiny")
