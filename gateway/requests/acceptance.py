"""A call becomes answers to generate: find the model → validate → tokenize → draw a seed → take the id.

The first part of a request's life; `gateway.requests.lifecycle` has the rest. Knows no worker.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from gateway.limits import (
    DEFAULT_SERVICE_CLASS,
    ModelLimits,
    check_name,
    check_num_choices,
    check_num_inputs,
    check_priority,
    check_prompt_logprobs,
    check_prompt_token_ids,
    check_sampling,
    check_service_class,
    check_text,
    check_token_ids,
    complete_sampling,
)
from gateway.models.catalog import ModelCatalog, ServedModel
from gateway.models.conversation import encode_conversation
from gateway.models.sampling_defaults import with_defaults
from gateway.observability.tracing import RequestSpans, Tracing
from gateway.requests.call import (
    KEPT,
    AcceptedCall,
    AnswerSpec,
    Call,
    RequestFacts,
    StoredCall,
    StoredChoice,
    TenantTicket,
    Totals,
)
from gateway.requests.kept_answers import KeptAnswer
from gateway.requests.seeds import choice_seed, id_source, key_seed, seed_source
from gateway.types import Sampling
from services.runtime import telemetry
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import AlreadyExists, InvalidRequest, Overloaded
from services.structured.form import AnswerForm

FormOf = Callable[[Call, ServedModel, Sequence[int]], Awaitable[AnswerForm | None]]
"""What gives the form of a call's answers by this model after these tokens, checked, or None where they may be any
text; raises InvalidRequest."""


KeptAnswerOf = Callable[[AnswerSpec], KeptAnswer | None]
"""What gives the kept answer to a request, or None."""


class _Arrival(msgspec.Struct, frozen=True):
    """When a call came, by the monotonic clock and since 1970, and its deadline. `is_own`: its client named that."""

    at_s: float
    unix_ns: int
    deadline: Deadline
    is_own: bool = False


class Acceptance:
    """The calls that this gateway has accepted and that have not ended.

    `longest_sequence` gives the most tokens that any decode worker of a model has pages for; None: it has no
    decode worker. `check_room` is asked before texts become tokens, the costliest step here, and raises Overloaded.
    """

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        longest_sequence: Callable[[str], int | None],
        check_room: Callable[[Call, ServedModel, Deadline], None],
        form_of: FormOf,
        max_request_s: float,
        id_suffix: str,
        seed: int | None,
        tracing: Tracing,
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._longest_sequence = longest_sequence
        self._check_room = check_room
        self._form_of = form_of
        self._max_request_s = max_request_s
        self._id_suffix = id_suffix
        self._tracing = tracing
        self._clock = clock
        self._draw_seed = seed_source(seed)
        self._draw_id = id_source().__next__
        self._num_calls = 0
        self._active_ids: set[tuple[str, str]] = set()
        """The ids of running requests, each with its tenant: an id is taken for its own tenant only."""
        self._closed_by: Overloaded | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def close(self, error: Overloaded) -> None:
        """Refuses every call from now on with an error like this one."""
        self._closed_by = error

    def limits(self, model: ServedModel) -> ModelLimits:
        """Returns the model's limits, lowered where no worker in rotation has enough pages for them."""
        limits = model.limits
        longest = self._longest_sequence(model.name) or limits.context_length_tokens
        if longest >= limits.context_length_tokens:
            return limits
        return ModelLimits(limits.vocab_size, longest)

    async def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Waits until no call is running. False: some still are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    async def accept(self, call: Call) -> AcceptedCall:
        """Validates and tokenizes. Raises InvalidRequest, NotFound, AlreadyExists, Overloaded or DeadlineExceeded."""
        self._check_open()
        arrived_s, arrived_unix_ns = self._clock.monotonic(), self._clock.unix_ns()
        model = self._catalog.resolve(call.model)
        deadline = latest = Deadline.after(self._max_request_s, clock=self._clock)
        if call.deadline is not None:
            deadline = deadline.sooner(call.deadline)
        deadline.check()
        arrival = _Arrival(arrived_s, arrived_unix_ns, deadline, deadline.at_s < latest.at_s)
        self._check(call)
        limits = self.limits(model)
        check_sampling(call.sampling, limits, prefix=call.field_prefix)
        if not call.allow_fallback and not call.is_embedded:
            # Before its tenant is asked for anything, and before texts become tokens: such a refusal is cheap.
            self._check_room(call, model, deadline)
        if call.ticket is None:
            stored = await self._stored(call, model, limits)
            accepted = self._begin(stored, model, arrival)
        else:
            # Before the texts become tokens, which is the costliest step here.
            await call.ticket.enter()
            try:
                stored = await self._stored(call, model, limits)
                await _charge(call, call.ticket, stored.choices)
                accepted = self._begin(stored, model, arrival, ticket=call.ticket)
            except BaseException as error:
                # A request that is wrong counts as one; one that is refused does not.
                is_wrong = isinstance(error, InvalidRequest)
                call.ticket.leave(num_prompt_tokens=0, num_new_tokens=0, has_run=is_wrong)
                raise
        self._allow_fallback(accepted, call)
        return accepted

    async def _stored(self, call: Call, model: ServedModel, limits: ModelLimits) -> StoredCall:
        """Returns the call as it is kept: every answer with its prompt as tokens, and how it is sampled."""
        return StoredCall(
            request_id=call.request_id or "",
            choices=await self._choices(call, model, limits, self._first_seed(call)),
            facts=RequestFacts(
                operation=call.operation,
                tenant=call.tenant,
                priority=call.priority,
                service_class=call.service_class or DEFAULT_SERVICE_CLASS,
                affinity_key=call.affinity_key,
                cache_salt=call.cache_salt,
                share_cache=call.share_cache,
                residency=call.residency,
                adapter=self._catalog.adapter_of(call.model),
            ),
            model=model.name,
            wishes=call.wishes,
            remaining_s=0.0,
            traceparent=call.traceparent,
            tracestate=call.tracestate,
        )

    def adopt(self, stored: StoredCall, call: Call | None = None) -> AcceptedCall:
        """Continues a call that a gateway accepted before; each answer resumes after its emitted tokens.

        With `call`, which is the same call as its client sent it again, it may fall back like a new one; give it only
        if no client has a token yet. Raises AlreadyExists while the call runs here, DeadlineExceeded, and
        InvalidRequest where the stored call does not fit its model: it may come from a store that anybody can write to.
        """
        self._check_open()
        model = self._catalog.resolve(stored.model)
        deadline = Deadline.after(min(stored.remaining_s, self._max_request_s), clock=self._clock)
        deadline.check()
        check_name(stored.request_id, field_name="request_id")
        check_service_class(stored.facts.service_class)
        if not stored.choices:
            raise InvalidRequest("the stored call has no answer", field="choices")
        for choice in stored.choices:
            _check_stored(choice, model.limits)
        accepted = self._begin(stored, model, _Arrival(self._clock.monotonic(), self._clock.unix_ns(), deadline))
        if call is not None:
            self._allow_fallback(accepted, call)
        return accepted

    async def fall_back(self, accepted: AcceptedCall, kept_answer: KeptAnswerOf) -> list[AnswerSpec] | None:
        """Returns the call's answers for the next of its models that has a worker and can generate them.

        None: no such model is left. Raises the error that calls are refused with while they are.

        A model can answer a call that passes all checks anew, for that model's context, vocabulary and chat
        template. Token ids that the client gave, as a prompt or to stop at or in a bias, are taken over only where both
        models have the same tokenizer. Seed, deadline and time of arrival stay.

        A kept answer is one whose tokens have all been emitted; a shorter one is of the model that was asked for.
        """
        self._check_open()
        call, asked, first = accepted.call, accepted.asked_model, accepted.specs[0]
        assert call is not None
        while accepted.fallbacks:
            name, *others = accepted.fallbacks
            accepted.fallbacks = tuple(others)
            model = self._catalog[name if name != KEPT else asked]
            choices = (
                _kept(accepted, kept_answer) if name == KEPT else await self._choices_instead(call, asked, model, first)
            )
            if choices is not None:
                adapter = self._catalog.adapter_of(call.model) if model.name == asked else ""
                return self._specs(
                    choices,
                    model,
                    request_id=accepted.request_id,
                    facts=msgspec.structs.replace(first.facts, adapter=adapter),
                    deadline=first.deadline,
                    has_own_deadline=first.has_own_deadline,
                    wishes=first.wishes,
                    span=first.span,
                    arrived_s=first.arrived_s,
                    arrived_unix_ns=first.arrived_unix_ns,
                )
        return None

    async def _choices_instead(
        self, call: Call, asked: str, model: ServedModel, first: AnswerSpec
    ) -> list[StoredChoice] | None:
        """Returns the call's answers for a model that stands in, as `asked` does for itself; None if it cannot."""
        if self._longest_sequence(model.name) is None:
            return None
        is_alike = model.tokenizer_fingerprint == self._catalog[asked].tokenizer_fingerprint
        if _has_token_ids(call) and not is_alike:
            return None
        if model.name == asked:
            most, wanted = model.fallback_max_tokens, call.sampling.max_tokens
            if most is None or (wanted is not None and wanted <= most):
                return None
            call = msgspec.structs.replace(call, sampling=msgspec.structs.replace(call.sampling, max_tokens=most))
        try:
            limits = self.limits(model)
            check_sampling(call.sampling, limits, prefix=call.field_prefix)
            return await self._choices(call, model, limits, first.sampling.seed)
        except InvalidRequest:
            return None

    def _allow_fallback(self, accepted: AcceptedCall, call: Call) -> None:
        """Notes where the call came in, and which models may stand in for its own, if it allows any."""
        accepted.span.note_origin(call.origin)
        if call.allow_fallback and not accepted.fallback:
            allowed, model = call.allowed_models, self._catalog[accepted.model]
            others = [name for name in model.fallbacks if allowed is None or name in allowed]
            kept = [KEPT] if model.keeps_answers else []
            shorter = [model.name] if model.fallback_max_tokens is not None else []
            accepted.fallbacks = (*kept, *others, *shorter)
            accepted.call = call

    def _begin(
        self, stored: StoredCall, model: ServedModel, arrival: _Arrival, *, ticket: TenantTicket | None = None
    ) -> AcceptedCall:
        """Takes the call's id and starts its span."""
        request_id = self._take_id(stored.request_id, stored.facts.tenant)
        span = self._start_span(stored, arrival)
        specs = self._specs(
            stored.choices,
            model,
            request_id=request_id,
            facts=stored.facts,
            deadline=arrival.deadline,
            has_own_deadline=arrival.is_own,
            wishes=stored.wishes,
            span=span,
            arrived_s=arrival.at_s,
            arrived_unix_ns=arrival.unix_ns,
        )
        return AcceptedCall(
            specs,
            request_id=request_id,
            fallback=stored.fallback,
            span=span,
            close=lambda: self._give_back_id(request_id, stored.facts.tenant),
            ticket=ticket,
        )

    def _specs(
        self, choices: Sequence[StoredChoice], model: ServedModel, *, request_id: str, **shared: Any
    ) -> list[AnswerSpec]:
        """Returns one for each choice, with a name towards workers that no answer had before."""
        totals = Totals(waiting_since_s=self._clock.monotonic())
        self._num_calls += 1
        worker_id = f"{request_id}.{self._id_suffix}{self._num_calls:x}"
        return [
            AnswerSpec(
                request_id=f"{worker_id}.{number}",
                choice=number,
                model=model.name,
                eos_token_ids=model.eos_token_ids,
                prompt_token_ids=choice.prompt_token_ids,
                sampling=choice.sampling,
                totals=totals,
                emitted_token_ids=choice.emitted_token_ids,
                layout=choice.layout,
                **shared,
            )
            for number, choice in enumerate(choices)
        ]

    def _check_open(self) -> None:
        if self._closed_by is not None:
            # One error for all would be one refusal for the log, and its traceback would keep every call.
            raise Overloaded(self._closed_by.message, retry_after_s=self._closed_by.retry_after_s)

    def _check(self, call: Call) -> None:
        """Checks what does not depend on the model."""
        if call.request_id is not None:
            check_name(call.request_id, field_name="request_id")
        if call.tenant:
            check_name(call.tenant, field_name="tenant")
        check_priority(call.priority)
        if call.service_class:
            check_service_class(call.service_class)
        if call.is_embedded:
            check_num_inputs(len(call.prompts), field_name=call.prompt_field)
        else:
            check_num_choices(call.num_choices, num_prompts=max(1, len(call.prompts)))

    async def _choices(
        self, call: Call, model: ServedModel, limits: ModelLimits, first_seed: int
    ) -> list[StoredChoice]:
        """Returns prompt and sampling of every answer, checked for this model as far as they depend on one another."""
        prompts = await self._token_ids_of(call, model, limits)
        form = await self._form_of(call, model, prompts[0])
        samplings = self._complete_samplings(
            call, model, prompts=prompts, first_seed=first_seed, limits=limits, form=form
        )
        return [
            StoredChoice(prompts[choice // call.num_choices], sampling) for choice, sampling in enumerate(samplings)
        ]

    async def _token_ids_of(self, call: Call, model: ServedModel, limits: ModelLimits) -> list[Sequence[int]]:
        """Returns the token ids of each prompt, checked."""
        max_chars = limits.context_length_tokens * model.tokenizer.longest_token_chars
        if call.messages is not None:
            prompts: list[Sequence[int]] = [
                await encode_conversation(
                    model.tokenizer,
                    call.messages,
                    call.tools,
                    max_chars=max_chars,
                    more=call.template_words,
                    tenant=call.tenant,
                )
            ]
        else:
            prompts = [await _encode(prompt, model, max_chars, call) for prompt in call.prompts]
        if call.most_prompt_tokens is not None:
            most = limits.context_length_tokens - (call.sampling.max_tokens or 1)
            kept = most if call.most_prompt_tokens == -1 else call.most_prompt_tokens
            prompts = [token_ids[-max(1, kept) :] for token_ids in prompts]
        for token_ids in prompts:
            check_prompt_token_ids(token_ids, limits, field_name=call.prompt_field)
        return prompts

    def _first_seed(self, call: Call) -> int:
        """Returns the seed of the first answer, from which those of the others follow."""
        if call.sampling.seed is not None:
            return call.sampling.seed
        return key_seed(call.tenant, call.idempotency_key) if call.idempotency_key else self._draw_seed()

    def _complete_samplings(
        self,
        call: Call,
        model: ServedModel,
        *,
        prompts: Sequence[Sequence[int]],
        first_seed: int,
        limits: ModelLimits,
        form: AnswerForm | None,
    ) -> list[Sampling]:
        """Returns the sampling of every answer: for each prompt, its choices with seeds derived from the call's.

        The first choice of each prompt reports it, for all of them.
        """
        asked = with_defaults(call.sampling, model.sampling_defaults)
        silent = asked if asked.prompt_logprobs is None else msgspec.structs.replace(asked, prompt_logprobs=None)
        samplings = [
            complete_sampling(
                silent if choice else asked,
                limits,
                num_prompt_tokens=len(token_ids),
                seed=choice_seed(first_seed, choice),
                form=form,
                field_name=call.prompt_field,
            )
            for token_ids in prompts
            for choice in range(call.num_choices)
        ]
        # A chat shows its prompt once, completions show theirs in each choice.
        num_times = 1 if call.messages is not None else call.num_choices
        check_prompt_logprobs(
            asked,
            num_shown_tokens=num_times * sum(map(len, prompts)),
            field_name=call.field_prefix + call.prompt_logprobs_field,
        )
        return samplings

    def _take_id(self, asked: str, tenant: str) -> str:
        request_id = asked or self._draw_id()
        if (tenant, request_id) in self._active_ids:
            raise AlreadyExists(f"a request with the id {request_id} is running", field="request_id")
        self._active_ids.add((tenant, request_id))
        self._is_idle.clear()
        return request_id

    def _give_back_id(self, request_id: str, tenant: str) -> None:
        self._active_ids.discard((tenant, request_id))
        if not self._active_ids:
            self._is_idle.set()

    def _start_span(self, stored: StoredCall, arrival: _Arrival) -> RequestSpans:
        parent = telemetry.extract(stored.traceparent, stored.tracestate) if stored.traceparent else None
        span = self._tracing.begin(parent, arrived_s=arrival.at_s, arrived_unix_ns=arrival.unix_ns)
        if stored.resumes:
            span.add_link(telemetry.extract(stored.resumes), "resumed")
        return span


def _kept(accepted: AcceptedCall, kept_answer: KeptAnswerOf) -> list[StoredChoice] | None:
    """Returns the call's answers as they were kept; None unless all were."""
    kept = [(spec, kept_answer(spec)) for spec in accepted.specs]
    choices = [
        StoredChoice(spec.prompt_token_ids, spec.sampling, answer.token_ids, answer.identity)
        for spec, answer in kept
        if answer is not None
    ]
    return choices if len(choices) == len(kept) else None


async def _encode(prompt: str | Sequence[int], model: ServedModel, max_chars: int, call: Call) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    check_text(prompt, field_name=call.prompt_field, max_chars=max_chars)
    return await model.tokenizer.encode(prompt, tenant=call.tenant)


def _has_token_ids(call: Call) -> bool:
    """Returns whether the client itself wrote token ids, which mean something only to one tokenizer."""
    has_prompt_ids = call.messages is None and not all(isinstance(prompt, str) for prompt in call.prompts)
    return has_prompt_ids or bool(call.sampling.stop_token_ids) or bool(call.sampling.logit_bias)


async def _charge(call: Call, ticket: TenantTicket, choices: Sequence[StoredChoice]) -> None:
    """Takes the call's tokens out of its tenant's limit; a prompt that several answers share counts once."""
    prompts = {id(choice.prompt_token_ids): len(choice.prompt_token_ids) for choice in choices}
    await ticket.charge(
        sum(prompts.values()),
        num_answers=len(choices),
        max_tokens=call.sampling.max_tokens,
        room_tokens=max(choice.sampling.max_tokens for choice in choices),
    )


def _check_stored(choice: StoredChoice, limits: ModelLimits) -> None:
    """Raises InvalidRequest unless the answer can be continued under this model."""
    check_prompt_token_ids(choice.prompt_token_ids, limits, field_name="prompt")
    check_token_ids(choice.emitted_token_ids, limits, field_name="emitted_token_ids")
    check_sampling(choice.sampling, limits)
    max_tokens = choice.sampling.max_tokens
    if len(choice.emitted_token_ids) > max_tokens:
        raise InvalidRequest("the answer has more tokens than were asked for", field="emitted_token_ids")
    if not 1 <= max_tokens <= limits.context_length_tokens - len(choice.prompt_token_ids):
        raise InvalidRequest("max_tokens does not fit into the model's context", field="max_tokens")
