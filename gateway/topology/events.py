"""What a worker says of one attempt, and what it must know to compute it: plain data, in no wire's format."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.types import Pooling, PromptLogprobs, Sampling, TokenLogprobs
from services.runtime.clock import Deadline
from services.runtime.errors import TandemError, WorkerUnavailable
from services.runtime.telemetry import TraceContext


class AttemptKey(NamedTuple):
    """The name of one try of one answer towards workers."""

    request_id: str
    attempt: int


class PullOrder(NamedTuple):
    """The beginning of a prompt that a prefill worker is to fetch from another worker, within a limit."""

    worker_id: str
    incarnation: str
    address: str
    num_tokens: int
    limit_s: float


class VectorOrder(NamedTuple):
    """How a prompt becomes a vector, of which the first `num_dimensions` numbers are kept."""

    pooling: Pooling
    num_dimensions: int
    is_normalized: bool


class SequenceOrder(msgspec.Struct):
    """What workers must know to compute one attempt. `emitted_token_ids` are those that the client already has."""

    key: AttemptKey
    prompt_token_ids: Sequence[int]
    emitted_token_ids: Sequence[int]
    sampling: Sampling
    eos_token_ids: Sequence[int]
    deadline: Deadline
    trace: TraceContext | None
    cache_salt: str = ""
    """Only requests with the same salt share pages; empty: those without one."""
    service_class: int = 2
    """0 critical, 1 interactive, 2 normal, 3 low, 4 batch."""
    request_span_id: int = 0
    """The id of the request's own span; 0: unknown."""
    adapter: str = ""
    """What the model is changed by; empty: nothing."""
    vector: VectorOrder | None = None
    """How the prompt becomes a vector; None: it is answered."""
    message: Any = None
    """The order as `wire` has encoded it, once for both workers."""


class Admitted(msgspec.Struct, frozen=True):
    """The decode worker promises capacity."""


class Declined(msgspec.Struct, frozen=True):
    """The worker does not take the attempt and holds nothing of it."""

    error: TandemError


class OpeningLink(msgspec.Struct, frozen=True):
    """The prefill worker opens a Link to the decode worker, and begins with the prompt afterwards."""


class PrefillStarted(msgspec.Struct, frozen=True):
    """The prompt is being computed, after waiting `queue_s` in the worker.

    `num_cached_tokens` of it are not computed, because the worker has their pages from earlier requests.
    `began_unix_ns`: when it began, by the clock here; 0: the worker does not say. `num_pulled_tokens` of it are in
    its cache because another worker has sent what was lacking, `pulled_bytes` in all; trying to fetch them took
    `pull_s`.
    """

    queue_s: float
    num_cached_tokens: int = 0
    began_unix_ns: int = 0
    num_pulled_tokens: int = 0
    pull_s: float = 0.0
    pulled_bytes: int = 0


class Emitted(msgspec.Struct, frozen=True):
    """New tokens; `first_index` is the place of the first one in the answer.

    The first event may also bring what was asked of the prompt's tokens from the second on.
    """

    first_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: PromptLogprobs | None = None


class HandedOff(msgspec.Struct, frozen=True):
    """The prefill worker's part is over: the decode worker has committed the pages.

    `chunks` are the parts in which the prompt was computed: (seconds from PrefillStarted, seconds, tokens).
    """

    num_pages: int
    num_bytes: int
    exposed_s: float
    transport: str
    chunks: tuple[tuple[float, float, int], ...] = ()


class DecodeStarted(msgspec.Struct, frozen=True):
    """The sequence is in the decode worker's batch, since `began_unix_ns` by the clock here; 0: it does not say."""

    began_unix_ns: int = 0


class Paused(msgspec.Struct, frozen=True):
    """The sequence is out of the decode worker's batch, keeps its pages, and has `num_tokens` tokens, all sent."""

    num_tokens: int


class Finished(msgspec.Struct, frozen=True):
    """The worker ended the sequence; nothing follows from it."""

    reason: Literal["stop", "length", "cancelled"]


class Failed(msgspec.Struct, frozen=True):
    """The attempt is over on that worker; nothing follows from it. WorkerLost: the worker itself is gone."""

    error: TandemError


class Heard(NamedTuple):
    """What a gateway knew of an attempt when it gave it up, so that no span of a worker is without its parent."""

    prefill: bool
    decode: bool


class Cancelled(msgspec.Struct, frozen=True):
    """The answer to `cancel_and_ask`; nothing follows. `has_begun`: the prompt may have been computed."""

    has_begun: bool


class Embedded(msgspec.Struct, frozen=True):
    """The vector of a prompt, little-endian float32; nothing follows."""

    vector: bytes


Event = (
    Admitted
    | Declined
    | OpeningLink
    | PrefillStarted
    | Emitted
    | HandedOff
    | DecodeStarted
    | Paused
    | Finished
    | Failed
    | Cancelled
    | Embedded
)


class Unfit(WorkerUnavailable):
    """A worker refused a request as invalid that the gateway had accepted: its files, memory, or version differ.

    The request is tried once more, on another worker if there is one. If that one refuses it too, the request is
    invalid.
    """
