"""One answer while it is generated: what was delivered so far, its times, and the attempt that continues it.

Knows neither how workers are chosen nor where the answer goes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.models.answer_text import AnswerText, Taken
from gateway.requests.attempt import Attempt, Giver
from gateway.requests.call import AnswerSpec
from gateway.requests.fault import Fault
from gateway.requests.mailbox import Mailbox
from gateway.requests.queue import Lane
from gateway.requests.tokens import Arrived, TokenLog
from gateway.topology.books import Bookings
from gateway.topology.events import AttemptKey, SequenceOrder
from gateway.topology.session import DecodeSession, Peer
from gateway.topology.views import NOTHING_MEASURED
from gateway.topology.watch import AttemptWatch
from gateway.types import Delta, FinishReason, Usage
from services.runtime.clock import Clock
from services.runtime.errors import DeadlineExceeded, TandemError
from services.scheduling.entry import QueueEntry
from services.scheduling.overload import Admit
from services.scheduling.routing.route import Route

KEPT_PROMPT_S = 10.0
"""The time for which a prefill worker keeps a prompt's pages after it has handed them on."""


@dataclass(frozen=True, slots=True)
class Strike:
    """An attempt whose workers may have died of the request. Processes are named by incarnation.

    `is_fresh`: the request was new to them, and they had sent no token. `is_alone`: it was tried alone there.
    """

    suspects: frozenset[str]
    is_certain: bool
    is_fresh: bool
    is_alone: bool = False


class RunningAnswer:
    """State of one answer; belongs to the task that runs it.

    `num_failures` counts failed attempts, `num_failures_in_row` those since the last new token. `strikes` are of the
    latter, too, and `num_path_failures` counts those in which the path between two living workers failed. `avoided` are
    processes that failed, `avoided_pairs` those between which something did (prefill worker, decode worker), and
    `failed_paths` those of them that it does not use again, all by incarnation.
    """

    # What most answers never change belongs to the class: it costs none of them anything.
    attempt: Attempt | None = None
    attempt_number = 0
    num_failures = 0
    num_failures_in_row = 0
    num_path_failures = 0
    is_last_attempt = False
    """Whether one more failure before the next token ends it. Its attempt may use workers that are kept from work."""
    avoids_handoffs = False
    """Whether its attempts until the next token use one worker, because handoffs have failed on several paths."""
    crowded_at = ""
    """The incarnation of the decode worker that last had no room for an attempt which it had admitted."""
    num_crowded_out = 0
    """How often that happened since the last new token."""
    next_move_at_s = 0.0
    _rests_until_s = 0.0
    must_queue = False
    usual = NOTHING_MEASURED
    """The usual speeds of its model's workers, as of the last decision."""
    routes: Sequence[Route] = ()
    """The routes that it may take, best first, as of the last decision."""
    is_judged = False
    admitted: Admit | None = None
    """How it was judged when it came, until it has started."""
    is_running = False
    finish_reason: FinishReason | None = None
    num_tokens = 0
    last_gap_s = 0.0
    _num_tokens_at_failure = _num_tokens_at_crowding = 0
    _kept_at: Peer | None = None
    _kept_until_s = 0.0
    _placed_s = _first_token_s = _last_token_s = 0.0
    _unsent_text = ""

    def __init__(
        self, spec: AnswerSpec, text: AnswerText, clock: Clock, *, queue_entry: QueueEntry, lane: Lane
    ) -> None:
        self.spec = spec
        self.tokens = TokenLog(
            spec.sampling.max_tokens,
            spec.emitted_token_ids,
            num_prompt_logprobs=_num_prompt_logprobs(spec),
        )
        self.mailbox = Mailbox(self.tokens)
        self._num_prompt_tokens = len(spec.prompt_token_ids)
        self.max_num_tokens = self._num_prompt_tokens + spec.sampling.max_tokens
        """The most tokens of prompt and answer together."""
        self.strikes: list[Strike] = []
        self.num_refusals = 0
        """How often a worker refused it as invalid, although this gateway had accepted it."""
        self.avoided: set[str] = set()
        self.avoided_pairs: set[tuple[str, str]] = set()
        self.failed_paths: set[tuple[str, str]] = set()
        self.bookings = Bookings()
        self.identity = spec.layout
        """The `identity_key` of the decode worker that it was placed at, last before its first token."""
        self.cache_salt = spec.facts.sharers
        """Names the requests that may share its pages: those of its tenant, or group of tenants, with the same salt."""
        self.page_keys: dict[tuple[str, int], Sequence[bytes]] = {}
        """The keys of the prompt's full pages by (layout fingerprint, page size)."""
        self.queue_entry = queue_entry
        self.lane = lane
        """The lane in which it waits for workers and is judged, for all its life."""
        self._text = text
        self._clock = clock
        if spec.emitted_token_ids:
            self._skip(spec.emitted_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier attempt has begun the answer or has failed."""
        return self.num_failures > 0 or bool(self.tokens.token_ids)

    @property
    def has_failed(self) -> bool:
        """Whether an attempt has failed or was preempted, so that some workers or pairs come last for it."""
        return self.num_failures > 0 or bool(self.crowded_at)

    @property
    def has_advanced(self) -> bool:
        """Whether a token has arrived since the last failure, so that earlier failures no longer limit attempts."""
        return self.tokens.next_index > self._num_tokens_at_failure

    @property
    def bound_to(self) -> str:
        """The `identity_key` of workers that may continue it; empty: any may, since it has no token, or theirs is not
        known.
        """
        return self.identity if self.tokens.token_ids else ""

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far, whose KV the next attempt must have."""
        return self._num_prompt_tokens + len(self.tokens.token_ids)

    @property
    def expected_num_tokens(self) -> int:
        """Tokens for which a decode worker is asked to have room; limits are often set far too high."""
        num_known = self.num_known_tokens
        return num_known + max(1, (self.max_num_tokens - num_known) // 2)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that came here, without those that the answer had before."""
        return self.num_tokens - len(self.spec.emitted_token_ids)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self._first_token_s - self.spec.arrived_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first one that came here."""
        num_gaps = self.num_new_tokens - 1
        return (self._last_token_s - self._first_token_s) / num_gaps if num_gaps > 0 else 0.0

    def expire(self) -> None:
        """Fails whatever the request waits for, because the deadline has passed."""
        self.fail(DeadlineExceeded("the request's deadline passed"))

    def fail(self, error: TandemError) -> None:
        """Fails whatever the request waits for from its workers."""
        self.mailbox.fail(error)

    def next_order(self) -> SequenceOrder:
        """Returns what the next attempt's workers must know: prompt and everything the client has."""
        self.attempt_number += 1
        spec = self.spec
        return SequenceOrder(
            key=AttemptKey(spec.request_id, self.attempt_number),
            prompt_token_ids=spec.prompt_token_ids,
            emitted_token_ids=tuple(self.tokens.token_ids),
            sampling=spec.sampling,
            eos_token_ids=() if spec.sampling.ignore_eos else spec.eos_token_ids,
            deadline=spec.deadline,
            trace=spec.span.for_attempt(),
            request_span_id=0 if spec.span.context is None else spec.span.context.span_id,
            cache_salt=self.cache_salt,
            service_class=self.queue_entry.service_class,
            adapter=spec.facts.adapter,
        )

    def note_routes(self, routes: Sequence[Route]) -> Sequence[Route]:
        """Notes the routes that it may take now, best first, and returns them."""
        self.routes = routes
        return routes

    def note_judged(self, verdict: Admit) -> None:
        """Notes that it was judged when it came, and not refused."""
        self.is_judged, self.admitted = True, verdict

    def note_crowded_out(self, attempt: Attempt | None) -> int:
        """Records that a worker had no room for an admitted attempt. Returns how often since the last new token."""
        self.must_queue = True
        if self.tokens.next_index > self._num_tokens_at_crowding:
            self.num_crowded_out = 0
        self._num_tokens_at_crowding = self.tokens.next_index
        self.num_crowded_out += 1
        self.crowded_at = "" if attempt is None else attempt.decode.peer.incarnation
        return self.num_crowded_out

    def forget_attempt(self) -> None:
        """Forgets its last attempt, which is over and dealt with."""
        self.attempt = None

    def begin_attempt(self, decode: DecodeSession, watch: AttemptWatch) -> Attempt:
        """Begins the next try, which is the answer's own from now on."""
        self.attempt = self.new_attempt(decode, watch)
        return self.attempt

    def move_to(self, attempt: Attempt) -> None:
        """Continues as this attempt, whose decode worker gets the pages of the one before."""
        self.attempt = attempt
        self.next_move_at_s = 0.0

    def put_off_move(self, seconds: float) -> None:
        """Has it ask again for a worker to move to, after this time, since none takes it now."""
        self.next_move_at_s = asyncio.get_running_loop().time() + seconds

    def rest(self, seconds: float) -> None:
        """Has rebalancing leave it alone for this time."""
        self._rests_until_s = asyncio.get_running_loop().time() + seconds

    def is_resting(self, now_s: float) -> bool:
        """Returns whether rebalancing leaves it alone at a time of the event loop."""
        return now_s < self._rests_until_s

    def new_attempt(self, decode: DecodeSession, watch: AttemptWatch, *, giver: Giver | None = None) -> Attempt:
        """Returns the next try, on this decode worker."""
        order = self.next_order()
        return Attempt(order, decode=decode, mailbox=self.mailbox, tokens=self.tokens, giver=giver, watch=watch)

    def note_failure(self, attempt: Attempt | None, *, is_alone: bool = False) -> Strike | None:
        """Counts a failed attempt, and notes which workers to avoid and which one still has the prompt's pages.

        `is_alone`: it was tried alone. Returns the strike, where a worker may have died of it.
        """
        self.num_failures += 1
        if self.has_advanced:
            self.num_failures_in_row = self.num_path_failures = 0
            self.strikes.clear()
        self.num_failures_in_row += 1
        self._num_tokens_at_failure = self.tokens.next_index
        if attempt is None:
            return None
        self.num_path_failures += attempt.fault is not None and attempt.fault.is_between
        if attempt.prefill is not None and attempt.prompt_done_at_s is not None:
            self._kept_at = attempt.prefill.peer
            self._kept_until_s = attempt.prompt_done_at_s + KEPT_PROMPT_S
        return None if attempt.fault is None else self._note_fault(attempt, attempt.fault, is_alone=is_alone)

    def excuse_failure(self) -> None:
        """Excuses the last failure, which a death explains in which the request had no part."""
        self.num_failures_in_row -= 1

    def has_kept_prompt(self, prefill: Peer) -> bool:
        """Returns whether this prefill worker may still have all pages of the prompt."""
        is_in_time = asyncio.get_running_loop().time() < self._kept_until_s
        return is_in_time and self._kept_at is not None and self._kept_at.incarnation == prefill.incarnation

    def close_attempt(self) -> None:
        """Frees what the current attempt holds, and what is kept for it."""
        self.bookings.leave()
        if self.attempt is not None:
            self.attempt.close()
        totals = self.spec.totals
        if self.spec.choice in totals.placed:
            totals.placed.discard(self.spec.choice)
            totals.waiting_since_s = self._clock.monotonic()

    def count_as_running(self) -> int:
        """Returns 1 the first time, then 0."""
        is_new, self.is_running = not self.is_running, True
        return int(is_new)

    def note_admitted(self, identity: str) -> Admit | None:
        """Notes that workers took the last attempt; `identity` is its decode worker's.

        Returns how it was judged when it came; None if it had started before.
        """
        self.must_queue = False
        self.bookings.note_admitted()
        self.spec.totals.placed.add(self.spec.choice)
        if not self.bound_to:
            self.identity = identity
        if not self._placed_s:
            self._placed_s = self._clock.monotonic()
        verdict, self.admitted = self.admitted, None
        return verdict

    def last_delta(self) -> Delta:
        """Returns the end of an answer whose emitted tokens had ended it already: no token, only what ends it."""
        return Delta(self.num_tokens, [], self._unsent_text, None, self.finish_reason, self._usage(None))

    def take(self, attempt: Attempt, arrived: Arrived) -> Delta:
        """Turns new tokens into what the client gets."""
        token_ids, logprobs = arrived.token_ids, arrived.logprobs
        taken = self._text.push(token_ids)
        text, reason = taken.text, arrived.finish_reason
        if taken.is_stopped:
            reason = self._reason_of(taken)
            token_ids = token_ids[: taken.num_tokens]
            logprobs = None if logprobs is None else logprobs[: taken.num_tokens]
        elif reason is not None or self.tokens.is_full:
            # A full answer needs no word from the worker, which may have died right after its last token.
            reason = reason or "length"
            text += self._text.finish()
        self.num_tokens += taken.num_tokens
        self.finish_reason = reason
        if taken.num_tokens:
            self._note_token_time()
        usage = None if reason is None else self._usage(attempt)
        layout = self.identity if arrived.first_index == 0 and token_ids else ""
        return Delta(arrived.first_index, token_ids, text, logprobs, reason, usage, arrived.prompt_logprobs, layout)

    def _note_fault(self, attempt: Attempt, fault: Fault, *, is_alone: bool) -> Strike | None:
        if fault.worker is not None or attempt.prefill is None:
            self.avoided.add((fault.worker or attempt.decode).peer.incarnation)
        else:
            pair = attempt.prefill.peer.incarnation, attempt.decode.peer.incarnation
            self.avoided_pairs.add(pair)
            if fault.is_between:
                self.failed_paths.add(pair)
        if not fault.suspects:
            return None
        suspects = frozenset(worker.peer.incarnation for worker in fault.suspects)
        # A process that took part this time cannot have died of it the time before.
        earlier = [replace(strike, suspects=strike.suspects - suspects) for strike in self.strikes]
        self.strikes = [strike for strike in earlier if strike.suspects or strike.is_certain]
        self.strikes.append(Strike(suspects, fault.is_certain, fault.is_fresh, is_alone))
        return self.strikes[-1]

    def _skip(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that the client has; their text, too, was delivered with them."""
        taken = self._text.push(token_ids)
        self.num_tokens = taken.num_tokens
        if taken.is_stopped:
            self.finish_reason = self._reason_of(taken)
        elif self.tokens.is_full:
            self.finish_reason = "length"
            self._unsent_text = self._text.finish()

    def _reason_of(self, taken: Taken) -> FinishReason:
        """Returns `length` for an answer whose form a stop text has left incomplete, else `stop`."""
        form = self.spec.sampling.form
        return "length" if taken.is_cut and form is not None and not form.may_be_text else "stop"

    def _note_token_time(self) -> None:
        now_s = self._clock.monotonic()
        if not self._first_token_s:
            self._first_token_s = self._last_token_s = now_s
        self.last_gap_s = now_s - self._last_token_s
        self._last_token_s = now_s

    def _usage(self, attempt: Attempt | None) -> Usage:
        spec = self.spec
        handed_off = attempt.facts.handed_off if attempt is not None else None
        return Usage(
            prompt_tokens=len(spec.prompt_token_ids),
            cached_tokens=self.tokens.num_cached_tokens,
            completion_tokens=self.num_tokens,
            queue_s=max(0.0, self._placed_s - spec.arrived_s),
            prefill_s=max(0.0, self._first_token_s - self._placed_s),
            transfer_s=handed_off.exposed_s if handed_off is not None else 0.0,
            decode_s=self._last_token_s - self._first_token_s,
        )


def _num_prompt_logprobs(spec: AnswerSpec) -> int:
    """Returns the tokens of the prompt that are reported; the first one has no probability."""
    return 0 if spec.sampling.prompt_logprobs is None else len(spec.prompt_token_ids) - 1
