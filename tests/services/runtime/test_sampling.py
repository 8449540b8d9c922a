import math
import struct

import msgspec
import pytest

from protos import inference_pb2
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import (
    MEMBERS,
    PARAMETERS,
    SamplingMembers,
    SamplingParams,
    SamplingValues,
    check_numbers,
    check_parameter,
    completed_members,
)

BOUNDED = [name for name, parameter in PARAMETERS.items() if parameter.bounds is not None]
MESSAGE = inference_pb2.SamplingParams.DESCRIPTOR
TEXTS_AND_TOKENS = {"stop", "stop_token_ids", "logit_bias"}
"""Parameters that are neither a number nor a flag."""


def params(**values):
    return SamplingParams(**{"max_tokens": 4, **values})


def test_requests_answers_rows_and_the_message_have_the_same_parameters():
    assert SamplingMembers.__struct_fields__ == SamplingValues.__struct_fields__
    assert set(MESSAGE.fields_by_name) == set(SamplingParams.__struct_fields__)
    assert set(SamplingParams.__struct_fields__) == PARAMETERS.keys() | TEXTS_AND_TOKENS
    assert PARAMETERS.keys() == {*MEMBERS, "max_tokens", "logprobs", "prompt_logprobs"}


def test_each_row_says_what_its_field_is():
    kinds = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    for name, parameter in PARAMETERS.items():
        kind = bool if parameter.bounds is None else parameter.bounds.kind
        assert kinds[name] in (kind, kind | None), name
        if parameter.default is not None:
            assert parameter.default == getattr(SamplingValues(), name), name


def test_a_field_of_the_message_without_presence_has_zero_as_its_default():
    """What is not sent is read as zero, so that no other default would arrive."""
    for field in MESSAGE.fields:
        if not field.has_presence and field.name in MEMBERS:
            assert getattr(SamplingValues(), field.name) == 0, field.name


@pytest.mark.parametrize("name", BOUNDED)
def test_every_number_is_checked_at_both_ends(name):
    bounds = PARAMETERS[name].bounds
    for value in (bounds.minimum, bounds.maximum):
        check_numbers(params(**{"max_tokens": 2**31 - 1, name: value}))
    for value in (bounds.minimum - 1, bounds.maximum + 1, math.nan, True, "1"):
        with pytest.raises(InvalidRequest) as caught:
            check_numbers(params(**{name: value}), prefix="sampling.")
        assert caught.value.field == f"sampling.{name}"
        assert caught.value.message.endswith(f" but must be {bounds.rule}")


def test_the_minimum_of_tokens_is_at_most_the_maximum():
    check_numbers(params(min_tokens=4))
    with pytest.raises(InvalidRequest) as caught:
        check_numbers(params(min_tokens=5))
    assert caught.value.message == "min_tokens is 5 but must be at most max_tokens, which is 4"


def test_another_name_of_a_parameter_has_its_bounds():
    check_parameter("logprobs", 20, "top_logprobs")
    with pytest.raises(InvalidRequest, match="top_logprobs is 21 but must be an integer in"):
        check_parameter("logprobs", 21, "top_logprobs")


def test_what_is_absent_gets_its_default_and_a_zero_that_was_given_stays():
    values = SamplingValues(*completed_members(SamplingMembers(temperature=0.0, top_k=5)))
    assert values == SamplingValues(temperature=0.0, top_k=5)


def test_only_a_temperature_next_to_nothing_is_greedy():
    assert params(temperature=0.0).is_greedy
    assert params(temperature=9e-6).is_greedy
    for temperature in (1e-5, as_float(1e-5)):
        assert not params(temperature=temperature).is_greedy


@pytest.mark.parametrize("temperature", [9.99e-6, 9.9999998e-6, 1e-5])
def test_the_wire_makes_no_temperature_greedy_and_none_random(temperature):
    assert params(temperature=temperature).is_greedy == params(temperature=as_float(temperature)).is_greedy


def as_float(number):
    return struct.unpack("f", struct.pack("f", number))[0]
