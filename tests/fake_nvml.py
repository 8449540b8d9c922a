"""Stands for nvidia-ml-py: answers as on an H100, and as where it cannot."""

import types

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
