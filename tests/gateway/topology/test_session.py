"""How a session opens, and what it writes: commands in order, at once when idle, and together when many arrive."""

import asyncio
import time

import pytest

from gateway.topology.events import AttemptKey, Heard, SequenceOrder, VectorOrder
from gateway.topology.pacing import Pace
from gateway.topology.session import GATHER_S, DecodeSession, Peer, PrefillSession
from gateway.types import Sampling
from protos import worker_pb2_grpc
from services.runtime import rpc
from services.runtime.clock import Deadline, ManualClock
from services.runtime.errors import Overloaded, WorkerUnavailable
from services.runtime.telemetry import TraceContext
from tests.waiting import settle


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


class HeldSleep:
    """The module asyncio, in which no sleep ends before `is_over` is set."""

    def __init__(self):
        self.is_over = asyncio.Event()

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await self.is_over.wait()


async def test_a_command_goes_at_once_and_those_right_after_it_go_together(session, call, monkeypatch):
    clock, held = ManualClock(), HeldSleep()
    monkeypatch.setattr("gateway.topology.session.SYSTEM_CLOCK", clock)
    monkeypatch.setattr("gateway.topology.session.asyncio", held)
    session.pause(AttemptKey("first", 1))
    await settle()
    assert call.messages == [["first"]]
    for name in "abc":
        session.pause(AttemptKey(name, 1))
        await settle()
    assert call.messages == [["first"]]
    held.is_over.set()
    await settle()
    assert call.messages == [["first"], ["a", "b", "c"]]
    clock.advance(2 * GATHER_S)
    held.is_over.clear()
    session.pause(AttemptKey("later", 1))
    await settle()
    assert call.messages[2:] == [["later"]]


class RefusingWorker(worker_pb2_grpc.DecodeWorkerServicer):
    """Ends each session before it reads anything: with an error, or without one."""

    def __init__(self, error):
        self.error = error

    async def Session(self, request_iterator, context):
        if self.error is not None:
            raise self.error
        return
        yield


@pytest.mark.parametrize("error", [Overloaded("this worker serves no more than 0 gateways"), None])
async def test_a_session_that_ends_before_its_hello_is_written_says_why(monkeypatch, error):
    """Its keeper tries again after WorkerUnavailable only."""

    async def until_it_has_ended(proof, call):
        await call.code()

    monkeypatch.setattr(rpc, "check_answer", until_it_has_ended)
    server = rpc.make_server(["tandem.v1.DecodeWorker"])
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(RefusingWorker(error), server.server)
    port = await server.start("127.0.0.1", 0)
    peer = Peer("d-0", "0" * 32, f"127.0.0.1:{port}")
    session = DecodeSession(peer, gateway_incarnation="1" * 32, on_change=lambda _: None, pace=Pace())
    try:
        with pytest.raises(WorkerUnavailable, match="d-0"):
            await session.run()
    finally:
        await server.stop(0)


def given(trace, **fields):
    order = SequenceOrder(AttemptKey("r", 1), (1,), (), Sampling(max_tokens=4), (), Deadline.after(60), trace, **fields)
    return order


@pytest.mark.parametrize("is_sampled", [True, False])
async def test_only_a_sampled_attempt_brings_clocks_along(session, is_sampled):
    session.open(AttemptKey("r", 1), None)
    trace = TraceContext(1, 2, is_sampled)
    session.admit(given(trace, request_span_id=7), is_local_prefill=True)
    session._lateness.of(0.05, 0.0)
    session.admit(given(trace, request_span_id=7), is_local_prefill=True)
    unknown, known = (command.admit for command in session._outgoing)
    assert not unknown.HasField("span_clock"), "nothing is known of the worker's clock"
    assert known.sequence.request_span_id == 7
    assert known.HasField("span_clock") is is_sampled
    if is_sampled:
        assert known.span_clock.ahead_ns == 50_000_000
        assert abs(known.span_clock.sent_unix_ns - time.time_ns()) < 60 * 10**9


@pytest.mark.parametrize("is_sampled", [True, False])
async def test_a_sampled_text_brings_clocks_along(is_sampled):
    peer = Peer("p-0", "0" * 32, "nowhere")
    session = PrefillSession(peer, gateway_incarnation="1" * 32, on_change=lambda _: None, pace=Pace())
    session.is_up = True
    session.open(AttemptKey("r", 1), None)
    session._lateness.of(0.05, 0.0)
    session.embed(given(TraceContext(1, 2, is_sampled), vector=VectorOrder("last", 4, True)))
    (command,) = session._outgoing
    assert command.embed.HasField("span_clock") is is_sampled
    assert command.embed.span_clock.ahead_ns == 50_000_000 * is_sampled


async def test_a_cancel_says_what_was_heard_if_there_are_spans(session):
    session.cancel(AttemptKey("r", 1))
    session.cancel(AttemptKey("r", 2), Heard(prefill=True, decode=False))
    plain, traced = (command.cancel for command in session._outgoing)
    assert (plain.sent_unix_ns, traced.has_heard_prefill, traced.has_heard_decode) == (0, True, False)
    assert abs(traced.sent_unix_ns - time.time_ns()) < 60 * 10**9


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


async def test_a_session_whose_writer_fails_ends(session):
    """Commands would wait for ever otherwise, while the worker's reports show that all is well."""

    class BrokenCall:
        is_canceled = False

        async def write(self, message):
            raise ValueError("a field is out of range")

        def cancel(self):
            self.is_canceled = True

    call = BrokenCall()
    session.pause(AttemptKey("first", 1))
    with pytest.raises(ValueError, match="out of range"):
        await session._write_commands(call)
    assert call.is_canceled
