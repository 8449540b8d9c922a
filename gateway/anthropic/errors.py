"""Errors as Anthropic's clients read them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.anthropic.answers import MessageError, MessageErrorDetail
from gateway.anthropic.request import in_own_words

_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KINDS_OF_TYPES: Mapping[str, str] = {
    "server_error": "api_error",
    "overloaded_error": "overloaded_error",
    "rate_limit_error": "rate_limit_error",
}
"""What OpenAI's types are here, where a stream has begun and no status says more."""


def error_body(openai_error: Mapping[str, Any], http_status: int) -> bytes:
    """Returns the body of an answer with this status, made from OpenAI's error object."""
    kind = _KINDS.get(http_status, "invalid_request_error" if http_status < 500 else "api_error")
    return msgspec.json.encode(_error(openai_error, kind))


def error_event(openai_error: Mapping[str, Any]) -> bytes:
    """Returns the data of the event that ends a stream which cannot continue."""
    return msgspec.json.encode(_error(openai_error, _KINDS_OF_TYPES.get(openai_error["error"]["type"], "api_error")))


def _error(openai_error: Mapping[str, Any], kind: str) -> MessageError:
    return MessageError(error=MessageErrorDetail(type=kind, message=in_own_words(openai_error["error"]["message"])))
