"""Orders and events in the format of `protos/worker.proto`: what `events` says, written and read."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from gateway.topology.events import (
    Admitted,
    AttemptKey,
    Cancelled,
    Declined,
    DecodeStarted,
    Embedded,
    Emitted,
    Event,
    Failed,
    Finished,
    HandedOff,
    OpeningLink,
    Paused,
    PrefillStarted,
    SequenceOrder,
    Unfit,
)
from gateway.types import Pooling, PromptLogprobs, TokenLogprobs
from protos import inference_pb2, worker_pb2
from services.runtime import status, telemetry
from services.runtime.errors import GrammarExhausted, InvalidRequest, NotOffered, TandemError, WorkerUnavailable
from services.runtime.sampling_wire import write_sampling

_REASONS: dict[int, Literal["stop", "length", "cancelled"]] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


_POOLINGS: dict[Pooling, worker_pb2.Pooling.ValueType] = {
    "last": worker_pb2.POOLING_LAST,
    "mean": worker_pb2.POOLING_MEAN,
}


def attempt_id(key: AttemptKey) -> worker_pb2.AttemptId:
    """Returns an attempt's name in the wire's format."""
    return worker_pb2.AttemptId(request_id=key.request_id, attempt=key.attempt)


def sequence_spec(order: SequenceOrder) -> worker_pb2.SequenceSpec:
    """Returns the order in the wire's format, with what is left of its deadline, and without its form."""
    message: worker_pb2.SequenceSpec | None = order.message
    if message is None:
        message = order.message = worker_pb2.SequenceSpec(
            prompt_token_ids=order.prompt_token_ids,
            emitted_token_ids=order.emitted_token_ids,
            eos_token_ids=order.eos_token_ids,
            cache_salt=order.cache_salt,
            service_class=order.service_class,
            adapter=order.adapter,
        )
        # A message that is given to another one's constructor is encoded and parsed again.
        message.id.request_id, message.id.attempt = order.key
        message.sampling.CopyFrom(write_sampling(order.sampling))
        if order.trace is not None:
            message.traceparent, message.tracestate = telemetry.inject(order.trace), order.trace.state
            message.request_span_id = order.request_span_id
    message.deadline_ms = max(1, order.deadline.remaining_ms())
    return message


def write_vector_order(order: SequenceOrder, message: worker_pb2.Embed) -> None:
    """Writes how a prompt becomes a vector."""
    vector = order.vector
    assert vector is not None, "such an order says how"
    message.pooling, message.dimensions = _POOLINGS[vector.pooling], vector.num_dimensions
    message.is_normalized = vector.is_normalized


def _read_refused(event: worker_pb2.Refused) -> Declined:
    retry_after_s = event.retry_after_ms / 1000 if event.retry_after_ms else None
    return Declined(_blamed(status.from_wire(event.code, event.message, retry_after_s)))


def _blamed(error: TandemError) -> TandemError:
    """Returns Unfit where a worker calls a request invalid that the gateway has checked."""
    if isinstance(error, InvalidRequest) and not isinstance(error, GrammarExhausted | NotOffered):
        return Unfit(f"a worker refused a request that the gateway had checked: {error.message}")
    return error


def _read_tokens(event: worker_pb2.Tokens) -> Emitted:
    logprobs = _read_logprobs(event.logprobs) if event.logprobs else None
    prompt_logprobs = _read_prompt_logprobs(event.prompt_logprobs) if event.HasField("prompt_logprobs") else None
    return Emitted(event.first_index, list(event.token_ids), logprobs, prompt_logprobs)


def _read_logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs(entry.logprob, [(top.token_id, top.logprob) for top in entry.top]) for entry in entries]


def _read_prompt_logprobs(columns: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    read = PromptLogprobs(
        # Not copied: of 40,000 candidates that would take milliseconds of the event loop.
        logprobs=columns.logprobs,
        num_top=len(columns.top_token_ids) // max(1, len(columns.logprobs)),
        top_token_ids=columns.top_token_ids,
        top_logprobs=columns.top_logprobs,
    )
    if {len(read.top_token_ids), len(read.top_logprobs)} != {read.num_top * len(read)}:
        raise WorkerUnavailable("a worker told log-probabilities of a prompt that do not fit each other")
    return read


def _read_finished(event: worker_pb2.Finished) -> Finished | Failed:
    reason = _REASONS.get(event.reason)
    if reason is None:
        return Failed(WorkerUnavailable("the worker gave no reason for the end of an answer"))
    return Finished(reason)


EVENT_READERS: dict[str, Callable[[Any], Event]] = {
    "admitted": lambda _: Admitted(),
    "refused": _read_refused,
    "opening_link": lambda _: OpeningLink(),
    "prefill_started": lambda event: PrefillStarted(
        event.queue_s,
        event.num_cached_tokens,
        event.began_unix_ns,
        event.num_pulled_tokens,
        event.pull_s,
        event.pulled_bytes,
    ),
    "tokens": _read_tokens,
    "handed_off": lambda event: HandedOff(
        event.num_pages,
        event.num_bytes,
        event.exposed_s,
        event.transport,
        tuple((chunk.began_s, chunk.spent_s, chunk.num_tokens) for chunk in event.chunks),
    ),
    "decode_started": lambda event: DecodeStarted(event.began_unix_ns),
    "paused": lambda event: Paused(event.num_tokens),
    "finished": _read_finished,
    "failed": lambda event: Failed(_blamed(status.from_wire(event.code, event.message))),
    "cancelled": lambda event: Cancelled(event.has_begun),
    "embedded": lambda event: Embedded(event.vector),
}
"""What reads an event, by its name in the message; without a function around it, which every event would call."""
