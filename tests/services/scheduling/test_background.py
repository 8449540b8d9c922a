from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.background import SHARE, BackgroundPrompts, Chunk
from services.scheduling.chunks import ChunkScheduler
from tests.examples import examples


def test_the_first_of_the_best_class_comes_first_and_all_its_tokens_come_once() -> None:
    prompts = BackgroundPrompts(4)
    prompts.add("a", start=0, end=6, service_class=2)
    prompts.add("b", start=1, end=3, service_class=2)
    prompts.add("urgent", start=0, end=3, service_class=0)
    assert len(prompts) == 3
    assert prompts.next_chunks(100, now_s=0.0, is_busy=False) == [Chunk("urgent", 0, 3, True), Chunk("a", 0, 1, False)]
    assert prompts.next_chunks(100, now_s=0.0, is_busy=False) == [Chunk("a", 1, 4, False)]
    assert prompts.next_chunks(100, now_s=0.0, is_busy=False) == [Chunk("a", 5, 1, True), Chunk("b", 1, 2, True)]
    assert len(prompts) == 0


def test_others_keep_half_of_a_step_and_none_starves_for_a_budget_of_one() -> None:
    prompts = BackgroundPrompts(64)
    prompts.add("a", start=0, end=40, service_class=2)
    assert prompts.next_chunks(10, now_s=0.0, is_busy=True) == [Chunk("a", 0, 5, False)]
    assert prompts.next_chunks(1, now_s=0.0, is_busy=True) == [Chunk("a", 5, 1, False)]
    assert prompts.next_chunks(100, now_s=0.0, is_busy=False) == [Chunk("a", 6, 34, True)]


def test_a_prompt_that_was_cancelled_is_gone() -> None:
    prompts = BackgroundPrompts(64)
    prompts.add("a", start=0, end=40, service_class=2)
    prompts.remove("a")
    prompts.remove("a")
    assert "a" not in prompts
    assert prompts.next_chunks(100, now_s=0.0, is_busy=False) == []


@pytest.mark.parametrize("busy", ["a prompt", "sequences that decode"])
def test_reported_prompts_have_their_share_of_the_time_beside_others_and_all_of_it_alone(busy: str) -> None:
    scheduler = ChunkScheduler(chunk_tokens=8, reported_tokens=8)
    now_s, spent_s = 0.0, Counter[bool]()
    scheduler.add("reported", num_tokens=10_000, is_reported=True)
    if busy == "a prompt":
        scheduler.add("usual", num_tokens=10_000)
    for _ in range(400):
        chunks = scheduler.next_step(now_s=now_s, busy_s=None if busy == "a prompt" else 0.001)
        is_reported = any(chunk.key == "reported" for chunk in chunks)
        time_s = 0.008 if is_reported else 0.002
        now_s += time_s
        spent_s[is_reported] += time_s
        if is_reported:
            scheduler.note_reported_step(time_s, now_s=now_s)
    assert spent_s[True] / now_s == pytest.approx(SHARE, rel=0.1)
    scheduler.remove("usual")
    assert [scheduler.next_step(now_s=now_s)[0].key for _ in range(5)] == ["reported"] * 5


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(1, 30),
)
def test_every_token_of_every_prompt_is_computed_once(
    prompts: list[tuple[int, bool, int]], chunk_tokens: int, reported_tokens: int
) -> None:
    scheduler = ChunkScheduler(chunk_tokens=chunk_tokens, reported_tokens=reported_tokens)
    for key, (num_tokens, is_reported, service_class) in enumerate(prompts):
        scheduler.add(key, num_tokens=num_tokens, is_reported=is_reported, service_class=service_class)
    computed: dict[Hashable, int] = dict.fromkeys(range(len(prompts)), 0)
    now_s = 0.0
    while len(scheduler):
        chunks = scheduler.next_step(now_s=now_s)
        assert chunks, "a scheduler with work gives some"
        assert sum(chunk.num_tokens for chunk in chunks) <= chunk_tokens
        reported = [chunk for chunk in chunks if prompts[int(str(chunk.key))][1]]
        assert sum(chunk.num_tokens for chunk in reported) <= reported_tokens
        for chunk in chunks:
            assert chunk.start == computed[chunk.key]
            computed[chunk.key] += chunk.num_tokens
            assert chunk.is_last == (computed[chunk.key] == prompts[int(str(chunk.key))][0])
        now_s += 0.01
        if reported:
            scheduler.note_reported_step(0.01, now_s=now_s)
    assert list(computed.values()) == [num_tokens for num_tokens, _, _ in prompts]
