"""What earlier requests left on the workers: found where it is the same, counted in tokens, never another answer."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

VOCAB_SIZE = 331
NUM_TURNS = 10
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    """`expected(prompt, **sampling)`: what one process without a cache of pages answers."""
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        return Engine(parts, chunk_tokens=512).generate([prompt_ids], Sampling(**sampling))[0]

    return answer


PAGE_SIZES = [
    pytest.param((1, 1), id="1"),
    pytest.param((4, 4), id="4"),
    pytest.param((16, 16), id="16"),
    pytest.param((64, 16), id="64-16", marks=pytest.mark.slow),
    pytest.param((16, 64), id="16-64", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=PAGE_SIZES)
def workers(request: pytest.FixtureRequest, start_worker: Make) -> Any:
    def start(role: str, page_size: int, **flags: Any) -> Any:
        name = f"{role}-{request.param[0]}-{request.param[1]}"
        return start_worker(role, name, page_size=page_size, kv_pages=4096 // page_size, chunk_tokens=64, **flags)

    return start("prefill", request.param[0]), start("decode", request.param[1], max_batch=8, max_admitted=32)


@pytest.fixture
async def pair(workers: Any, make_gateway: Make) -> AsyncIterator[Any]:
    """A gateway and its two workers; nothing may be held at the end."""
    prefill, decode = workers
    yield await make_gateway().connected_to(prefill, decode), prefill, decode
    await prefill.until_free()
    await decode.until_free()


def sampling_of(seed: int) -> dict[str, Any]:
    # Values that a 32-bit float holds exactly, as they travel in one.
    greedy = {"temperature": 0.0, "seed": 1}
    return {"temperature": 0.875, "top_p": 0.9375, "top_k": 40, "seed": seed} if seed % 2 else greedy


async def ended(gateway: Any, request_id: str, prompt: list[int], **fields: Any) -> Any:
    answer = await gateway.begin(request_id, prompt, **fields)
    await answer.until("finished", "failed", "refused")
    assert answer.error is None, answer.error
    if not fields.get("local"):
        await answer.until("handed_off")
    return answer


@pytest.mark.parametrize("local", [False, True])
async def test_a_turn_of_a_chat_computes_what_is_new_and_sends_what_the_other_side_lacks(
    pair: Any, expected: Make, local: bool
) -> None:
    gateway, prefill, decode = pair
    prefill_size, size, source = prefill.record.page_size, decode.record.page_size, random.Random(f"chat {local}")
    said: list[int] = []
    num_prompt = num_known = num_sent = 0
    for turn in range(NUM_TURNS):
        new = [source.randrange(2, VOCAB_SIZE) for _ in range(source.randrange(1, 30))]
        prompt = said + new
        num_answer = len(said) - num_prompt if turn else 0
        how = {"max_tokens": source.randrange(2, 20)} | sampling_of(turn)
        answer = await ended(gateway, f"chat-{local}-{turn}", prompt, local=local, **how)
        assert answer.token_ids == expected(prompt, **how)
        # The last token that was sampled is not computed yet.
        held = (num_known if decode.record.exact else num_prompt) // size * size
        num_computed = len(prompt) - answer.num_cached_tokens
        if local:
            assert answer.num_cached_tokens == held
            assert num_computed <= len(new) + 1 + size - 1 or not decode.record.exact
        else:
            # The prefill worker never saw the last answer; the decode worker holds it and is not sent it again.
            assert answer.num_cached_tokens == min(num_prompt, len(prompt) - 1) // prefill_size * prefill_size
            assert num_computed <= len(new) + num_answer + prefill_size - 1
            # A page of the sender that the receiver has only a part of is sent.
            assert answer.handed_off.num_pages == -(-len(prompt) // prefill_size) - held // prefill_size
            num_sent += answer.handed_off.num_pages
        said = [*prompt, *answer.token_ids]
        num_prompt, num_known = len(prompt), len(said) - 1
    if not local and decode.record.exact:
        # Each page once, and each turn those that the receiver could not fill.
        assert num_sent <= -(-num_prompt // prefill_size) + (1 + size // prefill_size) * NUM_TURNS


async def test_conversations_at_once_wherever_their_turns_land_answer_as_one_process(pair: Any, expected: Make) -> None:
    gateway, _, _ = pair

    async def talk(number: int) -> None:
        source = random.Random(f"talk {number}")
        # Two begin alike, so that they find each other's pages while these are computed and used.
        said = [random.Random(number // 2).randrange(2, VOCAB_SIZE) for _ in range(37)]
        for turn in range(5):
            prompt = said + [source.randrange(2, VOCAB_SIZE) for _ in range(source.choice((1, 3, 16, 40)))]
            how = {"max_tokens": source.randrange(2, 24)} | sampling_of(number + turn)
            name, is_local = f"talk-{number}-{turn}", source.random() < 0.4
            answer = await ended(gateway, name, prompt, local=is_local, **how)
            full = expected(prompt, **how)
            assert answer.token_ids == full
            # As after a failover: prompt and what was emitted, to be replayed where some of it is cached already.
            emitted = full[: source.randrange(1, len(full))] if len(full) > 1 else []
            if emitted:
                again = await gateway.begin(
                    f"{name}-again", prompt, attempt=2, emitted=emitted, local=source.random() < 0.5, **how
                )
                await again.until("finished", "failed")
                assert again.tokens == dict(list(enumerate(full))[len(emitted) :])
            said = [*prompt, *full]

    await asyncio.gather(*(talk(number) for number in range(4)))


async def test_tenants_share_nothing(pair: Any, expected: Make) -> None:
    gateway, prefill, decode = pair
    prompt = [7 + i % 300 for i in range(100)]
    for local in (False, True):
        seen = []
        for number, salt in enumerate(("one", "two", "", "two")):
            answer = await ended(
                gateway, f"tenant-{local}-{number}", prompt, local=local, cache_salt=f"{salt}{local}", max_tokens=4
            )
            assert answer.token_ids == expected(prompt, max_tokens=4, temperature=0.0)
            seen.append((answer.num_cached_tokens, 0 if local else answer.handed_off.num_pages))
        size = (decode if local else prefill).record.page_size
        num_pages = 0 if local else -(-100 // size)
        num_held = 100 // decode.record.page_size * decode.record.page_size // size
        assert seen == [(0, num_pages)] * 3 + [(99 // size * size, 0 if local else num_pages - num_held)]


async def test_cancels_at_any_moment_leave_nothing_held_and_nothing_wrong_to_find(pair: Any, expected: Make) -> None:
    gateway, _, _ = pair
    source = random.Random("cancels")
    texts = [[source.randrange(2, VOCAB_SIZE) for _ in range(300)] for _ in range(3)]
    running = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with running:
            prompt = texts[number % 3][: source.choice((20, 90, 170, 300))]
            begun = asyncio.ensure_future(
                gateway.begin(f"c{number}", prompt, local=number % 4 == 3, max_tokens=source.choice((2, 30)))
            )
            await asyncio.sleep(source.random() * 0.08)
            answer = gateway.answers[f"c{number}", 1]
            await gateway.cancel(answer)
            await begun if "admitted" in answer.events else begun.cancel()

    await asyncio.gather(*(one(number) for number in range(60)))
    for number, text in enumerate(texts):
        for local in (False, True):
            answer = await ended(gateway, f"after-{number}-{local}", text, local=local, max_tokens=12)
            assert answer.token_ids == expected(text, max_tokens=12, temperature=0.0)
