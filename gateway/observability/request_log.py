"""One line of the log for each request, at its end: its tenant, its outcome, and where the time went.

A request is a client's call, however many answers it has, attempts they took, and models were asked. A line has names,
counts and times, never a prompt, an answer, an error message (which may quote a client) or a key.

At any moment an answer is in one phase, so its phases sum up to its time:

    queue     it waits for workers: at first, and again after each failure
    prefill   workers have taken it, and its first token has not arrived; after a failure, its next one
    transfer  the prompt is computed, and its pages are on their way to the decode worker; also while it moves
    decode    tokens are generated, until the answer's end is sent

A call has the phases of the answer that ended last. What is refused before any worker took it may come at any rate, so
only some such requests have lines; the others are counted by code in one line every `SUMMARY_S`. This is also true of
the descriptions of slow requests, which are a second line. Times are whole microseconds until they are written.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from gateway.limits import SLOW_REQUEST_S
from gateway.observability.history import MAX_STEPS, AnswerStory, History, Row
from gateway.observability.metrics import Metrics
from services.runtime import status, telemetry
from services.runtime.clock import Clock
from services.runtime.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestCancelled,
    TandemError,
)
from services.runtime.logs import LineBudget, request_fields

SUMMARY_S = 10.0
"""The time for which requests without lines are counted in one line."""
REFUSED_PER_S, REFUSED_BURST = 2.0, 50
"""The rate of lines about refused requests, of about 400 bytes, so at most 70 MB a day."""
SLOW_PER_S, SLOW_BURST = 0.5, 10
MAX_NAME_CHARS = 256
"""The characters that are kept of a name that has not been checked."""

Phase = Literal["queue", "prefill", "transfer", "decode"]
Outcome = Literal["finished", "failed", "cancelled", "refused"]

_WORDS = ("waiting for workers", "until the first token", "handing over", "generating")
"""What is said of each phase, in their order."""

_PLAIN_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}(\[\d+\][A-Za-z0-9_.-]{0,63}){0,4}")
"""Names of members and headers, with places in lists."""

logger = logging.getLogger(__name__)


class AnswerTrace:
    """What the log will say of one answer, which is always in one `phase`; `Requests.run` writes it down.

    Times in seconds of one monotonic clock.
    """

    __slots__ = (
        *("cached_tokens", "code", "finish_reason", "name", "new_tokens", "num_attempts", "num_moves", "outcome"),
        *("overload", "phase", "prompt_tokens", "story", "workers", "_began_s", "_opened", "_since_us", "_spent_us"),
    )

    def __init__(self, name: str, arrived_s: float, opened: "OpenCall") -> None:
        self.name = name
        self.phase: Phase = "queue"
        self.story = AnswerStory([("queue", 0)])
        self.num_attempts = 0
        self.num_moves = 0
        self.workers: dict[str, None] = {}
        """The ids of its workers, in the order in which they came."""
        self.prompt_tokens = self.cached_tokens = self.new_tokens = 0
        self.finish_reason = self.code = self.overload = ""
        self.outcome: Outcome = "finished"
        self._began_s = arrived_s
        self._opened: OpenCall | None = opened
        """Its call, until it is over: from then on the call holds it."""
        self._since_us = 0
        self._spent_us: dict[Phase, int] = {"queue": 0, "prefill": 0, "transfer": 0, "decode": 0}

    def enter(self, phase: Phase, now_s: float) -> int:
        """Notes that the answer enters this phase. Returns when, in microseconds from its arrival."""
        now_us = self.us(now_s)
        self._spent_us[self.phase] += now_us - self._since_us
        self._since_us = now_us
        self.phase = phase
        steps = self.story.steps
        if len(steps) < MAX_STEPS:
            steps.append((phase, now_us))
        return now_us

    def until(self, now_s: float) -> dict[Phase, int]:
        """Returns the microseconds of each phase, up to now: they sum up to the whole."""
        spent_us = self._spent_us.copy()
        spent_us[self.phase] += self.us(now_s) - self._since_us
        return spent_us

    def us(self, now_s: float) -> int:
        """Returns the microseconds from the beginning, never fewer than before: clocks of threads lag."""
        now_us = round((now_s - self._began_s) * 1e6)
        return now_us if now_us > self._since_us else self._since_us

    def end(
        self,
        error: BaseException | None,
        now_s: float,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        new_tokens: int,
        finish_reason: str,
    ) -> None:
        """Notes that it is over. Keeps only the code of the error, whose traceback would hold much more in memory."""
        self.prompt_tokens, self.cached_tokens, self.new_tokens = prompt_tokens, cached_tokens, new_tokens
        self.finish_reason = finish_reason
        self.story.tokens, self.story.ended_us = new_tokens, self.us(now_s)
        if error is not None:
            self.outcome = outcome_of(error, was_placed=self.num_attempts > 0)
            self.code, self.overload = code_of(error), overload_of(error)
        opened, self._opened = self._opened, None
        assert opened is not None, "an answer ends once"
        opened.ended.append(self)


CLIENT_ADDRESS: ContextVar[str] = ContextVar("client_address", default="")
"""The address of the client whose request runs in this context, where the gateway is told to look for it."""


class CallFacts(NamedTuple):
    """What a line says of a call beside what became of its answers. `answers` are their names towards workers."""

    request_id: str
    traceparent: str
    model: str
    service_class: str
    tenant: str
    fallback: str = ""
    answers: tuple[str, ...] = ()
    operation: str = ""
    """What was asked for, as the conventions for traces call it."""


NOBODY = CallFacts("", "", "", "", "")
"""The facts of a call of which nothing was read."""


@dataclass(slots=True)
class OpenCall:
    """What is known of a call until its line is written."""

    arrived_s: float
    service_class: str
    tenant: str
    names: list[str] = field(default_factory=list)
    """The names of its answers towards workers."""
    ended: list[AnswerTrace] = field(default_factory=list)


class RequestLog:
    """All requests of one gateway. `slow_s`: the time from which a request is described as slow; 0: never.

    `history` remembers those that have a line.
    """

    def __init__(
        self, metrics: Metrics, *, clock: Clock, slow_s: float = SLOW_REQUEST_S, history: History | None = None
    ) -> None:
        self.history = History(clock=clock) if history is None else history
        self._metrics = metrics
        self._clock = clock
        self._slow_us = round(slow_s * 1e6)
        self._calls: dict[str, OpenCall] = {}
        """The open calls by the names of their answers."""
        self._noted: WeakKeyDictionary[BaseException, str] = WeakKeyDictionary()
        """Errors whose requests have had their line, or were counted, with their ids: an edge meets them once more."""
        self._refused = LineBudget(per_s=REFUSED_PER_S, burst=REFUSED_BURST)
        self._slow = LineBudget(per_s=SLOW_PER_S, burst=SLOW_BURST)
        self._left_out: Counter[str] = Counter()
        self._num_slow_left_out = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(self, names: Iterable[str], *, arrived_s: float, service_class: str, tenant: str) -> OpenCall:
        """Follows a call from here until `note_end`; `names` are those of its answers."""
        opened = OpenCall(arrived_s, service_class, tenant)
        self._add(opened, names)
        return opened

    def add(self, known: str, names: Iterable[str]) -> None:
        """Adds answers to the call that has the answer `known`: those of another model."""
        opened = self._calls.get(known)
        if opened is not None:
            self._add(opened, names)

    def trace(self, name: str, *, arrived_s: float, service_class: str, tenant: str) -> AnswerTrace:
        """Returns where `run` writes down what becomes of one answer."""
        opened = self._calls.get(name)
        if opened is None:  # Its call is over, so nobody reads it.
            opened = OpenCall(arrived_s, service_class, tenant)
        return AnswerTrace(name, arrived_s, opened)

    def note_refusal(
        self, error: BaseException, *, request_id: str, facts: CallFacts = NOBODY, arrived_s: float | None = None
    ) -> str:
        """Notes that a call ended with an error before it was accepted; once for each error, however often it is met.

        Its `facts` may hold names that have not been checked. `request_id` is what its client is told that it is
        called. Returns the id under which it was noted, the first time.
        """
        if error in self._noted:
            return self._noted[error]
        self.has_line(error, request_id)
        total_us = 0 if arrived_s is None else max(0, round((self.now_s() - arrived_s) * 1e6))
        row = _row(facts._replace(request_id=request_id), outcome_of(error, was_placed=False))
        row.code, row.queue_us, row.total_us = code_of(error), total_us, total_us
        row.field, row.rule, row.limit = broken_rule(error)
        self._write(row, (), overload=overload_of(error))
        return request_id

    def note_end(self, opened: OpenCall, facts: CallFacts, error: BaseException | None) -> None:
        """Notes that an accepted call is over. An error that its client met in the middle of an answer is known."""
        for name in opened.names:
            self._calls.pop(name, None)
        self.has_line(error)
        if not opened.ended and error is None:
            return  # Nothing was left to do, or another call continues it.
        row = _row(facts, "finished")
        stories, overload = _sum_up(row, facts, opened, error, self.now_s())
        is_slow = 0 < self._slow_us <= row.total_us
        phases_us = (row.queue_us, row.prefill_us, row.transfer_us, row.decode_us)
        self._metrics.of(facts.model, facts.service_class).note_end(
            row.outcome,
            total_s=row.total_us / 1e6,
            phases_s=[spent_us / 1e6 for spent_us in phases_us] if row.attempts else None,
            trace_id=_exported_trace_id(facts, row, is_slow=is_slow) if telemetry.is_on() else "",
        )
        self._metrics.note_tenant(
            facts.tenant,
            row.outcome,
            prompt_tokens=row.prompt_tokens,
            generated_tokens=row.generated_tokens,
        )
        self._write(row, stories, overload=overload)
        if is_slow:
            self._say_slow(row, stories)

    def has_line(self, error: BaseException | None, request_id: str = "") -> None:
        """Notes that the request of this error has its line or will have it, wherever else the error is met."""
        if isinstance(error, TandemError):  # Others cannot be remembered without being kept.
            self._noted[error] = request_id

    def now_s(self) -> float:
        """Returns the time of the clock that all times here are of."""
        return self._clock.monotonic()

    def close(self) -> None:
        """Writes what has no line yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._count_left_out()

    def _add(self, opened: OpenCall, names: Iterable[str]) -> None:
        for name in names:
            opened.names.append(name)
            self._calls[name] = opened

    def _write(self, row: Row, stories: Sequence[AnswerStory], *, overload: str) -> None:
        """Writes the line, or counts one more request that has none."""
        if overload:
            self._metrics.note_overload(overload)
        row.is_good = self.history.note_end(row.outcome, stories)
        if row.outcome == "refused" and not self._refused.take(self.now_s()):
            self._left_out[row.code] += 1
            self._metrics.note_unlogged("refused")
            self._count_soon()
            return
        self.history.add(row, stories)
        if logger.isEnabledFor(logging.INFO):
            fields = _fields(row)
            # Not `logger.info`: it would walk up the stack to say where this is.
            logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, "request", (), None, extra=fields))

    def _say_slow(self, row: Row, stories: Sequence[AnswerStory]) -> None:
        if self._slow.take(self.now_s()):
            names = {"request_id": row.request_id, "model": row.model}
            logger.warning("slow request: %s", in_words(row, stories), extra=names)
            return
        self._num_slow_left_out += 1
        self._metrics.note_unlogged("slow")
        self._count_soon()

    def _count_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SUMMARY_S, self._count_left_out)

    def _count_left_out(self) -> None:
        self._timer = None
        codes, num_slow = dict(self._left_out), self._num_slow_left_out
        self._left_out.clear()
        self._num_slow_left_out = 0
        fields = {"refused": sum(codes.values()), "refused_by_code": codes, "slow": num_slow}
        logger.info("requests without a line of their own", extra=fields)


def outcome_of(error: BaseException | None, *, was_placed: bool) -> Outcome:
    """Returns how a request ended. Refused: before any worker took it, and not by a fault of this program."""
    if error is None:
        return "finished"
    if isinstance(error, GeneratorExit | asyncio.CancelledError | RequestCancelled):
        return "cancelled"
    is_own_fault = not isinstance(error, TandemError) or isinstance(error, InternalError)
    return "failed" if was_placed or is_own_fault else "refused"


def code_of(error: BaseException) -> str:
    """Returns the error's public code, one of a few words."""
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    return str(status.openai_error(error)["error"]["code"])


def broken_rule(error: BaseException) -> tuple[str, str, str]:
    """Returns the field, the rule that it does not keep to, and the limit that is reached; each empty where unknown.

    None of them quotes a client: names of fields that are no plain ones are left out.
    """
    if isinstance(error, InvalidRequest):
        field = error.field or ""
        return field if _PLAIN_FIELD.fullmatch(field) else "", error.rule, ""
    return "", "", error.limit if isinstance(error, RateLimited) else overload_of(error)


def overload_of(error: BaseException | None) -> str:
    """Returns what the cluster was short of, where that is why the request was refused; else the empty text."""
    return error.reason if isinstance(error, Overloaded) else ""


def in_words(row: Row, stories: Sequence[AnswerStory] = ()) -> str:
    """Returns where the time of a request went, in the order in which it happened."""
    phases_us = (row.queue_us, row.prefill_us, row.transfer_us, row.decode_us)
    parts = [
        f"{spent_us / 1e6:.3g} s {words}" for words, spent_us in zip(_WORDS, phases_us, strict=True) if spent_us >= 500
    ]
    said = f"{row.total_us / 1e6:.3g} s: {', '.join(parts)}; prompt of {row.prompt_tokens} tokens"
    if row.cached_tokens:
        said += f" ({row.cached_tokens} cached)"
    said += f", {row.generated_tokens} generated"
    if row.generated_tokens and row.decode_us:
        said += f" ({row.decode_us / 1e3 / row.generated_tokens:.3g} ms each)"
    said += f"; {row.attempts} attempt" + ("" if row.attempts == 1 else "s")
    said += _kept(stories)
    if row.moves:
        said += f", moved {row.moves} time" + ("" if row.moves == 1 else "s")
    return said + (f"; on {', '.join(row.workers.split())}" if row.workers else "; on no worker")


def _kept(stories: Sequence[AnswerStory]) -> str:
    """Returns when the second token was expected and when it came, for the answer in which it came last."""
    told = [answer for answer in stories if answer.second_token_us is not None and answer.predicted() is not None]
    if not told:
        return ""
    answer = max(told, key=lambda story: story.second_token_us or 0)
    attempt, second_us = answer.predicted(), answer.second_token_us
    if attempt is None or second_us is None:
        return ""
    transfer = f", {attempt.predicted_exposed_us / 1e6:.3g} s of them for the handoff" if attempt.is_remote else ""
    return (
        f"; second token expected {attempt.predicted_second_us / 1e6:.3g} s after the choice of workers{transfer}, "
        f"and seen after {(second_us - attempt.began_us) / 1e6:.3g} s"
    )


def _row(facts: CallFacts, outcome: Outcome) -> Row:
    """Returns the row of a call, with its names only, cut where they have not been checked."""
    return Row(
        request_id=facts.request_id[:MAX_NAME_CHARS],
        trace_id=_trace_id(facts) if facts.traceparent else "",
        model=facts.model[:MAX_NAME_CHARS],
        service_class=facts.service_class[:MAX_NAME_CHARS],
        tenant=facts.tenant[:MAX_NAME_CHARS],
        fallback=facts.fallback,
        operation=facts.operation,
        answers=len(facts.answers),
        outcome=outcome,
    )


def _sum_up(
    row: Row, facts: CallFacts, opened: OpenCall, error: BaseException | None, now_s: float
) -> tuple[Sequence[AnswerStory], str]:
    """Adds what became of a call: attempts and workers of all answers, the rest of those of the model that answers.

    Returns the stories of the latter, and what was short where the cluster was full.
    """
    ended, overload = opened.ended, ""
    last = ended[-1] if ended else AnswerTrace("", opened.arrived_s, opened)
    row.queue_us, row.prefill_us, row.transfer_us, row.decode_us = last.until(now_s).values()
    row.total_us = last.story.ended_us = row.queue_us + row.prefill_us + row.transfer_us + row.decode_us
    reasons: dict[str, None] = {}
    workers: dict[str, None] = {}
    stories: list[AnswerStory] = []
    for trace in ended:
        row.attempts += trace.num_attempts
        row.moves += trace.num_moves
        workers |= trace.workers
        if trace.name not in facts.answers:
            continue  # Another model was asked for it, and did not answer: only its time and its workers count.
        stories.append(trace.story)
        row.prompt_tokens += trace.prompt_tokens
        row.cached_tokens += trace.cached_tokens
        row.generated_tokens += trace.new_tokens
        if trace.finish_reason:
            reasons[trace.finish_reason] = None
        # Whatever ended one of them badly ended the others, which were cancelled.
        if trace.outcome != "finished" and row.outcome in ("finished", "cancelled"):
            row.outcome, row.code, overload = trace.outcome, trace.code, trace.overload
    row.workers, row.finish_reason = " ".join(workers), ",".join(reasons)
    if error is not None:
        row.outcome, row.code = outcome_of(error, was_placed=row.attempts > 0), code_of(error)
        overload = overload_of(error)
    elif row.outcome == "refused" and row.attempts:
        row.outcome = "failed"
    return stories, overload


def _fields(row: Row) -> dict[str, Any]:
    """Returns what the line of a request says."""
    fields: dict[str, Any] = {name: getattr(row, name) for name in ("request_id", "model", "service_class", "tenant")}
    for name in ("trace_id", "operation", "fallback", "field", "rule", "limit"):
        if said := getattr(row, name):
            fields[name] = said
    if address := CLIENT_ADDRESS.get():
        fields["client"] = address
    fields |= {
        "outcome": row.outcome,
        "code": row.code,
        "finish_reason": row.finish_reason,
        "answers": row.answers,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "generated_tokens": row.generated_tokens,
        "attempts": row.attempts,
        "moves": row.moves,
        "workers": row.workers.split(),
    }
    for phase in ("queue", "prefill", "transfer", "decode", "total"):
        fields[f"{phase}_ms"] = getattr(row, f"{phase}_us") / 1e3
    return fields


def _exported_trace_id(facts: CallFacts, row: Row, *, is_slow: bool) -> str:
    """Returns the id of a trace whose spans are exported, as 32 hex digits; else the empty text."""
    context = telemetry.extract(facts.traceparent)
    is_kept = row.outcome == "failed" or is_slow
    return f"{context.trace_id:032x}" if context is not None and (context.is_sampled or is_kept) else ""


def _trace_id(facts: CallFacts) -> str:
    trace_id: str = request_fields(facts.request_id, 0, facts.traceparent).get("trace_id", "")
    return trace_id[:MAX_NAME_CHARS]
