"""A decode worker's pages, with a swap space that remembers what was in a page."""

from typing import Any, cast

import pytest

from decode_worker import pages as pages_module
from decode_worker.pages import DecodePages
from services.engine.cache.pages import PageAllocator
from services.engine.steps.sequence import Sampling, Sequence
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated, RequestCancelled

PAGE_SIZE, NUM_PAGES = 4, 8
SALT = b"shared by all"


class Slots:
    """Stands for SwapSpace: page numbers in place of contents."""

    page_bytes = 1

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.held: dict[int, int] = {}
        self.loaded: list[tuple[int, int]] = []
        """Page that was stored, and page into which that was loaded."""
        self._next = 0

    @property
    def num_free_slots(self) -> int:
        return self.num_slots - len(self.held)

    def store(self, page_ids: list[int]) -> list[int]:
        slots = list(range(self._next, self._next + len(page_ids)))
        self._next += len(page_ids)
        self.held |= dict(zip(slots, page_ids, strict=True))
        return slots

    def load(self, slots: list[int], page_ids: list[int]) -> None:
        self.loaded += [(self.held[slot], page) for slot, page in zip(slots, page_ids, strict=True)]

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            del self.held[slot]


class Bench:
    def __init__(self, *, num_slots: int = 0, is_exact: bool = False) -> None:
        self.allocator = PageAllocator(NUM_PAGES)
        self.swap = Slots(num_slots)
        self.pages = DecodePages(
            self.allocator, page_size=PAGE_SIZE, clock=ManualClock(), is_exact=is_exact, swap=cast(Any, self.swap)
        )

    def started(self, key: str, prompt: list[int], emitted: list[int] | None = None) -> Sequence:
        """A sequence that is computed here, up to its last token."""
        sequence = Sequence(key, prompt, sampling=Sampling(max_tokens=20), emitted_token_ids=emitted or [])
        self.pages.start(sequence, SALT)
        self.pages.enter(key, sequence.num_tokens)
        start, sequence.num_computed_tokens = sequence.num_computed_tokens, sequence.num_tokens - 1
        self.pages.name(sequence, start)
        return sequence


@pytest.fixture
def swapping_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "is_swap_cheaper", lambda **_: True)


def test_a_reservation_is_granted_once_and_becomes_the_sequences_pages() -> None:
    bench = Bench()
    given = bench.pages.ask("a", [1] * 9, num_prompt_tokens=9, salt=SALT)
    assert bench.pages.is_asking("a")
    assert "a" not in bench.pages
    assert not given.done()
    bench.pages.reserve("a")
    assert not bench.pages.is_asking("a")
    reserved = given.result(0)
    assert (len(reserved.page_ids), reserved.num_cached_tokens) == (3, 0)
    assert {bench.allocator.state(page) for page in reserved.page_ids} == {"reserved"}
    sequence = Sequence("a", [1] * 9, sampling=Sampling(max_tokens=4))
    sequence.num_computed_tokens = 9
    bench.pages.start(sequence, SALT)
    assert tuple(sequence.page_table) == reserved.page_ids
    assert {bench.allocator.state(page) for page in reserved.page_ids} == {"used"}


def test_a_reservation_whose_key_ends_first_fails() -> None:
    bench = Bench()
    given = bench.pages.ask("a", [1] * 9, num_prompt_tokens=9, salt=SALT)
    bench.pages.close("a")
    assert isinstance(given.exception(0), RequestCancelled)
    assert bench.pages.check_books()


@pytest.mark.parametrize("is_exact", [False, True])
def test_tokens_of_an_answer_are_found_only_where_chunks_are_exact(is_exact: bool) -> None:
    bench = Bench(is_exact=is_exact)
    said = list(range(13))
    bench.started("a", said[:4], said[4:])
    other = Sequence("b", said, sampling=Sampling(max_tokens=4))
    bench.pages.start(other, SALT)
    assert bench.pages.enter("b", 13) == (12 if is_exact else 4)


def test_what_is_swapped_comes_back_into_other_pages(swapping_pays: None) -> None:
    bench = Bench(num_slots=4)
    sequence = bench.started("a", [1, 2], [3] * 8)
    before = list(sequence.page_table)
    assert bench.pages.evict("a") == 9
    assert (sequence.page_table, sequence.num_computed_tokens) == ([], 0)
    assert len(bench.swap.held) == 3
    assert bench.allocator.num_used_pages == 0
    assert bench.pages.enter("a", 10) == 9
    assert bench.swap.loaded == list(zip(before, sequence.page_table, strict=True))
    assert bench.swap.held == {}


def test_pages_that_are_found_again_are_not_copied(swapping_pays: None) -> None:
    bench = Bench(num_slots=4)
    sequence = bench.started("a", [1] * 8, [2] * 2)
    bench.pages.evict("a")
    bench.pages.enter("a", 10)
    assert len(bench.swap.loaded) == 1, "the prompt's two pages were still in the pool"
    assert sequence.num_computed_tokens == 9


def test_a_sequence_that_ends_while_it_is_swapped_gives_its_slots_back(swapping_pays: None) -> None:
    bench = Bench(num_slots=4)
    bench.started("a", [1, 2], [3] * 8)
    bench.pages.evict("a")
    bench.pages.close("a")
    assert bench.swap.held == {}
    assert bench.pages.check_books()


@pytest.mark.parametrize("num_slots", [0, 2])
def test_what_does_not_fit_is_computed_again(swapping_pays: None, num_slots: int) -> None:
    bench = Bench(num_slots=num_slots)
    bench.started("a", [1, 2], [3] * 8)
    assert bench.pages.evict("a") == 0
    assert bench.swap.held == {}


def test_pages_that_two_share_are_free_when_both_lose_them() -> None:
    bench = Bench()
    prompt = list(range(9))
    bench.started("a", prompt)
    bench.started("b", prompt)
    assert bench.pages.num_freed_pages(["a"]) == [1]
    assert bench.pages.num_freed_pages(["a", "b"]) == [1, 4]
    assert bench.pages.num_available_pages == NUM_PAGES - 4


def test_slots_that_nobody_holds_are_found_out(swapping_pays: None) -> None:
    bench = Bench(num_slots=4)
    bench.started("a", [1, 2])
    bench.pages.close("a")
    bench.swap.store([0])
    with pytest.raises(InvariantViolated, match="swap space"):
        bench.pages.check_books()
