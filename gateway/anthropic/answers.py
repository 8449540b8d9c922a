"""What Anthropic's Messages API answers, as types: a message, its usage, an event, an error."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.openai.answers import Exact

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(Exact):
    """How many of a message's tokens were thought."""

    thinking_tokens: int


class MessageUsage(Exact, kw_only=True):
    """What a message used; the prompt's tokens are those of `input_tokens` and of `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    service_tier: Literal["standard"] | UnsetType = "standard"


class AnthropicMessage(Exact, kw_only=True):
    """An answer: blocks of `text`, `thinking` and `tool_use`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """One event of a streamed message; `type` says what else is in it."""

    type: str


class MessageErrorDetail(Exact):
    """What is wrong."""

    type: str
    message: str


class MessageError(Exact, kw_only=True):
    """The error object of this API."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail


class CountedTokens(Exact):
    """The number of a conversation's tokens."""

    input_tokens: int
