"""The named requests of this gateway: one generation each, however many clients read it, and from wherever.

A generation runs while somebody reads it. When the last reader leaves, it is cancelled and its tokens stay for a reader
that returns. `services.cluster.journals` gets what another gateway needs; without Redis, this gateway alone knows it.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from gateway.named.ask import Ask, another_request, conflict, not_known, several_answers
from gateway.named.journal import Answer
from gateway.named.live_journal import Journal, UnusableError, read_held
from gateway.named.memory import LIMIT, JournalMemory, MemoryBounds
from gateway.named.reader import Reader, deadline_passed
from gateway.observability.tracing import attached
from gateway.requests.call import AcceptedCall, Call, StoredCall
from gateway.requests.fallback import begun
from gateway.requests.fan_out import merged
from gateway.requests.lifecycle import Requests
from services.cluster.journals import Claimed, Held, JournalStore, JournalWriter, Mode, Outcome, Record
from services.runtime import telemetry
from services.runtime.background_tasks import supervise
from services.runtime.clock import Deadline
from services.runtime.errors import (
    AlreadyExists,
    InternalError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    RateLimited,
    StoreUnavailable,
    TandemError,
    WorkerUnavailable,
)
from services.runtime.sampling import GREEDY_TEMPERATURE

KEPT_S = 60.0
"""How long a journal that nobody reads stays in memory."""
MAX_ROOM_RETRY_S = 60.0
"""The longest that a client is told to wait for room in Redis."""
BEAT_INTERVAL_S = 1.0
"""How often running journals are written even without news, so that a gateway that lost one notices."""
RETRY_AFTER_S, FIND_RETRY_S = 1.0, 0.1
FIND_S = 5.0
"""How long a request that can only be continued waits for a Redis that does not answer; several calls fit into it."""

logger = logging.getLogger(__name__)


class Journals:
    """All named requests of this gateway; `gateway_incarnation` names it as their owner.

    `on_refusal` takes the name of the limit for which a tenant's request was refused.
    """

    def __init__(
        self,
        requests: Requests,
        store: JournalStore,
        *,
        gateway_incarnation: str,
        kept_s: float = KEPT_S,
        bounds: MemoryBounds | None = None,
        on_refusal: Callable[[str], None] = lambda limit: None,
    ) -> None:
        self._requests = requests
        self._store = store
        self._writer = JournalWriter(store, on_taken_over=self._end_taken_over)
        self._gateway_incarnation = gateway_incarnation
        self._kept_s = kept_s
        self._on_refusal = on_refusal
        self._journals: dict[str, Journal] = {}
        self._memory: JournalMemory[Journal] = JournalMemory(bounds or MemoryBounds(), forget=self._forget)
        self._tasks: dict[asyncio.Task[None], Journal] = {}
        self._beat: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to write to Redis and to forget what is old, on the running loop."""
        self._writer.start()
        self._beat = supervise(self._beat_on, name="journals")

    @property
    def num_bytes(self) -> int:
        """Memory that all journals take, about."""
        return self._memory.num_bytes

    async def close(self) -> None:
        """Ends all generations and writes what is not written yet."""
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.wait((self._beat,))
        tasks = list(self._tasks)
        for task, journal in list(self._tasks.items()):
            journal.error = Overloaded("the gateway is leaving", retry_after_s=RETRY_AFTER_S)
            self._stop(journal, task)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._writer.close()

    @contextlib.asynccontextmanager
    async def attach(self, ask: Ask) -> AsyncIterator[Reader]:
        """Starts, continues or only looks up the named request, and gives a reader of it.

        The last reader to leave the block cancels the generation. Raises AlreadyExists if the name belongs to another
        body, or its request is running and the client did not ask to join it; NotFound if nothing is known that could
        be continued; DeadlineExceeded when the client's deadline has passed; and what `Requests.accept` raises.
        """
        if ask.deadline is not None:
            ask.deadline.check()
        if ask.ticket is not None:
            ask.ticket.hold = ask.name
        journal = self._find(ask)
        journal.num_users += 1
        self._memory.use(journal)
        try:
            async with _within(ask.deadline), journal.opening:
                journal.check(ask)
                begins = not journal.is_running and not journal.is_finished and await self._begin(journal, ask)
                await journal.settled.wait()
                journal.check(ask)
            if begins:
                yield Reader(self._requests, journal, ask, journal.traceparent)
            else:
                with attached(ask.trace, journal.spans, journal.traceparent) as traceparent:
                    yield Reader(self._requests, journal, ask, traceparent)
        finally:
            self._leave(journal)

    def _find(self, ask: Ask) -> Journal:
        """Returns the journal that the client means, or a new one in its place."""
        journal = self._journals.get(ask.name)
        if journal is not None:
            if ask.joins:
                journal.check(ask)
                return journal
            if journal.is_running or journal.opening.locked():
                raise AlreadyExists(f"a request with the id {ask.request_id} is running", field="request_id")
        journal = Journal([], ask.request_id, ask.tenant, ask.digest)
        self._give_name(ask.name, journal)
        return journal

    def _give_name(self, name: str, journal: Journal) -> None:
        """The name means this journal from now on; one that had it as its first name is forgotten."""
        earlier = self._journals.get(name)
        if earlier is not None and earlier is not journal and earlier.names[0] == name:
            self._forget(earlier)
        self._journals[name] = journal
        if name not in journal.names:
            journal.names.append(name)

    async def _begin(self, journal: Journal, ask: Ask) -> bool:
        """Starts the generation after the tokens known here or in Redis. Returns False if nothing is left to generate.

        Raises what `attach` raises.
        """
        await self._wait_for_earlier(journal)
        if journal.call is not None:
            accepted = await self._resumed(journal, ask)
        elif ask.call is None:
            accepted = await self._looked_up(journal, ask)
        else:
            accepted = await self._accepted(journal, ask, ask.call)
        if accepted is None:
            journal.settled.set()
            return False
        journal.error, journal.is_stopping = None, False
        journal.spans = accepted.span
        if journal.note_trace(accepted.span.told_traceparent):
            self._post(journal)
        if accepted.fallbacks:
            journal.settled.clear()
        else:
            journal.settled.set()
        journal.task = task = asyncio.create_task(self._generate(journal, accepted), name="journal")
        self._tasks[task] = journal
        task.add_done_callback(functools.partial(self._forget_task, accepted))
        return True

    async def _wait_for_earlier(self, journal: Journal) -> None:
        """Waits until a generation of this id that was told to end has given the id back."""
        ending = [
            task
            for task, other in self._tasks.items()
            if (other.tenant, other.request_id) == (journal.tenant, journal.request_id)
            and other.is_stopping
            and not task.done()
        ]
        if ending:
            await asyncio.wait(ending)

    async def _accepted(self, journal: Journal, ask: Ask, call: Call) -> AcceptedCall | None:
        """Accepts the call of a name that this gateway did not know, or adopts what Redis has of it."""
        call = msgspec.structs.replace(call, deadline=None)
        may_start = not ask.is_continuation or _is_repeatable(call)
        mode = Mode.JOIN if ask.joins else Mode.REPLACE
        while True:
            accepted = await self._requests.accept(call)
            with contextlib.ExitStack() as undo:
                undo.enter_context(accepted)
                held = await self._make(journal, ask, accepted, mode if may_start else Mode.FIND)
                if held is None:
                    undo.pop_all()
                    assert journal.record is not None
                    if journal.record.alias:
                        self._give_name(journal.record.alias, journal)
                    return accepted
            try:
                return self._adopted_from(journal, held, ask)
            except UnusableError:
                mode = Mode.REPLACE
                if not may_start:
                    raise not_known() from None

    async def _make(self, journal: Journal, ask: Ask, accepted: AcceptedCall, mode: Mode) -> Held | None:
        """Opens the journal for an accepted call. Returns the one that Redis holds instead, if it holds one."""
        stored = self._stored(accepted)
        ask.positions_in(len(stored.choices))
        journal.digest = ask.digest
        name, owner = journal.names[0], self._gateway_incarnation
        journal.open(stored, [Answer() for _ in stored.choices], int(time.time()), name=name, owner=owner)
        journal.specs = accepted.specs
        try:
            journal.check_size()
            self._take_memory(journal)
            claimed = await self._claim(journal, mode, checks_request=ask.positions is not None)
            if claimed.outcome is Outcome.OTHER:
                raise conflict()
            if claimed.outcome is Outcome.MISFIT:
                raise another_request()
            if claimed.outcome is Outcome.NONE:
                raise not_known()
            self._check_room(journal, claimed)
        except BaseException:
            journal.call = None
            raise
        return claimed.held

    def _take_memory(self, journal: Journal) -> None:
        """Counts the journal's memory. Raises RateLimited or Overloaded if the gateway has none for it."""
        try:
            self._memory.take(journal, journal.tenant, journal.cost_bytes)
        except RateLimited as refusal:
            self._on_refusal(refusal.limit)
            raise

    def _check_room(self, journal: Journal, claimed: Claimed) -> None:
        """Raises RateLimited or Overloaded where Redis has no room for the journal."""
        retry_after_s = min(max(RETRY_AFTER_S, claimed.retry_after_s), MAX_ROOM_RETRY_S)
        room = self._store.room
        if claimed.outcome is Outcome.TENANT_FULL:
            self._on_refusal(LIMIT)
            raise RateLimited(
                f"rate limit reached: what is kept of requests with a name of tenant {journal.tenant} may take at most "
                f"{room.tenant_bytes} bytes in Redis",
                retry_after_s=retry_after_s,
                limit=LIMIT,
            )
        if claimed.outcome is Outcome.ALL_FULL:
            raise Overloaded(
                f"what is kept of requests with a name takes the {room.all_bytes} bytes that it may take in Redis",
                retry_after_s=retry_after_s,
            )

    async def _looked_up(self, journal: Journal, ask: Ask) -> AcceptedCall | None:
        """Adopts from Redis a name that this gateway did not know and that came without a body."""
        finder = Record(
            journal.names[0], "", ask.request_id, self._gateway_incarnation, b"", [[]], [b""], tenant=ask.tenant
        )
        claimed = await self._find_in_store(finder, checks_digest=False)
        if claimed.outcome is Outcome.MISFIT:
            raise several_answers()
        if claimed.held is None:
            raise not_known()
        try:
            return self._adopted_from(journal, claimed.held, ask)
        except UnusableError:
            raise not_known() from None

    async def _resumed(self, journal: Journal, ask: Ask) -> AcceptedCall | None:
        """Continues what this gateway has begun, with what another one may have added since."""
        claimed = await self._claim(journal, Mode.JOIN)
        self._check_room(journal, claimed)
        if claimed.held is not None:
            journal.merge(claimed.held)
        return self._adopted(journal, ask)

    def _adopted(self, journal: Journal, ask: Ask) -> AcceptedCall | None:
        """Adopts the call with its known tokens. Returns None if nothing of it is left to do."""
        assert journal.call is not None
        call = msgspec.structs.replace(
            journal.call,
            choices=journal.choices_with_tokens(),
            remaining_s=math.inf,
            traceparent=telemetry.inject(ask.trace),
            tracestate="" if ask.trace is None else ask.trace.state,
            resumes=journal.traceparent,
        )
        accepted = self._requests.adopt(call, self._call_to_settle(journal, ask))
        journal.specs = accepted.specs
        if not journal.is_finished:
            if ask.ticket is not None:
                ask.ticket.resume()
                accepted.ticket, accepted.is_resumed = ask.ticket, True
            return accepted
        with accepted:
            return None

    def _call_to_settle(self, journal: Journal, ask: Ask) -> Call | None:
        """Returns the call as its client sent it again; None once a client may have a token of one model's answer."""
        assert journal.call is not None
        is_open = not journal.call.is_settled and not any(answer.token_ids for answer in journal.answers)
        return ask.call if is_open and not ask.is_continuation else None

    def _adopted_from(self, journal: Journal, held: Held, ask: Ask) -> AcceptedCall | None:
        """Takes the journal that Redis holds, and continues it. Raises UnusableError if it cannot be continued."""
        try:
            stored, answers, created_unix_s = read_held(held)
        except UnusableError:
            journal.call = None
            raise
        journal.digest = held.digest
        journal.open(stored, answers, created_unix_s, name=held.name, owner=self._gateway_incarnation)
        journal.continue_record(held)
        try:
            self._take_memory(journal)
            accepted = self._adopted(journal, ask)
        except (InvalidRequest, RateLimited, Overloaded) as error:
            journal.call = None
            if isinstance(error, InvalidRequest) and not isinstance(error, AlreadyExists | PermissionDenied):
                raise UnusableError from error
            raise
        assert journal.record is not None
        for name in (held.name, journal.record.alias):
            if name and name not in self._journals:
                self._give_name(name, journal)
        return accepted

    async def _claim(self, journal: Journal, mode: Mode, *, checks_request: bool = False) -> Claimed:
        """Makes the journal in Redis or reads the one that exists, before any token reaches a client.

        Without Redis the journal counts as made, and is written as soon as Redis is available. Raises StoreUnavailable
        if nothing may be made.
        """
        record = journal.record
        assert record is not None
        if mode is Mode.FIND:
            return await self._find_in_store(record, checks_request=checks_request)
        try:
            return await self._store.claim(mode, record, checks_request=checks_request)
        except StoreUnavailable:
            self._writer.post(record)
            return Claimed(Outcome.MADE)

    async def _find_in_store(
        self, record: Record, *, checks_digest: bool = True, checks_request: bool = False
    ) -> Claimed:
        """Reads the journal, trying for FIND_S: a client that has a part of an answer cannot get the rest elsewhere.

        Raises StoreUnavailable, after which the client may try again.
        """
        deadline = Deadline.after(FIND_S)
        while True:
            try:
                return await self._store.claim(
                    Mode.FIND, record, checks_digest=checks_digest, checks_request=checks_request
                )
            except StoreUnavailable:
                if deadline.has_passed():
                    raise
                await asyncio.sleep(FIND_RETRY_S)

    async def _generate(self, journal: Journal, accepted: AcceptedCall) -> None:
        """Fills the journal to its end. An error that ends it early is left in `journal.error`."""
        unfinished = [
            spec for spec, answer in zip(accepted.specs, journal.answers, strict=True) if not answer.is_finished
        ]
        try:
            with accepted:
                async with begun(self._requests, accepted, unfinished) as streams:
                    if not journal.settled.is_set():
                        await self._settle(journal, accepted)
                    async with contextlib.aclosing(merged(streams)) as parts:
                        async for index, delta in parts:
                            journal.add(unfinished[index].choice, delta)
                            self._post(journal)
        except TandemError as error:
            journal.error = error.again()
        except Exception:  # the boundary: there may be no reader that it could reach
            logger.exception("a named request failed", extra={"request_id": accepted.specs[0].request_id})
            journal.error = InternalError("the request failed")
        finally:
            journal.task = None
            journal.settled.set()
            journal.wake()
            if not journal.num_users:
                self._keep(journal)

    async def _settle(self, journal: Journal, accepted: AcceptedCall) -> None:
        """Keeps the call with the model that has begun to answer, and tells Redis before a client has a token.

        A gateway that continues the call then never lets another model answer. Without Redis it is written later.
        """
        journal.settle(self._stored(accepted), accepted.specs)
        self._post(journal)
        with contextlib.suppress(StoreUnavailable):
            await self._writer.flush()
        journal.settled.set()

    def _stored(self, accepted: AcceptedCall) -> StoredCall:
        """Returns the call as it is kept. Where the weights that will answer are not known, the first token tells."""
        stored, layout = accepted.to_stored(), self._requests.only_identity(accepted.model)
        choices = [msgspec.structs.replace(choice, layout=choice.layout or layout) for choice in stored.choices]
        return msgspec.structs.replace(stored, choices=choices)

    def _post(self, journal: Journal) -> None:
        if journal.record is not None:
            self._writer.post(journal.record)

    def _end_taken_over(self, record: Record) -> None:
        """Ends a request that another gateway has continued."""
        for task, journal in list(self._tasks.items()):
            if journal.record is record and journal.is_running:
                journal.error = WorkerUnavailable("the request is at another gateway now", retry_after_s=RETRY_AFTER_S)
                self._stop(journal, task)

    def _leave(self, journal: Journal) -> None:
        journal.num_users -= 1
        if journal.num_users:
            return
        if journal.task is not None:
            self._stop(journal, journal.task)
        else:
            self._keep(journal)

    def _stop(self, journal: Journal, task: "asyncio.Task[None]") -> None:
        """Ends the generation at once; a second cancel would interrupt its cleanup."""
        if not journal.is_stopping:
            journal.is_stopping = True
            task.cancel()

    def _forget_task(self, accepted: AcceptedCall, task: "asyncio.Task[None]") -> None:
        journal = self._tasks.pop(task)
        if journal.task is task:
            # It was cancelled before its first step.
            with accepted:
                journal.task = None
            journal.settled.set()
            journal.wake()
            if not journal.num_users:
                self._keep(journal)

    def _keep(self, journal: Journal) -> None:
        """Keeps for a while a journal that nobody reads."""
        if journal.call is None or self._journals.get(journal.names[0]) is not journal:
            self._forget(journal)
            return
        self._memory.resize(journal, journal.cost_bytes)
        self._memory.keep(journal)

    def _forget(self, journal: Journal) -> None:
        self._memory.drop(journal)
        for name in journal.names:
            if self._journals.get(name) is journal:
                del self._journals[name]

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            self._memory.forget_older(self._kept_s)
            for journal in self._tasks.values():
                self._memory.resize(journal, journal.cost_bytes)
                self._post(journal)


def _is_repeatable(call: Call) -> bool:
    """Returns whether the call gives the same answer wherever and whenever it runs."""
    sampling = call.sampling
    is_greedy = sampling.temperature is not None and sampling.temperature < GREEDY_TEMPERATURE
    return bool(call.idempotency_key) or sampling.seed is not None or is_greedy


@contextlib.asynccontextmanager
async def _within(deadline: Deadline | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded in the block when the deadline passes."""
    if deadline is None:
        yield
        return
    try:
        async with asyncio.timeout(deadline.remaining_s()) as timeout:
            yield
    except TimeoutError:
        if timeout.expired():
            raise deadline_passed() from None
        raise
