"""Conversations: lists of items that responses continue and add to, and that clients change by themselves.

Each is kept for a while after its last item was added. Knows documents and their store, and no route.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.openai.responses_request import check_items
from gateway.stored.documents import input_items
from gateway.stored.kind import StoredKind, encoded
from services.cluster.answers import AnswerStore, StoredAnswer
from services.cluster.files import new_id
from services.runtime.errors import InvalidRequest, NotFound


class Conversations(StoredKind):
    """All conversations."""

    prefix = "conv_"
    word = "conversation"

    @classmethod
    def not_found(cls, entry_id: str) -> NotFound:
        """Returns the error for a conversation that the tenant does not have."""
        return NotFound(
            f"no conversation {entry_id[:128]!r} is stored", field="conversation_id", code="conversation_not_found"
        )

    async def create(self, tenant: str, *, items: Sequence[Any], metadata: dict[str, str]) -> bytes:
        """Returns the document of a new conversation with these items. Raises InvalidRequest."""
        check_items(items, before=())
        conversation_id = new_id(self.prefix)
        known = {"id": conversation_id, "object": "conversation", "created_at": int(time.time()), "metadata": metadata}
        document, own = encoded(known), encoded(_new_items(items))
        reply = await self._store.put(tenant, conversation_id, document=document, input_items=own)
        self._check(conversation_id, reply)
        return document

    async def add(self, tenant: str, conversation_id: str, *, items: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns the items that were added. Raises InvalidRequest."""
        check_items(items, before=items_of(await self.find(tenant, conversation_id)))
        own = _new_items(items)
        written = [encoded(item) for item in own]
        self._check(conversation_id, await self._store.append(tenant, conversation_id, items=written))
        return own

    async def remove(self, tenant: str, conversation_id: str, *, item_id: str) -> bytes:
        """Takes an item out. Returns the conversation's document."""

        def change(found: StoredAnswer) -> tuple[bytes, bytes]:
            items = items_of(found)
            others = [item for item in items if item["id"] != item_id]
            if len(others) == len(items):
                raise item_not_found(item_id)
            return found.document, encoded(others)

        return await self._changed(tenant, conversation_id, change)


async def find_conversation(store: AnswerStore, *, tenant: str, conversation_id: str) -> StoredAnswer:
    """Returns the conversation that a request continues. Raises InvalidRequest where the tenant does not have it."""
    found = await store.find(tenant, conversation_id) if Conversations.is_one(conversation_id) else None
    if found is None:
        raise InvalidRequest(
            f"conversation: no conversation {conversation_id[:128]!r} is stored",
            field="conversation",
            code="conversation_not_found",
        )
    return found


def items_of(found: StoredAnswer) -> list[dict[str, Any]]:
    """Returns the items of a conversation, the oldest first."""
    items: list[dict[str, Any]] = msgspec.json.decode(found.input)
    return items


def item_not_found(item_id: str) -> NotFound:
    """Returns the error for an item that a conversation does not have."""
    return NotFound(f"the conversation has no item {item_id[:128]!r}", field="item_id", code="item_not_found")


def _new_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    return input_items(items, secrets.token_hex(10), keeps_ids=False)
