"""Whole clusters whose workers are several processes: the same answers, also when one of them is lost in the middle."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, collect, request, running_cluster, stream
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling
from tests.waiting import HANG_LIMIT_S

SEEDED: dict[str, Any] = {"temperature": 0.875, "top_p": 0.9375, "seed": 11}


def ranks_of(worker: dict[str, Any]) -> list[int]:
    """The process ids of a worker's other ranks."""
    tasks = Path(f"/proc/{worker['pid']}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_answer_goes_on_when_a_rank_is_lost(
    end: signal.Signals, checkpoint: Any, random_ids: Any, wait_until_idle: Any
) -> None:
    """Two prompts at a time on two decode workers of two ranks; one of either worker's ranks is taken away."""
    model, num_tokens = checkpoint("llama3-gqa-tied"), 300
    prompts = [random_ids(70, seed=1), random_ids(50, seed=2)]
    parts = load_engine(model, threads=1, num_pages=128)
    expected = Engine(parts).generate(prompts, Sampling(max_tokens=num_tokens, **SEEDED))
    flags = ["--decode-tensor-parallel", "2", "--kv-memory", "32MiB", "--threads", "1"]
    with running_cluster(*flags, model=model, decode=2) as cluster:
        workers = cluster.get("/cluster")["workers"]
        assert {worker["role"]: worker["tensor_parallel"] for worker in workers} == {"prefill": 1, "decode": 2}
        assert all(worker["exact"] for worker in workers)
        assert asyncio.run(answers(cluster, prompts, num_tokens, end)) == expected
        wait_until_idle(cluster)


async def answers(cluster: Cluster, prompts: list[list[int]], num_tokens: int, end: signal.Signals) -> list[list[int]]:
    """Asks for all at once; a rank of a worker that has one of them running is taken away after the first tokens."""
    given = {"max_tokens": num_tokens, "ignore_eos": True, **SEEDED}
    async with cluster.inference() as stub:
        other = asyncio.create_task(collect(stub, request(prompts[1], **given), timeout_s=HANG_LIMIT_S))
        token_ids: list[int] = []
        has_ended = False
        async for response in stream(stub, request(prompts[0], **given), timeout_s=HANG_LIMIT_S):
            assert not response.token_ids or response.first_index == len(token_ids)
            token_ids += response.token_ids
            if len(token_ids) >= 10 and not has_ended:
                workers = (await asyncio.to_thread(cluster.get, "/cluster"))["workers"]
                busy = max((worker for worker in workers if worker["role"] == "decode"), key=lambda w: w["running"])
                os.kill(ranks_of(busy)[0], end)
                has_ended = True
        assert has_ended
        return [token_ids, (await other).token_ids]
