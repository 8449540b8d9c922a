"""Beside a program that uses every core a cluster slows down as much as is fair, and no more."""

import random
from pathlib import Path

from benchmarks.cluster import running_cluster
from tests.faults.neighbour import FAIR_FACTOR, beside_busy_program

SLACK = 3.0
"""For whatever else runs on the machine, which is not there in the same way before and beside the busy program."""


async def test_a_cluster_beside_a_busy_program_keeps_its_workers_and_its_share(tmp_path: Path) -> None:
    with running_cluster(f"--log-dir={tmp_path}") as cluster:
        found = await beside_busy_program(cluster, tmp_path / "gateway.log", seconds=4.0, chance=random.Random(3))
    assert not found.failures
    assert not found.different
    assert not found.lost_workers
    assert found.num_answers >= 4
    assert found.factor < SLACK * FAIR_FACTOR, f"a token took {found.alone_s:.5f} s alone and {found.beside_s:.5f} s"
