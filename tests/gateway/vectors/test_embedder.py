"""The way of texts to their vectors: places at workers, failures, limits, and what is told of them."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest

from gateway.access.keys import digest_of_key, new_key
from protos import worker_pb2
from services.runtime.errors import Overloaded, WorkerUnavailable
from tests.gateway.vectors.conftest import Make
from tests.kept_spans import KeptSpans, events_of
from tests.waiting import HANG_LIMIT_S


async def post(system: Any, given: Any, **members: Any) -> Any:
    return await system.http.post("/v1/embeddings", json={"input": given, **members})


async def test_each_text_gets_its_vector_without_a_decode_worker(embeds: Any, make_embedding: Make) -> None:
    system = await make_embedding(embeds.give_vector)
    texts = [[5, 6], [7], [8, 9, 10]]
    answer = (await post(system, texts)).json()
    assert [one["embedding"] for one in answer["data"]] == [embeds.vector_of(text) for text in texts]
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    orders = {(a.request.pooling, a.request.dimensions, a.request.is_normalized) for a in attempts(system)}
    assert orders == {(worker_pb2.POOLING_LAST, 4, True)}


def attempts(system: Any) -> list[Any]:
    return [attempt for worker in system.workers.values() for attempt in worker.attempts]


async def test_many_texts_are_spread_over_workers_a_few_at_a_time(embeds: Any, make_embedding: Make) -> None:
    may_end = asyncio.Event()

    async def held(attempt: Any) -> None:
        await may_end.wait()
        await embeds.give_vector(attempt)

    system = await make_embedding(held, held)
    texts = [[5] * 100 for _ in range(100)]
    asked = asyncio.ensure_future(post(system, texts))
    await system.until(lambda: len(attempts(system)) == 64)
    # Nothing has ended: 64 texts of a call are on their way at most, and each worker is given some steps of work.
    assert [len(worker.attempts) for worker in system.workers.values()] == [32, 32]
    may_end.set()
    answer = (await asked).json()
    assert [one["embedding"] for one in answer["data"]] == [embeds.vector_of(text) for text in texts]
    assert system.gateway.embedder._ahead == {}
    members = system.gateway.topology.members()
    assert all(member.session.books.is_empty and not member.session.num_open_attempts for member in members)


async def test_a_worker_gets_no_more_than_keeps_it_busy(embeds: Any, make_embedding: Make) -> None:
    may_end = asyncio.Event()

    async def held(attempt: Any) -> None:
        await may_end.wait()
        await embeds.give_vector(attempt)

    system = await make_embedding(held)
    asked = [asyncio.ensure_future(post(system, [[5] * 409 for _ in range(30)]))]
    await system.until(lambda: len(attempts(system)) == 10)
    asked.append(asyncio.ensure_future(post(system, [9], service_class="interactive")))
    await system.until(lambda: len(system.gateway.embedder._queues["tiny"]) == 21)
    may_end.set()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
    # The more urgent text went before all that waited.
    assert len(attempts(system)[10].spec.prompt_token_ids) == 1


async def test_what_a_dead_worker_had_is_computed_by_another(embeds: Any, make_embedding: Make) -> None:
    async def die(attempt: Any) -> None:
        await attempt.worker.die()

    system = await make_embedding(die, embeds.give_vector)
    texts = [[5, 6], [7, 8], [9]]
    answer = await post(system, texts)
    assert [one["embedding"] for one in answer.json()["data"]] == [embeds.vector_of(text) for text in texts]
    assert system.workers["prefill-0"].attempts
    assert {attempt.key[1] for attempt in system.workers["prefill-1"].attempts} == {1, 2}


async def test_one_that_no_worker_can_compute_fails_after_so_many_attempts(make_embedding: Make) -> None:
    async def fail(attempt: Any) -> None:
        attempt.fail(WorkerUnavailable("broken"))

    system = await make_embedding(fail, fail, max_attempts=3)
    answer = await post(system, [5, 6])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert len(attempts(system)) == 3


@pytest.mark.parametrize("vector", [b"", b"1234", struct.pack("<4f", 1, 2, float("nan"), 4), b"12345678901234567"])
async def test_what_cannot_be_a_vector_is_not_passed_on(embeds: Any, make_embedding: Make, vector: bytes) -> None:
    async def lie(attempt: Any) -> None:
        attempt.emit(worker_pb2.Embedded(vector=vector))

    system = await make_embedding(lie, embeds.give_vector)
    for _ in range(2):  # Whichever worker is asked first.
        answer = (await post(system, [5, 6])).json()
        assert answer["data"][0]["embedding"] == embeds.vector_of([5, 6])


async def test_a_worker_without_room_is_asked_again(embeds: Any, make_embedding: Make) -> None:
    refusals = 3

    async def refuse(attempt: Any) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            attempt.refuse(Overloaded("full"))
        else:
            await embeds.give_vector(attempt)

    system = await make_embedding(refuse, max_attempts=1)
    assert (await post(system, [5, 6])).json()["data"][0]["embedding"] == embeds.vector_of([5, 6])


async def test_a_client_that_leaves_ends_its_texts(make_embedding: Make) -> None:
    async def never(attempt: Any) -> None:
        attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))

    system = await make_embedding(never)
    asked = asyncio.ensure_future(post(system, [[5], [6]]))
    await system.until(lambda: len(attempts(system)) == 2)
    asked.cancel()
    worker = system.workers["prefill-0"]
    await system.until(lambda: len(worker.cancelled) == 2)
    assert system.gateway.embedder._ahead == {}


async def test_a_deadline_ends_them(make_embedding: Make) -> None:
    async def never(attempt: Any) -> None:
        """Gives no vector."""

    system = await make_embedding(never)
    answer = await post(system, [5], request_timeout_ms=300)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await system.until(lambda: len(system.workers["prefill-0"].cancelled) == 1)


async def test_without_a_worker_they_are_refused_at_once(make_embedding: Make) -> None:
    system = await make_embedding()
    answer = await post(system, [5])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


@pytest.fixture
def make_sharing(make_system: Make, embedding_model: Path, worker_type: Any, tmp_path: Path) -> Make:
    """A gateway of two models that share workers, which have the first one."""

    async def make(script: Any, *, workers: dict[str, Any] | None = None, **settings: Any) -> Any:
        file = tmp_path / "models.toml"
        file.write_text(
            "".join(f'[[model]]\nname = "{name}"\npath = "{embedding_model}"\nshare = "all"\n' for name in ("a", "b"))
        )
        system = await make_system(models=file, model_files=tmp_path, **settings)
        await add_sharing(system, worker_type, "a", script, **(workers or {}))
        await system.until(lambda: system.gateway.topology.num_ready("decode", "a") == 1)
        return system

    return make


async def add_sharing(system: Any, worker_type: Any, model: str, script: Any, **facts: Any) -> None:
    facts |= {"on_embed": script, "model": model, "group": "all-0"}
    for role in ("prefill", "decode"):
        await system.add(worker_type(role, f"{role}-{model}", script, **facts))


async def change_model(system: Any, worker_type: Any, model: str, script: Any) -> None:
    """Does what workers do that are told to have another model."""
    for worker in list(system.workers.values()):
        await worker.stop()
    system.workers.clear()
    await add_sharing(system, worker_type, model, script)


async def test_texts_wake_a_model_that_sleeps_and_none_is_lost(
    embeds: Any, make_sharing: Make, worker_type: Any, tmp_path: Path
) -> None:
    system = await make_sharing(embeds.give_vector)
    told = tmp_path / "all-0.model"
    given = [[[5 + number, 6], [7 + number]] for number in range(20)]
    asked = [asyncio.ensure_future(post(system, texts, model="b")) for texts in given]
    await system.until(lambda: told.exists() and told.read_text() == "b")
    assert not any(one.done() for one in asked)
    assert (await post(system, [5], model="a", request_timeout_ms=20_000)).status_code == 200, "it is awake meanwhile"
    await change_model(system, worker_type, "b", embeds.give_vector)
    for answer, texts in zip(await asyncio.gather(*asked), given, strict=True):
        assert [one["embedding"] for one in answer.json()["data"]] == list(map(embeds.vector_of, texts))
        assert answer.headers["x-tandem-model"] == "b"
    assert system.gateway.requests.turns.state_of("b") == "awake"


async def test_a_model_that_falls_asleep_with_texts_is_woken_for_the_rest(
    embeds: Any, make_sharing: Make, worker_type: Any, tmp_path: Path
) -> None:
    async def first_only(attempt: Any) -> None:
        if len(attempt.worker.attempts) == 1:
            await embeds.give_vector(attempt)

    system = await make_sharing(first_only, model_turn_s=0.1)
    texts = [[5 + number] for number in range(8)]
    asked = asyncio.ensure_future(post(system, texts, model="a"))
    await system.until(lambda: len(attempts(system)) == 8)
    (tmp_path / "all-0.model").write_text("b")
    for worker in list(system.workers.values()):
        await worker.stop()
    await system.until(lambda: not list(system.gateway.topology.members()), timeout_s=HANG_LIMIT_S)
    assert (await post(system, [5], model="b")).status_code == 503, "nothing is known that could wake it"
    await change_model(system, worker_type, "b", embeds.give_vector)
    await system.until(lambda: (tmp_path / "all-0.model").read_text() == "a")
    assert not asked.done()
    await change_model(system, worker_type, "a", embeds.give_vector)
    assert [one["embedding"] for one in (await asked).json()["data"]] == list(map(embeds.vector_of, texts))


async def test_texts_do_not_wait_for_ever_for_a_model_nor_too_many_of_them(embeds: Any, make_sharing: Make) -> None:
    system = await make_sharing(embeds.give_vector, max_queue_wait_s=0.5, max_queued_requests=2)
    answers = await asyncio.gather(*(post(system, [5], model="b") for _ in range(4)))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    assert "not awake" in answers[0].json()["error"]["message"]
    late = await post(system, [5], model="b", request_timeout_ms=100)
    assert late.status_code == 504


@pytest.mark.parametrize(
    ("workers", "code"), [({"embeds": False}, "not_offered"), ({"max_sequence_tokens": 8}, "context_length_exceeded")]
)
async def test_what_workers_that_are_shared_cannot_compute_is_refused_at_once(
    embeds: Any, make_sharing: Make, workers: dict[str, Any], code: str
) -> None:
    system = await make_sharing(embeds.give_vector, workers=workers)
    answer = await post(system, [5] * 9, model="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_a_text_that_is_held_to_a_region_goes_nowhere_else(
    embeds: Any, make_embedding: Make, worker_type: Any
) -> None:
    system = await make_embedding(region="eu")
    elsewhere = await system.add(
        worker_type("prefill", "prefill-us", embeds.give_vector, region="us", on_embed=embeds.give_vector)
    )
    held = {"json": {"input": [5]}, "headers": {"x-tandem-residency": "eu"}}
    assert (await system.http.post("/v1/embeddings", **held)).status_code == 503
    here = await system.add(worker_type("prefill", "prefill-eu", embeds.give_vector, region="eu"))
    for _ in range(4):
        assert (await system.http.post("/v1/embeddings", **held)).status_code == 200
    assert (len(here.attempts), len(elsewhere.attempts)) == (4, 0)


async def test_engines_that_give_no_vectors_are_named(embeds: Any, make_embedding: Make, worker_type: Any) -> None:
    system = await make_embedding()
    await system.add(worker_type("prefill", "prefill-0", embeds.give_vector, embeds=False))
    answer = await post(system, [5])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_offered")
    assert attempts(system) == []


async def test_a_model_that_was_not_trained_for_it_is_refused_by_name(make_system: Make) -> None:
    system = await make_system()
    answer = (await post(system, "a")).json()["error"]
    assert (answer["code"], answer["param"]) == ("unsupported_endpoint", "model")
    assert "--embeddings" in answer["message"]


async def test_a_text_that_is_longer_than_workers_take_is_refused_by_name(
    embeds: Any, make_embedding: Make, worker_type: Any
) -> None:
    system = await make_embedding()
    await system.add(worker_type("prefill", "prefill-0", embeds.give_vector, max_sequence_tokens=8))
    answer = (await post(system, [[5], [5] * 9])).json()["error"]
    assert (answer["code"], answer["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"dimensions": 3}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"input": [[5]] * 2049}, "input"),
        ({"input": ""}, None),
        ({"input": [10**9]}, "input"),
        ({"input": [5] * 600}, "input"),
        ({"input": [[]]}, "input"),
    ],
)
async def test_limits_are_told_by_field(embeds: Any, make_embedding: Make, members: Any, param: str | None) -> None:
    system = await make_embedding(embeds.give_vector)
    answer = await system.http.post("/v1/embeddings", json={"input": "a", **members})
    if param is None:  # The tokenizer of this model begins every text with a token.
        assert answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_vectors_are_cut_to_what_the_checkpoint_allows(embeds: Any, make_embedding: Make) -> None:
    system = await make_embedding(embeds.give_vector)
    answer = (await post(system, [5, 6], dimensions=2)).json()
    assert answer["data"][0]["embedding"] == embeds.vector_of([5, 6])[:2]
    assert attempts(system)[0].request.is_normalized


async def test_a_call_has_one_line_and_counts_for_its_model(embeds: Any, make_embedding: Make, caplog: Any) -> None:
    system = await make_embedding(embeds.give_vector)
    caplog.set_level("INFO", logger="gateway.observability.request_log")
    answer = await post(system, [[5, 6], [7]])
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert line.request_id == answer.headers["x-request-id"]
    told = (line.outcome, line.prompt_tokens, line.cached_tokens, line.generated_tokens, line.answers, line.workers)
    assert told == ("finished", 3, 2, 0, 2, ["prefill-0"])
    text = (await system.http.get("/metrics")).text
    (counted,) = [line for line in text.splitlines() if line.startswith("tandem_prompt_tokens_total{")]
    assert counted.endswith(" 3.0")
    await system.until(lambda: not system.gateway.requests.num_queued)


async def test_a_call_is_in_the_history_under_the_name_that_its_client_gave(embeds: Any, make_embedding: Make) -> None:
    system = await make_embedding(embeds.give_vector)
    for name, given in (("mine", [5, 6]), ("wrong", [])):
        asked = {"json": {"input": given}, "headers": {"x-request-id": name}}
        assert (await system.http.post("/v1/embeddings", **asked)).headers["x-request-id"] == name
    for query in ("id=mine", "q=embeddings mine"):
        (row,) = (await system.http.get(f"/dashboard/requests?{query}")).json()["requests"]
        assert (row["request_id"], row["operation"], row["outcome"]) == ("mine", "embeddings", "finished")


async def test_a_call_is_a_trace_whatever_the_number_of_its_texts(
    embeds: Any, make_embedding: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = KeptSpans.install(monkeypatch)
    system = await make_embedding(embeds.give_vector)
    answer = await post(system, [[5, number] for number in range(40)], dimensions=2)
    await system.until(lambda: bool(spans.named("request")), timeout_s=HANG_LIMIT_S)
    request, queue, prefill = spans.one("request"), spans.one("queue"), spans.one("prefill")
    assert len(spans.spans) == 3
    assert request.name == "embeddings tiny"
    told = {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.embeddings.dimension.count": 2,
        "gen_ai.usage.input_tokens": 80,
        "gen_ai.response.id": answer.headers["x-request-id"],
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
    }
    assert told.items() <= dict(request.attributes).items()
    assert (prefill.attributes["tandem.texts"], prefill.attributes["tandem.worker"]) == (40, "prefill-0")
    assert queue.start_unix_ns == request.start_unix_ns
    assert queue.end_unix_ns == prefill.start_unix_ns
    assert prefill.end_unix_ns == request.end_unix_ns
    named = {attempt.spec.traceparent for attempt in attempts(system)}
    assert named == {"", f"00-{request.context.trace_id:032x}-{prefill.context.span_id:016x}-01"}
    assert sum(bool(attempt.spec.traceparent) for attempt in attempts(system)) == 32


async def test_a_failure_is_told_by_its_calls_trace_sampled_or_not(
    embeds: Any, make_embedding: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_once(attempt: Any) -> None:
        if attempt.key[1] == 1 and len(attempt.spec.prompt_token_ids) == 2:
            attempt.fail(WorkerUnavailable("broken"))
        else:
            await embeds.give_vector(attempt)

    spans = KeptSpans.install(monkeypatch, samples_all=False)
    system = await make_embedding(fail_once)
    assert (await post(system, [7])).status_code == 200
    assert spans.spans == []
    assert (await post(system, [5, 6])).status_code == 200
    await system.until(lambda: bool(spans.named("request")), timeout_s=HANG_LIMIT_S)
    ((name, said),) = events_of(spans.one("request"))
    assert (name, said["tandem.choice"], said["tandem.attempt"]) == ("retry", 0, 1)
    first, second = attempts(system)[-2:]
    assert (first.spec.traceparent[-2:], second.spec.traceparent[-2:]) == ("00", "01")


async def test_a_worker_is_told_what_was_heard_of_a_text_that_is_given_up(
    make_embedding: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeptSpans.install(monkeypatch)

    async def never(attempt: Any) -> None:
        attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))

    system = await make_embedding(never)
    told = []
    give_up = system.gateway.topology.prefill_session("prefill-0").cancel
    monkeypatch.setattr(
        type(system.gateway.topology.prefill_session("prefill-0")),
        "cancel",
        lambda self, key, heard=None: (told.append(heard), give_up(key, heard)),
    )
    assert (await post(system, [5], request_timeout_ms=500)).status_code == 504
    assert told == [(True, False)]


async def test_a_tenant_pays_for_the_tokens_of_its_texts(embeds: Any, make_embedding: Make, tmp_path: Path) -> None:
    secret, keys = new_key(), tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nsha256 = "{digest_of_key(secret)}"\ntenant = "acme"\n[tenant.acme]\ntokens_per_minute = 10\n'
    )
    system = await make_embedding(embeds.give_vector, api_keys=keys)
    headers = {"authorization": f"Bearer {secret}"}
    paid = await system.http.post("/v1/embeddings", json={"input": [[5, 6, 7], [8, 9]]}, headers=headers)
    assert (paid.status_code, paid.headers["x-ratelimit-limit-tokens"]) == (200, "10")
    refused = await system.http.post("/v1/embeddings", json={"input": [5] * 6}, headers=headers)
    assert (refused.status_code, len(attempts(system))) == (429, 2)
    assert (await system.http.post("/v1/embeddings", json={"input": [5]})).status_code == 401


async def test_a_gateway_that_leaves_answers_what_still_runs(make_embedding: Make) -> None:
    async def never(attempt: Any) -> None:
        """Gives no vector."""

    system = await make_embedding(never)
    asked = asyncio.ensure_future(post(system, [[5], [6]]))
    await system.until(lambda: len(attempts(system)) == 2)
    await system.gateway.stop()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the gateway is leaving")
