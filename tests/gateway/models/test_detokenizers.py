"""Incremental text of answers."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.models.model_files import ModelFiles, read_model_files
from gateway.models.tokenizer import ModelTokenizer
from tests.examples import examples

quick = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def from_json(tokenizer_json, chat_template=None):
    return ModelTokenizer(ModelFiles(None, None, tokenizer_json, chat_template))


@pytest.fixture(scope="module")
def model(model_folder):
    return ModelTokenizer(read_model_files(model_folder))


def byte_fallback_tokenizer(*, strips=True):
    """Llama 2's kind: ▁ for spaces, bytes for what is not in the vocabulary."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "lo", "é", "!", "▁▁", "日"]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer.to_str(), len(words)


def wordpiece_tokenizer():
    words = ["[UNK]", "hello", "##lo", "world", ",", "!", "##s"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer.to_str(), len(words)


def pieces_of(model, token_ids, sizes):
    """Pushes the tokens in groups of these sizes."""
    detokenizer = model.detokenizer()
    pieces, start = [], 0
    for size in [*sizes, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.finish()]


@quick
@given(st.text(max_size=80))
def test_text_comes_back_piece_by_piece(model, text):
    token_ids = asyncio.run(model.encode(text, add_special_tokens=False))
    pieces = pieces_of(model, token_ids, [1] * len(token_ids))
    for special in ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"):
        text = text.replace(special, "")
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@quick
@given(st.lists(st.integers(0, 420), max_size=60), st.lists(st.integers(0, 5), max_size=60))
def test_any_tokens_join_to_the_full_decoding(model, token_ids, sizes):
    """Random tokens are mostly broken UTF-8, and special or unknown ones."""
    assert "".join(pieces_of(model, token_ids, sizes)) == model.decode(token_ids)


def specials_tokenizer():
    """A tokenizer with two special tokens, and the size of a vocabulary that is padded with a few unknown ids."""
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer()[0])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str(), tokenizer.get_vocab_size() + 3


@pytest.mark.parametrize(
    "build",
    [
        byte_fallback_tokenizer,
        lambda: byte_fallback_tokenizer(strips=False),
        wordpiece_tokenizer,
        specials_tokenizer,
    ],
)
def test_other_decoders_join_to_the_full_decoding(build):
    tokenizer_json, num_tokens = build()
    model = from_json(tokenizer_json)

    @quick
    @given(st.lists(st.integers(0, num_tokens - 1), max_size=40), st.lists(st.integers(0, 4), max_size=40))
    def check(token_ids, sizes):
        assert "".join(pieces_of(model, token_ids, sizes)) == model.decode(token_ids)

    check()


@quick
@given(st.lists(st.integers(0, 265), max_size=40), st.lists(st.integers(0, 4), max_size=40))
def test_what_begins_calls_is_shown_between_what_other_decoders_give(token_ids, sizes):
    """Mistral 7B's kind; however tokens are grouped, each stretch between two marks is decoded after the one before."""
    tokenizer_json, marker = MARKED
    model = from_json(tokenizer_json, "{{ tools }}[TOOL_CALLS]")
    text = "".join(pieces_of(model, token_ids, sizes))
    assert text == "".join(pieces_of(model, token_ids, [1] * len(token_ids)))
    assert text.count("[TOOL_CALLS]") == token_ids.count(marker)
    if marker not in token_ids:
        assert text == model.decode(token_ids)
    unmarked = from_json(tokenizer_json, "{{ messages }}[TOOL_CALLS]")
    assert "[TOOL_CALLS]" not in "".join(pieces_of(unmarked, token_ids, sizes))
    assert "[OTHER]" not in text


def marked_tokenizer():
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer()[0])
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    return tokenizer.to_str(), tokenizer.token_to_id("[TOOL_CALLS]")


MARKED = marked_tokenizer()


@pytest.mark.parametrize("token_id", [-1, -4], ids=["unknown", "special"])
def test_tokens_without_text_cost_no_more_than_others(token_id):
    """With `ignore_eos`, `logit_bias` can make an answer consist of such tokens only."""
    tokenizer_json, num_tokens = specials_tokenizer()
    hello = 258
    detokenizer = from_json(tokenizer_json).detokenizer()
    pieces = [detokenizer.push([token]) for token in [hello, *[num_tokens + token_id] * 40_000, hello]]
    assert "".join(pieces) + detokenizer.finish() == "hello hello"


def test_a_character_that_special_tokens_interrupt_is_whole():
    tokenizer_json, num_tokens = specials_tokenizer()
    first, *rest = [1 + byte for byte in "☃".encode()]
    token_ids = [first, num_tokens - 4, *rest, 258]
    detokenizer = from_json(tokenizer_json).detokenizer()
    assert "".join(detokenizer.push([token]) for token in token_ids) + detokenizer.finish() == "☃ hello"


def test_byte_tokens_are_never_shown_as_half_a_character():
    tokenizer_json, _ = byte_fallback_tokenizer()
    model = from_json(tokenizer_json)
    snowman = [1 + byte for byte in "☃".encode()]
    hello = 258
    detokenizer = model.detokenizer()
    pieces = [detokenizer.push([token]) for token in [hello, *snowman, hello]]
    assert pieces == ["hello", "", "", "", "☃ hello"]


def test_text_waits_only_for_the_end_of_its_character(model):
    token_ids = asyncio.run(model.encode("🙂!", add_special_tokens=False))
    detokenizer = model.detokenizer()
    pieces = [detokenizer.push([token]) for token in token_ids]
    assert [piece for piece in pieces if piece] == ["🙂", "!"]
