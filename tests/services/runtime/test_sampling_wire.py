from protos import inference_pb2
from services.runtime.sampling import SamplingMembers, SamplingParams
from services.runtime.sampling_wire import read_sampling, write_sampling

FULL = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    seed=-3,
    ignore_eos=True,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    stop_token_ids=[5, 6],
    logit_bias={3: -2.0, 4: 1.5},
    logprobs=0,
    prompt_logprobs=2,
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
