"""The tokens of an answer: each index once, whatever workers send."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.requests.tokens import TokenLog
from gateway.topology.events import Emitted
from gateway.types import TokenLogprobs
from services.runtime.errors import InternalError, TransferFailed
from tests.examples import examples


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=20))
def test_log_grows_without_gap_or_repeat(parts):
    log = TokenLog(1000)
    for first, count in parts:
        before = list(log.token_ids)
        part = Emitted(first, list(range(first, first + count)), None)
        if first > len(before):
            with pytest.raises(TransferFailed):
                log.accept(part)
            assert log.token_ids == before
        else:
            new = log.accept(part)
            assert log.token_ids == before + new.token_ids
            assert new.token_ids == [] or new.first_index == len(before)
        assert log.token_ids == list(range(len(log.token_ids)))


def test_log_checks_what_workers_send():
    log = TokenLog(2)
    with pytest.raises(InternalError):
        log.accept(Emitted(0, [1, 2, 3], None))
    with pytest.raises(InternalError):
        log.accept(Emitted(0, [1, 2], [TokenLogprobs(0.0, [])]))
    log.accept(Emitted(0, [1], [TokenLogprobs(-1.0, [])]))
    new = log.accept(Emitted(0, [1, 2], [TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, [])]))
    assert (new.token_ids, new.logprobs[0].logprob) == ([2], -2.0)
    assert log.is_full
