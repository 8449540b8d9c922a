"""The checks of `/health?verbose`: each limit from both sides, what is unknown, and the callers that may see them."""

from typing import Any, cast

import msgspec
import pytest

from gateway.edge.health import HealthFacts, HealthLimits, checks, report
from gateway.openapi.answers import Health
from gateway.topology.troubles import TroubleReport
from services.runtime.gpu_facts import GpuFacts

FIGURES = {"queued": 3.0, "ttft_p99_s": 0.5, "failed_per_s": 1.0, "finished_per_s": 9.0}
GPUS = {
    "decode-0": GpuFacts(temperature_c=60, free_bytes=50, total_bytes=100),
    "decode-1": GpuFacts(temperature_c=80, free_bytes=5, total_bytes=100),
}


def facts(**fields: Any) -> HealthFacts:
    good = {"is_ready": True, "is_redis_available": True, "troubles": (), "figures": FIGURES, "gpus": GPUS}
    return HealthFacts(**{**good, "free_share": 0.2, **fields})


def failing(found: HealthFacts, **limits: float) -> dict[str, str]:
    return {check.name: check.reason for check in checks(found, HealthLimits(**limits)) if not check.ok}


def test_without_limits_figures_are_shown_and_nothing_is_wrong() -> None:
    page = report(facts(), HealthLimits())
    assert msgspec.convert(page, Health).health == "ok"
    figures = {check["name"]: (check["figure"], check["limit"]) for check in page["checks"]}
    assert figures["error_share"] == (0.1, None)
    assert figures["gpu_temperature_c"] == (80, None)
    assert figures["free_memory_share"] == (0.05, None)


@pytest.mark.parametrize(
    ("name", "limit", "met", "missed", "words"),
    [
        ("queue_depth", "max_queued", 3, 2, "3 requests wait for a place (limit: at most 2)"),
        ("ttft_p99_s", "ttft_p99_s", 0.5, 0.4, "0.5 s to the first token"),
        ("error_share", "max_error_share", 0.1, 0.05, "0.1 of the answers that ended failed"),
        ("gpu_temperature_c", "max_gpu_c", 80, 79, "the GPU of decode-1"),
        ("free_memory_share", "min_free_share", 0.05, 0.06, "the GPU of decode-1 is free (limit: at least 0.06)"),
    ],
)
def test_a_figure_beyond_its_limit_is_named_with_both(
    name: str, limit: str, met: float, missed: float, words: str
) -> None:
    assert failing(facts(), **{limit: met}) == {}
    found = failing(facts(), **{limit: missed})
    assert list(found) == [name]
    assert words in found[name]
    assert report(facts(), HealthLimits(**cast("Any", {limit: missed})))["health"] == "degraded"


def test_what_is_not_known_is_not_wrong() -> None:
    limits = HealthLimits(max_queued=0, ttft_p99_s=0.1, max_error_share=0.0, max_gpu_c=1.0, min_free_share=1.0)
    unknown = facts(figures={"ttft_p99_s": None, "failed_per_s": 0.0, "finished_per_s": 0.0}, gpus={}, free_share=None)
    page = report(unknown, limits)
    assert page["health"] == "ok"
    assert [check["reason"] for check in page["checks"]].count("nothing is known of it now") == 5


def test_workers_redis_and_troubles_are_checks() -> None:
    trouble = TroubleReport("gone", "decode-1", "it vanished", "look at it", 1e9)
    found = failing(facts(is_ready=False, is_redis_available=False, troubles=[trouble]))
    assert found == {
        "ready": "too few workers, or a failing task",
        "redis": "Redis does not answer: no worker can join",
        "troubles": "gone decode-1: it vanished",
    }


def test_the_gateways_own_memory_counts_where_it_is_limited() -> None:
    (reason,) = failing(facts(free_share=0.01), min_free_share=0.02).values()
    assert "of the memory of the gateway is free" in reason


async def test_it_is_asked_for_by_a_parameter_and_follows_what_is(make_system: Any, pair_type: Any) -> None:
    system = await make_system(health_max_queued=0)
    plain = {"status": "alive"}
    assert (await system.http.get("/health")).json() == (await system.http.get("/health?verbose=0")).json() == plain
    page = msgspec.convert((await system.http.get("/health?verbose")).json(), Health)
    assert (page.status, page.health) == ("alive", "degraded")
    assert page.checks
    assert [check.reason for check in page.checks if not check.ok] == ["too few workers, or a failing task"]
    await system.add_pair(pair_type([5, 1]))
    assert (await system.http.get("/health?verbose=1")).json()["health"] == "ok"
