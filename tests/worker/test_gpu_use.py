"""How much a GPU does, from a module that answers as nvidia-ml-py does on an H100, and as it does where it cannot."""

import math

import pytest

from tests import fake_nvml
from tests.fake_nvml import HANDLE, NOT_SUPPORTED, Nvml
from worker.gpu_use import GpuUse
from worker.metrics import WorkerMetrics
from worker.nvml import open_gpu

RATES = {"kernels": 0.97, "memory": 0.6}
COUNTERS = {"sm": 0.93, "warps": 0.515, "tensor": 0.4, "dram": 0.78}


def test_counters_say_something_from_the_second_reading_on():
    nvml = Nvml()
    reader = open_gpu(0, nvml=nvml)
    clocks = {"sm": 1.98e9, "memory": 1.98e9}
    expected = {"power_w": 412.0, "power_limit_w": 700.0, "energy_j": 5000.5, "clocks_hz": clocks}
    assert reader.read_use() == GpuUse(**expected, busy=RATES)
    for _ in range(3):
        assert reader.read_use() == GpuUse(**expected, busy=RATES | COUNTERS)
    assert all(("nvmlDeviceGetClockInfo", (HANDLE, clock)) in nvml.calls for clock in (1, 2))
    reader.close()
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("function", "field", "left"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w", None),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w", None),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j", None),
        ("nvmlDeviceGetClockInfo", "clocks_hz", {}),
        ("nvmlDeviceGetUtilizationRates", "busy", COUNTERS),
    ],
)
def test_what_is_not_supported_is_left_out_and_nothing_else(function, field, left):
    reader = open_gpu(0, nvml=Nvml(**{function: NOT_SUPPORTED}))
    complete = open_gpu(0, nvml=Nvml())
    for _ in range(2):
        use, expected = reader.read_use(), complete.read_use()
    for name in GpuUse.__dataclass_fields__:
        if name != field:
            assert getattr(use, name) == getattr(expected, name)
    assert getattr(use, field) == left


@pytest.mark.parametrize(
    "function", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"]
)
def test_a_gpu_without_counters_says_the_rest(function):
    nvml = Nvml(**{function: NOT_SUPPORTED})
    reader = open_gpu(0, nvml=nvml)
    reader.read_use()
    assert reader.read_use().busy == RATES
    reader.close()
    assert nvml.num_open == 0


def test_one_sample_without_the_other_is_given_back(monkeypatch):
    nvml = Nvml()
    allocate, samples = nvml.allocate_sample, []

    def one(nvml):
        samples.append(None if samples else allocate())
        return samples[-1]

    monkeypatch.setitem(fake_nvml.OWN, "nvmlGpmSampleAlloc", one)
    reader = open_gpu(0, nvml=nvml)
    assert len(samples) == 2
    reader.read_use()
    assert reader.read_use().busy == RATES
    reader.close()
    assert nvml.num_open == 0


def test_after_a_sample_that_failed_there_is_no_mean_of_an_old_one():
    nvml = Nvml()
    reader = open_gpu(0, nvml=nvml)
    reader.read_use()
    nvml.errors = {"nvmlGpmSampleGet": NOT_SUPPORTED}
    assert reader.read_use().busy == RATES
    nvml.errors = {}
    assert reader.read_use().busy == RATES
    assert reader.read_use().busy == RATES | COUNTERS


def test_a_counter_that_fails_by_itself_or_is_no_number_is_left_out():
    nvml = Nvml()
    nvml.counters = {2: 93.0, 3: math.nan, 10: 78.0}
    reader = open_gpu(0, nvml=nvml)
    reader.read_use()
    assert reader.read_use().busy == RATES | {"sm": 0.93, "dram": 0.78}


def test_a_scrape_has_what_is_said_and_nothing_else():
    metrics = WorkerMetrics(worker_id="decode-0")
    uses = [None, GpuUse(power_w=412.0, energy_j=5000.5, busy={"dram": 0.78})]
    metrics.watch_gpu(lambda: uses[0])
    value = metrics.registry.get_sample_value
    whose = {"worker": "decode-0"}
    assert value("tandem_gpu_power_watts", whose) is None
    uses.pop(0)
    assert value("tandem_gpu_power_watts", whose) == 412.0
    assert value("tandem_gpu_power_limit_watts", whose) is None
    assert value("tandem_gpu_energy_joules_total", whose) == 5000.5
    assert value("tandem_gpu_busy_ratio", {**whose, "part": "dram"}) == 0.78
    assert value("tandem_gpu_busy_ratio", {**whose, "part": "sm"}) is None
