"""The answers of the chat and completions APIs as types: what the writers encode, and what the document describes."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.types import FinishReason

ChatFinishReason = Literal[FinishReason, "tool_calls"]
"""Why a chat's answer ended: also for its calls."""


class Exact(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Has these members and no other, and so has its schema in the document."""


class _Answer(Exact, kw_only=True):
    """The members that all parts of an answer begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | UnsetType = UNSET


class PromptTokensDetails(Exact, kw_only=True):
    """Where a prompt's pages came from."""

    cached_tokens: int


class CompletionTokensDetails(Exact, kw_only=True):
    """The tokens of a chat answer that are reasoning."""

    reasoning_tokens: int


class TokenUsage(Exact, kw_only=True):
    """Tokens of all answers together; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(Exact, kw_only=True):
    """Log-probabilities of a completion's tokens, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Candidate(Exact, kw_only=True):
    """A token at a place of a prompt."""

    logprob: float
    decoded_token: str


PromptCandidates = list[dict[str, Candidate] | None]
"""The likeliest tokens at each place of a prompt and the prompt's own, by token id; None for the first place."""


class CompletionChoice(Exact, kw_only=True):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptCandidates | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Completion(_Answer, kw_only=True):
    """A whole answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage
    service_tier: Literal["default"] | UnsetType = UNSET


class CompletionChunkChoice(Exact, kw_only=True):
    """The next part of an answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionChunk(_Answer, kw_only=True):
    """One event of a streamed completion. The one with `usage` alone, where it was asked for, has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET


class TopLogprob(Exact, kw_only=True):
    """A candidate for a token's place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Exact, kw_only=True):
    """Log-probabilities of a chat answer's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Exact, kw_only=True):
    """`arguments` is JSON in a text."""

    name: str
    arguments: str


class ToolCall(Exact, kw_only=True):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Exact, kw_only=True):
    """The model's message. `content` is null where it only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Exact, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Answer, kw_only=True):
    """A whole answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptCandidates | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class FunctionDelta(Exact, kw_only=True):
    """The new part of a called function."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Exact, kw_only=True):
    """The new part of a call; the first one has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(Exact, kw_only=True):
    """The new part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Exact, kw_only=True):
    """The next part of an answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(_Answer, kw_only=True):
    """One event of a streamed chat answer. The one with `usage` alone, where it was asked for, has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class InputTokensDetails(Exact, kw_only=True):
    """Where the pages of a response's input came from."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Exact, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Response(Exact, kw_only=True):
    """OpenAI's response object. Members without a meaning here are repeated as they were sent."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    conversation: dict[str, str] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    system_fingerprint: str
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a streamed response; `type` says what else is in it."""

    type: str
    sequence_number: int
