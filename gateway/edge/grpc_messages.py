"""What the messages of all generating methods share: forms, log-probabilities, usage."""

from collections.abc import Iterable

from gateway.forms.response_format import FIELD, form_in, json_schema_in
from gateway.types import TokenLogprobs, Usage
from protos import inference_pb2
from services.structured.grammar import ANY_OBJECT

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH
TOOL_CALLS = inference_pb2.FINISH_REASON_TOOL_CALLS


def form_of(asked: inference_pb2.ResponseFormat) -> tuple[str, str]:
    """Returns the form of the answer, as `gateway.forms.response_format` has it, and the field that asks for it.

    An empty text: any answer will do. Raises InvalidRequest.
    """
    kind = asked.WhichOneof("format")
    if kind is None:
        return "", FIELD
    if kind == "json_object":
        return ANY_OBJECT, FIELD
    if kind == "json_schema":
        return json_schema_in(asked.json_schema), FIELD
    if kind == "choices":
        form, _ = form_in({"guided_choice": list(asked.choices.texts)})
    else:
        form, _ = form_in({kind: getattr(asked, kind)})
    return form, f"{FIELD}.{kind}"


def logprobs_of(entries: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    """Returns the messages for log-probabilities."""
    return [
        inference_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top=[inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
        )
        for entry in entries
    ]


def usage_of(usage: Usage) -> inference_pb2.Usage:
    """Returns the message for what a request used."""
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=usage.queue_s,
        prefill_s=usage.prefill_s,
        transfer_s=usage.transfer_s,
        decode_s=usage.decode_s,
    )
