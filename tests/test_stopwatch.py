import hashlib
import threading
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


def test_waiting_is_not_forgiven_because_other_threads_are_busy() -> None:
    data, is_over = bytes(1 << 20), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            hashlib.blake2b(data)  # without the interpreter's lock

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    stopwatch = Stopwatch()
    time.sleep(0.5)
    elapsed_s = stopwatch.elapsed_s()
    is_over.set()
    for thread in threads:
        thread.join()
    assert elapsed_s > 0.0, "at most one thread's time in line is taken off"
