import time

from tests.stopwatch import Stopwatch


def test_time_that_is_spent_waiting_counts() -> None:
    stopwatch = Stopwatch()
    time.sleep(0.3)
    assert stopwatch.elapsed_s() > 0.2


def test_time_that_is_spent_working_counts() -> None:
    stopwatch, began_s = Stopwatch(), time.thread_time()
    while time.thread_time() - began_s < 0.3:
        pass
    assert stopwatch.elapsed_s() > 0.2
