"""The bodies of requests for vectors, scores and ranks, and the writing of vectors."""

import base64
import json
import struct
from typing import Any

import pytest

from gateway.limits import MAX_INPUTS
from gateway.openai.embeddings import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    embedding_json,
    numbers_of,
    read_vector_body,
)
from services.runtime.errors import InvalidRequest


def read(body_type: Any, **members: Any) -> Any:
    return read_vector_body(json.dumps(members).encode(), body_type)[0]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_an_input_has_the_four_forms_of_openai(given: Any, prompts: Any) -> None:
    call = read(EmbeddingRequest, input=given, user="u", service_class="batch").call()
    assert list(call.prompts) == prompts
    assert (call.operation, call.prompt_field, call.service_class) == ("embeddings", "input", "batch")


@pytest.mark.parametrize("given", [None, [], {}, 1, ["a", 1], [["a"], "a"], [[1], 1], True])
def test_other_inputs_are_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(EmbeddingRequest, input=given).call()
    assert caught.value.field == "input"


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": "8"}, "dimensions"),
        ({"input_type": "query"}, "input_type"),
        ({"late_chunking": True}, "late_chunking"),
    ],
)
def test_what_would_change_a_vector_is_refused_by_name(members: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(EmbeddingRequest, input="a", **members)
    assert caught.value.field == field


def test_what_changes_nothing_is_told() -> None:
    assert read_vector_body(b'{"input": "a", "safety_identifier": "x"}', EmbeddingRequest)[1] == ["safety_identifier"]


@pytest.mark.parametrize("most", [0, -2])
def test_a_text_cannot_be_cut_to_nothing(most: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(EmbeddingRequest, input="a", truncate_prompt_tokens=most).call()
    assert caught.value.field == "truncate_prompt_tokens"


def test_a_text_is_compared_with_one_or_with_as_many() -> None:
    assert read(ScoreRequest, text_1="a", text_2=["b", "c"]).pairs() == [("a", "b"), ("a", "c")]
    assert read(ScoreRequest, queries=["a", "b"], documents=["c", "d"]).pairs() == [("a", "c"), ("b", "d")]
    with pytest.raises(InvalidRequest, match="as many as text_2"):
        read(ScoreRequest, text_1=["a", "b"], text_2=["c"]).pairs()
    for missing in ({"text_1": "a"}, {"text_2": "a"}, {"text_1": [], "text_2": "a"}):
        with pytest.raises(InvalidRequest, match="is missing"):
            read(ScoreRequest, **missing).pairs()


def test_documents_are_texts_or_have_one() -> None:
    assert read(RerankRequest, query="q", documents=["a", {"text": "b", "id": 1}]).texts() == ["a", "b"]
    for documents in ([1], [{"title": "a"}], [None]):
        with pytest.raises(InvalidRequest) as caught:
            read(RerankRequest, query="q", documents=documents).texts()
        assert caught.value.field == "documents[0]"
    for missing in ({"query": "q"}, {"documents": ["a"]}, {"query": "q", "documents": []}):
        with pytest.raises(InvalidRequest, match="is missing"):
            read(RerankRequest, **missing).texts()
    with pytest.raises(InvalidRequest, match="top_n"):
        read(RerankRequest, query="q", documents=["a"], top_n=-1).texts()


def test_a_vector_is_written_in_both_forms() -> None:
    vector = struct.pack("<3f", 0.5, -1.25, 3.0)
    assert json.loads(embedding_json(4, vector, encoding_format=None)) == {
        "index": 4,
        "object": "embedding",
        "embedding": [0.5, -1.25, 3.0],
    }
    assert base64.b64decode(json.loads(embedding_json(0, vector, encoding_format="base64"))["embedding"]) == vector
    assert list(numbers_of(vector)) == [0.5, -1.25, 3.0]


def test_the_description_has_the_bound_that_is_checked() -> None:
    import msgspec

    schema = msgspec.json.schema(EmbeddingRequest)["$defs"]["EmbeddingRequest"]["properties"]["input"]
    assert {form.get("maxItems") for form in schema["anyOf"]} == {None, MAX_INPUTS}
