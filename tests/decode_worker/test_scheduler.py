from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import MIN_ANSWERS, AdmissionBook, AnswerLengths, Work
from services.runtime.errors import NoFreePages, Overloaded
from tests.decode_worker.pages import add, make


def book(*, num_pages: int = 100, page_size: int = 1, max_admitted: int = 100, **fields: Any) -> AdmissionBook:
    return AdmissionBook(num_pages=num_pages, page_size=page_size, max_admitted=max_admitted, **fields)


def test_at_worst_promises_never_exceed_the_pool() -> None:
    b = book(num_pages=10, is_optimistic=False)
    b.promise("a", num_prompt_tokens=2, max_tokens=4)
    with pytest.raises(NoFreePages):
        b.promise("b", num_prompt_tokens=1, max_tokens=4)
    b.promise("c", num_prompt_tokens=1, max_tokens=3)
    assert (len(b), b.promised_pages) == (2, 10)
    b.withdraw("a")
    b.withdraw("a")
    b.withdraw("b")
    b.promise("b", num_prompt_tokens=1, max_tokens=4)
    assert b.promised_pages == 9


def test_answers_count_for_half_until_it_is_known_how_long_they_get() -> None:
    b = book(num_pages=100)
    b.promise("a", num_prompt_tokens=10, max_tokens=80)
    assert b.promised_pages == 50
    b.promise("b", num_prompt_tokens=9, max_tokens=80)
    with pytest.raises(NoFreePages):
        b.promise("c", num_prompt_tokens=1, max_tokens=1)
    for _ in range(20):
        b.note_end(20)
    b.withdraw("a")
    b.promise("c", num_prompt_tokens=10, max_tokens=80)
    b.promise("d", num_prompt_tokens=1, max_tokens=8)
    assert b.promised_pages == 49 + 30 + 1 + 8


def test_who_outlasts_what_was_expected_counts_for_more() -> None:
    b = book(num_pages=100)
    b.promise("a", num_prompt_tokens=10, max_tokens=40)
    b.note_tokens("a", 19)
    assert b.promised_pages == 30
    b.note_tokens("a", 20)
    assert b.promised_pages == 10 + 31
    b.note_tokens("a", 35)
    assert b.promised_pages == 50
    b.note_tokens("a", 40)
    assert b.promised_pages == 50
    b.withdraw("a")
    b.note_tokens("a", 41)
    assert b.promised_pages == 0
    b.promise("again", num_prompt_tokens=10, max_tokens=40, num_emitted_tokens=20)
    assert b.promised_pages == 41


def test_only_what_is_as_urgent_counts() -> None:
    b = book(num_pages=100, max_admitted=2)
    b.promise("batch", num_prompt_tokens=90, max_tokens=8, service_class=4)
    b.promise("normal", num_prompt_tokens=90, max_tokens=8, service_class=2)
    with pytest.raises(NoFreePages):
        b.promise("low", num_prompt_tokens=9, max_tokens=8, service_class=3)
    with pytest.raises(Overloaded, match="2 requests"):
        b.promise("batch too", num_prompt_tokens=1, max_tokens=1, service_class=4)
    b.promise("critical", num_prompt_tokens=90, max_tokens=8, service_class=0)
    assert b.pages_by_class == (94, 0, 94, 0, 94)
    assert b.num_by_class == (1, 0, 1, 0, 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 20), st.integers(1, 20), st.integers(0, 30)),
        max_size=80,
    ),
    st.booleans(),
)
def test_the_book_balances(operations: list[tuple[int, int, int, int, int]], is_optimistic: bool) -> None:
    b = book(num_pages=12, page_size=4, max_admitted=4, is_optimistic=is_optimistic)
    held: dict[int, tuple[int, int]] = {}
    for key, service_class, prompt, max_tokens, num_tokens in operations:
        ahead = [worst for other, worst in held.values() if other <= service_class]
        if key in held:
            b.note_tokens(key, min(num_tokens, max_tokens))
            if num_tokens % 2:
                b.withdraw(key)
                del held[key]
                b.note_end(num_tokens)
        else:
            try:
                b.promise(key, num_prompt_tokens=prompt, max_tokens=max_tokens, service_class=service_class)
                held[key] = (service_class, -(-(prompt + max_tokens) // 4))
                assert len(ahead) < 4
            except Overloaded:
                assert ahead, "the only one is always let in"
                assert len(ahead) == 4 or sum(ahead) + -(-(prompt + max_tokens) // 4) > 11
        for service_class in range(5):
            worst = sum(worst for other, worst in held.values() if other == service_class)
            assert b.pages_by_class[service_class] <= worst
            if not is_optimistic:
                assert b.pages_by_class[service_class] == worst
        assert len(b) == len(held) == sum(b.num_by_class)
    for key in held:
        b.withdraw(key)
    assert b.promised_pages == len(b) == 0


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 1000))
def test_expected_lengths_are_between_one_and_the_most(lengths: list[int], max_tokens: int) -> None:
    answers = AnswerLengths()
    for length in lengths:
        answers.note(length)
    assert 1 <= answers.expected(max_tokens) <= max_tokens
    if len(lengths) >= MIN_ANSWERS:
        assert answers.expected(10_000) >= min(lengths)
        assert answers.expected(10_000) <= 2 * max(lengths) + 1


def test_a_handed_over_sequence_decodes_one_token_a_step() -> None:
    s, pages = make(max_batch=4, step_tokens=64)
    add(s, pages, "a", 10, 1, 10)
    assert s.next_step(pages) == [Work("a", 10, 1, True)]
    assert s.next_step(pages) == [Work("a", 11, 1, True)]
    s.remove("a")
    assert s.next_step(pages) == []


def test_emitted_tokens_are_replayed_one_by_one_without_sampling() -> None:
    s, pages = make(max_batch=4, step_tokens=64)
    add(s, pages, "a", 10, 3, 10)
    assert [s.next_step(pages)[0] for _ in range(4)] == [
        Work("a", 10, 1, False),
        Work("a", 11, 1, False),
        Work("a", 12, 1, True),
        Work("a", 13, 1, True),
    ]


def test_a_local_prompt_is_chunked_beside_the_batch_and_stops_at_the_replay() -> None:
    s, pages = make(max_batch=4, step_tokens=8, min_prefill_tokens=1)
    add(s, pages, "d", 5, 1, 5)
    add(s, pages, "p", 9, 2, 0)
    assert s.next_step(pages) == [Work("d", 5, 1, True), Work("p", 0, 7, False)]
    assert s.next_step(pages) == [Work("d", 6, 1, True), Work("p", 7, 2, False)]
    assert s.next_step(pages) == [Work("d", 7, 1, True), Work("p", 9, 1, False)]
    assert s.next_step(pages) == [Work("d", 8, 1, True), Work("p", 10, 1, True)]


def test_a_prompt_that_ends_samples_its_first_token() -> None:
    s, pages = make(max_batch=4, step_tokens=8, min_prefill_tokens=1)
    add(s, pages, "p", 8, 0, 0)
    assert s.next_step(pages) == [Work("p", 0, 8, True)]
    assert s.next_step(pages) == [Work("p", 8, 1, True)]


def test_a_full_batch_does_not_starve_prompts() -> None:
    s, pages = make(max_batch=9, step_tokens=4, min_prefill_tokens=2)
    for key in range(8):
        add(s, pages, key, 1, 1, 1)
    add(s, pages, "p", 4, 0, 0)
    assert Work("p", 0, 2, False) in s.next_step(pages)
    assert Work("p", 2, 2, True) in s.next_step(pages)


def test_a_small_budget_is_kept_by_prompts_that_are_alone() -> None:
    s, pages = make(max_batch=4, step_tokens=4)
    add(s, pages, "p", 9, 0, 0)
    assert [s.next_step(pages)[0].num_tokens for _ in range(3)] == [4, 4, 1]


def test_a_place_in_the_batch_is_given_in_order_when_one_is_free() -> None:
    s, pages = make(max_batch=2, step_tokens=64)
    for key in "abc":
        add(s, pages, key, 1, 1, 1)
    assert [work.key for work in s.next_step(pages)] == ["a", "b"]
    assert (s.num_running, s.num_waiting) == (2, 1)
    s.remove("a")
    assert [work.key for work in s.next_step(pages)] == ["b", "c"]
    s.remove("nobody")


SEQUENCES = st.lists(
    st.tuples(
        st.integers(1, 80),  # prompt
        st.integers(0, 6),  # emitted
        st.booleans(),  # computed here, or handed over
        st.integers(1, 8),  # new tokens until it ends
        st.integers(0, 5),  # step in which it arrives
    ),
    max_size=10,
)


@given(SEQUENCES, st.integers(1, 6), st.integers(1, 32), st.integers(1, 8))
def test_every_sequence_advances_each_step_and_ends_with_its_tokens(
    sequences: list[tuple[int, int, bool, int, int]], max_batch: int, step_tokens: int, min_prefill: int
) -> None:
    s, pages = make(max_batch=max_batch, step_tokens=step_tokens, min_prefill_tokens=min_prefill)
    position: dict[int, int] = {}
    produced: dict[int, int] = {}
    ended: set[int] = set()
    for step in range(3000):
        for key, (prompt, emitted, local, _, arrival) in enumerate(sequences):
            if arrival == step:
                emitted = emitted if local else max(emitted, 1)
                position[key] = 0 if local else prompt
                produced[key] = 0
                add(s, pages, key, prompt, emitted, position[key])
        work = s.next_step(pages)
        assert len({w.key for w in work}) == len(work) <= max_batch
        decodes = [w for w in work if w.start >= sequences[w.key][0]]
        chunks = [w for w in work if w.start < sequences[w.key][0]]
        assert all(w.num_tokens == 1 for w in decodes)
        assert sum(w.num_tokens for w in chunks) <= max(step_tokens - len(decodes), min(min_prefill, step_tokens))
        for w in work:
            prompt, emitted, local, new, _ = sequences[w.key]
            emitted = emitted if local else max(emitted, 1)
            assert w.start == position[w.key]
            position[w.key] += w.num_tokens
            assert w.start + w.num_tokens <= prompt or w.num_tokens == 1, "a chunk stops where the prompt ends"
            assert w.samples == (position[w.key] == prompt + emitted + produced[w.key])
            produced[w.key] += w.samples
            if produced[w.key] == new:
                s.remove(w.key)
                ended.add(w.key)
        live = position.keys() - ended
        assert s.num_running + s.num_waiting == len(live)
        assert s.waiting_tokens == sum(max(sequences[k][0] - position[k], 0) for k in live)
        if len(ended) == len(sequences):
            assert s.next_step(pages) == []
            return
        assert work or step < 6, "there is work and none was planned"
    raise AssertionError("some sequence never ended")


def test_the_only_one_is_admitted_whatever_is_expected() -> None:
    b = book(num_pages=10)
    b.promise("a", num_prompt_tokens=9, max_tokens=1)
    with pytest.raises(NoFreePages):
        b.promise("b", num_prompt_tokens=1, max_tokens=1)
