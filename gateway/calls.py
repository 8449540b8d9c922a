"""What is passed around about a request: the client's call, the answers to generate, and their parts.

Plain data. Knows neither how an API spells it nor how it is done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec
from opentelemetry.trace import Span

from gateway.attempts import FinishReason
from gateway.sessions import TokenLogprobs
from gateway.validation import AskedSampling, Sampling
from services.runtime import telemetry
from services.runtime.clock import Deadline


class Call(msgspec.Struct, kw_only=True):
    """One call of a client, as its API understood it; nothing is checked yet.

    Either `messages` or `prompts` is given; a prompt is a text or token ids. `field_prefix` begins the names of
    sampling fields in errors. `deadline` None: the server's maximum. `traceparent` is the client's, or empty.
    """

    operation: str
    model: str | None = None
    request_id: str | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    sampling: AskedSampling = msgspec.field(default_factory=AskedSampling)
    num_choices: int = 1
    priority: int = 0
    tenant: str = ""
    deadline: Deadline | None = None
    traceparent: str = ""
    field_prefix: str = ""
    prompt_field: str = "prompt"


class Generation(msgspec.Struct, frozen=True):
    """One answer to be generated: checked, tokenized, with a seed. `choice` numbers the answers of its call."""

    request_id: str
    choice: int
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    priority: int
    tenant: str
    deadline: Deadline
    span: Span
    totals: "Totals"
    arrived_s: float
    arrived_unix_ns: int


@dataclass(slots=True)
class Totals:
    """What the answers of one call add up to."""

    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)


class Usage(msgspec.Struct, frozen=True):
    """Counts and times of one answer, as in the public API."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


class Delta(msgspec.Struct):
    """The next part of an answer. The last one has `finish_reason` and `usage`."""

    first_index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class AcceptedCall:
    """A call that passed all checks; its id is taken until its `with` block is left."""

    def __init__(self, generations: list[Generation], request_id: str, span: Span, close: Callable[[], None]) -> None:
        self.generations = generations
        self.request_id = request_id
        self.span = span
        self._close = close

    def __enter__(self) -> "AcceptedCall":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.span.is_recording():
            self._describe(error)
        self.span.end()
        self._close()

    def _describe(self, error: BaseException | None) -> None:
        totals = self.generations[0].totals
        num_prompt_tokens = sum(len(generation.prompt_token_ids) for generation in self.generations)
        self.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": num_prompt_tokens,
                "gen_ai.usage.output_tokens": totals.completion_tokens,
                "gen_ai.response.finish_reasons": totals.finish_reasons,
            }
        )
        if error is not None:
            telemetry.mark_failed(self.span, error)
