"""Conversations that do not fit into the pools together: what was evicted comes back, and nobody can tell."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

VOCAB_SIZE = 331
PAGE_SIZE = 16
NUM_PAGES = 32
NUM_CHATS, NUM_TURNS = 4, 3
Make = Callable[..., Any]

# What the workers measure decides otherwise, and on a busy machine not always alike.
ALWAYS_COPY = """
from services.scheduling.copy_cost import CopyMeter
CopyMeter._is_cheaper = lambda self, num_bytes, other_s: True
"""


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    """`expected(prompt, **sampling)`: what one process without a cache of pages answers."""
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        return Engine(parts, chunk_tokens=512).generate([prompt_ids], Sampling(**sampling))[0]

    return answer


@pytest.fixture(scope="module")
def pairs(start_worker: Make) -> dict[bool, tuple[Any, Any]]:
    """A prefill and a decode worker with a host tier, and two without."""
    flags = {"page_size": PAGE_SIZE, "kv_pages": NUM_PAGES, "chunk_tokens": 64}

    def start(role: str, memory: str) -> Any:
        return start_worker(role, f"{role}-{memory.lower()}", before=ALWAYS_COPY, host_tier_memory=memory, **flags)

    return {
        is_on: (start("prefill", memory), start("decode", memory)) for is_on, memory in ((True, "4MiB"), (False, "0"))
    }


@pytest.fixture
async def gateways(pairs: dict[bool, tuple[Any, Any]], make_gateway: Make) -> AsyncIterator[dict[bool, Any]]:
    """A gateway for each pair; nothing may be held at the end."""
    yield {is_on: await make_gateway().connected_to(*pair) for is_on, pair in pairs.items()}
    for pair in pairs.values():
        for worker in pair:
            await worker.until_free()


async def talk(gateway: Any, name: str, expected: Make, *, local: bool) -> tuple[int, int]:
    """Conversations in turn, each of which is out of the pools when it continues; tokens computed and pages sent."""
    source = random.Random(7)
    said: list[list[int]] = [[] for _ in range(NUM_CHATS)]
    num_computed = num_sent = 0
    for turn in range(NUM_TURNS):
        for number, before in enumerate(said):
            prompt = before + [source.randrange(2, VOCAB_SIZE) for _ in range(150 if turn == 0 else 20)]
            how: dict[str, Any] = {"max_tokens": 8, "seed": number}
            how |= {"temperature": 0.875, "top_p": 0.9375} if number % 2 else {"temperature": 0.0}
            answer = await gateway.begin(f"{name}-{number}-{turn}", prompt, local=local, cache_salt=name, **how)
            await answer.until("finished", "failed", "refused")
            assert answer.error is None, answer.error
            assert answer.token_ids == expected(prompt, **how)
            if not local:
                await answer.until("handed_off")
                num_sent += answer.handed_off.num_pages
            num_computed += len(prompt) - answer.num_cached_tokens
            said[number] = [*prompt, *answer.token_ids]
    assert sum(map(len, said)) > PAGE_SIZE * NUM_PAGES
    return num_computed, num_sent


@pytest.mark.parametrize("local", [False, True])
async def test_the_same_answers_with_less_to_compute_and_to_send(
    gateways: dict[bool, Any], expected: Make, local: bool
) -> None:
    computed, sent = await talk(gateways[True], f"on-{local}", expected, local=local)
    computed_without, sent_without = await talk(gateways[False], f"off-{local}", expected, local=local)
    # Each turn but the first computes what is new, and up to a page more.
    limit = NUM_CHATS * (150 + (NUM_TURNS - 1) * (20 + 8 + PAGE_SIZE))
    assert computed <= limit < computed_without
    assert sent < sent_without or local


async def test_cancels_while_pages_come_and_go_leave_nothing_held_and_nothing_wrong(
    gateways: dict[bool, Any], expected: Make
) -> None:
    gateway, source = gateways[True], random.Random("cancels")
    texts = [[source.randrange(2, VOCAB_SIZE) for _ in range(240)] for _ in range(6)]
    running = asyncio.Semaphore(6)

    async def one(number: int) -> None:
        async with running:
            prompt = texts[number % 6][: source.choice((90, 170, 240))]
            begun = asyncio.ensure_future(gateway.begin(f"c{number}", prompt, local=number % 3 == 2, max_tokens=12))
            await asyncio.sleep(source.random() * 0.06)
            answer = gateway.answers[f"c{number}", 1]
            await gateway.cancel(answer)
            await begun if "admitted" in answer.events else begun.cancel()

    await asyncio.gather(*(one(number) for number in range(48)))
    for number, text in enumerate(texts):
        answer = await gateway.begin(f"after-{number}", text, local=number % 2 == 1, max_tokens=8)
        await answer.until("finished", "failed", "refused")
        assert answer.token_ids == expected(text, max_tokens=8, temperature=0.0)
