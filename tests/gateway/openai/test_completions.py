"""The completions API's answers, byte for byte, and as the types that the document describes."""

import msgspec
import pytest

from gateway.openai.answers import Completion, CompletionChunk
from gateway.openai.completions import CompletionRequest, CompletionWriter
from gateway.types import Delta, TokenLogprobs
from tests.gateway.openai.writers import USAGE, events_of, whole_of, writer_of

START = (
    b'data: {"id":"cmpl-r","created":7,"model":"m\\"choices\\":[]","system_fingerprint":"fp",'
    b'"object":"text_completion","choices":['
)


def completion(num_answers=1, **body):
    return writer_of(CompletionWriter, CompletionRequest, {"prompt": "AB", **body}, num_answers=num_answers)


def test_events_of_a_stream():
    writer = completion(return_token_ids=True)
    stream = writer.opening(0) + writer.chunk(0, Delta(0, [97], "a"), None)
    stream += writer.chunk(0, Delta(1, [], "", finish_reason="length"), None)
    assert stream == b"".join(
        START + choice + b"]}\n\n"
        for choice in (
            b'{"index":0,"text":"a","logprobs":null,"finish_reason":null,"token_ids":[97],"prompt_token_ids":[65,66]}',
            b'{"index":0,"text":"","logprobs":null,"finish_reason":"length"}',
        )
    )


@pytest.mark.parametrize("prompt", ["AB", [65, 66]])
def test_an_echo_is_the_prompt_as_text(prompt):
    writer = completion(prompt=prompt, echo=True)
    (event,) = events_of(writer.opening(0))
    assert msgspec.json.decode(event, type=CompletionChunk).choices[0].text == "AB"
    whole = msgspec.json.decode(writer.whole([whole_of("c")]), type=Completion)
    assert whole.choices[0].text == "ABc"


def test_offsets_count_the_characters_of_the_answer():
    entries = [TokenLogprobs(-0.5, []), TokenLogprobs(-1.0, [])]
    writer = completion(logprobs=0)
    writer.skip(0, [97], "a", None)
    (event,) = events_of(writer.chunk(0, Delta(1, [98, 99], "bc", entries), USAGE))
    (choice,) = msgspec.json.decode(event, type=CompletionChunk).choices
    assert choice.logprobs.tokens == ["b", "c"]
    assert choice.logprobs.text_offset == [1, 2]
    assert choice.logprobs.top_logprobs == [{"b": -0.5}, {"c": -1.0}]


def test_a_whole_answer_has_all_choices_and_one_usage():
    body = completion(num_answers=2, n=2).whole([whole_of("a"), whole_of("b", index=1)])
    whole = msgspec.json.decode(body, type=Completion)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "a"), (1, "b")]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 6)
