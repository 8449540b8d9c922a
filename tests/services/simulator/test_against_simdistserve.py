"""Our simulator against another one on the same workload and coefficients: simdistserve, of DistServe's artefact.

It takes every waiting prompt into a prefill step, has one FCFS queue, and models neither transfers nor memory; ours is
set so. What is left between them: it adds a fixed time for each step that the coefficients do not have.
"""

import csv
import gzip
import json
from pathlib import Path

import pytest

from services.scheduling.prediction import LinkSpeed, PrefillSpeed
from services.simulator.cluster import simulate
from services.simulator.profiles import PROFILES_FOLDER, profile
from services.simulator.report import percentile, tpot_s, ttft_s
from services.simulator.traces import read_trace
from services.simulator.workers import WorkerSpec
from tests.services.simulator.small import cluster_spec

FOLDER = PROFILES_FOLDER / "simdistserve"
STEP_S, STEP_TOKEN_S = 0.002, 1e-7
"""What that simulator adds to a prefill step, and for each of its tokens."""


def published(tp_prefill: int, rate: str) -> tuple[list[float], list[float]]:
    with gzip.open(FOLDER / "per_request.csv.gz", "rt") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["backend"], row["tp_prefill"], row["rate_rps"]) == ("distserve", str(tp_prefill), rate)
        ]
    return [float(row["ttft_ms"]) / 1e3 for row in rows], [float(row["tpot_ms"]) / 1e3 for row in rows]


@pytest.mark.parametrize(("tp_prefill", "rate"), [(1, "1.0"), (1, "2.0"), (2, "1.0"), (2, "2.0")])
def test_times_are_close_to_those_of_simdistserve(tp_prefill: int, rate: str) -> None:
    expected_ttft, expected_tpot = published(tp_prefill, rate)
    assert len(expected_ttft) == 500
    trace = read_trace(FOLDER / "workload.csv.gz", rate_per_s=float(rate))
    prefill, decode = profile(f"a100-opt-13b-tp{tp_prefill}"), profile("a100-opt-13b-tp1")
    law = prefill.prefill
    law = PrefillSpeed(law.overhead_s + STEP_S, law.s_per_token + STEP_TOKEN_S, law.s_per_token_squared)
    worker = WorkerSpec(
        num_pages=10**6,
        page_size=16,
        prefill=law,
        decode=decode.decode,
        link=LinkSpeed(0.0, 1e30),
        kv_bytes_per_token=0,
        chunk_tokens=10**9,
        max_batch=10**6,
    )
    run = simulate(trace, cluster_spec(prefill=worker, decode=worker), "round_robin")
    ttft = [ttft_s(job) for job in run.jobs]
    tpot = [(job.end_s or 0.0) - (job.first_token_s or 0.0) for job in run.jobs]
    tpot = [time_s / job.num_output_tokens for time_s, job in zip(tpot, run.jobs, strict=True)]  # as it defines it
    assert max(tpot_s(job) for job in run.jobs) > 0
    for measured, expected in ((ttft, expected_ttft), (tpot, expected_tpot)):
        measured_mean, expected_mean = sum(measured) / 500, sum(expected) / 500
        print(json.dumps([tp_prefill, rate, measured_mean, expected_mean]))
        assert measured_mean == pytest.approx(expected_mean, rel=0.03)
        for share in (0.5, 0.9, 0.99):
            assert percentile(sorted(measured), share) == pytest.approx(percentile(sorted(expected), share), rel=0.05)


def test_the_published_summary_belongs_to_the_published_requests() -> None:
    with (Path(FOLDER) / "summary.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if (row["backend"], row["rate_rps"]) == ("distserve", "1.0"))
    ttft, _ = published(1, "1.0")
    assert sum(ttft) / len(ttft) * 1e3 == pytest.approx(float(row["ttft_mean_ms"]), rel=1e-3)
