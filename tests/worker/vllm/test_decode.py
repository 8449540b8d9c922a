"""A decode worker's engine over vLLM: reservations, answers, and what it reports of them."""

import pytest

from services.engine.cache.pages import PageChanges
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import RequestCancelled
from tests.worker.vllm.conftest import ScriptedCore
from worker.engine import Advance, DecodeReport, Preemption, ReservedPages
from worker.vllm.core import Computed, StepDone
from worker.vllm.decode import VllmDecode

PROMPT = [*range(10)]


class Answers:
    """An engine, and its reports."""

    def __init__(self, core: ScriptedCore) -> None:
        self.core = core
        self.reports: list[DecodeReport] = []
        self.engine = VllmDecode(core, clock=SYSTEM_CLOCK, on_report=self.reports.append)

    @property
    def last_id(self) -> str:
        return self.core.asked[-1][1]

    def start(self, key: str, *, emitted: tuple[int, ...] = (), max_tokens: int = 8, stop: int = 50) -> str:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=frozenset({stop}))
        sequence = Sequence(key, PROMPT, sampling=sampling, emitted_token_ids=emitted)
        self.engine.start(sequence, salt=b"s")
        return self.last_id

    def step(self, *computed: Computed, preempted: tuple[str, ...] = ()) -> DecodeReport:
        self.core.steps.append(StepDone(computed, preempted, has_more=True))
        assert self.engine.step()
        return self.reports[-1]


@pytest.fixture
def answers(core: ScriptedCore) -> Answers:
    return Answers(core)


def test_a_reservation_gets_its_blocks_within_a_step_and_then_its_answer(answers: Answers) -> None:
    given = answers.engine.reserve("a", PROMPT, num_prompt_tokens=10, salt=b"s")
    request_id = answers.last_id
    assert not given.done()
    answers.core.waiting[request_id]((3, 4, 8, 9), 4)
    assert given.result(0) == ReservedPages((3, 4, 8), 4)
    answers.engine.withdraw("a")  # it has its pages, and keeps them
    assert answers.start("a", emitted=(60,)) == request_id
    assert answers.core.asked == [("add_awaited", request_id), ("arrived", request_id)]
    report = answers.step(Computed(request_id, 10, 1, (), SampledToken(61), has_ended=False))
    assert report.advances == (Advance("a", 10, 1, 1, SampledToken(61), None),)
    assert (report.num_running, report.num_waiting, report.waiting_tokens) == (1, 0, 0)


@pytest.mark.parametrize("end", ["withdraw", "free"])
def test_a_reservation_without_blocks_fails_when_it_is_not_needed(answers: Answers, end: str) -> None:
    given = answers.engine.reserve("a", PROMPT, num_prompt_tokens=10, salt=b"s")
    request_id = answers.last_id
    getattr(answers.engine, end)("a")
    with pytest.raises(RequestCancelled):
        given.result(0)
    assert answers.core.asked[-1] == ("abort", request_id)
    answers.engine.free("a")
    assert len(answers.core.asked) == 2


def test_blocks_of_a_transfer_that_failed_are_freed(answers: Answers) -> None:
    answers.engine.reserve("a", PROMPT, num_prompt_tokens=10, salt=b"s")
    request_id = answers.last_id
    answers.core.waiting[request_id]((3, 4, 8), 0)
    answers.engine.free("a")
    assert answers.core.asked[-1] == ("abort", request_id)


def test_a_prompt_that_is_computed_here_waits_then_decodes(answers: Answers) -> None:
    request_id = answers.start("a")
    report = answers.step(Computed(request_id, 0, 6, (), None, has_ended=False))
    assert report.advances == (Advance("a", 0, 6, 0, None, None),)
    assert (report.num_running, report.waiting_tokens) == (1, 4)
    report = answers.step(Computed(request_id, 6, 4, (), SampledToken(60), has_ended=False))
    assert report.advances == (Advance("a", 6, 4, 0, SampledToken(60), None),)
    assert report.waiting_tokens == 0


def test_one_that_has_not_begun_is_waiting(answers: Answers) -> None:
    first, _ = answers.start("a"), answers.start("b")
    report = answers.step(Computed(first, 0, 6, (), None, has_ended=False))
    assert (report.num_running, report.num_waiting, report.waiting_tokens) == (1, 1, 14)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_stop_token_ends_the_answer_also_where_vllm_would_continue(answers: Answers, has_ended: bool) -> None:
    request_id = answers.start("a")
    report = answers.step(Computed(request_id, 0, 10, (), SampledToken(50), has_ended=has_ended))
    assert report.advances[0].finish_reason == "stop"
    assert report.num_running == 0
    assert (("abort", request_id) in answers.core.asked) is not has_ended
    answers.engine.free("a")
    answers.engine.check_books()
    assert answers.core.num_checks == 1


def test_a_sequence_that_failed_leaves(answers: Answers) -> None:
    request_id = answers.start("a")
    failure = NonFiniteLogits("NaN")
    report = answers.step(Computed(request_id, 0, 10, (), failure, has_ended=False))
    assert report.advances[0].outcome is failure
    assert answers.core.asked[-1] == ("abort", request_id)
    assert report.num_running == 0


def test_a_preempted_sequence_is_reported_and_begins_again(answers: Answers) -> None:
    request_id = answers.start("a", emitted=(60, 61))
    answers.step(Computed(request_id, 0, 12, (), SampledToken(62), has_ended=False))
    report = answers.step(preempted=(request_id,))
    assert report.preempted == (Preemption("a", "recomputed"),)
    assert (report.num_running, report.num_waiting, report.waiting_tokens) == (0, 1, 10)
    report = answers.step(Computed(request_id, 0, 13, (), SampledToken(63), has_ended=False))
    assert report.advances == (Advance("a", 0, 13, 3, SampledToken(63), None),)


def test_a_sequence_that_is_to_be_paused_continues(answers: Answers) -> None:
    request_id = answers.start("a")
    answers.engine.pause("a")
    answers.engine.unpause("a")
    report = answers.step(Computed(request_id, 0, 10, (), SampledToken(60), has_ended=False))
    assert report.paused == ()
    assert report.advances


def test_what_vllm_computed_of_a_freed_answer_is_not_reported(answers: Answers) -> None:
    request_id = answers.start("a")
    answers.engine.free("a")
    report = answers.step(Computed(request_id, 0, 10, (), SampledToken(60), has_ended=False))
    assert report.advances == ()


def test_blocks_that_come_to_be_found_and_no_longer_are_are_reported_without_a_step_of_an_answer(
    answers: Answers,
) -> None:
    answers.start("a")
    answers.step()
    changes = PageChanges((b"k" * 16,), (b"l" * 16,))
    answers.core.steps.append(StepDone((), (), has_more=False, changes=changes))
    assert not answers.engine.step()
    assert [report.changes for report in answers.reports] == [PageChanges.none(), changes]
