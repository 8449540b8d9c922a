"""Answers and conversations that are kept for their tenants, and answers in the background, in Redis.

An answer in the background has one owner at a time. A gateway claims it for a few seconds, which adds 1 to its epoch,
and renews the claim while it works; what an earlier owner writes is refused. An answer is found by tenant and id, so
that no tenant's ids meet another's. Knows neither what is in a document nor how it is made.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.cluster.answer_scripts import (
    APPEND,
    CANCEL,
    CHANGE,
    CLAIM,
    DELETE,
    EVENTS,
    FIND,
    PAGE,
    PUT,
    RENEW,
    SWEEP,
    WRITE,
    AnswerReply,
)
from services.cluster.redis_store import Script, Store

LEASE_S = 6.0
"""Seconds that a dead owner's answer waits before another gateway continues it."""
BACKGROUND_S = 3600.0
"""The time that an answer in the background has to be complete."""
MAX_ANSWER_BYTES = 8 * 2**20
"""The most that document and input of one answer take together."""
MAX_ROUNDS = 40
"""Most scripts that make room for one answer."""


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
        args = (name_of_answer(tenant, answer_id), tenant, answer_id, round(self.life_s), *self._bounds)
        return await self._with_room(PUT, (*args, document, input_items))

    async def create(
        self, tenant: str, answer_id: str, *, order: BackgroundOrder, document: bytes, input_items: bytes
    ) -> AnswerReply:
        """Keeps an answer that is to be generated. HELD: it was ordered before; FENCED: its id is another's."""
        life_s = round(self.life_s + BACKGROUND_S)
        args = (name_of_answer(tenant, answer_id), tenant, answer_id, life_s, *self._bounds, document, input_items)
        kept = (int(order.keeps_events), order.num_earlier, order.regions)
        asked = (order.digest, order.key_digest, order.body, order.headers, *kept)
        return await self._with_room(PUT, (*args, *asked))

    async def find(self, tenant: str, answer_id: str) -> StoredAnswer | None:
        """Returns a tenant's answer."""
        found = await self._run(FIND, (name_of_answer(tenant, answer_id),))
        document, input_items, state, digest, has_events, stamp = found
        if state is None:
            return None
        return StoredAnswer(document, input_items, state.decode(), bool(digest), has_events == b"1", stamp or b"")

    async def change(
        self, tenant: str, answer_id: str, *, read: StoredAnswer, document: bytes, input_items: bytes | None = None
    ) -> AnswerReply:
        """Changes an answer that is over, for as long as it is kept. FENCED: it is no longer what was `read`."""
        args = (name_of_answer(tenant, answer_id), read.stamp, *self._bounds, document)
        return await self._with_room(CHANGE, args if input_items is None else (*args, input_items))

    async def append(self, tenant: str, answer_id: str, *, items: Sequence[bytes]) -> AnswerReply:
        """Adds items of JSON to the input of an answer that is over, which is kept for another `life_s` then.

        May be repeated after StoreUnavailable: HELD: it has exactly these items already.
        """
        name = name_of_answer(tenant, answer_id)
        return await self._with_room(
            APPEND, (name, *self._bounds, b",".join(items), round(self.life_s), MAX_ANSWER_BYTES)
        )

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
            args = (tenant, place, int(newest_first), id_prefix, limit + 1, MAX_ANSWER_BYTES)
            documents, score = await self._run(PAGE, args)
            for document in filter(accepts, documents):
                if len(found) == limit or num_bytes > MAX_ANSWER_BYTES:
                    return found, True
                found.append(document)
                num_bytes += len(document)
            if not score:
                return found, False
            place = f"({score.decode()}"

    async def events(self, tenant: str, answer_id: str, *, first: int, most: int) -> tuple[str, list[bytes]]:
        """Returns the state of an answer, empty where it is gone, and at most `most` events from `first` on."""
        state, events = await self._run(EVENTS, (name_of_answer(tenant, answer_id), first, first + most - 1))
        return (state or b"").decode(), events

    async def delete(self, tenant: str, answer_id: str) -> bool:
        """Forgets an answer, also one that is being generated. Returns whether the tenant had it."""
        return bool(await self._run(DELETE, (name_of_answer(tenant, answer_id),)))

    async def cancel(self, tenant: str, answer_id: str, *, document: bytes) -> AnswerReply:
        """Ends an answer in the background with this document. FENCED: it is over."""
        args = (name_of_answer(tenant, answer_id), document, round(self.life_s))
        return AnswerReply((await self._run(CANCEL, args)).decode())

    async def claim(
        self, owner: str, *, busy_tenants: Sequence[str] = (), full_tenants: Sequence[str] = (), region: str = ""
    ) -> ClaimedAnswer | None:
        """Takes an answer that waits, the oldest first, those of `busy_tenants` last; None: none waits.

        Answers of `full_tenants`, and those that are held to other regions than `region`, are not taken.
        """
        chosen = [*(f"busy:{tenant}" for tenant in busy_tenants), *(f"full:{tenant}" for tenant in full_tenants)]
        chosen.append(f"region:{region}")
        answer = await self._run(CLAIM, (owner, round(self.lease_s * 1000), *chosen))
        if not answer:
            return None
        name, flat, num_events, last_event = answer
        fields = {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}
        return _claimed(name.decode(), fields, num_events=num_events, last_event=last_event)

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

        May be repeated after StoreUnavailable. GONE: the answer, or events of it, are lost. `beyond_room`: room is not
        asked for; this is for what says why an answer has failed.
        """
        bounds = (2**53, 2**53) if beyond_room else self._bounds
        args = (answer.name, answer.claim, *bounds, document, round(self.life_s), answer.num_events)
        reply = await self._with_room(WRITE, (*args, *events))
        if reply is AnswerReply.DONE:
            answer.num_events += len(events)
        return reply

    async def swept_bytes(self) -> int:
        """Gives back what has expired, and returns the bytes that all answers take now."""
        return int(await self._run(SWEEP, ()))

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
        names = (keys.answer_prefix, keys.answers_prefix, *accounts, keys.active_answers, keys.running_answers_prefix)
        return await self._store.run(script, names, args)


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
