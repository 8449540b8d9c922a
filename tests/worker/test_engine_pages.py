import pytest

from services.engine.cache.pages import PageAllocator, PageCounts
from services.engine.steps.sequence import Sampling, Sequence
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated, NoFreePages
from worker.engine_pages import EnginePages

PAGE_SIZE, NUM_PAGES = 4, 8
SALT = b"shared by all"


class Bench:
    def __init__(self) -> None:
        self.allocator = PageAllocator(NUM_PAGES)
        self.pages = EnginePages(self.allocator, page_size=PAGE_SIZE, clock=ManualClock())

    def begin(self, key: str, prompt: list[int], *, salt: bytes = SALT) -> tuple[Sequence, int]:
        sequence = Sequence(key, prompt, sampling=Sampling(max_tokens=4))
        return sequence, self.pages.begin(sequence, salt)

    def computed(self, key: str, prompt: list[int], *, salt: bytes = SALT) -> Sequence:
        """A sequence whose prompt is computed and named."""
        sequence, _ = self.begin(key, prompt, salt=salt)
        start, sequence.num_computed_tokens = sequence.num_computed_tokens, len(prompt)
        self.pages.name(sequence, start)
        return sequence


def test_a_sequence_has_pages_from_its_beginning_until_it_is_closed() -> None:
    bench = Bench()
    sequence, num_cached = bench.begin("a", [1] * 9)
    assert (len(sequence.page_table), num_cached, sequence.num_computed_tokens) == (3, 0, 0)
    assert "a" in bench.pages
    bench.pages.close("a")
    bench.pages.close("a")
    assert "a" not in bench.pages
    assert sequence.page_table == []
    assert bench.allocator.num_free_pages == NUM_PAGES


def test_named_pages_are_found_by_the_next_of_the_same_salt_and_by_no_other() -> None:
    bench = Bench()
    prompt = list(range(9))
    first = bench.computed("a", prompt)
    second, num_cached = bench.begin("b", prompt)
    assert (num_cached, second.num_computed_tokens) == (2, 8)
    assert second.page_table[:2] == first.page_table[:2]
    assert second.page_table[2] != first.page_table[2]
    assert bench.begin("c", prompt[:4], salt=b"another")[1] == 0


def test_a_token_is_left_to_compute_where_every_page_is_there() -> None:
    bench = Bench()
    bench.computed("a", list(range(8)))
    sequence, num_cached = bench.begin("b", list(range(8)))
    assert (num_cached, sequence.num_computed_tokens) == (1, 4)


def test_pages_of_a_sequence_that_failed_are_not_found() -> None:
    bench = Bench()
    bench.pages.unname(bench.computed("a", list(range(8))))
    bench.pages.close("a")
    assert bench.begin("b", list(range(8)))[1] == 0


def test_a_sequence_for_which_pages_lack_holds_nothing_under_its_key() -> None:
    bench = Bench()
    bench.begin("a", [1] * 4 * NUM_PAGES)
    with pytest.raises(NoFreePages):
        bench.begin("b", [2])
    assert "b" not in bench.pages
    bench.pages.close("a")
    assert bench.pages.check_books()


def test_kept_pages_are_given_on_while_nobody_needed_them() -> None:
    bench = Bench()
    table = list(bench.computed("a", [1] * 9).page_table)
    kept = bench.pages.keep("a")
    assert kept is not None
    assert list(kept.page_ids) == table
    assert "a" not in bench.pages
    assert bench.pages.take("b", kept)
    assert "b" in bench.pages
    bench.pages.close("b")
    assert bench.pages.keep("b") is None


def test_kept_pages_that_others_needed_are_not_given() -> None:
    bench = Bench()
    bench.begin("a", [1] * 9)
    kept = bench.pages.keep("a")
    assert kept is not None
    bench.begin("b", [2] * 4 * NUM_PAGES)
    bench.pages.close("b")
    assert not bench.pages.take("c", kept)
    assert "c" not in bench.pages


def test_dropped_pages_are_free_at_once() -> None:
    bench = Bench()
    bench.begin("a", [1] * 9)
    kept = bench.pages.keep("a")
    assert kept is not None
    bench.pages.drop(kept)
    assert bench.allocator.num_free_pages == NUM_PAGES


def test_a_report_has_what_changed_since_the_one_before() -> None:
    bench = Bench()
    assert bench.pages.has_news, "nothing was told yet"
    bench.pages.take_report()
    assert not bench.pages.has_news
    bench.computed("a", [1] * 4)
    assert bench.pages.has_news
    counts, changes = bench.pages.take_report()
    assert counts == PageCounts(NUM_PAGES, NUM_PAGES - 1, 0, 0, 1)
    assert [len(keys) for keys in changes] == [1, 0]
    assert not bench.pages.has_news


def test_books_are_compared_once_when_nothing_is_held() -> None:
    bench = Bench()
    bench.begin("a", [1] * 4)
    assert not bench.pages.check_books(), "something is held"
    bench.pages.close("a")
    assert bench.pages.check_books()
    assert not bench.pages.check_books(), "nothing has changed since"
    bench.begin("b", [1] * 4)
    bench.pages.close("b")
    bench.allocator._num_promised = NUM_PAGES + 1
    with pytest.raises(InvariantViolated):
        bench.pages.check_books()


def test_an_engine_begins_with_cached_pages_of_another_but_with_none_that_is_held() -> None:
    bench = Bench()
    bench.computed("a", [1] * 9)
    with pytest.raises(InvariantViolated, match="left 3 pages held"):
        EnginePages(bench.allocator, page_size=PAGE_SIZE, clock=ManualClock())
    bench.pages.close("a")
    bench.pages = EnginePages(bench.allocator, page_size=PAGE_SIZE, clock=ManualClock())
    assert bench.begin("b", [1] * 9)[1] == 2, "found by what is in them"
    bench.pages.close("b")
    reserved = bench.allocator.allocate(1, state="reserved")
    with pytest.raises(InvariantViolated, match="left 1 pages held"):
        EnginePages(bench.allocator, page_size=PAGE_SIZE, clock=ManualClock())
    bench.allocator.release(reserved)


def test_a_prefix_that_arrived_is_found_and_held_by_nobody() -> None:
    bench = Bench()
    reserved = bench.pages.reserve_prefix("pull", list(range(8)), salt=SALT)
    assert (len(reserved.page_ids), reserved.num_cached_tokens) == (2, 0)
    assert bench.allocator.counts() == PageCounts(NUM_PAGES, NUM_PAGES - 2, 0, 2, 0)
    assert not bench.pages.find_prefix(list(range(8)), salt=SALT).page_ids
    bench.pages.cache_prefix("pull")
    assert bench.allocator.counts() == PageCounts(NUM_PAGES, NUM_PAGES - 2, 2, 0, 0)
    found = bench.pages.find_prefix(list(range(9)), salt=SALT)
    assert (found.page_ids, found.generations) == (reserved.page_ids, (1, 1))
    assert not bench.pages.find_prefix(list(range(9)), salt=b"another").page_ids
    assert bench.begin("a", list(range(9)))[1] == 2
    bench.pages.check_books()


def test_a_prefix_that_did_not_arrive_is_forgotten_and_one_that_is_here_is_not_awaited() -> None:
    bench = Bench()
    bench.pages.reserve_prefix("pull", list(range(8)), salt=SALT)
    bench.pages.close("pull")
    assert bench.allocator.num_free_pages == NUM_PAGES
    bench.computed("a", list(range(4)))
    reserved = bench.pages.reserve_prefix("pull", list(range(8)), salt=SALT)
    assert reserved.num_cached_tokens == 4
    # What is computed meanwhile keeps its name: the page that comes later is freed.
    bench.computed("b", list(range(8)))
    bench.pages.cache_prefix("pull")
    bench.pages.close("a")
    bench.pages.close("b")
    assert bench.allocator.counts() == PageCounts(NUM_PAGES, NUM_PAGES - 2, 2, 0, 0)
    bench.allocator.check_integrity()
