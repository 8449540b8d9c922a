"""What a session writes: commands in order, at once where it is idle, and together where many come."""

import asyncio

import pytest

from gateway.topology.events import AttemptKey
from gateway.topology.pacing import Pace
from gateway.topology.session import GATHER_S, DecodeSession, Peer


class Call:
    """The stream to a worker, which takes everything at once."""

    def __init__(self):
        self.messages = []

    async def write(self, message):
        self.messages.append([command.pause.id.request_id for command in message.commands])

    def cancel(self):
        raise AssertionError("the stream is well")


@pytest.fixture
async def session():
    session = DecodeSession(
        Peer("d-0", "0" * 32, "nowhere"), gateway_incarnation="1" * 32, on_change=lambda _: None, pace=Pace()
    )
    session.is_up = True
    return session


@pytest.fixture
async def call(session):
    call = Call()
    writer = asyncio.create_task(session._write_commands(call))
    yield call
    writer.cancel()
    await asyncio.wait([writer])


async def test_a_command_goes_at_once_and_those_right_after_it_go_together(session, call):
    session.pause(AttemptKey("first", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.messages == [["first"]]
    for name in "abc":
        session.pause(AttemptKey(name, 1))
        await asyncio.sleep(0)
    assert call.messages == [["first"]]
    await asyncio.sleep(10 * GATHER_S)
    assert call.messages == [["first"], ["a", "b", "c"]]
    session.pause(AttemptKey("later", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.messages[2:] == [["later"]]


async def test_a_session_that_breaks_meanwhile_writes_nothing_more(session, call):
    session.pause(AttemptKey("first", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    session.pause(AttemptKey("second", 1))
    await asyncio.sleep(0)
    session._outgoing.clear()  # as `_break` does
    await asyncio.sleep(10 * GATHER_S)
    assert call.messages == [["first"]]
    assert session._wake_writer is not None
    assert not session._wake_writer.done()
