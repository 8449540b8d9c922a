"""Answers and conversations that are kept for their tenants, and answers in the background, in Redis.

An answer in the background has one owner at a time. A gateway claims it for a few seconds, which adds 1 to its epoch,
and renews the claim while it works; what an earlier owner writes is refused. An answer is found by tenant and id, so
that no tenant's ids meet another's. Knows neither what is in a document nor how it is made.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from services.cluster.answer_records import INLINE_BYTES, INLINE_EVENT_BYTES, REFERENCE_BYTES, AnswerReply
from services.cluster.answer_scripts import (
    APPEND,
    CANCEL,
    CHANGE,
    CLAIM,
    DELETE,
    EVENTS,
    FIND,
    FIND_WAITING,
    PAGE,
    PIECE,
    PUT,
    RENEW,
    STAGE,
    SWEEP_ALL,
    UNSTAGE,
    WRITE,
)
from services.cluster.pending_work import claim_oldest
from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreRefused, StoreUnavailable

LEASE_S = 6.0
"""Seconds that a dead owner's answer waits before another gateway continues it."""
BACKGROUND_S = 3600.0
"""The time that an answer in the background has to be complete."""
MAX_ANSWER_BYTES = 8 * 2**20
"""The most that document and input of one answer take together."""
MAX_ROUNDS = 500
"""Most scripts that make room for one answer."""
MAX_WRITTEN_EVENTS = 256
"""Most events that one script writes."""
MAX_SCRIPT_BYTES = 256 * 1024
"""Most bytes of events or documents that one script handles, apart from the last of them."""
MAX_READS = 8
"""How often an answer that changes while it is read is read again."""


@dataclass(frozen=True, slots=True)
class AnswerRoom:
    """How many bytes stored answers may take, of one tenant and of all together."""

    tenant_bytes: int = 16 * 2**20
    all_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class BackgroundOrder:
    """What a gateway needs to generate an answer in the background.

    `key_digest` is that of the API key under which it is asked; `body`, which lacks the input, and `headers` are JSON.
    `digest` tells whether a second request with the same id asks the same. `keeps_events`: the events of the answer's
    stream are kept too. `num_earlier`: the number of items at the start of the input that come from what it continues.
    """

    digest: str
    key_digest: str
    body: bytes
    headers: bytes
    keeps_events: bool
    num_earlier: int = 0
    regions: str = ""
    """The only regions whose gateways may claim it, with commas between them; empty: all."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it is kept. `document` is what was known of it when it began, until it is over.

    A conversation is kept as one that is over, with its items as `input`.
    """

    document: bytes
    input: bytes
    state: str
    """`queued`, `in_progress` or `over`."""
    is_background: bool
    has_events: bool
    stamp: bytes
    """Differs after each change."""


@dataclass(slots=True)
class ClaimedAnswer:
    """An answer in the background while it is ours."""

    name: str
    id: str
    tenant: str
    order: BackgroundOrder
    document: bytes
    input: bytes
    created_s: int
    """Unix seconds."""
    epoch: int
    owner: str
    num_tries: int
    """How many gateways have begun and not given it back, this one among them."""
    num_events: int
    """How many events of its stream are kept."""
    last_event: bytes

    @property
    def claim(self) -> str:
        """Names this ownership; what is written under an earlier one is refused."""
        return f"{self.epoch}:{self.owner}"


class AnswerStore:
    """Stored answers in Redis; every method may wait for a few round trips and raises StoreUnavailable.

    `life_s`: how long an answer is kept once it is complete; 0: none are kept.
    """

    def __init__(self, store: Store, *, room: AnswerRoom, life_s: float, lease_s: float = LEASE_S) -> None:
        self._store = store
        self.room = room
        self.life_s = life_s
        self.lease_s = lease_s

    async def put(self, tenant: str, answer_id: str, *, document: bytes, input_items: bytes) -> AnswerReply:
        """Keeps a complete answer, in place of one that has its id and is not in the background."""
        name = name_of_answer(tenant, answer_id)
        async with self._staging(tenant, name) as staging:
            args = (name, tenant, answer_id, round(self.life_s), *self._bounds)
            values = [await staging.reference(value) for value in (document, input_items)]
            return staging.checked(await self._with_room(PUT, (*args, *values)))
        return staging.refusal

    async def create(
        self, tenant: str, answer_id: str, *, order: BackgroundOrder, document: bytes, input_items: bytes
    ) -> AnswerReply:
        """Keeps an answer that is to be generated. HELD: it was ordered before; FENCED: its id is another's."""
        life_s, name = round(self.life_s + BACKGROUND_S), name_of_answer(tenant, answer_id)
        args = (name, tenant, answer_id, life_s, *self._bounds)
        kept = (int(order.keeps_events), order.num_earlier, order.regions)
        async with self._staging(tenant, name) as staging:
            values = [await staging.reference(value) for value in (document, input_items, order.body)]
            asked = (order.digest, order.key_digest, values[2], order.headers, *kept)
            return staging.checked(await self._with_room(PUT, (*args, *values[:2], *asked)))
        return staging.refusal

    async def find(self, tenant: str, answer_id: str) -> StoredAnswer | None:
        """Returns a tenant's answer."""
        for _ in range(MAX_READS):
            found = await self._run(FIND, (name_of_answer(tenant, answer_id),))
            document, input_items, state, digest, has_events, stamp = found
            if state is None:
                return None
            values = await self._resolved(document, input_items)
            if values is not None:
                return StoredAnswer(
                    values[0], values[1], state.decode(), bool(digest), has_events == b"1", stamp or b""
                )
        raise StoreUnavailable("a stored answer changed each time it was read")

    async def change(
        self, tenant: str, answer_id: str, *, read: StoredAnswer, document: bytes, input_items: bytes | None = None
    ) -> AnswerReply:
        """Changes an answer that is over, for as long as it is kept. FENCED: it is no longer what was `read`."""
        return await self._change(tenant, answer_id, read=read, values=(document, input_items))

    async def _change(
        self,
        tenant: str,
        answer_id: str,
        *,
        read: StoredAnswer,
        values: tuple[bytes | None, bytes | None],
        life_s: int | None = None,
    ) -> AnswerReply:
        name, life = name_of_answer(tenant, answer_id), "" if life_s is None else life_s
        document = read.document if values[0] is None else values[0]
        async with self._staging(tenant, name) as staging:
            given = [await staging.reference(value) for value in (document, values[1]) if value is not None]
            args = (name, read.stamp, *self._bounds, life, *given)
            return staging.checked(await self._with_room(CHANGE, args))
        return staging.refusal

    async def append(self, tenant: str, answer_id: str, *, items: Sequence[bytes]) -> AnswerReply:
        """Adds items of JSON to the input of an answer that is over, which is kept for another `life_s` then.

        May be repeated after StoreUnavailable: HELD: it has exactly these items already.
        """
        joined, life_s = b",".join(items), round(self.life_s)
        if len(joined) <= INLINE_BYTES:
            args = (name_of_answer(tenant, answer_id), *self._bounds, joined, life_s, MAX_ANSWER_BYTES)
            return await self._with_room(APPEND, (*args, secrets.token_hex(16)))
        for _ in range(MAX_READS):
            found = await self.find(tenant, answer_id)
            if found is None:
                return AnswerReply.GONE
            if joined in found.input:
                return AnswerReply.HELD
            longer = b"%b%b%b]" % (found.input[:-1], b"" if found.input == b"[]" else b",", joined)
            if len(longer) + len(found.document) > MAX_ANSWER_BYTES:
                return AnswerReply.LONG
            reply = await self._change(tenant, answer_id, read=found, values=(None, longer), life_s=life_s)
            if reply is not AnswerReply.FENCED:
                return reply
        return AnswerReply.FENCED

    async def page(
        self,
        tenant: str,
        id_prefix: str,
        *,
        after: str = "",
        limit: int,
        newest_first: bool = True,
        accepts: Callable[[bytes], bool],
    ) -> tuple[list[bytes], bool]:
        """Returns the documents of a tenant's answers that are over, whose ids begin so, and whether more follow.

        They have about MAX_ANSWER_BYTES at most. `after`: the id after which they begin; nothing follows an unknown
        one. `accepts` says of a document whether it belongs to the list.
        """
        found: list[bytes] = []
        num_bytes, place = 0, name_of_answer(tenant, after) if after else ""
        while True:
            args = (tenant, place, int(newest_first), id_prefix, limit + 1, min(MAX_ANSWER_BYTES, MAX_SCRIPT_BYTES))
            values, score = await self._run(PAGE, args)
            documents = [resolved[0] for value in values if (resolved := await self._resolved(value)) is not None]
            for document in filter(accepts, documents):
                if len(found) == limit or num_bytes > MAX_ANSWER_BYTES:
                    return found, True
                found.append(document)
                num_bytes += len(document)
            if not score:
                return found, False
            place = f"({score.decode()}"

    async def events(self, tenant: str, answer_id: str, *, first: int, most: int) -> tuple[str, list[bytes]]:
        """Returns the state of an answer and at most `most` of its events from `first` on.

        The state is empty if the answer is gone. At least one event is returned if any are stored.
        """
        args = (name_of_answer(tenant, answer_id), first, most, MAX_SCRIPT_BYTES)
        state, values = await self._run(EVENTS, args)
        events = await self._resolved(*values)
        return ("", []) if events is None else ((state or b"").decode(), events)

    async def delete(self, tenant: str, answer_id: str) -> bool:
        """Forgets an answer, also one that is being generated. Returns whether the tenant had it."""
        return bool(await self._run(DELETE, (name_of_answer(tenant, answer_id),)))

    async def cancel(self, tenant: str, answer_id: str, *, document: bytes) -> AnswerReply:
        """Ends an answer in the background with this document. FENCED: it is over."""
        name = name_of_answer(tenant, answer_id)
        async with self._staging(tenant, name) as staging:
            args = (name, await staging.reference(document), round(self.life_s))
            return staging.checked(await self._with_room(CANCEL, args))
        return staging.refusal

    async def claim(
        self, owner: str, *, busy_tenants: Sequence[str] = (), full_tenants: Sequence[str] = (), region: str = ""
    ) -> ClaimedAnswer | None:
        """Claims the answer that has waited longest, those of `busy_tenants` last. Returns None if none waits.

        Answers of `full_tenants`, and those that are pinned to other regions than `region`, are not claimed.
        """
        return await claim_oldest(
            lambda num_skipped: self._run(FIND_WAITING, (region, num_skipped)),
            lambda queue, tenant: self._claim(owner, queue, tenant),
            region=region,
            busy_tenants=busy_tenants,
            full_tenants=full_tenants,
        )

    async def _claim(self, owner: str, queue: str, tenant: str) -> ClaimedAnswer | None:
        reply = await self._run(CLAIM, (owner, round(self.lease_s * 1000), queue, tenant))
        if not reply:
            return None
        name, flat, num_events, last_event = reply
        fields = {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}
        values = await self._resolved(fields["document"], fields["input"], fields["body"], last_event)
        if values is None:
            raise StoreUnavailable("a claimed answer has ended or lost a part")
        fields |= dict(zip(("document", "input", "body"), values[:3], strict=True))
        return _claimed(name.decode(), fields, num_events=num_events, last_event=values[3])

    async def renew(self, answer: ClaimedAnswer) -> AnswerReply:
        """Keeps the claim for another `lease_s`. GONE or FENCED: it is no longer ours."""
        return AnswerReply(
            (await self._run(RENEW, (answer.name, answer.claim, round(self.lease_s * 1000), 0))).decode()
        )

    async def give_back(self, answer: ClaimedAnswer, *, wait_s: float = 0.0) -> None:
        """Lets any gateway claim the answer after this time."""
        await self._run(RENEW, (answer.name, answer.claim, round(wait_s * 1000), 1))

    async def write(
        self, answer: ClaimedAnswer, events: Sequence[bytes], *, document: bytes = b"", beyond_room: bool = False
    ) -> AnswerReply:
        """Adds events to those that are known to be kept, and with a document ends the answer.

        The events are written in bounded portions, in order. A reader may see the first portions alone, but the
        document only with all events. The call may be repeated after StoreUnavailable, with the same events. GONE: the
        answer, or events of it, are lost. `beyond_room` ignores the quotas, for the reason of a failure. If Redis
        refuses a portion, `answer.num_events` counts the portions before it.
        """
        bounds = (2**53, 2**53) if beyond_room else self._bounds
        async with self._staging(answer.tenant, answer.name, bounds) as staging:
            given = [await staging.reference(event, INLINE_EVENT_BYTES) for event in events]
            end = await staging.reference(document) if document else b""
            first, reply = answer.num_events, AnswerReply.DONE
            *earlier, last = _portions(given)
            for portion, ending in (*((portion, (b"", 0)) for portion in earlier), (last, (end, round(self.life_s)))):
                args = (answer.name, answer.claim, *bounds, *ending, first)
                try:
                    reply = staging.checked(await self._with_room(WRITE, (*args, *portion)))
                except StoreRefused:
                    answer.num_events = first
                    raise
                if reply is not AnswerReply.DONE:
                    break
                first += len(portion)
            answer.num_events = first
            return reply
        return staging.refusal

    async def swept_bytes(self) -> int:
        """Gives back what has expired, and returns the bytes that all answers take now."""
        is_behind = True
        while is_behind:
            num_bytes, is_behind = await self._run(SWEEP_ALL, ())
        return int(num_bytes)

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.room.tenant_bytes, self.room.all_bytes

    async def _with_room(self, script: Script, args: Sequence[str | bytes | int]) -> AnswerReply:
        for _ in range(MAX_ROUNDS):
            reply = AnswerReply((await self._run(script, args)).decode())
            if reply is not AnswerReply.AGAIN:
                return reply
        return AnswerReply.ALL_FULL

    async def _run(self, script: Script, args: Sequence[str | bytes | int]) -> Any:
        keys = self._store.keys
        accounts = (keys.answer_expiry, keys.answer_sizes, keys.answer_totals)
        queues = (keys.waiting_answers_prefix, keys.running_answers_prefix, keys.evictable_answers)
        return await self._store.run(script, (keys.answer_prefix, keys.answers_prefix, *accounts, *queues), args)

    def _staging(self, tenant: str, name: str, bounds: tuple[int, int] | None = None) -> "_Staging":
        return _Staging(self, (tenant, *(bounds or self._bounds), name))

    async def _resolved(self, *values: bytes) -> list[bytes] | None:
        """Returns values in one piece each. Returns None if Redis no longer has some pieces."""
        whole: list[bytes] = []
        for value in values:
            pieces, num_pieces = [], 0
            if value[:1] == b"\0":
                num_pieces = int(value[33:38])
            for number in range(num_pieces):
                piece = await self._run(PIECE, (value[1:33], number))
                if piece is None:
                    return None
                pieces.append(piece)
            whole.append(b"".join((*pieces, value[REFERENCE_BYTES:])) if num_pieces else value)
        return whole


class _StageRefused(Exception):
    """There is no room for a piece."""


class _Staging:
    """The long values of one write, whose pieces are stored before it.

    `target` is the tenant, the bounds, and the name of the answer. A piece that is refused ends the block. At the end
    of the block, the pieces that have not become part of an answer are dropped.
    """

    def __init__(self, store: AnswerStore, target: tuple[str, int, int, str]) -> None:
        self.refusal = AnswerReply.DONE
        """The reply to the piece that was refused."""
        self._store = store
        self._target = target
        self._tokens: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._tokens:
            with contextlib.suppress(StoreUnavailable):  # they expire
                await self._store._run(UNSTAGE, self._tokens)
        return isinstance(exc, _StageRefused)

    async def reference(self, value: bytes, inline_bytes: int = INLINE_BYTES) -> bytes:
        """Returns the value as a script takes it, and stores its pieces if it is long. Raises _StageRefused."""
        if len(value) <= inline_bytes:
            return value
        token = secrets.token_hex(16)
        self._tokens.append(token)
        # The end stays with the answer, so that an append has something to replace.
        starts = range(0, len(value) - 1, INLINE_BYTES)
        for number, start in enumerate(starts):
            piece = value[start : min(start + INLINE_BYTES, len(value) - 1)]
            reply = await self._store._with_room(STAGE, (token, *self._target, number, piece))
            if reply is not AnswerReply.DONE:
                self.refusal = self.checked(reply)
                raise _StageRefused
        return b"\0%b%05d%010d%b" % (token.encode(), len(starts), len(value) - 1, value[-1:])

    def checked(self, reply: AnswerReply) -> AnswerReply:
        """Returns the reply. Raises StoreUnavailable if Redis has forgotten staged pieces."""
        if reply is AnswerReply.LOST:
            raise StoreUnavailable("Redis has forgotten a part of an answer while it was written")
        return reply


def _portions(events: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yields the events in the portions that one script writes, at least one."""
    start = num_bytes = 0
    for index, event in enumerate(events):
        num_bytes += len(event)
        if index > start and (num_bytes > MAX_SCRIPT_BYTES or index - start == MAX_WRITTEN_EVENTS):
            yield events[start:index]
            start, num_bytes = index, len(event)
    yield events[start:]


def name_of_answer(tenant: str, answer_id: str) -> str:
    """Returns 32 hex digits that stand for an answer of a tenant, whatever characters both have."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}:{answer_id}".encode(errors="surrogatepass")).hexdigest()[:32]


def _claimed(name: str, fields: Mapping[str, bytes], *, num_events: int, last_event: bytes) -> ClaimedAnswer:
    return ClaimedAnswer(
        name=name,
        id=fields["id"].decode(),
        tenant=fields["tenant"].decode(),
        order=BackgroundOrder(
            fields["digest"].decode(),
            fields["key"].decode(),
            fields["body"],
            fields["headers"],
            fields["has_events"] == b"1",
            int(fields.get("num_earlier", 0)),
            fields.get("regions", b"").decode(),
        ),
        document=fields["document"],
        input=fields["input"],
        created_s=int(fields["created"]),
        epoch=int(fields["epoch"]),
        owner=fields["owner"].decode(),
        num_tries=int(fields["tries"]),
        num_events=num_events,
        last_event=last_event,
    )
