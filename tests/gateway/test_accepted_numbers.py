"""Every number that a gateway accepts is one that a worker accepts, as it arrives over the wire."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.limits import ModelLimits, check_sampling, complete_sampling
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import asked_sampling
from gateway.types import AskedSampling
from protos import worker_pb2
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.sequence import Sampling
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import PARAMETERS
from services.runtime.sampling_wire import write_sampling
from tests.examples import examples
from worker.attempts import read_spec

LIMITS = ModelLimits(vocab_size=1000, context_length_tokens=2**31)
WORKER_LIMITS = SequenceLimits(2**31, 1000, 2**27, 16)

ODD = [0.0, -0.0, 5e-324, 1e-300, 1e-60, 1e-46, 7e-46, 7.1e-46, 1.4e-45, 1e-38, 1e-5, 1e39, 1e308, math.nan, math.inf]


def near(bound: float) -> st.SearchStrategy[float]:
    """Numbers beside a bound, in 64 and in 32 bits."""
    return st.sampled_from(
        [bound, math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf), bound * 1.0000001]
    )


def numbers(name: str) -> st.SearchStrategy:
    bounds = PARAMETERS[name].bounds
    if bounds is None:
        return st.booleans()
    if bounds.kind is int:
        edges = [limit + step for limit in (bounds.minimum, bounds.maximum, 2**32, 2**63, 2**64) for step in (-1, 0, 1)]
        return st.sampled_from([0, *edges]) | st.integers(bounds.minimum, bounds.maximum)
    return (
        st.sampled_from([*ODD, *(-number for number in ODD)])
        | near(bounds.minimum)
        | near(bounds.maximum)
        | st.floats(bounds.minimum, bounds.maximum)
    )


ASKED = st.fixed_dictionaries(
    {},
    optional={
        **{name: numbers(name) for name in PARAMETERS},
        "stop_token_ids": st.lists(st.integers(-1, 1000) | st.sampled_from([2**32, 2**64]), max_size=3),
        "logit_bias": st.dictionaries(
            st.integers(-1, 1000) | st.just(2**32), st.floats() | near(100.0) | near(-100.0), max_size=3
        ),
    },
)


def arrived(asked: AskedSampling) -> Sampling:
    """Returns the sampling of an accepted request as a worker reads and checks it. Raises InvalidRequest."""
    sampling = complete_sampling(asked, LIMITS, num_prompt_tokens=2, seed=asked.seed or 0)
    spec = worker_pb2.SequenceSpec(
        id=worker_pb2.AttemptId(request_id="r", attempt=1),
        prompt_token_ids=[1, 2],
        sampling=write_sampling(sampling),
        deadline_ms=1000,
    )
    read = read_spec(worker_pb2.SequenceSpec.FromString(spec.SerializeToString()), Sampling).sampling
    WORKER_LIMITS.check_fits(2, read.max_tokens)
    WORKER_LIMITS.check_token_ids(read.logit_bias)
    WORKER_LIMITS.check_token_ids(read.stop_token_ids)
    return read


@settings(max_examples=examples(2000), deadline=None)
@given(ASKED)
@example({"top_p": 1e-46})
@example({"repetition_penalty": 1e-60})
@example({"logit_bias": {1: 1e-60}})
def test_a_worker_accepts_the_numbers_that_a_gateway_accepts(given_values):
    asked = AskedSampling(**given_values)
    try:
        check_sampling(asked, LIMITS)
        complete_sampling(asked, LIMITS, num_prompt_tokens=2, seed=0)
    except InvalidRequest:
        return
    read = arrived(asked)
    for name in ("min_tokens", "seed", "logprobs", "prompt_logprobs", "ignore_eos"):
        if (value := given_values.get(name)) is not None:
            assert getattr(read, name) == value


@settings(max_examples=examples(500), deadline=None)
@given(st.floats(0, 1) | st.sampled_from(ODD[:9]))
def test_every_top_p_of_the_http_api_is_served(top_p):
    """OpenAI's API takes 0, and the reference says that 0 is within the bounds."""
    asked = asked_sampling(CompletionRequest(prompt="a", top_p=top_p), max_tokens=1, logprobs=None)
    check_sampling(asked, LIMITS)
    assert 0 < arrived(asked).top_p <= 1


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
def test_a_number_that_the_wire_rounds_to_zero_is_refused_with_its_field_and_rule(name):
    with pytest.raises(InvalidRequest) as refused:
        check_sampling(AskedSampling(**{name: 1e-60}), LIMITS, prefix="sampling.")
    assert refused.value.field == f"sampling.{name}"
    assert refused.value.message.startswith(f"sampling.{name} is 1e-60 but must be a number in [1.4013e-45, ")
