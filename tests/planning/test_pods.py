"""What the formulas give, and what they must never give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.pods import EXIT_MARGIN_S, grace_s, handover_s, longest_work_s

seconds = st.floats(0, 86_400)


def test_a_worker_has_a_minute_whatever_its_model() -> None:
    work_s = longest_work_s(max_request_s=600, drain_s=50, can_hand_over=True)
    assert grace_s(work_s) == 60


def test_the_last_worker_and_a_gateway_have_their_longest_answer() -> None:
    assert longest_work_s(max_request_s=600, drain_s=50, can_hand_over=False) == 600
    assert longest_work_s(max_request_s=600, drain_s=700, can_hand_over=False) == 700
    assert grace_s(600, endpoint_lag_s=10) == 620


@given(seconds, seconds)
def test_the_grace_is_longer_than_all_that_is_waited_for(work_s: float, lag_s: float) -> None:
    assert grace_s(work_s, endpoint_lag_s=lag_s) >= work_s + lag_s
    assert grace_s(work_s, endpoint_lag_s=lag_s) - (work_s + lag_s) == pytest.approx(EXIT_MARGIN_S, abs=1e-6)


def test_a_full_cache_moves_in_the_time_of_its_bytes() -> None:
    assert handover_s(2**30) == pytest.approx(8.6, abs=0.1)
    assert handover_s(40 * 2**30, bytes_per_s=3.1e9) == pytest.approx(13.9, abs=0.1)
