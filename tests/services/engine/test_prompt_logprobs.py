"""How likely the tokens of prompts were: as `transformers` has it, in any chunks and beside anybody."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.sampling import report
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import (
    PROMPT_ROWS,
    NonFiniteLogits,
    PromptTokens,
    SampledToken,
    StepItem,
    StepPlan,
    StepResult,
    with_whole_prompt,
)
from tests.fake_reports import fake_report

VARIANT = "qwen3-qk-norm"
LENGTHS = (1, 2, PROMPT_ROWS - 1, PROMPT_ROWS, PROMPT_ROWS + 1, 2 * PROMPT_ROWS, 200)


@pytest.fixture(scope="module")
def parts(checkpoint: Callable[..., Path]) -> EngineParts:
    return load_engine(checkpoint(VARIANT), dtype="float32", device="cpu", page_size=16, num_pages=256)


def first_tokens(engine: Engine, sequences: list[Sequence]) -> list[SampledToken]:
    found: dict[Sequence, SampledToken] = {}
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output.outcome, SampledToken)
            found.setdefault(output.sequence, output.outcome)
    return [found[sequence] for sequence in sequences]


@pytest.mark.parametrize("chunk_tokens", [16, 50, 512])
def test_they_are_the_models(
    parts: EngineParts, reference: Callable[[str], Any], random_ids: Callable[..., list[int]], chunk_tokens: int
) -> None:
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    engine = Engine(parts, chunk_tokens=chunk_tokens)
    sampling = Sampling(max_tokens=3, temperature=0, logprobs=0, prompt_logprobs=3)
    plain = Engine(parts, chunk_tokens=chunk_tokens)
    answers = plain.generate(prompts, Sampling(max_tokens=3, temperature=0))
    asked = [engine.add(prompt, sampling) for prompt in prompts]
    others = [engine.add(prompt, Sampling(max_tokens=3, temperature=0)) for prompt in prompts]
    for prompt, token in zip(prompts, first_tokens(engine, asked), strict=True):
        assert token.prompt is not None
        assert len(token.prompt) == len(prompt) - 1
        if len(prompt) == 1:
            continue
        with torch.no_grad():
            expected = reference(VARIANT)(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
        chosen = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert list(token.prompt.logprobs) == pytest.approx(chosen.tolist(), abs=1e-4)
        told = torch.tensor(token.prompt.top_logprobs).reshape(-1, 3)
        assert told == pytest.approx(expected.topk(3).values.float(), abs=1e-4)
        top_ids = torch.tensor(token.prompt.top_token_ids).reshape(-1, 3)
        assert expected.gather(1, top_ids) == pytest.approx(told, abs=1e-4)
    assert [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in asked] == answers
    assert [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in others] == answers
    assert parts.allocator.counts().free == parts.pool.num_pages


def test_chunks_and_neighbours_make_no_difference(parts: EngineParts, random_ids: Callable[..., list[int]]) -> None:
    if not parts.model.exact:
        pytest.skip("the model does not claim exactness on this machine")
    prompt, said = random_ids(150), []
    for chunk_tokens, num_others in ((512, 0), (512, 5), (7, 2)):
        engine = Engine(parts, chunk_tokens=chunk_tokens)
        for seed in range(num_others):
            engine.add(random_ids(20, seed=seed), Sampling(max_tokens=10, seed=seed))
        sequence = engine.add(prompt, Sampling(max_tokens=1, temperature=0, prompt_logprobs=2))
        said.append(first_tokens(engine, [sequence])[0].prompt)
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("count", [0, 1, 5, 40, 99])
def test_of_equally_likely_tokens_the_lower_ids_come_first(count: int) -> None:
    logits = torch.randint(-2, 3, (30, 40), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = torch.arange(40).float()
    logprobs = logits.double().log_softmax(-1)
    told = report(logits, [row for row in range(30)], count)
    assert told.num_top == min(count, 40)
    assert list(told.logprobs) == [float(logprobs[row, row]) for row in range(30)]
    for row in range(30):
        order = sorted(range(40), key=lambda token_id: (-float(logprobs[row, token_id]), token_id))[:count]
        place = slice(row * told.num_top, (row + 1) * told.num_top)
        assert list(told.top_token_ids[place]) == order
        assert list(told.top_logprobs[place]) == [float(logprobs[row, token_id]) for token_id in order]


def test_a_step_reports_few_tokens_of_prompts(
    parts: EngineParts, random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, run, steps = Engine(parts, chunk_tokens=512), type(parts.runner).run, []

    def counted(runner: Any, plan: StepPlan) -> StepResult:
        steps.append(sum(item.num_scheduled_tokens for item in plan.items if item.sequence.reports_prompt))
        return run(runner, plan)

    monkeypatch.setattr(type(parts.runner), "run", counted)
    asked = [engine.add(random_ids(90), Sampling(max_tokens=1, prompt_logprobs=0)) for _ in range(2)]
    assert [len(token.prompt or ()) for token in first_tokens(engine, asked)] == [89, 89]
    assert max(steps) == PROMPT_ROWS


def test_who_asks_nothing_is_told_nothing(parts: EngineParts, random_ids: Callable[..., list[int]]) -> None:
    engine = Engine(parts)
    quiet = engine.add(random_ids(5), Sampling(max_tokens=1, logprobs=1))
    resumed = engine.add(random_ids(5), Sampling(max_tokens=3, prompt_logprobs=1), emitted_token_ids=[4])
    assert [token.prompt for token in first_tokens(engine, [quiet, resumed])] == [None, None]


def test_what_is_computed_again_takes_the_place_of_what_was() -> None:
    """A prompt that was preempted in the middle begins anew, or where it was copied to."""

    sequence = Sequence("a", [1, 2, 3, 4, 5], sampling=Sampling(max_tokens=1, prompt_logprobs=0))
    assert with_whole_prompt(sequence, 0, PromptTokens(fake_report(2, 3))) is None
    assert with_whole_prompt(sequence, 2, PromptTokens(fake_report(4))) is None
    assert with_whole_prompt(sequence, 0, PromptTokens(fake_report(2, 3, 4))) is None
    token = with_whole_prompt(sequence, 3, SampledToken(9, prompt=fake_report(5)))
    assert token == SampledToken(9, prompt=fake_report(2, 3, 4, 5))


def test_a_prompt_whose_output_is_not_finite_fails_alone(
    parts: EngineParts, random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, num_calls = type(parts.model).forward, 0

    def broken(model: Any, token_ids: torch.Tensor, *more: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        logits = forward(model, token_ids, *more)
        if len(token_ids) > 1:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(type(parts.model), "forward", broken)
    bad, good = (
        Sequence(name, random_ids(length), sampling=Sampling(max_tokens=2, temperature=0, prompt_logprobs=asked))
        for name, length, asked in (("bad", 4, 1), ("good", 1, None))
    )
    for sequence in (bad, good):
        sequence.page_table = parts.allocator.allocate(1, state="used")
    outcomes = parts.runner.run(StepPlan([StepItem(bad, 4), StepItem(good, 1)])).outcomes
    assert isinstance(outcomes[0], NonFiniteLogits)
    assert isinstance(outcomes[1], SampledToken)
    assert num_calls == 2
    for sequence in (bad, good):
        parts.allocator.release(sequence.page_table)
