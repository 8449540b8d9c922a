"""What a client is told of tokens that were not computed for it, and whose pages its request may find."""

import grpc
import pytest

from gateway.attempts import TokenLog
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import TransferFailed

PROMPT = [5, 6, 7, 8, 9]


def cached(body):
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def prefill_finding(pair, *num_cached, fails=0):
    """A prefill worker that finds so many tokens of its first, second … attempt, of which the first ones fail."""

    async def prefill(attempt):
        attempt.emit(worker_pb2.PrefillStarted(num_cached_tokens=num_cached[attempt.key[1] - 1]))
        if attempt.key[1] <= fails:
            attempt.fail(TransferFailed("the channel broke"))
            return
        attempt.tokens(0, pair.answer[:1])
        attempt.emit(worker_pb2.HandedOff(num_pages=1, num_bytes=64, exposed_s=0.001, transport="none"))
        pair.event(attempt).set()

    return prefill


@pytest.mark.parametrize(
    ("num_cached", "fails", "expected"),
    [
        ((0,), 0, 0),
        ((3,), 0, 3),
        # What the first attempt computed, the second finds; the request has computed it all the same.
        ((0, 4), 1, 0),
        ((2, 5), 1, 2),
        ((4, 0), 1, 0),
    ],
)
async def test_usage_says_what_no_attempt_computed(make_system, pair_type, worker_type, num_cached, fails, expected):
    system, pair = await make_system(), pair_type([11, 12, 1])
    await system.add(worker_type("prefill", "prefill-0", prefill_finding(pair, *num_cached, fails=fails)))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    body = (await system.complete(prompt=PROMPT, max_tokens=10)).json()
    assert (body["usage"]["prompt_tokens"], cached(body)) == (5, expected)


async def test_a_decode_worker_that_computes_the_prompt_says_it(make_system, pair_type, worker_type):
    system, pair = await make_system(), pair_type([11, 12, 1])

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.PrefillStarted(num_cached_tokens=4))
        await pair.generate(attempt, 0)

    await system.add(worker_type("decode", "decode-0", decode))
    assert cached((await system.complete(prompt=PROMPT, max_tokens=10)).json()) == 4


def test_of_an_answer_that_was_begun_elsewhere_nothing_is_known_to_be_cached():
    log = TokenLog(10, [1, 2])
    log.note_prefill(7)
    assert log.num_cached_tokens == 0


async def test_pages_are_shared_by_the_requests_of_a_tenant(make_system, pair_type):
    system = await make_system()
    await system.add_pair(pair_type([11, 12, 1]))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        for tenant in ("", "one", "two"):
            request = inference_pb2.GenerateRequest(
                request_id=f"of {tenant}".replace(" ", "-"),
                text="hello world",
                tenant=tenant,
                sampling=inference_pb2.SamplingParams(max_tokens=3, seed=1),
            )
            await inference.GenerateUnary(request)
    for worker in system.workers.values():
        salts = [attempt.spec.cache_salt for attempt in worker.attempts]
        assert salts == ["", "one", "two"], worker.worker_id
