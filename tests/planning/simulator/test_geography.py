"""Where requests come from: those that name no region get one, and some are held there."""

import pytest

from planning.simulator.geography import Geography
from planning.simulator.traces import TraceRequest
from services.runtime.errors import ConfigError
from tests.planning.simulator.small import cluster_spec, trace_of

REQUESTS = [TraceRequest(0.1 * number, 100, 10) for number in range(400)]


def test_requests_come_from_each_region_and_some_are_held_there() -> None:
    geography = Geography(("eu", "us"), held_share=0.25)
    placed = geography.placed(trace_of(REQUESTS), seed=1).requests
    assert 150 < sum(one.region == "eu" for one in placed) < 250
    held = [one for one in placed if one.residency]
    assert 60 < len(held) < 140
    assert all(one.residency == (one.region,) for one in held)
    assert geography.placed(trace_of(REQUESTS), seed=1).requests == placed
    assert geography.placed(trace_of(REQUESTS), seed=2).requests != placed


def test_what_a_trace_says_of_its_requests_stays() -> None:
    told = trace_of([TraceRequest(0.0, 1, 1, region="ap"), TraceRequest(0.1, 1, 1, residency=("eu", "us"))])
    placed = Geography(("eu", "us")).placed(told, seed=0).requests
    assert (placed[0].region, placed[0].residency) == ("ap", ())
    assert placed[1].region in ("eu", "us")
    assert placed[1].residency == ("eu", "us")
    assert Geography().placed(told, seed=0) is told


def test_a_cluster_has_its_workers_and_distances_there() -> None:
    distances_s = {("eu", "us"): 0.08, ("us", "eu"): 0.08}
    spec = Geography(("eu", "us"), distances_s).cluster(cluster_spec(2, 2))
    assert spec.regions == ("eu", "us")
    assert spec.routing.far_s("us", "eu") == 0.08


@pytest.mark.parametrize(
    ("geography", "said"),
    [
        (Geography(("eu",), {("eu", "us"): 0.1}), "region us of --region-distance"),
        (Geography((), held_share=0.1), "--residency-share needs --regions"),
    ],
)
def test_rules_about_regions_without_workers_are_refused(geography: Geography, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        geography.check()
