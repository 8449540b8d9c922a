"""Named requests over HTTP and gRPC: retried, resumed, continued on another gateway; one generation and one answer."""

import asyncio
import contextlib
import functools
import json
from collections import Counter
from dataclasses import dataclass, field

import grpc
import httpx
import pytest

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.cluster.redis_store import Store
from services.runtime.breaker import Breaker
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import Overloaded, StoreUnavailable
from services.scheduling.pools import Audience
from tests.waiting import HANG_LIMIT_S

ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end"


@pytest.fixture(autouse=True)
def patient_gateways(monkeypatch):
    """Has gateways wait longer for Redis than in production: without Redis they would begin the answer again."""
    monkeypatch.setattr("gateway.assembly.Store", functools.partial(Store, timeout_s=2.0))


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode(ANSWER_TEXT, add_special_tokens=False).ids, 1]


class GatedPair:
    """Decode worker's script: tokens one by one, stopping before each index in `gates` until it is opened."""

    def __init__(self, answer, *gates):
        self.answer = list(answer)
        self.gates = {index: asyncio.Event() for index in gates}

    def open(self):
        for gate in self.gates.values():
            gate.set()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        num_tokens = min(len(self.answer), attempt.spec.sampling.max_tokens)
        for index in range(first, num_tokens):
            if index in self.gates:
                await self.gates[index].wait()
            attempt.tokens(index, self.answer[index : index + 1])
            await asyncio.sleep(0)
        is_whole = num_tokens == len(self.answer)
        attempt.finish(inference_pb2.FINISH_REASON_STOP if is_whole else inference_pb2.FINISH_REASON_LENGTH)


@dataclass
class Events:
    """What a client has of a stream: (id, data) of each event."""

    events: list[tuple[str | None, str]] = field(default_factory=list)
    block: list[str] = field(default_factory=list)

    def take_line(self, line):
        if line:
            self.block.append(line)
            return
        fields = dict(each.split(": ", 1) for each in self.block)
        self.events.append((fields.get("id"), fields["data"]))
        self.block = []

    @property
    def last_id(self):
        return next((each for each, _ in reversed(self.events) if each is not None), None)

    @property
    def is_done(self):
        return bool(self.events) and self.events[-1][1] == "[DONE]"

    def data(self):
        return [json.loads(data) for _, data in self.events if data != "[DONE]"]

    def choices(self):
        return [choice for chunk in self.data() for choice in chunk.get("choices", ())]

    def text(self, index=0):
        pieces = (choice.get("delta", {}).get("content", choice.get("text")) for choice in self.choices_of(index))
        return "".join(piece or "" for piece in pieces)

    def choices_of(self, index):
        return [choice for choice in self.choices() if choice["index"] == index]

    def tokens(self, index=0):
        return [token for choice in self.choices_of(index) for token in choice.get("token_ids", ())]

    def reasons(self, index=0):
        return [choice["finish_reason"] for choice in self.choices_of(index) if choice["finish_reason"]]


async def read(system, events, headers, body, *, num_tokens=10**9, path="/v1/completions"):
    """Reads a stream into `events`; leaves once it has `num_tokens` of all answers together."""
    sent = dict(headers)
    if events.last_id is not None:
        sent["last-event-id"] = events.last_id
    async with system.http.stream("POST", path, json=body, headers=sent) as response:
        if response.status_code != 200:
            await response.aread()
            return response
        async for line in response.aiter_lines():
            events.take_line(line)
            if not line and sum(len(choice.get("token_ids", ())) for choice in events.choices()) >= num_tokens:
                break
    return response


def stream_body(**changes):
    return {
        "prompt": [5, 6, 7],
        "max_tokens": 100,
        "stream": True,
        "return_token_ids": True,
        "temperature": 0,
        **changes,
    }


async def two_gateways(make_system, worker_type, script, **settings):
    """Two gateways of one cluster with one decode worker."""
    first, second = await make_system(**settings), await make_system(**settings)
    worker = await first.add(worker_type("decode", "decode-0", script))
    await second.until(lambda: second.gateway.topology.num_ready("decode") == 1)
    return first, second, worker


def inference(stack_channel):
    return inference_pb2_grpc.InferenceStub(stack_channel)


def grpc_channel(system):
    return grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}")


def grpc_request(request_id="mine", **changes):
    how = {"max_tokens": 100, "temperature": 0.0, **changes}
    ids = inference_pb2.TokenIds(ids=[5, 6, 7])
    return inference_pb2.GenerateRequest(
        request_id=request_id, token_ids=ids, sampling=inference_pb2.SamplingParams(**how)
    )


async def flushed(system):
    """Waits until Redis has all that another gateway needs."""
    await system.flush_journals()


# --- ids -------------------------------------------------------------------------------------------------------------


async def test_events_of_a_named_stream_have_ids_and_are_otherwise_the_same(make_system, worker_type, answer):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    plain, named = Events(), Events()
    await read(system, plain, {}, stream_body())
    response = await read(system, named, {"x-request-id": "abc"}, stream_body())
    assert response.headers["x-request-id"] == "abc"
    assert {each for each, _ in plain.events} == {None}
    *events, done = named.events
    assert done == (None, "[DONE]")
    assert all(each.startswith("abc/") for each, _ in events)
    assert len({each for each, _ in events}) == len(events)
    assert events[-1][0] == f"abc/{len(answer)}f"
    for stream in (plain, named):
        assert (stream.text(), stream.tokens(), stream.reasons()) == (ANSWER_TEXT, answer, ["stop"])


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_every_id_continues_where_it_says_here_and_elsewhere(make_system, worker_type, answer, api):
    first, second, worker = await two_gateways(make_system, worker_type, GatedPair(answer).decode)
    path = "/v1/completions" if api == "completions" else "/v1/chat/completions"
    body = stream_body(n=2, stop=["lo wo"], stream_options={"include_usage": True})
    if api == "chat":
        body = {**body, "messages": [{"role": "user", "content": "hi"}]}
        del body["prompt"]
    headers = {"idempotency-key": "k 1"}
    whole = Events()
    await read(first, whole, headers, body, path=path)
    assert (whole.text(0), whole.text(1)) == ("hel", "hel")
    assert all(whole.tokens(index) == answer[: len(whole.tokens(index))] for index in (0, 1))
    await flushed(first)
    usage = whole.data()[-1]["usage"]
    for system in (first, second):
        for count in range(1, len(whole.events) + 1):
            resumed = Events(whole.events[:count])
            while resumed.events and resumed.events[-1][0] is None:
                resumed.events.pop()
            await read(system, resumed, headers, body, path=path)
            assert resumed.is_done
            assert resumed.data()[-1]["usage"] == usage
            for index in (0, 1):
                assert resumed.choices_of(index) == whole.choices_of(index) or _merged(resumed, index) == _merged(
                    whole, index
                )
            if api == "chat":
                roles = Counter(choice["index"] for choice in resumed.choices() if "role" in choice["delta"])
                assert roles == {0: 1, 1: 1}
    assert len(worker.attempts) == 2


def _merged(events, index):
    return events.text(index), events.tokens(index), events.reasons(index)


async def test_offsets_of_logprobs_go_on(make_system, worker_type, answer):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    body = stream_body(logprobs=1, return_token_ids=False)
    whole = Events()
    await read(system, whole, {"x-request-id": "a"}, body)

    def offsets(events):
        return [
            offset for choice in events.choices() if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]
        ]

    for count in range(1, len(whole.events)):
        resumed = Events(whole.events[:count])
        await read(system, resumed, {"x-request-id": "a"}, body)
        assert offsets(resumed) == offsets(whole)


# --- continuing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{"x-request-id": "abc"}, {"idempotency-key": "k"}], ids=["id", "key"])
@pytest.mark.parametrize("where", ["same gateway", "other gateway", "other gateway, Redis behind", "Redis emptied"])
async def test_broken_stream_goes_on(make_system, worker_type, answer, headers, where):
    pair = GatedPair(answer, 9)
    first, second, worker = await two_gateways(make_system, worker_type, pair.decode)
    if where == "other gateway, Redis behind":
        # Its last tokens never reach Redis, as when the gateway was killed.
        first.gateway._journals._writer._task.cancel()
    events = Events()
    async with asyncio.timeout(HANG_LIMIT_S):
        await read(first, events, headers, stream_body(), num_tokens=4)
    await first.until(lambda: len(worker.cancelled) == 1)
    if "behind" not in where:
        await flushed(first)
    if where == "Redis emptied":
        await first.gateway._store._client.flushdb()
    pair.open()
    await read(first if where == "same gateway" else second, events, headers, stream_body())
    assert events.is_done
    assert (events.text(), events.tokens(), events.reasons()) == (ANSWER_TEXT, answer, ["stop"])
    old, new = worker.attempts
    assert list(new.spec.emitted_token_ids) == answer[: len(new.spec.emitted_token_ids)]
    assert bool(new.spec.emitted_token_ids) == ("gateway" in where and "behind" not in where)
    assert new.spec.sampling.seed == old.spec.sampling.seed
    for system in (first, second):
        await system.until(lambda system=system: system.gateway.requests.num_running == 0)


async def test_gateway_that_leaves_in_mid_stream_is_replaced_by_another(make_system, worker_type, answer):
    pair = GatedPair(answer, 6)
    first, second, worker = await two_gateways(make_system, worker_type, pair.decode)
    events = Events()
    reading = asyncio.create_task(read(first, events, {"idempotency-key": "k"}, stream_body()))
    await first.until(lambda: len(events.tokens()) == 6)
    await first.gateway.stop()
    await reading
    assert json.loads(events.events.pop()[1])["error"]["code"] == "server_overloaded"
    pair.open()
    await read(second, events, {"idempotency-key": "k"}, stream_body())
    assert (events.text(), events.tokens(), events.reasons()) == (ANSWER_TEXT, answer, ["stop"])
    assert list(worker.attempts[1].spec.emitted_token_ids) == answer[:6]


async def test_seed_of_a_named_request_is_the_same_wherever_it_goes_on(make_system, worker_type, answer):
    pair = GatedPair(answer, 9)
    first, second, worker = await two_gateways(make_system, worker_type, pair.decode)
    body = stream_body(temperature=1.0, n=2)
    events = Events()
    await read(first, events, {"x-request-id": "abc"}, body, num_tokens=6)
    await first.until(lambda: len(worker.cancelled) == 2)
    await flushed(first)
    pair.open()
    await read(second, events, {"x-request-id": "abc"}, body)
    for index in (0, 1):
        assert (events.text(index), events.tokens(index)) == (ANSWER_TEXT, answer)
    seeds = Counter(
        (attempt.spec.id.request_id.rpartition(".")[2], attempt.spec.sampling.seed) for attempt in worker.attempts
    )
    assert set(seeds.values()) == {2}
    assert len(seeds) == 2


async def test_taking_over_a_running_request_ends_it_where_it_was(make_system, worker_type, answer):
    pair = GatedPair(answer, 6)
    first, second, worker = await two_gateways(make_system, worker_type, pair.decode)
    old, new = Events(), Events()
    reading = asyncio.create_task(read(first, old, {"idempotency-key": "k"}, stream_body()))
    await first.until(lambda: len(old.tokens()) == 6)
    await flushed(first)
    taking = asyncio.create_task(read(second, new, {"idempotency-key": "k"}, stream_body()))
    await reading
    assert json.loads(old.events.pop()[1])["error"]["code"] == "worker_unavailable"
    await first.until(lambda: len(worker.cancelled) == 1)
    pair.open()
    await taking
    assert (new.text(), new.tokens()) == (ANSWER_TEXT, answer)
    await read(first, old, {"idempotency-key": "k"}, stream_body())
    assert (old.text(), old.tokens(), old.reasons()) == (ANSWER_TEXT, answer, ["stop"])


@pytest.mark.parametrize("are_there_others", [False, True])
async def test_another_gateway_goes_on_with_the_weights_that_began_the_answer(
    make_system, worker_type, answer, are_there_others
):
    """Where all workers had the same weights when the call came, that is written at once, else with the first token."""
    first, second = await make_system(), await make_system()

    async def takes_no_beginning(attempt):
        if attempt.spec.emitted_token_ids:
            return await GatedPair(answer).decode(attempt)
        attempt.refuse(Overloaded("full"))

    def with_new_weights():
        return first.add(worker_type("decode", "decode-1", takes_no_beginning, fingerprint="new"))

    new = await with_new_weights() if are_there_others else None
    old = await first.add(worker_type("decode", "decode-0", GatedPair(answer, 4).decode, fingerprint="old"))
    await first.until(lambda: first.gateway.topology.num_ready("decode") == 1 + are_there_others)
    events, headers, body = Events(), {"x-request-id": "mine"}, stream_body()
    await read(first, events, headers, body, num_tokens=4)
    await flushed(first)
    new = new or await with_new_weights()
    await old.die()
    await second.until(lambda: second.gateway.topology.open_ids("decode", "tiny", Audience()) == {"decode-1"})
    reading = asyncio.create_task(read(second, events, headers, body))
    await second.until(lambda: len(second.gateway.requests._open) == 1)
    await first.add(worker_type("decode", "decode-2", GatedPair(answer).decode, fingerprint="old"))
    await reading
    assert events.tokens() == answer
    assert not any(attempt.spec.emitted_token_ids for attempt in new.attempts)


# --- retried ---------------------------------------------------------------------------------------------------------


async def test_duplicates_at_once_have_one_generation(make_system, worker_type, answer):
    pair = GatedPair(answer, 5)
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "n": 2}
    posts = [
        asyncio.create_task(
            system.http.post("/v1/completions", json=body, headers={"idempotency-key": "k", "x-request-id": f"try-{n}"})
        )
        for n in range(5)
    ]
    await system.until(lambda: len(worker.attempts) == 2)
    posts.pop().cancel()
    await asyncio.sleep(0.1)
    assert not worker.cancelled
    pair.open()
    responses = await asyncio.gather(*posts)
    assert [response.status_code for response in responses] == [200] * 4
    assert len({response.text for response in responses}) == 1
    assert [choice["text"] for choice in responses[0].json()["choices"]] == [ANSWER_TEXT] * 2
    assert len({response.headers["x-request-id"] for response in responses}) == 1
    assert len(worker.attempts) == 2
    again = await system.http.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
    assert again.text == responses[0].text
    assert len(worker.attempts) == 2


async def test_finished_answer_is_replayed_on_another_gateway(make_system, worker_type, answer):
    first, second, worker = await two_gateways(make_system, worker_type, GatedPair(answer).decode)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    texts = []
    for system in (first, second):
        response = await system.http.post("/v1/chat/completions", json=body, headers={"idempotency-key": "k"})
        texts.append(response.text)
        await flushed(system)
    assert texts[0] == texts[1]
    assert len(worker.attempts) == 1


async def test_another_body_with_the_same_key_is_a_conflict(make_system, worker_type, answer):
    first, second, worker = await two_gateways(make_system, worker_type, GatedPair(answer).decode)
    headers = {"idempotency-key": "k"}
    body = {"prompt": [5], "max_tokens": 9, "stream": False}
    assert (await first.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    await flushed(first)
    reordered = b'{ "stream":false, "max_tokens" : 9,\n "prompt":[5]}'
    for system in (first, second):
        same = await system.http.post(
            "/v1/completions", content=reordered, headers={**headers, "content-type": "application/json"}
        )
        assert same.status_code == 200
        for changed in ({**body, "max_tokens": 8}, {**body, "stream": True}, {**body, "prompt": [6]}):
            conflict = await system.http.post("/v1/completions", json=changed, headers=headers)
            assert conflict.status_code == 409
            assert conflict.json()["error"]["code"] == "idempotency_conflict"
        async with grpc_channel(system) as channel:
            call = inference(channel).Generate(grpc_request(""), metadata=[("idempotency-key", "k")])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert len(worker.attempts) == 1


@pytest.mark.parametrize(
    ("headers", "changes"),
    [
        ({"idempotency-key": ""}, {}),
        ({"idempotency-key": "x" * 256}, {}),
        ({"idempotency-key": "a\tb"}, {}),
        ({"x-request-id": "a", "last-event-id": "a"}, {}),
        ({"x-request-id": "a", "last-event-id": "b/1"}, {}),
        ({"x-request-id": "a", "last-event-id": "a/1,1"}, {}),
        ({"x-request-id": "a", "last-event-id": "a/1x"}, {}),
        ({"x-request-id": "a", "last-event-id": ""}, {}),
        ({"x-request-id": "a", "last-event-id": "a/1"}, {"stream": False}),
        ({"last-event-id": "a/1"}, {}),
        ({"idempotency-key": "k", "last-event-id": "no name/1"}, {}),
    ],
)
async def test_headers_that_mean_nothing_are_refused(make_system, worker_type, answer, headers, changes):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    response = await system.http.post("/v1/completions", json=stream_body(**changes), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert worker.attempts == []


async def test_position_beyond_the_answer_is_refused(make_system, worker_type, answer):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    headers = {"x-request-id": "a", "last-event-id": "a/99"}
    for _ in range(2):
        response = await system.http.post("/v1/completions", json=stream_body(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_event_id")


async def test_same_id_without_a_position_is_a_new_request(make_system, worker_type, answer):
    pair = GatedPair(answer, 5)
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    events = Events()
    reading = asyncio.create_task(read(system, events, {"x-request-id": "a"}, stream_body()))
    await system.until(lambda: len(events.tokens()) == 5)
    refused = await system.http.post("/v1/completions", json=stream_body(), headers={"x-request-id": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "already_exists")
    watching = asyncio.create_task(
        read(system, watched := Events(events.events[:2]), {"x-request-id": "a"}, stream_body())
    )
    await system.until(lambda: len(watched.tokens()) == 5)
    pair.open()
    await asyncio.gather(reading, watching)
    assert watched.events == events.events
    assert len(worker.attempts) == 1
    other = await system.http.post("/v1/completions", json=stream_body(max_tokens=2), headers={"x-request-id": "a"})
    assert other.status_code == 200
    assert len(worker.attempts) == 2


async def test_an_id_is_taken_for_its_own_tenant_only(make_system, worker_type, answer):
    pair = GatedPair(answer, 5)
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    read_by = {tenant: Events() for tenant in ("a", "b")}
    reading = [
        asyncio.create_task(read(system, events, {"x-request-id": "order-1"}, stream_body(tenant=tenant)))
        for tenant, events in read_by.items()
    ]
    await system.until(lambda: all(len(events.tokens()) == 5 or task.done() for events, task in
                                   zip(read_by.values(), reading, strict=True)))  # fmt: skip
    pair.open()
    assert [response.status_code for response in await asyncio.gather(*reading)] == [200, 200]
    assert len(worker.attempts) == 2


async def test_failed_request_with_a_key_can_be_tried_again(make_system, worker_type, answer):
    system = await make_system()
    body, headers = {"prompt": [5]}, {"idempotency-key": "k"}
    response = await system.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 503
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    assert (await system.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_wrong_request_with_a_key_leaves_no_trace(make_system, worker_type, answer):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    headers = {"idempotency-key": "k"}
    for body in ({"prompt": [5], "temperature": 9}, {"prompt": [10**6]}, {"prompt": [5] * 600}):
        assert (await system.http.post("/v1/completions", json=body, headers=headers)).status_code == 400
    assert (await system.http.post("/v1/completions", json={"prompt": [5]}, headers=headers)).status_code == 200


async def test_without_redis_named_requests_work_on_their_gateway(make_system, worker_type, answer):
    pair = GatedPair(answer, 6)
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", pair.decode))
    system.gateway._store._breaker = Breaker(first_open_s=1000.0)
    system.gateway._store._breaker.trip(SYSTEM_CLOCK.monotonic())
    events = Events()
    await read(system, events, {"x-request-id": "a"}, stream_body(), num_tokens=4)
    await system.until(lambda: len(worker.cancelled) == 1)
    pair.open()
    await read(system, events, {"x-request-id": "a"}, stream_body())
    assert (events.text(), events.tokens(), events.reasons()) == (ANSWER_TEXT, answer, ["stop"])
    assert list(worker.attempts[1].spec.emitted_token_ids) == answer[: len(worker.attempts[1].spec.emitted_token_ids)]


# --- gRPC ------------------------------------------------------------------------------------------------------------


async def test_grpc_resume_from_every_index_here_and_elsewhere(make_system, worker_type, answer):
    first, second, worker = await two_gateways(make_system, worker_type, GatedPair(answer).decode)
    async with grpc_channel(first) as one, grpc_channel(second) as other:
        parts = [part async for part in inference(one).Generate(grpc_request())]
        await flushed(first)
        for stub in (inference(one), inference(other)):
            for index in range(len(answer) + 1):
                request = inference_pb2.ResumeRequest(request_id="mine", next_index=index)
                rest = [part async for part in stub.Resume(request)]
                have = [part for part in parts if part.first_index + len(part.token_ids) <= index]
                assert [token for part in rest for token in part.token_ids] == answer[index:]
                assert rest[0].first_index == index
                assert all(part.request_id == "mine" for part in rest)
                assert rest[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
                assert rest[-1].usage.completion_tokens == len(answer)
                if have and have[-1].first_index + len(have[-1].token_ids) == index and not have[-1].finish_reason:
                    assert "".join(part.text for part in (*have, *rest)) == ANSWER_TEXT
    assert len(worker.attempts) == 1


async def test_grpc_resume_of_a_broken_stream(make_system, worker_type, answer):
    pair = GatedPair(answer, 6)
    first, second, worker = await two_gateways(make_system, worker_type, pair.decode)
    async with grpc_channel(first) as one, grpc_channel(second) as other:
        call = inference(one).Generate(grpc_request(), metadata=[("idempotency-key", "k")])
        parts = []
        while sum(len(part.token_ids) for part in parts) < 6:
            parts.append(await call.read())
        call.cancel()
        await first.until(lambda: len(worker.cancelled) == 1)
        await flushed(first)
        pair.open()
        async for part in inference(other).Resume(inference_pb2.ResumeRequest(request_id="mine", next_index=6)):
            parts.append(part)
        assert "".join(part.text for part in parts) == ANSWER_TEXT
        assert [token for part in parts for token in part.token_ids] == answer
        whole = await inference(other).GenerateUnary(grpc_request("other"), metadata=[("idempotency-key", "k")])
        assert (whole.text, list(whole.token_ids)) == (ANSWER_TEXT, answer)
    assert list(worker.attempts[1].spec.emitted_token_ids) == answer[:6]
    assert len(worker.attempts) == 2


@pytest.mark.parametrize("metadata", [(), [("idempotency-key", "k")]], ids=["id", "key"])
async def test_first_token_is_not_shown_before_another_gateway_could_go_on(make_system, worker_type, answer, metadata):
    pair = GatedPair(answer, 1)
    first, second, _ = await two_gateways(make_system, worker_type, pair.decode)
    # Nothing is written behind: this gateway is killed as soon as the client has its first token.
    first.gateway._journals._writer._task.cancel()
    async with grpc_channel(first) as one, grpc_channel(second) as other:
        call = inference(one).Generate(grpc_request(), metadata=metadata)
        part = await call.read()
        assert list(part.token_ids) == answer[:1]
        pair.open()
        resume = inference_pb2.ResumeRequest(request_id="mine", next_index=1)
        rest = [part async for part in inference(other).Resume(resume)]
        call.cancel()
    assert part.text + "".join(each.text for each in rest) == ANSWER_TEXT
    assert [token for each in rest for token in each.token_ids] == answer[1:]


async def test_resume_waits_for_a_redis_that_does_not_answer(make_system, worker_type, answer, monkeypatch):
    async def refuse(*_):
        raise StoreUnavailable("Redis does not answer")

    first, second, _ = await two_gateways(make_system, worker_type, GatedPair(answer).decode)
    async with grpc_channel(first) as one, grpc_channel(second) as other:
        await inference(one).GenerateUnary(grpc_request())
        await flushed(first)
        second.gateway._store._breaker.trip(SYSTEM_CLOCK.monotonic())
        resume = inference_pb2.ResumeRequest(request_id="mine", next_index=3)
        rest = [part async for part in inference(other).Resume(resume)]
        assert [token for each in rest for token in each.token_ids] == answer[3:]
        monkeypatch.setattr("gateway.named.requests.FIND_S", 0.3)
        monkeypatch.setattr(second.gateway._store, "run_patiently", refuse)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference(other).Resume(inference_pb2.ResumeRequest(request_id="unknown")).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_grpc_resume_refuses_what_is_not_there(make_system, worker_type, answer):
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    async with grpc_channel(system) as channel:
        stub = inference(channel)
        whole = await stub.GenerateUnary(grpc_request())
        assert whole.text == ANSWER_TEXT
        unnamed = await stub.GenerateUnary(grpc_request(""))
        cases = [
            (inference_pb2.ResumeRequest(request_id="mine", next_index=len(answer) + 1), "INVALID_ARGUMENT"),
            (inference_pb2.ResumeRequest(request_id="other"), "NOT_FOUND"),
            (inference_pb2.ResumeRequest(request_id="mine", tenant="t"), "NOT_FOUND"),
            (inference_pb2.ResumeRequest(request_id=unnamed.request_id), "NOT_FOUND"),
            (inference_pb2.ResumeRequest(), "INVALID_ARGUMENT"),
            (inference_pb2.ResumeRequest(request_id="no name"), "INVALID_ARGUMENT"),
        ]
        for request, code in cases:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Resume(request).read()
            assert refused.value.code().name == code
        for key in ("", "x" * 256):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GenerateUnary(grpc_request("a"), metadata=[("idempotency-key", key)])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_held_back_text_comes_once_over_grpc(make_system, worker_type, answer, tokenizer):
    num_tokens = next(n for n in range(20) if "wor" in tokenizer.decode(answer[:n]))
    text = tokenizer.decode(answer[:num_tokens])
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    async with grpc_channel(system) as channel:
        request = grpc_request(max_tokens=num_tokens, stop=["world, never"])
        parts = [part async for part in inference(channel).Generate(request)]
        assert "".join(part.text for part in parts) == text
        resume = inference_pb2.ResumeRequest(request_id="mine", next_index=num_tokens)
        rest = [part async for part in inference(channel).Resume(resume)]
        assert [(list(part.token_ids), part.finish_reason) for part in rest] == [
            ([], inference_pb2.FINISH_REASON_LENGTH)
        ]
        assert rest[0].text.startswith("wor")


async def test_official_client_takes_a_named_stream(make_system, worker_type, answer):
    import openai

    system = await make_system()
    await system.add(worker_type("decode", "decode-0", GatedPair(answer).decode))
    async with openai.AsyncOpenAI(base_url=system.base_url + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"Idempotency-Key": "k"},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER_TEXT


async def test_unread_answers_do_not_hold_up_the_end_of_a_gateway(make_system, worker_type, answer):
    pair = GatedPair(answer, 3)
    system = await make_system()
    await system.add(worker_type("decode", "decode-0", pair.decode))
    events = Events()
    reading = asyncio.create_task(read(system, events, {"x-request-id": "a"}, stream_body()))
    await system.until(lambda: len(events.tokens()) == 3)
    async with asyncio.timeout(HANG_LIMIT_S):
        await system.gateway.stop()
        with contextlib.suppress(httpx.HTTPError):
            await reading
    assert system.gateway.requests.num_running == 0
