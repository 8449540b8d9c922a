"""Handlers under errors, garbage, cancels and readers that do not read."""

import asyncio
import gc
import types
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2, inference_pb2_grpc
from services.runtime import errors, rpc
from tests.services.runtime.serving import SECRET, SERVICE, Servicer, failure_of, raising, read_all, serving
from tests.waiting import HANG_LIMIT_S


async def test_answers_pass(stub: Any) -> None:
    assert (await stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"))).token_ids == [3]
    answers = await read_all(stub.Generate(inference_pb2.GenerateRequest()))
    assert [answer.first_index for answer in answers] == [0, 1, 2]


async def test_errors_of_the_tree_keep_their_class_over_the_wire(stub: Any, servicer: Servicer) -> None:
    cases: list[tuple[errors.TandemError, grpc.StatusCode]] = [
        (errors.InvalidRequest("bad", field="sampling.top_p"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFound("no such model"), grpc.StatusCode.NOT_FOUND),
        (errors.RateLimited("too fast", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.NoFreePages("full", retry_after_s=0.25), grpc.StatusCode.UNAVAILABLE),
        (errors.StaleIncarnation("old"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.LayoutMismatch("unequal"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ]
    for error, code in cases:
        servicer.unary = raising(error)
        failure = await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest()))
        assert failure.code() is code
        assert failure.details() == error.message
        back = rpc.error_from_rpc(failure)
        assert type(back) is type(error)
        if error.retry_after_s is not None:
            assert back.retry_after_s == error.retry_after_s


async def test_standard_clients_read_field_and_retry_time(stub: Any, servicer: Servicer) -> None:
    servicer.unary = raising(errors.InvalidRequest("must be in (0, 1]", field="sampling.top_p"))
    call = stub.Tokenize(inference_pb2.TokenizeRequest())
    await failure_of(call)
    status = await rpc_status.aio.from_call(call)
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in status.details)
    assert bad_request.field_violations[0].field == "sampling.top_p"

    servicer.unary = raising(errors.Overloaded("full", retry_after_s=1.5))
    call = stub.Tokenize(inference_pb2.TokenizeRequest())
    await failure_of(call)
    status = await rpc_status.aio.from_call(call)
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert dict(await call.trailing_metadata())["grpc-retry-pushback-ms"] == "1500"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SECRET),
        KeyError(SECRET),
        TimeoutError(SECRET),
        errors.InvariantViolated(SECRET),
        errors.ConfigError(SECRET),
    ],
)
async def test_unknown_errors_leak_nothing(error: Exception, stub: Any, servicer: Servicer) -> None:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse()
        raise error

    servicer.unary, servicer.stream = raising(error), stream
    failure = await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest()))
    streamed = await failure_of(read_all(stub.Generate(inference_pb2.GenerateRequest())))
    for seen in (failure, streamed):
        assert seen.code() is grpc.StatusCode.INTERNAL
        assert seen.details() == "internal error"
        assert "passwd" not in repr(seen) + repr(seen.trailing_metadata())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x0a\x02\xff\xfe",  # a text that is not UTF-8
        b"\x0a\x7f",  # a length beyond the end
        b"\x0a\x82\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80",  # a varint without end
        b"\xfb\x01" * 200,  # groups nested too deep
    ],
)
@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
async def test_garbage_is_the_callers_fault(garbage: bytes, method: str, channel: grpc.aio.Channel, stub: Any) -> None:
    call: Any
    if method == "Tokenize":
        call = channel.unary_unary(f"/{SERVICE}/{method}")(garbage)
    else:
        call = read_all(channel.unary_stream(f"/{SERVICE}/{method}")(garbage))
    failure = await failure_of(call)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await stub.Tokenize(inference_pb2.TokenizeRequest(text="ab"))).token_ids == [2]


async def test_garbage_reaches_no_handler_of_health_and_reflection(channel: grpc.aio.Channel) -> None:
    for method in ("/grpc.health.v1.Health/Check",):
        failure = await failure_of(channel.unary_unary(method)(b"\xff\xff"))
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_methods_are_unimplemented(channel: grpc.aio.Channel) -> None:
    failure = await failure_of(channel.unary_unary("/tandem.v1.Inference/Nothing")(b""))
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_very_long_message_still_reaches_the_caller(stub: Any, servicer: Servicer) -> None:
    servicer.unary = raising(errors.InvalidRequest("ж" * 100_000, field="ж" * 100_000))
    failure = await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest()))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failure.details() or "").startswith("жж")


async def test_a_cancelled_call_ends_its_handler(stub: Any, servicer: Servicer) -> None:
    waits = asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse()
        waits.set()
        await asyncio.sleep(60)

    servicer.stream = endless
    call = stub.Generate(inference_pb2.GenerateRequest())
    await call.read()
    # Cancelled while its first message is still being written, the handler would be closed at its yield instead.
    async with asyncio.timeout(HANG_LIMIT_S):
        await waits.wait()
    call.cancel()
    async with asyncio.timeout(HANG_LIMIT_S):
        await servicer.ended.wait()
    assert servicer.end_reason == "CancelledError"


async def test_a_caller_that_does_not_read_is_cut_off(servicer: Servicer) -> None:
    async def flood(request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            yield inference_pb2.GenerateResponse(text="x" * 100_000)

    servicer.stream = flood
    impatient = rpc.Profile(1000, 1500, 1500, 500, write_timeout_s=0.3, max_streams_per_connection=10)
    async with serving(servicer, impatient) as (_, address), rpc.make_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        async with asyncio.timeout(HANG_LIMIT_S):
            await servicer.ended.wait()
        failure = await failure_of(read_all(call))
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        assert "not read" in (failure.details() or "")


async def test_a_refused_call_leaves_no_frame_of_its_handler_to_the_collector(stub: Any, servicer: Servicer) -> None:
    """gRPC keeps the error by which a call ends, and the frames through which that went, in a cycle."""

    async def refuse(request: Any, context: Any) -> Any:
        raise errors.InvalidRequest("bad")

    servicer.unary = refuse
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * 1000)))
        await asyncio.sleep(0.05)
        gc.collect()
        frames = [each for each in gc.garbage if isinstance(each, types.FrameType)]
        assert not [frame for frame in frames if frame.f_code is refuse.__code__]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_client_that_leaves_while_it_is_sent_to_is_no_failed_handler(
    stub: Any, servicer: Servicer, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.unary = raising(grpc.aio.InternalError("Failed execute_batch"))
    await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest()))
    assert "a handler failed" not in caplog.text
