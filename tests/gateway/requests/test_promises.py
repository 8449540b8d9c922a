"""What is said, and what is counted, when a token comes that was not expected."""

from __future__ import annotations

import logging

import pytest

from gateway.observability.history import AnswerStory, AttemptStory
from gateway.observability.metrics import Metrics, RequestFigures
from gateway.requests.promises import LEARN_S, PAIR_S, WARNINGS_BURST, Promises, is_far
from services.scheduling.routing.route import Route
from services.scheduling.routing.views import WorkerView


@pytest.fixture
def promises() -> Promises:
    return Promises()


FIGURES = Metrics().of("m", "normal")


def second(
    promises: Promises,
    *,
    figures: RequestFigures = FIGURES,
    decode: str = "decode-0",
    predicted_s: float = 0.3,
    seen_s: float = 21.0,
    now_s: float = 0.0,
) -> None:
    attempt = AttemptStory(0, 0, decode, "prefill-0", is_remote=True, terms={"exposed_s": 0.09}, second_s=predicted_s)
    promises.note(figures, attempt, seen_s, now_s=now_s, is_second=True)


def test_a_stall_that_was_not_predicted_is_said_with_the_pair(
    promises: Promises, caplog: pytest.LogCaptureFixture
) -> None:
    second(promises)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == ("prefill-0 → decode-0: a second token was expected after 0.3 s and came after 21 s")
    assert vars(record)["predicted_transfer_s"] == 0.09


def test_one_pair_is_named_now_and_then_and_all_of_them_not_without_end(
    promises: Promises, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        second(promises)
    assert len(caplog.records) == 1
    second(promises, now_s=PAIR_S)
    assert len(caplog.records) == 2
    for number in range(100):
        second(promises, decode=f"decode-{number}", now_s=PAIR_S)
    assert len(caplog.records) <= 2 + WARNINGS_BURST


def test_what_is_nearly_right_is_counted_only(promises: Promises, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    figures = metrics.of("m", "normal")
    second(promises, figures=figures, predicted_s=10.0, seen_s=12.5)
    promises.note(figures, AttemptStory(0, 0, "decode-0", first_s=0.1), 0.05, now_s=0.0, is_second=False)
    promises.note(figures, AttemptStory(0, 0, "decode-0"), 0.05, now_s=0.0, is_second=False)
    assert not caplog.records
    page = metrics.render([]).decode()
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


def route(*, decode: str = "decode-0", is_remote: bool = True) -> Route:
    view = WorkerView(decode, "1", 100, 100, 0, 0, 4096)
    return Route(view, (), is_remote, "remote_is_cheaper", 0.1, 0.01, 0, {}, 0.2)


def teach(promises: Promises, taken: Route, *, first_s: float, second_s: float, times: int = 3) -> None:
    """Has predictions of this route turn out like this."""
    for number in range(times):
        now_s = number * LEARN_S * 1.01
        story = AnswerStory([])
        promised = promises.corrected(taken, "prefill-0")
        story.note_route(promised, None, prefill="prefill-0", began_us=0, placed_us=0)
        promises.note(FIGURES, story.attempts[0], first_s, now_s=now_s, is_second=False)
        promises.note(FIGURES, story.attempts[0], second_s, now_s=now_s, is_second=True)


def test_predictions_learn_from_how_earlier_ones_of_the_same_workers_turned_out(promises: Promises) -> None:
    assert promises.corrected(route(), "prefill-0").predicted_ttft_s == 0.1
    teach(promises, route(), first_s=0.15, second_s=0.4, times=12)
    promised = promises.corrected(route(), "prefill-0")
    assert promised.predicted_ttft_s == pytest.approx(0.15)
    assert promised.predicted_second_s == pytest.approx(0.4)
    assert promised.uncorrected_s == (0.1, 0.2)
    for other, prefill in ((route(decode="decode-1"), "prefill-0"), (route(), "prefill-1")):
        assert promises.corrected(other, prefill).predicted_second_s == 0.2
    assert promises.corrected(route(is_remote=False), "prefill-0").predicted_second_s == 0.2, "nothing goes that way"


def test_many_tokens_of_one_moment_count_as_one(promises: Promises) -> None:
    teach(promises, route(), first_s=0.1, second_s=0.2, times=6)
    story = AnswerStory([])
    story.note_route(promises.corrected(route(), "prefill-0"), None, prefill="prefill-0", began_us=0, placed_us=0)
    for _ in range(100):
        promises.note(FIGURES, story.attempts[0], 0.9, now_s=1.0, is_second=False)
    assert promises.corrected(route(), "prefill-0").predicted_ttft_s == pytest.approx(0.1)


@pytest.mark.parametrize("impossible", [float("inf"), float("nan"), -1.0])
def test_an_impossible_prediction_teaches_nothing(
    promises: Promises, caplog: pytest.LogCaptureFixture, impossible: float
) -> None:
    attempt = AttemptStory(0, 0, "decode-0", first_s=impossible, second_s=impossible, uncorrected_s=(impossible, 1.0))
    for number in range(9):
        promises.note(FIGURES, attempt, 5.0, now_s=number, is_second=False)
        promises.note(FIGURES, attempt, 5.0, now_s=number, is_second=True)
    assert promises.corrected(route(is_remote=False), "").predicted_ttft_s == 0.1
    assert not caplog.records


def test_a_second_token_is_never_expected_before_the_first(promises: Promises) -> None:
    teach(promises, route(), first_s=0.25, second_s=0.12, times=6)
    promised = promises.corrected(route(), "prefill-0")
    assert promised.predicted_ttft_s == promised.predicted_second_s == pytest.approx(0.25)
