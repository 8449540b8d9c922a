"""Workers that keep failing and recovering are found; those that fail once, or leave cleanly, are not."""

from gateway.topology.flapping import FLAP_WINDOW_S, FLAPS, FlapCounter, SeenWorker
from services.runtime.worker_state import WorkerState


def seen(incarnation: str = "a", state: WorkerState = WorkerState.READY, *, ejected: bool = False) -> SeenWorker:
    return SeenWorker("d", incarnation, state, "open" if ejected else "closed")


def fail(counter: FlapCounter, now_s: float, *during: SeenWorker) -> int:
    """Lets the worker be ready, fail, and be ready again. Returns the number of failures that is reported."""
    counter.check([seen()], now_s)
    counter.check(during, now_s)
    return counter.check([seen()], now_s).get("d", 0)


def test_each_kind_of_failure_counts_once() -> None:
    for during in ((), (seen(state=WorkerState.LOST),), (seen("b"),), (seen(ejected=True),)):
        counter = FlapCounter()
        counts = [fail(counter, float(number), *during) for number in range(FLAPS + 1)]
        # A restart is a failure of the first process and, when the first one is seen again, of the second.
        assert counts[0] == 0
        assert counts[-1] >= FLAPS + 1


def test_a_failure_that_lasts_counts_once() -> None:
    counter = FlapCounter()
    counter.check([seen()], 0.0)
    for second in range(1, 60):
        assert counter.check([seen(state=WorkerState.LOST)] if second % 2 else [], float(second)) == {}


def test_a_worker_that_drains_first_has_not_failed() -> None:
    counter = FlapCounter()
    for number in range(3 * FLAPS):
        now_s = float(number)
        counter.check([seen(str(number))], now_s)
        counter.check([seen(str(number), WorkerState.DRAINING)], now_s)
        assert counter.check([], now_s) == {}


def test_failures_are_forgotten_after_the_window() -> None:
    counter = FlapCounter()
    for number in range(FLAPS):
        assert fail(counter, 10.0 * number) == (FLAPS if number == FLAPS - 1 else 0)
    last_s = 10.0 * (FLAPS - 1)
    assert counter.check([seen()], FLAP_WINDOW_S - 0.1) == {"d": FLAPS}
    assert counter.check([seen()], FLAP_WINDOW_S) == {}
    assert fail(counter, last_s + FLAP_WINDOW_S - 0.1) == 0, "the first two are too long ago"


def test_a_suspected_worker_has_not_failed() -> None:
    """It still gets work. An ejected worker that is only suspected has not recovered."""
    counter, suspected = FlapCounter(), SeenWorker("d", "a", WorkerState.READY, "suspected")
    for number in range(3 * FLAPS):
        assert fail(counter, float(number), suspected) == 0
    for during in ([seen(ejected=True)], [suspected]) * FLAPS:
        assert counter.check(during, 3.0 * FLAPS) == {}
    counter = FlapCounter()
    counts = [fail(counter, float(number), suspected, seen(ejected=True)) for number in range(FLAPS)]
    assert counts == [0] * (FLAPS - 1) + [FLAPS]


def test_a_suspected_worker_that_dies_has_failed() -> None:
    counter, suspected = FlapCounter(), SeenWorker("d", "a", WorkerState.READY, "suspected")
    for number in range(FLAPS):
        counter.check([seen()], float(number))
        counter.check([suspected], float(number))
        found = counter.check([], float(number))
    assert found == {"d": FLAPS}
