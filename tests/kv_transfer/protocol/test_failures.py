"""Errors on their way over a Link."""

import pytest

from kv_transfer.protocol.failures import _CLASSES, abort_of, code_of, error_from
from kv_transfer.protocol.messages import Abort, TransferId
from services.runtime import errors

TRANSFER = TransferId("r", 1)


@pytest.mark.parametrize("cls", _CLASSES.values(), ids=_CLASSES)
def test_each_class_comes_out_as_it_went_in(cls):
    error = cls("why")
    error.retry_after_s = 0.25
    said = abort_of(TRANSFER, error)
    assert (said.id, said.code, said.message, said.retry_after_ms) == (TRANSFER, cls.__name__, "why", 250)
    heard = error_from(said)
    assert (type(heard), heard.message, heard.retry_after_s) == (cls, "why", 0.25)


def test_a_subclass_travels_as_its_parent_and_a_stranger_as_a_failed_transfer():
    class Own(errors.NoFreePages):
        pass

    assert code_of(Own("x")) == "NoFreePages"
    assert code_of(errors.Quarantined("x")) == "TransferFailed"
    assert type(error_from(Abort(None, "SystemExit", "x", 0))) is errors.TransferFailed


def test_a_name_is_not_enough():
    class Overloaded(errors.TransferFailed):
        pass

    assert code_of(Overloaded("x")) == "TransferFailed"


@pytest.mark.parametrize(("asked_s", "told_ms"), [(-1.0, 0), (0.0001, 1), (1e12, 86_400_000)])
def test_the_time_to_try_again_is_bounded(asked_s, told_ms):
    error = errors.Overloaded("x")
    error.retry_after_s = asked_s
    assert abort_of(None, error).retry_after_ms == told_ms
