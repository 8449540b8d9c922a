import asyncio
import contextlib
from typing import Any

import pytest

from protos import inference_pb2, worker_pb2
from services.runtime import config
from services.runtime.clock import Deadline
from services.runtime.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolated,
    TransferFailed,
)
from services.runtime.sampling import SamplingParams
from worker import host as worker_host
from worker import metrics as worker_metrics
from worker.attempts import AttemptKey, AttemptTable, read_key, read_spec
from worker.config import WorkerConfig
from worker.host import infallible, within

REQUIRED = ["--id", "prefill-0", "--model", "/models/some"]


def spec(**fields: Any) -> worker_pb2.SequenceSpec:
    given = {
        "id": worker_pb2.AttemptId(request_id="r", attempt=1),
        "prompt_token_ids": [1, 2],
        "sampling": inference_pb2.SamplingParams(max_tokens=3),
        "deadline_ms": 1000,
    }
    return worker_pb2.SequenceSpec(**(given | fields))


def test_a_spec_becomes_plain_data_with_the_defaults_of_absent_fields() -> None:
    read = read_spec(spec(emitted_token_ids=[9], traceparent="00-x"), SamplingParams)
    assert read.service_class == 2, "absent"
    assert [read_spec(spec(service_class=number), SamplingParams).service_class for number in (0, 4)] == [0, 4]
    assert read.key == AttemptKey("r", 1)
    assert (read.prompt_token_ids, read.emitted_token_ids, read.traceparent) == ([1, 2], [9], "00-x")
    assert read.sampling == SamplingParams(max_tokens=3, stop_token_ids=frozenset())
    assert 0.5 < read.deadline.remaining_s() <= 1.0


def test_zero_that_was_given_is_not_absent() -> None:
    sampling = inference_pb2.SamplingParams(max_tokens=3, temperature=0.0, logprobs=0)
    read = read_spec(spec(sampling=sampling), SamplingParams)
    assert read.sampling == SamplingParams(max_tokens=3, temperature=0.0, logprobs=0, stop_token_ids=frozenset())


def test_end_of_sequence_tokens_stop_unless_they_are_ignored() -> None:
    sampling = inference_pb2.SamplingParams(max_tokens=3, stop_token_ids=[5])
    assert read_spec(spec(sampling=sampling, eos_token_ids=[1]), SamplingParams).sampling.stop_token_ids == {1, 5}
    sampling.ignore_eos = True
    assert read_spec(spec(sampling=sampling, eos_token_ids=[1]), SamplingParams).sampling.stop_token_ids == {5}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": []},
        {"id": worker_pb2.AttemptId(request_id="", attempt=1)},
        {"id": worker_pb2.AttemptId(request_id="r", attempt=0)},
        {"sampling": inference_pb2.SamplingParams()},
    ],
)
def test_a_spec_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read_spec(spec(**fields), SamplingParams)


def test_of_each_request_only_the_newest_attempt_is_known() -> None:
    table: AttemptTable[str] = AttemptTable()
    assert table.begin(AttemptKey("r", 1), "first") is None
    assert table.begin(AttemptKey("r", 3), "third") == "first"
    assert table.begin(AttemptKey("s", 1), "other") is None
    assert table.find(AttemptKey("r", 1)) is None
    assert table.find(AttemptKey("r", 3)) == "third"
    for late in (1, 2, 3):
        with pytest.raises(AlreadyExists):
            table.begin(AttemptKey("r", late), "late")
    table.end(AttemptKey("r", 1))
    assert len(table) == 2, "the end of a superseded attempt is not the end of the newest"
    table.end(AttemptKey("r", 3))
    table.end(AttemptKey("r", 3))
    assert list(table) == ["other"]


def test_a_key_is_read_from_a_message() -> None:
    assert read_key(worker_pb2.AttemptId(request_id="r", attempt=7)) == ("r", 7)


async def test_what_takes_longer_than_the_deadline_ends_with_it() -> None:
    with pytest.raises(DeadlineExceeded):
        async with within(Deadline.after(0.01)):
            await asyncio.sleep(5)


async def test_another_timeout_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with within(Deadline.after(5)):
            raise TimeoutError
    with pytest.raises(TransferFailed):
        async with within(Deadline.after(5)):
            raise TransferFailed("x")


def test_a_command_that_nobody_waits_for_must_not_fail() -> None:
    def broken() -> None:
        raise KeyError("x")

    with pytest.raises(InvariantViolated):
        infallible(broken)()
    infallible(lambda: None)()


class FakeWorker:
    def __init__(self) -> None:
        self.drain_requested = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.calls: list[str] = []
        self.looks: list[float] = []
        self.is_stuck = False
        self.may_close = asyncio.Event()
        self.may_close.set()

    def check_engine(self, elapsed_s: float) -> None:
        self.looks.append(elapsed_s)
        if self.is_stuck and not self.failed.done():
            self.failed.set_exception(InvariantViolated("stuck"))
            self.may_close.set()

    def begin_drain(self) -> None:
        self.calls.append("drain")

    def load(self) -> worker_host.Load:
        return worker_host.Load(8, 8, 0, 0, 0)

    async def wait_idle(self) -> None:
        await self.idle.wait()

    async def close(self) -> None:
        self.calls.append("close")
        await self.may_close.wait()


class FakeServer:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def set_serving(self, is_serving: bool) -> None:
        self.calls.append(is_serving)

    async def stop(self, grace_s: float) -> None:
        self.calls.append("stop")


class FakeLease:
    def __init__(self) -> None:
        self.states: list[str] = []
        self.fields: dict[str, Any] = {}

    def update(self, **changes: Any) -> None:
        self.fields |= changes
        if "state" in changes:
            self.states.append(changes["state"])

    def release(self) -> None:
        self.states.append("released")


@pytest.mark.parametrize("how", ["signal", "command"])
async def test_a_life_goes_from_ready_over_draining_to_closed(how: str) -> None:
    worker, server, lease, stop = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event()
    with worker_host.held(lease):
        life = asyncio.create_task(worker_host.serve_until_drained(worker, server, lease, stop))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert (lease.states, server.calls, worker.calls) == (["ready"], [True], [])
        assert lease.fields["pages_free"] == 8
        (stop if how == "signal" else worker.drain_requested).set()
        await asyncio.sleep(0.01)
        assert (lease.states, server.calls, worker.calls) == (["ready", "draining"], [True, False], ["drain"])
        worker.idle.set()
        await life
    assert (lease.states[-1], server.calls[-1], worker.calls[-1]) == ("released", "stop", "close")


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_worker_that_fails_ends_its_life_with_its_error(is_draining: bool) -> None:
    worker, server, stop = FakeWorker(), FakeServer(), asyncio.Event()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, None, stop))  # type: ignore[arg-type]
    if is_draining:
        stop.set()
    await asyncio.sleep(0.01)
    worker.failed.set_exception(InvariantViolated("the books are wrong"))
    with pytest.raises(InvariantViolated):
        await life
    assert (worker.calls[-1], server.calls[-1]) == ("close", "stop")


async def test_a_drain_ends_at_its_limit_with_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    worker, server, lease, stop = FakeWorker(), FakeServer(), FakeLease(), asyncio.Event()
    stop.set()
    life = worker_host.serve_until_drained(worker, server, lease, stop, drain_timeout_s=0.02)  # type: ignore[arg-type]
    await asyncio.wait_for(life, 10)
    assert (worker.calls, server.calls[-1], lease.states[-1]) == (["drain", "close"], "stop", "draining")
    assert "longer than its limit" in caplog.text


@pytest.mark.parametrize("is_draining", [False, True])
async def test_an_engine_that_hangs_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch, is_draining: bool) -> None:
    monkeypatch.setattr(worker_host, "WATCH_INTERVAL_S", 0.01)
    worker, server, stop = FakeWorker(), FakeServer(), asyncio.Event()
    life = asyncio.create_task(worker_host.serve_until_drained(worker, server, None, stop))  # type: ignore[arg-type]
    if is_draining:
        stop.set()
    async with asyncio.timeout(10):
        while len(worker.looks) < 3:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)
    assert set(worker.looks) == {0.01}
    worker.is_stuck = True
    with pytest.raises(InvariantViolated):
        await asyncio.wait_for(life, 10)
    assert worker.calls[-1] == "close"


async def test_an_engine_that_hangs_while_the_worker_closes_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "WATCH_INTERVAL_S", 0.01)
    worker, server, stop = FakeWorker(), FakeServer(), asyncio.Event()
    worker.may_close.clear()
    stop.set()
    life = worker_host.serve_until_drained(worker, server, None, stop, drain_timeout_s=0.0)  # type: ignore[arg-type]
    worker.is_stuck = True
    with pytest.raises(InvariantViolated):
        await asyncio.wait_for(life, 10)
    assert (worker.calls[-1], server.calls[-1]) == ("close", "stop")


@pytest.mark.parametrize("broken", ["check_engine", "load"])
async def test_what_runs_behind_a_worker_does_not_fail_unnoticed(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(worker_host, "WATCH_INTERVAL_S", 0.01)
    worker, server, lease = FakeWorker(), FakeServer(), FakeLease()

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(worker, broken, fail)
    life = worker_host.serve_until_drained(worker, server, lease, asyncio.Event())  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="a bug"):
        await asyncio.wait_for(life, 10)
    assert (worker.calls[-1], server.calls[-1]) == ("close", "stop")


async def test_a_load_that_ends_before_a_signal_is_used() -> None:
    assert await worker_host.load_or_stop(lambda: 42, None, asyncio.Event()) == 42
    with pytest.raises(ZeroDivisionError):
        await worker_host.load_or_stop(lambda: 1 // 0, None, asyncio.Event())


async def test_calls_from_any_thread_arrive_on_the_loop() -> None:
    arrived: list[int] = []
    call = worker_host.on_this_loop(arrived.append)
    await asyncio.to_thread(call, 1)
    await asyncio.sleep(0)
    assert arrived == [1]


def test_settings_have_sane_defaults_and_exclude_each_other() -> None:
    settings = config.load(WorkerConfig, REQUIRED, prog="test", environ={})
    assert (settings.host, settings.port, settings.page_size, settings.chunk_tokens) == ("127.0.0.1", 0, 16, 512)
    assert settings.address(7) == "127.0.0.1:7"
    assert (settings.drain_timeout, settings.step_timeout) == (None, 120.0)
    given = config.load(WorkerConfig, [*REQUIRED, "--drain-timeout=2.5", "--step-timeout=0"], prog="test", environ={})
    assert (given.drain_timeout, given.step_timeout) == (2.5, 0.0)
    with pytest.raises(ConfigError, match="--drain-timeout"):
        config.load(WorkerConfig, [*REQUIRED, "--drain-timeout=-1"], prog="test", environ={})
    assert settings.record_fields(incarnation="a" * 32)["model"] == "some"
    with pytest.raises(ConfigError, match="--kv-memory"):
        config.load(WorkerConfig, [*REQUIRED, "--kv-pages=5", "--kv-memory=1GiB"], prog="test", environ={})
    with pytest.raises(ConfigError, match="--id"):
        config.load(WorkerConfig, ["--id", "Not An Id", "--model", "x"], prog="test", environ={})


def test_metrics_can_be_scraped() -> None:
    import socket
    import urllib.request

    def load() -> worker_metrics.Load:
        return worker_metrics.Load(8, 5, 0, 1, 2, promised_pages=3)

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        settings = config.load(WorkerConfig, [*REQUIRED, f"--metrics-port={port}"], prog="test", environ={})
        with pytest.raises(ConfigError, match="--metrics-port"):
            worker_metrics.WorkerMetrics(worker_id="w").serve(settings, load)
    worker_metrics.WorkerMetrics(worker_id="w").serve(settings, load)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    assert 'tandem_kv_pages{state="used",worker="w"} 2.0' in text
    assert 'tandem_kv_pages_promised{worker="w"} 3.0' in text
