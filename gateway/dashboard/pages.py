"""The dashboard over HTTP: one page with its files, and the data that it reads.

The page and its files say nothing about a cluster, so everybody may have them; the data are an operator's. Nothing is
loaded from elsewhere, and nothing in the page is script or style that is not in a file of its own: the policy in the
header `content-security-policy` has browsers see to that.
"""

import asyncio
import contextlib
import functools
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib import resources
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.access.keys import ApiKey
from gateway.dashboard.feed import Feed
from gateway.dashboard.series import SECONDS
from gateway.dashboard.waterfall import bars, parts, reasons
from gateway.http.connections import connection_of
from gateway.observability.history import AnswerStory, AttemptStory, History, Query, Row
from services.runtime.errors import InvalidRequest, NotFound

PAGE_PATH = "/dashboard"
MAX_ROWS = 200
MAX_QUERY_CHARS = 256
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _File(NamedTuple):
    body: bytes
    media_type: str


class Dashboard:
    """The routes of the page. Reads its files once, from the installed package."""

    def __init__(self, feed: Feed, history: History) -> None:
        self._feed = feed
        self._history = history
        self._files = _read_files()

    def is_open(self, path: str) -> bool:
        """Returns whether a path is the page itself or one of its files, which need no key."""
        return path in self._files or path == f"{PAGE_PATH}/"

    def routes(self, *, api_port: Callable[[], int], has_api: bool) -> list[Route]:
        """Returns all routes. `has_api`: the public API is at the same address; otherwise it is at `api_port`."""
        files = [
            Route(path, functools.partial(_send_file, file), methods=["GET"]) for path, file in self._files.items()
        ]
        return [
            *files,
            Route(f"{PAGE_PATH}/", _send_to_page),
            Route(f"{PAGE_PATH}/data", functools.partial(self._show_data, api_port=api_port, has_api=has_api)),
            Route(f"{PAGE_PATH}/events", _Events(self._feed), methods=["GET"]),
            Route(f"{PAGE_PATH}/requests", self._list_requests),
            Route(f"{PAGE_PATH}/requests/{{name}}", self._show_request),
        ]

    async def _show_data(self, request: Request, *, api_port: Callable[[], int], has_api: bool) -> Response:
        asked = request.query_params
        _check_names(asked, ("seconds",))
        seconds = _number(asked, "seconds", default=SECONDS, least=1, most=SECONDS)
        assert seconds is not None
        return _json({**self._feed.snapshot(seconds), "api": {"is_here": has_api, "port": api_port()}})

    async def _list_requests(self, request: Request) -> Response:
        """Answers the ended requests, latest first; what is asked for is a `Query`."""
        asked = request.query_params
        _check_names(asked, Query.__struct_fields__)
        texts = {name: asked[name] for name in asked if name not in ("before", "limit")}
        for name, text in texts.items():
            if len(text) > MAX_QUERY_CHARS:
                raise InvalidRequest(f"{name} must have at most {MAX_QUERY_CHARS} characters", field=name)
        limit = _number(asked, "limit", default=50, least=1, most=MAX_ROWS)
        assert limit is not None
        query = Query(**texts, limit=limit, before=_number(asked, "before", default=None, least=0, most=2**53))
        rows, has_more = self._history.find(query)
        return _json({"requests": rows, "has_more": has_more, "kept": len(self._history)})

    async def _show_request(self, request: Request) -> Response:
        """Answers one ended request by its id, or by its number after an @: ids may be used again."""
        name: str = request.path_params["name"]
        number = re.fullmatch(r"@([0-9]{1,15})", name)
        found = self._history.story(number=int(number[1])) if number else self._history.story(name)
        if found is None:
            raise NotFound("no such request is remembered here: it still runs, or others have taken its place")
        return _json(_story(*found))


class _Events:
    """An ASGI endpoint: an update each second, as server-sent events, until the watcher leaves."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # which would wait for an end that does not come
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        connection, has_left = connection_of(scope), False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            task.cancel()

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        headers.append((b"x-accel-buffering", b"no"))
        connection.on_lost = leave
        try:
            async with contextlib.aclosing(self._feed.updates(_client_of(scope))) as updates:
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                async for update in updates:
                    if start:
                        await send(start)
                        start = {}
                    body = b"data: " + update + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                if start:
                    await send(start)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not has_left or task.uncancel():
                raise
        finally:
            connection.on_lost = None


def _client_of(scope: Scope) -> str:
    """Returns the client whose places count together: a key, or an address where no key was asked for."""
    key: ApiKey | None = scope.get("state", {}).get("key")
    if key is not None and key.sha256:
        return key.sha256
    return str(scope["client"][0]) if scope.get("client") else ""


def _read_files() -> dict[str, _File]:
    """Returns the files of the page by their paths; the page itself is at `PAGE_PATH`."""
    files = {}
    for entry in resources.files("gateway.dashboard").joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        path = PAGE_PATH if entry.name == "index.html" else f"{PAGE_PATH}/{entry.name}"
        files[path] = _File(entry.read_bytes(), _TYPES[suffix])
    return files


async def _send_file(file: _File, request: Request) -> Response:
    return Response(file.body, headers=_HEADERS, media_type=file.media_type)


async def _send_to_page(request: Request) -> Response:
    return RedirectResponse(f"..{PAGE_PATH}", 308)


def _story(row: Row, answers: list[AnswerStory]) -> dict[str, Any]:
    return {
        "request": row,
        "answers": [
            {
                "first_token_us": answer.first_token_us,
                "tpot_us": answer.tpot_us or None,
                "tokens": answer.tokens,
                "ended_us": answer.ended_us,
                "bars": bars(answer),
                "attempts": [_attempt(attempt, row, answer) for attempt in answer.attempts],
            }
            for answer in answers
        ],
    }


def _since_choice(attempt: AttemptStory, answer: AnswerStory, token_us: int | None) -> int | None:
    """Returns when a token came since the attempt was decided on, without earlier waits; None: not by this attempt."""
    if token_us is None:
        return None
    # The last attempt that was begun before it gave it: the others had failed.
    begun = [each for each in answer.attempts if each.began_us <= token_us]
    return token_us - attempt.began_us if begun and attempt is begun[-1] else None


def _attempt(attempt: AttemptStory, row: Row, answer: AnswerStory) -> dict[str, Any]:
    return {
        "decode": attempt.decode,
        "prefill": attempt.prefill,
        "reason": attempt.reason,
        "why": reasons(attempt, row.prompt_tokens),
        "predicted_ttft_us": attempt.predicted_ttft_us if attempt.reason not in ("move", "rebalance") else None,
        "actual_ttft_us": _since_choice(attempt, answer, answer.first_token_us),
        "predicted_second_us": attempt.predicted_second_us or None,
        "actual_second_us": _since_choice(attempt, answer, answer.second_token_us),
        "predicted_exposed_us": attempt.predicted_exposed_us,
        "parts_us": parts(attempt),
        "price_us": attempt.price_us,
        "waited_us": attempt.waited_us,
        "pages": attempt.num_pages,
        "bytes": attempt.num_bytes,
        "exposed_us": attempt.exposed_us,
        "transport": attempt.transport,
        "failure": attempt.failure,
    }


def _check_names(asked: Mapping[str, str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise InvalidRequest(f"there is no parameter {unknown[0][:64]!r}; there are {', '.join(known)}", field="query")


def _number(asked: Mapping[str, str], name: str, *, default: int | None, least: int, most: int) -> int | None:
    text = asked.get(name)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,16}", text) or not least <= int(text) <= most:
        raise InvalidRequest(f"{name} must be a whole number from {least} to {most}", field=name)
    return int(text)


def _json(document: Any) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(msgspec.json.encode(document), headers=headers, media_type="application/json")
