"""What is read of a GPU, from a module that answers as nvidia-ml-py does on an H100, and as it does where it cannot."""

import sys
import types

import pytest

from services.runtime.gpu_health import THROTTLE_REASONS, GpuFacts, open_gpu

HANDLE, EVENTS = object(), object()


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


NOT_SUPPORTED, NOT_FOUND, TIMEOUT, LIBRARY_NOT_FOUND, LOST = 3, 6, 10, 12, 15


class Nvml(types.ModuleType):
    """The functions that the reader calls; `errors`: function name → number of the error that it ends with."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = LOST
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(self, **errors):
        super().__init__("pynvml")
        self.errors = errors
        self.xids = []
        self.num_open = 0
        self.calls = []
        self.answers = {
            "nvmlDeviceGetHandleByIndex": HANDLE,
            "nvmlDeviceGetHandleByUUID": HANDLE,
            "nvmlDeviceGetTemperatureV": 41,
            "nvmlDeviceGetTemperature": 42,
            "nvmlDeviceGetTemperatureThreshold": 87,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (1, 0, 0, 0),
            "nvmlDeviceGetCurrentClocksEventReasons": 1,
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=85_520_809_984, free=84_924_235_776, used=0),
            "nvmlDeviceRegisterEvents": None,
        }

    def __getattr__(self, name):
        if not name.startswith("nvml") or name not in {*self.answers, *OWN}:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, arguments))
            if name in self.errors:
                raise NVMLError(self.errors[name])
            return OWN[name](self) if name in OWN else self.answers[name]

        return call

    def opened(self, change):
        self.num_open += change

    def next_event(self):
        if not self.xids:
            raise NVMLError(TIMEOUT)
        return types.SimpleNamespace(eventData=self.xids.pop(0))

    def create_events(self):
        self.opened(1)
        return EVENTS


OWN = {
    "nvmlInit": lambda nvml: nvml.opened(1),
    "nvmlShutdown": lambda nvml: nvml.opened(-1),
    "nvmlEventSetCreate": Nvml.create_events,
    "nvmlEventSetFree": lambda nvml: nvml.opened(-1),
    "nvmlEventSetWait_v2": Nvml.next_event,
}


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
