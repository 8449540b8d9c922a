"""The demo model's tokenizer with grammars, and schemas whose answers are short."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from demo import DEMO_MODEL
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars, GrammarState

VOCAB_SIZE = 2048
EOS = (1, 2)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    """Text to the demo model's token ids, and back."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="session")
def grammars() -> Grammars:
    """Grammars for the demo model's tokenizer."""
    return Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def begin(grammars: Grammars) -> Callable[..., GrammarState]:
    """`begin(schema, token_ids=…)`: an answer's state in the grammar of a schema."""

    def state(schema: Any, token_ids: Any = ()) -> GrammarState:
        return grammars.begin(AnswerForm(json.dumps(schema)), eos_token_ids=EOS, token_ids=token_ids)

    return state
