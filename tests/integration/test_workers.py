"""One prefill and one decode worker as real processes, driven by a scripted gateway: the same answer as one process."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

VOCAB_SIZE = 331
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200, 513)
Make = Callable[..., Any]


def prompt(length: int, *, seed: int = 0) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


def seeded(seed: int) -> dict[str, Any]:
    # Values that a 32-bit float holds exactly, as they travel in one.
    return {"temperature": 0.875, "top_p": 0.9375, "top_k": 40, "seed": seed, "repetition_penalty": 1.125}


GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    """`expected(prompt, **sampling)`: what one process answers."""
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        given = {"max_tokens": 16} | sampling
        return Engine(parts, chunk_tokens=512).generate([prompt_ids], Sampling(**given))[0]

    return answer


PAIRS = [
    pytest.param({"transport": "shm", "chunk_tokens": 64}, id="shm-64"),
    pytest.param({"transport": "tcp", "chunk_tokens": 512}, id="tcp-512"),
    pytest.param({"transport": "tcp", "chunk_tokens": 64, "page_sizes": (64, 16)}, id="tcp-64", marks=pytest.mark.slow),
    pytest.param(
        {"transport": "shm", "chunk_tokens": 512, "page_sizes": (16, 64)}, id="shm-512", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module", params=PAIRS)
def workers(request: pytest.FixtureRequest, start_worker: Make) -> Any:
    flags = dict(request.param)
    page_sizes = flags.pop("page_sizes", (16, 16))
    name = f"{flags['transport']}-{flags['chunk_tokens']}"
    prefill = start_worker("prefill", f"prefill-{name}", page_size=page_sizes[0], **flags)
    decode = start_worker("decode", f"decode-{name}", page_size=page_sizes[1], **flags)
    return prefill, decode


@pytest.fixture
async def pair(workers: Any, make_gateway: Make) -> AsyncIterator[Any]:
    """The gateway with a session to each, and the two processes; nothing may be held at the end."""
    prefill, decode = workers
    await prefill.until_state("ready")
    await decode.until_state("ready")
    gateway = make_gateway()
    await gateway.connect(prefill=(prefill.address, prefill.incarnation), decode=(decode.address, decode.incarnation))
    yield gateway, prefill, decode
    await prefill.until_free()
    await decode.until_free()


async def test_the_answer_is_the_one_of_a_single_process(pair: Any, expected: Make) -> None:
    gateway, prefill, _ = pair
    for sampling in (GREEDY, seeded(3)):
        for length in LENGTHS:
            salt = f"tenant {sampling['seed']}"  # so that all pages are sent
            answer = await gateway.begin(f"{length}-{sampling['seed']}", prompt(length), cache_salt=salt, **sampling)
            await answer.until("finished", "failed")
            # It and the first token before it come on another stream, so they may be the last of all events.
            await answer.until("handed_off", "failed")
            assert answer.token_ids == expected(prompt(length), **sampling), (length, sampling)
            assert answer.events.count("handed_off") == answer.events.count("decode_started") == 1
            assert answer.handed_off.num_pages == -(-length // prefill.record.page_size)
            assert answer.handed_off.exposed_s > 0


async def test_sixteen_at_once_answer_as_each_alone(pair: Any, expected: Make) -> None:
    gateway, _, _ = pair
    cases = [(prompt(5 + 37 * index % 300, seed=index), GREEDY if index % 2 else seeded(index)) for index in range(16)]
    answers = await asyncio.gather(
        *(gateway.generate(f"many-{i}", p, local=i % 5 == 4, **s) for i, (p, s) in enumerate(cases))
    )
    for (prompt_ids, sampling), answer in zip(cases, answers, strict=True):
        assert answer == expected(prompt_ids, **sampling)


async def test_a_local_prefill_gives_the_same_answer(pair: Any, expected: Make) -> None:
    gateway, _, _ = pair
    for length in (1, 16, 65, 513):
        tokens = await gateway.generate(f"local-{length}", prompt(length), local=True, **seeded(5))
        assert tokens == expected(prompt(length), **seeded(5))


@pytest.mark.parametrize("local", [True, False])
async def test_a_resumed_request_goes_on_exactly(pair: Any, expected: Make, local: bool) -> None:
    gateway, _, _ = pair
    full = expected(prompt(70), **seeded(9))
    for num_emitted in (1, 2, 15):
        answer = await gateway.begin(
            f"resumed-{num_emitted}-{local}",
            prompt(70),
            emitted=full[:num_emitted],
            attempt=2,
            local=local,
            **seeded(9),
        )
        await answer.until("finished", "failed")
        assert answer.tokens == dict(list(enumerate(full))[num_emitted:])


async def test_ends_and_stops(pair: Any, expected: Make) -> None:
    gateway, _, _ = pair
    full = expected(prompt(40), **GREEDY)
    one = await gateway.begin("one", prompt(40), max_tokens=1)
    await one.until("finished")
    assert (one.token_ids, one.reason) == (full[:1], inference_pb2.FINISH_REASON_LENGTH)
    first = next(index for index, token in enumerate(full) if index > 0 and token not in full[:index])
    stopped = await gateway.begin("stopped", prompt(40), eos=[full[first]])
    await stopped.until("finished")
    assert (stopped.token_ids, stopped.reason) == (full[: first + 1], inference_pb2.FINISH_REASON_STOP)
    at_once = await gateway.begin("at-once", prompt(40), eos=[full[0]])
    await at_once.until("finished")
    assert (at_once.token_ids, at_once.reason) == (full[:1], inference_pb2.FINISH_REASON_STOP)


async def test_a_worker_without_a_compiler_reports_the_reason_and_another_arithmetic(
    start_worker: Make, tmp_path: Path
) -> None:
    environment = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    before = f"import os; os.environ.pop('CXX', None); os.environ.update({environment})"
    worker = start_worker("decode", "decode-without-kernels", before=before)
    await worker.until_state("ready")
    assert worker.record.kernels_error == "there is no C++ compiler (g++, c++ or clang++) on the path"
    assert not worker.record.exact
    assert " arithmetic=torch-" in worker.record.identity
