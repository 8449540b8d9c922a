"""An answer as people see it: told without a gap, and why it went where it went."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dashboard.waterfall import bars, parts, reasons
from gateway.observability.history import AnswerStory, AttemptStory
from gateway.topology.events import PrefillStarted
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.route import rival_of
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView

PHASES = ("queue", "prefill", "transfer", "decode")


@st.composite
def stories(draw: st.DrawFn) -> AnswerStory:
    """Any order of phases; each prefill has an attempt that workers took at its beginning, most of the time."""
    at_us, steps, attempts = 0, [("queue", 0)], []
    for phase in draw(st.lists(st.sampled_from(PHASES), max_size=12)):
        since_us = at_us
        at_us += draw(st.integers(0, 1000))
        steps.append((phase, at_us))
        if phase == "prefill" and draw(st.booleans()):
            began_us = draw(st.integers(since_us - 10, at_us + 10))
            attempts.append(AttemptStory(began_us, at_us, "d", waited_us=draw(st.integers(0, 2000))))
    return AnswerStory(steps, attempts, ended_us=at_us + draw(st.integers(0, 1000)))


@given(story=stories())
def test_bars_are_the_whole_time_without_a_gap(story: AnswerStory) -> None:
    drawn = bars(story)
    assert drawn[0].began_us == 0
    assert drawn[-1].ended_us == story.ended_us
    for one, other in itertools.pairwise(drawn):
        assert one.ended_us == other.began_us
    assert all(bar.began_us <= bar.ended_us for bar in drawn)
    assert {bar.phase for bar in drawn} <= {*PHASES, "route", "waiting"}


def test_a_failover_has_the_bars_of_both_attempts() -> None:
    story = AnswerStory(
        [("queue", 0), ("prefill", 30), ("decode", 90), ("queue", 100), ("prefill", 150), ("decode", 180)],
        [
            AttemptStory(20, 30, "d-0", "p-0", waited_us=10, chunks=[(0, 20, 512), (25, 90, 9)], failure="worker_lost"),
            AttemptStory(140, 150, "d-1", reason="local_is_cheaper"),
        ],
        ended_us=200,
    )
    assert bars(story)[3].chunks == [(40, 60, 512), (65, 90, 9)]
    assert [(bar.phase, bar.began_us, bar.ended_us, bar.attempt, bar.worker) for bar in bars(story)] == [
        ("queue", 0, 20, 0, ""),
        ("route", 20, 30, 1, ""),
        ("waiting", 30, 40, 1, "p-0"),
        ("prefill", 40, 90, 1, "p-0"),
        ("decode", 90, 100, 1, "d-0"),
        ("queue", 100, 140, 0, ""),
        ("route", 140, 150, 2, ""),
        ("prefill", 150, 180, 2, "d-1"),
        ("decode", 180, 200, 2, "d-1"),
    ]


def view(worker_id: str, **fields: Any) -> WorkerView:
    defaults = {"pages_total": 1000, "pages_available": 1000, "num_requests": 0, "waiting_tokens": 0}
    return WorkerView(worker_id, worker_id, max_sequence_tokens=4096, **{**defaults, **fields})


def test_why_a_request_went_there_is_what_the_router_has_said() -> None:
    """The rival is the worker that would have been chosen, by its price, without the chosen one."""
    prefills = [view("p-0"), view("p-1", waiting_tokens=50_000)]
    decodes = [view("d-0", waiting_tokens=400), view("d-1"), view("d-2", waiting_tokens=90_000)]
    asked = RouteRequest(num_prompt_tokens=1000, max_new_tokens=50, cached_tokens={"p-0": 320})
    routes = Router().route(asked, prefills, decodes, now_s=0.0)
    route, second = routes[0], routes[1]
    assert rival_of(routes, route) == (second.decode.worker_id, pytest.approx(second.inputs["price_s"]))
    assert rival_of(routes, second) == (route.decode.worker_id, pytest.approx(route.inputs["price_s"]))
    assert rival_of(routes[:2], route) == (second.decode.worker_id, second.inputs["price_s"])
    assert rival_of(routes[:1], route) is None

    story = AnswerStory([("queue", 0)])
    story.note_route(route, rival_of(routes, route), prefill="p-0", began_us=5, placed_us=9)
    attempt = story.attempts[0]
    assert (attempt.decode, attempt.prefill, attempt.cached_tokens) == (route.decode.worker_id, "p-0", 320)
    assert attempt.predicted_ttft_us == round(route.predicted_ttft_s * 1e6)
    assert attempt.predicted_second_us == round(route.predicted_second_s * 1e6)
    assert attempt.predicted_exposed_us == round(float(route.inputs["exposed_s"]) * 1e6) > 0
    assert story.predicted() is attempt
    said = reasons(attempt, 1000)
    assert said[0] == "a prefill worker was the cheaper way"
    assert said[2].startswith(f"the next best was {second.decode.worker_id}, for ")
    assert said[2].endswith(" more")
    attempt.rival_s = route.inputs["price_s"]
    assert reasons(attempt, 1000)[2] == f"the next best was {second.decode.worker_id}, for the same price"
    assert said[3] == "320 of 1000 tokens of the prompt were expected in its cache"
    spent = list(parts(attempt).values())
    assert spent == sorted(spent, reverse=True)
    assert "generating" in parts(attempt)
    assert sum(spent) == attempt.price_us
    computing_s = float(route.inputs["remote_ttft_s"]) - float(route.inputs["prefill_queue_s"])
    assert parts(attempt)["computing the prompt"] == pytest.approx(computing_s * 1e6, abs=20)
    attempt.waited_us, attempt.terms = 120_000, {**attempt.terms, "prefill_queue_s": 0.09}
    waited = "the prompt waited 120 ms in p-0; 90 ms were expected"
    assert waited in reasons(attempt, 1000)
    attempt.ahead_tokens = 3000
    waited = "the prompt waited 120 ms in p-0, which had 3000 tokens of other prompts to compute; 90 ms were expected"
    assert waited in reasons(attempt, 1000)
    # What was tried again has nothing to be compared with.
    story.note_route(route, None, prefill="p-0", began_us=15, placed_us=19)
    assert story.predicted() is None


def test_a_beginning_that_was_to_be_fetched_is_told_as_predicted_and_as_it_came() -> None:
    asked = RouteRequest(num_prompt_tokens=1000, max_new_tokens=50, cached_tokens={"d-0": 960}, kv_bytes_per_token=1000)
    prefills, decodes = [view("p-0", can_pull=True)], [view("d-0", can_pull=True, waiting_tokens=90_000), view("d-1")]
    route = Router().route(asked, prefills, decodes, can_pull=lambda holder, prefill: True, now_s=0.0)[0]
    pull = route.pulls["p-0"]
    story = AnswerStory([("queue", 0)])
    story.note_route(route, None, prefill="p-0", began_us=5, placed_us=9)
    attempt = story.attempts[0]
    assert sum(parts(attempt).values()) == attempt.price_us
    assert parts(attempt)["fetching what another worker holds"] == pytest.approx(pull.time_s * 1e6, abs=1)
    told = reasons(attempt, 1000)
    assert told[-1].startswith("the first 960 of them were to come from d-0: fetching them was predicted to take ")
    story.note_prompt("p-0", PrefillStarted(0.0, 960, 0, 960, 0.02))
    assert reasons(attempt, 1000) == [*told, "960 had come after 20 ms"]
    story.note_prompt("p-0", PrefillStarted(0.0, 0, 0, 0, 0.03))
    assert reasons(attempt, 1000) == [*told, "none came within 30 ms, so they were computed"]


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_parts_of_a_price_sum_up_and_only_a_remote_prompt_has_a_transfer(is_remote: bool) -> None:
    decided = DisaggregationSettings(local_prefill_tokens=0 if is_remote else 10_000)
    prefills = [view("p-0", waiting_tokens=700)]
    decodes = [view("d-0", waiting_tokens=400, num_requests=3), view("d-1", waiting_tokens=500, num_requests=4)]
    asked = RouteRequest(num_prompt_tokens=1000, max_new_tokens=50, kv_bytes_per_token=1000)
    settings = RoutingSettings(disaggregation=decided)
    for route in Router(settings=settings).route(asked, prefills, decodes, now_s=0.0):
        story = AnswerStory([("queue", 0)])
        story.note_route(route, None, prefill="p-0" if is_remote else "", began_us=0, placed_us=1)
        (attempt,) = story.attempts
        assert attempt.is_remote is is_remote
        assert sum(parts(attempt).values()) == attempt.price_us
        assert ("transfer" in parts(attempt)) is is_remote
        assert ("prefill worker's queue" in parts(attempt)) is is_remote
        assert parts(attempt)["computing the prompt"] > 0
        assert attempt.ahead_tokens == (700 if is_remote else route.decode.waiting_tokens)


def test_what_was_expected_of_each_phase_is_beside_it() -> None:
    attempt = AttemptStory(
        20, 30, "d-0", "p-0", is_remote=True, waited_us=10, first_s=50e-6, second_s=70e-6, queue_s=15e-6, itl_s=4e-6
    )
    attempt.terms = {"prefill_queue_s": 8e-6, "exposed_s": 12e-6}
    steps = [("queue", 0), ("prefill", 30), ("transfer", 90), ("decode", 100)]
    story = AnswerStory(steps, [attempt], tokens=6, ended_us=130)
    expected = {bar.phase: bar.predicted_us for bar in bars(story)}
    assert expected == {"queue": 15, "route": None, "waiting": 8, "prefill": 42, "transfer": 12, "decode": 20}
    attempt.failure = "worker_lost"
    assert {bar.phase: bar.predicted_us for bar in bars(story)}["decode"] is None


def test_without_prefill_workers_there_was_no_other_way() -> None:
    routes = Router().route(RouteRequest(num_prompt_tokens=10, max_new_tokens=5), [], [view("d-0")], now_s=0.0)
    story = AnswerStory([("queue", 0)])
    story.note_route(routes[0], rival_of(routes, routes[0]), prefill="", began_us=0, placed_us=1)
    assert reasons(story.attempts[0], 10) == [
        "no prefill worker was available, so the decode worker computed the prompt itself"
    ]
