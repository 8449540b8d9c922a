"""Both clients against a gateway that answers by script, over real sockets."""

import asyncio
import gc
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
import trustme
from tandem_client import (
    AlreadyExists,
    AsyncClient,
    Client,
    ClientClosed,
    DeadlineExceeded,
    FinishReason,
    GoneWorker,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RateLimited,
    Request,
    RequestCancelled,
    RetryPolicy,
    ServerError,
    TandemError,
    Tls,
    TokenLogprobs,
    TopLogprob,
    Trouble,
    Unauthenticated,
    Unavailable,
)

from protos import cluster_pb2, inference_pb2, inference_pb2_grpc
from services.runtime import errors
from tests.client.conftest import FakeGateway, aborts, hangs, message, says
from tests.waiting import HANG_LIMIT_S

CANCELLED = grpc.StatusCode.CANCELLED
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
USAGE = inference_pb2.Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=3, queue_s=0.25)

Connect = Callable[..., Any]
Start = Callable[[], Awaitable[FakeGateway]]


async def deltas_of(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


# What is sent, and what comes back


async def test_a_request_reaches_the_gateway_whole(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(message(0, end=STOP)))
    request = Request(
        [1, 2, 3],
        model="m",
        request_id="r-1",
        tenant="acme",
        service_class="batch",
        priority=-3,
        cache_salt="salt",
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[8],
        ignore_eos=True,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=2.0,
        logit_bias={4: -1.0},
        logprobs=0,
        prompt_logprobs=2,
    )
    await deltas_of(connect(gateway.address).stream(request))
    sampling = inference_pb2.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[8],
        ignore_eos=True,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=2.0,
        logit_bias={4: -1.0},
        logprobs=0,
        prompt_logprobs=2,
    )
    assert gateway.calls[0].request == inference_pb2.GenerateRequest(
        request_id="r-1",
        model="m",
        token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=sampling,
        priority=-3,
        tenant="acme",
        service_class="batch",
        cache_salt="salt",
    )


def test_every_field_of_a_request_is_in_the_request_class() -> None:
    sent = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    sent |= {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}
    here = set(Request.__dataclass_fields__)
    assert here - sent == {"prompt", "idempotency_key", "allow_fallback", "json_schema"}
    assert {"prompt", "sampling", "response_format"} | here >= sent - {"text", "token_ids"}


@pytest.mark.parametrize(
    "schema", [{"const": "é"}, '{"const": "é"}', MappingProxyType({"const": "é"})], ids=["mapping", "text", "proxy"]
)
async def test_a_schema_is_sent_as_text_and_the_answer_is_read(
    gateway: FakeGateway, connect: Connect, schema: Any
) -> None:
    gateway.steps.append(says(message(0, 7, text='"é"', end=STOP)))
    answer = await connect(gateway.address).generate(Request("hello", json_schema=schema))
    assert gateway.calls[0].request.response_format == inference_pb2.ResponseFormat(json_schema='{"const": "é"}')
    assert answer.json() == "é"


async def test_an_answer_that_was_cut_off_is_no_value(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(message(0, 7, text='{"a', end=LENGTH)))
    answer = await connect(gateway.address).generate(Request("hello", json_schema={}))
    assert gateway.calls[0].request.response_format.json_schema == "{}"
    with pytest.raises(ValueError, match="Unterminated"):
        answer.json()


@pytest.mark.parametrize("schema", [{"const": float("nan")}, {"const": object()}, 5], ids=["nan", "object", "number"])
async def test_a_schema_that_is_none_is_not_sent(gateway: FakeGateway, connect: Connect, schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        await connect(gateway.address).generate(Request("hello", json_schema=schema))
    assert not gateway.calls


async def test_what_is_not_given_is_not_sent(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(message(0, end=STOP)))
    await connect(gateway.address).generate(Request("hello"))
    call = gateway.calls[0]
    assert call.request == inference_pb2.GenerateRequest(text="hello", sampling=inference_pb2.SamplingParams())
    assert not {"authorization", "idempotency-key", "x-allow-fallback"} & set(call.metadata)


async def test_a_stream_gives_every_part_and_then_ends(gateway: FakeGateway, connect: Connect) -> None:
    logprobs = [inference_pb2.TokenLogprobs(logprob=-0.5, top=[inference_pb2.TopLogprob(token_id=7, logprob=-0.5)])]
    gateway.steps.append(
        says(message(0, 7, logprobs=logprobs), message(1, text="x"), message(1, 8, 9, end=LENGTH, usage=USAGE))
    )
    stream = connect(gateway.address).stream(Request("hello", logprobs=1))
    first, second, last = await deltas_of(stream)
    assert (first.text, first.token_ids, first.first_index, first.finish_reason) == ("<7>", (7,), 0, None)
    assert first.logprobs == (TokenLogprobs(-0.5, (TopLogprob(7, -0.5),)),)
    assert (second.text, second.token_ids) == ("x", ())
    assert (last.token_ids, last.first_index, last.finish_reason) == ((8, 9), 1, FinishReason.LENGTH)
    assert (last.usage.cached_tokens, last.usage.queue_s, first.usage) == (4, 0.25, None)
    assert (stream.request_id, stream.next_index) == ("server-id", 3)
    assert await deltas_of(stream) == []
    await gateway.calls[0].ended.wait()
    assert not gateway.calls[0].was_cancelled


async def test_a_whole_answer_is_one_call(gateway: FakeGateway, connect: Connect) -> None:
    async def step(seen: Any, context: Any) -> Any:
        await context.send_initial_metadata((("x-tandem-model", "gro%C3%9F"), ("x-tandem-fallback", "a -> b")))
        yield message(0, 1, 2, end=STOP, usage=USAGE)

    gateway.steps.append(step)
    answer = await connect(gateway.address).generate(Request("hello", allow_fallback=True))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("<1><2>", (1, 2), FinishReason.STOP)
    assert (answer.model, answer.fallback, answer.request_id) == ("groß", "a -> b", "server-id")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert gateway.methods == ["GenerateUnary"]
    assert gateway.calls[0].metadata["x-allow-fallback"] == "true"


async def test_a_stream_knows_its_model_from_the_first_part_on(gateway: FakeGateway, connect: Connect) -> None:
    async def step(seen: Any, context: Any) -> Any:
        await context.send_initial_metadata((("x-tandem-model", "m"),))
        yield message(0, 1)
        yield message(1, 2, end=STOP)

    gateway.steps.append(step)
    stream = connect(gateway.address).stream(Request("hello"))
    assert stream.model == ""
    await stream.__anext__()
    assert stream.model == "m"
    answer = await stream.answer()
    assert (answer.token_ids, answer.model) == ((2,), "m")


async def test_a_reason_of_a_newer_server_is_unknown(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(message(0, 1, end=99)))
    answer = await connect(gateway.address).generate(Request("hello"))
    assert answer.finish_reason is FinishReason.UNKNOWN


async def test_key_and_metadata_travel_with_every_call(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps += [says(message(0, end=STOP)), says(cluster_pb2.Topology())]
    client = connect(gateway.address, api_key="tandem-k", metadata={"x-session-id": "s"})
    await client.generate(Request("hello", idempotency_key="order 1"), metadata={"traceparent": "t", "x-bin": b"\xff"})
    await client.topology()
    sent = gateway.calls[0].metadata
    assert (sent["authorization"], sent["x-session-id"]) == ("Bearer tandem-k", "s")
    assert (sent["traceparent"], sent["x-bin"], sent["idempotency-key"]) == ("t", b"\xff", "order 1")
    assert gateway.calls[1].metadata["authorization"] == "Bearer tandem-k"


async def test_the_other_calls(gateway: FakeGateway, connect: Connect, topology: Any) -> None:
    gateway.steps += [
        says(inference_pb2.TokenizeResponse(token_ids=[1, 2])),
        says(inference_pb2.DetokenizeResponse(text="ab")),
        says(inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m", vocab_size=7)])),
        says(topology),
        says(cluster_pb2.DrainResponse(state=cluster_pb2.WORKER_STATE_DRAINING)),
    ]
    client = connect(gateway.address)
    assert await client.tokenize("ab", model="m", without_special_tokens=True) == (1, 2)
    assert await client.detokenize([1, 2], with_special_tokens=True) == "ab"
    (model,) = await client.list_models()
    assert (model.name, model.vocab_size) == ("m", 7)
    seen = await client.topology()
    (worker,) = seen.workers
    assert (worker.id, worker.role, worker.state, worker.pages.used) == ("decode-0", "decode", "ready", 2)
    assert (worker.gpu.state, worker.gpu.reasons, seen.queued, seen.running) == ("out", ("too_hot",), 3, 4)
    assert seen.troubles == (Trouble("gone", "d-1", "why", "what", 2.0),)
    assert (seen.pools, seen.workers[0].pool, seen.workers[0].region) == (("slow", "long"), "slow", "eu")
    assert seen.gone == (GoneWorker("d-1", "decode", "", "", "d:1", 1.0),)
    assert await client.drain("decode-0") == "draining"
    assert gateway.calls[0].request == inference_pb2.TokenizeRequest(model="m", text="ab", without_special_tokens=True)
    assert gateway.calls[1].request == inference_pb2.DetokenizeRequest(token_ids=[1, 2], with_special_tokens=True)
    assert gateway.calls[4].request.worker_id == "decode-0"


async def test_texts_become_vectors(gateway: FakeGateway, connect: Connect) -> None:
    vectors = [inference_pb2.Vector(values=[0.5, 1.0]), inference_pb2.Vector(values=[2.0, 3.0])]
    gateway.steps += [says(inference_pb2.EmbedResponse(vectors=vectors)), says(inference_pb2.EmbedResponse())]
    client = connect(gateway.address)
    assert await client.embed(["a", [1, 2]], model="m", dimensions=2) == ((0.5, 1.0), (2.0, 3.0))
    assert await client.embed("a") == ()
    first = gateway.calls[0].request
    assert (first.model, first.dimensions, first.inputs[0].text) == ("m", 2, "a")
    assert list(first.inputs[1].token_ids.ids) == [1, 2]
    assert [one.text for one in gateway.calls[1].request.inputs] == ["a"]
    for wrong in ([-1], ["\ud800"], [None]):
        with pytest.raises(InvalidRequest):
            await client.embed([wrong])
    assert len(gateway.calls) == 2


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: Request([-1]),
        lambda: Request([2**32]),
        lambda: Request("\ud800"),
        lambda: Request("a", max_tokens=-1),
        lambda: Request("a", seed=2**63),
        lambda: Request("a", stop="ab"),
        lambda: Request("a", idempotency_key="ß"),
        lambda: Request(None),
    ],
    ids=["negative-id", "large-id", "surrogate", "max-tokens", "seed", "stop", "key", "none"],
)
async def test_what_cannot_be_sent_is_refused_here(
    gateway: FakeGateway, connect: Connect, request_of: Callable[[], Request]
) -> None:
    with pytest.raises(InvalidRequest):
        await connect(gateway.address).generate(request_of())
    assert gateway.calls == []


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": ""},
        {"api_key": "a b"},
        {"api_key": "secret\n"},
        {"metadata": {"UPPER": "a"}},
        {"metadata": {"a": "secret\n"}},
        {"metadata": {"a-bin": "text"}},
        {"metadata": {"a": b"bytes"}},
        {"metadata": {"authorization": "Basic"}},
        {"metadata": {"grpc-timeout": "1S"}},
    ],
    ids=str,
)
async def test_bad_metadata_is_refused_and_not_shown(connect: Connect, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect("127.0.0.1:1", **options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("addresses", ["", "a:1,", " "])
async def test_empty_addresses_are_refused(connect: Connect, addresses: str) -> None:
    with pytest.raises(ValueError, match="at least one"):
        connect(*addresses.split(","))


# Errors


@pytest.mark.parametrize(
    ("raised", "expected", "code"),
    [
        (errors.NotFound("no such model"), NotFound, "NOT_FOUND"),
        (errors.AlreadyExists("taken"), AlreadyExists, "ALREADY_EXISTS"),
        (errors.Unauthenticated("who?"), Unauthenticated, "UNAUTHENTICATED"),
        (errors.PermissionDenied("no"), PermissionDenied, "PERMISSION_DENIED"),
        (errors.DeadlineExceeded("late"), DeadlineExceeded, "DEADLINE_EXCEEDED"),
        (errors.LayoutMismatch("two models"), ServerError, "FAILED_PRECONDITION"),
        (errors.RequestCancelled("cancelled"), RequestCancelled, "CANCELLED"),
        (RuntimeError("a secret"), ServerError, "INTERNAL"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
async def test_every_status_is_a_class(
    gateway: FakeGateway, connect: Connect, raised: Exception, expected: type[TandemError], code: str
) -> None:
    gateway.steps += [says(then=raised), says(then=raised)]
    client = connect(gateway.address)
    with pytest.raises(expected) as caught:
        await client.generate(Request("hello"))
    assert type(caught.value) is expected
    assert caught.value.code.name == code
    with pytest.raises(expected):
        await deltas_of(client.stream(Request("hello")))
    assert gateway.methods == ["GenerateUnary", "Generate"]


async def test_an_error_names_its_field_its_reason_and_when_to_come_back(
    gateway: FakeGateway, connect: Connect
) -> None:
    gateway.steps += [
        says(then=errors.InvalidRequest("top_p must be in (0, 1]", field="sampling.top_p")),
        says(then=errors.RateLimited("60 a minute", retry_after_s=45.5)),
    ]
    client = connect(gateway.address)
    with pytest.raises(InvalidRequest, match="top_p must be in") as caught:
        await client.generate(Request("hello"))
    assert (caught.value.field, caught.value.reason, caught.value.retry_after_s) == (
        "sampling.top_p",
        "InvalidRequest",
        None,
    )
    with pytest.raises(RateLimited, match="60 a minute") as limited:
        await client.generate(Request("hello"))
    assert (limited.value.retry_after_s, limited.value.reason) == (45.5, "RateLimited")


async def test_details_that_are_no_details_leave_the_status(gateway: FakeGateway, connect: Connect) -> None:
    metadata: Any = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    gateway.steps.append(aborts(code=grpc.StatusCode.NOT_FOUND, metadata=metadata))
    with pytest.raises(NotFound, match="a bare status") as caught:
        await connect(gateway.address).generate(Request("hello"))
    assert caught.value.reason == ""


# Retries


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("code", [UNAVAILABLE, EXHAUSTED], ids=lambda code: code.name)
async def test_before_the_first_part_it_waits_as_told_and_tries_again(
    gateway: FakeGateway, connect: Connect, call: str, code: grpc.StatusCode
) -> None:
    refusal = errors.Overloaded if code is UNAVAILABLE else errors.RateLimited
    gateway.steps += [says(then=refusal("full", retry_after_s=0.5)), says(message(0, 1, end=STOP))]
    client = connect(gateway.address)
    asked = getattr(client, call)(Request("hello"), timeout_s=5)
    answer = await (asked if call == "generate" else asked.answer())
    assert answer.token_ids == (1,)
    first, second = gateway.calls
    assert first.request == second.request
    assert second.arrived_s - first.arrived_s >= 0.49, "the second call came before the pushback was over"
    # gRPC may send a deadline that is up to 3 % later.
    assert _require(first.remaining_s) - _require(second.remaining_s) > 0.25, "the deadline began anew"


def _require(value: float | None) -> float:
    assert value is not None
    return value


@pytest.mark.parametrize("pushback", ["-1", "soon", "", "1_0"])
async def test_a_pushback_that_forbids_it_is_obeyed(gateway: FakeGateway, connect: Connect, pushback: str) -> None:
    gateway.steps.append(aborts(code=UNAVAILABLE, metadata=[("grpc-retry-pushback-ms", pushback)]))
    with pytest.raises(Unavailable, match="a bare status"):
        await connect(gateway.address).generate(Request("hello"))
    assert len(gateway.calls) == 1


async def test_a_message_that_is_too_large_is_not_sent_again(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(aborts(code=EXHAUSTED))
    with pytest.raises(RateLimited):
        await connect(gateway.address).generate(Request("hello"))
    assert len(gateway.calls) == 1


async def test_retries_stay_within_the_budget(gateway: FakeGateway, connect: Connect) -> None:
    client = connect(gateway.address, retries=RetryPolicy(budget_reserve=1, budget_ratio=0.1, max_backoff_s=0.0))
    gateway.steps += [aborts(code=UNAVAILABLE)] * 200
    for _ in range(40):
        with pytest.raises(Unavailable):
            await client.generate(Request("hello"))
    # 40 calls, and at most 10 % more, and the one in reserve.
    assert 40 < len(gateway.calls) <= 40 + 4 + 1


async def test_an_unnamed_stream_that_breaks_after_its_first_part_is_an_error(
    gateway: FakeGateway, connect: Connect
) -> None:
    gateway.steps += [aborts(message(0, 1), code=UNAVAILABLE), says(message(0, 1, end=STOP))]
    stream = connect(gateway.address).stream(Request("hello"))
    assert (await stream.__anext__()).token_ids == (1,)
    with pytest.raises(Unavailable):
        await stream.__anext__()
    assert await deltas_of(stream) == []
    assert gateway.methods == ["Generate"]


async def test_a_stream_that_ends_without_its_end_is_an_error(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(message(0, 1)))
    stream = connect(gateway.address).stream(Request("hello"))
    await stream.__anext__()
    with pytest.raises(Unavailable, match="before it was complete"):
        await stream.__anext__()


async def test_drain_is_sent_once(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps += [aborts(code=UNAVAILABLE)] * 2
    with pytest.raises(Unavailable):
        await connect(gateway.address).drain("decode-0")
    assert gateway.methods == ["Drain"]


async def test_another_gateway_answers_when_the_first_cannot_be_reached(
    gateway: FakeGateway, connect: Connect, unused_address: str
) -> None:
    gateway.steps += [says(message(0, 1, end=STOP))] * 3
    client = connect(unused_address, gateway.address, retries=RetryPolicy(budget_reserve=1, budget_ratio=0.0))
    # The budget pays for one change: after it the client stays with the gateway that answers.
    for _ in range(3):
        assert (await client.generate(Request("hello"))).token_ids == (1,)


@pytest.mark.parametrize(
    "leaving",
    [says(then=errors.Overloaded("the gateway is leaving", retry_after_s=0.05)), aborts(code=CANCELLED)],
    ids=["refused", "on its way when it stopped"],
)
async def test_another_gateway_answers_when_the_first_leaves(start: Start, connect: Connect, leaving: Any) -> None:
    first, second = await start(), await start()
    first.steps.append(leaving)
    second.steps.extend([says(message(0, 9, end=STOP))] * 3)
    client = connect(first.address, second.address)
    for _ in range(3):
        assert (await client.generate(Request("x"))).token_ids == (9,)
    assert first.methods == ["GenerateUnary"]


async def test_nobody_there_is_unavailable(connect: Connect, unused_address: str) -> None:
    with pytest.raises(Unavailable):
        await connect(unused_address, retries=RetryPolicy(max_attempts=2)).generate(Request("hello"))


# Named requests


@pytest.mark.parametrize(
    "name", [{"idempotency_key": "k"}, {"request_id": "r"}, {"idempotency_key": "k", "request_id": "r"}], ids=str
)
async def test_a_named_stream_goes_on_where_its_connection_broke(
    start: Start, connect: Connect, name: dict[str, Any]
) -> None:
    first, second = await start(), await start()
    named = name.get("request_id", "key-1")
    first.steps.append(hangs(message(0, 1, 2, request_id=named), message(2, 3, request_id=named)))
    second.steps.append(says(message(3, 4, request_id=named), message(4, 5, end=STOP, usage=USAGE, request_id=named)))
    client = connect(first.address, second.address, retries=RetryPolicy(budget_reserve=0))
    stream = client.stream(Request("hello", tenant="acme", **name))
    token_ids: list[int] = []
    async for delta in stream:
        token_ids += delta.token_ids
        if token_ids == [1, 2, 3]:
            await first.die()
    assert token_ids == [1, 2, 3, 4, 5]
    assert (first.methods, second.methods) == (["Generate"], ["Resume"])
    assert second.calls[0].request == inference_pb2.ResumeRequest(request_id=named, next_index=3, tenant="acme")


async def test_a_named_stream_that_ends_too_early_is_resumed_for_its_end(
    gateway: FakeGateway, connect: Connect
) -> None:
    gateway.steps += [says(message(0, 1)), says(message(1, end=STOP, usage=USAGE))]
    answer = await connect(gateway.address).stream(Request("hello", idempotency_key="k")).answer()
    assert (answer.token_ids, answer.finish_reason) == ((1,), FinishReason.STOP)
    assert gateway.methods == ["Generate", "Resume"]


async def test_a_keyed_answer_is_asked_for_again_under_its_key(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps += [aborts(code=UNAVAILABLE), says(message(0, 1, end=STOP))]
    answer = await connect(gateway.address).generate(Request("hello", idempotency_key="k"))
    assert answer.token_ids == (1,)
    assert gateway.methods == ["GenerateUnary"] * 2
    assert [call.metadata["idempotency-key"] for call in gateway.calls] == ["k", "k"]


async def test_an_answer_with_an_id_is_resumed_when_an_earlier_try_began_it(
    gateway: FakeGateway, connect: Connect
) -> None:
    gateway.steps += [
        aborts(code=UNAVAILABLE),
        says(then=errors.AlreadyExists("a request with the id r is running", field="request_id")),
        says(message(0, 1, request_id="r"), message(1, 2, end=STOP, request_id="r")),
    ]
    answer = await connect(gateway.address).generate(Request("hello", request_id="r"))
    assert answer.token_ids == (1, 2)
    assert gateway.methods == ["Generate", "Generate", "Resume"]
    assert gateway.calls[2].request == inference_pb2.ResumeRequest(request_id="r")


async def test_a_request_id_that_is_taken_is_an_error_at_once(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(then=errors.AlreadyExists("running", field="request_id")))
    with pytest.raises(AlreadyExists) as caught:
        await connect(gateway.address).generate(Request("hello", request_id="r"))
    assert caught.value.field == "request_id"
    assert gateway.methods == ["Generate"]


async def test_an_index_that_is_missing_is_an_error(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(hangs(message(0, 1), message(2, 3)))
    stream = connect(gateway.address).stream(Request("hello", idempotency_key="k"))
    await stream.__anext__()
    with pytest.raises(ServerError, match="token 2 where token 1 was due"):
        await stream.__anext__()
    await gateway.calls[0].ended.wait()
    assert gateway.calls[0].was_cancelled


async def test_another_process_goes_on_with_a_request(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps += [
        aborts(code=UNAVAILABLE),
        says(message(5, 6, request_id="key-1")),
        says(message(6, 7, end=STOP, request_id="key-1")),
        says(then=errors.NotFound("nothing is known of it")),
    ]
    client = connect(gateway.address)
    answer = await client.resume("key-1", 5, tenant="acme").answer()
    assert (answer.token_ids, answer.request_id) == ((6, 7), "key-1")
    assert [call.request.next_index for call in gateway.calls] == [5, 5, 6]
    with pytest.raises(NotFound):
        await client.resume("key-2", 0).answer()
    with pytest.raises(InvalidRequest):
        client.resume("key-1", -1)
    assert set(gateway.methods) == {"Resume"}


async def test_a_watch_begins_again_when_it_breaks(gateway: FakeGateway, connect: Connect, topology: Any) -> None:
    gateway.steps += [says(topology), aborts(cluster_pb2.Topology(), code=UNAVAILABLE), hangs(topology)]
    async with connect(gateway.address).watch_topology() as watch:
        assert [len((await watch.__anext__()).workers) for _ in range(3)] == [1, 0, 1]
    assert gateway.methods == ["WatchTopology"] * 3


# Deadlines


@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_the_timeout_is_the_deadline_of_the_call(gateway: FakeGateway, connect: Connect, call: str) -> None:
    gateway.steps.append(hangs())
    client = connect(gateway.address, timeout_s=50)  # real time: a deadline that the call must replace
    asked = getattr(client, call)(Request("hello"), timeout_s=2.0)
    with pytest.raises(DeadlineExceeded):
        await (asked if call == "generate" else deltas_of(asked))
    # Each side converts between a moment and a remaining time with its own clock.
    assert _require(gateway.calls[0].remaining_s) < 2.1
    await gateway.calls[0].ended.wait()


async def test_the_clients_own_timeout_holds_where_a_call_has_none(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(message(0, end=STOP)))
    await connect(gateway.address, timeout_s=50).generate(Request("hello"))  # real time: it must be sent
    # gRPC sends three digits and rounds the last one up.
    assert 40 < _require(gateway.calls[0].remaining_s) <= 50.1


async def test_no_retry_begins_that_the_deadline_would_cut_off(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(says(then=errors.Overloaded("full", retry_after_s=10)))
    with pytest.raises(Unavailable, match="full") as caught:
        await connect(gateway.address).generate(Request("hello"), timeout_s=5)
    assert caught.value.retry_after_s == 10
    assert len(gateway.calls) == 1


async def test_a_timeout_of_zero_sends_nothing(gateway: FakeGateway, connect: Connect) -> None:
    with pytest.raises(DeadlineExceeded):
        await connect(gateway.address).generate(Request("hello"), timeout_s=0)
    assert gateway.calls == []


# Cancelling and closing


async def test_leaving_a_stream_cancels_the_call(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(hangs(message(0, 1)))
    async with connect(gateway.address).stream(Request("hello")) as stream:
        await stream.__anext__()
    await gateway.calls[0].ended.wait()
    assert gateway.calls[0].was_cancelled
    assert await deltas_of(stream) == []


async def test_closing_a_stream_wakes_who_reads_it(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(hangs())
    stream = connect(gateway.address).stream(Request("hello"))
    reader = asyncio.ensure_future(stream.__anext__())
    await gateway.until_called(1)
    await stream.aclose()
    with pytest.raises(RequestCancelled, match="closed"):
        await reader
    await gateway.calls[0].ended.wait()


@pytest.mark.parametrize("waits_for", ["a whole answer", "a part", "a retry"])
async def test_closing_the_client_ends_what_waits(gateway: FakeGateway, connect: Connect, waits_for: str) -> None:
    gateway.steps.append(says(then=errors.Overloaded("full", retry_after_s=20)) if waits_for == "a retry" else hangs())
    client = connect(gateway.address)
    asked = client.stream(Request("a")).__anext__() if waits_for == "a part" else client.generate(Request("a"))
    task = asyncio.ensure_future(asked)
    call = await gateway.until_called(1)
    if waits_for == "a retry":
        await call.ended.wait()
    await client.close()
    with pytest.raises(ClientClosed):
        await task
    await call.ended.wait()
    with pytest.raises(ClientClosed):
        await client.generate(Request("b"))
    with pytest.raises(ClientClosed):
        await deltas_of(client.stream(Request("b")))
    await client.close()
    assert len(gateway.calls) == 1


async def test_cancelling_the_task_cancels_the_call(gateway: FakeGateway) -> None:
    gateway.steps += [hangs(), hangs()]
    async with AsyncClient(gateway.address) as client:
        for number, asked in enumerate((client.generate(Request("a")), client.stream(Request("a")).__anext__()), 1):
            task = asyncio.ensure_future(asked)
            call = await gateway.until_called(number)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await call.ended.wait()
            assert call.was_cancelled


async def test_a_stream_that_is_dropped_ends_by_itself(gateway: FakeGateway, connect: Connect) -> None:
    gateway.steps.append(hangs(message(0, 1)))
    stream = connect(gateway.address).stream(Request("hello"))
    await stream.__anext__()
    del stream
    gc.collect()
    async with asyncio.timeout(HANG_LIMIT_S):
        await gateway.calls[0].ended.wait()
    assert gateway.calls[0].was_cancelled


async def test_a_closed_client_leaves_no_thread(gateway: FakeGateway) -> None:
    gateway.steps += [says(message(0, end=STOP)), hangs(message(0, 1))]
    started: set[threading.Thread] = set()

    def use() -> None:
        before = set(threading.enumerate())
        with Client(gateway.address) as client:
            client.generate(Request("hello"))
            next(client.stream(Request("hello")))
            started.update(set(threading.enumerate()) - before)

    await asyncio.to_thread(use)
    # gRPC's own, which poll as long as there is a call.
    for thread in started:
        await asyncio.to_thread(thread.join, HANG_LIMIT_S)
        assert not thread.is_alive()


# Health


async def test_serving_is_what_health_says(gateway: FakeGateway, connect: Connect, unused_address: str) -> None:
    assert gateway.server is not None
    client = connect(unused_address, gateway.address)
    assert await client.is_serving() is True
    await gateway.server.set_serving(False)
    assert await client.is_serving() is False
    assert await connect(unused_address).is_serving() is False


async def test_a_server_without_health_is_an_error(connect: Connect) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(ServerError) as caught:
        await connect(f"127.0.0.1:{port}").is_serving()
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


async def test_an_address_that_never_answers_is_not_serving(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await connect(f"127.0.0.1:{silent.getsockname()[1]}").is_serving(timeout_s=0.3) is False


# TLS


@pytest.fixture
async def secure(start: Start, tmp_path: Path) -> Any:
    """A gateway that takes only clients with a certificate of its authority, for the name gateway.example."""
    authority = trustme.CA()
    own, clients = authority.issue_cert("gateway.example"), authority.issue_cert("client.example")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    clients.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in clients.cert_chain_pems))
    gateway = FakeGateway()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    chain = b"".join(blob.bytes() for blob in own.cert_chain_pems)
    credentials = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), chain)], authority.cert_pem.bytes(), require_client_auth=True
    )
    gateway.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    yield gateway
    await server.stop(None)


async def test_tls_with_a_certificate_of_the_client(secure: FakeGateway, connect: Connect, tmp_path: Path) -> None:
    secure.steps.append(says(message(0, 1, end=STOP)))
    tls = Tls(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem", server_name="gateway.example")
    assert (await connect(secure.address, tls=tls).generate(Request("hello"))).token_ids == (1,)


@pytest.mark.parametrize("lacks", ["certificate", "authority", "name", "tls"])
async def test_tls_that_does_not_fit_is_refused(
    secure: FakeGateway, connect: Connect, tmp_path: Path, lacks: str
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    cert, key = (None, None) if lacks == "certificate" else (tmp_path / "cert.pem", tmp_path / "key.pem")
    ca = tmp_path / ("other.pem" if lacks == "authority" else "ca.pem")
    tls = None if lacks == "tls" else Tls(ca, cert, key, None if lacks == "name" else "gateway.example")
    client = connect(secure.address, tls=tls, retries=RetryPolicy(max_attempts=1))
    with pytest.raises(Unavailable):
        await client.generate(Request("hello"), timeout_s=HANG_LIMIT_S)
    assert secure.calls == []


def test_half_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="together"):
        Tls(cert=tmp_path / "cert.pem")
    with pytest.raises(FileNotFoundError):
        Tls(ca=tmp_path / "missing.pem").credentials()
