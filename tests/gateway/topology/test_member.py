"""A worker by the freshest evidence: its session while that is up, else the registry."""

from types import SimpleNamespace

import msgspec
import pytest

from gateway.topology.books import Books
from gateway.topology.member import Member, seen_of
from gateway.topology.reports import WorkerLoad
from services.runtime.worker_state import WorkerState
from tests.gateway.topology.test_members import record


def member(*, is_up=True, state="ready", load=None, **facts):
    session = SimpleNamespace(is_up=is_up, load=load or WorkerLoad(), books=Books())
    return Member(msgspec.structs.replace(record("d-0"), state=state), session, changed_at_s=0.0, **facts)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, WorkerState.READY),
        ({"state": "starting"}, WorkerState.READY),  # its session is fresher than its record
        ({"is_up": False}, WorkerState.LOST),
        ({"is_up": False, "state": "starting"}, WorkerState.STARTING),
        ({"is_up": False, "is_drain_asked": True}, WorkerState.LOST),
        ({"is_drain_asked": True}, WorkerState.DRAINING),
        ({"state": "draining"}, WorkerState.DRAINING),
        ({"load": WorkerLoad(is_draining=True)}, WorkerState.DRAINING),
        ({"left_out": "another model", "is_drain_asked": True}, WorkerState.LEFT_OUT),
    ],
)
def test_state(facts, state):
    assert member(**facts).state == state


def test_pages_are_those_of_the_session_while_it_is_up():
    one = member(load=WorkerLoad(pages_total=10, pages_free=4, pages_cached=3, pages_promised=2))
    one.record = msgspec.structs.replace(one.record, pages_total=20, pages_free=9)
    assert (one.load.pages_total, one.pages_available) == (10, 5)
    one.session.is_up = False
    assert (one.load.pages_total, one.pages_available) == (20, 9)


def test_presence_sees_what_the_record_says_and_whether_it_ever_worked():
    one = member(has_worked=True)
    seen = seen_of(one)
    assert (seen.id, seen.role, seen.model, seen.state, seen.has_worked) == (
        "d-0",
        "decode",
        "m",
        WorkerState.READY,
        True,
    )
    assert not seen_of(member()).has_worked
