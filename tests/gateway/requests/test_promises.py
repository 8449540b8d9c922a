"""What is said, and what is counted, when a token comes that was not expected."""

from __future__ import annotations

import logging

import pytest

from gateway.observability.history import AttemptStory
from gateway.observability.metrics import Metrics
from gateway.requests.promises import PAIR_S, WARNINGS_BURST, Promises, is_far


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def promises(clock: HandClock) -> Promises:
    return Promises(Metrics(), clock=clock)  # type: ignore[arg-type]


def second(promises: Promises, *, decode: str = "decode-0", predicted_s: float = 0.3, seen_s: float = 21.0) -> None:
    attempt = AttemptStory(0, 0, decode, "prefill-0", is_remote=True, predicted_exposed_us=90_000)
    attempt.predicted_second_us = round(predicted_s * 1e6)
    promises.note("m", attempt, seen_s, is_second=True)


def test_a_stall_that_was_not_predicted_is_said_with_the_pair(
    promises: Promises, caplog: pytest.LogCaptureFixture
) -> None:
    second(promises)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == ("prefill-0 → decode-0: a second token was expected after 0.3 s and came after 21 s")
    assert vars(record)["predicted_transfer_s"] == 0.09


def test_one_pair_is_named_now_and_then_and_all_of_them_not_without_end(
    promises: Promises, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        second(promises)
    assert len(caplog.records) == 1
    clock.now_s = PAIR_S
    second(promises)
    assert len(caplog.records) == 2
    for number in range(100):
        second(promises, decode=f"decode-{number}")
    assert len(caplog.records) <= 2 + WARNINGS_BURST


def test_what_is_nearly_right_is_counted_only(promises: Promises, caplog: pytest.LogCaptureFixture) -> None:
    second(promises, predicted_s=10.0, seen_s=12.5)
    promises.note("m", AttemptStory(0, 0, "decode-0", predicted_ttft_us=100_000), 0.05, is_second=False)
    promises.note("m", AttemptStory(0, 0, "decode-0"), 0.05, is_second=False)
    assert not caplog.records
    page = promises._metrics.render([]).decode()
    assert 'tandem_token_prediction_ratio_count{model="m",token="second"} 1' in page
    assert 'tandem_token_prediction_ratio_sum{model="m",token="second"} 1.25' in page
    assert 'tandem_token_prediction_ratio_count{model="m",token="first"} 1' in page


@pytest.mark.parametrize(
    ("predicted_s", "seen_s", "expected"),
    [
        (0.1, 0.9, False),
        (0.1, 1.2, True),
        (10.0, 19.0, False),
        (10.0, 21.0, True),
        (25.0, 2.0, True),
        (0.0, 0.0, False),
    ],
)
def test_far_is_far_in_seconds_and_in_proportion(predicted_s: float, seen_s: float, expected: bool) -> None:
    assert is_far(predicted_s, seen_s) is expected
