import json
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from demo import DEMO_MODEL
from services.runtime.errors import ModelError
from services.structured import grammar as grammar_module
from services.structured.form import AnswerForm
from services.structured.grammar import ANY_OBJECT, Grammars, GrammarState, UnusableSchema, check_form
from tests.json_schema import assert_keeps_to
from tests.schemas import PERSON, SCHEMAS, UNUSABLE
from tests.waiting import HANG_LIMIT_S

Begin = Callable[..., GrammarState]

EOS = (1, 2)
VOCAB_SIZE = 2048


def token_set(bits: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), json.loads(ANY_OBJECT), {}], ids=[*SCHEMAS, "object", "any"])
def test_usable_schema(schema: Any) -> None:
    check_form(AnswerForm(json.dumps(schema)))


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_schema_names_what_is_wrong(case: str, grammars: Grammars) -> None:
    schema, named = UNUSABLE[case]
    for compile_it in (check_form, lambda form: grammars.begin(form, eos_token_ids=EOS)):
        with pytest.raises(UnusableSchema, match=named) as caught:
            compile_it(AnswerForm(json.dumps(schema)))
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "[1]", "5", '{"a":', '{"a":' * 200 + "1" + "}" * 200])
def test_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(UnusableSchema):
        check_form(AnswerForm(text))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEMAS)), st.integers(0, 2**32))
def test_whatever_is_allowed_ends_as_a_value_of_the_schema(name: str, seed: int) -> None:
    """A walk that takes any allowed token; beside it, at each step, a state that was given all tokens at once."""
    grammars, tokenizer = WALK
    schema, source = json.dumps(SCHEMAS[name]), random.Random(seed)
    state = grammars.begin(AnswerForm(schema), eos_token_ids=EOS)
    tokens: list[int] = []
    while True:
        bits = state.allowed()
        replayed = grammars.begin(AnswerForm(schema), eos_token_ids=EOS, token_ids=tokens)
        assert replayed.allowed() == bits
        assert replayed.num_tokens == state.num_tokens == len(tokens)
        allowed = token_set(bits)
        assert allowed, "there is always a way on"
        assert bool(allowed & {*EOS}) == state.is_complete == replayed.is_complete
        # Ends as soon as it can: some of the schemas could continue without end.
        token = EOS[0] if EOS[0] in allowed else source.choice(sorted(allowed))
        if token in EOS:
            break
        tokens.append(token)
        state.advance([token])
    assert_keeps_to(json.loads(tokenizer.decode(tokens)), SCHEMAS[name])


WALK = (
    Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=VOCAB_SIZE),
    Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
)


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"Ada","age":36,"is_member":true}',
        '{ "name": "Größe \\n 🙂", "age": 0, "is_member": false }',
        '{\n    "name": "",\n    "age": 150,\n    "is_member": true\n}',
    ],
)
def test_values_can_be_written_as_models_write_them(text: str, begin: Begin, demo_tokenizer: Tokenizer) -> None:
    state = begin(PERSON)
    for token in demo_tokenizer.encode(text, add_special_tokens=False).ids:
        assert token in token_set(state.allowed())
        assert not state.is_complete
        state.advance([token])
    assert state.is_complete
    assert token_set(state.allowed()) == {*EOS}


@pytest.mark.parametrize(
    "text", ['{"name":"Ada","age":151', '{"age":', '{"name":"Ada","nick', "x", ' {"name"', '{"name":5']
)
def test_other_text_is_not_allowed(text: str, begin: Begin, demo_tokenizer: Tokenizer) -> None:
    state = begin(PERSON)
    state.advance(demo_tokenizer.encode(text, add_special_tokens=False).ids)
    assert token_set(state.allowed()) == set()
    assert not state.is_complete
    state.advance(demo_tokenizer.encode("}", add_special_tokens=False).ids)
    assert token_set(state.allowed()) == set(), "there is no way back"


@pytest.mark.parametrize(("before", "count"), [("{", 1), ("{\n", 24), ("{\r\n", 24), ('{"a":', 1), ('{"a":1,', 1)])
def test_white_space_has_an_end(before: str, count: int, begin: Begin, demo_tokenizer: Tokenizer) -> None:
    (space,) = demo_tokenizer.encode(" ", add_special_tokens=False).ids
    (line,) = demo_tokenizer.encode("\n", add_special_tokens=False).ids
    state = begin({"type": "object"}, demo_tokenizer.encode(before, add_special_tokens=False).ids)
    for _ in range(count):
        assert space in token_set(state.allowed())
        state.advance([space])
    assert not {space, line} & token_set(state.allowed())
    assert token_set(state.allowed())


def test_answers_do_not_share_their_state(begin: Begin, demo_tokenizer: Tokenizer) -> None:
    first, second = begin(PERSON), begin(PERSON)
    start = second.allowed()
    first.advance(demo_tokenizer.encode('{"name"', add_special_tokens=False).ids)
    assert first.allowed() != start
    assert second.allowed() == start
    assert begin(PERSON).allowed() == start


def test_the_first_mask_is_computed_beside_the_engine(grammars: Grammars) -> None:
    class NoMask:
        """A matcher that has not been asked when the answer begins."""

        def __init__(self) -> None:
            self.num_tokens = 0

        def consume_tokens(self, tokens: list[int]) -> None:
            self.num_tokens += len(tokens)

        def compute_bitmask(self) -> bytes:
            assert self.num_tokens, "the first mask is known"
            return b"later"

        def is_error(self) -> bool:
            return False

    for name, schema in SCHEMAS.items():
        matcher, first = grammars._beginning(AnswerForm(json.dumps(schema)), EOS)
        assert first == matcher.compute_bitmask(), name
    state = GrammarState(NoMask(), first=first)  # type: ignore[arg-type]
    assert state.allowed() == state.allowed() == first
    state.advance([])
    assert state.allowed() == first
    state.advance([1])
    assert state.allowed() == b"later"


def test_the_ends_of_sequence_are_those_that_were_given(grammars: Grammars, demo_tokenizer: Tokenizer) -> None:
    tokens = demo_tokenizer.encode("null", add_special_tokens=False).ids
    for eos in ((1,), (2,), (2, 1)):
        state = grammars.begin(AnswerForm('{"type":"null"}'), eos_token_ids=eos, token_ids=tokens)
        assert token_set(state.allowed()) == set(eos)


def test_tokens_that_only_the_model_has_are_never_allowed() -> None:
    wide = Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=VOCAB_SIZE + 100)
    state = wide.begin(AnswerForm("{}"), eos_token_ids=EOS)
    assert max(token_set(state.allowed())) < VOCAB_SIZE
    narrow = Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=10)
    assert token_set(narrow.begin(AnswerForm("{}"), eos_token_ids=EOS).allowed()) == token_set(state.allowed())


def test_threads_share_grammars(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """More schemas than are kept, from several threads: each gets its own, whether it was known or not."""
    monkeypatch.setattr(grammar_module, "MAX_CACHED_GRAMMARS", 3)
    schemas = [json.dumps({"const": f"value {n}"}) for n in range(8)]

    def first_tokens(n: int) -> list[set[int]]:
        state = grammars.begin(AnswerForm(schemas[n % 8]), eos_token_ids=EOS)
        seen = []
        while not state.is_complete:
            seen.append(token_set(state.allowed()))
            state.advance([max(seen[-1])])
        return seen

    with ThreadPoolExecutor(4) as threads:
        walks = list(threads.map(first_tokens, range(64)))
    assert all(walks[n] == walks[n % 8] for n in range(64))
    assert len({str(walk) for walk in walks}) == 8


@pytest.mark.parametrize("text", ["<|end|>", "a <|eos|> b", "<tool_call>", "[TOOL_CALLS]x", "plain"])
def test_texts_of_special_tokens_are_written_with_other_tokens(text: str, tmp_path: Path) -> None:
    """An end of sequence would end the answer inside its string."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert_writes(text, Grammars(tmp_path / "tokenizer.json", vocab_size=VOCAB_SIZE), tokenizer, EOS)


@pytest.mark.parametrize("text", ["</s>", "a<unk>", "plain"])
def test_texts_of_special_tokens_with_byte_fallback(text: str, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'"</skunpli>a']
    vocabulary = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert_writes(text, Grammars(tmp_path / "tokenizer.json", vocab_size=len(vocabulary)), tokenizer, (2,))


def assert_writes(text: str, grammars: Grammars, tokenizer: Tokenizer, eos: tuple[int, ...]) -> None:
    state = grammars.begin(AnswerForm(json.dumps({"const": text})), eos_token_ids=eos)
    tokens: list[int] = []
    while not state.is_complete:
        allowed = token_set(state.allowed())
        assert allowed
        tokens.append(max(allowed))
        state.advance(tokens[-1:])
    assert tokenizer.decode(tokens, skip_special_tokens=True) == json.dumps(text)


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_tokenizer_that_cannot_be_used(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", vocab_size=10).begin(AnswerForm("{}"), eos_token_ids=EOS)


def test_ends_of_sequence_that_do_not_exist(grammars: Grammars) -> None:
    for eos in ((), (VOCAB_SIZE,)):
        with pytest.raises(ModelError):
            grammars.begin(AnswerForm("{}"), eos_token_ids=eos)


def test_a_hostile_expression_is_bounded_before_the_first_step(grammars: Grammars) -> None:
    """Its first step is done where it is compiled; the library's own limits would let it take 250 MB and seconds."""
    state = grammars.begin(AnswerForm('{"type":"string","pattern":"^(a{1000}){1000}$"}'), eos_token_ids=EOS)
    assert token_set(state.allowed())


def test_a_hostile_expression_is_bounded_at_later_steps(begin: Begin, demo_tokenizer: Tokenizer) -> None:
    """Here such a step allows nothing, so the answer fails."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^" + "a?" * 1000 + "$"}}}
    state = begin(schema)
    for char in '{"a":"':
        assert token_set(state.allowed())
        state.advance(demo_tokenizer.encode(char, add_special_tokens=False).ids)
    assert not token_set(state.allowed())
    assert not state.is_complete


def test_the_library_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, gateway.assembly, decode_worker.worker, prefill_worker.worker, gateway.forms.response_format\n"
        "assert 'llguidance' not in sys.modules\n"
        "from services.structured.grammar import AnswerForm, check_form; check_form(AnswerForm('{}'))\n"
        "assert 'llguidance' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_LIMIT_S)


DEAR_TO_FORCE: dict[str, Any] = {
    "text": {"enum": ["x" * 60_000]},
    "words": {"const": "some words " * 5000},
    "member": {"type": "object", "properties": {"p" * 30_000: {"type": "integer"}}, "required": ["p" * 30_000]},
    "repetition": {"type": "string", "pattern": "^(abcdefgh){2000}$"},
}


def test_a_long_text_is_written_to_its_end(begin: Begin, demo_tokenizer: Tokenizer) -> None:
    text, source = "".join(random.Random(1).choices("abcdef gh", k=600)), random.Random(2)
    state, written = begin({"const": text}), []
    while not (allowed := token_set(state.allowed())) & {*EOS}:
        written.append(source.choice(sorted(allowed)))
        state.advance(written[-1:])
    assert json.loads(demo_tokenizer.decode(written)) == text
