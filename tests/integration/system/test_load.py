"""Many requests at once on the demo model: nothing is lost, mixed up or leaked."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from benchmarks.cluster import Answer, Cluster, collect, request, running_cluster, stream
from tests.waiting import HANG_LIMIT_S

PROMPTS = ("def ", "import os\n\n", "class Parser:\n    ", "# read the file and ", "return [", "try:\n    ")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(prefill=2, decode=2) as cluster:
        yield cluster


async def test_64_streams_give_what_each_gives_alone(cluster: Cluster, wait_until_idle: Any) -> None:
    async with cluster.inference() as stub:

        def one(n: int) -> Any:
            return collect(stub, request(PROMPTS[n % 6], max_tokens=24, temperature=n % 2 * 0.8, seed=n))

        together: list[Answer] = await asyncio.gather(*(one(n) for n in range(64)))
        for n in (0, 1, 2, 33, 63):
            alone = await one(n)
            assert (alone.token_ids, alone.text, alone.finish_reason) == (
                together[n].token_ids,
                together[n].text,
                together[n].finish_reason,
            )
    await asyncio.to_thread(wait_until_idle, cluster)


async def test_500_requests_a_third_cancelled(cluster: Cluster, wait_until_idle: Any) -> None:
    """A cancelled stream frees its pages in whatever phase it was; the others are whole."""
    chance = random.Random(7)
    num_cancelled = 0
    at_once = asyncio.Semaphore(32)

    async def one(n: int) -> None:
        nonlocal num_cancelled
        prompt = [chance.randrange(300) for _ in range(chance.choice((1, 17, 64, 200, 400)))]
        # One that is to be cancelled would run for seconds, so that the cancel finds it in whatever phase it is.
        max_tokens = chance.randrange(1, 24) if n % 3 else 1500
        message = request(prompt, max_tokens=max_tokens, seed=n, ignore_eos=True)
        message.service_class = "critical"  # whatever else the machine does: that is no test of refusals
        async with at_once:
            if n % 3:
                answer = await collect(stub, message)
                assert len(answer.token_ids) == message.sampling.max_tokens
            else:
                was_running = await cancelled_after(stub, message, chance.random() * 0.3)
                num_cancelled += was_running  # not in one line: `+=` would read the old value before the await

    async with cluster.inference() as stub:
        await asyncio.gather(*(one(n) for n in range(500)))
    assert num_cancelled == 167, "every third request was cancelled while it ran"
    await asyncio.to_thread(wait_until_idle, cluster)


async def cancelled_after(stub: Any, message: Any, delay_s: float) -> bool:
    """Cancel the call after `delay_s`; whether it was still running then."""
    call = stub.Generate(message, timeout=HANG_LIMIT_S)

    async def read() -> None:
        async for _ in call:
            pass

    reading = asyncio.ensure_future(read())
    done, _ = await asyncio.wait([reading], timeout=delay_s)
    call.cancel()
    await asyncio.wait([reading], timeout=HANG_LIMIT_S)
    assert reading.done(), "a cancelled call did not end"
    if not reading.cancelled() and (error := reading.exception()) is not None:
        assert isinstance(error, grpc.aio.AioRpcError), error
        assert error.code() is grpc.StatusCode.CANCELLED, error
    return not done


async def test_the_text_equals_the_decoded_tokens(cluster: Cluster) -> None:
    from protos import inference_pb2

    async with cluster.inference() as stub:
        answer = await collect(stub, request("naïve = 'Größe 東京 🙂'\n", max_tokens=40, seed=5, temperature=1.5))
        text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=answer.token_ids))
        assert answer.text == text.text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.token_ids)


async def test_a_stream_can_be_left_and_the_next_is_served(cluster: Cluster) -> None:
    async with cluster.inference() as stub:
        async for response in stream(stub, request("def ", max_tokens=50, ignore_eos=True)):
            if response.token_ids:
                break
        assert (await collect(stub, request("def ", max_tokens=3, ignore_eos=True))).token_ids
