import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker.engine_loop import PrefillLoop, prefill_loop
from services.engine.cache.host_tier import HostTier
from services.engine.cache.pages import PageAllocator, PageChanges
from services.engine.cache.pool import PageLayout, PagePool
from services.engine.cache.swap import SwapSpace
from services.engine.engine import EngineParts, load_engine
from services.engine.parallel import group
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import PROMPT_ROWS, NonFiniteLogits, PromptTokens, SampledToken, StepPlan, StepResult
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated, NoFreePages
from services.runtime.page_keys import page_keys
from services.scheduling.prediction import PrefillSpeed
from services.scheduling.speedometer import Speedometer
from tests.fake_reports import fake_report, with_reports
from tests.held_rank import LIMIT_S, held_rank
from worker.engine import CachedPrefix, ComputedChunk, PrefillReport
from worker.engine_pages import EnginePages

PAGE_SIZE = 4
SALT = b"shared by all"


class SumRunner:
    """Stands for a model: the next token is the sum of all so far. Sees that no token is computed without a page."""

    def __init__(self) -> None:
        self.broken: set[object] = set()
        self.num_steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        outcomes: list[SampledToken | PromptTokens | NonFiniteLogits | None] = []
        for item in plan.items:
            end = item.sequence.num_computed_tokens + item.num_scheduled_tokens
            assert len(item.sequence.page_table) * PAGE_SIZE >= end
            if item.sequence.sequence_id in self.broken:
                outcomes.append(NonFiniteLogits("NaN"))
            else:
                token = SampledToken(sum(item.sequence.token_ids)) if item.is_sampled else None
                outcomes.append(with_reports(item, token))
        return StepResult(outcomes)


class Bench:
    def __init__(
        self,
        *,
        num_pages: int = 64,
        chunk_tokens: int = 8,
        tier: HostTier | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        clock = clock or ManualClock()
        self.allocator = PageAllocator(num_pages, store=tier)
        self.runner = SumRunner()
        self.reports: list[PrefillReport] = []
        self.prefixes: dict[object, CachedPrefix] = {}
        self.loop = PrefillLoop(
            runner=cast(Any, self.runner),
            pages=EnginePages(self.allocator, page_size=PAGE_SIZE, clock=clock, tier=tier),
            chunk_tokens=chunk_tokens,
            clock=clock,
            on_report=self.reports.append,
        )

    def begin(
        self, key: object, prompt: list[int], emitted: list[int] | None = None, *, salt: bytes = SALT
    ) -> Sequence:
        sequence = Sequence(key, prompt, sampling=Sampling(max_tokens=4), emitted_token_ids=emitted or [])
        self.prefixes[key] = self.loop.begin(sequence, salt=salt)
        return sequence

    def run(self) -> None:
        while self.loop.step():
            pass
        self.loop.step()
        self.loop.check_books()

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


def test_steps_are_small_until_their_time_is_known_and_then_50_ms_for_a_lone_prompt() -> None:
    bench = Bench(num_pages=300, chunk_tokens=512)
    bench.begin("a", [1] * 1000)
    bench.loop.step()
    bench.loop.step()
    assert [c.num_tokens for c in bench.chunks("a")] == [128, 128], "by the default speed they would have 512"
    speed = PrefillSpeed(0.002, 0.0002)
    for n in range(200):
        bench.loop.speedometer.observe_step([(0, 50 + n, True)], speed.time_s(50 + n), float(n))
    bench.loop.step()
    assert bench.chunks("a")[2].num_tokens == pytest.approx((0.050 - 0.002) / 0.0002, rel=0.1)


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
    assert bench.reports[-1].pages == (10, 8, 2, 0, 0)
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
    bench.loop.step()
    with pytest.raises(InvariantViolated):
        bench.loop.check_books()


@settings(deadline=None)  # the machine may be busy
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
        sent = [*bench.prefixes[key].page_ids, *(page for c in chunks for page in c.page_ids)]
        if key not in releases or (chunks and chunks[-1].is_last):
            assert sent == tables[key]
            assert chunks[-1].outcome == SampledToken(sum(range(key, key + length)))
        else:
            assert sent == tables[key][: len(sent)]
            assert all(not c.is_last for c in chunks)
        bench.loop.release(key)
    bench.loop.step()
    pages = bench.reports[-1].pages
    assert (pages.free + pages.cached, pages.reserved, pages.used) == (120, 0, 0)


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
    assert bench.reports[-1].pages == (64, 62, 2, 0, 0), "full pages are found as long as there is room"
    assert bench.runner.num_steps == 2


def test_of_kept_pages_that_lost_one_the_rest_is_found_by_its_content() -> None:
    bench = Bench(num_pages=4)
    pages = bench.begin("a", [1] * 10).page_table[:]
    bench.run()
    bench.loop.release("a", is_kept=True)
    bench.begin("b", [2] * 8)
    assert bench.allocator.counts() == (4, 0, 2, 0, 2), "the partial page went first"
    assert bench.loop.take_kept("a", "c") is None
    assert bench.allocator.counts() == (4, 0, 2, 0, 2)
    bench.loop.drop_kept("a")
    bench.run()
    bench.loop.release("b", is_kept=True)
    bench.loop.drop_kept("b")
    bench.begin("c", [1] * 10)
    assert bench.prefixes["c"] == CachedPrefix(8, tuple(pages[:2]))
    bench.run()
    bench.loop.release("c")
    bench.run()
    assert bench.reports[-1].pages == (4, 1, 3, 0, 0)


def test_a_prompt_begins_after_its_first_pages_that_are_here() -> None:
    bench = Bench()
    bench.begin("a", list(range(14)))
    bench.run()
    pages = tuple(bench.loop._sequences["a"].page_table)
    bench.begin("b", [*range(13), 99, 98])
    assert bench.prefixes["b"] == CachedPrefix(12, pages[:3])
    assert bench.allocator.counts().used == 5, "three are held by both"
    bench.run()
    assert [(c.start, c.num_tokens, c.first_page) for c in bench.chunks("b")] == [(12, 3, 3)]
    assert bench.chunks("b")[-1].outcome == SampledToken(sum(range(13)) + 99 + 98)
    bench.loop.release("a")
    assert bench.allocator.counts() == (64, 60, 0, 0, 4)
    assert all(bench.allocator.state(page) == "used" for page in pages[:3]), "the other one still holds them"


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_one_token_is_computed_because_the_first_answer_comes_out_of_it(
    num_tokens: int, num_cached: int
) -> None:
    bench = Bench()
    for key in "ab":
        bench.begin(key, [1] * num_tokens)
        bench.run()
        assert bench.chunks(key)[-1].outcome == SampledToken(num_tokens)
        bench.loop.release(key)
    assert bench.prefixes["b"].num_tokens == num_cached
    assert sum(chunk.num_tokens for chunk in bench.chunks("b")) == num_tokens - num_cached


def test_a_prompt_that_is_reported_is_computed_though_it_is_cached() -> None:
    bench, prompt = Bench(), list(range(19))
    bench.begin("a", prompt)
    bench.run()
    reported = Sequence("b", prompt, sampling=Sampling(max_tokens=1, prompt_logprobs=0))
    assert bench.loop.begin(reported, salt=SALT).num_tokens == 0
    bench.run()
    chunks = bench.chunks("b")
    assert len(chunks) > 2
    assert all(chunk.outcome is None for chunk in chunks[:-1])
    token = chunks[-1].outcome
    assert isinstance(token, SampledToken)
    assert token.prompt == fake_report(*prompt[1:])


def test_a_step_reports_few_tokens_of_prompts() -> None:
    """All that is in the step waits for them."""
    bench = Bench(chunk_tokens=512)
    for key, length in (("a", 40), ("b", 40), ("c", 150)):
        reported = Sequence(key, [1] * length, sampling=Sampling(max_tokens=1, prompt_logprobs=0))
        bench.loop.begin(reported, salt=SALT)
    bench.run()
    steps = [sum(chunk.num_tokens for chunk in report.chunks) for report in bench.reports if report.chunks]
    assert sum(steps) == 230
    assert max(steps) <= PROMPT_ROWS


def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    for key in "ab":
        bench.begin(key, [1] * 20, salt=key.encode())
        bench.run()
        bench.loop.release(key)
    assert bench.prefixes["b"] == CachedPrefix(0, ())
    bench.begin("c", [1] * 20, salt=b"a")
    assert bench.prefixes["c"].num_tokens == 16


def test_what_another_prompt_has_just_computed_is_found_while_it_goes_on() -> None:
    bench = Bench(chunk_tokens=8)
    bench.begin("a", [1] * 20)
    bench.loop.step()
    bench.begin("b", [1] * 20)
    assert bench.prefixes["b"].num_tokens == 8
    bench.run()
    bench.loop.release("a")
    bench.loop.release("b")
    bench.begin("c", [1] * 21)
    assert bench.prefixes["c"].num_tokens == 20
    bench.loop.release("c")
    bench.run()


@pytest.mark.parametrize("ends", ["before", "after"])
def test_what_came_out_wrong_is_not_found_nor_what_was_computed_behind_it(ends: str) -> None:
    bench = Bench(chunk_tokens=8)
    bench.begin("good", [2] * 9)
    bench.begin("bad", [1] * 12)
    while not any(chunk.start == 0 for chunk in bench.chunks("bad")):
        bench.loop.step()
    # It shares the first pages, adds some, and is released before it could notice anything.
    bench.begin("behind", [1] * 7 + [3] * 30)
    assert bench.prefixes["behind"].num_tokens == 4
    bench.runner.broken.add("bad")
    bench.run()
    assert isinstance(bench.chunks("bad")[-1].outcome, NonFiniteLogits)
    if ends == "before":
        bench.loop.release("behind")
    bench.loop.release("bad")
    bench.begin("again", [1] * 12)
    assert bench.prefixes["again"].num_tokens == 0
    bench.run()
    bench.begin("again behind", [1] * 7 + [3] * 30)
    assert bench.prefixes["again behind"].num_tokens == 4, "of the one behind, nothing but what is right again"
    for key in ("good", "bad", "behind", "again", "again behind"):
        bench.loop.release(key)
    bench.run()
    assert bench.reports[-1].pages.used == 0
    bench.begin("good again", [2] * 9)
    assert bench.prefixes["good again"].num_tokens == 8


def test_reports_say_what_came_to_be_found_and_what_gave_way() -> None:
    bench = Bench(num_pages=4, chunk_tokens=8)
    bench.begin("a", [1] * 16)
    bench.run()
    first = page_keys([1] * 16, salt=SALT, page_size=PAGE_SIZE)
    assert [report.changes for report in bench.reports[:2]] == [(tuple(first[:2]), ()), (tuple(first[2:]), ())]
    bench.loop.release("a")
    bench.run()
    assert bench.reports[-1].changes == PageChanges.none()
    bench.begin("b", [2] * 5)
    bench.loop.step()
    second = page_keys([2] * 5, salt=SALT, page_size=PAGE_SIZE)
    assert bench.reports[-1].changes == (tuple(second), (first[3], first[2]))


def test_a_change_of_names_alone_is_reported() -> None:
    bench = Bench()
    sequence = bench.begin("a", [1] * 8)
    bench.run()
    bench.allocator.unname(sequence.page_table)
    bench.loop.step()
    assert len(bench.reports[-1].changes.evicted) == 2
    num_reports = len(bench.reports)
    bench.loop.step()
    assert len(bench.reports) == num_reports


class TieredBench(Bench):
    """Four pages in the pool and eight below it; a copy takes as long as the clock says."""

    def __init__(self, *, num_pages: int = 6, copy_s: float = 0.0, speed: PrefillSpeed | None = None) -> None:
        layout = PageLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE_SIZE, dtype=torch.float32)
        clock = ManualClock()

        class SlowSpace(SwapSpace):
            def load(self, slots: SequenceOf[int], page_ids: SequenceOf[int]) -> None:
                super().load(slots, page_ids)
                clock.advance(copy_s)

        tier = HostTier(SlowSpace(PagePool(layout, num_pages), 8 * layout.page_bytes))
        super().__init__(num_pages=num_pages, chunk_tokens=64, tier=tier, clock=clock)
        self.tier = tier
        if speed is not None:
            self.loop.speedometer = self.loop._pages.speedometer = MeasuredSpeed(speed)

    def cached_tokens(self, key: object, prompt: list[int], *, salt: bytes = SALT) -> int:
        self.begin(key, prompt, salt=salt)
        self.run()
        self.loop.release(key)
        self.allocator.check_integrity()
        return self.prefixes[key].num_tokens


class MeasuredSpeed(Speedometer):
    def __init__(self, speed: PrefillSpeed) -> None:
        super().__init__()
        self._speed = speed

    @property
    def prefill(self) -> PrefillSpeed:
        return self._speed


def test_pages_that_gave_way_come_back_from_the_host_and_are_not_computed_again() -> None:
    bench = TieredBench()
    first, second = list(range(23)), list(range(100, 120))
    assert bench.cached_tokens("a", first) == 0
    assert bench.cached_tokens("b", second) == 0
    assert bench.tier.stats().held == 4
    assert bench.cached_tokens("c", first) == 20
    assert sum(chunk.num_tokens for chunk in bench.chunks("c")) == 3
    assert bench.tier.stats().num_loaded == 4


def test_what_another_tenant_left_in_the_host_is_not_found() -> None:
    bench = TieredBench()
    first, second = list(range(23)), list(range(100, 120))
    bench.cached_tokens("a", first)
    bench.cached_tokens("b", second)
    assert bench.cached_tokens("c", first, salt=b"another") == 0
    assert bench.tier.stats().num_loaded == 0


def test_copies_are_made_where_computing_takes_longer_by_what_was_measured() -> None:
    first, second = list(range(23)), list(range(100, 120))
    for s_per_token, num_expected in ((1e-2, 20), (1e-9, 4)):
        bench = TieredBench(speed=PrefillSpeed(overhead_s=1.0, s_per_token=s_per_token))
        bench.cached_tokens("a", first)
        bench.cached_tokens("b", second)
        assert bench.cached_tokens("c", first) == num_expected
        assert bench.prefixes["c"].page_ids[:1] != ()


def test_slow_copies_are_not_made_but_tried_now_and_then() -> None:
    bench = TieredBench(copy_s=10.0, speed=PrefillSpeed(overhead_s=0.0, s_per_token=1e-2))
    first, second = list(range(23)), list(range(100, 120))
    num_copies = 0
    for number in range(60):
        for name, prompt in (("a", first), ("b", second)):
            num_before = bench.tier.stats().num_loaded
            bench.cached_tokens(f"{name}{number}", prompt)
            num_copies += bench.tier.stats().num_loaded > num_before
    assert 2 <= num_copies <= 4, "one in 32"


def test_a_wrong_page_is_found_in_neither_tier() -> None:
    bench = TieredBench()
    first = list(range(23))
    bench.cached_tokens("a", first)
    bench.cached_tokens("b", list(range(100, 120)))
    bench.runner.broken.add("c")
    bench.begin("c", first)
    bench.run()
    bench.loop.release("c")
    bench.allocator.check_integrity()
    assert bench.cached_tokens("d", first) == 0


class ReportedPages:
    """A prefill loop over a real model. Copies each page at the moment at which the loop reports it as complete."""

    def __init__(self, parts: EngineParts, on_report: Callable[[], None] = lambda: None) -> None:
        self._memory = parts.pool.bytes
        self._on_report = on_report
        self.contents: dict[int, bytes] = {}
        self.loop = prefill_loop(parts, self._report, chunk_tokens=16, clock=ManualClock())

    def _report(self, report: PrefillReport) -> None:
        for chunk in report.chunks:
            self.contents |= {page_id: self._memory[page_id].numpy().tobytes() for page_id in chunk.page_ids}
            self._on_report()

    def compute(self, prompt: list[int]) -> dict[int, bytes]:
        """Computes a prompt chunk by chunk. Returns the reported pages."""
        self.loop.begin(Sequence("a", prompt, sampling=Sampling(max_tokens=1)), salt=SALT)
        while self.loop.step():
            pass
        return self.contents


@pytest.mark.parametrize(
    ("tensor", "pipeline", "held", "is_after_its_part"),
    [(1, 2, 1, False), (1, 3, 1, False), (2, 2, 3, False), (2, 1, 1, True)],
    ids=["last-stage", "middle-stage", "tensor-and-pipeline", "tensor"],
)
def test_no_page_is_reported_before_the_last_rank_has_written_it(
    tensor: int,
    pipeline: int,
    held: int,
    is_after_its_part: bool,
    checkpoint: Callable[[str], Path],
    random_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, prompt = checkpoint("llama3-gqa-tied"), random_ids(50)
    expected = ReportedPages(load_engine(folder, num_pages=16, threads=1)).compute(prompt)
    assert len(expected) == 4
    has_moved_on = threading.Event()
    await_acknowledgement = getattr(group, "await_acknowledgement", None)

    def await_noted(peer: Any) -> None:
        has_moved_on.set()
        assert await_acknowledgement is not None
        await_acknowledgement(peer)

    # Rank 0 either waits for the held rank or reports the chunk.
    monkeypatch.setattr(group, "await_acknowledgement", await_noted, raising=False)
    with held_rank(held, is_after_its_part=is_after_its_part, monkeypatch=monkeypatch) as gate:
        parts = load_engine(folder, num_pages=16, threads=1, tensor_parallel=tensor, pipeline_parallel=pipeline)
        try:
            run = ReportedPages(parts, has_moved_on.set)
            with ThreadPoolExecutor(1) as engine_thread:
                computed = engine_thread.submit(run.compute, prompt)
                gate.wait_until_held()
                assert has_moved_on.wait(LIMIT_S)
                reported_early = dict(run.contents)
                gate.release()
                assert computed.result(LIMIT_S) == expected
                assert not reported_early
        finally:
            parts.close()
