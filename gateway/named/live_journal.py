"""One named request on this gateway: its answers so far, and the record of them that is written to Redis.

Changes both together, so that what Redis holds can be continued by another gateway. Knows neither how the answers are
generated nor when the record is written.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.named.ask import Ask, journal_name
from gateway.named.journal import Answer, cost_of_call, decode_call, encode_call, encode_end, restore
from gateway.observability.tracing import NO_TRACE, RequestSpans
from gateway.requests.call import AnswerSpec, StoredCall, StoredChoice
from gateway.types import Delta, Sampling
from services.cluster.journal_scripts import MAX_JOURNAL_BYTES, TOKEN_BYTES
from services.cluster.journals import Held, Record
from services.runtime.errors import InvalidRequest, TandemError

COST_BYTES = 4096
"""Memory that a journal takes beside its call and its answers, about."""


class UnusableError(Exception):
    """What Redis holds is not a journal that can be continued."""


@dataclass(eq=False)
class Journal:
    """One named request on this gateway. Belongs to the event loop."""

    names: list[str]
    request_id: str
    tenant: str
    digest: str
    created_unix_s: int = 0
    call: StoredCall | None = None
    """The call as it was accepted, without tokens; None until then."""
    call_cost_bytes: int = 0
    specs: list[AnswerSpec] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    record: Record | None = None
    spans: RequestSpans = NO_TRACE
    """The spans of the last generation that this gateway began."""
    traceparent: str = ""
    """Names the span of the last known generation, here or elsewhere; empty: it has none."""
    task: "asyncio.Task[None] | None" = None
    is_stopping: bool = False
    """Whether the task was told to end, so that its tokens will not come."""
    error: TandemError | None = None
    """What ended the last generation."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set while it is known which model answers, or that none does; readers wait for it."""
    readers: "set[asyncio.Event]" = field(default_factory=set)
    num_users: int = 0
    """The number of clients that are attached or about to be."""

    @property
    def is_finished(self) -> bool:
        """Whether all answers are complete."""
        return bool(self.answers) and all(answer.is_finished for answer in self.answers)

    @property
    def is_running(self) -> bool:
        """Whether tokens will come."""
        return self.task is not None and not self.task.done() and not self.is_stopping

    @property
    def cost_bytes(self) -> int:
        """Memory that it takes, about."""
        num_record_bytes = 0 if self.record is None else len(self.record.call)
        num_answer_bytes = sum(answer.cost_bytes for answer in self.answers)
        return COST_BYTES + self.call_cost_bytes + num_record_bytes + num_answer_bytes

    def wake(self) -> None:
        """Lets every reader look again."""
        for event in self.readers:
            event.set()

    def check(self, ask: Ask) -> None:
        """Raises AlreadyExists or InvalidRequest if the client asks for another request than this one."""
        if self.digest and self.call is not None:
            ask.check(digest=self.digest, request_id=self.request_id, num_answers=len(self.answers))

    def open(self, stored: StoredCall, answers: list[Answer], created_unix_s: int, *, name: str, owner: str) -> None:
        """Takes a call with what is known of its answers, and begins the record of them.

        `name` is that of the journal in Redis, `owner` the gateway that writes it.
        """
        self.call = msgspec.structs.replace(stored, remaining_s=0.0, traceparent="")
        self.call_cost_bytes = cost_of_call(stored)
        self.traceparent = stored.traceparent
        self.request_id = stored.request_id
        self.answers = answers
        self.created_unix_s = created_unix_s
        # Log-probabilities are not written, so neither are the tokens that they belong to: another gateway computes
        # both anew.
        token_ids: list[list[int]] = [
            [] if choice.sampling.logprobs is not None else answer.token_ids
            for choice, answer in zip(stored.choices, answers, strict=True)
        ]
        name_of_id = journal_name(stored.facts.tenant, stored.request_id)
        self.record = Record(
            name=name,
            digest=self.digest,
            request_id=self.request_id,
            owner=owner,
            call=encode_call(stored, created_unix_s=created_unix_s),
            token_ids=token_ids,
            ends=[_end_of(answer, choice.sampling) for answer, choice in zip(answers, stored.choices, strict=True)],
            alias="" if name_of_id == name else name_of_id,
            tenant=stored.facts.tenant,
        )

    def check_size(self) -> None:
        """Raises InvalidRequest for a call whose journal could become larger than Redis takes.

        Such a call could be answered, but not continued, and its client would only find that out when it comes back.
        """
        record, call = self.record, self.call
        assert record is not None
        assert call is not None
        num_answer_tokens = sum(each.sampling.max_tokens for each in call.choices if each.sampling.logprobs is None)
        if record.num_bytes > MAX_JOURNAL_BYTES:
            raise InvalidRequest(
                f"a request with a name must take at most {MAX_JOURNAL_BYTES} bytes with its prompts, schemas and "
                f"answers and this one takes {record.num_bytes}: send it without X-Request-Id and Idempotency-Key",
                field="prompt",
                code="named_request_too_large",
            )
        if record.num_bytes + TOKEN_BYTES * num_answer_tokens > MAX_JOURNAL_BYTES:
            raise InvalidRequest(
                f"a request with a name may have answers of at most "
                f"{(MAX_JOURNAL_BYTES - record.num_bytes) // TOKEN_BYTES} tokens together beside its prompts, and this "
                f"one may have {num_answer_tokens}: give a smaller max_tokens or n, or send it without X-Request-Id "
                "and Idempotency-Key",
                field="max_tokens",
                code="named_request_too_large",
            )

    def choices_with_tokens(self) -> list[StoredChoice]:
        """Returns the call's answers, each with the tokens after which it continues."""
        assert self.call is not None
        return [
            msgspec.structs.replace(choice, emitted_token_ids=tuple(answer.token_ids))
            for choice, answer in zip(self.call.choices, self.answers, strict=True)
        ]

    def note_trace(self, told: str) -> bool:
        """Notes the span of a generation that begins, for the next to continue. Returns whether the record changed."""
        if not told or told == self.traceparent:
            return False
        self.traceparent = told
        if self.call is None or self.record is None:
            return False
        stored = msgspec.structs.replace(self.call, traceparent=told)
        self.record.call = encode_call(stored, created_unix_s=self.created_unix_s)
        self.record.is_in_redis = False
        return True

    def settle(self, stored: StoredCall, specs: list[AnswerSpec]) -> None:
        """The call stays with the model that has begun to answer: no gateway lets another one answer from now on."""
        assert self.record is not None
        stored = msgspec.structs.replace(stored, is_settled=True)
        self.call = msgspec.structs.replace(stored, remaining_s=0.0, traceparent="")
        self.specs = specs
        self.record.call = encode_call(stored, created_unix_s=self.created_unix_s)
        self.record.forget_written()

    def add(self, choice: int, delta: Delta) -> None:
        """Takes the next part of an answer and wakes the readers. Raises InternalError where it does not follow."""
        answer = self.answers[choice]
        answer.add(delta)
        self.wake()
        if self.record is not None:
            if delta.layout:
                self._note_layout(choice, delta.layout)
            if answer.is_finished:
                self.record.ends[choice] = _end_of(answer, self.specs[choice].sampling)

    def merge(self, held: Held) -> None:
        """Takes what another gateway added in Redis to what this one has."""
        record = self.record
        assert record is not None
        if held.life != record.life or len(held.token_ids) != len(self.answers):
            record.is_over = True
            return
        for answer, spec, token_ids, end in zip(self.answers, self.specs, held.token_ids, held.ends, strict=True):
            if spec.sampling.logprobs is not None or answer.is_finished:
                continue
            num_known = len(answer.token_ids)
            if token_ids[:num_known] == answer.token_ids:
                restored = restore(token_ids, end)
                answer.token_ids += token_ids[num_known:]
                answer.finish_reason, answer.usage = restored.finish_reason, restored.usage
                record.ends[spec.choice] = _end_of(answer, spec.sampling)
        self.continue_record(held)

    def continue_record(self, held: Held) -> None:
        """Has the record continue what Redis holds."""
        record = self.record
        assert record is not None
        record.life, record.epoch = held.life, held.epoch
        record.is_in_redis, record.is_over = True, False
        record.num_written = [
            min(len(known), len(token_ids)) for known, token_ids in zip(record.token_ids, held.token_ids, strict=True)
        ]
        record.written_ends = [False] * len(held.ends)

    def _note_layout(self, choice: int, layout: str) -> None:
        """Notes the weights with which an answer has begun, which its record names from here on."""
        call, record = self.call, self.record
        assert call is not None
        assert record is not None
        if call.choices[choice].layout == layout:
            return
        choices = [*call.choices]
        choices[choice] = msgspec.structs.replace(choices[choice], layout=layout)
        self.call = msgspec.structs.replace(call, choices=choices)
        stored = msgspec.structs.replace(self.call, traceparent=self.traceparent)
        record.call = encode_call(stored, created_unix_s=self.created_unix_s)
        record.forget_written()


def read_held(held: Held) -> tuple[StoredCall, list[Answer], int]:
    """Returns the call, its answers so far and its creation (Unix s). Raises UnusableError for what is no journal.

    The answers are those that can be continued: one with log-probabilities, which Redis does not have, starts anew.
    """
    decoded = decode_call(held.call, request_id=held.request_id)
    if decoded is None or len(decoded[0].choices) != len(held.token_ids):
        raise UnusableError
    stored, created_unix_s = decoded
    return stored, _answers_of(stored.choices, held), created_unix_s


def _answers_of(choices: Sequence[StoredChoice], held: Held) -> list[Answer]:
    return [
        Answer() if choice.sampling.logprobs is not None else restore(token_ids, end)
        for choice, token_ids, end in zip(choices, held.token_ids, held.ends, strict=True)
    ]


def _end_of(answer: Answer, sampling: Sampling) -> bytes:
    """Returns what is written of an answer's end; empty for one whose tokens are not written."""
    return encode_end(answer) if answer.is_finished and sampling.logprobs is None else b""
