"""What plugs into a decode loop is asked and told in order, and a loop without anything computes the same."""

from collections.abc import Collection, Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, cast

from decode_worker.engine_loop import DecodeLoop
from decode_worker.features import Proposal, StepAhead, StepFeature, StepTaken
from decode_worker.pages import DecodePages
from decode_worker.scheduler import BatchScheduler, Work
from services.engine.cache.pages import PageAllocator
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import SampledToken, SampledTokens, StepItem, StepPlan, StepResult
from services.runtime.clock import ManualClock
from worker.engine import DecodeReport, Guesses


class Counting:
    """Stands for a model that counts up, and chooses behind each proposal what it would have chosen there."""

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def compute(self, plan: StepPlan) -> StepResult:
        return StepResult([self._outcome(item) for item in plan.items])

    def _outcome(self, item: StepItem) -> SampledToken | SampledTokens | None:
        if not item.is_sampled:
            return None
        last, tokens = item.sequence.token_ids[-1], []
        for proposed in (*item.proposed, None):
            last += 1
            tokens.append(SampledToken(last))
            if last != proposed:
                break
        return SampledTokens(tuple(tokens)) if item.proposed else tokens[0]


class Named(Proposal):
    source = "test"


class Recorder(StepFeature):
    """Proposes what it is given, and writes down what it hears."""

    def __init__(self, proposal: tuple[int, ...] = ()) -> None:
        self.proposal = proposal
        self.heard: list[Any] = []
        self.rests: set[Hashable] = set()

    def start(self, sequence: Sequence) -> None:
        self.heard.append(("start", sequence.sequence_id))

    def free(self, key: Hashable) -> None:
        self.heard.append(("free", key))

    def resting(self, keys: Collection[Hashable]) -> Collection[Hashable]:
        return self.rests

    def propose(self, step: StepAhead) -> Mapping[Hashable, Proposal]:
        decoding = [work.key for work in step.work if step.sequences[work.key].num_generated_tokens]
        room = {key: step.look_ahead(key, len(self.proposal)) for key in decoding if self.proposal}
        return {key: Named(self.proposal[:num]) for key, num in room.items() if num}

    def computed(self, work: list[Work]) -> None:
        self.heard.append(("computed", [one.key for one in work]))

    def learn(self, key: Hashable, proposal: Proposal, tokens: SequenceOf[SampledToken]) -> None:
        self.heard.append(("learn", key, proposal.token_ids, [token.token_id for token in tokens]))

    def end_step(self, step: StepTaken) -> None:
        self.heard.append(("end_step", step.num_accepted))

    def check_books(self) -> None:
        self.heard.append("check_books")


class Bench:
    def __init__(self, *features: StepFeature) -> None:
        allocator, clock = PageAllocator(16), ManualClock()
        self.reports: list[DecodeReport] = []
        self.loop = DecodeLoop(
            runner=cast(Any, Counting()),
            pages=DecodePages(allocator, page_size=4, clock=clock, is_exact=True),
            scheduler=BatchScheduler(max_batch=4, step_tokens=16, num_pages=16, page_size=4, replays_in_chunks=True),
            clock=clock,
            on_report=self.reports.append,
            features=features,
        )

    def start(self, key: str, *, max_tokens: int) -> None:
        sequence = Sequence(key, [10], sampling=Sampling(max_tokens=max_tokens))
        self.loop.start(sequence, salt=b"s")

    def run(self) -> None:
        while self.loop.step():
            pass
        self.loop.step()

    def tokens(self, key: str) -> list[int]:
        advances = [advance for report in self.reports for advance in report.advances if advance.key == key]
        return [token.token_id for advance in advances for token in advance.tokens]


def test_a_feature_hears_of_a_sequence_in_order() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.start("a", max_tokens=2)
    bench.run()
    step = [("computed", ["a"]), ("end_step", 0)]
    assert recorder.heard == [("start", "a"), *step, step[0], ("free", "a"), step[1]]
    recorder.heard.clear()
    bench.loop.check_books()
    assert recorder.heard == ["check_books"]


def test_proposals_that_are_right_are_learnt_before_the_sequence_ends() -> None:
    recorder = Recorder((12, 13))
    bench = Bench(recorder)
    bench.start("a", max_tokens=4)
    bench.run()
    assert bench.tokens("a") == [11, 12, 13, 14]
    told = [what for what in recorder.heard if what[0] in ("learn", "free", "end_step")]
    assert told == [("end_step", 0), ("learn", "a", (12, 13), [12, 13, 14]), ("free", "a"), ("end_step", 2)]
    assert [advance.guesses for report in bench.reports for advance in report.advances] == [
        None,
        Guesses("test", 2, 2),
    ]


def test_proposals_that_are_wrong_change_no_answer() -> None:
    bench = Bench(Recorder((12, 99)))
    bench.start("a", max_tokens=6)
    bench.run()
    assert bench.tokens("a") == [11, 12, 13, 14, 15, 16]


def test_a_sequence_that_rests_has_no_token_in_the_step() -> None:
    recorder = Recorder()
    bench = Bench(recorder)
    bench.start("a", max_tokens=3)
    bench.start("b", max_tokens=3)
    bench.loop.step()
    recorder.rests = {"a"}
    bench.loop.step()
    assert ("computed", ["b"]) in recorder.heard
    recorder.rests = set()
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") == [11, 12, 13]


def test_features_by_themselves_say_and_do_nothing() -> None:
    bench = Bench(StepFeature())
    bench.start("a", max_tokens=3)
    bench.run()
    bench.loop.check_books()
    assert bench.tokens("a") == [11, 12, 13]
