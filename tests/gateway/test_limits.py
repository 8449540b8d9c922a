import pytest

from gateway.limits import ModelLimits, check_sampling, complete_sampling
from gateway.types import AskedSampling, Sampling
from services.runtime.errors import InvalidRequest
from services.structured.form import AnswerForm, CalledFunction, ToolCalls, ToolFormat

LIMITS = ModelLimits(vocab_size=100, context_length_tokens=50)


def completed(num_prompt_tokens=10, form=None, **asked):
    return complete_sampling(
        AskedSampling(**asked), LIMITS, num_prompt_tokens=num_prompt_tokens, seed=7, form=form, field_name="text"
    )


def test_what_is_absent_gets_the_context_the_drawn_seed_and_the_defaults():
    assert completed() == Sampling(max_tokens=40, seed=7)


def test_what_was_asked_for_stays():
    asked = {
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 9,
        "min_p": 0.25,
        "ignore_eos": True,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 2.0,
        "logit_bias": {3: 1.0},
        "logprobs": 0,
        "prompt_logprobs": 1,
    }
    sampling = completed(**asked, seed=1, stop=["a"], stop_token_ids=[4])
    assert sampling == Sampling(**asked, seed=7, stop=("a",), stop_token_ids=(4,))


@pytest.mark.parametrize(("asked", "used"), [(None, 0), (-1, 0), (0, 0), (1, 1), (99, 99), (100, 0), (2**31 - 1, 0)])
def test_a_top_k_that_keeps_all_is_zero(asked, used):
    assert completed(top_k=asked).top_k == used


def test_calls_that_must_be_made_are_not_cut_by_stop_texts():
    calls = ToolCalls(ToolFormat.HERMES, (CalledFunction("f", "{}"),))
    assert completed(stop=["a"], form=AnswerForm(tool_calls=calls)).stop == ()
    assert completed(stop=["a"], form=AnswerForm("{}")).stop == ("a",)


@pytest.mark.parametrize("asked", [{"max_tokens": 41}, {"min_tokens": 41}, {"num_prompt_tokens": 50}])
def test_what_does_not_fit_into_the_context_is_refused(asked):
    with pytest.raises(InvalidRequest) as caught:
        completed(**asked)
    assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "text")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"top_p": 0}, "top_p is 0 but must be a number in [1.4013e-45, 1]"),
        ({"stop": [""]}, "stop[0] must be a text that is not empty"),
        ({"stop": ["a"] * 17}, "stop has 17 entries; the most is 16"),
        ({"stop_token_ids": [100]}, "stop_token_ids[0] is 100 but must be a token id in [0, 100)"),
        ({"logit_bias": {100: 0.0}}, "a key of logit_bias is 100 but must be a token id in [0, 100)"),
        ({"logit_bias": {1: 101}}, "logit_bias[1] is 101 but must be a number in [-100, 100]"),
        ({"json_schema": "{}", "min_tokens": 1}, "min_tokens cannot be used with this response_format"),
    ],
)
def test_what_is_out_of_bounds_is_refused_in_the_words_of_the_api(asked, message):
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(AskedSampling(**asked), LIMITS)
    assert caught.value.message.startswith(message)
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(AskedSampling(**asked), LIMITS, prefix="sampling.")
    assert caught.value.field.startswith("sampling.")
