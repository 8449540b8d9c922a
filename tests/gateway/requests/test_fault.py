"""Which worker is to blame for the end of an attempt."""

import pytest

from gateway.requests.fault import Fault, fault_of
from gateway.topology.events import Cancelled, Failed, Unfit
from gateway.topology.reports import WorkerLoad
from services.runtime.errors import (
    ChannelUnreachable,
    InternalError,
    LayoutMismatch,
    LinkRefused,
    NoFreePages,
    PeerUnreachable,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)


class Worker:
    """Stands for a worker's session."""

    def __init__(self, *, is_draining=False):
        self.load = WorkerLoad(is_draining=is_draining)


class Attempt:
    """One whose decode worker computes, or both of whose workers do."""

    def __init__(self, *, computing="both", is_move=False, is_at_giver=False, has_prefill=True, is_draining=False):
        self.decode, self.prefill = Worker(), Worker(is_draining=is_draining) if has_prefill else None
        self.is_move, self.is_at_giver = is_move, is_at_giver
        self.token_sources = set()
        self._computing = computing

    def is_at(self, session):
        return True

    def may_compute(self, session):
        return self._computing == "both" or (session is self.prefill) == (self._computing == "prefill")

    def fault(self, session, error, event=None):
        return fault_of(self, session, event or Failed(error), error)


def test_a_worker_that_died_while_it_computed_is_suspected():
    attempt, error = Attempt(computing="prefill"), WorkerLost("gone")
    assert attempt.fault(attempt.prefill, error) == Fault(error, attempt.prefill, suspects=(attempt.prefill,))
    assert attempt.fault(attempt.decode, error) == Fault(error, attempt.decode)


def test_a_worker_that_died_while_the_giver_computed_is_not():
    attempt = Attempt(is_at_giver=True, is_move=True)
    assert attempt.fault(attempt.decode, WorkerLost("gone")).suspects == ()


@pytest.mark.parametrize(
    "error",
    [
        TransferFailed("x"),
        LayoutMismatch("x"),
        WorkerUnavailable("x"),
        PeerUnreachable("x"),
        LinkRefused("x"),
        ChannelUnreachable("x"),
    ],
)
def test_what_one_worker_says_of_a_transfer_is_about_the_other(error):
    attempt = Attempt()
    prefill, decode = attempt.prefill, attempt.decode
    assert attempt.fault(decode, error) == Fault(error, suspects=(prefill,), accused=prefill)
    assert attempt.fault(prefill, error) == Fault(error, suspects=(decode,), accused=decode)
    attempt.token_sources.add(attempt.prefill)
    assert not attempt.fault(attempt.decode, error).is_fresh


def test_a_worker_that_is_leaving_accuses_no_other():
    attempt = Attempt(is_draining=True)
    assert attempt.fault(attempt.prefill, WorkerUnavailable("the prefill worker is leaving")).accused is None


@pytest.mark.parametrize("facts", [{"is_move": True}, {"has_prefill": False}, {"is_draining": True}])
def test_nobody_is_suspected_where_the_other_leaves_or_is_none(facts):
    attempt, error = Attempt(**facts), TransferFailed("x")
    assert attempt.fault(attempt.decode, error) == Fault(error)


def test_a_worker_that_knows_of_no_transfer_yet_computes_nothing():
    attempt = Attempt(computing="prefill")
    assert attempt.fault(attempt.prefill, TransferFailed("x")).suspects == ()


def test_a_worker_that_confesses_is_certain():
    attempt, error = Attempt(), InternalError("a bug")
    assert attempt.fault(attempt.decode, error) == Fault(
        error, attempt.decode, suspects=(attempt.decode,), is_certain=True
    )


def test_an_ordinary_refusal_is_held_against_its_worker_and_no_suspicion():
    attempt = Attempt()
    for error in (Unfit("x"), NoFreePages("x")):
        assert attempt.fault(attempt.decode, error) == Fault(error, attempt.decode)


def test_an_event_that_makes_no_sense_is_its_senders_fault_unless_a_token_is_missing():
    attempt, cancelled = Attempt(), Cancelled(False)
    error = InternalError("too many tokens")
    assert attempt.fault(attempt.decode, error, cancelled) == Fault(error, attempt.decode)
    assert attempt.fault(attempt.decode, TransferFailed("gap"), cancelled).worker is None
