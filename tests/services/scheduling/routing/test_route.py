"""What is told and predicted of a chosen route."""

import math

import pytest

from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.router import Router
from tests.services.scheduling.routing.samples import (
    request,
    view,
)


def test_what_is_predicted_goes_by_the_workers_own_speed_and_the_price_does_not():
    remote = RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0))
    asked, measured = request(num_prompt_tokens=2500, kv_bytes_per_token=1), PrefillSpeed(0.02, 1.3e-4)
    for how, place in [(remote, 0), (RoutingSettings(), 1)]:
        workers = [[view("p"), view("d")] for _ in range(2)]
        workers[1][place] = workers[1][place].replaced(measured=measured)
        usual, own = (Router(settings=how).route(asked, [p] if place == 0 else [], [d], now_s=0)[0] for p, d in workers)
        assert own.inputs["price_s"] == usual.inputs["price_s"]
        assert own.predicted_ttft_s == pytest.approx(
            usual.predicted_ttft_s * measured.time_s(2500) / PrefillSpeed(0.01, 1e-4).time_s(2500)
        )


def test_the_steps_of_a_local_prompt_are_stretched_only_until_those_that_run_have_ended():
    asked = request(num_prompt_tokens=2000)
    busy = [view("d", num_running=1, context_tokens=100, steps_left=left) for left in (math.inf, 5, 0)]
    routes = [Router().route(asked, [], [d], now_s=0)[0] for d in busy]
    first, second, third = (route.predicted_ttft_s for route in routes)
    step_s = DecodeSpeed(0.010, 1e-4, 2e-8).step_s(1, 100)
    assert second - third == pytest.approx(5 * step_s, rel=0.25)
    assert first - third > 30 * step_s
    prices = [float(route.inputs["price_s"]) for route in routes]
    assert prices[0] > prices[1] > prices[2]


def test_pages_that_are_with_the_decode_worker_need_no_way():
    asked = request(num_prompt_tokens=8000, cached_tokens={"a": 4000}, kv_bytes_per_token=1_000_000)
    first, second = Router().route(asked, [view("p")], [view("b"), view("a")], now_s=0)
    assert (first.decode.worker_id, second.decode.worker_id) == ("a", "b")
    assert first.inputs["transfer_s"] == pytest.approx(4.002)
    assert second.inputs["transfer_s"] == pytest.approx(8.002)
