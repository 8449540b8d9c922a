"""What both workers have in common, with an engine and attempts that do nothing by themselves."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from services.engine.cache.pages import PageChanges, PageCounts
from services.engine.steps.limits import SequenceLimits
from services.runtime.clock import SYSTEM_CLOCK, Deadline
from services.runtime.errors import (
    InternalError,
    InvalidRequest,
    InvariantViolated,
    NotOffered,
    RequestCancelled,
    TandemError,
    WorkerLost,
    WorkerUnavailable,
)
from services.runtime.sampling import SamplingParams
from services.scheduling.speedometer import Speedometer
from services.structured.form import AnswerForm
from tests.fake_links import FakeLinks
from tests.waiting import HANG_LIMIT_S, settle
from worker.attempts import AttemptKey, AttemptSpec
from worker.engine import Engine, EngineFacts, StepReport
from worker.engine_worker import Around, EngineAttempt, EngineWorker
from worker.metrics import Load, WorkerMetrics

LIMITS = SequenceLimits(context_length_tokens=20, vocab_size=100, num_pages=4, page_size=4)


class IdleEngine(Engine):
    """Steps end when `gate` is open."""

    def __init__(self) -> None:
        self.speedometer = Speedometer()
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def step(self) -> bool:
        assert self.gate.wait(HANG_LIMIT_S)
        if self.error is not None:
            raise self.error
        return False

    def check_books(self) -> None:
        """Nothing is held."""


class OneWorker(EngineWorker[EngineAttempt]):
    name = "test worker"

    def __init__(self, around: Around, facts: EngineFacts, engine: Engine) -> None:
        self.ended: list[tuple[str, TandemError | None]] = []
        super().__init__(around, facts, engine=engine, handlers={})

    def load(self) -> Load:
        return Load(*self._pages)

    def add(self, request_id: str, session: object) -> EngineAttempt:
        attempt = EngineAttempt(spec(request_id), cast(Any, session), None)
        self._attempts.begin(attempt.spec.key, attempt)
        return attempt

    def _fail_all(self, error: TandemError) -> None:
        self.ended += [(attempt.spec.key.request_id, error) for attempt in self._attempts]

    def _lose(self, attempt: EngineAttempt) -> None:
        self.ended.append((attempt.spec.key.request_id, None))

    async def wait_idle(self) -> None:
        """Nothing is waited for."""

    async def close(self) -> None:
        await self._stop()


class Bench:
    def __init__(self, *, step_timeout_s: float = 0.0) -> None:
        self.engine = IdleEngine()
        self.loss: TandemError | None = None
        self.changes: list[tuple[Any, Any]] = []
        around = Around(
            incarnation="a" * 32,
            links=cast(Any, FakeLinks()),
            metrics=WorkerMetrics(worker_id="w"),
            clock=SYSTEM_CLOCK,
            step_timeout_s=step_timeout_s,
            on_pages_changed=lambda come, gone: self.changes.append((come, gone)),
        )
        self.worker = OneWorker(around, EngineFacts(LIMITS, "a model", lambda: self.loss), self.engine)


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**fields: Any) -> Bench:
        benches.append(Bench(**fields))
        return benches[-1]

    yield make
    for bench in benches:
        bench.engine.gate.set()
        await bench.worker.close()
        if bench.worker.failed.done():
            bench.worker.failed.exception()


def spec(request_id: str = "r", **fields: Any) -> AttemptSpec[Any]:
    given: dict[str, Any] = {
        "key": AttemptKey(request_id, 1),
        "prompt_token_ids": [1, 2],
        "emitted_token_ids": [],
        "sampling": SamplingParams(max_tokens=4),
        "deadline": Deadline.after(30),
        "traceparent": "",
    }
    return AttemptSpec(**(given | fields))


async def failed(bench: Bench) -> BaseException:
    """The error that ended the worker."""
    with pytest.raises(TandemError) as caught:
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "num_new_tokens", "field"),
    [
        ({"prompt_token_ids": [1] * 15}, 2, "max_tokens"),
        ({"prompt_token_ids": [1, 100]}, 1, "prompt"),
        ({"emitted_token_ids": [-1]}, 1, "emitted_token_ids"),
        ({"sampling": SamplingParams(max_tokens=4, logit_bias={100: 1.0})}, 1, "logit_bias"),
        ({"form": AnswerForm("json_schema", "{}")}, 1, "json_schema"),
    ],
)
async def test_what_cannot_be_computed_is_refused_with_its_field(
    make_bench: Callable[..., Bench], fields: dict[str, Any], num_new_tokens: int, field: str
) -> None:
    worker = make_bench().worker
    worker._check(spec(), num_new_tokens=4)
    with pytest.raises(InvalidRequest) as caught:
        worker._check(spec(**fields), num_new_tokens=num_new_tokens)
    assert caught.value.field == field


async def test_what_the_engine_cannot_give_is_refused(make_bench: Callable[..., Bench]) -> None:
    def check(sampling: SamplingParams) -> None:
        if sampling.logprobs is not None:
            raise InvalidRequest("none here", field="logprobs")

    worker = make_bench().worker
    worker.facts = EngineFacts(LIMITS, "a model", check=check)
    worker._check(spec(), num_new_tokens=4)
    with pytest.raises(InvalidRequest, match="none here"):
        worker._check(spec(sampling=SamplingParams(max_tokens=4, logprobs=1)), num_new_tokens=4)


async def test_tenants_and_models_have_salts_of_their_own(make_bench: Callable[..., Bench]) -> None:
    worker = make_bench().worker
    assert worker.salt(spec("a")) == worker.salt(spec("b"))
    assert worker.salt(spec(cache_salt="x")) != worker.salt(spec())


async def test_a_session_that_ends_takes_its_own_attempts_along(make_bench: Callable[..., Bench]) -> None:
    worker = make_bench().worker
    ours, theirs = object(), object()
    worker.add("r", ours)
    worker.add("s", theirs)
    worker._on_session_closed(cast(Any, ours))
    assert worker.ended == [("r", None)]


async def test_a_step_that_does_not_end_fails_what_is_there(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(step_timeout_s=1.0)
    bench.worker.add("r", object())
    bench.engine.gate.clear()
    command = bench.worker.command(lambda: None)
    await asyncio.wrap_future(command)
    while bench.worker._thread.current_run is None:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)
    for _ in range(2):
        bench.worker.check_engine(0.9)
    assert not bench.worker.failed.done()
    bench.worker.check_engine(0.9)
    assert isinstance(await failed(bench), InvariantViolated)
    ((request_id, error),) = bench.worker.ended
    assert (request_id, type(error)) == ("r", InternalError)
    late = bench.worker.command(lambda: None)
    assert isinstance(late.exception(0), WorkerUnavailable), "nobody waits for a command of an engine that is stuck"


async def test_an_engine_that_is_lost_ends_the_worker_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.worker.add("r", object())
    bench.worker.check_engine(1.0)
    assert not bench.worker.failed.done()
    bench.loss = WorkerLost("a rank has ended")
    bench.worker.check_engine(1.0)
    bench.worker.check_engine(1.0)
    assert await failed(bench) is bench.loss
    assert len(bench.worker.ended) == 1


async def test_an_error_of_a_step_ends_the_worker(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.engine.error = InvariantViolated("the books are wrong")
    bench.worker.command(lambda: None)
    assert await failed(bench) is bench.engine.error


async def test_a_command_that_fails_ends_the_worker(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    command = bench.worker.command(lambda: 1 // 0)
    with pytest.raises(InvariantViolated):
        await asyncio.wrap_future(command)
    assert isinstance(await failed(bench), InvariantViolated)


class Transfer:
    """A transfer whose abort ends as the test says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_end = asyncio.Event()

    async def abort(self, reason: TandemError) -> None:
        await self.may_end.wait()
        if self.error is not None:
            raise self.error


async def test_pages_are_freed_when_the_abort_of_their_transfer_is_over(make_bench: Callable[..., Bench]) -> None:
    worker, transfer, freed = make_bench().worker, Transfer(), asyncio.Event()
    worker.abort_transfer(cast(Any, transfer), RequestCancelled("x"), freed.set)
    await settle()
    assert not freed.is_set()
    transfer.may_end.set()
    await asyncio.wait_for(freed.wait(), HANG_LIMIT_S)
    assert not worker.failed.done()
    assert not worker._tasks


async def test_an_abort_that_fails_ends_the_worker_whose_pages_may_still_be_read(
    make_bench: Callable[..., Bench],
) -> None:
    bench, freed = make_bench(), asyncio.Event()
    transfer = Transfer(InvariantViolated("the link contradicts itself"))
    transfer.may_end.set()
    bench.worker.abort_transfer(cast(Any, transfer), RequestCancelled("x"), freed.set)
    assert await failed(bench) is transfer.error
    await asyncio.wait_for(freed.wait(), HANG_LIMIT_S)


async def test_a_report_updates_pages_and_names_whoever_listens(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    assert bench.worker.load() == Load(4, 4, 0, 0, 0)
    bench.worker._note_step(
        StepReport(0, 10, PageCounts(4, 1, 2, 0, 1), PageChanges.none()), num_sequences=0, num_tokens=0
    )
    assert bench.worker.load() == Load(4, 1, 2, 0, 1)
    assert bench.changes == [], "nothing came or went"
    changes = PageChanges((b"new",), (b"old",))  # type: ignore[arg-type]
    bench.worker._note_step(StepReport(0, 10, PageCounts(4, 1, 2, 0, 1), changes), num_sequences=1, num_tokens=3)
    assert bench.changes == [((b"new",), (b"old",))]


async def test_an_adapter_that_the_engine_does_not_have_is_refused(make_bench: Callable[..., Bench]) -> None:
    worker = make_bench().worker
    worker.facts = EngineFacts(LIMITS, "a model", adapters=frozenset({"sql"}))
    worker._check(spec(adapter="sql"), num_new_tokens=4)
    with pytest.raises(NotOffered, match="'law'") as refused:
        worker._check(spec(adapter="law"), num_new_tokens=4)
    assert refused.value.field == "model"
    sequence, _ = worker._sequence(spec(adapter="sql"), None, [])
    assert sequence.adapter == "sql"
