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
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import msgspec

from gateway.limits import SLOW_REQUEST_S
from gateway.observability.history import MAX_STEPS, AnswerStory, History, Row
from gateway.observability.metrics import Metrics
from services.runtime import status, telemetry
from services.runtime.clock import Clock
from services.runtime.errors import InternalError, Overloaded, RequestCancelled, TandemError
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

_WORDS: dict[Phase, str] = {
    "queue": "waiting for workers",
    "prefill": "until the first token",
    "transfer": "handing over",
    "decode": "generating",
}

logger = logging.getLogger(__name__)


class Waterfall:
    """The phases of one answer, of which it is always in one. Times in seconds of one monotonic clock."""

    __slots__ = ("_began_s", "_since_us", "_spent_us", "phase", "steps")

    def __init__(self, began_s: float) -> None:
        self.phase: Phase = "queue"
        self._began_s = began_s
        self._since_us = 0
        self._spent_us: dict[Phase, int] = {"queue": 0, "prefill": 0, "transfer": 0, "decode": 0}
        self.steps: list[tuple[str, int]] = [("queue", 0)]
        """Phases and when they began, in microseconds; the first `MAX_STEPS` of them."""

    def enter(self, phase: Phase, now_s: float) -> None:
        """Notes that the answer enters this phase."""
        now_us = self.us(now_s)
        self._spent_us[self.phase] += now_us - self._since_us
        self._since_us = now_us
        self.phase = phase
        if len(self.steps) < MAX_STEPS:
            self.steps.append((phase, now_us))

    def until(self, now_s: float) -> dict[Phase, int]:
        """Returns the microseconds of each phase, up to now: they sum up to the whole."""
        return self._spent_us | {self.phase: self._spent_us[self.phase] + self.us(now_s) - self._since_us}

    def us(self, now_s: float) -> int:
        """Returns the microseconds from the beginning, never fewer than before: clocks of threads lag."""
        return max(self._since_us, round((now_s - self._began_s) * 1e6))


class AnswerTrace:
    """What the log will say of one answer; `Requests.run` writes it down as it happens."""

    __slots__ = (
        *("cached_tokens", "code", "finish_reason", "name", "new_tokens", "num_attempts", "num_moves", "outcome"),
        *("overload", "prompt_tokens", "story", "waterfall", "workers", "_log", "_opened"),
    )

    def __init__(self, name: str, arrived_s: float, log: "RequestLog", opened: "OpenCall") -> None:
        self.name = name
        self.waterfall = Waterfall(arrived_s)
        self.story = AnswerStory(self.waterfall.steps)
        self.num_attempts = 0
        self.num_moves = 0
        self.workers: dict[str, None] = {}
        """The ids of its workers, in the order in which they came."""
        self.prompt_tokens = self.cached_tokens = self.new_tokens = 0
        self.finish_reason = self.code = self.overload = ""
        self.outcome: Outcome = "finished"
        self._log = log
        self._opened = opened

    def enter(self, phase: Phase) -> None:
        """Notes that the answer enters this phase."""
        self.waterfall.enter(phase, self._log.now_s())

    def note_workers(self, *ids: str) -> None:
        """Notes workers that have the answer, or a part of it."""
        self.workers.update(dict.fromkeys(ids))

    def end(
        self,
        error: BaseException | None,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        new_tokens: int,
        finish_reason: str,
        tpot_s: float = 0.0,
    ) -> None:
        """Notes that it is over. Keeps only the code of the error, whose traceback would hold much more in memory."""
        self.prompt_tokens, self.cached_tokens, self.new_tokens = prompt_tokens, cached_tokens, new_tokens
        self.finish_reason = finish_reason
        self.story.tokens, self.story.tpot_us = new_tokens, round(tpot_s * 1e6)
        self.story.ended_us = self.waterfall.us(self._log.now_s())
        self.outcome = outcome_of(error, was_placed=self.num_attempts > 0)
        self.code = "" if error is None else code_of(error)
        self.overload = overload_of(error)
        self._opened.ended.append(self)
        self._log.has_line(error)


class CallFacts(NamedTuple):
    """What a line says of a call beside what became of its answers. `answers` are their names towards workers."""

    request_id: str
    traceparent: str
    model: str
    service_class: str
    tenant: str
    fallback: str = ""
    answers: tuple[str, ...] = ()


@dataclass(slots=True)
class OpenCall:
    """What is known of a call until its line is written."""

    arrived_s: float
    service_class: str
    tenant: str
    names: list[str] = field(default_factory=list)
    """The names of its answers towards workers."""
    ended: list[AnswerTrace] = field(default_factory=list)


class Summary(msgspec.Struct):
    """What a line says of a request. Times in microseconds; `workers` in the order in which they came.

    `overload` is what was short, where the cluster was full; only counted.
    """

    outcome: Outcome
    code: str
    phases_us: dict[Phase, int]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    num_attempts: int = 0
    num_moves: int = 0
    workers: tuple[str, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    answers: tuple[AnswerStory, ...] = ()
    """The stories of the answers of the model that answered."""
    overload: str = ""

    @property
    def total_us(self) -> int:
        """From arrival to the end."""
        return sum(self.phases_us.values())


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
        self._noted: WeakSet[BaseException] = WeakSet()
        """Errors whose requests have had their line, or were counted: an edge meets them once more."""
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
        return AnswerTrace(name, arrived_s, self, opened)

    def note_refusal(
        self, error: BaseException, *, facts: CallFacts | None = None, arrived_s: float | None = None
    ) -> None:
        """Notes that a call ended with an error before it was accepted; once for each error, however often it is met.

        Its `facts` may hold names that have not been checked. None: nothing was read of the call.
        """
        if error in self._noted:
            return
        self.has_line(error)
        total_us = 0 if arrived_s is None else max(0, round((self.now_s() - arrived_s) * 1e6))
        phases: dict[Phase, int] = {"queue": total_us, "prefill": 0, "transfer": 0, "decode": 0}
        summary = Summary(outcome_of(error, was_placed=False), code_of(error), phases, overload=overload_of(error))
        names = {} if facts is None else _names(facts)
        self._write(summary, {name: value[:MAX_NAME_CHARS] for name, value in names.items()}, num_answers=0)

    def note_end(self, opened: OpenCall, facts: CallFacts, error: BaseException | None) -> None:
        """Notes that an accepted call is over. An error that its client met in the middle of an answer is known."""
        for name in opened.names:
            self._calls.pop(name, None)
        self.has_line(error)
        if not opened.ended and error is None:
            return  # Nothing was left to do, or another call continues it.
        summary = _summary(set(facts.answers), opened, error, self.now_s())
        phases_s: dict[str, float] = {phase: spent_us / 1e6 for phase, spent_us in summary.phases_us.items()}
        self._metrics.note_end(
            facts.model,
            facts.service_class,
            summary.outcome,
            total_s=summary.total_us / 1e6,
            phases_s=phases_s if summary.num_attempts else None,
            trace_id=self._exported_trace_id(facts, summary),
        )
        self._metrics.note_tenant(
            facts.tenant,
            summary.outcome,
            prompt_tokens=summary.prompt_tokens,
            generated_tokens=summary.new_tokens,
        )
        names = _names(facts)
        if facts.fallback:
            names["fallback"] = facts.fallback
        self._write(summary, names, num_answers=len(facts.answers))
        if 0 < self._slow_us <= summary.total_us:
            self._say_slow(summary, {"request_id": facts.request_id, "model": facts.model})

    def _exported_trace_id(self, facts: CallFacts, summary: Summary) -> str:
        """Returns the id of a trace whose spans are exported, as 32 hex digits; else the empty text."""
        context = telemetry.extract(facts.traceparent) if telemetry.is_on() else None
        is_kept = summary.outcome == "failed" or 0 < self._slow_us <= summary.total_us
        return f"{context.trace_id:032x}" if context is not None and (context.is_sampled or is_kept) else ""

    def has_line(self, error: BaseException | None) -> None:
        """Notes that the request of this error has its line or will have it, wherever else the error is met."""
        if isinstance(error, TandemError):  # Others cannot be remembered without being kept.
            self._noted.add(error)

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

    def _write(self, summary: Summary, names: dict[str, str], *, num_answers: int) -> None:
        """Writes the line, or counts one more request that has none."""
        if summary.overload:
            self._metrics.note_overload(summary.overload)
        is_good = self.history.note_end(summary.outcome, summary.answers)
        if summary.outcome == "refused" and not self._refused.take(self.now_s()):
            self._left_out[summary.code] += 1
            self._metrics.note_unlogged("refused")
            self._count_soon()
            return
        self._remember(summary, names, num_answers=num_answers, is_good=is_good)
        if not logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {
            **names,
            "outcome": summary.outcome,
            "code": summary.code,
            "finish_reason": ",".join(summary.finish_reasons),
            "answers": num_answers,
            "prompt_tokens": summary.prompt_tokens,
            "cached_tokens": summary.cached_tokens,
            "generated_tokens": summary.new_tokens,
            "attempts": summary.num_attempts,
            "moves": summary.num_moves,
            "workers": summary.workers,
        }
        for phase, spent_us in summary.phases_us.items():
            fields[f"{phase}_ms"] = spent_us / 1e3
        fields["total_ms"] = summary.total_us / 1e3
        # Not `logger.info`: it would walk up the stack to say where this is.
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, "request", (), None, extra=fields))

    def _remember(self, summary: Summary, names: dict[str, str], *, num_answers: int, is_good: bool) -> None:
        phases = summary.phases_us
        row = Row(
            request_id=names.get("request_id", ""),
            trace_id=names.get("trace_id", ""),
            model=names.get("model", ""),
            service_class=names.get("service_class", ""),
            tenant=names.get("tenant", ""),
            fallback=names.get("fallback", ""),
            outcome=summary.outcome,
            code=summary.code,
            finish_reason=",".join(summary.finish_reasons),
            workers=" ".join(summary.workers),
            answers=num_answers,
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            generated_tokens=summary.new_tokens,
            attempts=summary.num_attempts,
            moves=summary.num_moves,
            queue_us=phases["queue"],
            prefill_us=phases["prefill"],
            transfer_us=phases["transfer"],
            decode_us=phases["decode"],
            total_us=summary.total_us,
            is_good=is_good,
        )
        self.history.add(row, summary.answers)

    def _say_slow(self, summary: Summary, names: dict[str, str]) -> None:
        if self._slow.take(self.now_s()):
            logger.warning("slow request: %s", in_words(summary), extra=names)
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


def overload_of(error: BaseException | None) -> str:
    """Returns what the cluster was short of, where that is why the request was refused; else the empty text."""
    return error.reason if isinstance(error, Overloaded) else ""


def in_words(summary: Summary) -> str:
    """Returns where the time of a request went, in the order in which it happened."""
    phases = summary.phases_us
    parts = [f"{spent_us / 1e6:.3g} s {_WORDS[phase]}" for phase, spent_us in phases.items() if spent_us >= 500]
    said = f"{summary.total_us / 1e6:.3g} s: {', '.join(parts)}; prompt of {summary.prompt_tokens} tokens"
    if summary.cached_tokens:
        said += f" ({summary.cached_tokens} cached)"
    said += f", {summary.new_tokens} generated"
    if summary.new_tokens and phases["decode"]:
        said += f" ({phases['decode'] / 1e3 / summary.new_tokens:.3g} ms each)"
    said += f"; {summary.num_attempts} attempt" + ("" if summary.num_attempts == 1 else "s")
    said += _kept(summary)
    if summary.num_moves:
        said += f", moved {summary.num_moves} time" + ("" if summary.num_moves == 1 else "s")
    return said + (f"; on {', '.join(summary.workers)}" if summary.workers else "; on no worker")


def _kept(summary: Summary) -> str:
    """Returns when the second token was expected and when it came, for the answer in which it came last."""
    told = [
        answer for answer in summary.answers if answer.second_token_us is not None and answer.predicted() is not None
    ]
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


def _summary(current: set[str], opened: OpenCall, error: BaseException | None, now_s: float) -> Summary:
    """Returns attempts and workers of all answers, and the rest of the `current` ones, of the model that answers."""
    ended = opened.ended
    summary = Summary("finished", "", (ended[-1].waterfall if ended else Waterfall(opened.arrived_s)).until(now_s))
    if ended:
        ended[-1].story.ended_us = summary.total_us
    reasons: dict[str, None] = {}
    workers: dict[str, None] = {}
    answers: list[AnswerStory] = []
    for trace in ended:
        summary.num_attempts += trace.num_attempts
        summary.num_moves += trace.num_moves
        workers.update(trace.workers)
        if trace.name not in current:
            continue  # Another model was asked for it, and did not answer: only its time and its workers count.
        answers.append(trace.story)
        summary.prompt_tokens += trace.prompt_tokens
        summary.cached_tokens += trace.cached_tokens
        summary.new_tokens += trace.new_tokens
        if trace.finish_reason:
            reasons[trace.finish_reason] = None
        # Whatever ended one of them badly ended the others, which were cancelled.
        if trace.outcome != "finished" and summary.outcome in ("finished", "cancelled"):
            summary.outcome, summary.code, summary.overload = trace.outcome, trace.code, trace.overload
    summary.workers, summary.finish_reasons, summary.answers = tuple(workers), tuple(reasons), tuple(answers)
    if error is not None:
        summary.outcome, summary.code = outcome_of(error, was_placed=summary.num_attempts > 0), code_of(error)
        summary.overload = overload_of(error)
    elif summary.outcome == "refused" and summary.num_attempts:
        summary.outcome = "failed"
    return summary


def _names(facts: CallFacts) -> dict[str, str]:
    names = {"request_id": facts.request_id}
    if facts.traceparent:
        names["trace_id"] = request_fields(facts.request_id, 0, facts.traceparent).get("trace_id", "")
    names["model"], names["service_class"], names["tenant"] = facts.model, facts.service_class, facts.tenant
    return names
