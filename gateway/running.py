"""One answer while it is generated: what was delivered so far, its times, and the attempt that goes on from there.

Knows neither how workers are chosen nor where the answer goes.
"""

from collections.abc import Sequence

from gateway.answer_text import AnswerText
from gateway.attempts import Arrived, Attempt, FinishReason, Mailbox, TokenLog
from gateway.calls import Delta, Generation, Usage
from gateway.sessions import AttemptKey, SequenceOrder
from services.cluster.placement import State
from services.runtime import telemetry
from services.runtime.clock import Clock
from services.runtime.errors import DeadlineExceeded, TandemError


class RunningRequest:
    """State of one answer; belongs to the task that runs it."""

    def __init__(self, generation: Generation, text: AnswerText, clock: Clock) -> None:
        self.generation = generation
        self.mailbox = Mailbox()
        self.log = TokenLog(generation.sampling.max_tokens)
        self.attempt: Attempt | None = None
        self.attempt_number = 0
        self.num_failures = 0
        self.avoided: set[str] = set()
        self.must_queue = False
        self.is_running = False
        self.noted_state = State.QUEUED
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.last_gap_s = 0.0
        self._text = text
        self._clock = clock
        self._num_cached_tokens = 0
        self._placed_s = self._first_token_s = self._last_token_s = 0.0
        self._transfer_s = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier attempt has begun the answer or has failed."""
        return self.num_failures > 0 or self.log.next_index > 0

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self._first_token_s - self.generation.arrived_s

    def expire(self) -> None:
        """The deadline has passed: whatever the request waits for fails now."""
        self.fail(DeadlineExceeded("the request's deadline passed"))

    def fail(self, error: TandemError) -> None:
        """Whatever the request waits for from its workers fails now."""
        self.mailbox.fail(error)

    def next_order(self, eos_token_ids: Sequence[int]) -> SequenceOrder:
        """What the next attempt's workers must know: prompt and everything the client has."""
        self.attempt_number += 1
        generation = self.generation
        return SequenceOrder(
            key=AttemptKey(generation.request_id, self.attempt_number),
            prompt_token_ids=generation.prompt_token_ids,
            emitted_token_ids=tuple(self.log.token_ids),
            sampling=generation.sampling,
            eos_token_ids=() if generation.sampling.ignore_eos else eos_token_ids,
            deadline=generation.deadline,
            traceparent=telemetry.inject(generation.span),
        )

    def close_attempt(self) -> None:
        """Frees what the current attempt holds."""
        if self.attempt is not None:
            self.attempt.close()

    def count_as_running(self) -> int:
        """1 the first time, then 0."""
        is_new, self.is_running = not self.is_running, True
        return int(is_new)

    def note_placed(self, attempt: Attempt) -> None:
        """Workers took the attempt."""
        self.must_queue = False
        self.noted_state = State.PREFILLING
        self._num_cached_tokens = attempt.num_cached_tokens
        if not self._placed_s:
            self._placed_s = self._clock.monotonic()

    def take(self, attempt: Attempt, arrived: Arrived) -> Delta:
        """Turns new tokens into what the client gets."""
        taken = self._text.push(arrived.token_ids)
        text, reason = taken.text, arrived.finish_reason
        if taken.is_stopped:
            reason = "stop"
        elif reason is not None or self.log.is_full:
            # A full log needs no word from the worker, which may have died right after its last token.
            reason = reason or "length"
            text += self._text.finish()
        self.num_tokens += taken.num_tokens
        self.finish_reason = reason
        if taken.num_tokens:
            self._note_token_time(arrived.first_index == 0)
        logprobs = arrived.logprobs
        return Delta(
            first_index=arrived.first_index,
            token_ids=arrived.token_ids[: taken.num_tokens],
            text=text,
            logprobs=logprobs[: taken.num_tokens] if logprobs is not None else None,
            finish_reason=reason,
            usage=None if reason is None else self._usage(attempt),
        )

    def _note_token_time(self, is_first: bool) -> None:
        now_s = self._clock.monotonic()
        if is_first:
            self._first_token_s = self._last_token_s = now_s
        self.last_gap_s = now_s - self._last_token_s
        self._last_token_s = now_s

    def _usage(self, attempt: Attempt) -> Usage:
        generation = self.generation
        return Usage(
            prompt_tokens=len(generation.prompt_token_ids),
            cached_tokens=self._num_cached_tokens,
            completion_tokens=self.num_tokens,
            queue_s=self._placed_s - generation.arrived_s,
            prefill_s=max(0.0, self._first_token_s - self._placed_s),
            transfer_s=attempt.handed_off.exposed_s if attempt.handed_off is not None else 0.0,
            decode_s=self._last_token_s - self._first_token_s,
        )
