"""Answers of the demo model under a JSON schema: each complete one is a value of it, however it came to be."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from demo import DEMO_MODEL
from gateway.models.answer_pieces import Arguments, CallStart
from gateway.models.tool_calls import AnswerParser
from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.steps.sequence import FinishReason, Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits
from services.structured.form import AnswerForm, CalledFunction, ToolCalls, ToolFormat
from services.structured.grammar import ANY_OBJECT, Grammars, GrammarState
from tests.json_schema import assert_keeps_to
from tests.schemas import CHAIN, PERSON, SCHEMAS

EOS = (1, 2)
STOP = frozenset(EOS)
PROMPT = "Write a person as JSON.\n"
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return load_engine(DEMO_MODEL, device="cpu", num_pages=512, threads=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(parts: EngineParts) -> Grammars:
    return Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=parts.model_config.vocab_size)


@pytest.fixture
def prompt(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(PROMPT).ids)


@pytest.fixture(autouse=True)
def no_pages_are_left_behind(parts: EngineParts) -> Iterator[None]:
    yield
    parts.allocator.check_integrity()
    assert parts.allocator.counts().free == parts.pool.num_pages


def sampling(seed: int, **changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": MAX_TOKENS, "seed": seed, "stop_token_ids": STOP, **changes})


def run(engine: Engine, sequences: list[Sequence]) -> dict[Sequence, FinishReason]:
    """Steps until all have ended; why each did."""
    reasons: dict[Sequence, FinishReason] = {}
    while len(reasons) < len(sequences):
        for output in engine.step():
            assert not isinstance(output.outcome, NonFiniteLogits)
            if output.finish_reason is not None:
                reasons[output.sequence] = output.finish_reason
    return reasons


def answer_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def begin(grammars: Grammars, schema: Any, token_ids: Any = ()) -> GrammarState:
    return grammars.begin(AnswerForm(json.dumps(schema)), eos_token_ids=EOS, token_ids=token_ids)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_complete_answer_keeps_to_its_schema(
    name: str, parts: EngineParts, grammars: Grammars, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    """At temperature 1, beside answers that may be anything."""
    schema, engine = SCHEMAS[name], Engine(parts)
    asked = [engine.add(prompt, sampling(seed), grammar=begin(grammars, schema)) for seed in range(60)]
    free = [engine.add(prompt, sampling(seed, max_tokens=40)) for seed in range(4)]
    reasons = run(engine, [*asked, *free])
    complete = [sequence for sequence in asked if reasons[sequence] == "stop"]
    assert len(complete) > 12, "too few to say anything"
    for sequence in complete:
        *tokens, end = answer_of(sequence)
        assert end in EOS
        assert not STOP & set(tokens)
        assert_keeps_to(json.loads(tokenizer.decode(tokens)), schema)
    for sequence in set(asked) - set(complete):
        assert reasons[sequence] == "length"
        assert sequence.num_generated_tokens == MAX_TOKENS
        assert any(begin(grammars, schema, answer_of(sequence)).allowed()), "it is the beginning of a value"
    assert [answer_of(one) for one in free] == Engine(parts).generate(
        [prompt] * 4, [sampling(seed, max_tokens=40) for seed in range(4)]
    )


@pytest.mark.parametrize("how", [{"temperature": 0}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.1, "temperature": 1.5}])
def test_however_it_is_sampled(
    how: dict[str, Any], parts: EngineParts, grammars: Grammars, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    engine = Engine(parts)
    asked = [engine.add(prompt, sampling(seed, **how), grammar=begin(grammars, PERSON)) for seed in range(8)]
    reasons = run(engine, asked)
    complete = [sequence for sequence in asked if reasons[sequence] == "stop"]
    assert complete
    for sequence in complete:
        assert_keeps_to(json.loads(tokenizer.decode(answer_of(sequence)[:-1])), PERSON)


def test_any_object(parts: EngineParts, grammars: Grammars, tokenizer: Tokenizer, prompt: list[int]) -> None:
    engine = Engine(parts)
    asked = [
        engine.add(prompt, sampling(seed, max_tokens=300), grammar=begin(grammars, json.loads(ANY_OBJECT)))
        for seed in range(16)
    ]
    reasons = run(engine, asked)
    complete = [sequence for sequence in asked if reasons[sequence] == "stop"]
    assert complete
    for sequence in complete:
        assert isinstance(json.loads(tokenizer.decode(answer_of(sequence)[:-1])), dict)


@pytest.mark.parametrize(("schema", "seed"), [(PERSON, 3), (PERSON, 8), (CHAIN, 5)])
def test_cut_anywhere_it_goes_on_as_it_would_have(
    schema: Any, seed: int, parts: EngineParts, grammars: Grammars, prompt: list[int]
) -> None:
    """With a grammar that was given the emitted tokens, all or some of them, or none yet; all in one batch."""
    if not parts.model.exact:
        pytest.skip("answers depend on the batch here")
    engine = Engine(parts)
    whole = engine.add(prompt, sampling(seed), grammar=begin(grammars, schema))
    run(engine, [whole])
    answer = answer_of(whole)
    assert len(answer) > 8
    resumed = []
    for cut in range(1, len(answer)):
        emitted = answer[:cut]
        given = emitted[: (0, cut, cut // 2)[cut % 3]]
        grammar = begin(grammars, schema, given)
        resumed.append(engine.add(prompt, sampling(seed), emitted_token_ids=emitted, grammar=grammar))
    run(engine, resumed)
    for sequence in resumed:
        assert answer_of(sequence) == answer


TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["to", "days"],
    "additionalProperties": False,
}
TRIPS = (CalledFunction("trip", json.dumps(TRIP)), CalledFunction("round_trip", json.dumps(TRIP)))


def calls_in(text: str, tool_format: ToolFormat) -> list[Any]:
    """The arguments of all complete calls of an answer that consists of nothing else, as a gateway finds them."""
    parser = AnswerParser(tool_format=tool_format, names={"trip", "round_trip"})
    calls: list[str] = []
    for piece in parser.push(text):
        if isinstance(piece, CallStart):
            calls.append("")
        else:
            assert isinstance(piece, Arguments), "there is nothing beside the calls"
            calls[-1] += piece.text
    return [json.loads(arguments) for arguments in calls[: parser.num_complete_calls]]


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("tool_format", ToolFormat)
def test_calls_are_made_and_go_on_where_they_were(
    tool_format: ToolFormat,
    is_parallel: bool,
    parts: EngineParts,
    grammars: Grammars,
    tokenizer: Tokenizer,
    prompt: list[int],
) -> None:
    """By a model that has never seen a call, at temperature 1; and again from the middle of each answer."""
    form, engine = AnswerForm("", ToolCalls(tool_format, TRIPS, is_parallel)), Engine(parts)
    changes = {"max_tokens": 300, "logprobs": 1}
    asked = [
        engine.add(prompt, sampling(seed, **changes), grammar=grammars.begin(form, eos_token_ids=EOS))
        for seed in range(12)
    ]
    reasons = run(engine, asked)
    calls_of = {sequence: calls_in(tokenizer.decode(answer_of(sequence)), tool_format) for sequence in asked}
    for arguments in (call for calls in calls_of.values() for call in calls):
        assert_keeps_to(arguments, TRIP)
    # A model that knows no calls writes more of them for as long as it may.
    is_one = not is_parallel or tool_format is ToolFormat.LLAMA3
    num_calls = [len(calls) for sequence, calls in calls_of.items() if not is_one or reasons[sequence] == "stop"]
    assert len(num_calls) > 4
    assert set(num_calls) == {1} if is_one else max(num_calls) > 1
    if not parts.model.exact:
        return
    resumed = []
    for seed, whole in enumerate(asked):
        emitted = answer_of(whole)[: len(answer_of(whole)) // 2]
        grammar = grammars.begin(form, eos_token_ids=EOS, token_ids=emitted)
        resumed.append(engine.add(prompt, sampling(seed, **changes), emitted_token_ids=emitted, grammar=grammar))
    run(engine, resumed)
    assert [answer_of(sequence) for sequence in resumed] == [answer_of(sequence) for sequence in asked]


def test_max_tokens_cuts_it_off(parts: EngineParts, grammars: Grammars, prompt: list[int]) -> None:
    engine = Engine(parts)
    cut = engine.add(prompt, sampling(1, max_tokens=5), grammar=begin(grammars, PERSON))
    assert run(engine, [cut]) == {cut: "length"}
    assert cut.num_generated_tokens == 5


def test_emitted_tokens_that_the_grammar_does_not_allow_fail_only_their_own_sequence(
    parts: EngineParts, grammars: Grammars, prompt: list[int]
) -> None:
    """They cannot come from a worker that kept to it, and nothing is known of what would follow."""
    engine = Engine(parts)
    wrong = engine.add(prompt, sampling(1), emitted_token_ids=[50, 60], grammar=begin(grammars, PERSON))
    right = engine.add(prompt, sampling(1), grammar=begin(grammars, PERSON))
    outcomes: dict[Sequence, Any] = {}
    while len(outcomes) < 2:
        for output in engine.step():
            if output.finish_reason is not None or isinstance(output.outcome, NonFiniteLogits):
                outcomes[output.sequence] = output.outcome
    assert isinstance(outcomes[wrong], NonFiniteLogits)
    assert not isinstance(outcomes[right], NonFiniteLogits)
