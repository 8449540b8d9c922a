"""Answers that move between decode workers, and prompts that are handed over twice: the same tokens, nothing held."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling
from tests.waiting import HANG_LIMIT_S

VOCAB_SIZE = 331
MAX_TOKENS = 120
Make = Callable[..., Any]

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


def prompt(length: int, *, seed: int = 0) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


def seeded(seed: int) -> dict[str, Any]:
    # Values that a 32-bit float holds exactly, as they travel in one.
    return {
        "temperature": 0.875,
        "top_p": 0.9375,
        "seed": seed,
        "repetition_penalty": 1.125,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.125,
    }


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    """`expected(prompt, **sampling)`: what one process answers."""
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        given = {"max_tokens": MAX_TOKENS} | sampling
        return Engine(parts, chunk_tokens=512).generate([prompt_ids], Sampling(**given))[0]

    return answer


@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest, start_worker: Make) -> Any:
    flags = {"transport": request.param, "chunk_tokens": 64}
    prefill = start_worker("prefill", f"prefill-{request.param}", **flags)
    # The second one has other pages, so that the layout is translated too.
    first = start_worker("decode", f"first-{request.param}", **flags)
    second = start_worker("decode", f"second-{request.param}", page_size=32, kv_pages=128, **flags)
    return prefill, first, second


@pytest.fixture
async def trio(workers: Any, make_gateway: Make) -> AsyncIterator[Any]:
    """A gateway, a prefill and two decode workers; nothing may be held at the end."""
    yield await make_gateway().connected_to(*workers), *workers
    for worker in workers:
        await worker.until_free()


class Answered:
    """An answer over all its attempts."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.logprobs: dict[int, Any] = {}
        self.num_moves = 0

    def take(self, attempt: Any) -> None:
        assert not self.tokens.keys() & attempt.tokens.keys(), "no token comes twice"
        self.tokens |= attempt.tokens
        self.logprobs |= attempt.logprobs


async def move(gateway: Any, attempt: Any, answered: Answered, *, decode: int) -> Any:
    """Moves a running attempt, as a gateway does; returns the next one, or None where the answer ended before."""
    await gateway.pause(attempt)
    if "paused" not in attempt.events:
        return None
    answered.take(attempt)
    assert attempt.num_paused_tokens == len(answered.tokens)
    emitted = [answered.tokens[index] for index in range(len(answered.tokens))]
    moved = await gateway.admit_from_decode(attempt, emitted, decode=decode)
    assert moved.error is None, moved.error
    await gateway.hand_over(attempt, moved)
    await attempt.until("moved", "failed")
    assert attempt.error is None, attempt.error
    answered.num_moves += 1
    return moved


async def generate_moving(gateway: Any, request_id: str, source: random.Random, **fields: Any) -> Answered:
    """Generates an answer that moves to and fro, at once three times, and then after a few tokens each time."""
    answered = Answered()
    attempt = await gateway.begin(request_id, max_tokens=MAX_TOKENS, **fields)
    assert attempt.error is None, attempt.error
    decode = 0
    while True:
        # A busy machine may be done with the answer before this process has its turn again.
        num_tokens = source.choice((0, 1, 2, 7, 30)) if answered.num_moves >= 3 else 0
        async with asyncio.timeout(HANG_LIMIT_S):
            while len(attempt.tokens) < num_tokens and not {"finished", "failed"} & set(attempt.events):
                attempt.changed.clear()
                await attempt.changed.wait()
        decode = 1 - decode
        following = await move(gateway, attempt, answered, decode=decode)
        if following is None:
            break
        attempt = following
    assert attempt.error is None, attempt.error
    answered.take(attempt)
    return answered


@pytest.mark.parametrize("sampling", [GREEDY, seeded(3)], ids=["greedy", "seeded"])
async def test_an_answer_that_moves_is_the_undisturbed_one(trio: Any, expected: Make, sampling: dict[str, Any]) -> None:
    gateway = trio[0]
    source = random.Random(sampling["seed"])
    name = f"move-{sampling['seed']}"
    for length in (1, 16, 17, 300):
        alone = await gateway.begin(f"{name}-alone-{length}", prompt(length), max_tokens=120, logprobs=2, **sampling)
        await alone.until("finished", "failed")
        moving = await generate_moving(
            gateway, f"{name}-{length}", source, prompt=prompt(length), logprobs=2, local=length == 17, **sampling
        )
        assert moving.num_moves > 2
        full = expected(prompt(length), **sampling)
        assert alone.tokens == dict(enumerate(full))
        assert moving.tokens == alone.tokens
        assert moving.logprobs == alone.logprobs
        assert len(moving.logprobs) == len(full)


async def test_many_move_at_once_and_disturb_nobody(trio: Any, expected: Make) -> None:
    gateway = trio[0]
    source = random.Random(5)
    cases = [(prompt(5 + 31 * index), GREEDY if index % 2 else seeded(index)) for index in range(8)]
    moving = [generate_moving(gateway, f"m{i}", source, prompt=p, **s) for i, (p, s) in enumerate(cases)]
    staying = [gateway.generate(f"s{i}", p, max_tokens=MAX_TOKENS, **s) for i, (p, s) in enumerate(cases)]
    moved, stayed = await asyncio.gather(asyncio.gather(*moving), asyncio.gather(*staying))
    for (prompt_ids, sampling), answered, tokens in zip(cases, moved, stayed, strict=True):
        full = expected(prompt_ids, **sampling)
        assert answered.tokens == dict(enumerate(full))
        assert tokens == full


async def test_a_pause_alone_changes_nothing(trio: Any, expected: Make) -> None:
    gateway = trio[0]
    answer = await gateway.begin("pausing", prompt(40), max_tokens=MAX_TOKENS, **seeded(8))
    for _ in range(5):
        answer.events = [event for event in answer.events if event != "paused"]
        await gateway.pause(answer)
        if "finished" in answer.events:
            break
        assert answer.num_paused_tokens == len(answer.tokens)
        await gateway.unpause(answer)
    await answer.until("finished")
    assert answer.token_ids == expected(prompt(40), **seeded(8))


async def test_a_handover_that_is_cancelled_leaves_nothing(trio: Any) -> None:
    gateway, _, first, second = trio
    source = random.Random(2)
    for number in range(20):
        answer = await gateway.begin(f"ho{number}", prompt(400), max_tokens=1500, **GREEDY)
        await answer.until("decode_started")
        await gateway.pause(answer)
        moved = await gateway.admit_from_decode(answer, answer.token_ids, decode=1)
        await gateway.hand_over(answer, moved)
        await asyncio.sleep(source.random() * 0.03)
        await gateway.cancel(answer)
        await gateway.cancel(moved)
    await first.until_free()
    await second.until_free()


async def test_a_refused_move_goes_on_where_it_is(trio: Any, expected: Make) -> None:
    gateway = trio[0]
    answer = await gateway.begin("refused", prompt(33), max_tokens=MAX_TOKENS, **seeded(4))
    await answer.until("decode_started")
    await gateway.pause(answer)
    blockers = []
    for size in (1000, 33):  # first what fills most of the pool, then what is as small as what is to be moved
        for number in range(40):
            limit = 1048 if size == 1000 else MAX_TOKENS
            blocker = await gateway.begin(f"b{size}-{number}", prompt(size), max_tokens=limit, decode=1, **GREEDY)
            if blocker.events == ["refused"]:
                break
            blockers.append(blocker)
        assert blocker.events == ["refused"]
    moved = await gateway.admit_from_decode(answer, answer.token_ids, decode=1)
    assert moved.events == ["refused"], "its pages are promised to others"
    await gateway.unpause(answer)
    await answer.until("finished")
    assert answer.token_ids == expected(prompt(33), **seeded(4))
    for held in blockers:
        await gateway.cancel(held)


async def test_a_handover_that_the_other_worker_refuses_fails_and_leaves_nothing(trio: Any, expected: Make) -> None:
    gateway = trio[0]
    answer = await gateway.begin("unknown", prompt(33), max_tokens=MAX_TOKENS, **seeded(4))
    await answer.until("decode_started")
    await gateway.pause(answer)
    moved = await gateway.admit_from_decode(answer, answer.token_ids, decode=1)
    await gateway.cancel(moved)
    await gateway.hand_over(answer, moved)
    await answer.until("failed")
    emitted = answer.token_ids
    resumed = await gateway.begin("unknown", prompt(33), attempt=3, emitted=emitted, max_tokens=MAX_TOKENS, **seeded(4))
    await resumed.until("finished", "failed")
    assert emitted + resumed.token_ids == expected(prompt(33), **seeded(4))


async def test_a_prompt_is_handed_over_twice_and_computed_once(trio: Any, expected: Make) -> None:
    gateway, prefill, _, _ = trio
    for sampling in (GREEDY, seeded(6)):
        for length in (1, 16, 100, 700):
            name = f"kept-{length}-{sampling['seed']}"
            fields = {"max_tokens": 40, "logprobs": 2, **sampling}
            full = expected(prompt(length), **(sampling | {"max_tokens": 40}))
            answer = await gateway.begin(name, prompt(length), **fields)
            await answer.until("handed_off")
            await gateway.cancel(answer)
            again = await gateway.begin(name, prompt(length), attempt=2, decode=1, **fields)
            await again.until("finished", "failed")
            assert again.num_cached_tokens == length, "nothing was computed"
            assert again.token_ids == full
            assert again.logprobs[0] == answer.logprobs[0]
            # And once more, with what the second one had delivered.
            await again.until("handed_off")
            third = await gateway.begin(name, prompt(length), attempt=3, emitted=full[:5], **fields)
            await third.until("finished", "failed")
            assert third.num_cached_tokens == length
            assert third.tokens == dict(list(enumerate(full))[5:])
    await prefill.until_free()
    record = await prefill.find()
    assert record.pages_cached > 0


@pytest.mark.parametrize("when", ["paused", "handing_over"])
async def test_a_move_to_a_worker_that_dies_fails_and_the_answer_is_resumed(
    trio: Any, expected: Make, start_worker: Make, make_gateway: Make, when: str
) -> None:
    _, prefill, first, _ = trio
    victim = start_worker("decode", f"victim-{first.worker_id}-{when.replace('_', '-')}", chunk_tokens=64)
    gateway = await make_gateway().connected_to(prefill, first, victim)
    answer = await gateway.begin(f"dies-{when}", prompt(900), max_tokens=MAX_TOKENS, **seeded(9))
    await answer.until("decode_started")
    await gateway.pause(answer)
    moved = await gateway.admit_from_decode(answer, answer.token_ids, decode=1)
    if when == "paused":
        victim.process.send_signal(signal.SIGKILL)
        await victim.ended()
    await gateway.hand_over(answer, moved)
    victim.process.send_signal(signal.SIGKILL)
    await answer.until("failed", "moved")
    await first.until_free()
    emitted = answer.token_ids + [moved.tokens[index] for index in sorted(moved.tokens)]
    resumed = await gateway.begin(
        f"dies-{when}", prompt(900), attempt=3, emitted=emitted, max_tokens=MAX_TOKENS, **seeded(9)
    )
    await resumed.until("finished", "failed")
    assert emitted + resumed.token_ids == expected(prompt(900), **seeded(9))


async def test_a_resumed_answer_is_exact_wherever_it_was_cut(trio: Any, expected: Make) -> None:
    gateway = trio[0]
    for sampling in (GREEDY, seeded(12)):
        alone = await gateway.begin(f"whole-{sampling['seed']}", prompt(70), max_tokens=120, logprobs=2, **sampling)
        await alone.until("finished")
        full = expected(prompt(70), **sampling)
        assert alone.tokens == dict(enumerate(full))
        for num_emitted in (1, 2, 9, 58, 59, 63, 64, 65, 100, 119):
            for local in (True, False):
                resumed = await gateway.begin(
                    f"cut-{num_emitted}-{local}-{sampling['seed']}",
                    prompt(70),
                    attempt=2,
                    local=local,
                    emitted=full[:num_emitted],
                    max_tokens=120,
                    logprobs=2,
                    **sampling,
                )
                await resumed.until("finished", "failed")
                assert resumed.tokens == dict(list(enumerate(full))[num_emitted:])
                assert all(resumed.logprobs[index] == alone.logprobs[index] for index in resumed.tokens)
