"""OpenAI's `/v1/batches` over HTTP: files of requests that are answered when there is time.

An edge: what is asked for is noted in the store, and `gateway.batches.runner` does it, on this gateway or another.
"""

import asyncio
import functools
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.keys import ApiKey
from gateway.batches.files_api import (
    PURPOSE,
    checked_after,
    checked_ttl_s,
    find_file,
    heard,
    is_id,
    json_response,
    list_limit,
    list_object,
    no_room,
    route,
    too_slow,
)
from gateway.batches.rows import ENDPOINTS, has_repeats
from gateway.http.bodies import Bodies, Claim
from gateway.http.exchange import HttpRefusal, check_json_type
from gateway.limits import MAX_BODY_READ_S
from gateway.wishes import read_residency
from services.cluster.batch_scripts import MAX_ACTIVE, Reply, Status
from services.cluster.batches import Batch, BatchRefused, BatchStore, Order
from services.cluster.files import FILE_TTL_S, FilesFull, FileStore, new_id
from services.runtime.errors import InvalidRequest, NotFound, RateLimited, RequestCancelled
from services.scheduling.regions import Residency

WINDOWS_S = {"24h": 86_400}
MAX_REQUEST_BYTES = 64 * 1024
DEFAULT_LIST_LIMIT = 20
MAX_LIST_LIMIT = 100
RETRY_AFTER_S = 60.0

Body = TypeVar("Body")

MetadataKey = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """How long files are kept."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, msgspec.Meta(description="A file with the purpose `batch`.")]
    endpoint: Annotated[
        str, msgspec.Meta(description="What every row asks.", extra_json_schema={"enum": sorted(ENDPOINTS)})
    ]
    completion_window: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*WINDOWS_S]})]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesApi:
    """The routes of batches. `on_change` is told the id of each that was made or is to be ended.

    `residency_of` gives the regions to which a tenant's request is held that asks for some; see `FrontDoor.residency`.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        *,
        bodies: Bodies,
        on_change: Callable[[str], None],
        residency_of: Callable[[str, Residency], Residency],
    ) -> None:
        self._residency_of = residency_of
        self._bodies = bodies
        self._batches = batches
        self._files = files
        self._on_change = on_change

    def routes(self) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        return [
            route("/v1/batches", GET=self._list, POST=self._create),
            route("/v1/batches/{batch_id}", GET=self._show),
            route("/v1/batches/{batch_id}/cancel", POST=self._cancel),
        ]

    async def _create(self, request: Request) -> Response:
        key: ApiKey = request.state.key
        residency = self._residency_of(key.tenant, read_residency(request.headers.get))
        asked = await read_json(request, CreateBatch, bodies=self._bodies)
        if asked.endpoint not in ENDPOINTS:
            raise _invalid("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        if asked.completion_window not in WINDOWS_S:
            raise _invalid("completion_window", f"must be one of {', '.join(WINDOWS_S)}")
        ttl_s = round(FILE_TTL_S)
        if asked.output_expires_after is not None:
            ttl_s = checked_ttl_s(asked.output_expires_after.seconds, field="output_expires_after.seconds")
        file = await find_file(self._files, asked.input_file_id, key.tenant, field="input_file_id")
        if file.purpose != PURPOSE:
            raise _invalid("input_file_id", f"must be of a file with the purpose {PURPOSE!r}")
        order = Order(
            tenant=key.tenant,
            key_digest=key.sha256,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            window_s=WINDOWS_S[asked.completion_window],
            window=asked.completion_window,
            metadata="" if asked.metadata is None else msgspec.json.encode(asked.metadata).decode(),
            output_ttl_s=ttl_s,
            regions=",".join(residency),
        )
        make = functools.partial(
            self._batches.create, new_id("batch_"), order, output_id=new_id("file-"), error_id=new_id("file-")
        )
        try:
            batch = await heard(make)
        except FilesFull as full:
            raise no_room(full, self._files) from None
        except BatchRefused:
            raise RateLimited(
                f"a tenant may have at most {MAX_ACTIVE} batches that are not over", retry_after_s=RETRY_AFTER_S
            ) from None
        self._on_change(batch.id)
        return json_response(batch_object(batch))

    async def _list(self, request: Request) -> Response:
        key: ApiKey = request.state.key
        query = request.query_params
        batches, has_more = await self._batches.page(
            key.tenant,
            after=checked_after(query.get("after")),
            limit=list_limit(query.get("limit"), default=DEFAULT_LIST_LIMIT, most=MAX_LIST_LIMIT),
        )
        return json_response(list_object([batch_object(batch) for batch in batches], has_more=has_more))

    async def _show(self, request: Request) -> Response:
        return json_response(batch_object(await self._find(request)))

    async def _cancel(self, request: Request) -> Response:
        with self._bodies.claim(request.state.key.tenant) as claim:
            await _body(request, claim, max_bytes=MAX_REQUEST_BYTES)
        batch = await self._find(request)
        reply = await self._batches.cancel(batch.id, batch.order.tenant)
        batch = await self._find(request)
        if reply is not Reply.DONE:
            raise HttpRefusal(
                f"a batch that is {batch.status} cannot be cancelled", http_status=409, code="batch_not_cancellable"
            )
        self._on_change(batch.id)
        return json_response(batch_object(batch))

    async def _find(self, request: Request) -> Batch:
        """Returns a batch of the tenant. Raises NotFound, for another's too."""
        key: ApiKey = request.state.key
        batch_id = request.path_params["batch_id"]
        batch = await self._batches.find(batch_id) if is_id(batch_id) else None
        if batch is None or batch.order.tenant != key.tenant:
            raise NotFound(f"there is no batch {batch_id[:64]!r}", field="batch_id", code="batch_not_found")
        return batch


def batch_object(batch: Batch) -> dict[str, Any]:
    """Returns OpenAI's object of a batch."""
    errors = {"object": "list", "data": msgspec.json.decode(batch.errors)} if batch.errors else None
    times_s = {f"{name}_at": batch.times_s.get(name) for name in ("created", "expires", *_STAMPED)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.order.endpoint,
        "errors": errors,
        "input_file_id": batch.order.input_file_id,
        "completion_window": batch.order.window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        **times_s,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": msgspec.json.decode(batch.order.metadata) if batch.order.metadata else None,
    }


_FIELD = re.compile(r"`(?:\$\.)?([A-Za-z_.]+)[^`]*`$")
_STAMPED = tuple(status.value for status in Status if status is not Status.VALIDATING)


async def read_json(
    request: Request, body_type: type[Body], *, bodies: Bodies, max_bytes: int = MAX_REQUEST_BYTES
) -> Body:
    """Returns the body of a request. Raises HttpRefusal for one that is not taken, InvalidRequest for a wrong one."""
    check_json_type(request.headers.get("content-type", ""))
    receive = functools.partial(_body, request, max_bytes=max_bytes)
    key: ApiKey = request.state.key
    return await bodies.take(receive, functools.partial(_parse, body_type=body_type), tenant=key.tenant)


def _parse(body: bytes, *, body_type: type[Body]) -> Body:
    try:
        asked = msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        # Its words end with a place, such as `$.metadata[...]`, or with a member's name.
        what = str(error).partition(" - at `")[0]
        place = _FIELD.search(str(error))
        field = "" if place is None else place[1]
        raise InvalidRequest(f"{field}: {what}" if field else what, field=field or None, code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from error
    if has_repeats(body.decode()):
        raise InvalidRequest("a member of the body appears twice", code="duplicate_key")
    return asked


def _invalid(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {rule}", field=field, code="invalid_value")


async def _body(request: Request, claim: Claim, *, max_bytes: int) -> bytes:
    """Returns the whole body. Raises HttpRefusal for one that is too large or does not come."""
    body = bytearray()
    _check_size(int(request.headers.get("content-length", 0)), max_bytes)
    try:
        async with asyncio.timeout(MAX_BODY_READ_S):
            async for piece in request.stream():
                _check_size(len(body) + len(piece), max_bytes)
                claim.add(len(piece))
                body += piece
    except TimeoutError:
        raise too_slow(MAX_BODY_READ_S) from None
    except ClientDisconnect:
        raise RequestCancelled("the client left") from None
    return bytes(body)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise HttpRefusal(f"the body must have at most {max_bytes} bytes", http_status=413, code="request_too_large")
