"""Answers that are kept when they are complete: responses, also in their conversations, and chats.

Knows documents and their store, and neither routes nor how an answer is generated.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.http.exchange import Exchange
from gateway.openai.writer import encode
from gateway.stored.documents import ENDS, EventSplitter, changed, input_items, response_of, with_members
from services.cluster.answer_records import AnswerReply
from services.cluster.answers import MAX_ANSWER_BYTES, AnswerStore
from services.runtime.errors import StoreUnavailable


class Kept(ABC):
    """An answer that is kept when it is complete."""

    is_recorded = False
    """Whether the whole answer is needed, also of a stream."""

    @abstractmethod
    async def whole(self, body: bytes) -> bytes:
        """Keeps an answer. Returns its body, which says what was not done of what it promised."""

    async def passing(self, data: bytes) -> bytes:
        """Looks at events of a stream before they are sent. Returns those that are to be sent."""
        return data


@dataclass(frozen=True)
class Turn:
    """The input of one response: what it continues, and what its client asks."""

    asked: str | Sequence[Any]
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Items of the response or the conversation that it continues."""
    conversation_id: str | None = None

    def own_items(self, response_id: str) -> list[dict[str, Any]]:
        """Returns the items that the client asks. In a conversation all ids are this server's, and differ."""
        return input_items(self.asked, response_id, keeps_ids=self.conversation_id is None)

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """Returns all items."""
        return [*self.earlier, *self.own_items(response_id)]


class KeptResponse(Kept):
    """A response, which is added to its conversation and kept by itself, one or both of them."""

    def __init__(self, store: AnswerStore, turn: Turn, *, tenant: str, is_stored: bool, is_long: bool) -> None:
        self._store = store
        self._tenant = tenant
        self._turn = turn
        self._is_stored = is_stored
        self._is_long = is_long

    async def whole(self, body: bytes) -> bytes:
        """Keeps a response that is not streamed."""
        return changed(body, **undone) if (undone := await self._keep(body)) else body

    async def passing(self, data: bytes) -> bytes:
        """Keeps the response where these events end it. The last of them says what was not done."""
        if not any(b"event: %b\n" % kind in data for kind in ENDS):
            return data
        *events, last = EventSplitter().take(data)
        if last.kind in ENDS and (undone := await self._keep(response_of(last))):
            last = with_members(last, undone)
        return b"".join(event.data for event in (*events, last))

    async def _keep(self, document: bytes) -> dict[str, Any]:
        """Returns the members that say what was not done."""
        undone: dict[str, Any] = {}
        if self._turn.conversation_id is not None and not await self._is_added(document):
            undone["conversation"] = None
            document = changed(document, **undone)
        if self._is_stored and not await self._is_put(document):
            undone["store"] = False
        return undone

    async def _is_added(self, document: bytes) -> bool:
        conversation_id = self._turn.conversation_id
        assert conversation_id is not None
        own = self._turn.own_items(_id_of(document))
        try:
            return await add_turn(
                self._store, tenant=self._tenant, conversation_id=conversation_id, own=own, document=document
            )
        except StoreUnavailable:
            return False

    async def _is_put(self, document: bytes) -> bool:
        response_id, write = _id_of(document), self._write_items
        items = await asyncio.to_thread(write, response_id) if self._is_long else write(response_id)
        return await _is_put(self._store, self._tenant, response_id, document=document, input_items=items)

    def _write_items(self, response_id: str) -> bytes:
        return encode(self._turn.items(response_id))


class KeptChat(Kept):
    """A chat's answer. Where it cannot be kept, a header says so, or a comment where the head is sent already."""

    is_recorded = True

    def __init__(
        self, store: AnswerStore, exchange: Exchange, *, tenant: str, messages: bytes, metadata: dict[str, str]
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._exchange = exchange
        self._messages = messages
        self._metadata = metadata

    async def whole(self, body: bytes) -> bytes:
        """Keeps an answer, with the messages that it answers."""
        document = b'%b,"metadata":%b}' % (body[:-1], encode(self._metadata))
        is_put = await _is_put(self._store, self._tenant, _id_of(body), document=document, input_items=self._messages)
        if not is_put and self._exchange.has_started:
            await self._exchange.send_event(b": not stored\n\n")
        elif not is_put:
            self._exchange.add_header(b"x-tandem-ignored", "store")
        return body


async def add_turn(
    store: AnswerStore, *, tenant: str, conversation_id: str, own: Sequence[Any], document: bytes
) -> bool:
    """Adds a response's input and output to a conversation. Returns False where that is gone or has no room.

    Does nothing for a response that has failed. May be repeated after StoreUnavailable.
    """
    response = msgspec.json.decode(document, type=_WithOutput)
    if response.status == "failed":
        return True
    items = [encode(item) for item in (*own, *response.output)]
    reply = await store.append(tenant, conversation_id, items=items)
    return reply in (AnswerReply.DONE, AnswerReply.HELD)


async def _is_put(store: AnswerStore, tenant: str, answer_id: str, *, document: bytes, input_items: bytes) -> bool:
    if len(input_items) + len(document) > MAX_ANSWER_BYTES:
        return False
    try:
        reply = await store.put(tenant, answer_id, document=document, input_items=input_items)
    except StoreUnavailable:
        return False
    return reply is AnswerReply.DONE


def _id_of(document: bytes) -> str:
    return msgspec.json.decode(document, type=_Identified).id


class _Identified(msgspec.Struct):
    id: str


class _WithOutput(msgspec.Struct):
    status: str
    output: list[msgspec.Raw]
