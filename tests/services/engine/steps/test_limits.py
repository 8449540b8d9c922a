import pytest

from services.engine.steps.limits import SequenceLimits
from services.runtime.errors import InvalidRequest

LIMITS = SequenceLimits(context_length_tokens=512, vocab_size=331, num_pages=4, page_size=16)


def test_the_longest_sequence_is_what_model_and_pool_allow() -> None:
    assert LIMITS.max_sequence_tokens == 64
    assert SequenceLimits(50, 331, 4, 16).max_sequence_tokens == 50


def test_what_fits_exactly_is_let_through_and_a_token_more_is_refused() -> None:
    LIMITS.check_fits(60, 4)
    with pytest.raises(InvalidRequest, match=r"KV memory holds 64 tokens \(4 pages\), but 65 were") as caught:
        LIMITS.check_fits(60, 5)
    assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "max_tokens")


def test_the_field_is_the_prompt_when_no_answer_would_fit_behind_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.check_fits(64, 1)
    assert caught.value.field == "prompt"


def test_the_first_unknown_token_is_named() -> None:
    LIMITS.check_token_ids([0, 330])
    with pytest.raises(InvalidRequest, match="token id 331 is outside the model's vocabulary of 331") as caught:
        LIMITS.check_token_ids([1, 331, -5], field="logit_bias")
    assert caught.value.field == "logit_bias"
    with pytest.raises(InvalidRequest, match="token id -1"):
        LIMITS.check_token_ids([-1])
