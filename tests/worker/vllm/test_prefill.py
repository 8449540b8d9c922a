"""A prefill worker's engine over vLLM: what it reports of what vLLM computes."""

import pytest

from services.engine.cache.pages import PageChanges
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken
from services.runtime.clock import SYSTEM_CLOCK
from tests.worker.vllm.conftest import ScriptedCore
from worker.engine import CachedPrefix, ComputedChunk, PrefillReport
from worker.vllm.core import Computed, StepDone
from worker.vllm.prefill import VllmPrefill

BLOCKS = (5, 6, 9)
"""The blocks of a prompt of ten tokens."""


class Prompts:
    """An engine, and its reports."""

    def __init__(self, core: ScriptedCore) -> None:
        self.core = core
        self.reports: list[PrefillReport] = []
        self.engine = VllmPrefill(core, clock=SYSTEM_CLOCK, on_report=self.reports.append)

    def begin(self, *, emitted: tuple[int, ...] = (), max_tokens: int = 8, stop: frozenset[int] = frozenset()) -> str:
        """Begins a prompt of ten tokens under the key `a`; returns vLLM's id."""
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=stop)
        sequence = Sequence("a", range(10), sampling=sampling, emitted_token_ids=emitted)
        self.prefix = self.engine.begin(sequence, salt=b"s")
        return self.core.asked[-1][1]

    def step(self, *computed: Computed, preempted: tuple[str, ...] = ()) -> tuple[ComputedChunk, ...]:
        """Has vLLM compute a step; returns the chunks that were reported."""
        before = len(self.reports)
        self.core.steps.append(StepDone(computed, preempted, has_more=True))
        assert self.engine.step()
        return tuple(chunk for report in self.reports[before:] for chunk in report.chunks)


@pytest.fixture
def prompts(core: ScriptedCore) -> Prompts:
    return Prompts(core)


def test_a_prompt_is_reported_by_whole_pages_and_its_last_token(prompts: Prompts) -> None:
    request_id = prompts.begin()
    assert prompts.prefix == CachedPrefix(0, ())
    assert prompts.step(Computed(request_id, 0, 6, BLOCKS[:2], None, has_ended=False)) == (
        ComputedChunk("a", 0, 6, 0, (5,), False, None, None),
    )
    token = SampledToken(77)
    assert prompts.step(Computed(request_id, 6, 4, BLOCKS, token, has_ended=True)) == (
        ComputedChunk("a", 6, 4, 1, (6, 9), True, token, None),
    )


def test_cached_pages_are_given_at_once_and_not_reported_again(prompts: Prompts) -> None:
    prompts.core.cached = (5, 6)
    request_id = prompts.begin()
    assert prompts.prefix == CachedPrefix(8, (5, 6))
    token = SampledToken(77)
    assert prompts.step(Computed(request_id, 8, 2, BLOCKS, token, has_ended=True)) == (
        ComputedChunk("a", 8, 2, 2, (9,), True, token, None),
    )


def test_pages_that_were_cached_later_are_reported_with_the_first_chunk(prompts: Prompts) -> None:
    request_id = prompts.begin()
    token = SampledToken(77)
    (chunk,) = prompts.step(Computed(request_id, 8, 2, BLOCKS, token, has_ended=True))
    assert (chunk.start, chunk.num_tokens, chunk.first_page, chunk.page_ids) == (0, 10, 0, BLOCKS)


@pytest.mark.parametrize(("max_tokens", "stop", "reason"), [(1, (), "length"), (8, (77,), "stop"), (8, (), None)])
def test_the_first_token_may_be_the_last(
    prompts: Prompts, max_tokens: int, stop: tuple[int, ...], reason: str | None
) -> None:
    request_id = prompts.begin(max_tokens=max_tokens, stop=frozenset(stop))
    (chunk,) = prompts.step(Computed(request_id, 0, 10, BLOCKS, SampledToken(77), has_ended=True))
    assert chunk.finish_reason == reason


def test_nothing_is_chosen_behind_emitted_tokens(prompts: Prompts) -> None:
    request_id = prompts.begin(emitted=(77, 78))
    (chunk,) = prompts.step(Computed(request_id, 0, 10, BLOCKS, SampledToken(77), has_ended=True))
    assert chunk.is_last
    assert chunk.outcome is None


def test_a_failure_is_the_outcome(prompts: Prompts) -> None:
    request_id = prompts.begin()
    failure = NonFiniteLogits("NaN")
    (chunk,) = prompts.step(Computed(request_id, 0, 10, BLOCKS, failure, has_ended=True))
    assert chunk.outcome is failure
    assert chunk.finish_reason is None


def test_after_a_preemption_only_what_is_new_is_reported(prompts: Prompts) -> None:
    request_id = prompts.begin()
    prompts.step(Computed(request_id, 0, 6, BLOCKS[:2], None, has_ended=False))
    assert prompts.step(preempted=(request_id,)) == ()
    assert prompts.step(Computed(request_id, 0, 5, (1, 2), None, has_ended=False)) == ()
    (chunk,) = prompts.step(Computed(request_id, 5, 5, (1, 2, 3), SampledToken(7), has_ended=True))
    assert (chunk.start, chunk.num_tokens, chunk.first_page, chunk.page_ids) == (6, 4, 1, (2, 3))


@pytest.mark.parametrize("is_kept", [False, True])
def test_blocks_are_held_until_the_prompt_is_released(prompts: Prompts, is_kept: bool) -> None:
    request_id = prompts.begin()
    prompts.engine.check_books()
    assert not prompts.core.num_checks
    prompts.engine.release("a", is_kept=is_kept)
    prompts.engine.release("a")
    assert prompts.core.asked == [("add_held", request_id), ("let_go", request_id)]
    assert prompts.engine.take_kept("a", "b") is None
    prompts.engine.drop_kept("a")
    # What vLLM says of it now is of no concern, and the books are looked at.
    assert prompts.step(Computed(request_id, 0, 6, BLOCKS[:2], None, has_ended=False)) == ()
    prompts.engine.check_books()
    assert prompts.core.num_checks == 1


def test_a_key_may_come_again_under_another_id(prompts: Prompts) -> None:
    first = prompts.begin()
    prompts.engine.release("a")
    assert prompts.begin() != first


def test_pages_that_come_free_between_steps_are_reported(prompts: Prompts) -> None:
    prompts.engine.step()
    num_reports = len(prompts.reports)
    prompts.engine.step()
    assert len(prompts.reports) == num_reports
    prompts.core.free -= 3
    prompts.engine.step()
    assert prompts.reports[-1].pages.used == 3


def test_blocks_that_come_to_be_found_are_reported(prompts: Prompts) -> None:
    prompts.engine.step()
    changes = PageChanges((b"k" * 16,), ())
    prompts.core.steps.append(StepDone((), (), has_more=False, changes=changes))
    prompts.engine.step()
    assert [report.changes for report in prompts.reports] == [PageChanges.none(), changes]
