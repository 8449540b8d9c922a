"""The attempts of a worker: parsing their messages, fencing them by number, and creating their events.

Does not depend on the worker's role.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from kv_transfer.send_link import HandoffStats
from protos import inference_pb2, worker_pb2
from services.engine.steps.step import SampledToken
from services.runtime.clock import SYSTEM_CLOCK, Clock, Deadline
from services.runtime.errors import AlreadyExists, InvalidRequest
from services.runtime.sampling_wire import read_sampling
from services.structured.form import AnswerForm, read_form
from worker.sessions import NewTokens

DEFAULT_SERVICE_CLASS = 2
"""Default class of an attempt, out of the classes 0 to 4."""
NUM_SERVICE_CLASSES = 5

S = TypeVar("S")
A = TypeVar("A")


class AttemptKey(NamedTuple):
    """One try of a request."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptSpec(Generic[S]):
    """A SequenceSpec as plain data. `sampling` is an instance of the engine's class."""

    key: AttemptKey
    prompt_token_ids: list[int]
    emitted_token_ids: list[int]
    sampling: S
    deadline: Deadline
    traceparent: str
    cache_salt: str = ""
    service_class: int = DEFAULT_SERVICE_CLASS
    """0 is served first, 4 last."""
    form: AnswerForm | None = None
    """Output constraint. None if the output is unconstrained."""
    tracestate: str = ""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens, if they end this response."""
    request_span_id: int = 0
    """ID of the span of the request. 0 if unknown."""
    adapter: str = ""
    """Adapter to apply. Empty for the base model."""


def read_key(message: worker_pb2.AttemptId) -> AttemptKey:
    """Returns the key of an attempt. Raises InvalidRequest if the message is malformed."""
    if not message.request_id or message.attempt < 1:
        raise InvalidRequest("an attempt needs a request_id and a number from 1", field="id")
    return AttemptKey(message.request_id, message.attempt)


def read_spec(
    message: worker_pb2.SequenceSpec,
    sampling_class: Callable[..., S],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> AttemptSpec[S]:
    """Converts a message to plain data.

    Raises InvalidRequest with the field name. `sampling_class` checks its fields.
    """
    if not message.prompt_token_ids:
        raise InvalidRequest("the prompt is empty", field="prompt_token_ids")
    sampling = read_sampling(message.sampling)
    if "max_tokens" not in sampling:
        raise InvalidRequest("max_tokens is not set", field="max_tokens")
    eos_token_ids = () if message.sampling.ignore_eos else tuple(message.eos_token_ids)
    sampling["stop_token_ids"] = frozenset(sampling.get("stop_token_ids", ())) | frozenset(eos_token_ids)
    form = read_form(message)
    if form is not None and not eos_token_ids:
        raise InvalidRequest("an answer that must have a form needs a token that ends it", field="eos_token_ids")
    return AttemptSpec(
        key=read_key(message.id),
        prompt_token_ids=list(message.prompt_token_ids),
        emitted_token_ids=list(message.emitted_token_ids),
        sampling=sampling_class(**sampling),
        deadline=Deadline.from_remaining_ms(max(message.deadline_ms, 1), clock=clock),
        traceparent=message.traceparent,
        cache_salt=message.cache_salt,
        service_class=_service_class(message),
        form=form,
        tracestate=message.tracestate,
        eos_token_ids=eos_token_ids,
        request_span_id=message.request_span_id,
        adapter=message.adapter,
    )


def _service_class(message: worker_pb2.SequenceSpec) -> int:
    service_class = message.service_class if message.HasField("service_class") else DEFAULT_SERVICE_CLASS
    if service_class >= NUM_SERVICE_CLASSES:
        raise InvalidRequest(f"service_class must be from 0 to {NUM_SERVICE_CLASSES - 1}", field="service_class")
    return service_class


def is_bare(token: SampledToken) -> bool:
    """Returns whether only the token ID is reported."""
    return token.logprob is None and token.prompt is None


def tokens_message(index: int, *tokens: SampledToken) -> NewTokens | worker_pb2.Tokens:
    """Returns the event for at least one token of a response, starting at position `index`."""
    token_ids = [token.token_id for token in tokens]
    if is_bare(tokens[0]):
        return NewTokens(index, token_ids)
    message = worker_pb2.Tokens(first_index=index, token_ids=token_ids)
    if tokens[0].logprob is not None:
        message.logprobs.extend(map(_logprobs_message, tokens))
    report = tokens[0].prompt
    if report is not None:
        columns = message.prompt_logprobs
        columns.logprobs.extend(report.logprobs)
        columns.top_token_ids.extend(report.top_token_ids)
        columns.top_logprobs.extend(report.top_logprobs)
    return message


def _logprobs_message(token: SampledToken) -> inference_pb2.TokenLogprobs:
    assert token.logprob is not None
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return inference_pb2.TokenLogprobs(logprob=token.logprob, top=top)


def handed_off_message(moved: HandoffStats, chunks: Sequence[worker_pb2.PromptChunk] = ()) -> worker_pb2.HandedOff:
    """Returns the event for a committed handoff. `chunks` describes the computation of its prompt."""
    return worker_pb2.HandedOff(
        num_pages=moved.num_pages,
        num_bytes=moved.num_bytes,
        exposed_s=moved.exposed_s,
        transport=moved.transport,
        chunks=chunks,
    )


def finished_message(reason: Literal["stop", "length"]) -> worker_pb2.Finished:
    """Returns the event for the end of a response."""
    return worker_pb2.Finished(reason=_FINISH_REASONS[reason])


_FINISH_REASONS = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
}


class AttemptTable(Generic[A]):
    """The newest attempt of each request that runs on this worker. This table is the fence.

    Messages about any other attempt are dropped: it never existed, has ended, or was superseded.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[AttemptKey, A]] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[A]:
        """Iterates over a snapshot, so that the table may change during the iteration."""
        return iter([attempt for _, attempt in self._newest.values()])

    def begin(self, key: AttemptKey, attempt: A) -> A | None:
        """Adds an attempt and returns the older attempt that it supersedes.

        Raises AlreadyExists if the table contains the same or a newer attempt, because the message is late or a
        duplicate.
        """
        known_key, known = self._newest.get(key.request_id, (None, None))
        if known_key is not None and known_key.attempt >= key.attempt:
            raise AlreadyExists(f"attempt {known_key.attempt} of the request is known here")
        self._newest[key.request_id] = (key, attempt)
        return known

    def find(self, key: AttemptKey) -> A | None:
        """Returns the attempt with exactly this number, or None."""
        known_key, known = self._newest.get(key.request_id, (None, None))
        return known if known_key == key else None

    def end(self, key: AttemptKey) -> None:
        """Removes an attempt. Ignores unknown and superseded attempts."""
        if self.find(key) is not None:
            del self._newest[key.request_id]
