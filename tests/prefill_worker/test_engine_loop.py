import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.engine_loop import ComputedChunk, PrefillLoop, StepReport
from services.engine.pages import PageAllocator
from services.engine.sequence import Sampling, Sequence
from services.engine.step import NonFiniteLogits, SampledToken, StepPlan, StepResult
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated, NoFreePages

PAGE_SIZE = 4


class SumRunner:
    """Stands for a model: the next token is the sum of all so far. Sees that no token is computed without a page."""

    def __init__(self) -> None:
        self.broken: set[object] = set()
        self.num_steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        outcomes: list[SampledToken | NonFiniteLogits | None] = []
        for item in plan.items:
            end = item.sequence.num_computed_tokens + item.num_scheduled_tokens
            assert len(item.sequence.page_table) * PAGE_SIZE >= end
            if item.sequence.sequence_id in self.broken:
                outcomes.append(NonFiniteLogits("NaN"))
            else:
                outcomes.append(SampledToken(sum(item.sequence.token_ids)) if item.is_sampled else None)
        return StepResult(outcomes)


class Bench:
    def __init__(self, *, num_pages: int = 64, chunk_tokens: int = 8) -> None:
        self.allocator = PageAllocator(num_pages)
        self.runner = SumRunner()
        self.reports: list[StepReport] = []
        self.loop = PrefillLoop(
            runner=self.runner,
            allocator=self.allocator,
            page_size=PAGE_SIZE,
            chunk_tokens=chunk_tokens,
            clock=ManualClock(),
            on_report=self.reports.append,
        )

    def begin(self, key: object, prompt: list[int], emitted: list[int] | None = None) -> Sequence:
        sequence = Sequence(key, prompt, sampling=Sampling(max_tokens=4), emitted_token_ids=emitted or [])
        self.loop.begin(sequence)
        return sequence

    def run(self) -> None:
        while self.loop.step():
            pass
        self.loop.step()

    def chunks(self, key: object) -> list[ComputedChunk]:
        return [chunk for report in self.reports for chunk in report.chunks if chunk.key == key]


def test_complete_pages_are_named_once_and_the_partial_one_comes_last() -> None:
    bench = Bench(chunk_tokens=6)
    sequence = bench.begin("a", list(range(15)))
    pages = list(sequence.page_table)
    bench.run()
    chunks = bench.chunks("a")
    assert [(c.start, c.num_tokens, c.first_page, len(c.page_ids)) for c in chunks] == [
        (0, 6, 0, 1),
        (6, 6, 1, 2),
        (12, 3, 3, 1),
    ]
    assert [page for c in chunks for page in c.page_ids] == pages
    assert [c.is_last for c in chunks] == [False, False, True]
    assert chunks[-1].outcome == SampledToken(sum(range(15)))


def test_emitted_tokens_are_not_computed_and_nothing_is_sampled() -> None:
    bench = Bench()
    bench.begin("a", [1, 2, 3], emitted=[4, 5])
    bench.run()
    assert [(c.num_tokens, c.is_last, c.outcome) for c in bench.chunks("a")] == [(3, True, None)]


def test_pages_stay_until_release_and_the_idle_counts_are_reported() -> None:
    bench = Bench(num_pages=10)
    bench.begin("a", list(range(8)))
    bench.run()
    assert bench.reports[-1].pages.used == 2
    bench.loop.release("a")
    bench.loop.release("a")
    assert not bench.loop.step()
    assert bench.reports[-1].pages == (10, 10, 0, 0, 0)
    num_reports = len(bench.reports)
    bench.loop.step()
    assert len(bench.reports) == num_reports, "nothing changed, nothing is said"


def test_a_broken_prompt_fails_alone() -> None:
    bench = Bench(chunk_tokens=16)
    bench.runner.broken.add("bad")
    bench.begin("good", [1, 2])
    bench.begin("bad", [3, 4])
    bench.run()
    assert bench.chunks("good")[0].outcome == SampledToken(3)
    assert isinstance(bench.chunks("bad")[0].outcome, NonFiniteLogits)


def test_a_prompt_that_does_not_fit_takes_nothing() -> None:
    bench = Bench(num_pages=2)
    with pytest.raises(NoFreePages):
        bench.begin("a", list(range(9)))
    bench.loop.release("a")
    assert bench.allocator.num_free_pages == 2
    assert not bench.loop.step()


def test_wrong_books_are_noticed_when_idle() -> None:
    bench = Bench()
    bench.begin("a", [1])
    bench.run()
    bench.allocator._num_in_state[0] -= 1
    bench.loop.release("a")
    with pytest.raises(InvariantViolated):
        bench.loop.step()


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk_tokens=st.integers(1, 24),
    releases=st.dictionaries(st.integers(0, 7), st.integers(0, 12), max_size=4),
)
def test_any_mix_and_any_release_gives_the_same_tokens_and_leaves_no_page(
    prompts: list[int], chunk_tokens: int, releases: dict[int, int]
) -> None:
    bench = Bench(num_pages=120, chunk_tokens=chunk_tokens)
    tables = {}
    for key, length in enumerate(prompts):
        tables[key] = list(bench.begin(key, list(range(key, key + length))).page_table)
    for step in range(sum(prompts) + 20):
        for key in [k for k, when in releases.items() if when == step]:
            bench.loop.release(key)
        bench.loop.step()
    for key, length in enumerate(prompts):
        chunks = bench.chunks(key)
        sent = [page for c in chunks for page in c.page_ids]
        if key not in releases or (chunks and chunks[-1].is_last):
            assert sent == tables[key]
            assert chunks[-1].outcome == SampledToken(sum(range(key, key + length)))
        else:
            assert sent == tables[key][: len(sent)]
            assert all(not c.is_last for c in chunks)
        bench.loop.release(key)
    bench.loop.step()
    assert bench.reports[-1].pages == (120, 120, 0, 0, 0)


def test_kept_pages_serve_one_taking_and_come_back_in_order() -> None:
    bench = Bench()
    pages = tuple(bench.begin("a", [1] * 10).page_table)
    bench.run()
    bench.loop.release("a", is_kept=True)
    bench.loop.step()
    assert bench.reports[-1].pages == (64, 61, 3, 0, 0)
    assert bench.loop.take_kept("a", "b") == pages
    assert bench.loop.take_kept("a", "c") is None
    bench.loop.step()
    assert bench.reports[-1].pages == (64, 61, 0, 0, 3)
    bench.loop.release("b")
    bench.run()
    assert bench.reports[-1].pages == (64, 64, 0, 0, 0)
    assert bench.runner.num_steps == 2


def test_of_kept_pages_that_lost_one_the_rest_is_freed() -> None:
    bench = Bench(num_pages=4)
    bench.begin("a", [1] * 10)
    bench.run()
    bench.loop.release("a", is_kept=True)
    bench.begin("b", [1] * 8)
    assert bench.allocator.counts() == (4, 0, 2, 0, 2)
    assert bench.loop.take_kept("a", "c") is None
    assert bench.allocator.counts() == (4, 2, 0, 0, 2)
    bench.loop.drop_kept("a")
    bench.run()
    bench.loop.release("b", is_kept=True)
    bench.loop.drop_kept("b")
    bench.run()
    assert bench.reports[-1].pages == (4, 4, 0, 0, 0)
