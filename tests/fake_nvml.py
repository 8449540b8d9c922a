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
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_SM_OCCUPANCY = 3
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
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
        self.num_samples = 0
        self.counters = {2: 93.0, 3: 51.5, 5: 40.0, 10: 78.0}
        """By the number of the counter; one that is not there fails by itself."""
        self.answers = {
            "nvmlDeviceGetCount": 2,
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
            "nvmlDeviceGetPowerUsage": 412_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=97, memory=60),
            "nvmlGpmQueryDeviceSupport": types.SimpleNamespace(isSupportedDevice=1),
        }

    def __getattr__(self, name):
        if not name.startswith("nvml") or name not in {*self.answers, *OWN}:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, arguments))
            if name in self.errors:
                raise NVMLError(self.errors[name])
            return OWN[name](self, *arguments) if name in OWN else self.answers[name]

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

    def allocate_sample(self):
        self.opened(1)
        return types.SimpleNamespace(number=0)

    def take_sample(self, sample):
        self.num_samples += 1
        sample.number = self.num_samples
        return sample

    def c_nvmlGpmMetricsGet_t(self):
        return types.SimpleNamespace(metrics=[types.SimpleNamespace() for _ in range(333)])

    def get_metrics(self, query):
        """The mean of two samples, the older of which is the first."""
        assert (query.version, query.sample1.number + 1) == (1, query.sample2.number)
        for metric in query.metrics[: query.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in self.counters else NOT_SUPPORTED
            metric.value = self.counters.get(metric.metricId, 0.0)
        return query


OWN = {
    "nvmlInit": lambda nvml: nvml.opened(1),
    "nvmlShutdown": lambda nvml: nvml.opened(-1),
    "nvmlEventSetCreate": Nvml.create_events,
    "nvmlEventSetFree": lambda nvml, events: nvml.opened(-1),
    "nvmlEventSetWait_v2": lambda nvml, events, timeout_ms: nvml.next_event(),
    "nvmlGpmSampleAlloc": Nvml.allocate_sample,
    "nvmlGpmSampleFree": lambda nvml, sample: nvml.opened(-1),
    "nvmlGpmSampleGet": lambda nvml, handle, sample: nvml.take_sample(sample),
    "nvmlGpmMetricsGet": Nvml.get_metrics,
}
