"""Batches as OpenAI's own client sees them, and what becomes of one whatever happens to its gateway."""

import asyncio
import base64
import json
import os
import signal
import struct
from collections import Counter
from types import SimpleNamespace

import openai
import pytest
import redis

import gateway.batches.batches_api
import gateway.batches.runner
from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from gateway.batches.rows import ENDPOINTS, MAX_CUSTOM_ID_CHARS
from protos import worker_pb2
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.files import Room
from services.cluster.keys import Keys
from services.runtime.errors import StoreRefused, StoreUnavailable
from tests.gateway.batches.clients import (
    BATCH_CLASS,
    OVER,
    answered_once,
    asked,
    client_of,
    counts,
    created,
    jsonl,
    lines,
    row,
    until_completed,
    until_status,
)
from tests.waiting import HANG_LIMIT_S


async def test_every_row_is_answered_as_its_request_would_be(make, script):
    system = await make(batch_rows=4)
    rows = [row(number) for number in range(20)]
    rows[7]["body"]["temperature"] = 3
    async with client_of(system) as client:
        batch = await created(client, rows, metadata={"of": "a test"})
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"of": "a test"})
        assert batch.expires_at == batch.created_at + 86_400
        batch = await until_status(client, batch, *OVER)
        assert batch.status == "completed"
        assert counts(batch) == (20, 19, 1)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        results = await lines(client, batch.output_file_id)
        (refused,) = await lines(client, batch.error_file_id)
        alone = await client.completions.create(**row(1)["body"])
        output = await client.files.retrieve(batch.output_file_id)
    assert {line["custom_id"] for line in results} == {f"row-{number}" for number in range(20)} - {"row-7"}
    one = next(line for line in results if line["custom_id"] == "row-1")
    assert set(one) == {"id", "custom_id", "response", "error"}
    assert one["id"].startswith("batch_req_")
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    assert one["response"]["body"]["id"] == f"cmpl-{one['response']['request_id']}"
    assert one["response"]["body"]["choices"] == [choice.to_dict() for choice in alone.choices]
    assert one["response"]["body"]["usage"] == alone.usage.to_dict()
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert len({line["id"] for line in [*results, refused]}) == 20
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    # The rows ran in their class, and no more at once than they may.
    attempts = system.workers["decode-0"].attempts
    assert [attempt.spec.service_class for attempt in attempts[:-1]] == [BATCH_CLASS] * 19
    assert 1 < script.most_at_once <= 4
    assert asked(system) == {"completed": 19, "failed": 1}


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
}


def texts_row(number, given, **body):
    body = {"model": "tiny", "input": given, **body}
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}


@pytest.fixture
def make_embedding(make, worker_type):
    """Makes a gateway of a model that embeds, with one worker that does what the script says."""

    async def make_them(script, **settings):
        system = await make(has_worker=False, embeddings="on", **settings)
        await system.add(worker_type("prefill", "prefill-0", script, on_embed=script))
        return system

    return make_them


async def test_rows_of_texts_get_the_vectors_that_a_request_gets(make_embedding, embeds):
    system = await make_embedding(embeds.give_vector)
    given = [[[5 + number, 6], [7, number]] for number in range(5)]
    rows = [texts_row(number, texts) for number, texts in enumerate(given)]
    rows += [texts_row(5, [8, 9], encoding_format="base64"), texts_row(6, "x", dimensions=3), texts_row(7, [])]
    async with client_of(system) as client:
        batch = await until_status(client, await created(client, rows, endpoint="/v1/embeddings"), *OVER)
        assert (batch.status, counts(batch)) == ("completed", (8, 6, 2))
        results = {line["custom_id"]: line["response"]["body"] for line in await lines(client, batch.output_file_id)}
        wrong = {line["custom_id"]: line["response"] for line in await lines(client, batch.error_file_id)}
        for number, texts in enumerate(given):
            answer = (await system.http.post("/v1/embeddings", json=rows[number]["body"])).json()
            assert results[f"row-{number}"] == answer
            assert [one["embedding"] for one in answer["data"]] == list(map(embeds.vector_of, texts))
    in_base64 = struct.unpack("<4f", base64.b64decode(results["row-5"]["data"][0]["embedding"]))
    assert list(in_base64) == embeds.vector_of([8, 9])
    assert {(name, one["status_code"], one["body"]["error"]["param"]) for name, one in wrong.items()} == {
        ("row-6", 400, "dimensions"),
        ("row-7", 400, "input"),
    }
    classes = [attempt.spec.service_class for attempt in system.workers["prefill-0"].attempts]
    assert classes[:11] == [BATCH_CLASS] * 11


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_rows_of_texts_end_with_their_batch(make_embedding, embeds, end):
    async def hold_some(attempt):
        if attempt.spec.prompt_token_ids[0] < 7:
            await embeds.give_vector(attempt)
        else:
            attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))

    system = await make_embedding(hold_some, batch_rows=2)
    worker = system.workers["prefill-0"]
    async with client_of(system) as client:
        rows = [texts_row(number, [[5 + number], [5 + number, 6]]) for number in range(10)]
        batch = await created(client, rows, endpoint="/v1/embeddings")
        await until_completed(client, batch, 2)
        await system.until(lambda: len(worker.attempts) == 8)
        if end == "cancelled":
            await client.batches.cancel(batch.id)
        else:
            change(system, batch, **{"at:expires": batch.created_at})
            system.gateway.batches.poke(batch.id)
        batch = await until_status(client, batch, *OVER)
        assert (batch.status, counts(batch)) == (end, (10, 2, 8 if end == "expired" else 0))
        assert {line["custom_id"] for line in await lines(client, batch.output_file_id)} == {"row-0", "row-1"}
    await system.until(lambda: len(worker.cancelled) == 4)
    assert system.gateway.embedder._ahead == {}
    assert not any(member.session.num_open_attempts for member in system.gateway.topology.members())


async def test_rows_of_texts_wait_for_workers_and_survive_one_that_dies(make, worker_type, embeds):
    system = await make(has_worker=False, embeddings="on", batch_rows=4)

    async def die(attempt):
        await attempt.worker.die()

    async with client_of(system) as client:
        rows = [texts_row(number, [5 + number]) for number in range(6)]
        batch = await created(client, rows, endpoint="/v1/embeddings")
        await system.until(lambda: asked(system).get("later", 0) >= 4)
        await system.add(worker_type("prefill", "prefill-0", die, on_embed=die))
        await system.until(lambda: system.workers["prefill-0"].attempts)
        await system.add(worker_type("prefill", "prefill-1", embeds.give_vector, on_embed=embeds.give_vector))
        batch = await until_status(client, batch, *OVER, timeout_s=HANG_LIMIT_S)
        assert (batch.status, counts(batch)) == ("completed", (6, 6, 0))


async def test_a_result_that_never_fits_is_an_error_and_holds_nothing_up(make_embedding, embeds):
    system = await make_embedding(embeds.give_vector, batch_rows=1, tenant_file_storage=8192)
    async with client_of(system) as client:
        rows = [texts_row(0, [[5, 6]] * 200), texts_row(1, [7])]
        content = jsonl(rows)
        assert len(content) < 4096
        batch = await until_status(client, await created(client, content, endpoint="/v1/embeddings"), *OVER)
        assert (batch.status, counts(batch)) == ("completed", (2, 1, 1))
        (line,) = await lines(client, batch.error_file_id)
        assert (line["custom_id"], line["error"]["code"]) == ("row-0", "result_too_large")
        assert asked(system) == {"completed": 1, "failed": 1}


async def test_whoever_waits_for_an_answer_goes_before_rows(make, script, worker_type):
    system = await make(has_worker=False, batch_rows=4)
    worker = worker_type("decode", "decode-0", script.decode)
    worker.load.pages.free = 0  # so it has one request at a time
    await system.add(worker)
    script.held = {300}
    async with client_of(system) as client:

        async def request(token_id):
            return await client.completions.create(model="tiny", prompt=[token_id], max_tokens=3)

        first = asyncio.create_task(request(300))
        await system.until(lambda: script.asked == [300])
        batch = await created(client, [row(number) for number in range(8)])
        await system.until(lambda: system.gateway.requests.num_queued == 4)
        second = asyncio.create_task(request(301))
        await system.until(lambda: system.gateway.requests.num_queued == 5)
        script.gate.set()
        await first
        await second
        assert script.asked[:2] == [300, 301]
        worker.load.pages.free = 100
        worker.sessions.load_changed()
        await answered_once(client, batch, 8)


async def test_every_endpoint_of_answers_is_answered(make):
    assert {*BODIES, "/v1/embeddings"} == {*ENDPOINTS}
    system = await make()
    async with client_of(system) as client:
        for endpoint in BODIES:
            rows = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": BODIES[endpoint]}]
            batch = await until_status(client, await created(client, rows, endpoint=endpoint), *OVER)
            assert counts(batch) == (1, 1, 0)
            (line,) = await lines(client, batch.output_file_id)
            assert '"cde"' in json.dumps(line["response"]["body"])


async def test_all_that_is_wrong_with_a_file_is_told_by_its_lines(make):
    system = await make(has_worker=False)
    bad = [
        b"not json\n",
        b"\n",
        b"[1]\n",
        jsonl([{key: value for key, value in row(1).items() if key != "custom_id"}]),
        jsonl([row(2) | {"custom_id": 3}]),
        jsonl([row(2) | {"custom_id": "x" * (MAX_CUSTOM_ID_CHARS + 1)}]),
        jsonl([row(4), row(4)]),
        jsonl([row(5) | {"method": "GET"}]),
        jsonl([row(6) | {"url": "/v1/chat/completions"}]),
        jsonl([{key: value for key, value in row(7).items() if key != "body"}]),
        jsonl([row(8) | {"body": [1]}]),
        jsonl([row(9, stream=True)]),
        jsonl([row(10, model="nobody")]),
        b'{"custom_id": "\xff", "method": "POST"}\n',
        b"[" * 100_000 + b"\n",
        jsonl([row(11)]).replace(b"{", b'{"custom_id": 5, ', 1),
        jsonl([row(12)]).replace(b'"POST"', b'1, "method": "POST"'),
        jsonl([row(13)]).replace(b"{", b'{"x": {"b": {}, "b": {}}, ', 1),
        jsonl([row(14)]).replace(b'"body"', b'"body": {"prompt": "b"}, "bo\\u0064y"'),
        jsonl([row(15)]),
    ]
    async with client_of(system) as client:
        batch = await until_status(client, await created(client, b"".join(bad)), *OVER)
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.output_file_id is None
    told = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert told == [
        (1, "invalid_json_line", None),
        (3, "invalid_json_line", None),
        (4, "missing_required_parameter", "custom_id"),
        (5, "invalid_type", "custom_id"),
        (6, "invalid_custom_id", "custom_id"),
        (8, "duplicate_custom_id", "custom_id"),
        (9, "invalid_method", "method"),
        (10, "invalid_url", "url"),
        (11, "missing_required_parameter", "body"),
        (12, "invalid_type", "body"),
        (13, "invalid_value", "body.stream"),
        (14, "model_not_found", "body.model"),
        (15, "invalid_json_line", None),
        (16, "invalid_json_line", None),
        (17, "duplicate_key", None),
        (18, "duplicate_key", None),
        (19, "duplicate_key", None),
        (20, "duplicate_key", None),
    ]
    assert batch.errors.object == "list"
    assert "line 7" in batch.errors.data[5].message


async def test_a_cancelled_batch_frees_its_workers_and_keeps_what_it_has(make, script):
    system = await make(batch_rows=2)
    script.held = {5 + 2, 5 + 3}
    async with client_of(system) as client:
        batch = await created(client, [row(number) for number in range(10)])
        await system.until(lambda: len(script.asked) == 4)
        await until_completed(client, batch, 2)
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        assert cancelled.cancelling_at
        batch = await until_status(client, batch, *OVER)
        assert batch.status == "cancelled"
        assert counts(batch) == (10, 2, 0)
        assert {line["custom_id"] for line in await lines(client, batch.output_file_id)} == {"row-0", "row-1"}
        await system.until(lambda: set(system.workers["decode-0"].cancelled) == script.running)
        assert system.gateway.requests.num_running == 0
        with pytest.raises(openai.ConflictError, match="is cancelled cannot be") as refused:
            await client.batches.cancel(batch.id)
        assert refused.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel("batch_none")


async def test_rows_wait_for_workers_rather_than_fail(make, script, worker_type, monkeypatch):
    system = await make(has_worker=False)
    async with client_of(system) as client:
        batch = await created(client, [row(number) for number in range(5)])
        await until_status(client, batch, "in_progress")
        await system.until(lambda: asked(system).get("later", 0) >= 5)
        await system.add(worker_type("decode", "decode-0", script.decode))
        await answered_once(client, batch, 5)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.toml"
    names = {"acme": ApiKey(digest_of_key("tandem-acme"), "acme"), "bolt": ApiKey(digest_of_key("tandem-bolt"), "bolt")}
    names["none"] = ApiKey(digest_of_key("tandem-none"), "acme", models=frozenset({"other"}))
    path.write_text("\n".join(map(toml_entry, names.values())) + "\n[tenant.acme]\nconcurrency = 1\n")
    return path


async def test_tenants_see_only_what_is_theirs_and_rows_count_for_their_limits(make, script, keys):
    system = await make(api_keys=keys)
    async with (
        client_of(system, "tandem-acme") as acme,
        client_of(system, "tandem-bolt") as bolt,
        client_of(system, "tandem-none") as without_model,
        client_of(system, "tandem-nobody") as nobody,
    ):
        batch = await created(acme, [row(number) for number in range(3)])
        # Two of them were told to come later, for one runs at a time.
        await answered_once(acme, batch, 3)
        assert script.most_at_once == 1
        batch = await acme.batches.retrieve(batch.id)
        for ask in (
            bolt.batches.retrieve(batch.id),
            bolt.batches.cancel(batch.id),
            bolt.files.retrieve(batch.output_file_id),
            bolt.files.content(batch.input_file_id),
            bolt.files.delete(batch.input_file_id),
            bolt.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        assert (await bolt.files.list()).data == []
        assert (await bolt.batches.list()).data == []
        assert len((await acme.files.list()).data) == 2
        for ask in (nobody.files.list(), nobody.batches.list(), nobody.files.retrieve(batch.output_file_id)):
            with pytest.raises(openai.AuthenticationError):
                await ask
        failed = await until_status(without_model, await created(without_model, [row(0)]), *OVER)
        assert [error.code for error in failed.errors.data] == ["model_not_allowed"]


async def test_rows_of_a_key_that_is_gone_are_refused(make, script, keys):
    system = await make(api_keys=keys, batch_rows=1)
    script.held = {5}
    async with client_of(system, "tandem-acme") as acme:
        batch = await created(acme, [row(0), row(1)])
        await system.until(lambda: script.running)
        keys.write_text(keys.read_text().replace(digest_of_key("tandem-acme"), "0" * 64).replace('"bolt"', '"acme"'))
        file = system.gateway.door.key_file
        await system.until(lambda: file.keys.find("tandem-acme") is None)
        script.gate.set()
    async with client_of(system, "tandem-bolt") as acme:
        batch = await until_status(acme, batch, *OVER)
        assert counts(batch) == (2, 1, 1)
        (line,) = await lines(acme, batch.error_file_id)
    assert line["response"]["status_code"] == 401


def cut_off(system, *names):
    """Keeps these words about batches, or all, of this gateway from Redis, as if it were dead or far away."""
    store = system.gateway.batches.store
    words = {name: getattr(store, name) for name in names or ("claim", "renew", "record", "advance", "release")}

    async def away(*args, **kwargs):
        raise StoreUnavailable("cut off")

    for name in words:
        setattr(store, name, away)
    return SimpleNamespace(heal=lambda: [setattr(store, name, word) for name, word in words.items()])


async def test_another_gateway_goes_on_when_the_owner_is_gone_and_the_owner_comes_too_late(make, script):
    first, second = await make(2, batch_rows=4)
    for system in (first, second):
        system.gateway.batches.store.lease_s = 600.0
    num_rows = 60
    script.held = {5 + number for number in (20, 21, 22)}
    async with client_of(first) as client, client_of(second) as other:
        batch = await created(client, [row(number) for number in range(num_rows)])
        await until_completed(client, batch, num_rows - 3)
        owner, successor = await parted(first, second)
        cut = cut_off(owner)
        end_lease(owner, batch)
        # The successor claims it and asks anew for what was under way.
        await first.until(lambda: successor.gateway.batches.runs.keys() == {batch.id})
        script.gate.set()
        results = await answered_once(other, batch, num_rows)
        cut.heal()
        await first.until(lambda: not owner.gateway.batches._tasks)
        assert await answered_once(other, batch, num_rows) == results
    times = Counter(script.asked)
    assert set(times) == {5 + number for number in range(num_rows)}
    assert {token_id for token_id, count in times.items() if count > 1} == script.held
    assert times.total() == num_rows + 3


def change(system, batch, **fields):
    """Changes what Redis knows of a batch."""
    key = Keys(system.cluster).batch_prefix + batch.id
    with redis.Redis.from_url(system.redis_url) as client:
        assert client.hset(key, mapping=fields) == 0  # none of the fields is new


def end_lease(system, batch):
    """Lets another gateway claim a batch that is pinned to no region."""
    keys = Keys(system.cluster)
    with redis.Redis.from_url(system.redis_url) as client:
        tenant = client.hget(keys.batch_prefix + batch.id, "tenant").decode()
        client.zadd(f"{keys.waiting_batches_prefix}*/{tenant}", {batch.id: 0})
        client.zadd(keys.waiting_batches_prefix + "*", {tenant: 0})


async def parted(first, second):
    """The gateway that works on the batch, and the other one."""
    await first.until(lambda: first.gateway.batches.runs or second.gateway.batches.runs)
    return (first, second) if first.gateway.batches.runs else (second, first)


async def test_a_gateway_that_leaves_lets_go_at_once(make, script):
    first, second = await make(2, batch_rows=2)
    for system in (first, second):
        system.gateway.batches.store.lease_s = 600.0
    script.held = {5 + 4}
    async with client_of(first) as client, client_of(second) as other:
        batch = await created(client, [row(number) for number in range(10)])
        await first.until(lambda: len(script.asked) == 10)
        leaving, stays = await parted(first, second)
        asks = other if leaving is first else client
        closing = asyncio.create_task(leaving.gateway.batches.close(timeout_s=0.2))
        await stays.until(lambda: stays.gateway.batches.runs)
        await closing
        script.gate.set()
        await answered_once(asks, batch, 10)


async def test_a_leaving_gateway_waits_for_rows_that_end_soon(make, script):
    first, second = await make(2, batch_rows=2)
    script.held = {5 + 4, 5 + 5}
    async with client_of(first) as client, client_of(second) as other:
        batch = await created(client, [row(number) for number in range(10)])
        await first.until(lambda: len(script.running) == 2)
        leaving, _ = await parted(first, second)
        asks = other if leaving is first else client
        closing = asyncio.create_task(leaving.gateway.batches.close(timeout_s=HANG_LIMIT_S))
        await asyncio.sleep(0)
        script.gate.set()
        await closing
        await answered_once(asks, batch, 10)
    assert len(script.asked) == 10


async def test_nothing_is_begun_while_somebody_else_may_have_the_batch(make, script):
    system = await make(batch_rows=4)
    script.held = {5 + number for number in (3, 4, 5, 6)}
    batches = system.gateway.batches
    async with client_of(system) as client:
        batch = await created(client, [row(number) for number in range(8)])
        await system.until(lambda: len(script.asked) == 7 and len(script.running) == 4)
        (run,) = batches.runs.values()
        cut = cut_off(system, "claim", "renew")
        batches.store.lease_s = 0.2
        run.look()
        await system.until(lambda: not run._has_claim.is_set())
        script.gate.set()
        await until_completed(client, batch, 7)
        # The last row has a place, but the batch may not be ours.
        await system.until(lambda: batches.slots._value == 3)
        assert len(script.asked) == 7
        batches.store.lease_s = 600.0
        cut.heal()
        await answered_once(client, batch, 8)


async def test_redis_may_be_away_for_a_while(make, script):
    with EmbeddedRedis() as server:
        system = await make(redis=server.url, batch_rows=4)
        system.gateway.batches.store.lease_s = 2.0
        script.held = {5 + 9, 5 + 10, 5 + 11, 5 + 12}
        async with client_of(system) as client:
            batch = await created(client, [row(number) for number in range(30)])
            await system.until(lambda: len(script.asked) == 13)
            (run,) = system.gateway.batches.runs.values()
            os.kill(server.pid, signal.SIGSTOP)
            try:
                # Nobody can know whether the batch is still ours, so what runs continues and nothing more is begun.
                await system.until(lambda: not run._has_claim.is_set())
                script.gate.set()
                await system.until(lambda: not script.running)
                await asyncio.sleep(0.3)
                assert len(script.asked) == 13
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await answered_once(client, batch, 30)


async def running(system):
    await system.until(lambda: system.gateway.batches.runs)
    return list(system.gateway.batches.runs.values())


async def test_rows_that_are_not_answered_in_time_expire(make, script, monkeypatch):
    monkeypatch.setattr(gateway.batches.runner, "MAX_UNANSWERED_AT_ONCE", 3)
    system = await make(batch_rows=2)
    script.held = {5 + 3, 5 + 4}
    async with client_of(system) as client:
        batch = await created(client, [row(number) for number in range(12)])
        await until_completed(client, batch, 3)
        change(system, batch, **{"at:expires": batch.created_at})
        system.gateway.batches.poke(batch.id)
        batch = await until_status(client, batch, *OVER)
        assert batch.status == "expired"
        assert batch.expired_at >= batch.finalizing_at >= batch.expires_at
        assert counts(batch) == (12, 3, 9)
        assert {line["custom_id"] for line in await lines(client, batch.output_file_id)} == {"row-0", "row-1", "row-2"}
        expired = await lines(client, batch.error_file_id)
    assert {line["custom_id"] for line in expired} == {f"row-{number}" for number in range(3, 12)}
    assert {line["error"]["code"] for line in expired} == {"batch_expired"}
    assert {line["response"] for line in expired} == {None}
    assert asked(system) == {"completed": 3, "expired": 9}
    await system.until(lambda: system.gateway.requests.num_running == 0)


async def test_results_without_room_wait_until_there_is_some(make, monkeypatch):
    monkeypatch.setattr(gateway.batches.runner, "FULL_RETRY_S", 0.1)
    system = await make()
    files = system.gateway.batches.files
    async with client_of(system) as client:
        other = await client.files.create(file=("other.jsonl", b"x" * 50_000), purpose="batch")
        files.room = Room(tenant_bytes=62_000)
        batch = await created(client, [row(number) for number in range(20)])
        (run,) = await running(system)
        await system.until(lambda: run._is_full)
        now = await client.batches.retrieve(batch.id)
        assert (now.status, now.request_counts.completed < 20) == ("in_progress", True)
        await client.files.delete(other.id)
        await answered_once(client, batch, 20)


async def test_a_batch_without_room_for_a_line_of_each_row_fails_before_it_asks_any(make, script):
    system = await make()
    files = system.gateway.batches.files
    async with client_of(system) as client:
        await client.files.create(file=("other.jsonl", b"x" * 50_000), purpose="batch")
        files.room = Room(tenant_bytes=62_000)
        batch = await created(client, [row(number) for number in range(30)])
        batch = await until_status(client, batch, *OVER)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
        assert not script.asked


async def test_a_small_batch_does_not_wait_for_a_large_one(make, script):
    system = await make(batch_rows=2)
    async with client_of(system) as client:
        large = await created(client, [row(number) for number in range(60)])
        await system.until(lambda: script.asked)
        small = await created(client, [row(number) for number in range(100, 106)])
        for batch in (small, large):
            assert (await until_status(client, batch, *OVER)).status == "completed"
    assert script.asked.index(5 + 105) < script.asked.index(5 + 59)
    assert script.most_at_once == 2


async def test_a_batch_without_its_file_fails(make):
    system = await make(batch_rows=1)
    await system.gateway.batches.close()
    async with client_of(system) as client:
        batch = await created(client, [row(0)])
        await client.files.delete(batch.input_file_id)
        system.gateway.batches.start()
        batch = await until_status(client, batch, *OVER)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["input_file_gone"]


async def test_no_line_is_read_before_its_row_has_a_slot(make, script):
    system = await make(batch_rows=2)
    script.held = {5, 6}
    async with client_of(system) as client:
        first = await created(client, [row(0), row(1)])
        await system.until(lambda: len(script.running) == 2)
        lines = [row(number) for number in range(2, 6)]
        second = await created(client, lines)
        await until_status(client, second, "in_progress")
        run = system.gateway.batches.runs[second.id]
        await system.until(lambda: system.gateway.batches.slots._waiters)
        assert run._pending._num_in_file == 4
        script.gate.set()
        await answered_once(client, first, 2)
        assert (await until_status(client, second, *OVER)).request_counts.completed == 4


async def test_a_row_that_its_tenant_may_never_ask_is_refused_at_once(make, keys):
    keys.write_text(keys.read_text() + "tokens_per_minute = 20\n")
    system = await make(api_keys=keys)
    async with client_of(system, "tandem-acme") as acme:
        batch = await created(acme, [row(0), row(1, max_tokens=100)])
        batch = await until_status(acme, batch, *OVER)
        assert counts(batch) == (2, 1, 1)
        (line,) = await lines(acme, batch.error_file_id)
    assert line["custom_id"] == "row-1"
    assert line["response"]["status_code"] == 429
    assert "this request alone may need 103" in line["response"]["body"]["error"]["message"]


async def test_a_batch_that_cannot_be_worked_on_fails_after_some_tries(make, monkeypatch):
    def broken(line):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(gateway.batches.runner, "row_of", broken)
    system = await make()
    batches = system.gateway.batches
    batches.store.lease_s = 600.0
    async with client_of(system) as client:
        batch = await created(client, [row(0)])
        for num_faults in range(1, gateway.batches.runner.MAX_FAULTS):
            await system.until(lambda num=num_faults: batches.faults[batch.id] == num and not batches.runs)
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            end_lease(system, batch)
        batch = await until_status(client, batch, *OVER)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["internal_error"]
    assert batches.faults[batch.id] == gateway.batches.runner.MAX_FAULTS


async def test_what_redis_refuses_for_good_fails_the_batch(make, monkeypatch):
    system = await make()

    async def refuse(*args, **kwargs):
        raise StoreRefused("Redis refused a command: no permissions")

    monkeypatch.setattr(system.gateway.batches.store, "record", refuse)
    async with client_of(system) as client:
        batch = await until_status(client, await created(client, [row(0)]), *OVER)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["storage_refused"]


async def test_a_batch_that_cannot_be_read_keeps_no_other_waiting(make):
    system = await make(batch_rows=1)
    batches = system.gateway.batches
    await batches.close()
    async with client_of(system) as client:
        odd = await created(client, [row(0)])
        change(system, odd, status="of a later version")
        batches.start()
        await answered_once(client, await created(client, [row(0)]), 1)
