"""Workers of several ranks as real processes: the answer of one process whatever their degrees, and how they end."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling
from tests.slow_rank import USE_SLOW_RANKS
from tests.waiting import HANG_LIMIT_S, until

VOCAB_SIZE = 331
LENGTHS = (1, 17, 65, 300)
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}
SEEDED: dict[str, Any] = {"temperature": 0.875, "top_p": 0.9375, "top_k": 40, "seed": 3, "repetition_penalty": 1.125}
Make = Callable[..., Any]


def prompt(length: int) -> list[int]:
    source = random.Random(f"parallel {length}")
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        return Engine(parts).generate([prompt_ids], Sampling(**({"max_tokens": 16} | sampling)))[0]

    return answer


@pytest.fixture(scope="module")
def parallel_worker(start_worker: Make) -> Make:
    """`parallel_worker("decode", tensor, pipeline=1)` is a worker of that many ranks, the same one every time."""
    started: dict[tuple[str, int, int], Any] = {}

    def get(role: str, tensor: int, pipeline: int = 1) -> Any:
        key = (role, tensor, pipeline)
        if key not in started:
            flags = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "chunk_tokens": 64}
            started[key] = start_worker(role, f"{role}-{tensor}-{pipeline}", **flags)
        return started[key]

    return get


def ranks_of(worker: Any) -> list[int]:
    """The process ids of a worker's other ranks."""
    pid = worker.process.pid
    children = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
    return [int(child) for child in " ".join(children).split()]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def check_pair(prefill: Any, decode: Any, make_gateway: Make, expected: Make) -> None:
    gateway = await make_gateway().connected_to(prefill, decode)
    for sampling in (GREEDY, SEEDED):
        for length in LENGTHS:
            name = f"{prefill.worker_id} {decode.worker_id} {length} {sampling['seed']}"
            answer = await gateway.begin(name, prompt(length), cache_salt=name, **sampling)  # all pages are sent
            await answer.until("finished", "failed")
            await answer.until("handed_off", "failed")
            assert answer.token_ids == expected(prompt(length), **sampling), name
            assert answer.handed_off.num_pages == -(-length // 16)
        local = await gateway.generate(f"local {name}", prompt(65), local=True, **sampling)
        assert local == expected(prompt(65), **sampling)
    await prefill.until_free()
    await decode.until_free()


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks"),
    [(1, 2), (2, 1), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
async def test_every_pair_of_degrees_gives_the_same_answer(
    prefill_ranks: int, decode_ranks: int, parallel_worker: Make, make_gateway: Make, expected: Make
) -> None:
    prefill, decode = parallel_worker("prefill", prefill_ranks), parallel_worker("decode", decode_ranks)
    await check_pair(prefill, decode, make_gateway, expected)
    assert (prefill.record.tensor_parallel, decode.record.tensor_parallel) == (prefill_ranks, decode_ranks)
    assert [len(ranks_of(worker)) for worker in (prefill, decode)] == [prefill_ranks - 1, decode_ranks - 1]
    assert prefill.record.layout_fingerprint == decode.record.layout_fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_cut", "decode_cut"), [((2, 1), (4, 1)), ((4, 1), (2, 1)), ((1, 2), (1, 1)), ((2, 1), (2, 2))]
)
async def test_other_pairs_too(
    prefill_cut: tuple[int, int],
    decode_cut: tuple[int, int],
    parallel_worker: Make,
    make_gateway: Make,
    expected: Make,
) -> None:
    prefill, decode = parallel_worker("prefill", *prefill_cut), parallel_worker("decode", *decode_cut)
    await check_pair(prefill, decode, make_gateway, expected)


async def test_pages_of_a_slow_pipeline_stage_arrive_complete(
    start_worker: Make, parallel_worker: Make, make_gateway: Make, expected: Make
) -> None:
    prefill = start_worker("prefill", "prefill-slow", pipeline_parallel=2, chunk_tokens=64, before=USE_SLOW_RANKS)
    gateway = await make_gateway().connected_to(prefill, parallel_worker("decode", 1))
    for length in (130, 300):
        answer = await gateway.begin(f"slow {length}", prompt(length), cache_salt=f"slow {length}", **GREEDY)
        await answer.until("finished", "failed")
        await answer.until("handed_off", "failed")
        assert answer.handed_off.num_pages == -(-length // 16)
        assert answer.token_ids == expected(prompt(length), **GREEDY)


@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2)])
async def test_a_running_answer_moves_to_another_degree(
    source: int, target: int, parallel_worker: Make, make_gateway: Make, expected: Make
) -> None:
    decodes = [parallel_worker("decode", degree) for degree in (source, target)]
    gateway = await make_gateway().connected_to(parallel_worker("prefill", 1), *decodes)
    full = expected(prompt(70), max_tokens=200, **SEEDED)
    answer = await gateway.begin(f"moves {source}", prompt(70), max_tokens=200, **SEEDED)
    await answer.until("tokens")
    await gateway.pause(answer)
    emitted = answer.token_ids
    assert 0 < len(emitted) < 200
    moved = await gateway.admit_from_decode(answer, emitted, decode=1)
    await gateway.hand_over(answer, moved)
    await moved.until("finished", "failed")
    assert moved.error is None
    assert emitted + moved.token_ids == full


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_lost_rank_is_the_end_of_its_worker(
    end: signal.Signals, start_worker: Make, parallel_worker: Make, make_gateway: Make
) -> None:
    decode = start_worker("decode", f"decode-{end.name.lower()}", tensor_parallel=2)
    gateway = await make_gateway().connected_to(parallel_worker("prefill", 1), decode)
    ranks = ranks_of(decode)
    answer = await gateway.begin("cut off", prompt(20), max_tokens=1500, local=True)
    await answer.until("tokens")
    os.kill(ranks[0], end)
    await answer.until("failed")
    assert await decode.ended() == 1
    assert not any(map(is_running, ranks))
    said = "has ended with SIGKILL" if end == signal.SIGKILL else "nothing was heard of rank 1"
    assert said in decode.log.read_text()


async def test_a_rank_that_is_killed_while_nothing_runs_ends_its_worker(start_worker: Make) -> None:
    prefill = start_worker("prefill", "prefill-idle", tensor_parallel=2)
    await prefill.until_state("ready")
    (rank,) = ranks_of(prefill)
    os.kill(rank, signal.SIGKILL)
    assert await prefill.ended() == 1


async def test_a_killed_worker_leaves_no_rank(start_worker: Make) -> None:
    prefill = start_worker("prefill", "prefill-killed", tensor_parallel=2)
    await prefill.until_state("ready")
    (rank,) = ranks_of(prefill)
    prefill.process.kill()
    await prefill.ended()
    await until(lambda: not is_running(rank))


async def test_what_cannot_be_cut_is_said_at_the_start(start_worker: Make) -> None:
    prefill = start_worker("prefill", "prefill-odd", tensor_parallel=3)
    assert await prefill.ended(timeout_s=HANG_LIMIT_S) == 2
    assert "--tensor-parallel is 3, it must divide the model's 4 attention heads" in prefill.log.read_text()
