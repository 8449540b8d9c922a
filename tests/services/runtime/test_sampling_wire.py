from protos import inference_pb2
from services.runtime.sampling import PARAMETERS, SamplingMembers, SamplingParams
from services.runtime.sampling_wire import read_sampling, write_sampling


def another_value(parameter):
    """A value that is not the default, and that 32 bits of a float hold exactly."""
    if parameter.bounds is None:
        return True
    return parameter.bounds.maximum if parameter.bounds.kind is int else parameter.bounds.maximum / 4


FULL = SamplingParams(
    **{name: another_value(parameter) for name, parameter in PARAMETERS.items()},
    stop_token_ids=[5, 6],
    logit_bias={3: -2.0, 4: 1.5},
)


def travelled(params):
    return SamplingParams(
        **read_sampling(inference_pb2.SamplingParams.FromString(write_sampling(params).SerializeToString()))
    )


def test_every_parameter_travels():
    default = SamplingParams(max_tokens=1)
    assert all(getattr(FULL, name) != getattr(default, name) for name in FULL.__struct_fields__ if name != "stop")
    assert travelled(FULL) == FULL


def test_what_has_presence_is_always_said_and_other_zeros_are_not():
    message = write_sampling(SamplingParams(max_tokens=4))
    said = {field.name for field, _ in message.ListFields()}
    assert said == {"max_tokens", "temperature", "top_p", "seed", "repetition_penalty"}
    assert travelled(SamplingParams(max_tokens=4)) == SamplingParams(max_tokens=4)


def test_stop_texts_stay_with_the_gateway():
    assert not write_sampling(SamplingParams(max_tokens=4, stop=("a",))).stop


def test_a_zero_with_presence_is_not_absent():
    given = read_sampling(inference_pb2.SamplingParams(temperature=0.0, top_k=0, seed=0, logprobs=0))
    assert given == {"temperature": 0.0, "seed": 0, "logprobs": 0}
    assert read_sampling(inference_pb2.SamplingParams()) == {}


def test_lists_and_maps_are_copies():
    message = inference_pb2.SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={2: 1.0})
    given = read_sampling(message)
    message.Clear()
    assert given == {"stop": ["a"], "stop_token_ids": [1], "logit_bias": {2: 1.0}}


def test_a_request_takes_what_is_read():
    assert SamplingMembers(**read_sampling(inference_pb2.SamplingParams(top_k=3))) == SamplingMembers(top_k=3)
