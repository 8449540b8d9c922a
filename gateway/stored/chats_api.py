"""Stored chat answers over HTTP: listed, fetched, given metadata and deleted, with the messages that they answer.

An edge: what is stored is `gateway.stored.chats`' business.
"""

import re
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.batches.batches_api import read_json
from gateway.batches.files_api import json_response, list_limit, route
from gateway.http.bodies import Bodies
from gateway.openai.metadata import MAX_METADATA, Metadata, check_metadata
from gateway.openai.shapes import said
from gateway.stored.chats import StoredChats, Wanted, messages_of
from gateway.stored.responses_api import (
    DEFAULT_LIST_LIMIT,
    MAX_LIST_LIMIT,
    document_response,
    is_ascending,
    page_of,
    tenant_of,
)
from services.runtime.errors import InvalidRequest

_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)


class ChangedMetadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request that gives metadata to what is stored, in place of what it had."""

    metadata: Annotated[Metadata | None, said("Absent: none.", maxProperties=MAX_METADATA)] = None


class ChatsApi:
    """The routes of stored chats."""

    def __init__(self, chats: StoredChats, *, bodies: Bodies) -> None:
        self._chats = chats
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        one = "/v1/chat/completions/{completion_id}"
        return [
            route("/v1/chat/completions", GET=self._list),
            route(one, GET=self._show, POST=self._change, DELETE=self._delete),
            route(f"{one}/messages", GET=self._list_messages),
        ]

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        told = {found[1]: value for name, value in query.items() if (found := _METADATA.fullmatch(name))}
        documents, has_more = await self._chats.page(
            tenant_of(request),
            Wanted(query.get("model"), told),
            after=_after(query.get("after")),
            limit=list_limit(query.get("limit"), default=DEFAULT_LIST_LIMIT, most=MAX_LIST_LIMIT),
            newest_first=not is_ascending(request, default="asc"),
        )
        ids = [msgspec.json.decode(document, type=_Identified).id for document in documents]
        ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
        data = [msgspec.Raw(document) for document in documents]
        return json_response({"object": "list", "data": data, **ends, "has_more": has_more})

    async def _show(self, request: Request) -> Response:
        return document_response((await self._chats.find(tenant_of(request), _id_in(request))).document)

    async def _change(self, request: Request) -> Response:
        asked = await read_json(request, ChangedMetadata, bodies=self._bodies)
        check_metadata(asked.metadata or {})
        return document_response(
            await self._chats.change(tenant_of(request), _id_in(request), metadata=asked.metadata or {})
        )

    async def _delete(self, request: Request) -> Response:
        await self._chats.delete(tenant_of(request), _id_in(request))
        return json_response({"id": _id_in(request), "object": "chat.completion.deleted", "deleted": True})

    async def _list_messages(self, request: Request) -> Response:
        found = await self._chats.find(tenant_of(request), _id_in(request))
        return page_of(request, messages_of(_id_in(request), found), default="asc")


def _after(said: str | None) -> str:
    """Returns the id after which a page begins, or nothing. Raises InvalidRequest."""
    if said is not None and not StoredChats.is_one(said):
        raise InvalidRequest("after must be the id of a chat completion", field="after", code="invalid_value")
    return said or ""


def _id_in(request: Request) -> str:
    chat_id: str = request.path_params["completion_id"]
    return chat_id


class _Identified(msgspec.Struct):
    id: str
