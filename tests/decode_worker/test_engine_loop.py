from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.engine_loop import Advance, DecodeLoop, StepReport
from decode_worker.scheduler import BatchScheduler
from services.engine.pages import PageAllocator
from services.engine.sequence import Sampling, Sequence
from services.engine.step import NonFiniteLogits, SampledToken, StepPlan, StepResult
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated

PAGE_SIZE = 4
STOP = 999


def next_token(token_ids: list[int]) -> int:
    """The fake model: a token that depends on every token before it."""
    return sum((i + 1) * token for i, token in enumerate(token_ids)) % 97


class FakeRunner:
    """Sees that no token is computed without a used page of its own, and that replay is one token at a time."""

    def __init__(self, allocator: PageAllocator, *, replays_in_chunks: bool) -> None:
        self.allocator = allocator
        self.replays_in_chunks = replays_in_chunks
        self.broken: set[Hashable] = set()
        self.batches: list[int] = []

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def compute(self, plan: StepPlan) -> StepResult:
        self.batches.append(len(plan.items))
        outcomes: list[SampledToken | NonFiniteLogits | None] = []
        seen: set[int] = set()
        for item in plan.items:
            sequence = item.sequence
            end = sequence.num_computed_tokens + item.num_scheduled_tokens
            assert len(sequence.page_table) * PAGE_SIZE >= end
            assert all(self.allocator.state(page) == "used" for page in sequence.page_table)
            assert not seen & set(sequence.page_table)
            seen |= set(sequence.page_table)
            chunked = sequence.num_prompt_tokens
            if self.replays_in_chunks:
                chunked = max(chunked, sequence.num_prompt_tokens + sequence.num_emitted_tokens - 1)
            assert end <= chunked or item.num_scheduled_tokens == 1
            if sequence.sequence_id in self.broken:
                outcomes.append(NonFiniteLogits("NaN"))
            else:
                outcomes.append(SampledToken(next_token(sequence.token_ids)) if item.is_sampled else None)
        return StepResult(outcomes)


class Bench:
    def __init__(
        self, *, num_pages: int = 64, max_batch: int = 8, step_tokens: int = 16, replays_in_chunks: bool = False
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self.runner = FakeRunner(self.allocator, replays_in_chunks=replays_in_chunks)
        self.reports: list[StepReport] = []
        self.loop = DecodeLoop(
            runner=self.runner,
            allocator=self.allocator,
            page_size=PAGE_SIZE,
            scheduler=BatchScheduler(max_batch=max_batch, step_tokens=step_tokens, min_prefill_tokens=1),
            replays_in_chunks=replays_in_chunks,
            clock=ManualClock(),
            on_report=self.reports.append,
        )

    def local(self, key: str | int, prompt: list[int], *, max_tokens: int, emitted: list[int] | None = None) -> None:
        self.loop.start(sequence(key, prompt, max_tokens=max_tokens, emitted=emitted or []))

    def handed_over(self, key: str | int, prompt: list[int], *, max_tokens: int, emitted: list[int]) -> None:
        pages = self.loop.reserve(key, num_tokens=len(prompt), max_num_tokens=len(prompt) + max_tokens)
        assert all(self.allocator.state(page) == "reserved" for page in pages)
        taken = sequence(key, prompt, max_tokens=max_tokens, emitted=emitted)
        taken.num_computed_tokens = len(prompt)
        self.loop.start(taken)

    def run(self) -> None:
        while self.loop.step():
            pass
        self.loop.step()

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
    assert bench.reports[-1].pages == (64, 64, 0, 0, 0)
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
    bench.loop.reserve("a", num_tokens=9, max_num_tokens=20)
    assert not bench.loop.step()
    assert bench.reports[-1].pages == (8, 5, 0, 3, 0)
    bench.loop.free("a")
    bench.loop.free("a")
    bench.loop.step()
    assert bench.reports[-1].pages == (8, 8, 0, 0, 0)


def test_the_worst_case_is_promised_so_growth_cannot_fail() -> None:
    bench = Bench(num_pages=5)
    bench.handed_over("a", [1] * 4, max_tokens=16, emitted=[1])
    with pytest.raises(Exception, match="available"):
        bench.loop.reserve("b", num_tokens=1, max_num_tokens=4)
    bench.loop.free("b")
    bench.run()
    assert len(bench.tokens("a")) == 15


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
    assert bench.reports[-1].pages == (400, 400, 0, 0, 0)


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
    assert bench.reports[-1].pages == (64, 64, 0, 0, 0)


def test_a_paused_sequence_can_be_freed() -> None:
    bench = Bench()
    bench.local("a", [1, 2, 3], max_tokens=8)
    bench.loop.step()
    bench.loop.pause("a")
    bench.loop.free("a")
    bench.loop.unpause("a")
    bench.loop.pause("a")
    bench.run()
    assert bench.reports[-1].pages == (64, 64, 0, 0, 0)
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
    assert bench.reports[-1].pages == (64, 64, 0, 0, 0)
