"""Chat answers that are kept for their tenants: found by their ids or by metadata, with the messages that they answer.

Knows documents and their store, and no route.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.access.keys import ApiKey
from gateway.http.exchange import Exchange
from gateway.openai.chat import ChatRequest
from gateway.stored.kept import KeptChat
from gateway.stored.kind import StoredKind, encoded
from services.cluster.answers import StoredAnswer
from services.runtime.errors import NotFound


class Wanted(NamedTuple):
    """What the chats of a list have in common."""

    model: str | None = None
    metadata: Mapping[str, str] = {}


class StoredChats(StoredKind):
    """All stored chat answers."""

    prefix = "chatcmpl-"
    word = "chat completion"

    @classmethod
    def not_found(cls, entry_id: str) -> NotFound:
        """Returns the error for an answer that the tenant does not have."""
        return NotFound(
            f"no chat completion {entry_id[:128]!r} is stored", field="completion_id", code="completion_not_found"
        )

    async def begin(self, exchange: Exchange, request: ChatRequest, *, key: ApiKey) -> KeptChat:
        """Returns what keeps the answer to a request. Raises InvalidRequest for messages that cannot be written."""
        messages = encoded(request.messages)
        # A client that asks for it is told at once where it cannot be done.
        await self._store.find(key.tenant, "")
        return KeptChat(self._store, exchange, tenant=key.tenant, messages=messages, metadata=request.metadata or {})

    async def page(
        self, tenant: str, wanted: Wanted, *, after: str, limit: int, newest_first: bool
    ) -> tuple[list[bytes], bool]:
        """Returns documents after the one with the id `after`, and whether more follow."""

        def accepts(document: bytes) -> bool:
            if wanted == Wanted():
                return True
            chat = msgspec.json.decode(document, type=_Described)
            return wanted.model in (None, chat.model) and wanted.metadata.items() <= chat.metadata.items()

        return await self._store.page(
            tenant, self.prefix, after=after, limit=limit, newest_first=newest_first, accepts=accepts
        )


def messages_of(chat_id: str, found: StoredAnswer) -> list[dict[str, Any]]:
    """Returns the messages that an answer was asked with, each with an id; the text of parts is joined."""
    messages: list[dict[str, Any]] = msgspec.json.decode(found.input)
    return [
        {**message, "id": f"{chat_id}-{number}", **_content(message.get("content"))}
        for number, message in enumerate(messages)
    ]


def _content(content: str | Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    if isinstance(content, str | None):
        return {"content": content, "content_parts": None}
    return {"content": "\n".join(part["text"] for part in content), "content_parts": content}


class _Described(msgspec.Struct):
    model: str
    metadata: dict[str, str]
