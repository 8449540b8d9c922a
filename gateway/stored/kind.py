"""What all that is stored has in common: found, changed and forgotten by its id, and refused where it has no room."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gateway.named.ask import conflict
from gateway.openai.writer import encode
from gateway.stored.documents import changed
from services.cluster.answer_records import MAX_ACTIVE, AnswerReply
from services.cluster.answers import MAX_ANSWER_BYTES, AnswerRoom, AnswerStore, StoredAnswer
from services.runtime.errors import InvalidRequest, NotFound, Overloaded, RateLimited

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MAX_TRIES = 8
"""How often a change is made anew because another one came in between."""
RETRY_AFTER_S = 1.0
LIMIT = "background_responses"
"""Names the limit in refusals and metrics."""
FULL_RETRY_S = 5.0


class StoredKind(ABC):
    """All that is stored of one kind, as one gateway reaches it. `on_refusal` is told the name of a limit that refuses.

    Every method raises StoreUnavailable where Redis is away, and NotFound for what the tenant does not have.
    """

    prefix = ""
    """What all ids begin with."""
    word = ""
    """What one of them is called in messages."""

    def __init__(self, store: AnswerStore, *, on_refusal: Callable[[str], None]) -> None:
        self._store = store
        self._on_refusal = on_refusal

    async def find(self, tenant: str, entry_id: str) -> StoredAnswer:
        """Returns one of them."""
        found = await self._store.find(tenant, entry_id) if self.is_one(entry_id) else None
        if found is None:
            raise self.not_found(entry_id)
        return found

    async def delete(self, tenant: str, entry_id: str) -> None:
        """Forgets one of them."""
        if not self.is_one(entry_id) or not await self._store.delete(tenant, entry_id):
            raise self.not_found(entry_id)

    async def change(self, tenant: str, entry_id: str, *, metadata: dict[str, str]) -> bytes:
        """Gives one of them other metadata. Returns its document."""
        return await self._changed(tenant, entry_id, lambda found: (changed(found.document, metadata=metadata), None))

    @classmethod
    def is_one(cls, entry_id: str) -> bool:
        """Returns whether a text may be an id of this kind."""
        return entry_id.startswith(cls.prefix) and _ID.fullmatch(entry_id) is not None

    @classmethod
    @abstractmethod
    def not_found(cls, entry_id: str) -> NotFound:
        """Returns the error for what the tenant does not have."""

    async def _changed(
        self, tenant: str, entry_id: str, change: Callable[[StoredAnswer], tuple[bytes, bytes | None]]
    ) -> bytes:
        """Replaces a document and, where `change` returns one, the input. Returns the document."""
        for _ in range(MAX_TRIES):
            found = await self.find(tenant, entry_id)
            document, input_items = change(found)
            reply = await self._store.change(tenant, entry_id, read=found, document=document, input_items=input_items)
            if reply is not AnswerReply.FENCED:
                self._check(entry_id, reply)
                return document
        raise Overloaded(f"the {self.word} is being changed by other requests", retry_after_s=RETRY_AFTER_S)

    def _check(self, entry_id: str, reply: AnswerReply) -> None:
        if reply is AnswerReply.GONE:
            raise self.not_found(entry_id)
        check_reply(reply, self._store.room, on_refusal=self._on_refusal)


def check_reply(reply: AnswerReply, room: AnswerRoom, *, on_refusal: Callable[[str], None]) -> None:
    """Raises what a client is told of a write that was refused. `on_refusal` is told the name of the limit."""
    if reply is AnswerReply.ACTIVE:
        on_refusal(LIMIT)
        raise RateLimited(
            f"rate limit reached: a tenant may have at most {MAX_ACTIVE} responses that wait or are generated in "
            "the background",
            retry_after_s=FULL_RETRY_S,
            limit=LIMIT,
        )
    if reply is AnswerReply.TENANT_FULL:
        on_refusal(LIMIT)
        raise RateLimited(
            f"rate limit reached: a tenant's stored responses may take at most {room.tenant_bytes} "
            "bytes, and those that are not complete take them",
            retry_after_s=FULL_RETRY_S,
            limit=LIMIT,
        )
    if reply is AnswerReply.ALL_FULL:
        raise Overloaded(
            f"stored responses take the {room.all_bytes} bytes that they may take in Redis",
            retry_after_s=FULL_RETRY_S,
        )
    if reply is AnswerReply.LONG:
        raise InvalidRequest(
            f"the conversation would have more than the {MAX_ANSWER_BYTES} bytes that it may have",
            field="items",
            code="request_too_large",
        )
    if reply is AnswerReply.FENCED:
        raise conflict()


def encoded(value: Any) -> bytes:
    """Returns a value of a request as JSON. Raises InvalidRequest for half a surrogate pair."""
    try:
        return encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest("a text of the body has half a surrogate pair", code="invalid_encoding") from error
