from collections import Counter
from collections.abc import Hashable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.engine_loop import DecodeLoop
from decode_worker.mask_pace import PacedMasks
from decode_worker.pages import DecodePages
from decode_worker.scheduler import BatchScheduler
from services.engine.cache.host_tier import HostTier
from services.engine.cache.pages import PageAllocator
from services.engine.cache.swap import SwapSpace
from services.engine.steps.pooling import pooled_states
from services.engine.steps.sequence import Pooling, Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, PooledState, SampledToken, StepOutcome, StepPlan, StepResult
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated, NoFreePages, RequestCancelled
from services.runtime.page_keys import page_keys
from tests.fake_reports import fake_report, with_reports
from worker.engine import Advance, DecodeReport, ReservedPages

PAGE_SIZE = 4
STOP = 999
SALT = b"shared by all"


def next_token(token_ids: list[int]) -> int:
    """The fake model: a token that depends on every token before it."""
    return sum((i + 1) * token for i, token in enumerate(token_ids)) % 97


class FakeRunner:
    """Sees that no token is computed without a used page of its own, and that replay is one token at a time.

    `memory` says which token's KV is in a slot of a page, and whether a chunk wrote it: a sequence that attends to it
    must find what it would have computed itself.
    """

    def __init__(self, allocator: PageAllocator, *, replays_in_chunks: bool) -> None:
        self.allocator = allocator
        self.replays_in_chunks = replays_in_chunks
        self.broken: set[Hashable] = set()
        self.batches: list[int] = []
        self.num_tokens = 0
        self.memory: dict[tuple[int, int], tuple[int, bool]] = {}

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def compute(self, plan: StepPlan) -> StepResult:
        self.batches.append(len(plan.items))
        outcomes: list[StepOutcome] = []
        held = Counter(page for item in plan.items for page in item.sequence.page_table)
        for item in plan.items:
            sequence = item.sequence
            end = sequence.num_computed_tokens + item.num_scheduled_tokens
            assert len(sequence.page_table) * PAGE_SIZE >= end
            assert all(self.allocator.state(page) == "used" for page in sequence.page_table)
            writes = sequence.page_table[sequence.num_computed_tokens // PAGE_SIZE : -(-end // PAGE_SIZE)]
            assert all(held[page] == self.allocator.num_references(page) == 1 for page in writes)
            chunked = sequence.num_prompt_tokens
            if self.replays_in_chunks:
                chunked = max(chunked, sequence.num_tokens - 1)
            assert end <= chunked or item.num_scheduled_tokens == 1
            self.num_tokens += item.num_scheduled_tokens
            is_broken = sequence.sequence_id in self.broken
            if not is_broken:
                self.check(sequence)
            self.write(
                sequence.page_table,
                [-1 if is_broken else token for token in sequence.token_ids[:end]],
                start=sequence.num_computed_tokens,
                is_chunk=end <= chunked,
            )
            if is_broken:
                outcomes.append(NonFiniteLogits("NaN"))
            elif item.num_pooled:
                rows = np.array(sequence.token_ids[end - item.num_pooled : end], np.float32)[:, None]
                outcomes += pooled_states([item], rows)
            else:
                token = SampledToken(next_token(sequence.token_ids)) if item.is_sampled else None
                outcomes.append(with_reports(item, token))
        return StepResult(outcomes)

    def write(self, page_table: list[int], token_ids: list[int], *, start: int, is_chunk: bool) -> None:
        for place in range(start, len(token_ids)):
            self.memory[page_table[place // PAGE_SIZE], place % PAGE_SIZE] = (token_ids[place], is_chunk)

    def check(self, sequence: Sequence) -> None:
        for place in range(sequence.num_computed_tokens):
            token, is_chunk = self.memory[sequence.page_table[place // PAGE_SIZE], place % PAGE_SIZE]
            assert token == sequence.token_ids[place], "the page holds another content"
            assert is_chunk or self.replays_in_chunks or place >= sequence.num_prompt_tokens


class FakeSwap:
    """Stands for SwapSpace: copies what the fake runner says is in a page. Huge pages are dearer to copy."""

    def __init__(self, runner: Any, num_slots: int, page_bytes: int) -> None:
        self.runner = runner
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self.slots: dict[int, list[Any]] = {}
        self.num_stored = 0
        self.num_pool_pages = 0

    def problems(self) -> list[str]:
        return []

    @property
    def num_free_slots(self) -> int:
        return self.num_slots - len(self.slots)

    def store(self, page_ids: list[int]) -> list[int]:
        slots = [slot for slot in range(self.num_slots) if slot not in self.slots][: len(page_ids)]
        assert len(slots) == len(page_ids)
        for slot, page in zip(slots, page_ids, strict=True):
            self.slots[slot] = [self.runner.memory.get((page, place)) for place in range(PAGE_SIZE)]
        self.num_stored += len(slots)
        return slots

    def load(self, slots: list[int], page_ids: list[int]) -> None:
        for slot, page in zip(slots, page_ids, strict=True):
            self.runner.memory |= {(page, place): what for place, what in enumerate(self.slots[slot])}

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            del self.slots[slot]


class Bench:
    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_batch: int = 8,
        step_tokens: int = 16,
        replays_in_chunks: bool = False,
        num_slots: int = 0,
        slot_bytes: int = 1,
        num_tier_slots: int = 0,
        reported_tokens: int | None = None,
    ) -> None:
        tier_space = FakeSwap(None, num_tier_slots, 1)
        self.tier = HostTier(cast(SwapSpace, tier_space)) if num_tier_slots else None
        self.allocator = PageAllocator(num_pages, store=self.tier)
        self.runner = tier_space.runner = FakeRunner(self.allocator, replays_in_chunks=replays_in_chunks)
        self.swap = FakeSwap(self.runner, num_slots, slot_bytes)
        self.reports: list[DecodeReport] = []
        self.clock = ManualClock()
        self.loop = DecodeLoop(
            runner=cast(Any, self.runner),
            pages=DecodePages(
                self.allocator,
                page_size=PAGE_SIZE,
                clock=self.clock,
                is_exact=replays_in_chunks,
                tier=self.tier,
                swap=cast(SwapSpace, self.swap),
            ),
            scheduler=BatchScheduler(
                max_batch=max_batch,
                step_tokens=step_tokens,
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                replays_in_chunks=replays_in_chunks,
                min_prefill_tokens=1,
                reported_tokens=reported_tokens,
            ),
            clock=self.clock,
            on_report=self.reports.append,
            features=[PacedMasks()],
        )

    def local(
        self,
        key: str | int,
        prompt: list[int],
        *,
        max_tokens: int,
        emitted: list[int] | None = None,
        salt: bytes = SALT,
        service_class: int = 2,
    ) -> None:
        started = sequence(key, prompt, max_tokens=max_tokens, emitted=emitted or [])
        self.loop.start(started, salt=salt, service_class=service_class)

    def reserve(
        self, key: str | int, tokens: list[int], *, num_prompt_tokens: int | None = None, service_class: int = 2
    ) -> ReservedPages:
        """Raises NoFreePages where the pages are not there at once."""
        num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        given = self.loop.reserve(
            key, tokens, num_prompt_tokens=num_prompt_tokens, salt=SALT, service_class=service_class
        )
        if not given.done():
            self.loop.withdraw(key)
            assert isinstance(given.exception(0), RequestCancelled)
            raise NoFreePages("not at once")
        reserved = given.result(0)
        num_cached = reserved.num_cached_tokens // PAGE_SIZE
        assert all(self.allocator.state(page) == "used" for page in reserved.page_ids[:num_cached])
        assert all(self.allocator.state(page) == "reserved" for page in reserved.page_ids[num_cached:])
        return reserved

    def handed_over(
        self, key: str | int, prompt: list[int], *, max_tokens: int, emitted: list[int], service_class: int = 2
    ) -> None:
        reserved = self.reserve(key, prompt, service_class=service_class)
        self.runner.write([*reserved.page_ids], prompt, start=reserved.num_cached_tokens, is_chunk=True)
        taken = sequence(key, prompt, max_tokens=max_tokens, emitted=emitted)
        taken.num_computed_tokens = len(prompt)
        self.loop.start(taken, salt=SALT)

    def until_rest(self) -> None:
        """Nothing is held, whatever is still found."""
        pages = self.reports[-1].pages
        assert (pages.free + pages.cached, pages.reserved, pages.used) == (pages.total, 0, 0)
        self.allocator.check_integrity()

    def run(self) -> None:
        while self.loop.step():
            pass
        self.loop.step()
        self.loop.check_books()

    def advances(self, key: Hashable) -> list[Advance]:
        return [advance for report in self.reports for advance in report.advances if advance.key == key]

    def tokens(self, key: Hashable) -> dict[int, int]:
        """The tokens of an answer by their index; an index twice is an error."""
        tokens: dict[int, int] = {}
        for advance in self.advances(key):
            if isinstance(advance.outcome, SampledToken):
                assert advance.token_index not in tokens
                tokens[advance.token_index] = advance.outcome.token_id
        return tokens


def sequence(key: str | int, prompt: list[int], *, max_tokens: int, emitted: list[int]) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=frozenset({STOP}))
    return Sequence(key, prompt, sampling=sampling, emitted_token_ids=emitted)


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_a_handed_over_sequence_goes_on_from_index_one_and_frees_its_pages() -> None:
    bench = Bench()
    answer = expected([1, 2, 3, 4, 5], 6)
    bench.handed_over("a", [1, 2, 3, 4, 5], max_tokens=6, emitted=answer[:1])
    bench.run()
    assert bench.tokens("a") == dict(list(enumerate(answer))[1:])
    assert bench.advances("a")[-1].finish_reason == "length"
    bench.until_rest()
    assert bench.reports[-1].num_running == 0


def test_a_local_prompt_gives_the_same_tokens_from_index_zero() -> None:
    bench = Bench(step_tokens=2)
    bench.local("a", [1, 2, 3, 4, 5], max_tokens=6)
    bench.run()
    assert list(bench.tokens("a").values()) == expected([1, 2, 3, 4, 5], 6)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_resumed_sequence_replays_and_goes_on_where_it_was(is_local: bool) -> None:
    bench = Bench()
    answer = expected([7, 8, 9], 8)
    start = bench.local if is_local else bench.handed_over
    start("a", [7, 8, 9], max_tokens=8, emitted=answer[:5])
    bench.run()
    assert bench.tokens("a") == dict(list(enumerate(answer))[5:])


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(("replays_in_chunks", "num_steps"), [(True, 256 // 64 + 1), (False, 256)])
def test_a_long_replay_takes_few_steps_where_chunks_are_exact(
    is_local: bool, replays_in_chunks: bool, num_steps: int
) -> None:
    bench = Bench(num_pages=200, step_tokens=64, replays_in_chunks=replays_in_chunks)
    answer = expected([7, 8, 9], 260)
    start = bench.local if is_local else bench.handed_over
    start("a", [7, 8, 9], max_tokens=260, emitted=answer[:256])
    while not bench.tokens("a"):
        bench.loop.step()
    # The step that samples is reported with the next one; a local prompt may take a step of its own.
    assert num_steps <= len(bench.runner.batches) - 1 <= num_steps + 1
    bench.run()
    assert bench.tokens("a") == dict(list(enumerate(answer))[256:])


def test_a_stop_token_ends_it_and_is_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.local("a", [1], max_tokens=9)
    original = bench.runner.compute

    def compute(plan: StepPlan) -> StepResult:
        result = original(plan)
        if plan.items[0].sequence.num_generated_tokens == 2:
            return StepResult([SampledToken(STOP)])
        return result

    monkeypatch.setattr(bench.runner, "compute", compute)
    bench.run()
    last = bench.advances("a")[-1]
    assert (last.token_index, last.outcome, last.finish_reason) == (2, SampledToken(STOP), "stop")


def test_a_broken_sequence_fails_alone_and_frees_its_pages() -> None:
    bench = Bench()
    bench.runner.broken.add("bad")
    bench.local("bad", [1, 2], max_tokens=4)
    bench.local("good", [3, 4], max_tokens=4)
    bench.run()
    assert isinstance(bench.advances("bad")[-1].outcome, NonFiniteLogits)
    assert list(bench.tokens("good").values()) == expected([3, 4], 4)
    assert bench.reports[-1].pages.free == 64


def test_a_reservation_can_be_freed_before_it_starts() -> None:
    bench = Bench(num_pages=8)
    bench.reserve("a", [1] * 9)
    assert not bench.loop.step()
    assert bench.reports[-1].pages == (8, 5, 0, 3, 0)
    bench.loop.free("a")
    bench.loop.free("a")
    bench.loop.step()
    assert bench.reports[-1].pages == (8, 8, 0, 0, 0)


def test_wrong_books_are_noticed_when_idle() -> None:
    bench = Bench()
    bench.local("a", [1], max_tokens=2)
    bench.allocator._num_in_state[0] -= 1
    with pytest.raises(InvariantViolated):
        bench.run()


SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 96), min_size=1, max_size=30),
        st.integers(1, 8),  # max_tokens
        st.integers(0, 7),  # emitted before
        st.booleans(),  # computed here
        st.integers(0, 6),  # arrival
        st.one_of(st.none(), st.integers(0, 20)),  # cancelled at this step
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)  # the machine may be busy
@given(SPECS, st.integers(1, 8), st.integers(1, 24), st.booleans())
def test_any_mix_gives_each_its_own_answer_and_leaves_no_page(
    specs: list[tuple[list[int], int, int, bool, int, int | None]],
    max_batch: int,
    step_tokens: int,
    replays_in_chunks: bool,
) -> None:
    bench = Bench(num_pages=400, max_batch=max_batch, step_tokens=step_tokens, replays_in_chunks=replays_in_chunks)
    for step in range(400):
        for key, (prompt, max_tokens, emitted, is_local, arrival, cancelled) in enumerate(specs):
            num_emitted = min(emitted, max_tokens - 1)
            if not is_local and num_emitted == 0:
                num_emitted, max_tokens = 1, max(max_tokens, 2)
            if arrival == step:
                start = bench.local if is_local else bench.handed_over
                start(key, prompt, max_tokens=max_tokens, emitted=expected(prompt, num_emitted))
            if cancelled == step:
                bench.loop.free(key)
        if not bench.loop.step() and step > 20:
            break
    for key, (prompt, max_tokens, emitted, is_local, arrival, cancelled) in enumerate(specs):
        num_emitted = min(emitted, max_tokens - 1)
        if not is_local and num_emitted == 0:
            num_emitted, max_tokens = 1, max(max_tokens, 2)
        answer = dict(list(enumerate(expected(prompt, max_tokens)))[num_emitted:])
        tokens = bench.tokens(key)
        if cancelled is None or cancelled < arrival:
            assert tokens == answer
        else:
            assert tokens.items() <= answer.items()
    assert max(bench.runner.batches, default=0) <= max_batch
    bench.until_rest()


def test_a_pause_comes_after_the_report_of_the_step_before_it() -> None:
    bench = Bench()
    answer = expected([1, 2, 3], 8)
    bench.local("a", [1, 2, 3], max_tokens=8)
    for _ in range(4):
        bench.loop.step()
    assert len(bench.tokens("a")) == 3, "the fourth step is not reported yet"
    bench.loop.pause("a")
    (paused,) = bench.reports[-1].paused
    assert list(bench.tokens("a").values()) == answer[:4]
    assert (paused.num_generated_tokens, paused.num_computed_tokens, paused.next_token_id) == (4, 6, answer[3])
    assert len(paused.page_ids) == 2
    assert not bench.loop.step()
    bench.loop.pause("a")
    assert sum(len(report.paused) for report in bench.reports) == 1
    bench.loop.unpause("a")
    bench.loop.unpause("a")
    bench.run()
    assert list(bench.tokens("a").values()) == answer
    bench.until_rest()


def test_a_paused_sequence_can_be_freed() -> None:
    bench = Bench()
    bench.local("a", [1, 2, 3], max_tokens=8)
    bench.loop.step()
    bench.loop.pause("a")
    bench.loop.free("a")
    bench.loop.unpause("a")
    bench.loop.pause("a")
    bench.run()
    bench.until_rest()
    assert not bench.loop._paused


def test_a_prompt_is_computed_and_tokens_are_replayed_before_a_pause() -> None:
    bench = Bench(step_tokens=2)
    answer = expected([1, 2, 3, 4, 5], 6)
    bench.local("a", [1, 2, 3, 4, 5], max_tokens=6)
    bench.local("b", [1, 2, 3, 4, 5], max_tokens=6, emitted=answer[:3])
    bench.loop.pause("a")
    bench.loop.pause("b")
    bench.run()
    paused = {entry.key: entry for report in bench.reports for entry in report.paused}
    assert {key: entry.num_generated_tokens for key, entry in paused.items()} == {"a": 1, "b": 3}
    assert bench.tokens("a") == {0: answer[0]}
    assert not bench.tokens("b")
    for key in "ab":
        bench.loop.unpause(key)
    bench.run()
    assert list(bench.tokens("a").values()) == answer
    assert list(bench.tokens("b").values()) == answer[3:]


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["pause", "unpause", "step"])), max_size=60),
    st.integers(1, 4),
    st.booleans(),
)
def test_pauses_at_any_time_change_no_token(
    moves: list[tuple[int, str]], max_batch: int, replays_in_chunks: bool
) -> None:
    bench = Bench(max_batch=max_batch, step_tokens=3, replays_in_chunks=replays_in_chunks)
    prompts = [[index + 1] * (2 * index + 1) for index in range(4)]
    for key, prompt in enumerate(prompts):
        emitted = expected(prompt, key)
        start = bench.local if key % 2 == 0 else bench.handed_over
        start(key, prompt, max_tokens=6, emitted=emitted)
    for key, move in moves:
        if move == "step":
            bench.loop.step()
        else:
            getattr(bench.loop, move)(key)
    for key in range(4):
        bench.loop.unpause(key)
    bench.run()
    for key, prompt in enumerate(prompts):
        assert bench.tokens(key) == dict(list(enumerate(expected(prompt, 6)))[key:])
    for report in bench.reports:
        for paused in report.paused:
            assert isinstance(paused.key, int)
            sequence_length = len(prompts[paused.key]) + paused.num_generated_tokens
            assert paused.num_computed_tokens == sequence_length - 1
            assert len(paused.page_ids) == -(-paused.num_computed_tokens // PAGE_SIZE)
    bench.until_rest()


def test_the_next_turn_finds_what_the_last_one_left() -> None:
    bench = Bench(replays_in_chunks=True)
    prompt = list(range(1, 11))
    answer = expected(prompt, 9)
    bench.handed_over("a", prompt, max_tokens=9, emitted=answer[:1])
    bench.run()
    said = [*prompt, *answer]
    # The last token is not computed, and its page is full with it: 18 tokens are four pages.
    reserved = bench.reserve("b", [*said, 5, 6, 7])
    assert reserved.num_cached_tokens == 16
    bench.loop.free("b")
    before = bench.runner.num_tokens
    bench.local("c", [*said, 5, 6, 7], max_tokens=1)
    bench.run()
    assert bench.advances("c")[0].start == 16
    assert bench.runner.num_tokens - before == 22 - 16
    assert bench.tokens("c") == dict(enumerate(expected([*said, 5, 6, 7], 1)))
    bench.until_rest()


def test_where_chunks_are_not_exact_only_prompts_are_found() -> None:
    bench = Bench(replays_in_chunks=False)
    prompt = list(range(1, 11))
    answer = expected(prompt, 9)
    bench.handed_over("a", prompt, max_tokens=9, emitted=answer[:1])
    bench.run()
    bench.local("b", [*prompt, *answer, 5], max_tokens=1)
    bench.run()
    assert bench.advances("b")[0].start == 8
    assert bench.reserve("c", [*prompt, *answer, 5], num_prompt_tokens=10).num_cached_tokens == 8
    assert bench.reserve("d", [*prompt, *answer, 5]).num_cached_tokens == 20, "of b's prompt"


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_of_a_local_prompt_at_least_the_last_token_is_computed(num_tokens: int, num_cached: int) -> None:
    bench = Bench()
    for key in "ab":
        bench.local(key, [1] * num_tokens, max_tokens=2)
        bench.run()
    assert bench.advances("b")[0].start == num_cached
    assert bench.tokens("b") == bench.tokens("a")


def test_of_a_handover_everything_may_be_here_already() -> None:
    bench = Bench()
    bench.local("a", [1] * 8, max_tokens=2)
    bench.run()
    assert bench.reserve("b", [1] * 8).num_cached_tokens == 8
    bench.loop.free("b")
    bench.handed_over("c", [1] * 8, max_tokens=3, emitted=expected([1] * 8, 1))
    bench.run()
    assert list(bench.tokens("c").values()) == expected([1] * 8, 3)[1:]


@pytest.mark.parametrize("is_local", [True, False])
def test_what_gave_way_comes_back_from_the_host_and_is_neither_computed_nor_sent(is_local: bool) -> None:
    bench = Bench(num_pages=8, replays_in_chunks=True, num_tier_slots=8)
    first, second = list(range(1, 18)), list(range(40, 60))
    for key, prompt in (("a", first), ("b", second)):
        bench.local(key, prompt, max_tokens=2)
        bench.run()
    assert bench.tier is not None
    assert bench.tier.stats().held > 0
    assert len(bench.allocator.find(page_keys(first, salt=SALT, page_size=PAGE_SIZE))) < 4
    before = bench.runner.num_tokens
    if is_local:
        bench.local("c", first, max_tokens=3)
    else:
        assert bench.reserve("probe", first).num_cached_tokens == 16
        bench.loop.free("probe")
        bench.handed_over("c", first, max_tokens=3, emitted=expected(first, 1))
    bench.run()
    assert list(bench.tokens("c").values()) == expected(first, 3)[0 if is_local else 1 :]
    assert bench.runner.num_tokens - before == (1 + 2 if is_local else 2)
    assert bench.tier.stats().num_loaded > 0
    bench.until_rest()


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_replay_begins_after_what_is_here(is_exact: bool) -> None:
    bench = Bench(replays_in_chunks=is_exact, step_tokens=64)
    answer = expected([3] * 9, 30)
    bench.local("a", [3] * 9, max_tokens=30)
    bench.run()
    bench.local("b", [3] * 9, max_tokens=30, emitted=answer[:20])
    bench.run()
    assert bench.tokens("b") == dict(list(enumerate(answer))[20:])
    assert bench.advances("b")[0].start == (28 if is_exact else 8)


def test_an_answer_whose_masks_are_dear_leaves_the_time_to_others() -> None:
    bench = Bench()
    bench.local("plain", [1, 2, 3], max_tokens=100)
    dear = sequence("dear", [4, 5, 6], max_tokens=40, emitted=[])
    dear.grammar = cast(Any, object())
    bench.loop.start(dear, salt=SALT)
    compute, begun_ns = bench.runner.compute, bench.clock.unix_ns()

    def slowly(plan: StepPlan) -> StepResult:
        mask_s = 0.01 * any(item.sequence is dear for item in plan.items)
        dear.mask_s += mask_s
        bench.clock.advance(0.001 + mask_s)
        return compute(plan)

    bench.runner.compute = slowly  # type: ignore[method-assign]
    bench.run()
    plain_ns = max(report.end_unix_ns for report in bench.reports if any(a.key == "plain" for a in report.advances))
    # Without masks 0.1 s; with one in each step 0.5 s.
    assert (plain_ns - begun_ns) / 1e9 < 0.1 * 1.4 + 3 * 0.01
    assert [*bench.tokens("plain").values()] == expected([1, 2, 3], 100)
    assert [*bench.tokens("dear").values()] == expected([4, 5, 6], 40)


@pytest.mark.parametrize("num_pages", [64, 16], ids=["alone", "giving way"])
def test_a_prompt_that_is_reported_is_computed_though_it_is_cached(num_pages: int) -> None:
    bench, prompt = Bench(step_tokens=5, num_pages=num_pages), list(range(3, 22))
    bench.local("a", prompt, max_tokens=1)
    bench.run()
    reported = Sequence("b", prompt, sampling=Sampling(max_tokens=3, prompt_logprobs=0))
    bench.loop.start(reported, salt=SALT, service_class=2)
    bench.loop.step()
    if num_pages < 64:
        # One of a better class, for which there is no room beside it.
        bench.local("c", list(range(50, 98)), max_tokens=4, service_class=1)
    bench.run()
    first, *rest = [one.outcome for one in bench.advances("b") if isinstance(one.outcome, SampledToken)]
    assert first.prompt == fake_report(*prompt[1:])
    assert [token.prompt for token in rest] == [None, None]
    num_computed = sum(advance.num_tokens for advance in bench.advances("b"))
    assert (num_computed > len(prompt) + 2) == (num_pages < 64)
    bench.until_rest()


@pytest.mark.parametrize("num_slots", [0, 8], ids=["computed again", "swapped"])
@pytest.mark.parametrize("num_pages", [64, 16], ids=["alone", "preempted"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_is_embedded_and_ends_with_its_last_step(pooling: Pooling, num_pages: int, num_slots: int) -> None:
    bench, prompt = Bench(step_tokens=5, num_pages=num_pages, num_slots=num_slots), list(range(3, 22))
    bench.local("a", prompt[:9], max_tokens=1)
    bench.run()
    embedded = sequence("b", prompt, max_tokens=1, emitted=[])
    embedded.pooling = pooling
    bench.loop.start(embedded, salt=SALT, service_class=2)
    bench.loop.step()
    if num_pages < 64:
        bench.local("c", list(range(50, 98)), max_tokens=4, service_class=1)
    bench.run()
    *steps, last = bench.advances("b")
    assert ([step.finish_reason for step in steps], last.finish_reason) == ([None] * len(steps), "stop")
    assert isinstance(last.outcome, PooledState)
    assert last.outcome.state.tolist() == [prompt[-1] if pooling == "last" else sum(prompt)]
    # The pages that a left hold no hidden states for the mean.
    num_computed = sum(advance.num_tokens for advance in bench.advances("b"))
    assert num_computed >= len(prompt) - (8 if pooling == "last" else 0)
    assert any(one.key == "b" for report in bench.reports for one in report.preempted) == (num_pages < 64)
    assert len(bench.tokens("c")) == (4 if num_pages < 64 else 0)
    bench.until_rest()


def test_a_step_reports_few_tokens_of_a_prompt() -> None:
    bench = Bench(reported_tokens=4)
    reported = Sequence("b", list(range(3, 22)), sampling=Sampling(max_tokens=3, prompt_logprobs=0))
    bench.loop.start(reported, salt=SALT, service_class=2)
    bench.local("plain", [1] * 10, max_tokens=1)
    bench.run()
    assert [advance.num_tokens for advance in bench.advances("b")] == [4, 4, 4, 4, 3, 1, 1]
    assert [advance.num_tokens for advance in bench.advances("plain")] == [10]


def test_pages_that_were_not_sealed_are_not_found() -> None:
    bench = Bench()
    bench.reserve("a", [1] * 20)
    assert bench.reserve("b", [1] * 20).num_cached_tokens == 0
    bench.loop.free("a")
    bench.loop.free("b")
    bench.loop.step()
    assert bench.reports[-1].pages == (64, 64, 0, 0, 0)
    assert bench.reserve("c", [1] * 20).num_cached_tokens == 0


def test_what_came_out_wrong_is_not_found() -> None:
    bench = Bench(step_tokens=8, replays_in_chunks=True)
    bench.local("a", [1] * 12, max_tokens=9)
    bench.run()
    bench.local("bad", [1] * 12, max_tokens=9)
    bench.runner.broken.add("bad")
    bench.run()
    bench.local("b", [1] * 12, max_tokens=9)
    bench.run()
    assert bench.advances("b")[0].start == 0, "nor what it had found: some of it may have been the reason"
    assert list(bench.tokens("b").values()) == expected([1] * 12, 9)
    bench.until_rest()


def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    for key in "ab":
        bench.local(key, [1] * 12, max_tokens=2, salt=key.encode())
        bench.run()
    assert bench.advances("b")[0].start == 0


def test_reports_say_what_came_to_be_found_and_what_gave_way() -> None:
    bench = Bench(num_pages=3, replays_in_chunks=True)
    bench.local("a", [1] * 5, max_tokens=6)
    bench.run()
    said = [1] * 5 + expected([1] * 5, 6)
    keys = page_keys(said, salt=SALT, page_size=PAGE_SIZE)
    assert [key for report in bench.reports for key in report.changes.added] == keys
    bench.reserve("b", [7] * 8)
    bench.loop.step()
    assert bench.reports[-1].changes == ((), (keys[1],))


def test_a_change_of_names_alone_is_reported() -> None:
    bench = Bench()
    bench.local("a", [1] * 9, max_tokens=8)
    bench.loop.step()
    bench.loop.pause("a")
    bench.loop.step()
    num_reports = len(bench.reports)
    bench.allocator.unname(bench.loop._sequences["a"].page_table)
    bench.loop.step()
    bench.loop.step()
    assert len(bench.reports) == num_reports + 1
    assert len(bench.reports[-1].changes.evicted) == 2


CONVERSATIONS = st.lists(
    st.tuples(
        st.integers(0, 1),  # which conversation
        st.integers(1, 30),  # how much of it is the prompt
        st.integers(1, 6),  # max_tokens
        st.integers(0, 3),  # emitted before
        st.booleans(),  # computed here
        st.integers(0, 3),  # steps before the next
        st.sampled_from(["runs", "runs", "cancelled", "broken", "never sealed"]),
    ),
    min_size=2,
    max_size=25,
)


@settings(deadline=None)  # the machine may be busy
@given(CONVERSATIONS, st.integers(10, 24), st.booleans(), st.integers(1, 9), st.sampled_from([0, 3, 12]))
def test_whatever_is_found_under_pressure_is_what_would_have_been_computed(
    turns: list[tuple[int, int, int, int, bool, int, str]],
    num_pages: int,
    is_exact: bool,
    step_tokens: int,
    num_tier_slots: int,
) -> None:
    bench = Bench(
        num_pages=num_pages, replays_in_chunks=is_exact, step_tokens=step_tokens, num_tier_slots=num_tier_slots
    )
    texts = [[first, *expected([first], 40)] for first in (7, 8)]
    for key, (which, length, max_tokens, num_emitted, is_local, num_steps, fate) in enumerate(turns):
        prompt = texts[which][:length]
        emitted = expected(prompt, min(num_emitted, max_tokens - 1))
        try:
            if fate == "never sealed":
                bench.reserve(key, prompt)
            elif is_local or not emitted:
                bench.local(key, prompt, max_tokens=max_tokens, emitted=emitted)
            else:
                bench.handed_over(key, prompt, max_tokens=max_tokens, emitted=emitted)
        except NoFreePages:
            bench.run()
            continue
        if fate == "broken":
            bench.runner.broken.add(key)
        for _ in range(num_steps):
            bench.loop.step()
        if fate in ("cancelled", "never sealed"):
            bench.loop.free(key)
    bench.run()
    bench.until_rest()
    for key, (which, length, max_tokens, *_) in enumerate(turns):
        answer = dict(enumerate(expected(texts[which][:length], max_tokens)))
        assert bench.tokens(key).items() <= answer.items()
    found = {key for report in bench.reports for key in report.changes.added}
    gone = {key for report in bench.reports for key in report.changes.evicted}
    stored = set() if bench.tier is None else set(bench.tier.parents())
    assert found - gone <= bench.allocator._page_of.keys() | stored


PRESSED = st.lists(
    st.tuples(
        st.lists(st.integers(0, 96), min_size=1, max_size=20),
        st.integers(2, 16),  # max_tokens
        st.integers(0, 5),  # emitted before
        st.booleans(),  # computed here
        st.integers(0, 4),  # class
        st.integers(0, 4),  # steps before the next
        st.sampled_from(["runs", "runs", "runs", "cancelled", "broken", "pauses"]),
    ),
    min_size=2,
    max_size=12,
)


@given(
    PRESSED,
    st.integers(9, 20),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([(0, 1), (100, 1), (6, 1), (100, 10**12)]),
)
def test_whoever_gives_way_goes_on_with_the_same_tokens(
    specs: list[tuple[list[int], int, int, bool, int, int, str]],
    num_pages: int,
    is_exact: bool,
    step_tokens: int,
    max_batch: int,
    swap: tuple[int, int],
) -> None:
    bench = Bench(
        num_pages=num_pages,
        replays_in_chunks=is_exact,
        step_tokens=step_tokens,
        max_batch=max_batch,
        num_slots=swap[0],
        slot_bytes=swap[1],
    )
    asked: dict[int, Any] = {}
    fates: dict[int, str] = {}

    def arrived() -> None:
        """What the transfers do whose pages have come."""
        for key in [key for key, future in asked.items() if future.done()]:
            prompt, max_tokens, *_ = specs[key]
            reserved = asked.pop(key).result(0)
            bench.runner.write([*reserved.page_ids], prompt, start=reserved.num_cached_tokens, is_chunk=True)
            taken = sequence(key, prompt, max_tokens=max_tokens, emitted=expected(prompt, emitted_of[key]))
            taken.num_computed_tokens = len(prompt)
            bench.loop.start(taken, salt=SALT)

    emitted_of = {key: min(spec[2], spec[1] - 1) for key, spec in enumerate(specs)}
    for key, (prompt, max_tokens, _, is_local, service_class, num_steps, fate) in enumerate(specs):
        if is_local or not emitted_of[key]:
            emitted = expected(prompt, emitted_of[key])
            bench.local(key, prompt, max_tokens=max_tokens, emitted=emitted, service_class=service_class)
        else:
            asked[key] = bench.loop.reserve(
                key, prompt, num_prompt_tokens=len(prompt), salt=SALT, service_class=service_class
            )
        fates[key] = fate
        if fate == "broken":
            bench.runner.broken.add(key)
        for _ in range(num_steps):
            bench.loop.step()
            arrived()
        if fate == "pauses":
            bench.loop.pause(key)
        if fate == "cancelled":
            bench.loop.free(key)
            asked.pop(key, None)
    for _ in range(5000):
        has_more = bench.loop.step()
        arrived()
        paused = {entry.key for report in bench.reports for entry in report.paused}
        for key in paused & bench.loop._paused:
            assert key in bench.loop._pages, "it can be handed over"
            bench.loop.unpause(key)
        if not has_more and not asked and not bench.loop._pages._chains:
            break
    bench.loop.step()
    for key, (prompt, max_tokens, *_) in enumerate(specs):
        answer = dict(list(enumerate(expected(prompt, max_tokens)))[emitted_of[key] :])
        if fates[key] in ("cancelled", "broken"):
            assert bench.tokens(key).items() <= answer.items()
        else:
            assert bench.tokens(key) == answer
    bench.until_rest()
    assert bench.swap.num_free_slots == bench.swap.num_slots
    assert not bench.loop._pages._swapped
    assert not bench.loop._classes
    preempted = [p.reason for report in bench.reports for p in report.preempted]
    assert ("swapped" in preempted) <= (swap[0] > 0)
    assert swap[1] == 1 or "swapped" not in preempted, "too dear"


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("num_slots", [0, 100])
def test_pages_that_are_copied_are_not_computed_again(is_exact: bool, num_slots: int) -> None:
    bench = Bench(num_pages=8, replays_in_chunks=is_exact, num_slots=num_slots, step_tokens=64)
    prompts = {"a": [1] * 9, "b": [2] * 9}
    for key, prompt in prompts.items():
        bench.local(key, prompt, max_tokens=20)
    bench.run()
    for key, prompt in prompts.items():
        assert list(bench.tokens(key).values()) == expected(prompt, 20)
    reasons = [(p.key, p.reason) for report in bench.reports for p in report.preempted]
    assert reasons[-1] == ("b", "swapped" if num_slots else "recomputed")
    assert (bench.swap.num_stored > 0) == (num_slots > 0)
    num_all = 2 * (9 + 19)
    # Without a copy the pages may still be found, as far as nobody took them.
    assert bench.runner.num_tokens == num_all if num_slots else num_all <= bench.runner.num_tokens <= num_all + 19
    bench.until_rest()


def test_a_reservation_waits_for_pages_and_can_be_withdrawn() -> None:
    bench = Bench(num_pages=6)
    bench.local("a", [1] * 14, max_tokens=9)
    bench.loop.step()
    waiting = bench.loop.reserve("r", [2] * 9, num_prompt_tokens=9, salt=SALT)
    other = bench.loop.reserve("s", [3] * 9, num_prompt_tokens=9, salt=SALT)
    for _ in range(3):
        assert bench.loop.step()
    assert not waiting.done()
    bench.loop.withdraw("s")
    with pytest.raises(RequestCancelled):
        other.result(0)
    bench.run()
    assert len(waiting.result(0).page_ids) == 3, "a has ended"
    bench.loop.withdraw("r")
    assert bench.allocator.num_reserved_pages == 3, "it has them: a transfer may be writing"
    bench.loop.free("r")
    bench.loop.step()
    bench.until_rest()


def test_what_is_being_received_is_nobodys_to_take() -> None:
    bench = Bench(num_pages=8)
    bench.reserve("r", [2] * 12, service_class=4)
    bench.local("a", [1] * 15, max_tokens=9, service_class=0)
    while bench.loop.step():
        pass
    assert [p.reason for report in bench.reports for p in report.preempted] == []
    bench.local("b", [1] * 27, max_tokens=5, service_class=0)
    while bench.loop.step():
        pass
    assert not bench.tokens("b")
    bench.loop.free("r")
    bench.run()
    assert list(bench.tokens("b").values()) == expected([1] * 27, 5)
    bench.until_rest()
