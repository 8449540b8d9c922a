"""What gateways tell, and what is not believed of it."""

from typing import Any

import pytest

from planning.autoscaler.gateways import Gateways
from services.runtime.clock import ManualClock
from tests.planning.autoscaler.pages import FakeGateway, metrics, worker


@pytest.fixture
def gateway(api: Any) -> FakeGateway:
    return FakeGateway(api)


def watch(gateway: FakeGateway, **changes: Any) -> tuple[Gateways, ManualClock]:
    clock = ManualClock()
    return Gateways([gateway.url], clock=clock, **changes), clock


def test_arrivals_are_what_has_ended_and_what_is_open_now(gateway: FakeGateway) -> None:
    gateways, clock = watch(gateway)
    gateway.counts = {"ended": 100, "queued": 1, "running": 4}
    first = gateways.look()
    assert (first.elapsed_s, first.num_arrived, first.mean_prompt, first.mean_answer) == (0.0, 0, 450.0, 101.0)
    clock.advance(10.0)
    gateway.counts = {"ended": 120, "queued": 3, "running": 7, "prompt": 450 * 100 + 20 * 50}
    second = gateways.look()
    assert (second.elapsed_s, second.num_arrived, second.num_queued) == (10.0, 25, 3)
    assert second.mean_prompt == 250.0, "half of what it was, half of the new ones"
    assert [(one.role, one.kv_tokens, one.max_batch) for one in second.workers] == [
        ("prefill", 1600, 4),
        ("decode", 1600, 4),
    ]


def test_a_gateway_that_has_started_anew_counts_from_nothing(gateway: FakeGateway) -> None:
    gateways, clock = watch(gateway)
    gateway.counts = {"ended": 100, "running": 4}
    gateways.look()
    clock.advance(10.0)
    gateway.counts = {"ended": 5, "running": 2}
    assert gateways.look().num_arrived == 7


def test_a_gateway_that_was_away_has_counted_meanwhile(gateway: FakeGateway) -> None:
    gateways, clock = watch(gateway)
    gateways.look()
    clock.advance(10.0)
    gateway.page = b"tandem_requests{"
    assert gateways.look().num_gateways == 0
    clock.advance(10.0)
    gateway.page = None
    gateway.counts = {"ended": 40}
    seen = gateways.look()
    assert (seen.num_arrived, seen.elapsed_s) == (40, 20.0)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (metrics(ended=1e9), "1000000000 requests came in 10.0 s"),
        (metrics(ended=float("nan")), "no amount"),
        (metrics(running=float("inf")), "no amount"),
        (metrics(queued=-3), "no amount"),
        (b"<html>", "its answer is not that of a gateway"),
    ],
)
def test_what_cannot_be_is_left_out_and_named(gateway: FakeGateway, page: bytes, said: str) -> None:
    gateways, clock = watch(gateway)
    gateways.look()
    clock.advance(10.0)
    gateway.page = page
    seen = gateways.look()
    assert (seen.num_gateways, seen.num_arrived, list(seen.workers)) == (0, 0, [])
    assert said in seen.troubles[0]
    assert seen.troubles[0].startswith(f"{gateway.url} is left out")


@pytest.mark.parametrize(
    "broken",
    [
        worker("decode", waiting_tokens=-1),
        worker("decode", pages={}),
        worker("decode", speed={"prefill": None, "decode": {"overhead_s": "NaN", "s_per_sequence": 0}}),
    ],
)
def test_a_worker_that_cannot_be_is_not_believed(gateway: FakeGateway, broken: Any) -> None:
    gateways, _ = watch(gateway)
    gateway.workers = [broken]
    assert gateways.look().num_gateways == 0


def test_a_speed_that_takes_no_time_is_none(gateway: FakeGateway) -> None:
    gateways, _ = watch(gateway)
    nothing = {"overhead_s": 0.0, "s_per_sequence": 0.0, "s_per_context_token": 0.0}
    gateway.workers = [worker("decode", speed={"prefill": None, "decode": nothing})]
    assert gateways.look().workers[0].decode is None


def test_lengths_that_cannot_be_change_no_mean(gateway: FakeGateway) -> None:
    gateways, clock = watch(gateway)
    gateway.counts = {"ended": 10}
    gateways.look()
    clock.advance(10.0)
    gateway.counts = {"ended": 11, "prompt": 1e18}
    assert gateways.look().mean_prompt == 450.0


def test_of_several_models_one_is_watched(gateway: FakeGateway) -> None:
    gateways, clock = watch(gateway, model="demo")
    gateway.page = metrics(ended=0) + metrics(ended=0, model="other")
    gateway.workers = [worker("decode"), worker("decode", model="other")]
    assert len(gateways.look().workers) == 1
    clock.advance(10.0)
    gateway.page = metrics(ended=5) + metrics(ended=70, model="other")
    assert gateways.look().num_arrived == 5


def test_hosts_that_are_not_known_and_gateways_that_are_silent_are_named(gateway: FakeGateway) -> None:
    clock = ManualClock()
    urls = ["http://nowhere.invalid:8000", "http://127.0.0.1:9", gateway.url.replace("127.0.0.1", "localhost")]
    seen = Gateways(urls, clock=clock).look()
    assert seen.num_gateways == 1
    assert len(seen.troubles) >= 2
    assert "its host is not known" in seen.troubles[0]
