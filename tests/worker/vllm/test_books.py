"""What vLLM's scheduler is told of transfers, in the order in which it asks."""

import pytest

from worker.vllm.books import News, Scheduled, TransferBooks

NOTHING = News((), ())


class Blocks:
    """Hears which blocks a request was given."""

    def __init__(self) -> None:
        self.given: list[tuple[tuple[int, ...], int]] = []

    def __call__(self, block_ids: tuple[int, ...], num_cached_tokens: int) -> None:
        self.given.append((block_ids, num_cached_tokens))


@pytest.fixture
def books() -> TransferBooks:
    return TransferBooks()


def test_a_request_waits_for_what_is_not_cached(books: TransferBooks) -> None:
    blocks = Blocks()
    books.await_tokens("a", 100, blocks)
    assert books.num_to_arrive("a", 64) == 36
    books.note_blocks("a", [7, 8, 9, 3], 36)
    assert blocks.given == [((7, 8, 9, 3), 64)]
    assert not books.has_news
    books.arrive("a")
    assert books.has_news
    assert books.take_news() == News(("a",), ())
    assert books.take_news() == NOTHING
    assert books.num_requests == 0


def test_a_request_that_had_its_tokens_is_computed_after_a_preemption(books: TransferBooks) -> None:
    books.await_tokens("a", 100, Blocks())
    books.note_blocks("a", [1, 2, 3, 4], 100)
    books.arrive("a")
    assert books.num_to_arrive("a", 0) == 0
    books.arrive("a")
    assert books.take_news() == News(("a",), ())


def test_of_a_request_that_has_no_blocks_vllm_hears_nothing(books: TransferBooks) -> None:
    books.await_tokens("a", 100, Blocks())
    books.arrive("a")
    assert books.take_news() == NOTHING
    assert books.num_requests == 0


def test_other_requests_are_computed_here(books: TransferBooks) -> None:
    assert books.num_to_arrive("a", 0) == 0
    assert not books.is_held("a")


@pytest.mark.parametrize("has_ended", [False, True])
def test_held_blocks_stay_until_they_are_let_go(books: TransferBooks, has_ended: bool) -> None:
    books.hold("a")
    assert books.is_held("a")
    books.let_go("a", has_ended=has_ended)
    assert not books.is_held("a")
    assert books.take_news() == (News((), ("a",)) if has_ended else NOTHING)


def test_a_step_is_taken_once_and_a_preemption_is_told_at_once(books: TransferBooks) -> None:
    told: list[str] = []
    books.on_preempted = told.append
    books.note_preempted(["b"])
    assert told == ["b"]
    books.note_scheduled(Scheduled("a", 0, 32))
    assert books.take_step() == ([Scheduled("a", 0, 32)], ["b"])
    assert books.take_step() == ([], [])
