"""Answers to what is no request of ours, which the HTTP server gives before any route is known."""

from typing import NamedTuple

MAX_HEAD_BYTES = 16 * 1024
"""The most for request line and headers together."""
MAX_HEADERS = 100


class Refusal(NamedTuple):
    """An answer to what is no request of ours. `status` 503 asks the client to come again."""

    status: int
    message: str
    code: str
    kind: str = "invalid_request_error"


NOT_HTTP = Refusal(400, "the request is not valid HTTP", "invalid_http")
LARGE_HEAD = Refusal(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes", "request_head_too_large")
MANY_HEADERS = Refusal(431, f"the request has more than {MAX_HEADERS} headers", "request_head_too_large")
OTHER_VERSION = Refusal(505, "the request is neither HTTP/1.1 nor HTTP/1.0", "http_version_not_supported")
MUCH_FRAMING = Refusal(400, "the body has too many bytes in chunk sizes, chunk extensions and trailers", "invalid_http")
NO_ROOM = Refusal(
    503, "the bodies of requests that are being sent take all the memory that they may", "server_overloaded",
    kind="overloaded_error",
)  # fmt: skip
MANY_CONNECTIONS = Refusal(503, "too many connections", "server_overloaded", kind="overloaded_error")
