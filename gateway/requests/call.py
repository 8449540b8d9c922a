"""What is passed around about a request: the client's call, the answers to generate, and their parts.

Plain data. Knows neither how an API spells it nor how it is done.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any

import msgspec

from gateway.limits import DEFAULT_SERVICE_CLASS, MAX_AFFINITY_CHARS, MAX_NAME_CHARS
from gateway.observability.tracing import Origin, RequestSpans
from gateway.types import AskedSampling, Sampling
from gateway.wishes import NO_WISHES, Wishes
from services.runtime import telemetry
from services.runtime.clock import Deadline
from services.runtime.errors import Overloaded, WorkerUnavailable
from services.runtime.page_keys import sharers
from services.runtime.telemetry import Value
from services.scheduling.regions import MAX_REGIONS, Residency


class TenantTicket(ABC):
    """What one call takes of its tenant's limits; `gateway.access.door` has the real one."""

    hold: str
    """Names the call among those of its tenant that run; another try of the same call has the same name."""
    headers: Sequence[tuple[str, str]]
    """Names and values that tell the client what is left."""

    @abstractmethod
    async def enter(self) -> None:
        """Counts the call, which is well-formed. Raises RateLimited."""

    @abstractmethod
    async def charge(
        self, num_prompt_tokens: int, *, num_answers: int, max_tokens: int | None, room_tokens: int
    ) -> None:
        """Counts the call's tokens, now that its size is known. Raises RateLimited."""

    @abstractmethod
    def resume(self) -> None:
        """Lets in a call that continues and was let in before."""

    @abstractmethod
    def leave(self, *, num_prompt_tokens: int, num_new_tokens: int, has_run: bool) -> None:
        """Settles a call that has ended: it may have used other numbers of tokens than expected, or not have run."""


class Call(msgspec.Struct, kw_only=True):
    """One call of a client, as its API understood it; nothing is checked yet.

    Either `messages` or `prompts` is given; a prompt is a text or token ids. `tools` are those that the model is told
    of, as `gateway.forms.tools` gives them; `must_call` are the names of those of which at least one must be called,
    empty: none must; `strict_tools` are the names of those whose arguments keep to their schemas in any case.
    `field_prefix` begins the names of sampling fields in errors. `deadline` None: the server's
    maximum. `traceparent` and `tracestate` are the client's, or empty.
    `idempotency_key` is the client's, or empty; it stands in for a seed that was not given. `service_class` is one of
    `gateway.limits.SERVICE_CLASSES`, or empty: not given. Calls with the same `affinity_key`, a session or a user, are
    best served by the same workers. Cached pages are shared by requests of one tenant, or of all tenants with its
    `share_cache`, and of these by those with the same `cache_salt`. `ticket` None: nobody limits this call.
    `allow_fallback`: whether another model may answer where this one cannot; None: not said, which is no unless the API
    key says otherwise. `allowed_models` are the names of those that the key allows; None: all.
    """

    operation: str
    model: str | None = None
    request_id: str | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_words: Mapping[str, Any] = {}
    """What the chat template is told beside them, as far as it knows the names."""
    template_fields: Mapping[str, str] = {}
    """Which members of the request say that, by the same names."""
    must_call: Set[str] = frozenset()
    strict_tools: Set[str] = frozenset()
    parallel_tool_calls: bool = True
    sampling: AskedSampling = msgspec.field(default_factory=AskedSampling)
    num_choices: int = 1
    priority: int = 0
    service_class: str = ""
    tenant: str = ""
    affinity_key: str = ""
    cache_salt: str = ""
    share_cache: str = ""
    residency: Residency = ()
    """The regions to which tenant and client together hold its data."""
    ticket: TenantTicket | None = None
    deadline: Deadline | None = None
    wishes: Wishes = NO_WISHES
    traceparent: str = ""
    tracestate: str = ""
    idempotency_key: str = ""
    field_prefix: str = ""
    prompt_field: str = "prompt"
    prompt_logprobs_field: str = "prompt_logprobs"
    is_embedded: bool = False
    """Whether its prompts become vectors (`gateway.vectors`): they may be many, and wait for no decode worker."""
    most_prompt_tokens: int | None = None
    """How many tokens of each prompt are kept, its last; -1: as many as fit with one of the answer. None: all."""
    allow_fallback: bool | None = None
    allowed_models: Set[str] | None = None
    origin: Origin | None = None

    def note_origin(self, header: Callable[[str], str], origin: Origin) -> None:
        """Notes where the call came in and the trace that its client's headers name; `header` gives one's value."""
        self.traceparent, self.tracestate = telemetry.from_client(header)
        self.origin = origin


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What stays true of a request wherever it runs: made when it is accepted, and passed whole from then on.

    A journal keeps it under these names. `operation` is what its API calls it, and `adapter` names what its model is
    changed by, or is empty; the others are as in `Call`.
    """

    operation: str
    tenant: str = ""
    priority: int = 0
    service_class: str = DEFAULT_SERVICE_CLASS
    affinity_key: Annotated[str, msgspec.Meta(max_length=MAX_AFFINITY_CHARS)] = ""
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    share_cache: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    residency: Annotated[Residency, msgspec.Meta(max_length=MAX_REGIONS)] = ()
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""

    @property
    def sharers(self) -> str:
        """Names the requests that may share its pages: those of its tenant, or group of tenants, with the same salt."""
        return sharers(
            tenant=self.tenant,
            group=self.share_cache,
            salt=self.cache_salt,
            adapter=self.adapter,
            regions=self.residency,
        )

    @classmethod
    def of(cls, source: object) -> "RequestFacts":
        """Returns the facts of anything that has them by these names."""
        return cls(**{name: getattr(source, name) for name in cls.__struct_fields__})


class AnswerSpec(msgspec.Struct, frozen=True):
    """One answer to be generated: checked, tokenized, with a seed. `choice` numbers the answers of its call.

    `emitted_token_ids` are the tokens that the answer has already; it continues after them. `model` is the name of the
    model that generates it, `eos_token_ids` are that one's ends of sequence.
    """

    request_id: str
    choice: int
    model: str
    eos_token_ids: Sequence[int]
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    facts: RequestFacts
    deadline: Deadline
    span: RequestSpans
    totals: "Totals"
    arrived_s: float
    arrived_unix_ns: int
    wishes: Wishes = NO_WISHES
    has_own_deadline: bool = False
    """Whether its client named the deadline; otherwise it is the server's and says nothing of the client's haste."""
    emitted_token_ids: Sequence[int] = ()
    layout: str = ""
    """The `identity_key` of the workers that sent the emitted tokens; empty: unknown, or no token was emitted."""


class StoredChoice(msgspec.Struct, frozen=True):
    """All that decides how one answer continues, at any gateway: what `Requests.adopt` needs of it."""

    prompt_token_ids: Sequence[int]
    sampling: Sampling
    emitted_token_ids: Sequence[int] = ()
    layout: str = ""
    """The `layout` of `AnswerSpec`; before the first token, that of all existing workers."""


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted call as data, for another gateway to continue. `remaining_s` is the time until its deadline.

    `model` is the name of the model that answers; empty: the only one. `fallback` says in whose place and why, as in
    `AcceptedCall`. `is_settled`: it stays with this model. `traceparent` and `tracestate` name the span of the
    client that asks for it; `resumes` names that of the request which it continues, or is empty.
    """

    request_id: str
    choices: list[StoredChoice]
    facts: RequestFacts
    model: str = ""
    fallback: str = ""
    is_settled: bool = True
    wishes: Wishes = NO_WISHES
    remaining_s: float
    traceparent: str = ""
    tracestate: str = ""
    resumes: str = ""


@dataclass(slots=True)
class Totals:
    """What the answers of one call add up to. `placed` numbers those that workers have taken and still have.

    `waiting_since_s` is the moment since which it has been empty, in seconds of the monotonic clock.
    """

    completion_tokens: int = 0
    new_tokens: int = 0
    """The generated tokens, without those that an answer had before it was continued here."""
    cached_tokens: int = 0
    """The tokens of all answers' prompts that were not computed."""
    finish_reasons: list[str] = field(default_factory=list)
    placed: set[int] = field(default_factory=set)
    waiting_since_s: float = 0.0

    def add(self, *, completion_tokens: int, new_tokens: int, cached_tokens: int, finish_reason: str) -> None:
        """Adds an answer that is over."""
        self.completion_tokens += completion_tokens
        self.new_tokens += new_tokens
        self.cached_tokens += cached_tokens
        self.finish_reasons.append(finish_reason)


KEPT = ""
"""In a chain of fallbacks, the name of what no model generates: an answer that was kept."""


class AcceptedCall:
    """A call that passed all checks; its id is taken until its `with` block is left.

    `model` is the name of the model that its answers come from, `fallback` says in whose place and why, such as
    `large -> small; reason=overloaded`, or is empty. `fallbacks` are names of models that may be tried yet, with
    `call` as it came: the model's own name stands for a shorter answer, `KEPT` for one that was kept.
    `gateway.requests.fallback` tries them, before the first token.
    """

    def __init__(
        self,
        specs: list[AnswerSpec],
        *,
        request_id: str,
        fallback: str = "",
        span: RequestSpans,
        close: Callable[[], None],
        ticket: TenantTicket | None = None,
    ) -> None:
        self.specs = specs
        self.request_id = request_id
        self.facts = specs[0].facts
        self.model = self.asked_model = specs[0].model
        self.fallback = fallback
        self.fallbacks: tuple[str, ...] = ()
        self.call: Call | None = None
        self.span = span
        self.ticket = ticket
        """What the call has taken of its tenant's limits."""
        self.is_resumed = False
        """Whether the call was let in before, so that its prompt is paid already."""
        self._close = close
        self._on_end: list[Callable[[BaseException | None], None]] = []

    def on_end(self, told: Callable[[BaseException | None], None]) -> None:
        """Has `told` called with the call's error, or None, when the `with` block is left."""
        self._on_end.append(told)

    def to_stored(self) -> StoredCall:
        """Returns the call as `Requests.adopt` takes it, without any token that came after it was accepted."""
        first = self.specs[0]
        return StoredCall(
            request_id=self.request_id,
            choices=[
                StoredChoice(spec.prompt_token_ids, spec.sampling, spec.emitted_token_ids, spec.layout)
                for spec in self.specs
            ],
            facts=self.facts,
            model=self.model,
            fallback=self.fallback,
            is_settled=not self.fallbacks,
            wishes=first.wishes,
            remaining_s=first.deadline.remaining_s(),
            traceparent=self.span.told_traceparent,
        )

    def fall_back(self, specs: list[AnswerSpec], fallback: str) -> None:
        """Takes the answers of another model; none of the earlier ones has given a token."""
        self.specs = specs
        self.facts = specs[0].facts
        self.model = specs[0].model
        self.fallback = fallback
        self.span.add_event("fallback", {"tandem.fallback": fallback})

    def __enter__(self) -> "AcceptedCall":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.span.finish(error, self._described)
            self._close()
            if self.ticket is not None:
                self._leave(self.ticket, error)
        finally:
            # Those told may hold the call: it would stay, prompt and all, until the collector of cycles comes by.
            on_end, self._on_end = self._on_end, []
            for told in on_end:
                told(error)

    def _leave(self, ticket: TenantTicket, error: BaseException | None) -> None:
        """Settles with the tenant, which a call costs nothing that was never begun, or refused for want of room."""
        totals = self.specs[0].totals
        is_refused = isinstance(error, Overloaded | WorkerUnavailable) and not totals.new_tokens
        prompts = {id(spec.prompt_token_ids): spec.prompt_token_ids for spec in self.specs}
        ticket.leave(
            num_prompt_tokens=0 if self.is_resumed else sum(map(len, prompts.values())),
            num_new_tokens=totals.new_tokens,
            has_run=bool(totals.finish_reasons) and not is_refused,
        )

    def _described(self) -> dict[str, Value]:
        """Returns the request as OpenTelemetry's conventions for generative AI tell it; texts are no part of it."""
        first = self.specs[0]
        sampling, totals = first.sampling, first.totals
        prompts = {id(spec.prompt_token_ids): spec.prompt_token_ids for spec in self.specs}
        said: dict[str, Value] = {
            "gen_ai.operation.name": self.facts.operation,
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.id": self.request_id,
            "gen_ai.response.id": self.request_id,
            "gen_ai.request.model": self.asked_model,
            "gen_ai.request.choice.count": len(self.specs),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.response.model": self.model,
            # An answer whose client left has none: the conventions know no such reason.
            "gen_ai.response.finish_reasons": [one for one in totals.finish_reasons if one != "cancelled"],
            "gen_ai.usage.input_tokens": sum(map(len, prompts.values())),
            "gen_ai.usage.output_tokens": totals.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": totals.cached_tokens,
            "tandem.service_class": self.facts.service_class,
        }
        rarely: dict[str, Value] = {
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "tandem.resumed_tokens": totals.completion_tokens - totals.new_tokens,
            "tandem.tenant": self.facts.tenant,
            "tandem.adapter": self.facts.adapter,
            "tandem.fallback": self.fallback,
        }
        said.update((name, value) for name, value in rarely.items() if value)
        return said
