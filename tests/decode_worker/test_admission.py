from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.admission import MIN_ANSWERS, AdmissionBook, AnswerLengths
from services.runtime.errors import NoFreePages, Overloaded


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


def test_the_only_one_is_admitted_whatever_is_expected() -> None:
    b = book(num_pages=10)
    b.promise("a", num_prompt_tokens=9, max_tokens=1)
    with pytest.raises(NoFreePages):
        b.promise("b", num_prompt_tokens=1, max_tokens=1)
