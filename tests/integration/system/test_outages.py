"""What surrounds a request goes away: Redis frozen, emptied or killed, a worker killed. Answers stay the same."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from benchmarks.cluster import Answer, Cluster, collect, request, running_cluster, stream
from protos import inference_pb2
from services.cluster.embedded_redis import EmbeddedRedis
from tests.waiting import HANG_LIMIT_S


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(redis_server: EmbeddedRedis) -> Iterator[Cluster]:
    with running_cluster("--redis", redis_server.url, prefill=2, decode=2) as cluster:
        yield cluster


async def answers(cluster: Cluster, num_requests: int = 6) -> list[Answer]:
    async with cluster.inference() as stub:
        return await asyncio.gather(
            *(
                collect(stub, request(f"def f{n}(", max_tokens=12, seed=n), timeout_s=HANG_LIMIT_S)
                for n in range(num_requests)
            )
        )


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


async def test_redis_frozen(cluster: Cluster, redis_server: EmbeddedRedis) -> None:
    before = await answers(cluster)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        for _ in range(4):  # longer than a lease lasts
            assert tokens(await answers(cluster)) == tokens(before)
            await asyncio.sleep(1)
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert tokens(await answers(cluster)) == tokens(before)


async def test_redis_emptied(cluster: Cluster, redis_server: EmbeddedRedis) -> None:
    before = await answers(cluster)
    await flush(redis_server)
    assert tokens(await answers(cluster)) == tokens(before)
    await workers_are_back(redis_server)


async def test_redis_killed_and_started_empty(cluster: Cluster, redis_server: EmbeddedRedis) -> None:
    before = await answers(cluster)
    redis_server.kill()
    try:
        assert tokens(await answers(cluster)) == tokens(before)
    finally:
        redis_server.start()
    await workers_are_back(redis_server)
    assert tokens(await answers(cluster)) == tokens(before)


async def test_a_decode_worker_is_killed_in_the_middle(cluster: Cluster, wait_until_idle: Any) -> None:
    """The streams that it served continue elsewhere, with the tokens that they would have had."""
    messages = [request(f"class A{n}:", max_tokens=400, seed=n, ignore_eos=True) for n in range(6)]
    num_failed = failed_attempts(cluster)
    async with cluster.inference() as stub:
        undisturbed = tokens(await asyncio.gather(*(collect(stub, message) for message in messages)))
    # All of its answers may be over when the signal arrives: then nothing was shown, and another is killed.
    for _ in range(5):
        assert await with_a_decode_worker_killed(cluster, messages) == undisturbed
        await asyncio.to_thread(wait_until_whole, cluster, wait_until_idle)
        if failed_attempts(cluster) > num_failed:
            return
    pytest.fail("no stream was hit")


async def with_a_decode_worker_killed(
    cluster: Cluster, messages: list[inference_pb2.GenerateRequest]
) -> list[list[int]]:
    """The tokens of all answers; a decode worker is killed when each stream has begun."""
    received: list[list[int]] = [[] for _ in messages]
    async with cluster.inference() as stub:
        streams = [stream(stub, message) for message in messages]
        for n, responses in enumerate(streams):
            async for response in responses:
                received[n] += response.token_ids
                if response.token_ids:
                    break
        os.kill(await asyncio.to_thread(cluster.decode_pid, response.request_id), signal.SIGKILL)

        async def rest(n: int) -> None:
            async for response in streams[n]:
                if response.token_ids:
                    assert response.first_index == len(received[n])
                received[n] += response.token_ids

        await asyncio.gather(*(rest(n) for n in range(len(streams))))
    return received


def wait_until_whole(cluster: Cluster, wait_until_idle: Any) -> None:
    """Returns when nothing runs and all four workers are ready; `wait_until_idle` bounds each look."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while [worker["state"] for worker in wait_until_idle(cluster)] != ["ready"] * 4:
        assert time.monotonic() < deadline, f"a worker did not come back: {cluster.get('/cluster')}"
        time.sleep(0.05)


def failed_attempts(cluster: Cluster) -> float:
    lines = httpx.get(f"{cluster.http}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("tandem_failed_attempts_total")).split()[1])


async def flush(redis_server: EmbeddedRedis) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()


async def workers_are_back(redis_server: EmbeddedRedis) -> None:
    """Waits until all four workers have registered in an empty Redis."""
    client = redis.asyncio.Redis.from_url(redis_server.url)
    deadline = time.monotonic() + HANG_LIMIT_S
    try:
        while True:
            keys = [key async for key in client.scan_iter(match="*worker*")]
            names = b" ".join(keys)
            if all(name in names for name in (b"prefill-0", b"prefill-1", b"decode-0", b"decode-1")):
                return
            assert time.monotonic() < deadline, f"not all workers came back: {keys}"
            await asyncio.sleep(0.05)
    finally:
        await client.aclose()
