"""Looks at the health of all workers again and again, and tries those that are kept from work with its own requests.

So a circuit opens and closes even while no client asks anything, and no client's request is spent on finding out which
worker has recovered. A trial is a small prompt and a few tokens: a decode worker computes all of it, a prefill worker
the prompt, for a decode worker that is well. What it says of the worker is `gateway.topology.watch`'s business, as it
is for any request; it is in no client's figures, log or limits. Pairs of workers that are blocked, or whose
last handoff failed, have trials, too.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from gateway.requests.attempt import Attempt
from gateway.requests.dispatch import Dispatcher
from gateway.requests.mailbox import Mailbox
from gateway.requests.pair_circuits import Pair
from gateway.requests.tokens import TokenLog
from gateway.topology.events import AttemptKey, SequenceOrder
from gateway.topology.member import ROLES, Role
from gateway.topology.members import Topology
from gateway.topology.session import DecodeSession, PrefillSession
from gateway.topology.watch import AttemptWatch
from gateway.types import Sampling
from services.runtime.background_tasks import supervise
from services.runtime.clock import Clock, Deadline
from services.runtime.errors import Overloaded, TandemError, TransferFailed, WorkerUnavailable

LOOK_EVERY_S = 0.25
AGAIN_S = 1.0
"""The pause after a trial, also after one that found no room: the next one may not find any either."""
MAX_PAIR_TRIALS = 16
"""Maximum number of trials of pairs at a time."""
NUM_PROMPT_TOKENS = 8
"""The length of a trial's prompt: less than any page, so nothing of it is kept in a cache."""
NUM_TOKENS = 8
LEAST_LIMIT_S = 2.0
LIMIT_FACTOR = 16.0
"""A trial ends after this multiple of the time it should take; it has failed long before."""
SHARERS = "trial"
SERVICE_CLASS = 1
"""The class `interactive`, because a trial is a few tokens, and every client waits for its result."""

_SAMPLING = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


class Monitor:
    """The look at all workers of one gateway."""

    def __init__(self, dispatcher: Dispatcher, topology: Topology, *, models: Iterable[str], clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._watch, self._pairs = dispatcher.watch, dispatcher.pairs
        self._topology = topology
        self._models = tuple(models)
        self._clock = clock
        self._looking: asyncio.Task[None] | None = None
        self._trials: dict[str | Pair, asyncio.Task[None]] = {}
        """The trials under way, by the worker or the pair that each is about."""
        self._next_at_s: dict[str | Pair, float] = {}

    def start(self) -> None:
        """Begins to look."""
        self._looking = supervise(self._look_for_ever, name="health-monitor")

    async def close(self) -> None:
        """Ends that, and every trial."""
        tasks = [*self._trials.values(), *([self._looking] if self._looking is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            for model in self._models:
                for role in ROLES:
                    self._look(role, model)
            self._look_at_pairs()
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, role: Role, model: str) -> None:
        group = self._topology.rotation_ids(role, model)
        self._watch.usable(group)
        for worker_id in self._watch.due_for_probe(group):
            self._begin(worker_id, partial(self._try, role, model, worker_id))

    def _look_at_pairs(self) -> None:
        for pair in self._pairs.due_for_trial():
            if sum(isinstance(subject, tuple) for subject in self._trials) < MAX_PAIR_TRIALS:
                self._begin(pair, partial(self._try_pair, pair))

    def _begin(self, subject: str | Pair, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        now_s = self._clock.monotonic()
        if subject not in self._trials and now_s >= self._next_at_s.get(subject, now_s):
            self._trials[subject] = trial = asyncio.create_task(start(), name=f"trial-{subject}")
            trial.add_done_callback(partial(self._end, subject))

    def _end(self, subject: str | Pair, _trial: asyncio.Task[None]) -> None:
        self._trials.pop(subject, None)
        now_s = self._clock.monotonic()
        self._next_at_s = {one: at_s for one, at_s in self._next_at_s.items() if at_s > now_s}
        self._next_at_s[subject] = now_s + AGAIN_S

    async def _try(self, role: Role, model: str, worker_id: str) -> None:
        """One trial; it raises nothing, since whatever happens is a word about the worker, or none."""
        with contextlib.suppress(WorkerUnavailable):
            if role == "decode":
                await self._try_at(model, worker_id, self._topology.decode_session(worker_id), None)
                return
            prefill = self._topology.prefill_session(worker_id)
            for decode_id in self._watch.usable(self._topology.rotation_ids("decode", model)):
                decode = self._topology.decode_session(decode_id)
                fits = worker_id in self._topology.prefill_ids(model, decode=decode.peer)
                is_open = fits and not self._pairs.is_in_doubt((worker_id, decode_id))
                if is_open and await self._try_at(model, worker_id, decode, prefill):
                    return

    async def _try_pair(self, pair: Pair) -> None:
        """Runs a trial of a pair in doubt. Does nothing if one of its workers has just left."""
        member = self._topology.member(pair[1])
        if member is None:
            return
        with contextlib.suppress(WorkerUnavailable):
            prefill, decode = self._topology.prefill_session(pair[0]), self._topology.decode_session(pair[1])
            await self._try_at(member.record.model, pair[0], decode, prefill)

    async def _try_at(self, model: str, worker_id: str, decode: DecodeSession, prefill: PrefillSession | None) -> bool:
        """Returns False if the trial says nothing: the decode worker has no capacity, or the path to it failed."""
        usual = self._topology.usual_speeds(model)
        token_s = usual.decode.step_s(1, NUM_PROMPT_TOKENS)
        prompt_s = (usual.local if prefill is None else usual.prefill).time_s(NUM_PROMPT_TOKENS)
        handoff_s = usual.link.time_s(NUM_PROMPT_TOKENS * self._topology.kv_bytes_per_token(model))
        limit_s = LEAST_LIMIT_S + LIMIT_FACTOR * (prompt_s + handoff_s + NUM_TOKENS * token_s)
        watch = AttemptWatch(self._watch, decode.peer.worker_id, token_s=token_s, handoff_s=handoff_s)
        tokens = TokenLog(NUM_TOKENS)
        attempt = Attempt(self._order(limit_s), decode=decode, mailbox=Mailbox(tokens), tokens=tokens, watch=watch)
        watch.sent(worker_id, prompt_s + NUM_TOKENS * token_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._run(attempt, prefill, prompt_s)
                self._dispatcher.note_success(attempt)
        except Overloaded:
            return False
        except TimeoutError:
            # The watch found its stage late while it was running, and has noted that.
            self._note_path_failure(attempt, TransferFailed(f"a trial was not over after {limit_s:.0f} s"))
        except TandemError as error:
            if attempt.fault is not None and attempt.fault.accused is not None:
                self._note_path_failure(attempt, error)
                return False
            self._dispatcher.note_failure(attempt)
        finally:
            attempt.close()
            self._dispatcher.release(attempt)
        return True

    def _note_path_failure(self, attempt: Attempt, error: TandemError) -> None:
        """Records that the trial of a pair in doubt failed. It is no evidence against any other pair."""
        if attempt.probes:
            self._pairs.failed(attempt, error)

    async def _run(self, attempt: Attempt, prefill: PrefillSession | None, prompt_s: float) -> None:
        watch = attempt.watch
        asked = watch.asked()
        await attempt.admit(is_local_prefill=prefill is None)
        watch.answered(asked)
        watch.prompt_sent((prefill or attempt.decode).peer.worker_id, prompt_s)
        if prefill is not None:
            self._pairs.begin_trial(attempt, prefill.peer.worker_id)
            attempt.start_prefill([prefill])
        num_tokens = 0
        while num_tokens < NUM_TOKENS:
            arrived = await attempt.next_arrived()
            num_tokens += len(arrived.token_ids)
            is_finished = num_tokens >= NUM_TOKENS or arrived.finish_reason is not None
            if arrived.token_ids or attempt.prompt_done_at_s is not None:
                watch.note_prompt_done(is_finished=is_finished)
            if attempt.is_decoding or is_finished:
                watch.note_answer(len(arrived.token_ids), is_finished=is_finished)
            if is_finished:
                return

    def _order(self, limit_s: float) -> SequenceOrder:
        return SequenceOrder(
            key=AttemptKey(f"trial-{secrets.token_hex(8)}", 1),
            prompt_token_ids=(0,) * NUM_PROMPT_TOKENS,
            emitted_token_ids=(),
            sampling=_SAMPLING,
            eos_token_ids=(),
            deadline=Deadline.after(limit_s, clock=self._clock),
            trace=None,
            cache_salt=SHARERS,
            service_class=SERVICE_CLASS,
        )
