"""Conversations over HTTP: made, given metadata and deleted, with their items.

An edge: what is stored is `gateway.stored.conversations`' business.
"""

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.batches.batches_api import read_json
from gateway.batches.files_api import json_response, list_object, route
from gateway.http.bodies import Bodies
from gateway.http.exchange import HttpRefusal
from gateway.limits import MAX_BODY_BYTES
from gateway.models.conversation import refuse
from gateway.openai.metadata import MAX_METADATA, Metadata, check_metadata
from gateway.openai.shapes import said
from gateway.stored.chats_api import ChangedMetadata
from gateway.stored.conversations import Conversations, item_not_found, items_of
from gateway.stored.responses_api import document_response, page_of, tenant_of

MAX_NEW_ITEMS = 20
_ITEMS = {"items": {"type": "object"}, "maxItems": MAX_NEW_ITEMS}


class CreateConversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations."""

    items: Annotated[list[Any] | None, said("Its first items, as `input` of a response.", **_ITEMS)] = None
    metadata: Annotated[Metadata | None, said("Given back.", maxProperties=MAX_METADATA)] = None


class NewItems(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[Any], said("Items, as `input` of a response. They get ids of this server's.", **_ITEMS)]


class ConversationsApi:
    """The routes of conversations. `can_store`: whether new ones are made here."""

    def __init__(self, conversations: Conversations, *, bodies: Bodies, can_store: bool) -> None:
        self._conversations = conversations
        self._bodies = bodies
        self._can_store = can_store

    def routes(self) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        one = "/v1/conversations/{conversation_id}"
        return [
            route("/v1/conversations", POST=self._create),
            route(one, GET=self._show, POST=self._change, DELETE=self._delete),
            route(f"{one}/items", GET=self._list_items, POST=self._add),
            route(f"{one}/items/{{item_id}}", GET=self._show_item, DELETE=self._remove),
        ]

    async def _create(self, request: Request) -> Response:
        asked = await read_json(request, CreateConversation, bodies=self._bodies, max_bytes=MAX_BODY_BYTES)
        if not self._can_store:
            raise HttpRefusal(
                "no conversations are stored here; send all of it as input",
                http_status=400,
                code="unsupported_endpoint",
            )
        _check_number(asked.items or [])
        check_metadata(asked.metadata or {})
        document = await self._conversations.create(
            tenant_of(request), items=asked.items or [], metadata=asked.metadata or {}
        )
        return document_response(document)

    async def _show(self, request: Request) -> Response:
        return document_response((await self._conversations.find(tenant_of(request), _id_in(request))).document)

    async def _change(self, request: Request) -> Response:
        asked = await read_json(request, ChangedMetadata, bodies=self._bodies)
        check_metadata(asked.metadata or {})
        return document_response(
            await self._conversations.change(tenant_of(request), _id_in(request), metadata=asked.metadata or {})
        )

    async def _delete(self, request: Request) -> Response:
        await self._conversations.delete(tenant_of(request), _id_in(request))
        return json_response({"id": _id_in(request), "object": "conversation.deleted", "deleted": True})

    async def _list_items(self, request: Request) -> Response:
        return page_of(request, await self._items(request), default="desc")

    async def _add(self, request: Request) -> Response:
        asked = await read_json(request, NewItems, bodies=self._bodies, max_bytes=MAX_BODY_BYTES)
        if not asked.items:
            refuse("items", f"a list of 1 to {MAX_NEW_ITEMS} items")
        _check_number(asked.items)
        items = await self._conversations.add(tenant_of(request), _id_in(request), items=asked.items)
        return json_response(list_object(items, has_more=False))

    async def _show_item(self, request: Request) -> Response:
        item_id = request.path_params["item_id"]
        for item in await self._items(request):
            if item["id"] == item_id:
                return json_response(item)
        raise item_not_found(item_id)

    async def _remove(self, request: Request) -> Response:
        item_id = request.path_params["item_id"]
        return document_response(await self._conversations.remove(tenant_of(request), _id_in(request), item_id=item_id))

    async def _items(self, request: Request) -> list[dict[str, Any]]:
        return items_of(await self._conversations.find(tenant_of(request), _id_in(request)))


def _check_number(items: list[Any]) -> None:
    if len(items) > MAX_NEW_ITEMS:
        refuse("items", f"a list of at most {MAX_NEW_ITEMS} items")


def _id_in(request: Request) -> str:
    conversation_id: str = request.path_params["conversation_id"]
    return conversation_id
