"""The ids of answers over HTTP: every answer has one, by which its client and the log can speak of it.

An accepted request has its own id. Anything else, such as a page or a refusal, has the name that its client gave it, or
an id that is drawn.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from gateway.requests.seeds import refused_id

HEADER = b"x-request-id"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def with_ids(app: App) -> App:
    """Returns the application with an id in each answer that has none."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and not _has_id(message["headers"]):
                asked = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER), None)
                message["headers"] = [*message["headers"], (HEADER, refused_id(asked).encode())]
            await send(message)

        await app(scope, receive, send_named)

    return named


def _has_id(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == HEADER for name, _ in headers)
