"""GPU utilization through NVIDIA's management library: power, clocks, and the load of each part of the GPU.

These metrics are for observers only: the system makes no decision based on them. From Hopper on, a GPU counts the
activity of its parts (GPU performance monitoring, GPM). Two samples of the counters yield the mean between them. A MIG
instance reports none of this. Each metric is read separately and omitted if it is unavailable.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

GPM_PARTS = {
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "warps": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
"""Our names of a GPU's parts, and the names of their counters in the package. The counters are percentages."""
CLOCKS = {"sm": 1, "memory": 2}
"""NVML_CLOCK_SM and NVML_CLOCK_MEM."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Utilization of a GPU. Metrics that the GPU does not report are None or missing from the dictionaries.

    `energy_j` counts from when the driver was loaded. `clocks_hz` has the keys of `CLOCKS`. `busy` contains fractions
    from 0 to 1 since the last reading. `kernels` and `memory` are the fractions of time in which any kernel ran and in
    which any memory was read or written. The keys of `GPM_PARTS` are the utilization of all SMs, of all their warps, of
    the tensor cores, and of the memory bandwidth.
    """

    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    clocks_hz: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)


class UseReader:
    """Reads one GPU through `ask(function names, *arguments)`, which returns None if no function succeeds. Close it."""

    def __init__(self, nvml: ModuleType, handle: object, *, ask: Callable[..., Any]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._ask = ask
        self._has_sample = False
        self._samples: list[object] = []
        """Two samples, the older first. Empty if the GPU lacks these counters."""
        support = ask(("nvmlGpmQueryDeviceSupport",), handle)
        if support is not None and support.isSupportedDevice:
            samples = [ask(("nvmlGpmSampleAlloc",)) for _ in range(2)]
            self._samples = [sample for sample in samples if sample is not None]
            if len(self._samples) < 2:
                self.close()

    def read(self) -> GpuUse:
        """Returns the current utilization. Unavailable metrics are omitted and never raise."""
        clocks_mhz = {name: self._number("nvmlDeviceGetClockInfo", clock) for name, clock in CLOCKS.items()}
        return GpuUse(
            power_w=self._number("nvmlDeviceGetPowerUsage", scale=1e-3),
            power_limit_w=self._number("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
            energy_j=self._number("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
            clocks_hz={name: mhz * 1e6 for name, mhz in clocks_mhz.items() if mhz is not None},
            busy=self._rates() | self._counters(),
        )

    def close(self) -> None:
        """Frees the driver's resources."""
        samples, self._samples = self._samples, []
        for sample in samples:
            self._ask(("nvmlGpmSampleFree",), sample)

    def _number(self, function: str, *arguments: object, scale: float = 1.0) -> float | None:
        number = self._ask((function,), self._handle, *arguments)
        return None if number is None else number * scale

    def _rates(self) -> dict[str, float]:
        rates = self._ask(("nvmlDeviceGetUtilizationRates",), self._handle)
        return {} if rates is None else {"kernels": rates.gpu / 100, "memory": rates.memory / 100}

    def _counters(self) -> dict[str, float]:
        if not self._samples:
            return {}
        had_sample, self._has_sample = self._has_sample, False
        if self._ask(("nvmlGpmSampleGet",), self._handle, self._samples[0]) is None:
            return {}
        self._samples.reverse()
        self._has_sample = True
        if not had_sample:
            return {}
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(GPM_PARTS)
        query.sample1, query.sample2 = self._samples
        for metric, name in zip(query.metrics, GPM_PARTS.values(), strict=False):
            metric.metricId = getattr(self._nvml, name)
        if self._ask(("nvmlGpmMetricsGet",), query) is None:
            return {}
        answers = zip(GPM_PARTS, query.metrics, strict=False)
        # One counter may fail separately, or have no denominator.
        return {
            part: metric.value / 100
            for part, metric in answers
            if metric.nvmlReturn == 0 and math.isfinite(metric.value)
        }
