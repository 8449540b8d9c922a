"""Stored responses over HTTP: fetched, followed, cancelled and deleted by their ids, with their input.

An edge: which response is kept, and what becomes of one in the background, is `gateway.stored.keeping`'s business.
"""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.batches.files_api import checked_after, json_response, list_limit, list_object, route
from gateway.http.exchange import HttpRefusal
from gateway.stored.keeping import ResponseKeeper, not_found, shown
from services.cluster.answers import StoredAnswer
from services.runtime.errors import InvalidRequest

DEFAULT_LIST_LIMIT = 20
MAX_LIST_LIMIT = 100


class ResponsesApi:
    """The routes of stored responses. `keeper` None: none are stored here, and each is 404."""

    def __init__(self, keeper: ResponseKeeper | None) -> None:
        self._keeper = keeper

    def routes(self) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        return [
            route("/v1/responses/{response_id}", GET=self._show, DELETE=self._delete),
            route("/v1/responses/{response_id}/cancel", POST=self._cancel),
            route("/v1/responses/{response_id}/input_items", GET=self._list_input),
        ]

    async def _show(self, request: Request) -> Response:
        keeper, found = await self._found(request)
        after = _starting_after(request.query_params.get("starting_after"))
        streams = request.query_params.get("stream", "false")
        if streams not in ("true", "false"):
            raise InvalidRequest("stream must be true or false", field="stream", code="invalid_value")
        if streams == "false":
            if after >= 0:
                raise InvalidRequest("starting_after needs stream=true", field="starting_after", code="invalid_value")
            return document_response(shown(found))
        if not found.has_events:
            raise InvalidRequest(
                "only a response that was made with background and stream has events that are kept",
                field="stream",
                code="invalid_value",
            )
        events = keeper.follow(tenant_of(request), request.path_params["response_id"], first=after + 1)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")

    async def _delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if self._keeper is None or not await self._keeper.delete(tenant_of(request), response_id):
            raise not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        keeper, found = await self._found(request)
        if not found.is_background:
            raise HttpRefusal(
                "only a response in the background can be cancelled", http_status=400, code="response_not_background"
            )
        await keeper.cancel(tenant_of(request), request.path_params["response_id"], found=found)
        _, found = await self._found(request)
        return document_response(shown(found))

    async def _list_input(self, request: Request) -> Response:
        _, found = await self._found(request)
        return page_of(request, msgspec.json.decode(found.input), default="desc")

    async def _found(self, request: Request) -> tuple[ResponseKeeper, StoredAnswer]:
        """Returns a response of the tenant. Raises NotFound, for another's too."""
        response_id = request.path_params["response_id"]
        found = None if self._keeper is None else await self._keeper.find(tenant_of(request), response_id)
        if self._keeper is None or found is None:
            raise not_found(response_id)
        return self._keeper, found


def is_ascending(request: Request, *, default: str) -> bool:
    """Returns whether the query asks for the oldest first. Raises InvalidRequest."""
    order = request.query_params.get("order", default)
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order", code="invalid_value")
    return order == "asc"


def page_of(request: Request, entries: list[dict[str, Any]], *, default: str) -> Response:
    """Returns the part that the query asks for of a list, which has the oldest first. Raises InvalidRequest.

    `default`: the order where the query names none, `asc` or `desc`.
    """
    query = request.query_params
    if not is_ascending(request, default=default):
        entries.reverse()
    after = checked_after(query.get("after"))
    if after:
        ids = [entry["id"] for entry in entries]
        entries = entries[ids.index(after) + 1 :] if after in ids else []
    limit = list_limit(query.get("limit"), default=DEFAULT_LIST_LIMIT, most=MAX_LIST_LIMIT)
    return json_response(list_object(entries[:limit], has_more=len(entries) > limit))


def tenant_of(request: Request) -> str:
    """Returns the tenant of the caller's key."""
    tenant: str = request.state.key.tenant
    return tenant


def document_response(document: bytes) -> Response:
    """Returns a whole answer that is JSON already."""
    return Response(document, media_type="application/json")


def _starting_after(said: str | None) -> int:
    """Returns the number of the last event that a client has, -1 where it has none. Raises InvalidRequest."""
    if said is None:
        return -1
    if not re.fullmatch("[0-9]{1,9}", said):
        raise InvalidRequest(
            "starting_after must be the number of an event", field="starting_after", code="invalid_value"
        )
    return int(said)
