import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from services.engine.thread import EngineThread, StepWatch
from services.runtime.errors import DeadlineExceeded, InvariantViolated, WorkerUnavailable
from tests.waiting import HANG_LIMIT_S, wait_until

WAIT_S = HANG_LIMIT_S


class Harness:
    """An engine thread whose step counts down `work` and whose fatal errors are kept."""

    def __init__(self) -> None:
        self.work = 0
        self.steps = 0
        self.step_error: BaseException | None = None
        self.fatal: Future[BaseException] = Future()
        self.idle_at_step: list[int] = []
        self.idle_error: BaseException | None = None
        self.thread = EngineThread(self._step, on_fatal=self.fatal.set_result, on_idle=self._on_idle)

    def _step(self) -> bool:
        self.steps += 1
        if self.step_error:
            raise self.step_error
        self.work = max(0, self.work - 1)
        return self.work > 0

    def _on_idle(self) -> None:
        self.idle_at_step.append(self.steps)
        if self.idle_error:
            raise self.idle_error

    def add_work(self, count: int) -> None:
        self.work += count


@pytest.fixture
def harness() -> Iterator[Harness]:
    it = Harness()
    it.thread.start()
    yield it
    it.thread.stop(timeout_s=WAIT_S)


def test_commands_run_in_order_on_the_engine_thread(harness: Harness) -> None:
    seen: list[int] = []
    futures = [harness.thread.submit(lambda i=i: seen.append(i)) for i in range(100)]  # type: ignore[misc]
    assert harness.thread.submit(lambda: harness.thread.is_current).result(WAIT_S)
    assert not harness.thread.is_current
    assert all(future.done() for future in futures)
    assert seen == list(range(100))


def test_steps_run_while_there_is_work_then_sleep(harness: Harness) -> None:
    harness.thread.submit(lambda: harness.add_work(50)).result(WAIT_S)
    wait_until(lambda: harness.work == 0)
    steps = harness.steps
    time.sleep(0.05)
    assert harness.steps == steps  # no spinning


def test_wake_makes_an_idle_thread_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE_S", "_LONGEST_SLEEP_S"):  # so that it is the wake-up that ends the sleep
        monkeypatch.setattr(f"services.engine.thread.{name}", 10 * WAIT_S)
    harness = Harness()
    harness.thread.start()
    harness.thread.submit(lambda: None).result(WAIT_S)
    wait_until(lambda: harness.steps == 1)
    harness.thread.wake()
    wait_until(lambda: harness.steps == 2)
    harness.thread.stop(timeout_s=WAIT_S)


def test_a_thread_that_has_had_nothing_to_do_for_a_while_is_idle_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.thread.IDLE_S", 0.02)
    monkeypatch.setattr("services.engine.thread._LONGEST_SLEEP_S", 0.01)
    harness = Harness()
    harness.thread.submit(lambda: harness.add_work(1000))
    harness.thread.start()
    wait_until(lambda: harness.idle_at_step == [1000])
    time.sleep(0.1)
    assert harness.idle_at_step == [1000], "once, and not while there was work"
    harness.thread.submit(lambda: None)
    wait_until(lambda: harness.idle_at_step == [1000, 1001])
    harness.idle_error = InvariantViolated("the books are wrong")
    harness.thread.wake()
    assert harness.fatal.result(WAIT_S) is harness.idle_error
    with pytest.raises(WorkerUnavailable):
        harness.thread.submit(lambda: None).result(WAIT_S)


def test_what_comes_soon_finds_a_thread_that_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.thread.IDLE_S", 10 * WAIT_S)
    harness = Harness()
    harness.thread.start()
    for _ in range(20):
        harness.thread.submit(lambda: None).result(WAIT_S)
    harness.thread.stop(timeout_s=WAIT_S)
    assert not harness.idle_at_step


def test_a_command_gets_in_between_steps_of_endless_work(harness: Harness) -> None:
    harness.thread.submit(lambda: harness.add_work(10**9)).result(WAIT_S)
    assert harness.thread.submit(lambda: harness.work > 10**6).result(WAIT_S)


def test_commands_that_submit_commands_do_not_starve_steps(harness: Harness) -> None:
    def again() -> None:
        if harness.steps < 20:
            harness.thread.submit(again)

    harness.thread.submit(again)
    wait_until(lambda: harness.steps >= 20)


def test_an_error_of_a_command_is_its_own(harness: Harness) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        harness.thread.submit(fail).result(WAIT_S)
    assert harness.thread.submit(lambda: 7).result(WAIT_S) == 7
    assert not harness.fatal.done()


def test_an_error_of_a_step_is_fatal_and_answers_everyone(harness: Harness) -> None:
    harness.step_error = ValueError("broken")
    entered, leave = threading.Event(), threading.Event()
    blocker = harness.thread.submit(lambda: (entered.set(), leave.wait(WAIT_S)))
    assert entered.wait(WAIT_S)
    # These come while the last command before the fatal step runs.
    late = [harness.thread.submit(lambda: 1) for _ in range(5)]
    leave.set()
    blocker.result(WAIT_S)
    assert harness.fatal.result(WAIT_S) is harness.step_error
    for future in late:
        with pytest.raises(WorkerUnavailable, match="ValueError"):
            future.result(WAIT_S)
    with pytest.raises(WorkerUnavailable, match="ValueError"):
        harness.thread.submit(lambda: 1).result(WAIT_S)
    wait_until(lambda: not harness.thread.is_alive)


def test_a_violated_invariant_of_a_command_is_fatal_and_leaves_no_future_open(harness: Harness) -> None:
    gate = threading.Event()
    harness.thread.submit(lambda: gate.wait(WAIT_S))

    def violate() -> None:
        raise InvariantViolated("pages")

    violating = harness.thread.submit(violate)
    behind = [harness.thread.submit(lambda: 1) for _ in range(5)]
    gate.set()
    with pytest.raises(InvariantViolated):
        violating.result(WAIT_S)
    assert isinstance(harness.fatal.result(WAIT_S), InvariantViolated)
    for future in behind:
        with pytest.raises(WorkerUnavailable):
            future.result(WAIT_S)


def test_a_cancelled_command_never_runs(harness: Harness) -> None:
    gate = threading.Event()
    harness.thread.submit(lambda: gate.wait(WAIT_S))
    ran: list[int] = []
    cancelled = harness.thread.submit(lambda: ran.append(1))
    assert cancelled.cancel()
    gate.set()
    harness.thread.submit(lambda: None).result(WAIT_S)
    assert ran == []
    with pytest.raises(CancelledError):
        cancelled.result(WAIT_S)


def test_stop_lets_the_command_finish_and_refuses_the_rest(harness: Harness) -> None:
    entered, leave = threading.Event(), threading.Event()
    running = harness.thread.submit(lambda: (entered.set(), leave.wait(WAIT_S)))
    assert entered.wait(WAIT_S)
    queued = harness.thread.submit(lambda: 1)
    with pytest.raises(DeadlineExceeded):
        harness.thread.stop(timeout_s=0.01)
    leave.set()
    harness.thread.stop(timeout_s=WAIT_S)
    harness.thread.stop(timeout_s=WAIT_S)
    running.result(0)
    with pytest.raises(WorkerUnavailable, match="stopped"):
        queued.result(0)
    with pytest.raises(WorkerUnavailable, match="stopped"):
        harness.thread.submit(lambda: 1).result(0)
    assert not harness.fatal.done()


def test_stop_refuses_what_was_queued_together_with_the_running_command() -> None:
    harness = Harness()
    entered, leave = threading.Event(), threading.Event()
    running = harness.thread.submit(lambda: (entered.set(), leave.wait(WAIT_S)))
    queued = [harness.thread.submit(lambda: 1) for _ in range(3)]
    harness.thread.start()
    assert entered.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded):
        harness.thread.stop(timeout_s=0.01)
    leave.set()
    harness.thread.stop(timeout_s=WAIT_S)
    running.result(0)
    for future in queued:
        with pytest.raises(WorkerUnavailable):
            future.result(0)
    assert harness.steps == 0


def test_stop_ends_endless_work(harness: Harness) -> None:
    harness.thread.submit(lambda: harness.add_work(10**9)).result(WAIT_S)
    harness.thread.stop(timeout_s=WAIT_S)
    assert not harness.thread.is_alive


def test_stop_before_start_answers_what_was_queued() -> None:
    harness = Harness()
    early = harness.thread.submit(lambda: 1)
    harness.thread.stop(timeout_s=WAIT_S)
    with pytest.raises(WorkerUnavailable):
        early.result(0)


def test_everyone_is_answered_before_on_fatal_is_told() -> None:
    # The listener may end the process at once.
    unanswered: Future[bool] = Future()

    def step() -> bool:
        late.append(thread.submit(lambda: 1))
        raise ValueError("broken")

    late: list[Future[int]] = []
    thread = EngineThread(step, on_fatal=lambda error: unanswered.set_result(not late[0].done()))
    thread.start()
    thread.wake()
    assert not unanswered.result(WAIT_S)


def test_stop_from_on_fatal_does_not_hang() -> None:
    stopped = threading.Event()

    def on_fatal(error: BaseException) -> None:
        thread.stop(timeout_s=WAIT_S)
        stopped.set()

    def step() -> bool:
        raise ValueError("broken")

    thread = EngineThread(step, on_fatal=on_fatal)
    thread.start()
    thread.wake()
    assert stopped.wait(WAIT_S)


def test_submissions_from_many_threads_all_get_an_answer_while_it_stops() -> None:
    harness = Harness()
    harness.thread.start()
    futures: list[Future[int]] = []
    lock = threading.Lock()

    def submit_many() -> None:
        for _ in range(200):
            future = harness.thread.submit(lambda: 1)
            with lock:
                futures.append(future)

    submitters = [threading.Thread(target=submit_many) for _ in range(4)]
    for submitter in submitters:
        submitter.start()
    harness.thread.stop(timeout_s=WAIT_S)
    for submitter in submitters:
        submitter.join(WAIT_S)
    assert len(futures) == 800
    for future in futures:
        error = future.exception(WAIT_S)
        assert error is None or isinstance(error, WorkerUnavailable)


def test_a_step_that_does_not_end_is_noticed_and_left_behind() -> None:
    entered, leave = threading.Event(), threading.Event()

    def step() -> bool:
        entered.set()
        leave.wait(WAIT_S)
        return True

    thread = EngineThread(step, on_fatal=lambda error: None)
    watch = StepWatch(thread, timeout_s=2.0)
    thread.start()
    assert not watch.is_stuck(100.0), "an idle engine is not stuck"
    thread.wake()
    assert entered.wait(WAIT_S)
    assert [watch.is_stuck(1.0) for _ in range(5)] == [False, False, False, True, True]
    queued = thread.submit(lambda: 1)
    thread.abandon("stuck")
    for future in (queued, thread.submit(lambda: 2)):
        with pytest.raises(WorkerUnavailable):
            future.result(WAIT_S)
    thread.stop(timeout_s=0.0)
    assert thread.is_alive, "nobody waited for it"
    leave.set()
    wait_until(lambda: not thread.is_alive)


def test_steps_that_end_are_not_stuck_however_many(harness: Harness) -> None:
    watch = StepWatch(harness.thread, timeout_s=1.0)
    harness.thread.submit(lambda: harness.add_work(10**9)).result(WAIT_S)
    for _ in range(5):
        steps = harness.steps
        wait_until(lambda steps=steps: harness.steps > steps + 1)  # type: ignore[misc]
        assert not watch.is_stuck(50.0)


def test_a_watch_without_a_limit_finds_nothing() -> None:
    entered, leave = threading.Event(), threading.Event()
    thread = EngineThread(lambda: bool(entered.set() or leave.wait(WAIT_S)) and False, on_fatal=lambda error: None)
    watch = StepWatch(thread, timeout_s=0.0)
    thread.start()
    thread.wake()
    assert entered.wait(WAIT_S)
    assert not any(watch.is_stuck(1e6) for _ in range(3))
    leave.set()
    thread.stop(timeout_s=WAIT_S)
