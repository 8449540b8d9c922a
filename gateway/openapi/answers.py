"""What the HTTP API answers, as types: for the OpenAPI document, and for tests that hold answers against them.

Nothing is built from them: the writers of `gateway.openai` write bytes, as every token goes through them.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.topology.troubles import Kind


class _Exact(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Has these members and no other, so that a member that is not described here is found by a test."""


class ErrorDetail(_Exact):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Error(_Exact):
    """OpenAI's error object. `code` tells causes apart, `param` names the field of the request, if it was one."""

    error: ErrorDetail


class PromptTokensDetails(_Exact):
    """Where a prompt's pages came from."""

    cached_tokens: int


class CompletionTokensDetails(_Exact):
    """Tokens of a chat answer that were thought and not said."""

    reasoning_tokens: int


class TokenUsage(_Exact):
    """Tokens of all answers together; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(_Exact):
    """Log-probabilities of a completion's tokens, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Candidate(_Exact):
    """A token at a place of a prompt."""

    logprob: float
    decoded_token: str


class CompletionChoice(_Exact):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Candidate] | None] | UnsetType = UNSET


class Completion(_Exact):
    """A whole answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    service_tier: Literal["default"] | UnsetType = UNSET


class CompletionChunkChoice(_Exact):
    """The next part of an answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(_Exact):
    """One event of a streamed completion. The one with `usage` alone, where it was asked for, has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET


class TopLogprob(_Exact):
    """A candidate for a token's place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Exact):
    """Log-probabilities of a chat answer's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(_Exact):
    """`arguments` is JSON in a text."""

    name: str
    arguments: str


class ToolCall(_Exact):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Exact):
    """What the model says. `content` is null where it only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_Exact):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Exact):
    """A whole answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: Literal["default"] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Candidate] | None] | UnsetType = UNSET


class FunctionDelta(_Exact):
    """What is new of a called function."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(_Exact):
    """What is new of a call; its first part has id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(_Exact):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(_Exact):
    """The next part of an answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(_Exact):
    """One event of a streamed chat answer. The one with `usage` alone, where it was asked for, has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET


class Response(msgspec.Struct, kw_only=True):
    """OpenAI's response object. Members without a meaning here are given back as they were sent."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    metadata: dict[str, str]
    system_fingerprint: str


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a streamed response; `type` says what else is in it."""

    type: str
    sequence_number: int


class InputTokens(_Exact):
    """How many tokens the input of a response would have."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class StoredFile(_Exact):
    """A file that a batch reads, or has written."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(_Exact):
    """A page of files."""

    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(_Exact):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RowCounts(_Exact):
    """Rows of a batch."""

    total: int
    completed: int
    failed: int


class StoredBatch(_Exact):
    """A file of requests that are answered when there is time."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int | None
    expires_at: int | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RowCounts
    metadata: dict[str, str] | None


class BatchList(_Exact):
    """A page of batches."""

    object: Literal["list"]
    data: list[StoredBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DashboardPage(msgspec.Struct):
    """What the dashboard's page reads; made for it alone, and changed with it."""


class Tokens(_Exact):
    """Token ids of a text or a conversation, and the most tokens that the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(_Exact):
    """The text of token ids."""

    prompt: str


class Model(_Exact):
    """A model under one of its names; `root` is its own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    sampling_defaults: dict[str, float]
    """For requests that do not say it, by the names of the fields."""


class ModelList(_Exact):
    """The models that the caller's key allows."""

    object: Literal["list"]
    data: list[Model]


class Health(_Exact):
    """The process is alive."""

    status: Literal["alive"]


class Readiness(_Exact):
    """Whether requests can be served."""

    status: Literal["ready", "not ready"]


class Pages(_Exact):
    """KV pages of a worker by state; total = free + cached + reserved + used."""

    total: int
    free: int
    cached: int
    reserved: int
    used: int


class Gpu(_Exact):
    """What a GPU's own figures amount to."""

    state: Literal["ok", "degraded", "out"]
    weight: float
    reasons: list[str]


class Circuit(_Exact):
    """Why a worker gets no work, or should get none; `num_openings`: how often that was lately."""

    state: Literal["suspected", "open", "half_open"]
    cause: Literal["slow", "silent", "erring", "gpu"]
    words: str
    figures: dict[str, float]
    for_s: float
    num_openings: int


class Speculation(_Exact):
    """Tokens that were proposed, and those of them that were what the model chose."""

    proposed: int
    accepted: int


class HostTier(_Exact):
    """Cached pages in the memory of a worker's host; what moved is counted since the worker started."""

    total: int
    free: int
    held: int
    stored: int
    loaded: int
    dropped: int


class WorkerCounts(_Exact):
    """What a worker has counted since it started: `speculation` by where tokens are from, `preemptions` by how."""

    speculation: dict[str, Speculation]
    preemptions: dict[str, int]
    host_tier: HostTier | None


class Worker(_Exact):
    """One worker process as this gateway sees it."""

    id: str
    role: Literal["prefill", "decode"]
    pid: int
    host: str
    address: str
    incarnation: str
    state: Literal["starting", "ready", "draining", "lost", "left_out"]
    model: str
    exact: bool
    arithmetic: str
    identity: dict[str, str]
    left_out: str
    unreachable: str
    layout: str
    tensor_parallel: int
    pipeline_parallel: int
    version: str
    clock_ahead_s: float | None
    channels: dict[str, str]
    pages: Pages
    running: int
    waiting: int
    gpu: Gpu | None
    circuit: Circuit | None
    counts: WorkerCounts | None


class CutPair(_Exact):
    """Workers between which pages keep failing to go; `suspected`: the way is used, since there is no better one."""

    prefill_id: str
    decode_id: str
    state: Literal["suspected", "open", "half_open"]
    words: str
    for_s: float


class RequestCounts(_Exact):
    """Answers of this gateway."""

    queued: int
    running: int


class RedisState(_Exact):
    """Redis as this gateway reaches it; `last_failure` is empty before the first."""

    available: bool
    round_trip_s: float
    last_failure: str


class GoneWorker(_Exact):
    """A worker that vanished without a word."""

    id: str
    role: Literal["prefill", "decode"]
    model: str
    host: str
    address: str
    since_unix_s: float


class Trouble(_Exact):
    """One thing that is wrong, why, and what to do about it."""

    kind: Kind
    subject: str
    cause: str
    remedy: str
    since_unix_s: float


class ClusterState(_Exact):
    """The cluster as this gateway sees it now. `expected` are numbers of workers by role, where they are given."""

    version: str
    expected: dict[str, int]
    gone: list[GoneWorker]
    troubles: list[Trouble]
    redis: RedisState
    workers: list[Worker]
    cut_pairs: list[CutPair]
    requests: RequestCounts
    prefill: str
