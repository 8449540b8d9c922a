"""What the driver's facts about a GPU amount to."""

import pytest

from services.runtime.gpu_facts import GpuFacts
from services.scheduling.gpu_judgement import GpuJudgement, GpuState, judge_gpu


@pytest.mark.parametrize(
    ("facts", "state", "weight", "reasons"),
    [
        ({}, GpuState.OK, 1.0, ()),
        ({"temperature_c": 84.9, "slowdown_c": 90.0}, GpuState.OK, 1.0, ()),
        ({"temperature_c": 85.0, "slowdown_c": 90.0}, GpuState.DEGRADED, 0.5, ("hot",)),
        ({"temperature_c": 85.0}, GpuState.DEGRADED, 0.5, ("hot",)),
        ({"temperature_c": 95.0, "slowdown_c": 90.0}, GpuState.OUT, 0.0, ("too_hot",)),
        ({"num_uncorrected": 0, "has_remap_failed": False}, GpuState.OK, 1.0, ()),
        ({"num_uncorrected": 1}, GpuState.OUT, 0.0, ("uncorrected_memory_errors",)),
        ({"has_remap_failed": True}, GpuState.OUT, 0.0, ("row_remap_failed",)),
        ({"is_remap_pending": True}, GpuState.DEGRADED, 0.5, ("row_remap_pending",)),
        ({"throttle_reasons": frozenset({"sw_power_cap"})}, GpuState.OK, 1.0, ()),
        ({"throttle_reasons": frozenset({"sw_thermal"})}, GpuState.DEGRADED, 0.7, ("sw_thermal",)),
        (
            {"throttle_reasons": frozenset({"sw_thermal", "hw_thermal", "sw_power_cap"})},
            GpuState.DEGRADED,
            0.5,
            ("hw_thermal", "sw_thermal"),
        ),
        ({"is_lost": True}, GpuState.OUT, 0.0, ("lost",)),
        ({"xids": frozenset({13, 63, 95})}, GpuState.OUT, 0.0, ("xid_95",)),
        ({"free_bytes": 79, "total_bytes": 8000}, GpuState.DEGRADED, 0.5, ("little_free_memory",)),
        ({"free_bytes": 80, "total_bytes": 8000}, GpuState.OK, 1.0, ()),
        ({"free_bytes": 0, "total_bytes": 0}, GpuState.OK, 1.0, ()),
        ({"xids": frozenset({31})}, GpuState.OK, 1.0, ()),
        ({"xids": frozenset({94})}, GpuState.DEGRADED, 0.5, ("xid_94",)),
        ({"xids": frozenset({79}), "temperature_c": 88.0}, GpuState.OUT, 0.0, ("xid_79",)),
    ],
)
def test_what_gpu_facts_amount_to(facts, state, weight, reasons):
    assert judge_gpu(GpuFacts(**facts)) == GpuJudgement(state, weight, reasons)
