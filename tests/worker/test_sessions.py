"""Sessions over real streams: fencing, batching, load, slow gateways, cancels, commands out of order."""

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from services.runtime import errors, rpc
from services.structured.form_places import NUM_PLACES
from tests.waiting import HANG_LIMIT_S
from worker import host
from worker import sessions as session

INCARNATION = "a" * 32
GATEWAY = "b" * 32


class Worker(worker_pb2_grpc.DecodeWorkerServicer):
    """A decode worker without an engine."""

    def __init__(self, limits: session.SessionLimits) -> None:
        self.schemas: list[str] = []
        self.commands: list[tuple[session.Session, str]] = []
        self.closed: list[session.Session] = []
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self.failure: Exception | None = None
        self.num_loads = 0
        self.channel: grpc.aio.Channel | None = None
        self.server: rpc.RpcServer | None = None
        self.gpu: worker_pb2.GpuFacts | None = None
        self.links: list[worker_pb2.PeerLink] = []
        self.counts = worker_pb2.WorkerCounts(preemptions={"place": 1})
        self.sessions = session.SessionServer(
            incarnation=INCARNATION,
            handlers={"admit": self._admit, "cancel": self._cancel},
            reports=session.Reports(
                load=self._load,
                gpu=lambda: self.gpu,
                links=lambda: self.links,
                counts=lambda: worker_pb2.WorkerCounts.FromString(self.counts.SerializeToString()),
            ),
            on_session_closed=self._on_closed,
            limits=limits,
        )

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepEvents]:
        async for events in self.sessions.serve(request_iterator):
            yield events

    async def _admit(self, from_session: session.Session, admit: worker_pb2.Admit) -> None:
        if self.failure is not None:
            raise self.failure
        self.commands.append((from_session, admit.sequence.id.request_id))
        self.schemas.append(admit.sequence.json_schema)
        self.arrived.set()

    async def _cancel(self, from_session: session.Session, cancel: worker_pb2.Cancel) -> None:
        if self.failure is not None:
            raise self.failure
        self.commands.append((from_session, f"cancel {cancel.id.request_id}"))
        self.arrived.set()

    def _load(self) -> worker_pb2.WorkerLoad:
        self.num_loads += 1
        return worker_pb2.WorkerLoad(running=self.num_loads)

    def _on_closed(self, closed: session.Session) -> None:
        self.closed.append(closed)
        self.left.set()


@contextlib.asynccontextmanager
async def serving(limits: session.SessionLimits | None = None) -> AsyncIterator[tuple[Worker, Any]]:
    worker = Worker(limits or session.SessionLimits(beat_s=0.2))
    patient = dataclasses.replace(rpc.INTERNAL, write_timeout_s=HANG_LIMIT_S)
    server = rpc.make_server(["tandem.v1.DecodeWorker"], profile=patient)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(worker, server.server)
    port = await server.start("127.0.0.1", 0)
    async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
        worker.channel, worker.server = channel, server
        yield worker, worker_pb2_grpc.DecodeWorkerStub(channel)
    await server.stop(0)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Worker, Any]]:
    async with serving() as pair:
        yield pair


def batch(*commands: worker_pb2.DecodeCommand) -> worker_pb2.DecodeCommands:
    return worker_pb2.DecodeCommands(commands=commands)


def hello(worker_incarnation: str = INCARNATION, gateway: str = GATEWAY) -> worker_pb2.DecodeCommand:
    opening = worker_pb2.SessionHello(gateway_incarnation=gateway, worker_incarnation=worker_incarnation)
    return worker_pb2.DecodeCommand(hello=opening)


def admit(request_id: str, attempt: int = 1) -> worker_pb2.DecodeCommand:
    sequence = worker_pb2.SequenceSpec(id=worker_pb2.AttemptId(request_id=request_id, attempt=attempt))
    return worker_pb2.DecodeCommand(admit=worker_pb2.Admit(sequence=sequence))


async def opened(stub: Any, **names: str) -> Any:
    call = stub.Session()
    await call.write(batch(hello(**names)))
    first = await call.read()
    assert first.worker_incarnation == INCARNATION
    return call


async def status_of(call: Any) -> errors.TandemError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return rpc.error_from_rpc(error)
    raise AssertionError("the session ended without an error")


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(HANG_LIMIT_S):
        await event.wait()
    event.clear()


async def events_of(call: Any, count: int) -> list[worker_pb2.WorkerEvent]:
    found: list[worker_pb2.WorkerEvent] = []
    async with asyncio.timeout(HANG_LIMIT_S):
        while len(found) < count:
            found.extend((await call.read()).events)
    return found


async def test_hello_is_answered_at_once_with_the_load(served: tuple[Worker, Any]) -> None:
    call = served[1].Session()
    await call.write(batch(hello(worker_incarnation="")))
    async with asyncio.timeout(HANG_LIMIT_S):
        first = await call.read()
    assert (first.worker_incarnation, len(first.events), first.load.running) == (INCARNATION, 0, 1)


async def test_another_incarnation_is_fenced_off(served: tuple[Worker, Any]) -> None:
    call = served[1].Session()
    await call.write(batch(hello(worker_incarnation="c" * 32)))
    assert type(await status_of(call)) is errors.StaleIncarnation
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert served[0].closed == []


@pytest.mark.parametrize(
    ("commands", "field"),
    [
        ([admit("x")], "command"),
        ([worker_pb2.DecodeCommand()], "command"),
        ([hello(gateway="")], "gateway_incarnation"),
        ([hello(), hello()], "command"),
        ([hello(), worker_pb2.DecodeCommand()], "command"),
        ([hello(), worker_pb2.DecodeCommand(drain=worker_pb2.DrainWorker())], "command"),
        ([], None),
    ],
)
async def test_commands_out_of_order_end_the_session(
    commands: list[worker_pb2.DecodeCommand], field: str | None, served: tuple[Worker, Any]
) -> None:
    call = served[1].Session()
    for command in commands:
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(batch(command))
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.done_writing()
    error = await status_of(call)
    assert isinstance(error, errors.InvalidRequest)
    assert error.field == field


async def test_commands_of_one_message_are_done_in_order(served: tuple[Worker, Any]) -> None:
    call = served[1].Session()
    await call.write(batch(hello(), *(admit(f"r{index}") for index in range(5))))
    worker = served[0]
    async with asyncio.timeout(HANG_LIMIT_S):
        while len(worker.commands) < 5:
            worker.arrived.clear()
            await worker.arrived.wait()
    assert [request_id for _, request_id in worker.commands] == [f"r{index}" for index in range(5)]
    call.cancel()


async def test_a_hello_that_does_not_come_ends_the_stream() -> None:
    async with serving(session.SessionLimits(hello_timeout_s=0.1)) as (_, stub):
        assert type(await status_of(stub.Session())) is errors.DeadlineExceeded


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_stream_that_breaks_after_its_session_was_closed_is_no_error(
    caplog: pytest.LogCaptureFixture, is_closed: bool
) -> None:
    async with serving(session.SessionLimits()) as (worker, _):
        breaks = asyncio.Event()

        async def commands() -> AsyncIterator[worker_pb2.DecodeCommands]:
            yield worker_pb2.DecodeCommands(
                commands=[worker_pb2.DecodeCommand(hello=worker_pb2.SessionHello(gateway_incarnation="g" * 32))]
            )
            await breaks.wait()
            raise RuntimeError("the server has stopped")

        events = worker.sessions.serve(commands())
        await anext(events)
        if is_closed:
            worker.sessions.close()
        breaks.set()
        with pytest.raises(errors.WorkerUnavailable):
            async for _ in events:
                pass
    assert ("reading a session failed" in caplog.messages) is not is_closed


async def test_garbage_ends_the_session_and_frees_its_attempts(served: tuple[Worker, Any]) -> None:
    worker, _ = served
    assert worker.channel is not None
    call: Any = worker.channel.stream_stream("/tandem.v1.DecodeWorker/Session")()
    for command in (hello(), admit("r1")):
        await call.write(batch(command).SerializeToString())
    await soon(worker.arrived)
    await call.write(b"\xff\xff\xff")
    assert type(await status_of(call)) is errors.InvalidRequest
    assert worker.closed == [worker.commands[0][0]]


async def test_commands_arrive_in_order_and_events_come_back(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    for index in range(20):
        await call.write(batch(admit(f"r{index}")))
    await call.write(
        batch(worker_pb2.DecodeCommand(cancel=worker_pb2.Cancel(id=worker_pb2.AttemptId(request_id="r3"))))
    )
    async with asyncio.timeout(HANG_LIMIT_S):
        while len(worker.commands) < 21:
            await soon(worker.arrived)
    assert [name for _, name in worker.commands] == [*(f"r{index}" for index in range(20)), "cancel r3"]
    source = worker.commands[0][0]
    worker.sessions.emit(source, "r0", 1, worker_pb2.PrefillStarted(num_cached_tokens=7))
    worker.sessions.emit(source, "r0", 1, worker_pb2.Tokens(first_index=0, token_ids=[5]))
    first, second = await events_of(call, 2)
    assert (first.id.request_id, first.id.attempt, first.prefill_started.num_cached_tokens) == ("r0", 1, 7)
    assert second.tokens.token_ids == [5]


async def test_every_payload_has_its_place(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    (source,) = worker.sessions.sessions
    payloads: list[session.Payload] = [
        worker_pb2.Admitted(),
        worker_pb2.Refused(),
        worker_pb2.OpeningLink(),
        worker_pb2.PrefillStarted(),
        worker_pb2.Tokens(),
        worker_pb2.HandedOff(),
        worker_pb2.DecodeStarted(),
        worker_pb2.Finished(),
        worker_pb2.Failed(),
        worker_pb2.Paused(),
        worker_pb2.Cancelled(),
        worker_pb2.Embedded(),
        session.StepTokens([7, 9], [0, 3], [100, 200]),
    ]
    for payload in payloads[:-1]:
        worker.sessions.emit(source, "r", 1, payload)
    worker.sessions.emit_step(source, payloads[-1])
    kinds = [event.WhichOneof("event") for event in await events_of(call, len(payloads))]
    expected = {field.name for field in worker_pb2.WorkerEvent.DESCRIPTOR.oneofs_by_name["event"].fields}
    assert set(kinds) == expected
    assert len(kinds) == len(expected)


async def test_tokens_of_many_attempts_are_one_event(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    (source,) = worker.sessions.sessions
    worker.sessions.emit_step(source, session.StepTokens([7, 9], [0, 3], [100, 200]))
    (event,) = await events_of(call, 1)
    assert not event.HasField("id")
    assert event.step_tokens == worker_pb2.StepTokens(handles=[7, 9], indexes=[0, 3], token_ids=[100, 200])


async def test_the_load_comes_with_whatever_is_more_than_tokens() -> None:
    async with serving(session.SessionLimits(beat_s=30.0, load_s=30.0)) as (worker, stub):
        call = await opened(stub)
        (source,) = worker.sessions.sessions
        has_load = []
        for payload in (step_of(1), worker_pb2.DecodeStarted(), step_of(1), step_of(2)):
            if isinstance(payload, session.StepTokens):
                worker.sessions.emit_step(source, payload)
            else:
                worker.sessions.emit(source, "r", 1, payload)
            message = await call.read()
            assert message.events
            has_load.append(message.HasField("load"))
        worker.sessions.load_changed()
        message = await call.read()
        assert (has_load, message.HasField("load")) == ([False, True, False, False], True)
        worker.sessions.load_changed()
        worker.sessions.emit_step(source, step_of(1))
        message = await call.read()
        assert (len(message.events), message.HasField("load")) == (1, True)


async def test_steady_tokens_bring_the_load_now_and_then() -> None:
    async with serving(session.SessionLimits(beat_s=30.0, load_s=0.0)) as (worker, stub):
        call = await opened(stub)
        (source,) = worker.sessions.sessions
        worker.sessions.emit_step(source, step_of(1))
        assert (await call.read()).HasField("load")


def step_of(num_tokens: int) -> session.StepTokens:
    return session.StepTokens(list(range(1, num_tokens + 1)), [0] * num_tokens, [5] * num_tokens)


async def test_a_step_of_the_engine_thread_is_one_message(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    (source,) = worker.sessions.sessions
    step = [session.Emission(source, f"r{row}", 1, worker_pb2.Tokens(token_ids=[row])) for row in range(64)]
    thread = threading.Thread(target=worker.sessions.emit_many, args=(step,))
    thread.start()
    thread.join()
    message = await call.read()
    while not message.events:
        message = await call.read()
    assert [event.id.request_id for event in message.events] == [f"r{row}" for row in range(64)]


async def test_no_event_is_lost_or_reordered_under_many_threads(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    (source,) = worker.sessions.sessions

    def engine(name: str) -> None:
        for index in range(2000):
            payload = worker_pb2.Tokens(first_index=index)
            worker.sessions.emit_many([session.Emission(source, name, 1, payload)])

    threads = [threading.Thread(target=engine, args=(f"r{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    events = await events_of(call, 8000)
    for thread in threads:
        thread.join()
    for number in range(4):
        mine = [event.tokens.first_index for event in events if event.id.request_id == f"r{number}"]
        assert mine == list(range(2000))


async def test_large_batches_are_split(served: tuple[Worker, Any]) -> None:
    async with serving(session.SessionLimits(max_events_per_message=10)) as (worker, stub):
        call = await opened(stub)
        (source,) = worker.sessions.sessions
        worker.sessions.emit_many(
            [session.Emission(source, "r", 1, worker_pb2.Tokens(first_index=index)) for index in range(25)]
        )
        sizes = [len((await call.read()).events) for _ in range(3)]
        assert sizes == [10, 10, 5]


async def test_tokens_count_one_by_one_where_batches_are_split() -> None:
    async with serving(session.SessionLimits(max_events_per_message=10)) as (worker, stub):
        call = await opened(stub)
        (source,) = worker.sessions.sessions
        for num_tokens in (4, 6, 5, 12, 1):
            worker.sessions.emit_step(source, step_of(num_tokens))
        sizes = [[len(event.step_tokens.handles) for event in (await call.read()).events] for _ in range(4)]
        assert sizes == [[4, 6], [5], [12], [1]]
        assert (source.num_pending, source.pending) == (0, [])


async def test_the_load_comes_without_events_too(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    loads = [(await call.read()).load.running for _ in range(3)]
    assert loads == [2, 3, 4]
    worker.sessions.load_changed()
    assert (await call.read()).load.running == 5


async def test_what_the_gpu_says_comes_first_and_when_it_is_another(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    assert not (await call.read()).HasField("gpu")
    worker.gpu = worker_pb2.GpuFacts(temperature_c=50)
    said = [await call.read() for _ in range(3)]
    assert [message.gpu.temperature_c for message in said if message.HasField("gpu")] == [50]
    worker.gpu = worker_pb2.GpuFacts(is_lost=True)
    worker.sessions.load_changed()
    message = await call.read()
    assert (message.HasField("gpu"), message.gpu.is_lost, message.gpu.HasField("temperature_c")) == (True, True, False)
    other = stub.Session()
    await other.write(batch(hello(gateway="d" * 32)))
    assert (await other.read()).gpu.is_lost


def peer_link(bytes_per_s: float, underway_bytes: int = 0) -> worker_pb2.PeerLink:
    speed = worker_pb2.LinkSpeed(latency_s=0.001, bytes_per_s=bytes_per_s)
    return worker_pb2.PeerLink(worker_id="decode-0", speed=speed, underway_bytes=underway_bytes)


async def test_links_are_told_where_something_else_is_to_be_said(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    worker.links = [peer_link(1e6)]
    call = stub.Session()
    await call.write(batch(hello()))
    assert list((await call.read()).links) == [peer_link(1e6)]

    async def told() -> list[worker_pb2.PeerLink]:
        for one in worker.sessions.sessions:
            one.links_sent_s = -math.inf
        worker.sessions.load_changed()
        return list((await call.read()).links)

    worker.links = [peer_link(1.05e6, underway_bytes=0)]
    assert await told() == []
    for now in (peer_link(1.2e6), peer_link(1.2e6, 10), peer_link(1.2e6, 10**7), peer_link(1.2e6)):
        worker.links = [now]
        assert await told() == [now]
    other = stub.Session()
    await other.write(batch(hello(gateway="d" * 32)))
    assert list((await other.read()).links) == [peer_link(1.2e6)]


async def test_counts_come_first_and_when_they_are_others_once_a_second_at_most(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = stub.Session()
    await call.write(batch(hello()))
    assert (await call.read()).counts.preemptions == {"place": 1}
    worker.sessions.load_changed()
    assert not (await call.read()).HasField("counts")
    worker.counts.preemptions["place"] = 2
    said = []
    while not said or not said[-1].HasField("counts"):
        worker.sessions.load_changed()
        said.append(await asyncio.wait_for(call.read(), HANG_LIMIT_S))
    assert said[-1].counts.preemptions == {"place": 2}


async def test_a_failing_command_is_refused_and_the_session_goes_on(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    for failure, code, message, retry_after_ms in (
        (errors.NoFreePages("no room", retry_after_s=0.25), worker_pb2.ERROR_CODE_OVERLOADED, "no room", 250),
        (errors.InvalidRequest("too long"), worker_pb2.ERROR_CODE_INVALID_REQUEST, "too long", 0),
        (RuntimeError("secret"), worker_pb2.ERROR_CODE_INTERNAL, "internal error", 0),
    ):
        worker.failure = failure
        await call.write(batch(admit("r1", attempt=3)))
        (event,) = await events_of(call, 1)
        assert (event.id.request_id, event.id.attempt) == ("r1", 3)
        assert (event.refused.code, event.refused.message) == (code, message)
        assert event.refused.retry_after_ms == retry_after_ms
    await call.write(batch(worker_pb2.DecodeCommand(cancel=worker_pb2.Cancel())))
    worker.failure = errors.InvalidRequest("still there")
    await call.write(batch(admit("r2")))
    (event,) = await events_of(call, 1)
    assert (event.id.request_id, event.refused.message) == ("r2", "still there")


async def test_a_form_is_put_into_the_orders_that_name_its_place(served: tuple[Worker, Any]) -> None:
    """Each session has places of its own, and is told how many."""
    worker, stub = served
    call = stub.Session()
    await call.write(batch(hello()))
    assert (await call.read()).form_places == NUM_PLACES
    kept, named = admit("r1"), admit("r2")
    kept.admit.sequence.json_schema, kept.admit.sequence.form_place = "{}", 1
    named.admit.sequence.form_place = 1
    await call.write(batch(kept, named, named))
    async with asyncio.timeout(HANG_LIMIT_S):
        while len(worker.schemas) < 3:
            await soon(worker.arrived)
    assert worker.schemas == ["{}"] * 3
    other = await opened(stub, gateway="e" * 32)
    await other.write(batch(named))
    (event,) = await events_of(other, 1)
    assert event.refused.code == worker_pb2.ERROR_CODE_INVALID_REQUEST


@pytest.mark.parametrize("how", ["cancel", "half_close", "channel"])
async def test_a_gateway_that_leaves_is_reported_once(how: str, served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    (source,) = worker.sessions.sessions
    if how == "cancel":
        call.cancel()
    elif how == "half_close":
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    else:
        assert worker.channel is not None
        await worker.channel.close()
    await soon(worker.left)
    assert worker.sessions.sessions == ()
    assert worker.closed == [source]
    worker.sessions.emit(source, "r", 1, worker_pb2.Tokens())
    assert source.pending == []


@pytest.mark.parametrize("num_tokens", [1, 100])
async def test_a_gateway_that_does_not_read_is_cut_off_with_bounded_memory(num_tokens: int) -> None:
    async with serving(session.SessionLimits(max_pending_events=500)) as (worker, stub):
        call = await opened(stub)
        (source,) = worker.sessions.sessions
        await call.write(batch(admit("r")))
        await soon(worker.arrived)
        most_pending = 0
        while not worker.closed:
            payload = worker_pb2.Tokens(token_ids=range(200_000, 210_000))
            if num_tokens == 1:
                worker.sessions.emit(source, "r", 1, payload)
            else:
                worker.sessions.emit_step(source, session.StepTokens(*([2**32 - 1] * num_tokens for _ in range(3))))
            most_pending = max(most_pending, source.num_pending)
            await asyncio.sleep(0)
        assert most_pending == 500
        assert worker.closed == [source]
        assert type(await status_of(call)) is errors.Overloaded


async def test_a_new_session_of_a_gateway_replaces_its_old_one(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    old = await opened(stub)
    (source,) = worker.sessions.sessions
    new = await opened(stub)
    assert worker.closed == [source]
    assert type(await status_of(old)) is errors.StaleIncarnation
    worker.sessions.emit(worker.sessions.sessions[0], "r", 1, worker_pb2.DecodeStarted())
    assert len(await events_of(new, 1)) == 1
    assert worker.closed == [source]


async def test_sessions_are_limited() -> None:
    async with serving(session.SessionLimits(max_sessions=1)) as (_, stub):
        await opened(stub)
        call = stub.Session()
        await call.write(batch(hello(gateway="d" * 32)))
        assert type(await status_of(call)) is errors.Overloaded


async def test_a_worker_that_leaves_says_so(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    worker.sessions.close()
    assert type(await status_of(call)) is errors.WorkerUnavailable
    assert len(worker.closed) == 1


async def test_what_was_emitted_before_a_worker_leaves_arrives(served: tuple[Worker, Any]) -> None:
    worker, stub = served
    call = await opened(stub)
    (source,) = worker.sessions.sessions
    for index in range(5000):
        worker.sessions.emit(source, f"r{index}", 1, worker_pb2.Failed())
    worker.sessions.close()
    worker.sessions.emit(source, "late", 1, worker_pb2.Failed())
    events = await events_of(call, 5000)
    assert [event.id.request_id for event in events] == [f"r{index}" for index in range(5000)]
    assert type(await status_of(call)) is errors.WorkerUnavailable


async def test_a_gateway_that_is_behind_gets_all_events_of_a_worker_that_ends(served: tuple[Worker, Any]) -> None:
    """On a busy machine a gateway reads the last tokens seconds later, and nobody else may continue such an answer."""
    worker, stub = served
    call, num_events = await opened(stub), 60_000
    await call.write(batch(admit("x")))
    await soon(worker.arrived)
    (running,) = worker.sessions.sessions
    tokens = worker_pb2.Tokens(token_ids=range(200_000, 200_020))
    worker.sessions.emit_many([session.Emission(running, "x", 1, tokens)] * num_events)
    worker.sessions.close()
    assert worker.server is not None
    ending = asyncio.create_task(worker.server.stop(host.SERVER_GRACE_S))
    await asyncio.sleep(1.5)  # The gateway has other things to do; what is sent meanwhile fills the stream's window.
    assert len(await events_of(call, num_events)) == num_events
    assert type(await status_of(call)) is errors.WorkerUnavailable
    await ending
