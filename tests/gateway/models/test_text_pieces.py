"""Pieces of a text have exactly the tokens of the whole, or the text stays whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

from gateway.models import text_pieces
from gateway.models.model_files import ModelFiles, read_model_files
from gateway.models.text_pieces import can_be_cut, pieces
from gateway.models.tokenizer import ModelTokenizer
from services.runtime.model_facts import ModelFacts
from tests.examples import examples

FACTS = ModelFacts(vocab_size=1, context_length_tokens=1, eos_token_ids=())
quick = settings(max_examples=examples(200), deadline=None)
PATTERNS = sorted(text_pieces._KNOWN_PATTERNS - {text_pieces._GPT2})
CHARACTERS = "abzÉя日本カ한0129²٣ \t\r\n.,;:!?()'\"“”、。_-|<>é\u0301\u200d\u00a0😀ⅧǅʰD"
TEXTS = st.lists(
    st.sampled_from(
        [*CHARACTERS, "'s", "'LL", "  ", "\r\n", "\n\n", "<|end|>", "hello", "12,345", "don't", ". ", "()"]
    ),
    min_size=1,
    max_size=60,
).map("".join)


def trained(pattern: str | None) -> Tokenizer:
    """A byte-level vocabulary with merges across everything that its pattern leaves together."""
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    words = [f"{a}{b}{c}" for a in CHARACTERS for b in CHARACTERS for c in "a .,\n'0"]
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZERS = {pattern or "ByteLevel": trained(pattern) for pattern in (None, *PATTERNS)}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(text_pieces, "PIECE_CHARS", 5)
    monkeypatch.setattr(text_pieces, "_LOOK_CHARS", 3)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_have_the_tokens_of_the_whole(kind, short_pieces):
    tokenizer = TOKENIZERS[kind]
    assert can_be_cut(tokenizer.to_str())

    @quick
    @given(TEXTS)
    def check(text):
        parts = list(pieces(text))
        assert "".join(parts) == text
        joined = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]
        assert joined == tokenizer.encode(text, add_special_tokens=False).ids

    check()


def test_usual_texts_are_cut_and_words_without_end_are_not():
    assert max(map(len, pieces("one two, three. " * 50))) < 20
    assert list(pieces("a" * 500)) == ["a" * 500]


async def test_prompts_in_pieces_have_their_special_tokens_once(model_folder, monkeypatch):
    model = ModelTokenizer(read_model_files(model_folder))
    tokenizer = Tokenizer.from_str(read_model_files(model_folder).tokenizer_json)
    monkeypatch.setattr("gateway.models.tokenizer.PIECE_CHARS", 5)
    text = "Each word, it said, is <|end|> one piece. " * 300
    assert await model.encode(text) == tokenizer.encode(text).ids
    assert await model.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False).ids
    chat = [{"role": "user", "content": text}]
    await model.encode_chat(chat)
    assert len(model._plain_ids) == 1


def _changed(change):
    document = json.loads(trained(None).to_str())
    change(document)
    return json.dumps(document)


UNKNOWN = {
    "prefix": lambda document: document["pre_tokenizer"].update(add_prefix_space=True),
    "no pattern": lambda document: document["pre_tokenizer"].update(use_regex=False),
    "no pre-tokenizer": lambda document: document.update(pre_tokenizer=None),
    "metaspace": lambda document: document.update(pre_tokenizer={"type": "Metaspace"}),
    "normalizer": lambda document: document.update(normalizer={"type": "Lowercase"}),
    "token that strips": lambda document: document["added_tokens"][0].update(lstrip=True),
    "token with a word's end": lambda document: document["added_tokens"][0].update(content="a b"),
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_texts_of_other_tokenizers_stay_whole(what):
    assert not can_be_cut(_changed(UNKNOWN[what]))


async def test_a_token_with_a_blank_is_found_where_it_would_be_cut():
    tokenizer = trained(None)
    tokenizer.add_tokens([AddedToken("word end", normalized=False)])
    model = ModelTokenizer(ModelFiles(Path(), FACTS, tokenizer.to_str(), None))
    text = "a word end " * 1000
    assert await model.encode(text) == tokenizer.encode(text).ids
