"""Deadlines count down, never read zero early, and raise when they have passed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.clock import Deadline, ManualClock, SystemClock
from services.runtime.errors import DeadlineExceeded


def test_a_deadline_passes() -> None:
    clock = ManualClock()
    deadline = Deadline.from_remaining_ms(1500, clock=clock)
    assert deadline.remaining_s() == 1.5
    deadline.check()
    clock.advance(1.4995)
    assert deadline.remaining_ms() == 1
    assert not deadline.has_passed()
    clock.advance(0.001)
    assert (deadline.remaining_s(), deadline.remaining_ms()) == (0.0, 0)
    with pytest.raises(DeadlineExceeded):
        deadline.check()


def test_the_sooner_of_two() -> None:
    clock = ManualClock()
    soon, late = Deadline.after(1, clock=clock), Deadline.after(2, clock=clock)
    assert soon.sooner(late) is late.sooner(soon) is soon


@given(remaining_s=st.floats(1e-6, 1e6))
def test_milliseconds_are_never_too_few(remaining_s: float) -> None:
    deadline = Deadline.after(remaining_s, clock=ManualClock())
    assert deadline.remaining_ms() >= max(1, int(deadline.remaining_s() * 1000))
    assert deadline.remaining_ms() <= remaining_s * 1000 + 1.001


def test_a_manual_clock_does_not_go_back() -> None:
    clock = ManualClock()
    before_ns = clock.unix_ns()
    clock.advance(0.5)
    assert clock.unix_ns() - before_ns == 500_000_000
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_the_system_clock_runs() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.unix_ns() > 1_700_000_000_000_000_000
