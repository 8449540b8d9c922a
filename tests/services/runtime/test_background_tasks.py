"""Endless loops under one root: a failure is logged and counted, and the loop is restarted after a pause."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from services.runtime.background_tasks import (
    FAILING_AFTER,
    FIRST_BACKOFF_S,
    LOG_EVERY_S,
    MAX_BACKOFF_S,
    RECOVERED_S,
    BackgroundTasks,
    FailingTask,
)
from services.runtime.clock import ManualClock
from services.runtime.errors import InvariantViolated, StoreUnavailable
from tests.waiting import HANG_LIMIT_S


class Bench:
    """Tasks under a clock that the test moves: a pause ends at once and takes its time on that clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.pauses_s: list[float] = []
        self.tasks = BackgroundTasks(clock=self.clock, sleep=self._sleep)
        self.errors: list[BaseException] = []
        self.run_s = 0.0
        self.num_runs = 0
        self.is_steady = asyncio.Event()

    async def _sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    async def loop(self) -> None:
        """Raises the next error after `run_s`. Runs until it is canceled if no error is left."""
        self.num_runs += 1
        if self.errors:
            self.clock.advance(self.run_s)
            raise self.errors.pop(0)
        self.is_steady.set()
        await asyncio.Event().wait()

    async def until_steady(self) -> None:
        async with asyncio.timeout(HANG_LIMIT_S):
            await self.is_steady.wait()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for task in list(bench.tasks._states):
        task.cancel()
        await asyncio.wait((task,))


async def test_a_loop_continues_after_an_error_and_waits_longer_each_time(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.errors = [KeyError("secret")] * 9
    bench.tasks.start(bench.loop, name="look", subject="d-0")
    await bench.until_steady()
    assert bench.num_runs == 10
    doubled = [FIRST_BACKOFF_S * 2**n for n in range(9)]
    assert bench.pauses_s == pytest.approx([min(MAX_BACKOFF_S, pause_s) for pause_s in doubled])
    assert bench.tasks.num_failures == {"look": 9}
    (found,) = bench.tasks.failing()
    assert (found.name, found.subject, found.failures) == ("look", "d-0", 9)
    assert found.error.startswith("KeyError (test_background_tasks.py:")
    assert "secret" not in found.error
    assert found.since_unix_s == pytest.approx(1_700_000_000.0)
    (record,) = caplog.records
    assert (record.levelno, record.message, record.task, record.subject) == (  # type: ignore[attr-defined]
        logging.ERROR,
        "background task failed",
        "look",
        "d-0",
    )
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


async def test_a_loop_that_ran_long_enough_has_recovered(bench: Bench) -> None:
    bench.errors = [ValueError()] * FAILING_AFTER
    bench.tasks.start(bench.loop, name="look")
    await bench.until_steady()
    assert [task.name for task in bench.tasks.failing()] == ["look"]
    bench.clock.advance(RECOVERED_S - 0.1)
    assert bench.tasks.failing()
    bench.clock.advance(0.1)
    assert not bench.tasks.failing()
    assert bench.tasks.num_failures == {"look": FAILING_AFTER}, "a counter never decreases"


@pytest.mark.parametrize("run_s", [0.0, RECOVERED_S / 2, 3 * RECOVERED_S])
async def test_a_loop_keeps_failing_however_slowly(bench: Bench, run_s: float) -> None:
    bench.errors, bench.run_s = [ValueError()] * (FAILING_AFTER + 1), run_s
    bench.tasks.start(bench.loop, name="look")
    await bench.until_steady()
    assert [task.name for task in bench.tasks.failing()] == ["look"]


async def test_one_error_now_and_then_is_no_failing_loop(bench: Bench) -> None:
    seen: list[list[FailingTask]] = []

    async def loop() -> None:
        """Fails after a longer and longer time."""
        seen.append(bench.tasks.failing())
        bench.run_s = 3 * max(bench.run_s, RECOVERED_S)
        await bench.loop()

    bench.errors = [ValueError()] * 5
    bench.tasks.start(loop, name="look")
    await bench.until_steady()
    assert seen == [[]] * 6
    assert bench.pauses_s == [FIRST_BACKOFF_S] * 5


async def test_the_log_repeats_an_error_only_once_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.errors, bench.run_s = [ValueError()] * 5 + [OSError()] * 5, LOG_EVERY_S / 4
    bench.tasks.start(bench.loop, name="look")
    await bench.until_steady()
    logged = [type(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged[0] is ValueError
    assert OSError in logged, "another error is logged at once"
    assert len(logged) <= 2 + 10 * (bench.run_s + MAX_BACKOFF_S) / LOG_EVERY_S


async def test_loops_of_one_name_share_the_limit_of_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.errors = [ValueError()] * 40
    for number in range(40):
        bench.tasks.start(bench.loop, name="session", subject=f"d-{number}")
    await bench.until_steady()
    assert bench.tasks.num_failures == {"session": 40}
    assert len(caplog.records) == 1


async def test_a_canceled_loop_ends(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    task = bench.tasks.start(bench.loop, name="look")
    await bench.until_steady()
    task.cancel()
    await asyncio.wait((task,), timeout=HANG_LIMIT_S)
    assert task.cancelled()
    assert not caplog.records
    assert bench.num_runs == 1


async def test_a_canceled_loop_ends_while_it_waits_for_its_restart(caplog: pytest.LogCaptureFixture) -> None:
    paused = asyncio.Event()

    async def sleep(_: float) -> None:
        paused.set()
        await asyncio.Event().wait()

    async def loop() -> None:
        raise ValueError

    task = BackgroundTasks(sleep=sleep).start(loop, name="look")
    async with asyncio.timeout(HANG_LIMIT_S):
        await paused.wait()
    task.cancel()
    await asyncio.wait((task,), timeout=HANG_LIMIT_S)
    assert task.cancelled()


async def test_an_error_on_the_way_out_is_logged_and_nothing_is_restarted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def loop() -> None:
        try:
            await bench.loop()
        except asyncio.CancelledError:
            raise StoreUnavailable("Redis does not answer") from None

    task = bench.tasks.start(loop, name="look")
    await bench.until_steady()
    task.cancel()
    await asyncio.wait((task,), timeout=HANG_LIMIT_S)
    assert isinstance(task.exception(), StoreUnavailable)
    assert (bench.num_runs, [record.message for record in caplog.records]) == (
        1,
        ["background task ended with an error"],
    )


async def test_the_canceled_call_of_another_does_not_end_a_loop(bench: Bench) -> None:
    """A loop may await something that its owner cancels, such as a call to Redis. That was no request to end."""
    bench.errors = [asyncio.CancelledError()]
    bench.tasks.start(bench.loop, name="look")
    await bench.until_steady()
    assert bench.num_runs == 2
    assert bench.tasks.num_failures == {"look": 1}


async def test_a_loop_that_returns_is_over(bench: Bench) -> None:
    async def loop() -> None:
        bench.num_runs += 1

    task = bench.tasks.start(loop, name="look")
    async with asyncio.timeout(HANG_LIMIT_S):
        await task
    assert (bench.num_runs, bench.tasks.failing()) == (1, [])


async def test_a_broken_invariant_ends_the_process_and_restarts_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[InvariantViolated] = []
    bench.tasks.on_invariant_violated(ended.append)
    bench.errors = [InvariantViolated("a page is held twice")]
    task = bench.tasks.start(bench.loop, name="look")
    await asyncio.wait((task,), timeout=HANG_LIMIT_S)
    assert (bench.num_runs, ended) == (1, [task.exception()])
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


@pytest.mark.parametrize("is_vital", [False, True])
async def test_only_vital_loops_make_a_process_unable_to_serve(bench: Bench, is_vital: bool) -> None:
    bench.errors = [ValueError()] * FAILING_AFTER
    bench.tasks.start(bench.loop, name="look", is_vital=is_vital)
    assert not bench.tasks.is_vital_failing()
    await bench.until_steady()
    assert bench.tasks.is_vital_failing() is is_vital
    bench.clock.advance(RECOVERED_S)
    assert not bench.tasks.is_vital_failing()


async def test_a_loop_that_has_ended_is_shown_no_longer(bench: Bench) -> None:
    bench.errors = [ValueError()] * FAILING_AFTER
    task = bench.tasks.start(bench.loop, name="look", is_vital=True)
    await bench.until_steady()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert (bench.tasks.failing(), bench.tasks.is_vital_failing()) == ([], False)
