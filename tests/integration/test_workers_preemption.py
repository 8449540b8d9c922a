"""Real workers with far too few pages: requests of all classes preempt each other, and no answer differs."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

VOCAB_SIZE = 331
KV_PAGES = 40
Make = Callable[..., Any]

# Values that a 32-bit float holds exactly, as they travel in one.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.875, "top_p": 0.9375, "top_k": 40},
    {"temperature": 1.0, "repetition_penalty": 1.125, "frequency_penalty": 0.5},
]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[..., list[int]]:
    """`expected(prompt, **sampling)`: what one process answers."""
    parts = load_engine(tiny_model, threads=1, num_pages=256)

    def answer(prompt_ids: list[int], **sampling: Any) -> list[int]:
        return Engine(parts, chunk_tokens=512).generate([prompt_ids], Sampling(**sampling))[0]

    return answer


# A floor under the predicted time of computing makes copying the quicker way, which the tiny model's never is.
SWAP = """
from decode_worker import pages
pages.is_swap_cheaper = lambda **_: True
"""


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_in_too_little_memory_every_answer_is_whole_and_right(
    start_worker: Make, make_gateway: Make, expected: Make, way: str
) -> None:
    prefill = start_worker("prefill", f"prefill-{way}", kv_pages=200, chunk_tokens=64)
    before = {"before": SWAP} if way == "swap" else {"swap_memory": 0}
    decode = start_worker(
        "decode", f"decode-{way}", kv_pages=KV_PAGES, chunk_tokens=64, max_batch=6, max_admitted=40, **before
    )
    gateway = await make_gateway().connected_to(prefill, decode)
    source = random.Random(way)
    num_refused = 0
    cancelled: list[str] = []
    answers: list[tuple[dict[int, int], list[int], dict[str, Any]]] = []

    async def one(number: int) -> None:
        nonlocal num_refused
        prompt = [source.randrange(2, VOCAB_SIZE) for _ in range(source.randrange(1, 160))]
        how = {"max_tokens": source.randrange(60, 250), "seed": number} | WAYS[number % len(WAYS)]
        is_local, service_class = source.random() < 0.5, source.randrange(5)
        attempt = 0
        while True:
            attempt += 1
            answer = await gateway.begin(
                f"r{number}", prompt, attempt=attempt, local=is_local, service_class=service_class, **how
            )
            if "refused" not in answer.events:
                break
            num_refused += 1
            await asyncio.sleep(0.02)
        if number % 6 == 5:
            await asyncio.sleep(source.random() * 0.3)
            await gateway.cancel(answer)
            cancelled.append(answer.request_id)
            return
        await answer.until("finished", "failed")
        assert answer.error is None, answer.error
        answers.append((answer.tokens, prompt, how))

    await asyncio.gather(*(one(number) for number in range(36)))
    load = gateway.decode.load
    assert load.num_preempted > 5, "or this shows nothing"
    assert len(cancelled) == 6
    await prefill.until_free()
    await decode.until_free()
    assert Counter(gateway.decode.load.running_by_class)[0] == 5
    assert len(answers) == 30
    for tokens, prompt, how in answers:  # computed when nothing waits for this process
        assert tokens == dict(enumerate(expected(prompt, **how)))
