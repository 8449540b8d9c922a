"""What is kept of an answer, and what an answer says that could not be kept."""

import json

import pytest

from gateway.stored.kept import KeptResponse, Turn, add_turn
from services.cluster.answer_records import AnswerReply
from services.runtime.errors import StoreUnavailable

BODY = json.dumps({"id": "resp_1", "status": "completed", "store": True, "conversation": {"id": "conv_1"},
                   "output": [{"id": "msg_o"}]}).encode()  # fmt: skip
EVENT = b"event: response.completed\ndata: " + json.dumps({"response": json.loads(BODY)}).encode() + b"\n\n"


class Store:
    """Answers with these replies; an exception is raised."""

    def __init__(self, append=AnswerReply.DONE, put=AnswerReply.DONE):
        self.replies = {"append": append, "put": put}
        self.calls = {}

    def _reply(self, name, **told):
        self.calls[name] = told
        reply = self.replies[name]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def append(self, tenant, entry_id, **told):
        return self._reply("append", entry_id=entry_id, **told)

    async def put(self, tenant, entry_id, **told):
        return self._reply("put", entry_id=entry_id, **told)


def kept(store, *, conversation_id="conv_1", is_stored=True, is_long=False):
    earlier = [{"id": "msg_e"}]
    turn = Turn([{"role": "user", "content": "hi", "id": "msg_mine"}], earlier, conversation_id)
    return KeptResponse(store, turn, tenant="acme", is_stored=is_stored, is_long=is_long)


@pytest.mark.parametrize("is_long", [False, True])
async def test_it_is_added_to_its_conversation_and_kept_with_all_of_its_input(is_long):
    store = Store()
    assert await kept(store, is_long=is_long).whole(BODY) == BODY
    own, output = map(json.loads, store.calls["append"]["items"])
    assert (store.calls["append"]["entry_id"], output) == ("conv_1", {"id": "msg_o"})
    assert own["id"] != "msg_mine", "two items of a conversation could have it"
    assert json.loads(store.calls["put"]["input_items"]) == [{"id": "msg_e"}, own]
    store = Store()
    await kept(store, conversation_id=None).whole(BODY)
    assert json.loads(store.calls["put"]["input_items"])[1]["id"] == "msg_mine"
    assert "append" not in store.calls
    store = Store()
    await kept(store, is_stored=False).whole(BODY)
    assert [*store.calls] == ["append"]


@pytest.mark.parametrize(
    ("replies", "undone"),
    [
        ({"append": AnswerReply.HELD}, {}),
        ({"append": AnswerReply.GONE}, {"conversation": None}),
        ({"append": StoreUnavailable("away")}, {"conversation": None}),
        ({"put": AnswerReply.TENANT_FULL}, {"store": False}),
        ({"put": StoreUnavailable("away"), "append": AnswerReply.LONG}, {"store": False, "conversation": None}),
    ],
)
async def test_it_says_what_was_not_done(replies, undone):
    store = Store(**replies)
    expected = {**json.loads(BODY), **undone}
    assert json.loads(await kept(store).whole(BODY)) == expected
    shown = await kept(store).passing(b"event: a\ndata: {}\n\n" + EVENT)
    first, last, end = shown.split(b"\n\n")
    assert (first, end) == (b"event: a\ndata: {}", b"")
    assert json.loads(last.partition(b"data: ")[2])["response"] == expected
    # What is kept says the truth of its conversation too.
    assert json.loads(store.calls["put"]["document"])["conversation"] == expected["conversation"]


async def test_events_before_the_end_pass_untouched():
    store = Store()
    assert (
        await kept(store).passing(b"event: response.created\ndata: {}\n\n") == b"event: response.created\ndata: {}\n\n"
    )
    assert store.calls == {}


async def test_a_turn_that_has_failed_is_not_added():
    store = Store()
    document = json.dumps({"status": "failed", "output": []}).encode()
    assert await add_turn(store, tenant="acme", conversation_id="conv_1", own=[], document=document)
    assert store.calls == {}
