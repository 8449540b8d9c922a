"""What clients ask of named requests: ids, keys and positions that break a rule."""

import pytest

from gateway.limits import check_idempotency_key
from gateway.named.ask import ask_for, ask_to_resume, journal_name
from gateway.named.journal import START, Position, Shown
from services.runtime.errors import AlreadyExists, InvalidRequest
from tests.gateway.named.calls import call, keyed, named


def test_ids_that_are_made_of_keys_are_no_clients_choice():
    derived = keyed("k", tenant="a").request_id
    with pytest.raises(InvalidRequest) as refused:
        named(derived, tenant="b")
    assert refused.value.field == "request_id"
    with pytest.raises(InvalidRequest):
        keyed("other", tenant="a", request_id=derived)
    assert keyed("k", tenant="a", request_id=derived).request_id == derived
    assert named(derived, tenant="a", last=f"{derived}/1").request_id == derived
    assert named("key-7", tenant="b").request_id == "key-7"


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "é", "\x7f"])
def test_keys_that_break_the_rule_are_refused(key):
    with pytest.raises(InvalidRequest):
        check_idempotency_key(key)
    check_idempotency_key(" ~" + "x" * 253)


def test_only_named_requests_have_a_journal():
    assert ask_for(call(), "body") is None
    with pytest.raises(InvalidRequest):
        ask_for(call(), "body", last_event_id="x/1")
    assert ask_for(call(request_id="x"), "body").request_id == "x"
    assert ask_for(call(idempotency_key="k"), "body").request_id.startswith("key-")


def test_a_position_is_one_of_the_request_that_is_asked_for():
    read = named("mine", last="mine/3,-")
    assert read.positions_in(2) == [Position(3, Shown.TOKENS), START]
    with pytest.raises(InvalidRequest, match="2 answers, and the call has 1"):
        read.positions_in(1)
    with pytest.raises(InvalidRequest, match="another request"):
        named("mine", last="another/3")


def test_a_key_finds_its_request_by_the_id_of_an_event():
    read = keyed("k", last="chosen/3")
    assert read.request_id == read.call.request_id == "chosen"
    assert read.name == keyed("k").name


def test_what_is_asked_is_compared_with_the_journal():
    read = named("mine", last="mine/3")
    read.check(digest=read.digest, request_id="mine", num_answers=1)
    with pytest.raises(AlreadyExists):
        read.check(digest="other", request_id="mine", num_answers=1)
    with pytest.raises(InvalidRequest, match="another request"):
        read.check(digest=read.digest, request_id="other", num_answers=1)
    with pytest.raises(InvalidRequest):
        read.check(digest=read.digest, request_id="mine", num_answers=2)


def test_an_index_goes_with_a_single_answer():
    rest = ask_to_resume("mine", "a", next_index=4, remaining_s=60.0)
    assert (rest.name, rest.is_continuation) == (journal_name("a", "mine"), True)
    assert rest.positions_in(1) == [Position(4, Shown.TOKENS)]
    with pytest.raises(InvalidRequest) as refused:
        rest.positions_in(2)
    assert refused.value.field == "next_index"
    assert ask_to_resume("mine", "a", next_index=0, remaining_s=60.0).positions_in(1) == [START]
