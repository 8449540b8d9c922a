"""Prefixes that a prefill worker fetches from a worker that holds them: the same answers, nothing held at any end."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

VOCAB_SIZE = 331
PAGE_SIZE = 16
Make = Callable[..., Any]


def text(length: int, seed: object) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    """`expected(prompt, **sampling)`: what one process without a cache of pages answers."""
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        return Engine(parts, chunk_tokens=512).generate([prompt_ids], Sampling(**sampling))[0]

    return answer


CHANNELS = ["shm", pytest.param("tcp", marks=pytest.mark.slow), pytest.param("cuda_ipc", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=CHANNELS)
def workers(request: pytest.FixtureRequest, start_worker: Make) -> Any:
    """A holder, the worker that asks it, and a decode worker."""
    flags = {"transport": request.param, "chunk_tokens": 64, "page_size": PAGE_SIZE}
    channel = request.param.replace("_", "-")
    if request.param == "cuda_ipc":
        flags |= {"device": "cuda"}
    return (
        start_worker("prefill", f"holder-{channel}", **flags),
        start_worker("prefill", f"asker-{channel}", **flags),
        start_worker("decode", f"decode-{channel}", max_batch=8, max_admitted=32, kv_pages=1024, **flags),
    )


@pytest.fixture
async def at(workers: Any, make_gateway: Make) -> AsyncIterator[Any]:
    """A gateway in front of the holder, one in front of the asker, and the workers; nothing may be held at the end."""
    holder, asker, decode = workers
    first = await make_gateway().connected_to(holder, decode)
    yield first, await make_gateway().connected_to(asker, decode), holder, decode
    for worker in workers:
        await worker.until_free()


async def ended(gateway: Any, request_id: str, prompt: list[int], **fields: Any) -> Any:
    answer = await gateway.begin(request_id, prompt, **fields)
    await answer.until("finished", "failed", "refused")
    assert answer.error is None, answer.error
    return answer


async def test_what_a_prefill_worker_holds_is_fetched_and_not_computed(at: Any, expected: Make) -> None:
    first, second, holder, _ = at
    prompt = text(900, "prefill")
    await ended(first, "p-1", prompt[:800], max_tokens=2)
    answer = await ended(second, "p-2", prompt, pull=(holder, 800), max_tokens=20)
    assert answer.token_ids == expected(prompt, max_tokens=20, temperature=0.0)
    assert answer.started.num_pulled_tokens == answer.num_cached_tokens == 800
    assert answer.started.pulled_bytes > 0
    # It is in the asker's cache from now on, and costs nothing to fetch again.
    again = await ended(second, "p-3", prompt, pull=(holder, 800), max_tokens=20)
    assert again.token_ids == answer.token_ids
    assert again.started.pulled_bytes == 0


async def test_the_next_turn_of_a_conversation_is_fetched_from_the_decode_worker(at: Any, expected: Make) -> None:
    first, second, _, decode = at
    prompt = text(300, "turn")
    said = await ended(first, "t-1", prompt, max_tokens=60)
    assert len(said.token_ids) == 60
    turn = [*prompt, *said.token_ids, *text(30, "next")]
    answer = await ended(second, "t-2", turn, pull=(decode, 359), max_tokens=20)
    assert answer.token_ids == expected(turn, max_tokens=20, temperature=0.0)
    assert answer.started.num_pulled_tokens == (359 if decode.record.exact else 300) // PAGE_SIZE * PAGE_SIZE


async def test_a_tenant_gets_no_page_of_another_one(at: Any, expected: Make) -> None:
    first, second, holder, _ = at
    prompt = text(400, "tenant")
    await ended(first, "s-1", prompt, max_tokens=2, cache_salt="one")
    answer = await ended(second, "s-2", prompt, pull=(holder, 384), max_tokens=4, cache_salt="other")
    assert (answer.started.num_pulled_tokens, answer.num_cached_tokens) == (0, 0)
    assert answer.token_ids == expected(prompt, max_tokens=4, temperature=0.0)
    answer = await ended(second, "s-3", prompt, pull=(holder, 384), max_tokens=4, cache_salt="one")
    assert answer.started.num_pulled_tokens == 384


async def test_a_holder_that_has_less_gives_what_it_has_and_a_prompt_is_never_fetched_whole(
    at: Any, expected: Make
) -> None:
    first, second, holder, _ = at
    prompt = text(640, "less")
    await ended(first, "l-1", prompt[:100], max_tokens=2)
    answer = await ended(second, "l-2", prompt, pull=(holder, 640), max_tokens=4)
    assert answer.started.num_pulled_tokens == 96
    assert answer.token_ids == expected(prompt, max_tokens=4, temperature=0.0)
    whole = text(640, "whole")
    await ended(first, "l-3", whole, max_tokens=2)
    answer = await ended(second, "l-4", whole, pull=(holder, 640), max_tokens=4)
    assert answer.started.num_pulled_tokens == 624
    assert answer.token_ids == expected(whole, max_tokens=4, temperature=0.0)


async def test_a_holder_that_is_another_one_by_now_or_silent_costs_a_computation(
    at: Any, expected: Make, start_worker: Make
) -> None:
    first, second, holder, _ = at
    prompt = text(200, "gone")
    await ended(first, "g-1", prompt, max_tokens=2)
    life, holder.record = holder.record, holder.record.__class__(**{**_fields(holder.record), "incarnation": "0" * 32})
    try:
        answer = await ended(second, "g-2", prompt, pull=(holder, 192), max_tokens=4)
    finally:
        holder.record = life
    assert answer.started.num_pulled_tokens == 0
    assert answer.token_ids == expected(prompt, max_tokens=4, temperature=0.0)
    holder.process.send_signal(signal.SIGSTOP)
    try:
        # One more than is looked for: the timers of the loop are whole milliseconds, and one may end early.
        answer = await ended(second, "g-3", text(200, "silent"), pull=(holder, 192), limit_ms=201, max_tokens=4)
    finally:
        holder.process.send_signal(signal.SIGCONT)
    assert answer.started.num_pulled_tokens == 0
    assert 0.2 <= answer.started.pull_s < 5
    assert answer.token_ids == expected(text(200, "silent"), max_tokens=4, temperature=0.0)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


async def test_cancels_at_any_moment_leave_nothing_held_and_nothing_wrong_to_find(at: Any, expected: Make) -> None:
    first, second, holder, _ = at
    source = random.Random("cancels")
    texts = [text(600, number) for number in range(3)]
    for number, prompt in enumerate(texts):
        await ended(first, f"c-{number}", prompt, max_tokens=2)
    running = asyncio.Semaphore(6)

    async def one(number: int) -> None:
        async with running:
            prompt = [*texts[number % 3][: source.choice((100, 300, 600))], *text(20, number)]
            begun = asyncio.ensure_future(
                second.begin(f"c-cut-{number}", prompt, pull=(holder, 592), max_tokens=source.choice((2, 30)))
            )
            await asyncio.sleep(source.random() * 0.05)
            answer = second.answers[f"c-cut-{number}", 1]
            await second.cancel(answer)
            await begun if "admitted" in answer.events else begun.cancel()

    await asyncio.gather(*(one(number) for number in range(60)))
    for number, prompt in enumerate(texts):
        answer = await ended(second, f"c-after-{number}", prompt, pull=(holder, 592), max_tokens=12)
        assert answer.token_ids == expected(prompt, max_tokens=12, temperature=0.0)


async def test_a_holder_that_dies_while_it_gives_costs_computations_and_no_answer(
    at: Any, expected: Make, start_worker: Make, make_gateway: Make, workers: Any
) -> None:
    _, second, _, decode = at
    doomed = start_worker("prefill", f"doomed-{workers[0].worker_id}", chunk_tokens=64, page_size=PAGE_SIZE)
    first = await make_gateway().connected_to(doomed, decode)
    texts = [text(500, f"doomed {number}") for number in range(6)]
    for number, prompt in enumerate(texts):
        await ended(first, f"d-{number}", prompt, max_tokens=2)

    async def one(number: int) -> Any:
        return await ended(second, f"d-after-{number}", texts[number % 6], pull=(doomed, 496), max_tokens=4)

    answers = [asyncio.create_task(one(number)) for number in range(12)]
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    doomed.process.kill()
    for number, answer in enumerate(await asyncio.gather(*answers)):
        assert answer.token_ids == expected(texts[number % 6], max_tokens=4, temperature=0.0)
    last = await ended(second, "d-last", text(300, "last"), pull=(doomed, 288), max_tokens=4)
    assert last.started.num_pulled_tokens == 0
