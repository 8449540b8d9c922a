"""What vLLM is left to find the likeliest is the token that this project's own sampler chooses."""

import pickle
import random
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

import numpy as np
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from services.engine.sampling import sample
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken
from worker.vllm.sampling import OnRunnerV1, OnRunnerV2, TokenChoice, sampling_params


@dataclass
class Ranks:
    """The ranks of a model: what the first one sends, the others receive."""

    world_size: int = 1
    is_first_rank: bool = True
    sent: list[torch.Tensor] = field(default_factory=list)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_first_rank:
            self.sent.append(tensor)
            return tensor
        return self.sent.pop(0)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """The ranks of the processors that a test makes; one at first."""
    ranks = Ranks()
    monkeypatch.setattr("worker.vllm.sampling.get_tp_group", lambda: ranks)
    return ranks


VOCAB = 307
CPU = torch.device("cpu")
ASKED = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": frozenset({5, 6})},
    {"temperature": 0.7, "logit_bias": {3: 4.0, 4: -100.0}},
    {"temperature": 1.0, "logprobs": 3},
]


class OddTokens:
    """A grammar of odd token ids."""

    num_tokens = 0

    def advance(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)

    def allowed(self) -> bytes:
        return bytes([0b10101010]) * (VOCAB // 8)


def sequence(
    number: int, *, emitted: tuple[int, ...] = (), grammar: OddTokens | None = None, **asked: object
) -> Sequence:
    sampling = Sampling(max_tokens=64, seed=1000 + number, **asked)  # type: ignore[arg-type]
    return Sequence(number, [7, 8, 9, *range(number)], sampling=sampling, emitted_token_ids=emitted, grammar=grammar)


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class RunnerV1:
    """Rows as vLLM's first runner has them: a request's row changes, and its list of tokens grows."""

    def __init__(self) -> None:
        self.processor = OnRunnerV1(None, CPU, False)
        self.rows: list[tuple[TokenChoice, list[int], int]] = []

    def update(self, **changes: object) -> None:
        empty: dict[str, object] = {"removed": [], "added": [], "moved": []}
        self.processor.update_state(BatchUpdate(batch_size=len(self.rows), **(empty | changes)))  # type: ignore[arg-type]

    def add(self, sequences: list[Sequence]) -> None:
        added = []
        for one in sequences:
            choice, generated = TokenChoice(one), []
            self.rows.append((choice, generated, one.num_tokens))
            params = sampling_params(choice, max_tokens=64)
            added.append((len(self.rows) - 1, params, list(one.token_ids), generated))
        self.update(added=added)

    def step(self, logits: torch.Tensor) -> list[int]:
        token_ids = self.processor.apply(logits).argmax(dim=-1).tolist()
        for token_id, (choice, generated, num_prompt_tokens) in zip(token_ids, self.rows, strict=True):
            generated.append(token_id)
            assert choice.sequence is not None
            if choice.sequence.num_tokens < num_prompt_tokens + len(generated):
                choice.sequence.append_token(token_id)
        return token_ids


def test_each_row_has_the_token_that_our_sampler_chooses_step_after_step() -> None:
    ours = [sequence(number, **asked) for number, asked in enumerate(ASKED)]
    runner = RunnerV1()
    runner.add([sequence(number, **asked) for number, asked in enumerate(ASKED)])
    for step in range(16):
        logits = logits_of(len(ASKED), seed=step)
        expected = sample(logits.clone(), ours)
        token_ids = runner.step(logits)
        assert token_ids == [one.token_id for one in expected if isinstance(one, SampledToken)]
        assert runner.rows[-1][0].outcome == expected[-1]
        for one, token_id in zip(ours, token_ids, strict=True):
            one.append_token(token_id)


def test_an_answer_that_is_cut_and_resumed_in_other_company_draws_as_if_it_had_not_been() -> None:
    whole = sequence(4, **ASKED[5])
    runner = RunnerV1()
    runner.add([whole])
    drawn = [runner.step(logits_of(1, seed=step))[0] for step in range(12)]
    for cut in (1, 5, 11):
        other = RunnerV1()
        other.add([sequence(1, **ASKED[1]), sequence(4, emitted=tuple(drawn[:cut]), **ASKED[5])])
        for step in range(cut, 12):
            logits = torch.cat([logits_of(1, seed=100 + step), logits_of(1, seed=step)])
            assert other.step(logits)[1] == drawn[step]


def test_tokens_that_the_sequence_has_already_are_taken_and_not_drawn() -> None:
    """A decode worker computes the prompt's last token again; the first of the answer was chosen elsewhere."""
    choice = TokenChoice()
    runner = RunnerV1()
    runner.rows.append((choice, [], 3))
    runner.update(added=[(0, sampling_params(choice, max_tokens=64), [7, 8, 9], runner.rows[0][1])])
    choice.sequence = sequence(0, emitted=(11, 12), temperature=1.0)
    ours = sequence(0, emitted=(11, 12), temperature=1.0)
    assert [runner.step(logits_of(1, seed=step))[0] for step in range(2)] == [11, 12]
    assert choice.outcome == SampledToken(12)
    logits = logits_of(1, seed=9)
    (expected,) = sample(logits.clone(), [ours])
    assert isinstance(expected, SampledToken)
    assert runner.step(logits) == [expected.token_id]


def test_rows_move_with_their_requests_and_requests_of_others_are_left_alone() -> None:
    rng, runner = random.Random(3), RunnerV1()
    runner.add([sequence(number, **asked) for number, asked in enumerate(ASKED)])
    for step in range(8):
        first, second = rng.sample(range(len(runner.rows)), 2)
        runner.rows[first], runner.rows[second] = runner.rows[second], runner.rows[first]
        runner.update(moved=[(first, second, MoveDirectionality.SWAP)])
        ours = [choice.sequence for choice, _, _ in runner.rows]
        logits = logits_of(len(ours), seed=step)
        expected = sample(logits.clone(), [one for one in ours if one is not None])
        assert runner.step(logits) == [one.token_id for one in expected if isinstance(one, SampledToken)]
    gone = runner.rows.pop()
    runner.update(removed=[len(runner.rows)])
    logits = logits_of(len(runner.rows) + 1, seed=99)
    likeliest = int(logits[-1].argmax())
    assert runner.processor.apply(logits)[-1].argmax() == likeliest
    assert gone[0].sequence is not None


def test_a_grammar_rules_out_tokens_and_is_given_each_token_once() -> None:
    grammar, runner = OddTokens(), RunnerV1()
    runner.add([sequence(0, grammar=grammar, temperature=1.5), sequence(1, temperature=1.5)])
    drawn = [runner.step(logits_of(2, seed=step)) for step in range(10)]
    assert {first % 2 for first, _ in drawn} == {1}
    assert {second % 2 for _, second in drawn} == {0, 1}
    assert grammar.num_tokens == 9


def test_a_row_that_is_not_finite_fails_alone() -> None:
    runner = RunnerV1()
    runner.add([sequence(0, temperature=0.0), sequence(1, temperature=0.0)])
    logits = logits_of(2, seed=1)
    likeliest = int(logits[1].argmax())
    logits[0, 5] = float("nan")
    runner.processor.apply(logits)
    assert isinstance(runner.rows[0][0].outcome, NonFiniteLogits)
    assert runner.rows[1][0].outcome == SampledToken(likeliest)


class States:
    device = CPU


def context(slots: list[int], lengths: list[int]) -> LogitsContext:
    mapping = torch.tensor(slots)
    return LogitsContext(mapping, mapping, np.array(slots), mapping * 0, mapping * 0, mapping * 0, np.array(lengths))


def test_the_second_runner_has_the_same_choices_by_slot() -> None:
    processor = OnRunnerV2(None, States())  # type: ignore[arg-type]
    sequences = {slot: sequence(slot, **asked) for slot, asked in enumerate(ASKED)}
    for slot, one in sequences.items():
        assert processor.add_request(slot, sampling_params(TokenChoice(one), max_tokens=64))
    slots = [3, 9, 5]
    logits = logits_of(3, seed=4)
    expected = sample(logits.clone(), [sequences[slot] for slot in slots])
    chosen = processor.apply(logits, context(slots, [sequences[slot].num_tokens for slot in slots])).argmax(dim=-1)
    assert chosen.tolist() == [one.token_id for one in expected if isinstance(one, SampledToken)]
    from vllm.sampling_params import SamplingParams

    assert not processor.add_request(3, SamplingParams())  # the slot has a request of its own, of a warm-up
    logits = logits_of(1, seed=5)
    assert torch.equal(processor.apply(logits.clone(), context([3], [4])), logits)


def test_every_rank_has_the_tokens_that_the_first_one_chose(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    ranks.world_size = 2
    first = RunnerV1()
    monkeypatch.setattr(
        "worker.vllm.sampling.get_tp_group", lambda: Ranks(world_size=2, is_first_rank=False, sent=ranks.sent)
    )
    other = RunnerV1()
    first.add([sequence(number, **asked) for number, asked in enumerate(ASKED)])
    choices = [pickle.loads(pickle.dumps(choice)) for choice, _, _ in first.rows]
    assert all(choice.sequence is None for choice in choices)  # it knows nothing of answers
    other.update(added=[(row, sampling_params(one, max_tokens=64), [7], []) for row, one in enumerate(choices)])
    drawn = set()
    for step in range(6):
        logits = logits_of(len(ASKED) + 1, seed=step)  # one more row, of which nothing is chosen
        token_ids = first.processor.apply(logits.clone()).argmax(dim=-1).tolist()
        assert other.processor.apply(logits.clone()).argmax(dim=-1).tolist() == token_ids
        assert token_ids[-1] == int(logits[-1].argmax())
        drawn.add(tuple(token_ids))
        for (choice, generated, _), token_id in zip(first.rows, token_ids, strict=False):
            assert choice.sequence is not None
            choice.sequence.append_token(token_id)
            generated.append(token_id)
    assert len(drawn) == 6
