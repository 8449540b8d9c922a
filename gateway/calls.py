"""What is passed around about a request: the client's call, the answers to generate, and their parts.

Plain data. Knows neither how an API spells it nor how it is done.
"""

from collections.abc import Callable, Mapping, Sequence, Set
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
    `idempotency_key` is the client's, or empty; it stands in for a seed that was not given. `allow_fallback`: whether
    another model may answer where this one cannot; None: not said, which is no unless whoever knows the tenant says
    otherwise. `allowed_models` are the names of those that the tenant may use; None: all.
    """

    operation: str
    model: str | None = None
    request_id: str | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    sampling: AskedSampling = msgspec.field(default_factory=AskedSampling)
    num_choices: int = 1
    priority: int = 0
    service_class: str = ""
    tenant: str = ""
    deadline: Deadline | None = None
    traceparent: str = ""
    idempotency_key: str = ""
    field_prefix: str = ""
    prompt_field: str = "prompt"
    allow_fallback: bool | None = None
    allowed_models: Set[str] | None = None


class Generation(msgspec.Struct, frozen=True):
    """One answer to be generated: checked, tokenized, with a seed. `choice` numbers the answers of its call.

    `emitted_token_ids` are the tokens that the answer has already; it goes on after them. `model` is the name of the
    model that generates it, `eos_token_ids` are that one's ends of sequence.
    """

    request_id: str
    choice: int
    model: str
    eos_token_ids: Sequence[int]
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    priority: int
    tenant: str
    deadline: Deadline
    span: Span
    totals: "Totals"
    arrived_s: float
    arrived_unix_ns: int
    service_class: str = "normal"
    affinity_key: str = ""
    emitted_token_ids: Sequence[int] = ()


class StoredChoice(msgspec.Struct, frozen=True):
    """All that decides how one answer goes on, wherever that is: what `Requests.adopt` needs of it."""

    prompt_token_ids: Sequence[int]
    sampling: Sampling
    emitted_token_ids: Sequence[int] = ()


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted call as data, to be gone on with by another gateway. `remaining_s` is until its deadline.

    `model` is the name of the model that answers; empty: the only one. `fallback` says in whose place and why, as in
    `AcceptedCall`. `is_settled`: it stays with this model.
    """

    request_id: str
    choices: list[StoredChoice]
    operation: str
    model: str = ""
    fallback: str = ""
    is_settled: bool = True
    tenant: str = ""
    priority: int = 0
    remaining_s: float
    traceparent: str = ""


@dataclass(slots=True)
class Totals:
    """What the answers of one call add up to. `placed` numbers those that workers have taken and still have.

    `waiting_since_s`: since when it is none of them, in seconds of the monotonic clock.
    """

    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    placed: set[int] = field(default_factory=set)
    waiting_since_s: float = 0.0


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
    """A call that passed all checks; its id is taken until its `with` block is left.

    `model` is the name of the model that its answers come from, `fallback` says in whose place and why, such as
    `large -> small; reason=overloaded`, or is empty. `fallbacks` are names of models that may be tried yet, with
    `call` as it came; `gateway.fallback` does that, before the first token.
    """

    def __init__(
        self,
        generations: list[Generation],
        *,
        request_id: str,
        operation: str,
        model: str,
        fallback: str = "",
        span: Span,
        close: Callable[[], None],
    ) -> None:
        self.generations = generations
        self.request_id = request_id
        self.operation = operation
        self.model = model
        self.fallback = fallback
        self.fallbacks: tuple[str, ...] = ()
        self.call: Call | None = None
        self.span = span
        self._close = close

    def to_stored(self) -> StoredCall:
        """The call as `Requests.adopt` takes it, without any token that came after it was accepted."""
        first = self.generations[0]
        return StoredCall(
            request_id=self.request_id,
            choices=[
                StoredChoice(generation.prompt_token_ids, generation.sampling, generation.emitted_token_ids)
                for generation in self.generations
            ],
            operation=self.operation,
            model=self.model,
            fallback=self.fallback,
            is_settled=not self.fallbacks,
            tenant=first.tenant,
            priority=first.priority,
            remaining_s=first.deadline.remaining_s(),
            traceparent=telemetry.inject(self.span),
        )

    def fall_back(self, generations: list[Generation], fallback: str) -> None:
        """The answers come from another model; none of the earlier generations has given a token."""
        self.generations = generations
        self.model = generations[0].model
        self.fallback = fallback
        self.span.set_attributes({"gen_ai.response.model": self.model, "tandem.fallback": fallback})

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
