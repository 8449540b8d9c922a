"""Events and items as data: how a stream is divided, what is filled in, and what of an input is kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stored.documents import EventSplitter, changed, failed_event, id_of, input_items, response_of, with_members

RESPONSE = {"id": "resp_a", "store": False, "tools": [{"store": True}]}
STREAM = (
    b": keep-alive\n\n"
    b"event: response.created\n"
    b'data: {"type":"response.created","response":{"id":"resp_a","store":false}}\nid: a/0;0.0\n\n'
    b'event: response.output_text.delta\ndata: {"delta":"event: response.completed"}\nid: a/1;1.1\n\n'
    b'event: error\ndata: {"code":"x"}\n\n'
    + f"event: response.failed\ndata: {json.dumps({'response': RESPONSE})}\n\n".encode()
)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_stream_is_divided_alike_however_it_comes(cuts):
    splitter, events, at = EventSplitter(), [], 0
    for cut in [*sorted(cuts), len(STREAM)]:
        events += splitter.take(STREAM[at:cut])
        at = cut
    kinds = [event.kind for event in events]
    assert kinds == [b"response.created", b"response.output_text.delta", b"error", b"response.failed"]
    assert b"".join(event.data for event in events) == STREAM.removeprefix(b": keep-alive\n\n")
    assert [event.is_last for event in events] == [False, False, True, True]
    assert [id_of(event.data) for event in events] == ["a/0;0.0", "a/1;1.1", "", ""]


def test_members_are_filled_in_where_a_response_is():
    created, delta, error, failed = EventSplitter().take(STREAM)
    assert with_members(delta, {"store": True}) == delta
    assert with_members(error, {"store": True}) == error
    assert b'"store":true}}\nid: a/0;0.0\n\n' in with_members(created, {"store": True}).data
    changed_response = json.loads(response_of(with_members(failed, {"store": 5})))
    assert changed_response == {**RESPONSE, "store": 5}
    assert json.loads(response_of(failed)) == RESPONSE
    assert json.loads(changed(response_of(failed), id="b")) == {**RESPONSE, "id": "b"}
    (made,) = EventSplitter().take(failed_event(response_of(failed), 7))
    assert (made.kind, json.loads(response_of(made))) == (b"response.failed", RESPONSE)


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_text", "text": "a"}]}),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": 1}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        ),
        (
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": "x"},
            {"summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        ),
        ({"type": "reasoning", "summary": ["x"]}, {"summary": [], "content": []}),
        (
            {"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}", "x": 1},
            {"call_id": "c", "namespace": "n", "name": "f", "arguments": "{}"},
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
            {"call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        ),
    ],
)
def test_of_an_item_what_a_model_is_told_is_kept(item, kept):
    (got,) = input_items([item], "resp_a")
    assert got == {"id": got["id"], "type": item.get("type", "message"), "status": "completed", **kept}
    assert input_items([{**item, "id": "own_1"}], "resp_a")[0]["id"] == "own_1"
    assert input_items([{**item, "id": "\ud800"}], "resp_a")[0]["id"] == got["id"]
    assert input_items([item], "resp_b")[0]["id"] != got["id"]


def test_a_text_is_one_message():
    (item,) = input_items("hi", "resp_a")
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "hi"}])
