"""A call becomes answers to generate: validate → tokenize → draw a seed → take the id.

The first part of a request's life; `gateway.lifecycle` has the rest. Knows no worker.
"""

import asyncio
import hashlib
import random
import secrets
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.trace import Span

from gateway.calls import AcceptedCall, Call, Generation, StoredCall, StoredChoice, Totals
from gateway.tokenization import ModelTokenizer
from gateway.validation import (
    ModelLimits,
    Sampling,
    check_messages,
    check_model_name,
    check_name,
    check_num_choices,
    check_priority,
    check_prompt_token_ids,
    check_sampling,
    check_text,
    check_token_ids,
    complete_sampling,
)
from services.runtime import telemetry
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import AlreadyExists, InvalidRequest, TandemError

ID_BYTES = 12
IDS_PER_DRAW = 256

_SEED_STEP = 0x9E3779B97F4A7C15


class Acceptance:
    """The calls that this gateway has accepted and that have not ended.

    `longest_sequence` gives the most tokens that any worker has pages for; None: not known.
    """

    def __init__(
        self,
        *,
        model_name: str,
        limits: ModelLimits,
        tokenizer: ModelTokenizer,
        longest_sequence: Callable[[], int | None],
        max_request_s: float,
        id_suffix: str,
        seed: int | None,
        clock: Clock,
    ) -> None:
        self._model_name = model_name
        self._limits = limits
        self._tokenizer = tokenizer
        self._longest_sequence = longest_sequence
        self._max_request_s = max_request_s
        self._id_suffix = id_suffix
        self._clock = clock
        self._draw_seed = _seed_source(seed)
        self._draw_id = _id_source().__next__
        self._num_calls = 0
        self._active_ids: set[str] = set()
        self._closed_by: TandemError | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def close(self, error: TandemError) -> None:
        """Refuses every call from now on with `error`."""
        self._closed_by = error

    def limits(self) -> ModelLimits:
        """The model's limits, or less where no worker in rotation has pages for so much."""
        longest = self._longest_sequence() or self._limits.context_length_tokens
        if longest >= self._limits.context_length_tokens:
            return self._limits
        return ModelLimits(self._limits.vocab_size, longest)

    async def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Waits until no call is running. False: some still are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    async def accept(self, call: Call) -> AcceptedCall:
        """Validates and tokenizes. Raises InvalidRequest, NotFound, AlreadyExists or DeadlineExceeded."""
        self._check_open()
        arrived_s, arrived_unix_ns = self._clock.monotonic(), self._clock.unix_ns()
        limits = self.limits()
        deadline = Deadline.after(self._max_request_s, clock=self._clock)
        if call.deadline is not None:
            deadline = deadline.sooner(call.deadline)
        deadline.check()
        self._check(call, limits)
        prompts = await self._token_ids_of(call, limits)
        samplings = self._complete_samplings(call, prompts, limits)
        choices = [
            StoredChoice(prompts[choice // call.num_choices], sampling) for choice, sampling in enumerate(samplings)
        ]
        stored = StoredCall(
            request_id=call.request_id or "",
            choices=choices,
            operation=call.operation,
            tenant=call.tenant,
            priority=call.priority,
            remaining_s=0.0,
            traceparent=call.traceparent,
        )
        return self._begin(stored, deadline, arrived_s, arrived_unix_ns)

    def adopt(self, stored: StoredCall) -> AcceptedCall:
        """Goes on with a call that a gateway accepted before; each answer continues after its emitted tokens.

        Raises AlreadyExists while the call runs here, DeadlineExceeded, and InvalidRequest where the stored call does
        not fit this model: it may come from a store that anybody can write.
        """
        self._check_open()
        deadline = Deadline.after(min(stored.remaining_s, self._max_request_s), clock=self._clock)
        deadline.check()
        check_name(stored.request_id, field_name="request_id")
        if not stored.choices:
            raise InvalidRequest("the stored call has no answer", field="choices")
        for choice in stored.choices:
            _check_stored(choice, self._limits)
        return self._begin(stored, deadline, self._clock.monotonic(), self._clock.unix_ns())

    def _begin(self, stored: StoredCall, deadline: Deadline, arrived_s: float, arrived_unix_ns: int) -> AcceptedCall:
        """Takes the call's id, and names its answers towards workers as no answer was named before."""
        request_id = self._take_id(stored.request_id)
        span = self._start_span(stored, request_id, arrived_unix_ns)
        totals = Totals()
        self._num_calls += 1
        worker_id = f"{request_id}.{self._id_suffix}{self._num_calls:x}"
        generations = [
            Generation(
                request_id=f"{worker_id}.{number}",
                choice=number,
                prompt_token_ids=choice.prompt_token_ids,
                sampling=choice.sampling,
                priority=stored.priority,
                tenant=stored.tenant,
                deadline=deadline,
                span=span,
                totals=totals,
                arrived_s=arrived_s,
                arrived_unix_ns=arrived_unix_ns,
                emitted_token_ids=choice.emitted_token_ids,
            )
            for number, choice in enumerate(stored.choices)
        ]
        return AcceptedCall(
            generations,
            request_id=request_id,
            operation=stored.operation,
            span=span,
            close=lambda: self._give_back_id(request_id),
        )

    def _check_open(self) -> None:
        if self._closed_by is not None:
            raise self._closed_by

    def _check(self, call: Call, limits: ModelLimits) -> None:
        check_model_name(call.model, self._model_name)
        if call.request_id is not None:
            check_name(call.request_id, field_name="request_id")
        if call.tenant:
            check_name(call.tenant, field_name="tenant")
        check_priority(call.priority)
        check_num_choices(call.num_choices, num_prompts=max(1, len(call.prompts)))
        check_sampling(call.sampling, limits, prefix=call.field_prefix)

    async def _token_ids_of(self, call: Call, limits: ModelLimits) -> list[Sequence[int]]:
        """Token ids of each prompt, checked."""
        max_chars = limits.context_length_tokens * self._tokenizer.longest_token_chars
        if call.messages is not None:
            messages = check_messages(call.messages, max_chars=max_chars)
            prompts: list[Sequence[int]] = [await self._tokenizer.encode_chat(messages)]
        else:
            prompts = [await self._encode_prompt(prompt, max_chars, call.prompt_field) for prompt in call.prompts]
        for token_ids in prompts:
            check_prompt_token_ids(token_ids, limits, field_name=call.prompt_field)
        return prompts

    async def _encode_prompt(self, prompt: str | Sequence[int], max_chars: int, field_name: str) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        check_text(prompt, field_name=field_name, max_chars=max_chars)
        return await self._tokenizer.encode(prompt)

    def _complete_samplings(self, call: Call, prompts: Sequence[Sequence[int]], limits: ModelLimits) -> list[Sampling]:
        """Sampling of every answer: for each prompt, its choices with seeds derived from the call's."""
        first_seed = call.sampling.seed
        if first_seed is None:
            first_seed = _key_seed(call.tenant, call.idempotency_key) if call.idempotency_key else self._draw_seed()
        return [
            complete_sampling(
                call.sampling,
                limits,
                num_prompt_tokens=len(token_ids),
                seed=_choice_seed(first_seed, choice),
                field_name=call.prompt_field,
            )
            for token_ids in prompts
            for choice in range(call.num_choices)
        ]

    def _take_id(self, asked: str) -> str:
        request_id = asked or self._draw_id()
        if request_id in self._active_ids:
            raise AlreadyExists(f"a request with the id {request_id} is running", field="request_id")
        self._active_ids.add(request_id)
        self._is_idle.clear()
        return request_id

    def _give_back_id(self, request_id: str) -> None:
        self._active_ids.discard(request_id)
        if not self._active_ids:
            self._is_idle.set()

    def _start_span(self, stored: StoredCall, request_id: str, arrived_unix_ns: int) -> Span:
        parent = telemetry.extract(stored.traceparent) if stored.traceparent else None
        span = telemetry.start_span("request", parent, start_unix_ns=arrived_unix_ns)
        if span.is_recording():
            sampling = stored.choices[0].sampling
            span.set_attributes(
                {
                    "gen_ai.operation.name": stored.operation,
                    "gen_ai.provider.name": "tandem",
                    "gen_ai.request.model": self._model_name,
                    "gen_ai.request.id": request_id,
                    "gen_ai.request.choice.count": len(stored.choices),
                    "gen_ai.request.temperature": sampling.temperature,
                    "gen_ai.request.top_p": sampling.top_p,
                }
            )
        return span


def _check_stored(choice: StoredChoice, limits: ModelLimits) -> None:
    """Raises InvalidRequest unless the answer can be gone on with under this model."""
    check_prompt_token_ids(choice.prompt_token_ids, limits, field_name="prompt")
    check_token_ids(choice.emitted_token_ids, limits, field_name="emitted_token_ids")
    check_sampling(choice.sampling, limits)
    max_tokens = choice.sampling.max_tokens
    if len(choice.emitted_token_ids) > max_tokens:
        raise InvalidRequest("the answer has more tokens than were asked for", field="emitted_token_ids")
    if not 1 <= max_tokens <= limits.context_length_tokens - len(choice.prompt_token_ids):
        raise InvalidRequest("max_tokens does not fit into the model's context", field="max_tokens")


def _seed_source(seed: int | None) -> Callable[[], int]:
    """Seeds for requests without one: the same sequence for the same `seed`, unpredictable without."""
    source = random.Random(secrets.randbits(256) if seed is None else seed)
    return lambda: source.getrandbits(63)


def _id_source() -> Iterator[str]:
    """Request ids that nobody can guess; asking the system for randomness once for many is far cheaper."""
    while True:
        digits = secrets.token_hex(ID_BYTES * IDS_PER_DRAW)
        for start in range(0, len(digits), 2 * ID_BYTES):
            yield digits[start : start + 2 * ID_BYTES]


def _key_seed(tenant: str, idempotency_key: str) -> int:
    """The same seed for the same call, on every gateway: a call that is repeated gets the same answer."""
    named = f"{len(tenant)}:{tenant}{idempotency_key}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8]) >> 1


def _choice_seed(seed: int, choice: int) -> int:
    """An int64 seed for one of several answers to a prompt; the first one has the request's own."""
    return (seed + choice * _SEED_STEP + 2**63) % 2**64 - 2**63
