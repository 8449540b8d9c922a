"""The named requests of this gateway: one generation each, however many clients read it, and from wherever.

A generation runs while somebody reads it. When the last reader leaves, it is cancelled and its tokens stay for a reader
who returns. `services.cluster.journals` gets what another gateway needs; without Redis, this gateway alone knows it.
"""

import asyncio
import contextlib
import functools
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.limits import GREEDY_TEMPERATURE, check_idempotency_key, check_name
from gateway.named.journal import (
    START,
    Answer,
    AnswerReader,
    Position,
    Shown,
    cost_of_call,
    decode_call,
    digest_of,
    encode_call,
    encode_end,
    event_id,
    event_id_error,
    name_of,
    parse_event_id,
    restore,
)
from gateway.named.memory import LIMIT, JournalMemory, MemoryBounds
from gateway.observability.tracing import NO_TRACE, RequestSpans, attached
from gateway.requests.call import AcceptedCall, AnswerSpec, Call, StoredCall, TenantTicket
from gateway.requests.fallback import begun
from gateway.requests.fan_out import merged
from gateway.requests.lifecycle import Requests
from gateway.types import Delta, Sampling, Usage
from services.cluster.journals import (
    MAX_JOURNAL_BYTES,
    TOKEN_BYTES,
    Claimed,
    Held,
    JournalStore,
    JournalWriter,
    Mode,
    Outcome,
    Record,
)
from services.runtime import telemetry
from services.runtime.clock import Deadline
from services.runtime.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    RequestCancelled,
    StoreUnavailable,
    TandemError,
    WorkerUnavailable,
)
from services.runtime.telemetry import TraceContext

KEPT_S = 60.0
"""Time that a journal nobody reads stays in memory."""
COST_BYTES = 4096
"""Of a journal beside its call and its answers, about."""
MAX_ROOM_RETRY_S = 60.0
"""The longest that a client is told to wait for room in Redis."""
BEAT_INTERVAL_S = 1.0
"""Running journals are written this often also without news, so that a gateway that lost one notices."""
RETRY_AFTER_S = 1.0
FIND_S = 5.0
"""Time that a request which can only be gone on with waits for a Redis that does not answer: its patience for one call,
several times."""
FIND_RETRY_S = 0.1
DERIVED_ID_PREFIX = "key-"
_DERIVED_ID = re.compile(re.escape(DERIVED_ID_PREFIX) + "[0-9a-f]{32}")


@dataclass(frozen=True)
class Ask:
    """What a client asks of a named request.

    `call` None: only to go on with what is known. `digest` is that of the body. `positions` None: from the start.
    """

    name: str
    request_id: str
    tenant: str = ""
    call: Call | None = None
    digest: str = ""
    positions: Sequence[Position] | None = None
    next_index: int | None = None
    """Instead of `positions`, for a call with one answer."""
    deadline: Deadline | None = None
    """Until when this client waits. The generation, which others may read too, has the gateway's own maximum."""
    ticket: TenantTicket | None = None
    """What the generation is paid with, should this client's asking begin it or go on with it."""
    trace: TraceContext | None = None
    """The client's span."""

    @property
    def joins(self) -> bool:
        """Whether it may continue what exists; otherwise its name must be free."""
        keyed = self.call is not None and bool(self.call.idempotency_key)
        return keyed or self.is_continuation

    @property
    def is_continuation(self) -> bool:
        """Whether the client has a part already, or has no body to begin anew with."""
        return self.call is None or self.positions is not None or self.next_index is not None

    def positions_in(self, num_answers: int) -> list[Position]:
        """Where to begin in each answer. Raises InvalidRequest if the position is one of another number of answers."""
        if self.next_index is not None:
            if num_answers != 1:
                raise _several_answers()
            return [Position(self.next_index, Shown.TOKENS if self.next_index else Shown.NOTHING)]
        if self.positions is None:
            return [START] * num_answers
        if len(self.positions) != num_answers:
            raise event_id_error(f"it is of {len(self.positions)} answers, and the call has {num_answers}")
        return list(self.positions)

    def check(self, journal: "Journal") -> None:
        """Raises AlreadyExists if the journal is of another body, InvalidRequest if the position is of another one."""
        if not journal.digest or journal.call is None:
            # Nobody has found out yet whether there is one.
            return
        if self.digest and self.digest != journal.digest:
            raise _conflict()
        if self.positions is not None and self.request_id != journal.request_id:
            raise _another_request()
        self.positions_in(len(journal.answers))


def ask_for(call: Call, digest: str, *, last_event_id: str | None = None) -> Ask | None:
    """What a named call asks for; None if it has no name. Sets the id of a call that has only a key.

    Raises InvalidRequest for a name, a key or an id of an event that breaks its rule.
    """
    if call.request_id is not None:
        check_name(call.request_id, field_name="request_id")
    if call.tenant:
        check_name(call.tenant, field_name="tenant")
    is_named = bool(call.idempotency_key) or call.request_id is not None
    if is_named and call.sampling.prompt_logprobs is not None:
        # Megabytes that a journal would have to hold, of a request that is quickly repeated.
        raise InvalidRequest(
            "log-probabilities of prompts do not go with a request that has a name or an idempotency key",
            field=call.field_prefix + call.prompt_logprobs_field,
            code="unsupported_parameter",
        )
    if call.idempotency_key:
        check_idempotency_key(call.idempotency_key)
        derived_id = DERIVED_ID_PREFIX + name_of("key", call.tenant, call.idempotency_key)
        call.request_id = call.request_id or derived_id
        _check_not_derived(call.request_id, derived_id)
        name = _name(call.tenant, derived_id)
    elif call.request_id is not None:
        if last_event_id is None:
            _check_not_derived(call.request_id)
        name = _name(call.tenant, call.request_id)
    elif last_event_id is not None:
        raise event_id_error("the request needs the X-Request-Id or the Idempotency-Key that it had before")
    else:
        return None
    positions: list[Position] | None = None
    if last_event_id is not None:
        named_id, positions = parse_event_id(last_event_id)
        if call.idempotency_key:
            call.request_id = named_id
            check_name(named_id, field_name="Last-Event-ID")
        elif named_id != call.request_id:
            raise _another_request()
    digest = digest_of("call", call.tenant, digest)
    trace = telemetry.extract(call.traceparent, call.tracestate)
    return Ask(
        name,
        call.request_id,
        call.tenant,
        call,
        digest,
        positions,
        deadline=call.deadline,
        ticket=call.ticket,
        trace=trace,
    )


def ask_to_resume(
    request_id: str,
    tenant: str,
    *,
    next_index: int,
    remaining_s: float,
    ticket: TenantTicket | None = None,
    trace: TraceContext | None = None,
) -> Ask:
    """Asks for the rest of what is known by this id. Raises InvalidRequest for an id that breaks the rule."""
    check_name(request_id, field_name="request_id")
    if tenant:
        check_name(tenant, field_name="tenant")
    deadline = Deadline.after(remaining_s)
    name = _name(tenant, request_id)
    return Ask(name, request_id, tenant, next_index=next_index, deadline=deadline, ticket=ticket, trace=trace)


def _check_not_derived(request_id: str, own: str = "") -> None:
    """Raises InvalidRequest for an id that only an idempotency key may lead to, unless that is the call's own."""
    if _DERIVED_ID.fullmatch(request_id) is not None and request_id != own:
        raise InvalidRequest(
            f"request_id must not be {DERIVED_ID_PREFIX} and 32 hex digits: such ids are made of idempotency keys",
            field="request_id",
            code="invalid_value",
        )


def _name(tenant: str, request_id: str) -> str:
    return name_of("request", tenant, request_id)


@dataclass(eq=False)
class Journal:
    """One named request on this gateway. Belongs to the event loop."""

    names: list[str]
    request_id: str
    tenant: str
    digest: str
    created_unix_s: int = 0
    call: StoredCall | None = None
    """As it was accepted, without tokens; None until then."""
    call_cost_bytes: int = 0
    generations: list[AnswerSpec] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    record: Record | None = None
    spans: RequestSpans = NO_TRACE
    """Of the last generation that this gateway began."""
    traceparent: str = ""
    """Names the span of the last generation that is known, here or elsewhere; empty: it has none."""
    task: "asyncio.Task[None] | None" = None
    is_stopping: bool = False
    """The task was told to end, and its tokens will not come."""
    error: BaseException | None = None
    """What ended the last generation."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is known which model answers, or that none does; no reader looks before."""
    readers: "set[asyncio.Event]" = field(default_factory=set)
    num_users: int = 0
    """Clients that are attached or about to be."""

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
        """What it takes in memory, about."""
        num_record_bytes = 0 if self.record is None else len(self.record.call)
        num_answer_bytes = sum(answer.cost_bytes for answer in self.answers)
        return COST_BYTES + self.call_cost_bytes + num_record_bytes + num_answer_bytes

    def wake(self) -> None:
        """Lets every reader look again."""
        for event in self.readers:
            event.set()


class Part(msgspec.Struct):
    """The next part of one answer for one reader. `is_first`: the client knew nothing of this answer."""

    choice: int
    delta: Delta
    is_first: bool
    opening_id: str
    """Of what comes before the first part: after it the client knows that this answer has begun. Else empty."""
    event_id: str
    """After this part the client is there."""


class Reader:
    """One client's view of a named request, from its own position on."""

    def __init__(self, requests: Requests, journal: Journal, ask: Ask, traceparent: str = "") -> None:
        positions = ask.positions_in(len(journal.answers))
        self.traceparent = traceparent
        """Names the span of this client's asking, if there is one."""
        self.request_id = journal.request_id
        self.created_unix_s = journal.created_unix_s
        assert journal.call is not None
        self.model = journal.generations[0].model
        self.fallback = journal.call.fallback
        self.generations = journal.generations
        self.answers = journal.answers
        self.positions = positions
        self._journal = journal
        self._deadline = ask.deadline
        self._answer_readers = [
            AnswerReader(answer, requests.new_text(generation), position)
            for answer, generation, position in zip(journal.answers, journal.generations, positions, strict=True)
        ]

    async def parts(self) -> AsyncGenerator[Part, None]:
        """What comes after the reader's position until all answers are complete; use with `contextlib.aclosing`.

        Raises what ended the generation, DeadlineExceeded when this reader's own deadline has passed, and
        InvalidRequest for a position that the answers do not have.
        """
        journal = self._journal
        news = asyncio.Event()
        journal.readers.add(news)
        timer: asyncio.TimerHandle | None = None
        has_expired = False

        def expire() -> None:
            nonlocal has_expired
            has_expired = True
            news.set()

        if self._deadline is not None:
            timer = asyncio.get_running_loop().call_later(self._deadline.remaining_s(), expire)
        try:
            while not all(reader.is_done for reader in self._answer_readers):
                if has_expired:
                    raise _deadline_passed()
                news.clear()
                has_read = False
                for choice, reader in enumerate(self._answer_readers):
                    for delta in reader.read():
                        has_read = True
                        yield self._part(choice, reader, delta)
                if has_read:
                    continue
                if not journal.is_running and not journal.is_finished:
                    raise journal.error or RequestCancelled("the request was cancelled")
                await news.wait()
        finally:
            journal.readers.discard(news)
            if timer is not None:
                timer.cancel()

    def usages(self) -> list[tuple[Usage, Sequence[int]]]:
        """(usage, prompt) of each answer, once all are complete."""
        prompts = [generation.prompt_token_ids for generation in self.generations]
        return [
            (answer.usage, prompt)
            for answer, prompt in zip(self.answers, prompts, strict=True)
            if answer.usage is not None
        ]

    def _part(self, choice: int, reader: AnswerReader, delta: Delta) -> Part:
        is_first = self.positions[choice].shown is Shown.NOTHING
        opening_id = ""
        if is_first:
            self.positions[choice] = Position(0, Shown.TOKENS)
            opening_id = event_id(self.request_id, self.positions)
        self.positions[choice] = reader.position
        return Part(choice, delta, is_first, opening_id, event_id(self.request_id, self.positions))


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
        """Begins to write to Redis and to forget, on the running loop."""
        self._writer.start()
        self._beat = asyncio.create_task(self._beat_on(), name="journals")

    @property
    def num_bytes(self) -> int:
        """What they take in memory, about."""
        return self._memory.num_bytes

    async def close(self) -> None:
        """Ends all generations and writes what waits."""
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
        """A reader of the named request, which is started, continued or only looked up, as it stands.

        The last one to leave the block cancels the generation. Raises AlreadyExists where the name is taken by another
        body, or is running and the client did not ask to join it; NotFound where nothing is known to go on with;
        DeadlineExceeded when the client's deadline has passed; and whatever `Requests.accept` raises.
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
                ask.check(journal)
                begins = not journal.is_running and not journal.is_finished and await self._begin(journal, ask)
                await journal.settled.wait()
                ask.check(journal)
            if begins:
                yield Reader(self._requests, journal, ask, journal.traceparent)
            else:
                with attached(ask.trace, journal.spans, journal.traceparent) as traceparent:
                    yield Reader(self._requests, journal, ask, traceparent)
        finally:
            self._leave(journal)

    def _find(self, ask: Ask) -> Journal:
        """The journal that the client means, or a new one in its place."""
        journal = self._journals.get(ask.name)
        if journal is not None:
            if ask.joins:
                ask.check(journal)
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
        """Starts the generation, from the tokens that are known here or in Redis. False: nothing is left to generate.

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
        self._note_trace(journal, accepted)
        if accepted.fallbacks:
            journal.settled.clear()
        else:
            journal.settled.set()
        journal.task = task = asyncio.create_task(self._generate(journal, accepted), name="journal")
        self._tasks[task] = journal
        task.add_done_callback(functools.partial(self._forget_task, accepted))
        return True

    def _note_trace(self, journal: Journal, accepted: AcceptedCall) -> None:
        journal.spans = accepted.span
        told, record = accepted.span.told_traceparent, journal.record
        if not told or told == journal.traceparent:
            return
        journal.traceparent = told
        if journal.call is not None and record is not None:
            # Whoever goes on with it next goes on with this one.
            stored = msgspec.structs.replace(journal.call, traceparent=told)
            record.call = encode_call(stored, created_unix_s=journal.created_unix_s)
            record.is_in_redis = False
            self._writer.post(record)

    async def _wait_for_earlier(self, journal: Journal) -> None:
        """A generation of this id that was told to end gives the id back before the next one takes it."""
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
        """The first time that this gateway meets the name with a body."""
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
            except _UnusableError:
                mode = Mode.REPLACE
                if not may_start:
                    raise _not_known() from None

    async def _make(self, journal: Journal, ask: Ask, accepted: AcceptedCall, mode: Mode) -> Held | None:
        """Opens the journal for an accepted call; gives the one that is held in Redis instead, if there is one."""
        stored = self._stored(accepted)
        ask.positions_in(len(stored.choices))
        journal.digest = ask.digest
        self._open(journal, stored, [Answer() for _ in stored.choices], int(time.time()), name=journal.names[0])
        journal.generations = accepted.generations
        try:
            assert journal.record is not None
            _check_size(journal.record, stored)
            self._take_memory(journal)
            claimed = await self._claim(journal, mode, checks_request=ask.positions is not None)
            if claimed.outcome is Outcome.OTHER:
                raise _conflict()
            if claimed.outcome is Outcome.MISFIT:
                raise _another_request()
            if claimed.outcome is Outcome.NONE:
                raise _not_known()
            self._check_room(journal, claimed)
        except BaseException:
            journal.call = None
            raise
        return claimed.held

    def _take_memory(self, journal: Journal) -> None:
        """Raises RateLimited or Overloaded where the gateway has no memory for it."""
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
        """The first time that this gateway meets the name, and there is no body."""
        finder = Record(
            journal.names[0], "", ask.request_id, self._gateway_incarnation, b"", [[]], [b""], tenant=ask.tenant
        )
        claimed = await self._find_in_store(finder, checks_digest=False)
        if claimed.outcome is Outcome.MISFIT:
            raise _several_answers()
        if claimed.held is None:
            raise _not_known()
        try:
            return self._adopted_from(journal, claimed.held, ask)
        except _UnusableError:
            raise _not_known() from None

    async def _resumed(self, journal: Journal, ask: Ask) -> AcceptedCall | None:
        """Goes on with what this gateway has begun, or another one since."""
        claimed = await self._claim(journal, Mode.JOIN)
        self._check_room(journal, claimed)
        if claimed.held is not None:
            self._merge(journal, claimed.held)
        return self._adopted(journal, ask)

    def _adopted(self, journal: Journal, ask: Ask) -> AcceptedCall | None:
        """The call with the tokens that are known; None if nothing of it is left to do."""
        assert journal.call is not None
        choices = [
            msgspec.structs.replace(choice, emitted_token_ids=tuple(answer.token_ids))
            for choice, answer in zip(journal.call.choices, journal.answers, strict=True)
        ]
        call = msgspec.structs.replace(
            journal.call,
            choices=choices,
            remaining_s=math.inf,
            traceparent=telemetry.inject(ask.trace),
            tracestate="" if ask.trace is None else ask.trace.state,
            resumes=journal.traceparent,
        )
        accepted = self._requests.adopt(call, self._call_to_settle(journal, ask))
        journal.generations = accepted.generations
        if not journal.is_finished:
            if ask.ticket is not None:
                ask.ticket.resume()
                accepted.ticket, accepted.is_resumed = ask.ticket, True
            return accepted
        with accepted:
            return None

    def _call_to_settle(self, journal: Journal, ask: Ask) -> Call | None:
        """The call as its client sent it again, where it is open yet which model answers: no client has any token."""
        assert journal.call is not None
        is_open = not journal.call.is_settled and not any(answer.token_ids for answer in journal.answers)
        return ask.call if is_open and not ask.is_continuation else None

    def _adopted_from(self, journal: Journal, held: Held, ask: Ask) -> AcceptedCall | None:
        """Takes the journal as it is held in Redis, and goes on with it. Raises _UnusableError: that is none."""
        decoded = decode_call(held.call, request_id=held.request_id)
        if decoded is None or len(decoded[0].choices) != len(held.token_ids):
            journal.call = None
            raise _UnusableError
        stored, created_unix_s = decoded
        journal.digest = held.digest
        answers = [
            Answer() if choice.sampling.logprobs is not None else restore(token_ids, end)
            for choice, token_ids, end in zip(stored.choices, held.token_ids, held.ends, strict=True)
        ]
        self._open(journal, stored, answers, created_unix_s, name=held.name)
        assert journal.record is not None
        _continue_record(journal.record, held)
        try:
            self._take_memory(journal)
            accepted = self._adopted(journal, ask)
        except (AlreadyExists, RateLimited, Overloaded):
            journal.call = None
            raise
        except InvalidRequest as error:
            journal.call = None
            raise _UnusableError from error
        for name in (held.name, journal.record.alias):
            if name and name not in self._journals:
                self._give_name(name, journal)
        return accepted

    async def _claim(self, journal: Journal, mode: Mode, *, checks_request: bool = False) -> Claimed:
        """Makes the journal in Redis or reads the one that is there, before any token reaches a client.

        Without Redis it is as if it was made, and written as soon as Redis is there. Where nothing may be made, it
        raises StoreUnavailable.
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
        """Reads the journal, and asks for FIND_S: a client that has a part of an answer has nowhere else to go.

        Raises StoreUnavailable, after which the client may come again.
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

    def _open(
        self,
        journal: Journal,
        stored: StoredCall,
        answers: list[Answer],
        created_unix_s: int,
        *,
        name: str,
    ) -> None:
        """Books the call and its answers, and what is written of them. `name` is that of its journal in Redis."""
        name_of_id = _name(stored.tenant, stored.request_id)
        journal.call = msgspec.structs.replace(stored, remaining_s=0.0, traceparent="")
        journal.call_cost_bytes = cost_of_call(stored)
        journal.traceparent = stored.traceparent
        journal.request_id = stored.request_id
        journal.answers = answers
        journal.created_unix_s = created_unix_s
        # Log-probabilities are not written, so neither are the tokens that they belong to: another gateway computes
        # both anew.
        token_ids: list[list[int]] = [
            [] if choice.sampling.logprobs is not None else answer.token_ids
            for choice, answer in zip(stored.choices, answers, strict=True)
        ]
        journal.record = Record(
            name=name,
            digest=journal.digest,
            request_id=journal.request_id,
            owner=self._gateway_incarnation,
            call=encode_call(stored, created_unix_s=created_unix_s),
            token_ids=token_ids,
            ends=[_end_of(answer, choice.sampling) for answer, choice in zip(answers, stored.choices, strict=True)],
            alias="" if name_of_id == name else name_of_id,
            tenant=stored.tenant,
        )

    def _merge(self, journal: Journal, held: Held) -> None:
        """Takes what another gateway added to what this one has."""
        record = journal.record
        assert record is not None
        if held.life != record.life or len(held.token_ids) != len(journal.answers):
            record.is_over = True
            return
        for answer, generation, token_ids, end in zip(
            journal.answers, journal.generations, held.token_ids, held.ends, strict=True
        ):
            if generation.sampling.logprobs is not None or answer.is_finished:
                continue
            num_known = len(answer.token_ids)
            if token_ids[:num_known] == answer.token_ids:
                restored = restore(token_ids, end)
                answer.token_ids += token_ids[num_known:]
                answer.finish_reason, answer.usage = restored.finish_reason, restored.usage
                record.ends[generation.choice] = _end_of(answer, generation.sampling)
        _continue_record(record, held)

    async def _generate(self, journal: Journal, accepted: AcceptedCall) -> None:
        """Fills the journal to its end. What ends it early is left in `journal.error`."""
        unfinished = [
            generation
            for generation, answer in zip(accepted.generations, journal.answers, strict=True)
            if not answer.is_finished
        ]
        try:
            with accepted:
                async with begun(self._requests, accepted, unfinished) as streams:
                    if not journal.settled.is_set():
                        await self._settle(journal, accepted)
                    async with contextlib.aclosing(merged(streams)) as parts:
                        async for index, delta in parts:
                            self._add(journal, unfinished[index].choice, delta)
        except Exception as error:  # noqa: BLE001 - the boundary: every reader raises it
            journal.error = error
        finally:
            journal.task = None
            journal.settled.set()
            journal.wake()
            if not journal.num_users:
                self._keep(journal)

    async def _settle(self, journal: Journal, accepted: AcceptedCall) -> None:
        """The call stays with the model that has begun to answer; Redis knows it before a client has a token.

        So a gateway that goes on with it never lets another model answer. Without Redis it is written later.
        """
        stored = msgspec.structs.replace(self._stored(accepted), is_settled=True)
        record = journal.record
        assert record is not None
        journal.call = msgspec.structs.replace(stored, remaining_s=0.0, traceparent="")
        journal.generations = accepted.generations
        record.call = encode_call(stored, created_unix_s=journal.created_unix_s)
        record.forget_written()
        self._writer.post(record)
        with contextlib.suppress(StoreUnavailable):
            await self._writer.flush()
        journal.settled.set()

    def _add(self, journal: Journal, choice: int, delta: Delta) -> None:
        answer = journal.answers[choice]
        answer.add(delta)
        journal.wake()
        if journal.record is not None:
            if delta.layout:
                self._note_layout(journal, choice, delta.layout)
            if answer.is_finished:
                journal.record.ends[choice] = _end_of(answer, journal.generations[choice].sampling)
            self._writer.post(journal.record)

    def _stored(self, accepted: AcceptedCall) -> StoredCall:
        """The call as it is kept. Which weights will answer it is nearly always clear; else the first token tells."""
        stored, layout = accepted.to_stored(), self._requests.only_identity(accepted.model)
        choices = [msgspec.structs.replace(choice, layout=choice.layout or layout) for choice in stored.choices]
        return msgspec.structs.replace(stored, choices=choices)

    def _note_layout(self, journal: Journal, choice: int, layout: str) -> None:
        """An answer has begun with these weights; what is written of it from here on says so."""
        call, record = journal.call, journal.record
        assert call is not None
        assert record is not None
        if call.choices[choice].layout == layout:
            return
        choices = [*call.choices]
        choices[choice] = msgspec.structs.replace(choices[choice], layout=layout)
        journal.call = msgspec.structs.replace(call, choices=choices)
        stored = msgspec.structs.replace(journal.call, traceparent=journal.traceparent)
        record.call = encode_call(stored, created_unix_s=journal.created_unix_s)
        record.forget_written()

    def _end_taken_over(self, record: Record) -> None:
        """Another gateway goes on with a request of ours."""
        for task, journal in list(self._tasks.items()):
            if journal.record is record and journal.is_running:
                journal.error = WorkerUnavailable("the request goes on at another gateway", retry_after_s=RETRY_AFTER_S)
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
        """Ends the generation at once; a second cancel would interrupt its cleaning up."""
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
        """Nobody reads it any more: it stays for a while."""
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
                if journal.record is not None:
                    self._writer.post(journal.record)


class _UnusableError(Exception):
    """What Redis holds is no journal that can be gone on with."""


def _check_size(record: Record, stored: StoredCall) -> None:
    """Raises InvalidRequest for a call whose journal could become larger than one may be.

    Such a call could be answered, but not gone on with, and its client would only find that out when it comes back.
    """
    num_answer_tokens = sum(choice.sampling.max_tokens for choice in stored.choices if choice.sampling.logprobs is None)
    if record.num_bytes > MAX_JOURNAL_BYTES:
        raise InvalidRequest(
            f"a request with a name must take at most {MAX_JOURNAL_BYTES} bytes with its prompts, schemas and answers "
            f"and this one takes {record.num_bytes}: send it without X-Request-Id and Idempotency-Key",
            field="prompt",
            code="named_request_too_large",
        )
    if record.num_bytes + TOKEN_BYTES * num_answer_tokens > MAX_JOURNAL_BYTES:
        raise InvalidRequest(
            f"a request with a name may have answers of at most "
            f"{(MAX_JOURNAL_BYTES - record.num_bytes) // TOKEN_BYTES} tokens together beside its prompts, and this one "
            f"may have {num_answer_tokens}: give a smaller max_tokens or n, or send it without X-Request-Id and "
            "Idempotency-Key",
            field="max_tokens",
            code="named_request_too_large",
        )


def _continue_record(record: Record, held: Held) -> None:
    """From now on the record continues what is held."""
    record.life, record.epoch = held.life, held.epoch
    record.is_in_redis, record.is_over = True, False
    record.num_written = [
        min(len(known), len(token_ids)) for known, token_ids in zip(record.token_ids, held.token_ids, strict=True)
    ]
    record.written_ends = [False] * len(held.ends)


def _end_of(answer: Answer, sampling: Sampling) -> bytes:
    """What is written of an answer's end; nothing of one whose tokens are not written."""
    return encode_end(answer) if answer.is_finished and sampling.logprobs is None else b""


def _is_repeatable(call: Call) -> bool:
    """Whether the call gives the same answer wherever and whenever it runs."""
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
            raise _deadline_passed() from None
        raise


def _deadline_passed() -> TandemError:
    return DeadlineExceeded("the request's deadline passed")


def _another_request() -> InvalidRequest:
    return event_id_error("it is of another request")


def _several_answers() -> InvalidRequest:
    return InvalidRequest("the request has several answers, and next_index is of a single one", field="next_index")


def _conflict() -> TandemError:
    return AlreadyExists(
        "another request was made with the same name and a different body",
        field="Idempotency-Key",
        code="idempotency_conflict",
    )


def _not_known() -> InvalidRequest:
    return NotFound("nothing is known of this request, or not any more", field="request_id", code="stream_not_found")
