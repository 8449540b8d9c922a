"""Pages over HTTP: models, probes, metrics and the cluster."""

import pytest

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
    assert "tandem_generated_tokens_total 3.0" in metrics
    assert 'tandem_workers{role="decode",state="ready"} 1.0' in metrics
    assert (await system.http.head("/metrics")).status_code == 200
    cluster = (await system.http.get("/cluster")).json()
    assert [worker["id"] for worker in cluster["workers"]] == ["decode-0", "prefill-0"]
    assert set(cluster["workers"][0]) == {
        *("id", "role", "pid", "host", "address", "incarnation", "state", "model", "exact", "pages"),
        *("running", "waiting", "arithmetic", "layout", "gpu", "version", "clock_ahead_s", "channels"),
        *("tensor_parallel", "pipeline_parallel", "identity", "left_out", "unreachable", "circuit", "counts"),
    }
    assert cluster["workers"][0]["gpu"] is None
    assert cluster["workers"][0]["pages"] == {"total": 100, "free": 100, "cached": 0, "reserved": 0, "used": 0}
    assert cluster["requests"] == {"queued": 0, "running": 0}
