"""What goes in and comes out of the clients: plain, frozen data. Knows neither gRPC nor protobuf.

The rules for each value are the server's (protos/inference.proto, protos/cluster.proto); it checks them, not this file.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop text, a stop token or the end of sequence."""
    LENGTH = "length"
    """max_tokens, or the model's context is full."""
    CANCELLED = "cancelled"
    """It was cancelled."""
    TOOL_CALLS = "tool_calls"
    """The answer calls functions. Only of conversations."""
    UNKNOWN = "unknown"
    """A reason of a server that is newer than this client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request for a text and one for a conversation have in common."""

    model: str = ""
    """Name of a served model; may be left out where only one is served."""
    idempotency_key: str = ""
    """1 to 255 printable ASCII characters. Another body under the same key is AlreadyExists."""
    request_id: str = ""
    """1 to 64 characters of [A-Za-z0-9_.:-], unique among running requests; the server makes one if it is empty."""
    tenant: str = ""
    """Tenant to which it is accounted; the API key's tenant if empty."""
    service_class: str = ""
    """critical, interactive, normal, low or batch; normal if empty."""
    priority: int = 0
    """Order among waiting requests of a class, in [-100, 100]; higher goes sooner."""
    cache_salt: str = ""
    """Only requests with the same salt find each other's cached pages."""
    allow_fallback: bool | None = None
    """Whether another model may answer; the operator's setting if None."""
    # From the message SamplingParams, by tools/client_fields.py.
    max_tokens: int | None = None
    """Most tokens to generate, at least 1. None: as many as fit into the model's context."""
    min_tokens: int = 0
    """No stop before this many tokens, at most max_tokens. Zero: no minimum."""
    temperature: float | None = None
    """In [0, 2]; below 1e-5 is greedy. None: the model's own default, else 1."""
    top_p: float | None = None
    """Smallest set of most likely tokens whose probabilities reach this is kept, in (0, 1]. None: the model's own
    default, else 1 (all)."""
    top_k: int = 0
    """Only the k most likely tokens are kept; -1: all. Zero: the model's own default, else all."""
    min_p: float = 0.0
    """Tokens less likely than min_p times the likeliest are dropped, in [0, 1]. Zero: the model's own default, else
    none."""
    seed: int | None = None
    """Seed of the noise; equal seeds give equal answers. None: the gateway draws one."""
    stop: Sequence[str] = ()
    """At most 16 texts of at most 256 bytes; generation ends before the first that appears."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the generation; they are counted and their text is not shown."""
    ignore_eos: bool = False
    """The model's end-of-sequence tokens do not end the generation."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier generated occurrence, in [-2, 2]."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or answer, in (0, 10]. None: the model's
    own default, else 1 (off)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; values in [-100, 100], at most 1,024 entries."""
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens besides the chosen one, in [0, 20]. None: none at all."""
    prompt_logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens for each token of the prompt from the second on, in [0, 20];
    the prompt is computed anew for them. Not for named requests. None: none at all."""
    # To here.
    json_schema: Mapping[str, Any] | str | None = None
    """The answer is JSON that keeps to this schema, a mapping or JSON text; {"type": "object"} is any object. Any text
    if None."""


@dataclass(frozen=True, slots=True)
class Request(Asked):
    """One generation. Only the prompt must be given, by place: text, or token ids.

    A request with a name, which is its `idempotency_key` or its `request_id`, continues at the next token when its
    connection breaks, also on another gateway. With the key it can also be sent again later: it is computed once.
    """

    prompt: str | Sequence[int]
    """Text, encoded with the model's tokenizer; or token ids, used as they are."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. In a stream the first part of a call has id and name, and `arguments` are continued."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""
    index: int = 0
    """Its number in the answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, or what is added to one."""

    role: str
    """system, developer, user, assistant or tool."""
    content: str = ""
    name: str = ""
    """Name of its author; empty: none."""
    reasoning_content: str = ""
    """What an assistant thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that an assistant made."""
    tool_call_id: str = ""
    """In a tool's message: the id of the call that it answers."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str | None = None
    """A JSON schema of its arguments, a mapping or JSON text; None: it takes none."""
    strict: bool = False
    """The arguments keep to `parameters` in any call."""


@dataclass(frozen=True, slots=True)
class ChatRequest(Asked):
    """One conversation to answer. Only the messages must be given, by place.

    With an `idempotency_key`, it can be sent again: it is computed once. Its stream cannot be resumed as a
    conversation: `resume` gives the rest of a single answer as text.
    """

    messages: Sequence[Message]
    """The conversation, which the model's chat template writes. At least one."""
    tools: Sequence[Tool] = field(default=(), kw_only=True)
    tool_choice: str = field(default="auto", kw_only=True)
    """auto: the model decides; none: no call; required: at least one; any other: the function of this name."""
    parallel_tool_calls: bool | None = field(default=None, kw_only=True)
    """Whether an answer may have several calls; None: it may."""
    num_choices: int = field(default=1, kw_only=True)
    """Answers, 1 to 16."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Variables of the chat template, such as `enable_thinking`, with values that JSON has."""
    continue_final_message: bool = field(default=False, kw_only=True)
    """The answer continues the last message, an assistant's, whose text does not come again."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One candidate token; `logprob` is the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a chosen token, and the likeliest ones at its place, descending."""

    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used: tokens, and seconds in each phase."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose KV was reused from a cache."""
    completion_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of an answer."""

    text: str
    """Text that became certain with these tokens; may be empty."""
    token_ids: tuple[int, ...]
    first_index: int
    """Index in the answer of the first of `token_ids`. No gap and no repeat, across broken connections too."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token id if they were asked for, else none."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """On the first delta, if they were asked for: one per token of the prompt from the second on."""
    finish_reason: FinishReason | None
    """Set on the last delta only, like `usage`."""
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage | None
    model: str
    """The one that really answered, by its own name."""
    fallback: str
    """In whose place it answered and why; empty if it was the one asked for."""

    def json(self) -> Any:
        """The value of the text. Raises ValueError where it is no JSON, as when `max_tokens` cut it off."""
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The next part of one answer to a conversation."""

    choice: int
    """The answer that it belongs to, from 0."""
    message: Message
    """What is added to the answer."""
    token_ids: tuple[int, ...]
    """New tokens, of which some may not be shown yet."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token id if they were asked for, else none."""
    finish_reason: FinishReason | None
    """Set on the last delta of its answer only, like `usage`."""
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer to a conversation."""

    message: Message
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage | None

    def json(self) -> Any:
        """The value of the text. Raises ValueError where it is no JSON, as when `max_tokens` cut it off."""
        return json.loads(self.message.content)


@dataclass(frozen=True, slots=True)
class Chat:
    """All answers to a conversation."""

    request_id: str
    choices: tuple[Choice, ...]
    model: str
    """The one that really answered, by its own name."""
    fallback: str
    """In whose place it answered and why; empty if it was the one asked for."""

    @property
    def message(self) -> Message:
        """The first answer, as it can stand in the conversation's next request."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One name of a served model."""

    name: str
    context_length_tokens: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    created_unix_s: int
    parent: str = ""
    """Name of the model that this one, an adapter, changes; empty: it is no adapter."""


@dataclass(frozen=True, slots=True)
class Pages:
    """KV pages of a worker; total = free + cached + reserved + used."""

    total: int
    free: int
    cached: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """What a worker's GPU is taken for: ok, degraded or out; `weight` is its share of full speed, 0 to 1."""

    state: str
    weight: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process. Words of a newer server that this client does not know read `unknown`."""

    id: str
    role: str
    """prefill or decode."""
    pid: int
    host: str
    address: str
    incarnation: str
    """New at each start of the process."""
    state: str
    """starting, ready, draining or lost."""
    model: str
    exact: bool
    """Whether an answer that is resumed on the worker is exact."""
    pages: Pages
    running: int
    waiting: int
    arithmetic: str
    gpu: GpuHealth | None
    tensor_parallel: int = 0
    """Processes that share each layer of its model; 0: unknown."""
    pipeline_parallel: int = 0
    """Stages that share the layers; 0: unknown."""
    left_out: str = ""
    """Why it gets no work; empty: it may have work."""
    identity: str = ""
    """All that decides its tokens beside the request; empty: unknown."""
    region: str = ""
    """Where it runs; empty: in no region."""
    pool: str = ""
    """The pool that it belongs to; empty: none."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong with a cluster, why, and what to do about it; seen first at `since_unix_s`.

    `subject` is what it is wrong with, such as a worker's id.
    """

    kind: str
    subject: str
    cause: str
    remedy: str
    since_unix_s: float


@dataclass(frozen=True, slots=True)
class GoneWorker:
    """A worker that vanished without a word, noticed at `since_unix_s`."""

    id: str
    role: str
    model: str
    host: str
    address: str
    since_unix_s: float


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster as one gateway sees it; `queued` and `running` count that gateway's requests.

    `troubles` are what is wrong now, and `gone` workers that should be there; gateways of earlier versions say neither.
    """

    workers: tuple[Worker, ...]
    queued: int
    running: int
    troubles: tuple[Trouble, ...] = ()
    gone: tuple[GoneWorker, ...] = ()
    pools: tuple[str, ...] = ()
    """Names of the pools into which workers are divided, in the order in which they are tried."""
