"""One circuit breaker: what opens it, which call probes, and what closes it."""

from services.runtime.breaker import Breaker


def impatient() -> Breaker:
    """One that a single error opens, for one second each time."""
    return Breaker(max_errors=1, first_open_s=1.0, max_open_s=1.0)


def test_one_probe_at_a_time_is_let_through() -> None:
    breaker = impatient()
    assert [breaker.lets_through(0.0), breaker.begin(0.0), breaker.begin(0.0)] == [True, False, False]
    breaker.succeeded(0.0)
    breaker.failed(0.0)
    assert (breaker.is_open, breaker.state) == (True, "open")
    assert not breaker.lets_through(0.9)
    assert [breaker.begin(1.0), breaker.begin(1.0), breaker.lets_through(1.0)] == [True, False, False]
    assert breaker.state == "half_open"
    breaker.failed(1.0, is_probe=True)
    assert [breaker.lets_through(1.9), breaker.begin(2.0)] == [False, True]
    breaker.abandoned()
    assert breaker.begin(2.0)
    assert breaker.succeeded(2.0)
    assert (breaker.is_open, breaker.lets_through(2.0), breaker.begin(2.0)) == (False, True, False)


def test_a_late_failure_of_an_old_call_neither_ends_a_probe_nor_delays_the_next() -> None:
    breaker = impatient()
    breaker.failed(0.0)
    breaker.failed(0.5)
    assert breaker.begin(1.0)
    breaker.failed(1.0)
    assert not breaker.lets_through(1.0)
    breaker.failed(1.0, is_probe=True)
    assert not breaker.lets_through(1.9)


def test_a_late_success_of_an_old_call_closes_it() -> None:
    breaker = impatient()
    breaker.failed(0.0)
    assert breaker.succeeded(0.1)
    assert breaker.lets_through(0.1)
    assert not breaker.succeeded(0.2)


def test_its_own_settings_are_kept() -> None:
    breaker = Breaker(max_errors=2, first_open_s=0.5, max_open_s=3.0)
    breaker.failed(0.0)
    assert not breaker.is_open
    breaker.failed(0.1)
    waits, now_s = [], 0.1
    for _ in range(4):
        wait_s = next(tenths / 10 for tenths in range(1, 100) if breaker.lets_through(now_s + tenths / 10))
        waits.append(wait_s)
        now_s += wait_s
        assert breaker.begin(now_s)
        breaker.failed(now_s, is_probe=True)
    assert waits == [0.5, 1.0, 2.0, 3.0]
