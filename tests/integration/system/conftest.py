"""Whole clusters for the system tests: real processes, real sockets, a real Redis, real models."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.cluster import Cluster
from tests.waiting import HANG_LIMIT_S

SETTLE_TIMEOUT_S = HANG_LIMIT_S


@pytest.fixture
def wait_until_idle() -> Callable[[Cluster], list[dict[str, Any]]]:
    """`wait_until_idle(cluster)` waits until nothing runs and asserts that every page is free or cached."""

    def wait(cluster: Cluster) -> list[dict[str, Any]]:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            topology = cluster.get("/cluster")
            workers: list[dict[str, Any]] = topology["workers"]
            pages = [worker["pages"] for worker in workers]
            if topology["requests"] == {"queued": 0, "running": 0} and all(
                p["free"] + p["cached"] == p["total"] and p["reserved"] == p["used"] == 0 for p in pages
            ):
                return workers
            assert time.monotonic() < deadline, f"the cluster did not come to rest: {topology}"
            time.sleep(0.05)

    return wait
