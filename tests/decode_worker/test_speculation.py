"""Real models that propose for each other: every answer is the one that it would be alone, whatever was proposed."""

import json
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from decode_worker.engine_loop import DecodeLoop
from decode_worker.pages import DecodePages
from decode_worker.payoff import PLAIN_EVERY, PLAIN_STEPS
from decode_worker.scheduler import BatchScheduler
from decode_worker.speculation import TRIED_STEPS, TRY_AGAIN_STEPS, Candidate, Speculation, Speculator
from demo import DEMO_DRAFT, DEMO_MODEL
from services.engine.cache.pages import PageAllocator
from services.engine.cache.swap import SwapSpace
from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.runner import ModelRunner, PreparedStep
from services.engine.speculation.draft import DraftModel
from services.engine.steps.guesses import Guess, Limit
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken, StepItem, StepPlan, StepResult
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated
from services.scheduling.prediction import DecodeSpeed
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars
from worker.engine import Advance, DecodeReport

PAGE_SIZE = 4
VOCAB_SIZE = 331
SALT = b"one"

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 3, "min_tokens": 5},
    {"temperature": 0.0, "logprobs": 1, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}},
    {"temperature": 0.0, "logprobs": 2, "stop_token_ids": frozenset(range(3, 331, 11)), "min_tokens": 9},
]


@pytest.fixture(scope="module")
def parts(checkpoint: Callable[..., Path]) -> EngineParts:
    return load_engine(checkpoint("llama3-gqa-tied"), page_size=PAGE_SIZE, num_pages=400, threads=1)


@pytest.fixture(scope="module")
def demo_parts() -> EngineParts:
    return load_engine(DEMO_MODEL, num_pages=1000, threads=1)


@pytest.fixture(scope="module")
def demo_draft() -> EngineParts:
    return load_engine(DEMO_DRAFT, num_pages=1000, threads=1)


def again(parts: EngineParts, num_pages: int | None = None) -> EngineParts:
    """Returns the model with pages of its own."""
    pool = type(parts.pool)(parts.pool.layout, num_pages or parts.pool.num_pages)
    runner = ModelRunner(parts.model, pool)
    return replace(parts, pool=pool, allocator=PageAllocator(pool.num_pages), runner=runner)


def alone(parts: EngineParts, prompt: list[int], sampling: Sampling) -> list[SampledToken]:
    engine = Engine(parts)
    engine.add(prompt, sampling)
    tokens = []
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output.outcome, SampledToken)
            tokens.append(output.outcome)
    return tokens


def slow_step_s(num_rows: int) -> float:
    return 0.010 + 1e-4 * num_rows


class SlowRunner(ModelRunner):
    """By the clock, steps are slow and a token more in one is cheap."""

    def __init__(self, parts: EngineParts, clock: ManualClock) -> None:
        super().__init__(parts.model, parts.pool)
        self._clock = clock

    def compute(self, step: PreparedStep) -> StepResult:
        self._clock.advance(slow_step_s(sum(item.num_rows for item in step.plan.items)))
        return super().compute(step)


class Bench:
    """A loop in which nothing but steps takes time, and which knows how much plain ones take."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        draft: DraftModel | None = None,
        uses_ngrams: bool = True,
        swap_bytes: int = 0,
        max_batch: int = 6,
    ) -> None:
        self.parts = parts
        self.draft = draft
        self.reports: list[DecodeReport] = []
        clock, num_pages, page_size = ManualClock(), parts.pool.num_pages, parts.pool.layout.page_size
        speculator = Speculator(clock=clock, uses_ngrams=uses_ngrams, draft=draft)
        for num_sequences in [*range(1, max_batch + 1)] * PLAIN_STEPS:
            speculator.is_open(num_sequences)
            clock.advance(slow_step_s(num_sequences))
            speculator.end_step(0, is_comparable=True)
        self.loop = DecodeLoop(
            runner=SlowRunner(parts, clock),
            pages=DecodePages(
                parts.allocator,
                page_size=page_size,
                clock=clock,
                is_exact=True,
                swap=SwapSpace(parts.pool, swap_bytes) if swap_bytes else None,
            ),
            scheduler=BatchScheduler(
                max_batch=max_batch, step_tokens=64, num_pages=num_pages, page_size=page_size, replays_in_chunks=True
            ),
            clock=clock,
            on_report=self.reports.append,
            features=[Speculation(speculator)],
        )

    def run(self) -> None:
        while self.loop.step():
            pass
        self.loop.step()
        self.loop.check_books()
        counts = self.parts.allocator.counts()
        assert (counts.free + counts.cached, counts.reserved, counts.used) == (counts.total, 0, 0)
        assert self.draft is None or self.draft.num_used_pages == 0

    def advances(self, key: object = None) -> list[Advance]:
        return [a for report in self.reports for a in report.advances if key is None or a.key == key]

    def tokens(self, key: object) -> list[SampledToken]:
        """Checks that indices and computed tokens leave no gap."""
        tokens: list[SampledToken] = []
        for advance in self.advances(key):
            assert not advance.tokens or advance.token_index == len(tokens)
            tokens += advance.tokens
        return tokens

    @property
    def num_accepted(self) -> int:
        return sum(advance.guesses.num_accepted for advance in self.advances() if advance.guesses)

    @property
    def num_rejected(self) -> int:
        return sum(advance.num_rows - advance.num_tokens for advance in self.advances())


def requests(seed: int, num: int = 12) -> list[tuple[list[int], Sampling]]:
    source = random.Random(seed)
    made = []
    for number in range(num):
        piece = [source.randrange(2, VOCAB_SIZE) for _ in range(source.randrange(2, 12))]
        sampling = Sampling(max_tokens=source.randrange(20, 50), seed=seed + number, **SAMPLINGS[number % 6])
        made.append((piece * source.randrange(1, 4), sampling))
    return made


@pytest.mark.parametrize("source", ["ngram", "draft", "both"])
@pytest.mark.parametrize("num_pages", [26, 400])
def test_answers_are_the_same_in_every_way_of_sampling_also_of_those_that_gave_way(
    parts: EngineParts, source: str, num_pages: int
) -> None:
    # The model as its own draft is right where only its tokens count, and wrong where penalties and biases do.
    draft = None if source == "ngram" else DraftModel(again(parts, 60))
    bench = Bench(again(parts, num_pages), draft=draft, uses_ngrams=source != "draft", swap_bytes=1 << 16)
    made = requests(7)
    for number, (prompt, sampling) in enumerate(made):
        bench.loop.start(Sequence(number, prompt, sampling=sampling), salt=SALT, service_class=number % 3)
        bench.loop.step()
    bench.run()
    for number, (prompt, sampling) in enumerate(made):
        assert bench.tokens(number) == alone(parts, prompt, sampling), sampling
    assert bench.num_accepted > (40 if draft else 3)
    assert bench.num_rejected > 10
    if num_pages == 26:
        assert any(report.preempted for report in bench.reports)


def test_a_draft_that_is_the_model_is_always_right(parts: EngineParts) -> None:
    bench = Bench(again(parts), draft=DraftModel(again(parts)), uses_ngrams=False)
    prompts = [[5, 6, 7, 8, 9], [11] * 20]
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=40, temperature=0.8 * number, top_k=20, seed=3)
        bench.loop.start(Sequence(number, prompt, sampling=sampling), salt=SALT)
    bench.run()
    assert bench.num_rejected == 0
    assert bench.num_accepted > 40
    assert len(bench.advances(0)) < 25


def test_a_paused_sequence_is_where_it_would_be_and_goes_on_anywhere(parts: EngineParts) -> None:
    prompt, sampling = [5, 6, 7] * 4, Sampling(max_tokens=40, temperature=0.0)
    expected = [token.token_id for token in alone(parts, prompt, sampling)]
    for num_steps in (3, 6):
        bench = Bench(again(parts), draft=DraftModel(again(parts)))
        bench.loop.start(Sequence("a", prompt, sampling=sampling), salt=SALT)
        for _ in range(num_steps):
            bench.loop.step()
        bench.loop.pause("a")
        (paused,) = bench.reports[-1].paused
        assert paused.num_computed_tokens == len(prompt) + paused.num_generated_tokens - 1
        assert paused.next_token_id == expected[paused.num_generated_tokens - 1]
        assert len(paused.page_ids) == -(-paused.num_computed_tokens // PAGE_SIZE)
        said = [token.token_id for token in bench.tokens("a")]
        assert said == expected[: paused.num_generated_tokens]
        other = Bench(again(parts), draft=DraftModel(again(parts)))
        other.loop.start(Sequence("a", prompt, sampling=sampling, emitted_token_ids=said), salt=SALT)
        other.run()
        rest = [token.token_id for advance in other.advances("a") for token in advance.tokens]
        assert said + rest == expected
        bench.loop.unpause("a")
        bench.run()
        assert [token.token_id for token in bench.tokens("a")] == expected


def test_pages_that_are_found_by_others_hold_only_what_was_accepted(parts: EngineParts) -> None:
    bench = Bench(again(parts), draft=DraftModel(again(parts)))
    prompt, sampling = [5, 6, 7] * 4, Sampling(max_tokens=40, frequency_penalty=0.3, temperature=0.0)
    expected = alone(parts, prompt, sampling)
    bench.loop.start(Sequence("a", prompt, sampling=sampling), salt=SALT)
    bench.run()
    assert bench.num_rejected > 0
    longer = prompt + [token.token_id for token in expected]
    greedy = Sampling(max_tokens=12, temperature=0.0, logprobs=2)
    bench.loop.start(Sequence("b", longer, sampling=greedy), salt=SALT)
    bench.run()
    assert bench.advances("b")[0].start == (len(longer) - 1) // PAGE_SIZE * PAGE_SIZE, "they were found"
    assert bench.tokens("b") == alone(parts, longer, greedy)


def test_any_time_of_a_cancel_leaves_no_page(parts: EngineParts) -> None:
    for num_steps in range(1, 12, 2):
        bench = Bench(again(parts, 60), draft=DraftModel(again(parts, 30)))
        for key in range(3):
            sampling = Sampling(max_tokens=30, temperature=0.0)
            bench.loop.start(Sequence(key, [key + 3, 4, 5] * 3, sampling=sampling), salt=SALT)
        for _ in range(num_steps):
            bench.loop.step()
        bench.loop.free(1)
        bench.run()
        assert len(bench.tokens(0)) == len(bench.tokens(2)) == 30


def test_proposals_never_take_a_page_from_who_waits_for_one(parts: EngineParts) -> None:
    bench = Bench(again(parts, 12), draft=DraftModel(again(parts)), max_batch=2)
    sampling = Sampling(max_tokens=30, temperature=0.0)
    for key in range(3):
        bench.loop.start(Sequence(key, [key + 3, 4, 5], sampling=sampling), salt=SALT)
    bench.run()
    for key in range(3):
        assert bench.tokens(key) == alone(parts, [key + 3, 4, 5], sampling)


def test_an_answer_keeps_its_form(demo_parts: EngineParts, demo_draft: EngineParts) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    grammars = Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=demo_parts.model_config.vocab_size)
    members = {name: {"type": "integer", "maximum": 99} for name in ("length", "width", "length_again")}
    form = AnswerForm(json.dumps({"type": "object", "properties": members, "required": [*members]}))
    prompt = list(tokenizer.encode('{"length": 1, "width": 1, "length_again": 1}\n{"length": 2, ').ids)
    for temperature in (0.0, 0.8):
        sampling = Sampling(max_tokens=60, temperature=temperature, seed=4, stop_token_ids=frozenset({1, 2}))
        bench = Bench(again(demo_parts), draft=DraftModel(again(demo_draft)))
        grammar = grammars.begin(form, eos_token_ids=[1, 2])
        bench.loop.start(Sequence("a", prompt, sampling=sampling, grammar=grammar), salt=SALT)
        bench.run()
        engine = Engine(demo_parts)
        engine.add(prompt, sampling, grammar=grammars.begin(form, eos_token_ids=[1, 2]))
        expected = []
        while engine.has_work:
            expected += [output.outcome for output in engine.step()]
        assert bench.tokens("a") == expected
        assert bench.num_accepted > 0


def test_greedy_answers_of_the_demo_model_are_the_same(demo_parts: EngineParts, demo_draft: EngineParts) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [
        "def read(self, size):\n",
        "import os\n\n\nclass Path:\n",
        "for i in range(10):\n    print(i)\n",
        "x = [1, 2, ",
    ]
    prompts = [list(tokenizer.encode(text * times).ids) for text in texts for times in (1, 3)]
    sampling = Sampling(max_tokens=40, temperature=0.0)
    bench = Bench(again(demo_parts), draft=DraftModel(again(demo_draft)), max_batch=8)
    for number, prompt in enumerate(prompts):
        bench.loop.start(Sequence(number, prompt, sampling=sampling), salt=SALT)
    bench.run()
    expected = Engine(demo_parts).generate(prompts, sampling)
    assert [[token.token_id for token in bench.tokens(number)] for number in range(len(prompts))] == expected
    assert {advance.guesses.source for advance in bench.advances() if advance.guesses} == {"ngram", "draft"}
    assert bench.num_accepted > sum(map(len, expected)) / 5


def test_what_is_not_finite_behind_a_right_proposal_fails_the_next_step(
    parts: EngineParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(again(parts), draft=DraftModel(again(parts)), uses_ngrams=False)
    prompt, sampling = [5, 6, 7], Sampling(max_tokens=30, temperature=0.0)
    expected = alone(parts, prompt, sampling)
    forward = bench.parts.model.forward
    pool = bench.parts.pool.data

    def broken(*arguments: Any) -> Any:
        logits = forward(*arguments)
        if arguments[3] is pool:  # not the draft's
            positions = arguments[1][arguments[4]]
            logits[positions == len(prompt) + 9] = float("nan")
        return logits

    monkeypatch.setattr(bench.parts.model, "forward", broken)
    bench.loop.start(Sequence("a", prompt, sampling=sampling), salt=SALT)
    bench.run()
    assert bench.tokens("a") == expected[:10]
    assert isinstance(bench.advances("a")[-1].outcome, NonFiniteLogits)
    assert bench.num_accepted > 4


def test_a_plan_that_proposes_in_the_middle_is_refused(parts: EngineParts) -> None:
    sequence = Sequence("a", [5, 6, 7], sampling=Sampling(max_tokens=5), page_table=[0, 1])
    for item in (StepItem(sequence, 3, proposed=(8,)), StepItem(sequence, 1, proposed=(8,))):
        with pytest.raises(InvariantViolated, match="proposals in the middle"):
            parts.runner.run(StepPlan([item]))
    sequence = Sequence("a", [5, 6], sampling=Sampling(max_tokens=5), emitted_token_ids=[7], page_table=[0])
    with pytest.raises(InvariantViolated, match="1 pages cannot hold 5 tokens"):
        parts.runner.run(StepPlan([StepItem(sequence, 3, proposed=(8, 9))]))
    with pytest.raises(InvariantViolated, match="vocabulary"):
        parts.runner.run(StepPlan([StepItem(sequence, 3, proposed=(VOCAB_SIZE,))]))


class ScriptedDraft(DraftModel):
    """Guesses three likely tokens whenever it is asked; each takes `guess_s`."""

    def __init__(self, clock: ManualClock, guess_s: float) -> None:
        self.clock, self.guess_s, self.num_asked = clock, guess_s, 0

    def num_lacking(self, sequence: Sequence) -> int:
        return 1

    def catch_up(self, sequences: SequenceOf[Sequence]) -> None:
        pass

    def guess(self, sequences: SequenceOf[Sequence], limits: SequenceOf[Limit]) -> list[list[Guess]]:
        self.num_asked += 1
        guesses = [[Guess(7, 0.95)] * min(3, limit.most) for limit in limits]
        self.clock.advance(self.guess_s * max(map(len, guesses)))
        return guesses


def propose_once(speculator: Speculator, clock: ManualClock, sequence: Sequence, step_s: float) -> int:
    """How many tokens; a step takes `step_s`, most of it whatever is in it, and all proposals are right."""
    num = 0
    if speculator.is_open(1):
        speed = DecodeSpeed(overhead_s=0.95 * step_s, s_per_sequence=0.05 * step_s, s_per_context_token=0.0)
        found = speculator.propose([Candidate(sequence, 8)], speed=speed)
        if found:
            proposal = found[sequence.sequence_id]
            num = len(proposal.token_ids)
            speculator.learn(sequence.sequence_id, proposal, [SampledToken(7)] * num)
    clock.advance(step_s * (1 + 0.05 * num))
    speculator.end_step(num, is_comparable=True)
    return num


@pytest.mark.parametrize("step_s", [1e-4, 1e-3, 1e-2, 1.0])
def test_a_draft_is_tried_however_fast_a_machine_is(step_s: float) -> None:
    clock = ManualClock()
    draft = ScriptedDraft(clock, 0.1 * step_s)
    speculator = Speculator(clock=clock, uses_ngrams=False, draft=draft)
    sequence = Sequence("a", [5, 6, 7], sampling=Sampling(max_tokens=5000, temperature=0.0))
    proposed = [propose_once(speculator, clock, sequence, step_s) for _ in range(2 * PLAIN_STEPS + PLAIN_EVERY + 1)]
    plain = [0] * PLAIN_STEPS
    assert proposed == [*plain, *[3] * PLAIN_EVERY, *plain, 3], "plain ones are made to compare with"


def test_a_first_guess_that_was_slow_says_nothing() -> None:
    clock, step_s = ManualClock(), 1e-3
    draft = ScriptedDraft(clock, 1.0 * step_s)
    speculator = Speculator(clock=clock, uses_ngrams=False, draft=draft)
    sequence = Sequence("a", [5, 6, 7], sampling=Sampling(max_tokens=5000, temperature=0.0))
    while not draft.num_asked:
        propose_once(speculator, clock, sequence, step_s)
    draft.guess_s = 0.1 * step_s
    assert [propose_once(speculator, clock, sequence, step_s) for _ in range(20)] == [3] * 20


def test_a_draft_that_was_slow_for_long_is_tried_again() -> None:
    clock, step_s = ManualClock(), 1e-3
    draft = ScriptedDraft(clock, 50 * step_s)
    speculator = Speculator(clock=clock, uses_ngrams=False, draft=draft)
    sequence = Sequence("a", [5, 6, 7], sampling=Sampling(max_tokens=5000, temperature=0.0))
    for _ in range(TRY_AGAIN_STEPS - 10):
        propose_once(speculator, clock, sequence, step_s)
    assert draft.num_asked == TRIED_STEPS, "it does not pay"
    draft.guess_s = 0.1 * step_s
    for _ in range(3 * TRY_AGAIN_STEPS):
        propose_once(speculator, clock, sequence, step_s)
    assert draft.num_asked > TRY_AGAIN_STEPS
