"""How the answers to a prompt are chosen, in the words of a Python program. Knows no engine."""

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from gateway.forms.response_format import form_in
from gateway.requests.seeds import choice_seed
from services.engine.steps.sequence import Sampling
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import PARAMETERS, SamplingValues

MAX_ANSWERS = 128


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer must have, in one of these ways; as the HTTP API's `structured_outputs`.

    `json` is a schema, as a mapping or as JSON text; `json_object` asks for any JSON object. `regex` and `grammar` are
    texts, `choice` the texts of which the answer is one.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def form(self) -> str:
        """Returns the form as it is compiled. Raises InvalidRequest that names the member."""
        return form_in({"structured_outputs": msgspec.structs.asdict(self)})[0]


class SamplingParams(SamplingValues, frozen=True, kw_only=True):
    """How the tokens of each answer are chosen, and when it stops. Numbers have the bounds of the HTTP API.

    `n` answers are given to each prompt, with seeds derived from `seed` as the HTTP API derives them; None: other ones
    each time. `stop` are texts before which an answer ends, `stop_token_ids` tokens that end it. `max_tokens`: None is
    as many as the model has room for. `logprobs`: how many of the likeliest tokens are told beside each chosen one.
    `structured_outputs`: the form that each answer must have; None: any text.
    """

    n: int = 1
    seed: int | None = None  # type: ignore[assignment]  # where it is not given, each call draws one
    max_tokens: int | None = 16
    stop: str | Collection[str] = ()
    stop_token_ids: Collection[int] = ()
    logit_bias: Mapping[int, float] = {}
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """All texts of `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def answers(self, *, room_tokens: int, eos_token_ids: Collection[int]) -> Iterator[Sampling]:
        """The sampling of each of the `n` answers. Raises InvalidRequest that names the field."""
        if not 1 <= self.n <= MAX_ANSWERS:
            raise InvalidRequest(f"n is {self.n} but must be from 1 to {MAX_ANSWERS}", field="n")
        if not all(self.stop_texts):
            raise InvalidRequest("stop must have texts that are not empty", field="stop")
        first = random.SystemRandom().getrandbits(63) if self.seed is None else self.seed
        numbers = {name: getattr(self, name) for name in SamplingValues.__struct_fields__ if name in PARAMETERS}
        ends = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))
        for number in range(self.n):
            yield Sampling(
                **{**numbers, "seed": choice_seed(first, number)},
                max_tokens=room_tokens if self.max_tokens is None else min(self.max_tokens, room_tokens),
                stop_token_ids=ends,
                logit_bias=self.logit_bias,
                logprobs=self.logprobs,
            )
