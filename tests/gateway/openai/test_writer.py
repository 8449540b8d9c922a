"""What all writers of choices share."""

import math
from dataclasses import replace

import msgspec
import pytest

from gateway.limits import ModelLimits
from gateway.models.catalog import ServedModel
from gateway.openai.answers import ChatCompletionChunk
from gateway.openai.chat import ChatRequest, ChatWriter
from gateway.openai.writer import finite, shown_logprobs, system_fingerprint, usage_sum, with_event_id
from gateway.types import Delta, TokenLogprobs, Usage
from tests.gateway.openai.writers import HEAD, PROMPT, USAGE, Characters, events_of, writer_of

CHAT = {"messages": [{"role": "user", "content": "a"}]}
USAGE_OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("options", "usages"), [({}, ["-", "-"]), (USAGE_OPTIONS, [None, None, 5]), (CONTINUOUS, [5, 5, 5])]
)
def test_usage_is_told_as_often_as_it_is_asked_for(options, usages):
    writer = writer_of(ChatWriter, ChatRequest, CHAT | options)
    stream = writer.chunk(0, Delta(0, [65], "A"), USAGE)
    stream += writer.chunk(0, Delta(1, [], "", finish_reason="stop"), USAGE)
    stream += writer.usage_chunk([(USAGE, PROMPT)]) if writer.has_usage else b""
    chunks = [msgspec.json.decode(event, type=ChatCompletionChunk) for event in events_of(stream)]
    assert {chunk.model for chunk in chunks} == {HEAD.model}
    told = [chunk.usage and chunk.usage.total_tokens for chunk in chunks]
    assert told == [msgspec.UNSET if each == "-" else each for each in usages]
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0][: len(usages)]


def test_a_prompt_that_answers_share_counts_once():
    other = Usage(2, 0, 1, 0.0, 0.0, 0.0, 0.0)
    shared = usage_sum([(USAGE, PROMPT), (USAGE, PROMPT)])
    apart = usage_sum([(USAGE, PROMPT), (other, [*PROMPT])])
    assert (shared.prompt_tokens, shared.completion_tokens, shared.prompt_tokens_details.cached_tokens) == (2, 6, 1)
    assert (apart.prompt_tokens, apart.completion_tokens, apart.total_tokens) == (4, 4, 8)


def test_an_event_gets_its_id_before_its_end():
    assert with_event_id(b"data: a\n\n", "7") == b"data: a\nid: 7\n\n"


def test_json_has_no_infinity():
    assert finite(-math.inf) == -9999.0
    assert finite(-1.5) == -1.5
    (shown,) = shown_logprobs(Characters(), [65], [TokenLogprobs(-math.inf, [(233, -1.0)])])
    assert (shown.token, shown.logprob, shown.bytes) == ("A", -9999.0, [65])
    assert [(one.token, one.bytes) for one in shown.top_logprobs] == [("é", [195, 169])]


def test_fingerprint_is_the_models():
    tokenizer = None  # plays no part
    model = ServedModel("a", ModelLimits(100, 512), (1,), tokenizer, "abc")
    others = [
        replace(model, name="b"),
        replace(model, limits=ModelLimits(100, 1024)),
        replace(model, eos_token_ids=(1, 2)),
        replace(model, tokenizer_fingerprint="abd"),
    ]
    assert system_fingerprint(replace(model, fallbacks=("b",))) == system_fingerprint(model)
    assert len({system_fingerprint(each) for each in [model, *others]}) == 5
