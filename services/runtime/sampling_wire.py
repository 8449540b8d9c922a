"""Sampling as the message that clients send to gateways, and gateways to workers. Knows no bounds."""

import itertools
import operator
from typing import Any

from protos import inference_pb2
from services.runtime.sampling import SamplingParams

_SENT = tuple(name for name in SamplingParams.__struct_fields__ if name != "stop")
_sent_values = operator.attrgetter(*_SENT)
_NAMES: dict[Any, str] = {field: field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}
_OPTIONAL = {name for field, name in _NAMES.items() if field.has_presence}
_LEFT_OUT = tuple(
    None if name in _OPTIONAL else default
    for name, default in zip(_SENT, _sent_values(SamplingParams(max_tokens=1)), strict=True)
)
"""The value of each that is not sent: None, or the zero that a field without presence has when it is absent."""


def write_sampling(params: SamplingParams) -> inference_pb2.SamplingParams:
    """Returns the message for a worker, which has no need of the texts that stop the answer."""
    values = _sent_values(params)
    given = itertools.compress(zip(_SENT, values, strict=True), map(operator.ne, values, _LEFT_OUT))
    return inference_pb2.SamplingParams(**dict(given))


def read_sampling(message: inference_pb2.SamplingParams) -> dict[str, Any]:
    """Returns what a message says, by parameter; zero is absent in fields that are not `optional`."""
    given = {_NAMES[field]: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = list(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given
