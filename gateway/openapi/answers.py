"""What the HTTP API answers beside OpenAI's texts, as types: for the OpenAPI document, and for tests of the answers.

The answers of the chat and completions APIs are `gateway.openai.answers`, which their writers encode.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.openai.answers import ChatCompletion, Exact
from gateway.requests.rebalancing import RebalancingState
from gateway.requests.turns import ModelState, TurnsState
from gateway.topology.troubles import Kind
from services.cluster.placements import ShownState, State
from services.runtime.background_tasks import FailingTask
from services.runtime.worker_state import WorkerState
from services.scheduling.pools import Pool


class ErrorDetail(Exact):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Exact):
    """OpenAI's error object. `code` tells causes apart, `param` names the field of the request, if it was one."""

    error: ErrorDetail


class InputTokens(Exact):
    """The number of tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class StoredFile(Exact):
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


class FileList(Exact):
    """A page of files."""

    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Exact):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class DeletedResponse(Exact):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Conversation(Exact):
    """Items that responses continue and add to."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Exact):
    """A conversation that was deleted."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class StoredChat(ChatCompletion):
    """A chat answer that is kept."""

    metadata: dict[str, str]


class ChatList(Exact):
    """A page of stored chat answers."""

    object: Literal["list"]
    data: list[StoredChat]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(Exact):
    """A chat answer that was deleted."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class ItemList(Exact):
    """A page of a response's input, of a conversation, or of a chat's messages."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RowCounts(Exact):
    """Rows of a batch."""

    total: int
    completed: int
    failed: int


class StoredBatch(Exact):
    """A file of requests that are answered as capacity allows."""

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


class BatchList(Exact):
    """A page of batches."""

    object: Literal["list"]
    data: list[StoredBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DashboardPage(msgspec.Struct):
    """Data of the dashboard's page; made for it alone, and changed with it."""


class Piece(Exact):
    """A token and its text; the bytes of half a character."""

    id: int
    piece: str | list[int]


class Tokens(Exact):
    """Token ids of a text or a conversation, and the most tokens that the model takes."""

    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | UnsetType = UNSET


class Text(Exact):
    """The text of token ids, under two names."""

    prompt: str
    content: str


class Prompt(Exact):
    """The text that an answer would be generated from."""

    prompt: str


class Model(Exact):
    """A model under one of its names; `root` is its own, `parent` that of the model which an adapter changes."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    sampling_defaults: dict[str, float]
    state: ModelState | UnsetType = UNSET


class ModelList(Exact):
    """The models that the caller's key allows."""

    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Version(Exact):
    """The version of the server."""

    version: str


class TokenizerInfo(msgspec.Struct):
    """What a client needs to write prompts itself, with the special tokens by the names that the template uses."""

    chat_template: str | None


class HealthCheck(Exact):
    """One check; `figure` and `limit` are null where it has none, or nothing is known."""

    name: str
    ok: bool
    reason: str
    figure: float | None
    limit: float | None


class Health(Exact):
    """The process is alive. With `verbose` also what its checks say: `degraded` where one is not ok."""

    status: Literal["alive"]
    health: Literal["ok", "degraded"] | UnsetType = UNSET
    checks: list[HealthCheck] | UnsetType = UNSET


class Readiness(Exact):
    """Whether requests can be served."""

    status: Literal["ready", "not ready"]


class Pages(Exact):
    """KV pages of a worker by state; total = free + cached + reserved + used."""

    total: int
    free: int
    cached: int
    reserved: int
    used: int


class Gpu(Exact):
    """The judgement of a GPU's own figures."""

    state: Literal["ok", "degraded", "out"]
    weight: float
    reasons: list[str]


class Circuit(Exact):
    """Why a worker gets no work, or should get none; `num_openings`: how often that happened lately."""

    state: Literal["suspected", "open", "half_open"]
    cause: Literal["slow", "silent", "erring", "gpu"]
    words: str
    figures: dict[str, float]
    for_s: float
    num_openings: int


class Speculation(Exact):
    """Tokens that were proposed, and those of them that were what the model chose."""

    proposed: int
    accepted: int


class HostTier(Exact):
    """Cached pages in the memory of a worker's host; what moved is counted since the worker started."""

    total: int
    free: int
    held: int
    stored: int
    loaded: int
    dropped: int


class WorkerCounts(Exact):
    """A worker's counts since it started: `speculation` by the source of tokens, `preemptions` by kind."""

    speculation: dict[str, Speculation]
    preemptions: dict[str, int]
    host_tier: HostTier | None


class PromptSpeed(Exact):
    """Seconds of n tokens of a prompt after c others: overhead_s + s_per_token·n + s_per_token_squared·(n² + 2·n·c)."""

    overhead_s: float
    s_per_token: float
    s_per_token_squared: float


class StepSpeed(Exact):
    """Seconds of a step: overhead_s + s_per_sequence·sequences + s_per_context_token·(tokens looked back on)."""

    overhead_s: float
    s_per_sequence: float
    s_per_context_token: float


class Speeds(Exact):
    """A worker's measured speeds; null: not measured."""

    prefill: PromptSpeed | None
    decode: StepSpeed | None


class Worker(Exact):
    """One worker process as this gateway sees it."""

    id: str
    role: Literal["prefill", "decode"]
    pid: int
    host: str
    region: str
    address: str
    transfer_address: str
    incarnation: str
    state: WorkerState
    model: str
    pool: str
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
    page_tokens: int
    kv_bytes_per_token: int
    running: int
    max_running: int
    waiting: int
    waiting_tokens: int
    speed: Speeds
    gpu: Gpu | None
    circuit: Circuit | None
    counts: WorkerCounts | None


class CutPair(Exact):
    """Two workers between which no pages pass. Only trials use the pair."""

    prefill_id: str
    decode_id: str
    state: Literal["open", "half_open"]
    words: str
    for_s: float


class RequestPlace(Exact):
    """Where a request is, as a gateway last reported. A worker is empty if none takes part, or none is chosen yet.

    `state` is `interrupted` if the gateway died while the request was in `last_state`. Otherwise both are equal.
    """

    id: str
    state: ShownState
    last_state: State
    attempt: int
    gateway: str
    prefill_worker: str
    decode_worker: str
    regions: dict[Literal["prefill", "decode"], str]
    began_unix_s: float


class RequestCounts(Exact):
    """Answers of this gateway."""

    queued: int
    running: int


class RedisState(Exact):
    """Redis as this gateway reaches it; `last_failure` is empty before the first."""

    available: bool
    round_trip_s: float
    last_failure: str


class GoneWorker(Exact):
    """A worker that vanished without a word."""

    id: str
    role: Literal["prefill", "decode"]
    model: str
    host: str
    address: str
    since_unix_s: float


class Trouble(Exact):
    """One thing that is wrong, why, and what to do about it."""

    kind: Kind
    subject: str
    cause: str
    remedy: str
    since_unix_s: float


class ResourceLoad(Exact):
    """The share of a role's resource that is taken, from 0 to 1."""

    role: Literal["prefill", "decode", "gateway"]
    resource: Literal["compute", "link", "pages"]
    load: float


class Gain(Exact):
    """What one more worker of a role, or gateway, would bring: a `share` of requests more, until `then` is full."""

    role: Literal["prefill", "decode", "gateway"]
    share: float
    then: str


class Bottleneck(Exact):
    """What holds a model back, and since when. `said` says it to people; `is_batch_only`: no other work runs."""

    model: str
    role: Literal["prefill", "decode", "gateway"]
    resource: Literal["compute", "link", "pages", "queue"]
    said: str
    since_unix_s: float
    is_batch_only: bool
    loads: list[ResourceLoad]
    gains: list[Gain]


class ClusterState(Exact):
    """The cluster as this gateway sees it now. `expected` are numbers of workers by role, where they are given."""

    version: str
    expected: dict[str, int]
    gone: list[GoneWorker]
    troubles: list[Trouble]
    failing_tasks: list[FailingTask]
    bottlenecks: list[Bottleneck]
    redis: RedisState
    workers: list[Worker]
    cut_pairs: list[CutPair]
    requests: RequestCounts
    prefill: str
    pools: list[Pool]
    rebalancing: RebalancingState
    turns: TurnsState
