"""Sessions are made again after they end, and end where a worker is silent, unless this process itself slept."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from gateway.topology import keeper
from gateway.topology.keeper import break_silent, keep_connected
from gateway.topology.session import Peer, Unreachable
from services.runtime.errors import NotProven, WorkerUnavailable
from services.runtime.reach import NETWORK, OTHER_CLUSTER, SILENT
from tests.waiting import HANG_LIMIT_S

PEER = Peer(worker_id="d-0", incarnation="0" * 32, address="h:1")


class Session:
    """Ends at once, with an error each time it is run."""

    def __init__(self, error):
        self.error, self.checks, self.slept_s = error, [], 0.0
        self.has_ended = False
        self.checked_often, self.was_forgiven = asyncio.Event(), asyncio.Event()

    async def run(self):
        self.has_ended = True
        raise self.error

    def check_silence(self, now_s, *, is_lease_renewed):
        self.checks.append(is_lease_renewed)
        if len(self.checks) == 3:
            self.checked_often.set()

    def forgive_silence(self, slept_s):
        self.slept_s += slept_s
        self.was_forgiven.set()


def member_with(*errors):
    record = SimpleNamespace(id="d-0", address="h:1")
    return SimpleNamespace(record=record, session=Session(errors[0]), obstacle=None, is_listed=True)


async def test_a_session_is_made_again_until_the_worker_is_not_listed(monkeypatch):
    monkeypatch.setattr(keeper, "FIRST_RECONNECT_S", 0.001)
    member, obstacles = member_with(WorkerUnavailable("gone")), []
    errors = [Unreachable(PEER, SILENT), NotProven("another secret")]

    def new_session():
        obstacles.append(member.obstacle)
        member.is_listed = len(errors) > 1
        return Session(errors.pop(0))

    async with asyncio.timeout(HANG_LIMIT_S):
        await keep_connected(member, new_session)
    assert [obstacles[0].cause, obstacles[1]] == ["gone", SILENT]
    assert (obstacles[0].remedy, member.obstacle.remedy) == (NETWORK, OTHER_CLUSTER)
    assert not errors


async def test_a_keeper_that_is_restarted_after_an_unexpected_error_uses_a_new_session():
    member, made = member_with(KeyError("unknown field")), []
    member.is_listed = False

    def new_session():
        made.append(Session(WorkerUnavailable("gone")))
        return made[-1]

    with pytest.raises(KeyError):
        await keep_connected(member, new_session)
    assert not made
    async with asyncio.timeout(HANG_LIMIT_S):
        await keep_connected(member, new_session)
    assert [member.session] == made, "a session cannot run twice"
    assert member.obstacle.cause == "gone"


@pytest.mark.parametrize(("renewed_ago_s", "is_renewed"), [(0.0, True), (math.inf, False)])
async def test_silence_is_judged_by_the_lease_too(monkeypatch, renewed_ago_s, is_renewed):
    monkeypatch.setattr(keeper, "SILENCE_CHECK_S", 0.001)
    member, now_s = member_with(None), asyncio.get_running_loop().time
    checking = asyncio.create_task(break_silent(lambda: [member], lambda worker_id: now_s() - renewed_ago_s))
    async with asyncio.timeout(HANG_LIMIT_S):
        await member.session.checked_often.wait()
    checking.cancel()
    assert set(member.session.checks) == {is_renewed}


async def test_nobody_is_blamed_for_the_time_in_which_this_process_slept(monkeypatch):
    monkeypatch.setattr(keeper, "SILENCE_CHECK_S", 0.001)
    monkeypatch.setattr(keeper, "OWN_PAUSE_S", -1.0)  # Any time that passes counts as a pause.
    member = member_with(None)
    checking = asyncio.create_task(break_silent(lambda: [member], lambda worker_id: -math.inf))
    async with asyncio.timeout(HANG_LIMIT_S):
        await member.session.was_forgiven.wait()
    checking.cancel()
    assert member.session.slept_s
