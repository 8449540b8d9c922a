"""Texts whose workers die: few workers for a text that kills, and no text that was beside one is refused."""

import asyncio
from typing import Any

from tests.gateway.vectors.conftest import Make
from tests.gateway.vectors.test_embedder import attempts, post

POISON = 13


async def test_a_text_that_kills_takes_three_workers_and_is_refused_from_then_on(
    embeds: Any, make_embedding: Make
) -> None:
    async def compute(attempt: Any) -> None:
        if POISON in attempt.spec.prompt_token_ids:
            await attempt.worker.die()
        else:
            await embeds.give_vector(attempt)

    system = await make_embedding(*[compute] * 5, max_attempts=1)
    answer = await post(system, [[5], [POISON, 6]])
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_quarantined")
    num_attempts = len(attempts(system))
    assert len({id(a.worker) for a in attempts(system) if POISON in a.spec.prompt_token_ids}) == 3
    again = await post(system, [[POISON, 6]])
    assert again.json()["error"]["code"] == "request_quarantined"
    assert len(attempts(system)) == num_attempts
    innocent = await post(system, [[5], [6, 7]])
    assert [one["embedding"] for one in innocent.json()["data"]] == [embeds.vector_of(text) for text in ([5], [6, 7])]


async def test_texts_that_were_beside_a_death_are_tried_one_by_one_and_served(
    embeds: Any, make_embedding: Make
) -> None:
    running = most = 0

    async def die_late(attempt: Any) -> None:
        if len(attempt.worker.attempts) == 4:
            await attempt.worker.die()

    async def compute(attempt: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await embeds.give_vector(attempt)

    system = await make_embedding(die_late)
    texts = [[number] for number in range(5, 9)]
    asked = asyncio.ensure_future(post(system, texts))
    await system.until(lambda: len(attempts(system)) == 4)
    await system.add(type(system.workers["prefill-0"])("prefill", "prefill-1", compute, on_embed=compute))
    answer = await asked
    assert [one["embedding"] for one in answer.json()["data"]] == [embeds.vector_of(text) for text in texts]
    assert most == 1
