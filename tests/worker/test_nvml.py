"""What is read of a GPU, from a module that answers as nvidia-ml-py does on an H100, and as it does where it cannot."""

import sys

import pytest

from services.runtime.gpu_facts import THROTTLE_REASONS, GpuFacts
from tests.fake_nvml import EVENTS, HANDLE, LIBRARY_NOT_FOUND, LOST, NOT_FOUND, NOT_SUPPORTED, OWN, TIMEOUT, Nvml
from worker.nvml import GOOD_READINGS, num_gpus, open_gpu


def test_everything_that_it_says():
    nvml = Nvml()
    reader = open_gpu("GPU-1234", nvml=nvml)
    assert nvml.calls[1] == ("nvmlDeviceGetHandleByUUID", ("GPU-1234",))
    assert reader.read() == GpuFacts(
        temperature_c=41.0,
        slowdown_c=87,
        num_uncorrected=0,
        is_remap_pending=False,
        has_remap_failed=False,
        throttle_reasons=frozenset(),
        free_bytes=84_924_235_776,
        total_bytes=85_520_809_984,
    )
    assert ("nvmlDeviceGetTotalEccErrors", (HANDLE, 1, 0)) in nvml.calls
    assert ("nvmlDeviceRegisterEvents", (HANDLE, 8, EVENTS)) in nvml.calls
    nvml.answers |= {
        "nvmlDeviceGetRemappedRows": (0, 9, 1, 1),
        "nvmlDeviceGetTotalEccErrors": 2,
        "nvmlDeviceGetCurrentClocksEventReasons": 4 | 64 | 1,
    }
    nvml.xids = [31, 79]
    facts = reader.read()
    assert (facts.is_remap_pending, facts.has_remap_failed, facts.num_uncorrected) == (True, True, 2)
    assert (facts.throttle_reasons, facts.xids) == ({"sw_power_cap", "hw_thermal"}, {31, 79})
    assert reader.read().xids == {31, 79}
    reader.close()
    assert nvml.num_open == 0


def test_who_was_lost_is_so_until_it_has_answered_for_a_while():
    nvml = Nvml()
    reader = open_gpu(0, nvml=nvml)
    assert not reader.read().is_lost
    nvml.errors = {"nvmlDeviceGetTotalEccErrors": LOST}
    assert reader.read().is_lost
    nvml.errors = {}
    assert [reader.read().is_lost for _ in range(GOOD_READINGS - 1)] == [True] * (GOOD_READINGS - 1)
    nvml.errors = {"nvmlDeviceGetMemoryInfo": LOST}
    assert reader.read().is_lost
    nvml.errors = dict.fromkeys(nvml.answers, NOT_FOUND)  # it says nothing at all, not even that
    assert all(reader.read().is_lost for _ in range(2 * GOOD_READINGS))
    nvml.errors = {}
    assert [reader.read().is_lost for _ in range(GOOD_READINGS)] == [True] * (GOOD_READINGS - 1) + [False]
    assert not reader.read().is_lost


FACTS_OF = {
    "nvmlDeviceGetTemperatureThreshold": {"slowdown_c": None},
    "nvmlDeviceGetTotalEccErrors": {"num_uncorrected": None},
    "nvmlDeviceGetRemappedRows": {"is_remap_pending": None, "has_remap_failed": None},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle_reasons": frozenset()},
    "nvmlDeviceGetMemoryInfo": {"free_bytes": None, "total_bytes": None},
    "nvmlEventSetCreate": {},
    "nvmlDeviceRegisterEvents": {},
}


@pytest.mark.parametrize("name", FACTS_OF)
def test_what_is_not_supported_is_left_out_and_nothing_else(name):
    nvml = Nvml(**{name: NOT_SUPPORTED})
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 8
    reader = open_gpu(0, nvml=nvml)
    everything = Nvml()
    everything.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 8
    complete = open_gpu(0, nvml=everything).read()
    expected = {field: getattr(complete, field) for field in GpuFacts.__dataclass_fields__} | FACTS_OF[name]
    assert reader.read() == GpuFacts(**expected)
    reader.close()
    assert nvml.num_open == 0


def test_older_names_are_tried_too():
    nvml = Nvml(nvmlDeviceGetTemperatureV=NOT_SUPPORTED)
    assert open_gpu(0, nvml=nvml).read().temperature_c == 42.0
    nvml = Nvml()
    del nvml.answers["nvmlDeviceGetTemperatureV"]
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = nvml.answers.pop(
        "nvmlDeviceGetCurrentClocksEventReasons"
    )
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 128
    facts = open_gpu(0, nvml=nvml).read()
    assert (facts.temperature_c, facts.throttle_reasons) == (42.0, {"hw_power_brake"})


def test_a_gpu_that_fell_off_the_bus():
    nvml = Nvml()
    reader = open_gpu(0, nvml=nvml)
    nvml.errors = {name: LOST for name in nvml.answers}
    facts = reader.read()
    assert (facts.is_lost, facts.temperature_c, facts.free_bytes) == (True, None, None)


def test_where_nobody_can_be_asked():
    assert open_gpu(0, nvml=Nvml(nvmlInit=LIBRARY_NOT_FOUND)) is None
    nvml = Nvml(nvmlDeviceGetHandleByIndex=NOT_FOUND)
    assert open_gpu(7, nvml=nvml) is None
    assert nvml.num_open == 0


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu(0) is None


def test_the_installed_package_has_the_names():
    nvml = pytest.importorskip("pynvml")
    fake = Nvml()
    assert [name for name in {*fake.answers, *OWN} if not hasattr(nvml, name)] == []
    assert all(any(getattr(nvml, name, 0) for name in names) for names in THROTTLE_REASONS.values())
    assert (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_NOT_SUPPORTED) == (LOST, TIMEOUT, 3)
    for name in vars(Nvml):
        if name.startswith(("NVML_", "nvmlClocks", "nvmlEventType")):
            assert getattr(nvml, name) == getattr(Nvml, name), name


def test_gpus_are_counted_and_not_tried_one_after_the_other():
    nvml = Nvml()
    assert num_gpus(nvml=nvml) == 2
    assert nvml.num_open == 0
    assert num_gpus(nvml=Nvml(nvmlInit=LIBRARY_NOT_FOUND)) == 0
    lost = Nvml(nvmlDeviceGetCount=LOST)
    assert num_gpus(nvml=lost) == 0
    assert lost.num_open == 0


def test_without_the_package_there_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert num_gpus() == 0
