"""One named request on a gateway: what is written of it, and what it takes from what another gateway wrote."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.named.journal import Answer, decode_call, encode_end, restore
from gateway.named.live_journal import Journal, UnusableError, read_held
from gateway.requests.call import RequestFacts, StoredCall, StoredChoice
from gateway.types import Delta, TokenLogprobs
from services.cluster.journals import Held
from services.runtime.errors import AlreadyExists, InternalError, InvalidRequest
from tests.gateway.named.calls import USAGE, named, sampling


def stored(*samplings, prompt=(5, 6, 7), **fields):
    return StoredCall(
        request_id="mine",
        choices=[StoredChoice(list(prompt), each) for each in samplings or (sampling(),)],
        facts=RequestFacts(operation="text_completion"),
        model="tiny",
        remaining_s=60.0,
        **fields,
    )


def opened(call=None):
    """A journal whose call was accepted just now."""
    call = call or stored()
    journal = Journal([], "mine", "", "digest")
    journal.open(call, [Answer() for _ in call.choices], 1000, name="name", owner="a" * 32)
    journal.specs = [
        SimpleNamespace(choice=number, sampling=choice.sampling) for number, choice in enumerate(call.choices)
    ]
    return journal


def held(journal, token_ids, ends=None, /, **fields):
    """What Redis has of the journal after another gateway continued it."""
    record = journal.record
    known = {
        "name": record.name,
        "digest": record.digest,
        "life": record.life,
        "epoch": 2,
        "request_id": record.request_id,
        "call": record.call,
        "token_ids": token_ids,
        "ends": ends or [b""] * len(token_ids),
    }
    return Held(**(known | fields))


def finished(token_ids):
    answer = Answer()
    answer.add(Delta(0, list(token_ids), "", None, "stop", USAGE))
    return answer


def test_a_part_is_in_the_record_and_wakes_the_readers():
    journal = opened()
    news = asyncio.Event()
    journal.readers.add(news)
    journal.add(0, Delta(0, [1, 2], "x"))
    assert news.is_set()
    assert journal.record.token_ids == [[1, 2]]
    assert not journal.is_finished
    journal.add(0, Delta(2, [3], "y", None, "stop", USAGE))
    assert journal.is_finished
    assert restore([1, 2, 3], journal.record.ends[0]).finish_reason == "stop"
    with pytest.raises(InternalError):
        journal.add(0, Delta(3, [4], "z"))


def test_neither_log_probabilities_nor_their_tokens_are_written():
    journal = opened(stored(sampling(logprobs=1), sampling()))
    for choice in range(2):
        journal.add(choice, Delta(0, [1], "", [TokenLogprobs(-0.5, [])], "stop", USAGE))
    assert journal.record.token_ids == [[], [1]]
    assert [bool(end) for end in journal.record.ends] == [False, True]


def test_the_weights_of_an_answer_are_written_once_with_its_first_token():
    journal = opened()
    journal.record.is_in_redis = True
    journal.add(0, Delta(0, [1], "", layout="weights"))
    call, _ = decode_call(journal.record.call, request_id="mine")
    assert call.choices[0].layout == "weights"
    assert not journal.record.is_in_redis
    journal.record.is_in_redis = True
    journal.add(0, Delta(1, [2], "", layout="weights"))
    assert journal.record.is_in_redis


def test_what_another_gateway_added_is_taken():
    journal = opened(stored(sampling(), sampling(), sampling(logprobs=1)))
    journal.add(0, Delta(0, [1, 2], ""))
    journal.add(1, Delta(0, [7], ""))
    journal.add(2, Delta(0, [9], "", [TokenLogprobs(-0.5, [])]))
    end = encode_end(finished([1, 2, 3]))
    journal.merge(held(journal, [[1, 2, 3], [8, 8], []], [end, b"", b""]))
    first, other, with_logprobs = journal.answers
    assert (first.token_ids, first.finish_reason, first.usage) == ([1, 2, 3], "stop", USAGE)
    assert other.token_ids == [7]  # what Redis has begins otherwise
    assert with_logprobs.token_ids == [9]
    record = journal.record
    assert (record.epoch, record.is_in_redis, record.num_written) == (2, True, [3, 1, 0])
    assert record.ends[0] == end


@pytest.mark.parametrize("changes", [{"life": "another"}, {"token_ids": [[1], [2]], "ends": [b"", b""]}])
def test_a_journal_that_another_one_has_replaced_is_not_written_again(changes):
    journal = opened()
    journal.merge(held(journal, [[1]], **changes))
    assert journal.record.is_over
    assert journal.answers[0].token_ids == []


def test_a_settled_call_stays_with_its_model():
    journal = opened(stored(is_settled=False))
    journal.settle(stored(is_settled=False, fallback="large -> tiny"), journal.specs)
    call, created_unix_s = decode_call(journal.record.call, request_id="mine")
    assert (call.is_settled, call.fallback, created_unix_s) == (True, "large -> tiny", 1000)
    assert journal.call.is_settled


def test_a_new_span_is_written_and_the_same_one_is_not():
    journal = opened()
    assert not journal.note_trace("")
    assert journal.note_trace("00-trace-span-01")
    call, _ = decode_call(journal.record.call, request_id="mine")
    assert call.traceparent == journal.traceparent == "00-trace-span-01"
    assert not journal.note_trace("00-trace-span-01")


def test_what_redis_holds_is_read_with_its_answers():
    journal = opened(stored(sampling(), sampling(logprobs=1)))
    end = encode_end(finished([1, 2]))
    call, answers, created_unix_s = read_held(held(journal, [[1, 2], [3]], [end, b""]))
    assert (call.request_id, created_unix_s) == ("mine", 1000)
    assert [(answer.token_ids, answer.finish_reason) for answer in answers] == [([1, 2], "stop"), ([], None)]
    for changes in ({"call": b"\x00 garbage"}, {"token_ids": [[1]], "ends": [b""]}):
        with pytest.raises(UnusableError):
            read_held(held(journal, [[1, 2], [3]], **changes))


def test_only_an_accepted_journal_can_be_another_request():
    asked = named("mine", body="b")
    unknown = Journal([], "other", "", "other digest")
    unknown.check(asked)
    journal = opened()
    with pytest.raises(AlreadyExists):
        journal.check(asked)
    journal.digest = asked.digest
    journal.check(asked)


def test_a_call_that_fits_may_grow_to_its_last_token():
    opened().check_size()
    for call, field in (
        (stored(prompt=[2**20] * 900_000), "prompt"),
        (stored(sampling(max_tokens=1_200_000)), "max_tokens"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            opened(call).check_size()
        assert refused.value.field == field
    opened(stored(sampling(max_tokens=1_200_000, logprobs=1))).check_size()
