"""Events of responses: numbers, places and ids do not depend on how the text came."""

import re

import msgspec
import pytest

from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.responses_writer import ResponsesWriter
from gateway.types import Delta
from services.runtime.errors import InvalidRequest
from tests.gateway.openai.writers import USAGE, whole_of, writer_of


def written(*texts, after=""):
    """A stream of the answer that came in these parts, with ids; after an event, where one is given."""
    writer = writer_of(ResponsesWriter, ResponsesRequest, {"input": "a"})
    if after:
        writer.go_on_after(after)

    def with_ids(event):
        return writer.with_ids(event, before="1", after="1") if event else b""

    stream = with_ids(writer.opening(0))
    for text in texts:
        stream += with_ids(writer.chunk(0, Delta(0, [], text), None))
    return stream + with_ids(writer.chunk(0, Delta(0, [], "", finish_reason="stop"), USAGE))


def data_of(stream):
    return [msgspec.json.decode(data) for data in re.findall(rb"data: (.*)\n", stream)]


def ids_of(stream):
    return [found.decode() for found in re.findall(rb"id: (.*)\n", stream)]


@pytest.mark.parametrize("parts", [["hello"], ["he", "llo"], [*"hello"]])
def test_events_are_numbered_and_end_with_the_response(parts):
    events = data_of(written(*parts))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event.get("delta", "") for event in events) == "hello"
    assert events[-1]["type"] == "response.completed"
    writer = writer_of(ResponsesWriter, ResponsesRequest, {"input": "a"})
    assert events[-1]["response"] == msgspec.json.decode(writer.whole([whole_of("hello")]))


def test_a_stream_that_is_resumed_lacks_nothing_however_it_is_divided():
    stream = written("he", "llo")
    for number, event_id in enumerate(ids_of(stream)):
        for parts in (["hello"], ["h", "ell", "o"]):
            rest = data_of(written(*parts, after=event_id))
            before = data_of(stream)[: number + 1]
            assert "".join(event.get("delta", "") for event in [*before, *rest]) == "hello"
            assert [event["sequence_number"] for event in [*before, *rest]] == list(range(len(before) + len(rest)))


@pytest.mark.parametrize("event_id", ["", "a", "a;1", "a;01.1", "a;1.1;"])
def test_other_ids_are_refused(event_id):
    with pytest.raises(InvalidRequest):
        ResponsesWriter.journal_event_id(event_id)
    assert ResponsesWriter.journal_event_id("a;b;1.2") == "a;b"


def test_an_error_ends_the_response_as_far_as_it_has_come():
    writer = writer_of(ResponsesWriter, ResponsesRequest, {"input": "a"})
    writer.chunk(0, Delta(0, [], "he"), None)
    error = {"error": {"code": "c", "message": "messages is long", "param": "messages", "type": "server_error"}}
    first, last = data_of(writer.error(error))
    assert (first["type"], first["param"]) == ("error", "input")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["output"][0]["content"][0]["text"] == "he"
