"""OpenAI's `/v1/files` over HTTP: what batches read and what they have written.

An edge. Files pass through in pieces; their content is not looked at here.
"""

import asyncio
import contextlib
import functools
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.access.keys import ApiKey
from gateway.batches.multipart import FormReader, boundary_of
from gateway.http.exchange import HttpRefusal
from gateway.limits import MAX_UPLOAD_S
from services.cluster.claimed_work import until_answered
from services.cluster.files import CHUNK_BYTES, FILE_TTL_S, MAX_FILES, MAX_PAGE, File, FilesFull, FileStore, new_id
from services.runtime.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    RequestCancelled,
    StoreUnavailable,
)

PURPOSE = "batch"
"""The purpose of files that clients send; those that batches write have `batch_output`."""
MAX_FILENAME_CHARS = 255
MAX_FIELD_BYTES = 256
"""The most for a field of the form that is not a file."""
MAX_FORM_BYTES = 64 * 1024
"""The most for a form without its file."""
MAX_UPLOADS = 8
"""The most uploads at once on this gateway."""
MAX_UPLOADS_OF_TENANT = 2
"""A tenant's share of them; one that sends slowly leaves room for others."""
MIN_TTL_S = 3600
RETRY_AFTER_S = 5.0
STORE_PATIENCE_S = 4.0
"""The time that Redis is given to answer: enough for one more try after one that timed out."""

T = TypeVar("T")

_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class FilesApi:
    """The routes of files. `max_file_bytes` bounds what a client sends as one file."""

    def __init__(self, files: FileStore, *, max_file_bytes: int) -> None:
        self._files = files
        self._max_file_bytes = max_file_bytes
        self._uploads: Counter[str] = Counter()
        """The running uploads, by tenant."""

    def routes(self) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        return [
            route("/v1/files", GET=self._list, POST=self._upload),
            route("/v1/files/{file_id}", GET=self._show, DELETE=self._delete),
            route("/v1/files/{file_id}/content", GET=self._content),
        ]

    async def _upload(self, request: Request) -> Response:
        boundary = boundary_of(request.headers.get("content-type", ""))
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_file_bytes + MAX_FORM_BYTES:
            raise self._too_large()
        tenant = _tenant(request)
        upload = _Upload(self._files, new_id("file-"), tenant, self._max_file_bytes)
        with self._upload_place(tenant):
            try:
                async with asyncio.timeout(MAX_UPLOAD_S):
                    file = await self._receive(FormReader(self._body(request), boundary), upload)
            except TimeoutError:
                await upload.drop()
                raise too_slow(MAX_UPLOAD_S) from None
            except BaseException:
                await upload.drop()
                raise
        return json_response(file_object(file))

    @contextlib.contextmanager
    def _upload_place(self, tenant: str) -> Iterator[None]:
        """Holds a place for an upload. Raises Overloaded or RateLimited if none is free."""
        if self._uploads.total() >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being sent to this gateway already", retry_after_s=RETRY_AFTER_S)
        if self._uploads[tenant] >= MAX_UPLOADS_OF_TENANT:
            raise RateLimited(
                f"a tenant may send at most {MAX_UPLOADS_OF_TENANT} files to a gateway at once",
                retry_after_s=RETRY_AFTER_S,
            )
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]

    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        num_bytes = 0
        try:
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > self._max_file_bytes + MAX_FORM_BYTES:
                    raise self._too_large()
                yield piece
        except ClientDisconnect:
            raise RequestCancelled("the client left") from None

    async def _receive(self, form: FormReader, upload: "_Upload") -> File:
        fields: dict[str, str] = {}
        filename: str | None = None
        while (part := await form.next_part()) is not None:
            if part.filename is not None and part.name == "file" and filename is None:
                filename = part.filename
                async for piece in form.data():
                    await upload.add(piece)
            elif part.filename is None and part.name in _FIELDS - fields.keys():
                fields[part.name] = await _short_text(form, part.name)
            else:
                raise InvalidRequest(
                    f"the form has a field {part.name[:64]!r} that is unknown, of another kind, or there twice",
                    field=part.name[:64],
                    code="invalid_form",
                )
        if fields.get("purpose") != PURPOSE:
            raise InvalidRequest(f"purpose must be {PURPOSE!r}", field="purpose", code="invalid_value")
        if filename is None:
            raise InvalidRequest("file is missing", field="file", code="missing_required_parameter")
        if not 1 <= len(filename) <= MAX_FILENAME_CHARS or not filename.isprintable():
            raise InvalidRequest(
                f"the name of the file must have 1 to {MAX_FILENAME_CHARS} printable characters",
                field="file",
                code="invalid_value",
            )
        return await upload.complete(filename, _ttl_s(fields))

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        limit = list_limit(query.get("limit"), default=MAX_PAGE)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", field="order", code="invalid_value")
        files, has_more = await self._files.page(
            _tenant(request),
            after=checked_after(query.get("after")),
            limit=limit,
            newest_first=order == "desc",
            purpose=query.get("purpose", ""),
        )
        return json_response(list_object([file_object(file) for file in files], has_more=has_more))

    async def _show(self, request: Request) -> Response:
        return json_response(file_object(await self._find(request)))

    async def _delete(self, request: Request) -> Response:
        file = await self._find(request)
        await self._files.delete(file.id, file.tenant)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        file = await self._find(request)
        headers = {"content-length": str(file.num_bytes)}
        return StreamingResponse(self._chunks(file), headers=headers, media_type="application/octet-stream")

    async def _chunks(self, file: File) -> AsyncGenerator[bytes, None]:
        for index in range(file.num_chunks):
            data = await heard(functools.partial(self._files.chunk, file.id, index))
            if data is None:
                # The client sees a body shorter than was said: no answer can be taken for the whole file.
                raise StoreUnavailable(f"a chunk of file {file.id} is gone")
            yield data

    async def _find(self, request: Request) -> File:
        return await find_file(self._files, request.path_params["file_id"], _tenant(request))

    def _too_large(self) -> HttpRefusal:
        return HttpRefusal(
            f"a file must have at most {self._max_file_bytes} bytes", http_status=413, code="request_too_large"
        )


class _Upload:
    """A file on its way into the store, in whole chunks."""

    def __init__(self, files: FileStore, file_id: str, tenant: str, max_bytes: int) -> None:
        self._files = files
        self._id = file_id
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._num_chunks = 0
        self._num_bytes = 0

    async def add(self, piece: bytes) -> None:
        """Raises HttpRefusal for a file that is too large or finds no room."""
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise HttpRefusal(
                f"a file must have at most {self._max_bytes} bytes", http_status=413, code="request_too_large"
            )
        self._buffer += piece
        while len(self._buffer) >= CHUNK_BYTES:
            await self._put(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    async def complete(self, filename: str, ttl_s: float) -> File:
        """Returns the file. Raises InvalidRequest for an empty one, StoreUnavailable where a part of it is gone."""
        if not self._num_bytes:
            raise InvalidRequest("the file is empty", field="file", code="empty_file")
        if self._buffer:
            await self._put(bytes(self._buffer))
        commit = functools.partial(
            self._files.commit,
            self._id,
            self._tenant,
            filename=filename,
            purpose=PURPOSE,
            num_chunks=self._num_chunks,
            num_bytes=self._num_bytes,
            ttl_s=ttl_s,
        )
        file = await heard(commit)
        if file is None:
            raise StoreUnavailable("Redis has forgotten a part of a file that was being sent")
        return file

    async def drop(self) -> None:
        """Drops all of it; what Redis cannot be told now expires by itself later."""
        if self._num_chunks:
            with contextlib.suppress(StoreUnavailable):
                await heard(lambda: self._files.delete(self._id, self._tenant))

    async def _put(self, data: bytes) -> None:
        self._num_chunks += 1
        try:
            await self._files.put_chunk(self._id, self._tenant, self._num_chunks - 1, data)
        except FilesFull as full:
            raise no_room(full, self._files) from None


async def heard(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a command until Redis answers, for a client that waits. Raises StoreUnavailable."""
    return await until_answered(call, timeout_s=STORE_PATIENCE_S)


def too_slow(limit_s: float) -> HttpRefusal:
    """Returns the error for a client whose body does not arrive."""
    return HttpRefusal(f"the body did not arrive within {limit_s:g} s", http_status=408, code="request_timeout")


def no_room(full: FilesFull, files: FileStore) -> HttpRefusal:
    """Returns the error for a client whose file or batch finds no room."""
    rules = {
        "files": f"a tenant may have at most {MAX_FILES} files: delete some",
        "tenant": f"a tenant's files may take at most {files.room.tenant_bytes} bytes: delete some",
        "all": "the files of all tenants take all the room that there is",
    }
    return HttpRefusal(rules[full.whose], http_status=413, code="storage_full")


async def find_file(files: FileStore, file_id: str, tenant: str, *, field: str = "id") -> File:
    """Returns a file of the tenant. Raises NotFound, for another's too."""
    file = await files.find(file_id) if is_id(file_id) else None
    if file is None or file.tenant != tenant:
        raise NotFound(f"there is no file {file_id[:64]!r}", field=field, code="file_not_found")
    return file


def file_object(file: File) -> dict[str, Any]:
    """Returns OpenAI's object of a file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_object(entries: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Returns OpenAI's object of a page."""
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }


def list_limit(said: str | None, *, default: int, most: int = MAX_PAGE) -> int:
    """Returns how many entries a page has; OpenAI's own maximum is cut to `most`. Raises InvalidRequest."""
    if said is None:
        return default
    if not re.fullmatch("[0-9]{1,5}", said) or not 1 <= int(said) <= 10_000:
        raise InvalidRequest("limit must be an integer from 1 to 10000", field="limit", code="invalid_value")
    return min(int(said), most)


def checked_after(said: str | None) -> str:
    """Returns the id after which a page begins, or nothing. Raises InvalidRequest."""
    if said is not None and not is_id(said):
        raise InvalidRequest("after must be the id of an entry", field="after", code="invalid_value")
    return said or ""


def is_id(text: str) -> bool:
    """Returns whether a text may be an id, so that a key can be made of it."""
    return 0 < len(text) <= 64 and text.isascii() and text.replace("-", "").replace("_", "").isalnum()


def route(path: str, **by_method: Callable[[Request], Awaitable[Response]]) -> Route:
    """Returns one route for a path, so that a 405 names all its methods."""

    async def serve(request: Request) -> Response:
        return await by_method["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, serve, methods=list(by_method))


def json_response(value: Mapping[str, Any]) -> Response:
    """Returns a whole answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def _tenant(request: Request) -> str:
    key: ApiKey = request.state.key
    return key.tenant


async def _short_text(form: FormReader, name: str) -> str:
    value = b""
    async for piece in form.data():
        value += piece
        if len(value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} must have at most {MAX_FIELD_BYTES} bytes", field=name, code="invalid_value")
    return value.decode(errors="replace")


def _ttl_s(fields: Mapping[str, str]) -> float:
    """Returns how long the file is kept, from `expires_after`. Raises InvalidRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return FILE_TTL_S
    if anchor != "created_at":
        raise InvalidRequest(
            "expires_after.anchor must be 'created_at'", field="expires_after.anchor", code="invalid_value"
        )
    number = int(seconds) if seconds and seconds.isascii() and seconds.isdecimal() else 0
    return checked_ttl_s(number, field="expires_after.seconds")


def checked_ttl_s(seconds: int, *, field: str) -> int:
    """Returns a life that a client asks for a file. Raises InvalidRequest."""
    if not MIN_TTL_S <= seconds <= FILE_TTL_S:
        raise InvalidRequest(
            f"{field} must be an integer from {MIN_TTL_S} to {round(FILE_TTL_S)}", field=field, code="invalid_value"
        )
    return seconds
