"""The parameters of sampling, each of them once: its type, bounds, default and meaning.

The gateway reads them from requests, checks, documents and sends them to workers; the engine applies them. The gateway
never loads torch, and the engine knows neither the gateway nor protobuf, so what both share stands below both.

A new number or flag is a row of PARAMETERS, a field of SamplingMembers and one of SamplingValues, and a field of the
message `SamplingParams` in protos/inference.proto; a test compares the four. Everything else follows from these:
parsing (HTTP, gRPC), checks, what travels (`services.runtime.sampling_wire`) and the reference of the API.
"""

import itertools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.runtime.bounds import SMALLEST_FLOAT, Bounds, invalid_value

MAX_TOKENS_EVER = 2**31 - 1
GREEDY_TEMPERATURE = 9.999999747378752e-06
"""Below it, the likeliest token is taken, whatever the seed. It is vLLM's 1e-5, as the wire rounds it."""
_MAX_PENALTY = 2.0
_MAX_LOGPROBS = 20


class SamplingMembers(msgspec.Struct):
    """The parameters that requests of every API have under the same name; None: absent. Unchecked."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class SamplingValues(msgspec.Struct, frozen=True):
    """The parameters of SamplingMembers, in their order, for an answer that is sampled: each has a value."""

    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    seed: int = 0
    """It alone decides what chance decides."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class SamplingParams(SamplingValues, frozen=True, kw_only=True):
    """How the tokens of one answer are chosen, and when it stops; complete.

    The order in which they are applied: min_tokens and logit_bias, repetition penalty, frequency and presence penalty,
    temperature, min_p, top_k, top_p. Log-probabilities are of the model's own distribution, before all of these.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends. Only the gateway sees text: they do not travel to workers."""
    stop_token_ids: Collection[int] = ()
    """Tokens that end the answer and are its last one."""
    logit_bias: Mapping[int, float] = {}
    """Added to the logits of tokens, by token id."""
    logprobs: int | None = None
    """How many of the likeliest tokens are reported beside each chosen one; None: no log-probability at all."""
    prompt_logprobs: int | None = None
    """How many are reported for each token of the prompt from the second on; None: none."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken and chance plays no part."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number, or a flag, which has no bounds. `meaning` is a sentence without its end, for the API's reference."""

    name: str
    bounds: Bounds | None
    meaning: str
    default: float | None = None
    """What a request without it means; None: no value, or none that is always the same."""
    has_model_default: bool = False
    """Whether a model's generation_config.json may say what a request without it means."""


PARAMETERS: Mapping[str, Parameter] = {
    parameter.name: parameter
    for parameter in (
        Parameter("max_tokens", Bounds(int, 1, MAX_TOKENS_EVER), "Most tokens to generate, for each answer"),
        Parameter(
            "min_tokens",
            Bounds(int, 0, MAX_TOKENS_EVER),
            "No stop before this many tokens; at most `max_tokens`",
            default=0,
        ),
        Parameter(
            "temperature",
            Bounds(float, 0, 2.0),
            "Below 0.00001 the likeliest token is taken",
            default=1,
            has_model_default=True,
        ),
        Parameter(
            "top_p",
            Bounds(float, SMALLEST_FLOAT, 1),
            "The smallest set of likeliest tokens whose probabilities reach this is kept",
            default=1,
            has_model_default=True,
        ),
        Parameter(
            "top_k",
            Bounds(int, -1, MAX_TOKENS_EVER),
            "Only the k likeliest tokens are kept; 0 and -1: all",
            default=0,
            has_model_default=True,
        ),
        Parameter(
            "min_p",
            Bounds(float, 0, 1),
            "Tokens less likely than this times the likeliest are dropped",
            default=0,
            has_model_default=True,
        ),
        Parameter("seed", Bounds(int, -(2**63), 2**63 - 1), "Equal seeds give equal answers. Absent: one is drawn"),
        Parameter("ignore_eos", None, "The model's end tokens do not end the answer", default=False),
        Parameter(
            "presence_penalty",
            Bounds(float, -_MAX_PENALTY, _MAX_PENALTY),
            "Taken off the logit of each token that was generated before",
            default=0,
        ),
        Parameter(
            "frequency_penalty",
            Bounds(float, -_MAX_PENALTY, _MAX_PENALTY),
            "Taken off once for each earlier occurrence",
            default=0,
        ),
        Parameter(
            "repetition_penalty",
            Bounds(float, SMALLEST_FLOAT, 10.0),
            "Divides positive and multiplies negative logits of tokens in prompt or answer",
            default=1,
            has_model_default=True,
        ),
        Parameter(
            "logprobs",
            Bounds(int, 0, _MAX_LOGPROBS),
            "Log-probabilities of this many likeliest tokens besides the chosen one",
        ),
        Parameter(
            "prompt_logprobs",
            Bounds(int, 0, _MAX_LOGPROBS),
            "Log-probabilities of the prompt's tokens and of this many likeliest at each place",
        ),
    )
}


MEMBERS = SamplingMembers.__struct_fields__
member_values = operator.attrgetter(*MEMBERS)
"""Returns the values of a request's members in the order of MEMBERS."""
_DEFAULTS = msgspec.structs.astuple(SamplingValues())

_BOUNDED = tuple((name, one.bounds) for name, one in PARAMETERS.items() if one.bounds is not None)
_ADMITTED = tuple((bounds.kinds, bounds.minimum, bounds.maximum) for _, bounds in _BOUNDED)
_bounded_values = operator.attrgetter(*(name for name, _ in _BOUNDED))
_PLACES, _NOTHING = range(len(_BOUNDED)), (None,) * len(_BOUNDED)


def completed_members(request: SamplingMembers) -> list[Any]:
    """Returns the values of a request's members in the order of MEMBERS, with the default of each absent one."""
    given, completed = member_values(request), [*_DEFAULTS]
    for place in itertools.compress(range(len(given)), map(operator.is_not, given, _NOTHING)):
        completed[place] = given[place]
    return completed


def check_numbers(params: msgspec.Struct, *, prefix: str = "") -> None:
    """Raises InvalidRequest for the first number that is out of bounds; `prefix` begins the field's name in it.

    `params` is a SamplingParams, or a request with fields of the same names, in which None is absent.
    """
    values = _bounded_values(params)
    for place in itertools.compress(_PLACES, map(operator.is_not, values, _NOTHING)):
        value = values[place]
        # As `Bounds.admits` does it, without the call, which every number of every request would pay for.
        kinds, lowest, highest = _ADMITTED[place]
        if type(value) not in kinds or not lowest <= value <= highest:
            name, bounds = _BOUNDED[place]
            raise invalid_value(prefix + name, value, bounds.rule)
    max_tokens, min_tokens = values[0], values[1]
    if min_tokens and max_tokens is not None and min_tokens > max_tokens:
        raise invalid_value(prefix + "min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")


def check_parameter(name: str, value: object, field_name: str) -> None:
    """Raises InvalidRequest unless `value`, given under another name, is within the bounds of the number `name`."""
    bounds = PARAMETERS[name].bounds
    assert bounds is not None
    bounds.check(value, field_name)
