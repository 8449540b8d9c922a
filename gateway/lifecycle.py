"""The life of a request: validate → tokenize → queue → admit at D → place P → stream → finish.

Begin reading at `Requests.accept` and `Requests.run`. Knows neither HTTP nor protobuf; both APIs call it with a `Call`
and get `Delta`s. Whatever happens (refusal, death of a worker, deadline, a client that leaves), leaving `run` gives
back what the workers hold.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import Span

from gateway.admission import AdmissionQueue
from gateway.answer_text import AnswerText
from gateway.attempts import Attempt, CrowdedOut
from gateway.calls import AcceptedCall, Call, Delta, Generation, Totals
from gateway.metrics import Metrics
from gateway.running import RunningRequest
from gateway.sessions import PrefillSession
from gateway.tokenization import ModelTokenizer
from gateway.topology import Topology
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
    complete_sampling,
)
from services.cluster.placement import Placement, State
from services.runtime import telemetry
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import (
    AlreadyExists,
    InternalError,
    LayoutMismatch,
    Overloaded,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from services.scheduling.disaggregation import Disaggregation, PromptView, decide
from services.scheduling.routing import Policy, WorkerView

TRY_AGAIN = (WorkerUnavailable, TransferFailed, LayoutMismatch, InternalError)
"""The failures of an attempt after which another pair of workers goes on from the last token."""

NO_WORKER_RETRY_S = 2.0
"""What a client is told when there is no decode worker."""

ID_BYTES = 12
IDS_PER_DRAW = 256

_SEED_STEP = 0x9E3779B97F4A7C15

logger = logging.getLogger(__name__)


class PlacementSink(Protocol):
    """Takes notes of where requests are; must return at once. `PlacementWriter` is one."""

    def post(self, placement: Placement) -> None:
        """Takes the latest placement of a request."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """The choices that an operator makes. Times in seconds."""

    route: Policy
    local_prefill_max_tokens: int = 0
    max_attempts: int = 3
    max_request_s: float = 600.0
    failover_wait_s: float = 30.0
    max_queue_wait_s: float = 60.0


class Requests:
    """All requests of this gateway."""

    def __init__(
        self,
        *,
        model_name: str,
        limits: ModelLimits,
        eos_token_ids: Sequence[int],
        tokenizer: ModelTokenizer,
        topology: Topology,
        queue: AdmissionQueue,
        policies: Policies,
        placements: PlacementSink,
        metrics: Metrics,
        gateway_incarnation: str,
        seed: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.model_name = model_name
        self.num_running = 0
        self._limits = limits
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._topology = topology
        self._queue = queue
        self._policies = policies
        self._placements = placements
        self._metrics = metrics
        self._clock = clock
        self._draw_seed = _seed_source(seed)
        self._draw_id = _id_source().__next__
        self._gateway_incarnation = gateway_incarnation
        self._id_suffix = gateway_incarnation[:8]
        self._num_calls = 0
        self._num_decisions = 0
        self._active_ids: set[str] = set()
        self._open: set[RunningRequest] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return self._queue.num_waiting

    def limits(self) -> ModelLimits:
        """The model's limits, or less where no worker in rotation has pages for so much."""
        longest = self._topology.max_sequence_tokens() or self._limits.context_length_tokens
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

    def end_all(self, error: TandemError) -> None:
        """Answers everything that runs or waits with `error`."""
        self._queue.close(error)
        for request in self._open:
            request.fail(error)

    async def accept(self, call: Call) -> AcceptedCall:
        """Validates and tokenizes. Raises InvalidRequest, NotFound, AlreadyExists or DeadlineExceeded."""
        arrived_s, arrived_unix_ns = self._clock.monotonic(), self._clock.unix_ns()
        limits = self.limits()
        deadline = Deadline.after(self._policies.max_request_s, clock=self._clock)
        if call.deadline is not None:
            deadline = deadline.sooner(call.deadline)
        deadline.check()
        self._check(call, limits)
        prompts = await self._token_ids_of(call, limits)
        samplings = self._complete_samplings(call, prompts, limits)
        request_id = self._take_id(call.request_id)
        span = self._start_span(call, request_id, arrived_unix_ns)
        totals = Totals()
        self._num_calls += 1
        worker_id = f"{request_id}.{self._id_suffix}{self._num_calls:x}"
        generations = [
            Generation(
                request_id=f"{worker_id}.{choice}",
                choice=choice,
                prompt_token_ids=prompts[choice // call.num_choices],
                sampling=sampling,
                priority=call.priority,
                tenant=call.tenant,
                deadline=deadline,
                span=span,
                totals=totals,
                arrived_s=arrived_s,
                arrived_unix_ns=arrived_unix_ns,
            )
            for choice, sampling in enumerate(samplings)
        ]
        return AcceptedCall(generations, request_id, span, lambda: self._give_back_id(request_id))

    async def run(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Generates one answer. Use with `contextlib.aclosing`: leaving early cancels it on the workers.

        Raises Overloaded, WorkerUnavailable, DeadlineExceeded or whatever ended the last attempt.
        """
        request = RunningRequest(generation, self._new_text(generation), self._clock)
        timer = asyncio.get_running_loop().call_later(generation.deadline.remaining_s(), request.expire)
        error: BaseException | None = None
        self._open.add(request)
        try:
            self._check_any_worker()
            while not request.is_finished:
                try:
                    attempt = await self._place(request)
                    while not request.is_finished:
                        delta = request.take(attempt, await attempt.next_arrived())
                        self._observe(request, attempt, delta)
                        if delta.text or delta.token_ids or delta.finish_reason:
                            yield delta
                except CrowdedOut:
                    request.must_queue = True
                except TRY_AGAIN as failure:
                    self._count_failure(request, failure)
                finally:
                    request.close_attempt()
        except BaseException as ended_by:
            error = ended_by
            raise
        finally:
            timer.cancel()
            self._open.discard(request)
            self._note_end(request, error)

    async def _place(self, request: RunningRequest) -> Attempt:
        """Finds workers, at once or after waiting in the queue."""
        if not request.must_queue and (request.is_resumed or self._queue.num_waiting == 0):
            attempt = await self._offer(request)
            if attempt is not None:
                return attempt
        patience = self._patience(request)
        with self._queue.enter(is_resumed=request.is_resumed) as place:
            self._note(request, State.QUEUED)
            while await place.wait_for_turn(patience.remaining_s()):
                attempt = await self._offer(request)
                if attempt is not None:
                    return attempt
        request.generation.deadline.check()
        if request.is_resumed:
            raise Overloaded("no worker came in time to go on with the answer", retry_after_s=NO_WORKER_RETRY_S)
        raise Overloaded("no worker had room in time", retry_after_s=NO_WORKER_RETRY_S)

    async def _offer(self, request: RunningRequest) -> Attempt | None:
        """Offers the request to decode workers, best first. None: nobody has room now.

        Raises WorkerUnavailable where every one of them turned out to be unreachable.
        """
        route_started_ns = self._clock.unix_ns()
        candidates = self._decode_candidates(request)
        is_full = not candidates
        failure: TandemError = WorkerUnavailable("no decode worker took the request")
        for view in candidates:
            try:
                attempt, prefills, decision = self._new_attempt(request, view)
                await attempt.admit(is_local_prefill=not decision.is_remote)
                if decision.is_remote:
                    attempt.start_prefill(prefills)
            except (Overloaded, CrowdedOut):
                is_full = True
                request.close_attempt()
            except WorkerUnavailable as unavailable:
                failure = unavailable
                request.close_attempt()
            else:
                self._note_placed(request, attempt, decision, route_started_ns)
                return attempt
        if is_full:
            return None
        raise failure

    def _new_attempt(
        self, request: RunningRequest, view: WorkerView
    ) -> tuple[Attempt, list[PrefillSession], Disaggregation]:
        """An attempt with this decode worker, the prefill workers for it, best first, and whether to use them."""
        decode = self._topology.decode_session(view.worker_id)
        prefill_views = self._policies.route(self._topology.prefill_views(decode=decode.peer), self._num_decisions)
        prefills = [self._topology.prefill_session(prefill.worker_id) for prefill in prefill_views]
        prefills.sort(key=lambda session: session.peer.incarnation in request.avoided)
        prompt = PromptView(
            num_prompt_tokens=len(request.generation.prompt_token_ids),
            num_cached_tokens=0,
            num_prefill_workers=len(prefills),
        )
        decision = decide(prompt, local_prefill_max_tokens=self._policies.local_prefill_max_tokens)
        order = request.next_order(self._eos_token_ids)
        request.attempt = Attempt(order, decode=decode, mailbox=request.mailbox, log=request.log)
        return request.attempt, prefills, decision

    def _decode_candidates(self, request: RunningRequest) -> list[WorkerView]:
        """Decode workers that can hold the whole sequence, best first; those that failed it before come last."""
        generation = request.generation
        num_tokens = len(generation.prompt_token_ids) + generation.sampling.max_tokens
        fitting = [view for view in self._topology.decode_views() if view.max_sequence_tokens >= num_tokens]
        self._num_decisions += 1
        ordered = self._policies.route(fitting, self._num_decisions)
        if request.avoided:
            ordered.sort(key=lambda view: view.incarnation in request.avoided)
        return ordered

    def _count_failure(self, request: RunningRequest, failure: TandemError) -> None:
        """Lets the request try again, or raises the failure if it has had all its attempts."""
        request.num_failures += 1
        self._metrics.retries.inc()
        attempt = request.attempt
        if attempt is not None:
            request.avoided.add(attempt.decode.peer.incarnation)
            if attempt.prefill is not None:
                request.avoided.add(attempt.prefill.peer.incarnation)
            if isinstance(failure, LayoutMismatch) and attempt.prefill is not None:
                self._topology.exclude_pair(attempt.prefill.peer, attempt.decode.peer)
        logger.warning(
            "attempt failed",
            extra={
                "request_id": request.generation.request_id,
                "attempt": request.attempt_number,
                "reason": failure.message,
            },
        )
        if request.num_failures >= self._policies.max_attempts:
            raise failure

    def _patience(self, request: RunningRequest) -> Deadline:
        """Until when the request may wait for workers."""
        generation, policies = request.generation, self._policies
        if request.is_resumed:
            return generation.deadline.sooner(Deadline.after(policies.failover_wait_s, clock=self._clock))
        return generation.deadline.sooner(Deadline(generation.arrived_s + policies.max_queue_wait_s, self._clock))

    def _check_any_worker(self) -> None:
        if self._topology.num_ready("decode") == 0:
            raise WorkerUnavailable("no decode worker is ready", retry_after_s=NO_WORKER_RETRY_S)

    def _check(self, call: Call, limits: ModelLimits) -> None:
        check_model_name(call.model, self.model_name)
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
        first_seed = self._draw_seed() if call.sampling.seed is None else call.sampling.seed
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

    def _take_id(self, asked: str | None) -> str:
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

    def _new_text(self, generation: Generation) -> AnswerText:
        sampling = generation.sampling
        ends = () if sampling.ignore_eos else self._eos_token_ids
        return AnswerText(
            self._tokenizer.detokenizer(),
            stop_texts=sampling.stop,
            stop_token_ids=frozenset((*sampling.stop_token_ids, *ends)),
            min_tokens=sampling.min_tokens,
        )

    def _start_span(self, call: Call, request_id: str, arrived_unix_ns: int) -> Span:
        parent = telemetry.extract(call.traceparent) if call.traceparent else None
        span = telemetry.start_span("request", parent, start_unix_ns=arrived_unix_ns)
        if span.is_recording():
            span.set_attributes(
                {
                    "gen_ai.operation.name": call.operation,
                    "gen_ai.provider.name": "tandem",
                    "gen_ai.request.model": self.model_name,
                    "gen_ai.request.id": request_id,
                    "gen_ai.request.choice.count": call.num_choices,
                    "gen_ai.request.temperature": call.sampling.temperature,
                    "gen_ai.request.top_p": call.sampling.top_p,
                }
            )
        return span

    def _note_placed(
        self, request: RunningRequest, attempt: Attempt, decision: Disaggregation, started_ns: int
    ) -> None:
        """Books that workers took the request, and writes the spans of the way there."""
        request.note_placed(attempt)
        self.num_running += request.count_as_running()
        self._note(request, State.PREFILLING)
        span = request.generation.span
        if not span.is_recording():
            return
        if request.num_failures == 0:
            telemetry.record_span("queue", request.generation.arrived_unix_ns, started_ns, parent=span)
        attributes: dict[str, str | int | bool] = {
            "tandem.attempt": request.attempt_number,
            "tandem.decode_worker": attempt.decode.peer.worker_id,
            "tandem.prefill_worker": attempt.prefill.peer.worker_id if attempt.prefill else "",
            "tandem.is_remote_prefill": decision.is_remote,
            "tandem.reason": decision.reason,
        }
        telemetry.record_span("route", started_ns, self._clock.unix_ns(), parent=span, attributes=attributes)

    def _observe(self, request: RunningRequest, attempt: Attempt, delta: Delta) -> None:
        """Books what a delta says about progress."""
        if delta.token_ids:
            self._metrics.generated_tokens.inc(len(delta.token_ids))
            if delta.first_index == 0:
                self._metrics.ttft_s.observe(request.ttft_s)
            else:
                self._metrics.itl_s.observe(request.last_gap_s / len(delta.token_ids))
        state = State.DECODING if attempt.is_decoding else State.TRANSFERRING
        if state is not request.noted_state and not request.is_finished:
            request.noted_state = state
            self._note(request, state)

    def _note(self, request: RunningRequest, state: State) -> None:
        attempt = request.attempt
        placement = Placement(
            request.generation.request_id,
            max(1, request.attempt_number),
            state,
            self._gateway_incarnation,
            attempt.prefill.peer.worker_id if attempt and attempt.prefill else "",
            attempt.decode.peer.worker_id if attempt else "",
        )
        self._placements.post(placement)

    def _note_end(self, request: RunningRequest, error: BaseException | None) -> None:
        generation = request.generation
        self.num_running -= request.is_running
        outcome = _outcome(error)
        self._note(request, outcome)
        self._metrics.note_end(
            outcome,
            total_s=self._clock.monotonic() - generation.arrived_s,
            prompt_tokens=len(generation.prompt_token_ids),
        )
        totals = generation.totals
        totals.completion_tokens += request.num_tokens
        totals.finish_reasons.append(request.finish_reason or outcome)
        if logger.isEnabledFor(logging.DEBUG):
            fields = {"request_id": generation.request_id, "outcome": outcome, "tokens": request.num_tokens}
            logger.debug("request ended", extra=fields)


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


def _choice_seed(seed: int, choice: int) -> int:
    """An int64 seed for one of several answers to a prompt; the first one has the request's own."""
    return (seed + choice * _SEED_STEP + 2**63) % 2**64 - 2**63


def _outcome(error: BaseException | None) -> State:
    if error is None:
        return State.FINISHED
    is_cancelled = isinstance(error, GeneratorExit | asyncio.CancelledError | RequestCancelled)
    return State.CANCELLED if is_cancelled else State.FAILED
