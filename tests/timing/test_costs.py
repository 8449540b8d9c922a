"""Hostile input must not cost more than other input. Limits are far above the usual CPU time."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.models.model_files import read_model_files
from gateway.models.tokenizer import ModelTokenizer
from services.structured.form import AnswerForm
from services.structured.grammar import TooComplex, check_form
from tests.gateway.models.test_detokenizers import from_json, specials_tokenizer
from tests.gateway.models.test_tokenizer import LLAMA3_SPECIALS
from tests.gateway.models.test_tool_calls import BEFORE_SPACES, HERMES, HOSTILE, content_of, parser_of, whole
from tests.services.structured.test_cost import COSTLY


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Asserts that the block takes less than `limit_s` of this thread's CPU time."""
    began_s = time.thread_time()
    yield
    assert time.thread_time() - began_s < limit_s


@pytest.mark.parametrize("token_id", [-1, -4], ids=["unknown", "special"])
def test_tokens_without_text(token_id: int) -> None:
    tokenizer_json, num_tokens = specials_tokenizer()
    detokenizer = from_json(tokenizer_json).detokenizer()
    with within(5):
        for token in [258, *[num_tokens + token_id] * 40_000, 258]:
            detokenizer.push([token])


@pytest.mark.parametrize("part", ["<|", "<|r", "<|reserved_special_token_1", "<|eo"])
def test_beginnings_of_special_tokens(model_folder: Path, part: str) -> None:
    files = read_model_files(model_folder)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    tokenizer.add_special_tokens(LLAMA3_SPECIALS)
    model = ModelTokenizer(replace(files, tokenizer_json=tokenizer.to_str()))
    text = part * (8 * 1024 * 1024 // len(part))
    with within(1):
        assert not model._holds_special_text(text)


@pytest.mark.parametrize("row", HOSTILE, ids=HOSTILE)
def test_hostile_text(row: str) -> None:
    tool_format, text = HOSTILE[row]
    parser, pieces = parser_of(tool_format), []
    with within(5):
        for start in range(0, len(text), 4):
            pieces += parser.push(text[start : start + 4])
        pieces += parser.finish()


@pytest.mark.parametrize("row", BEFORE_SPACES, ids=BEFORE_SPACES)
def test_white_space(row: str) -> None:
    tool_format, settings, before = BEFORE_SPACES[row]
    parser = parser_of(tool_format, **settings)
    with within(5):
        for part in [before, *[" " * 64] * 12_000, "x"]:
            parser.push(part)
        parser.finish()


def test_marks() -> None:
    text = "<tool_call>" * 60_000
    with within(5):
        assert content_of(whole(HERMES, text)) == text


@pytest.mark.parametrize("case", COSTLY)
def test_schemas(case: str) -> None:
    schema: dict[str, Any] = COSTLY[case]
    with within(10), pytest.raises(TooComplex):
        check_form(AnswerForm(json.dumps(schema)))
