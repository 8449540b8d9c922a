"""Changes to what is stored: each is made once, whatever comes in between."""

import pytest

from gateway.stored import kind
from gateway.stored.kind import LIMIT, StoredKind, check_reply, encoded
from services.cluster.answer_records import AnswerReply
from services.cluster.answers import AnswerRoom, StoredAnswer
from services.runtime.errors import InvalidRequest, NotFound, Overloaded, RateLimited


class Things(StoredKind):
    prefix = "thing_"
    word = "thing"

    @classmethod
    def not_found(cls, entry_id):
        return NotFound(f"no thing {entry_id}", field="thing_id", code="thing_not_found")


class Store:
    """One entry of one tenant. `others` changes come in between, each before one of ours."""

    room = AnswerRoom()

    def __init__(self, others=0, reply=AnswerReply.DONE):
        self.document, self.stamp = b'{"metadata":{},"kept":1}', 0
        self.others, self.reply = others, reply

    async def find(self, tenant, entry_id):
        if (tenant, entry_id) != ("acme", "thing_1"):
            return None
        return StoredAnswer(self.document, b"[]", "over", False, False, b"%d" % self.stamp)

    async def change(self, tenant, entry_id, *, read, document, input_items):
        if self.others:
            self.others -= 1
            self.stamp += 1
        if read.stamp != b"%d" % self.stamp:
            return AnswerReply.FENCED
        if self.reply is AnswerReply.DONE:
            self.document = document
        return self.reply

    async def delete(self, tenant, entry_id):
        return await self.find(tenant, entry_id) is not None


def things(**more):
    store = Store(**more)
    return store, Things(store, on_refusal=lambda limit: None)


async def test_a_change_that_another_overtakes_is_made_anew():
    store, ours = things(others=3)
    document = await ours.change("acme", "thing_1", metadata={"a": "b"})
    assert document == store.document == b'{"metadata":{"a":"b"},"kept":1}'
    _, ours = things(others=kind.MAX_TRIES)
    with pytest.raises(Overloaded, match="thing is being changed"):
        await ours.change("acme", "thing_1", metadata={})


@pytest.mark.parametrize(("reply", "error"), [(AnswerReply.GONE, NotFound), (AnswerReply.TENANT_FULL, RateLimited)])
async def test_a_change_that_cannot_be_made_says_why(reply, error):
    _, ours = things(reply=reply)
    with pytest.raises(error):
        await ours.change("acme", "thing_1", metadata={})


async def test_what_the_tenant_has_not_is_not_found():
    _, ours = things()
    await ours.delete("acme", "thing_1")
    for tenant, entry_id in (("acme", "thing_2"), ("acme", "1"), ("other", "thing_1")):
        for ask in (
            ours.find(tenant, entry_id),
            ours.delete(tenant, entry_id),
            ours.change(tenant, entry_id, metadata={}),
        ):
            with pytest.raises(NotFound) as caught:
                await ask
            assert (caught.value.field, caught.value.code) == ("thing_id", "thing_not_found")


ROOM = AnswerRoom(123, 456)


@pytest.mark.parametrize(
    ("reply", "error", "said", "limits"),
    [
        (AnswerReply.ACTIVE, RateLimited, "in the background", [LIMIT]),
        (AnswerReply.TENANT_FULL, RateLimited, "123 bytes", [LIMIT]),
        (AnswerReply.ALL_FULL, Overloaded, "456 bytes", []),
        (AnswerReply.LONG, InvalidRequest, "more than", []),
    ],
)
def test_each_refusal_says_what_is_full(reply, error, said, limits):
    told = []
    with pytest.raises(error, match=said):
        check_reply(reply, ROOM, on_refusal=told.append)
    assert told == limits


def test_what_was_done_is_no_refusal():
    for reply in (AnswerReply.DONE, AnswerReply.HELD):
        check_reply(reply, ROOM, on_refusal=pytest.fail)


def test_half_a_surrogate_pair_is_refused():
    assert encoded({"a": "é"}) == '{"a":"é"}'.encode()
    with pytest.raises(InvalidRequest) as caught:
        encoded(["\ud800"])
    assert caught.value.code == "invalid_encoding"
