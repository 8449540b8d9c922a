"""Health readings of a GPU through NVIDIA's management library, if it is available.

Only reads. `services.scheduling.health` evaluates the readings. Both the package `nvidia-ml-py` and the driver are
optional, and many values are unavailable on some GPUs, drivers, or containers. Each value is therefore read separately
and omitted if it is unavailable. A reading waits for the driver, sometimes for long, so it belongs on a thread that may
block.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from services.runtime.gpu_facts import THROTTLE_REASONS, GpuFacts
from worker.gpu_use import GpuUse, UseReader

log = logging.getLogger(__name__)

MAX_EVENTS_PER_READ = 64
GOOD_READINGS = 5
"""Consecutive successful readings after which a lost GPU counts as recovered."""


def open_gpu(device: int | str, *, nvml: ModuleType | None = None) -> "GpuReader | None":
    """Returns a reader for a GPU, by its NVML index or UUID (`GPU-…`), or None without NVML or GPU.

    NVML ignores CUDA_VISIBLE_DEVICES, so a caller with a CUDA index must pass the UUID of that device. `nvml` replaces
    the installed module.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.info("no GPU facts: %s", error)
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device) if isinstance(device, str) else _by_index(nvml, device)
    except nvml.NVMLError as error:
        log.warning("no GPU facts of device %s: %s", device, error)
        nvml.nvmlShutdown()
        return None
    return GpuReader(nvml, handle)


def num_gpus(*, nvml: ModuleType | None = None) -> int:
    """Returns the number of GPUs that NVML lists, or 0 without NVML. `nvml` replaces the installed module."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return 0
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return 0
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        return 0
    finally:
        nvml.nvmlShutdown()


class GpuReader:
    """Reads one GPU. Close it when done. Not thread-safe."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml = nvml
        self._handle = handle
        self._is_lost = False
        self._is_lost_now = False
        """Whether the current reading found the GPU lost."""
        self._num_good = 0
        """Successful readings since it was last lost."""
        self._xids: set[int] = set()
        self._events = self._ask(("nvmlEventSetCreate",))
        if self._events is not None:
            xid_errors = getattr(nvml, "nvmlEventTypeXidCriticalError", 8)
            try:
                nvml.nvmlDeviceRegisterEvents(handle, xid_errors, self._events)
            except nvml.NVMLError as error:
                log.info("no Xid events of the GPU: %s", error)
                self._free_events()
        self._use = UseReader(nvml, handle, ask=self._ask)

    def read(self) -> GpuFacts:
        """Returns all current readings. Unavailable values are None and never raise."""
        nvml, handle = self._nvml, self._handle
        self._is_lost_now = False
        remapped = self._ask(("nvmlDeviceGetRemappedRows",), handle)
        memory = self._ask(("nvmlDeviceGetMemoryInfo",), handle)
        temperature_c = self._temperature_c()
        self._take_events()
        facts = GpuFacts(
            temperature_c=temperature_c,
            slowdown_c=self._ask(
                ("nvmlDeviceGetTemperatureThreshold",), handle, getattr(nvml, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
            ),
            num_uncorrected=self._ask(
                ("nvmlDeviceGetTotalEccErrors",),
                handle,
                getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
                getattr(nvml, "NVML_VOLATILE_ECC", 0),
            ),
            is_remap_pending=None if remapped is None else bool(remapped[2]),
            has_remap_failed=None if remapped is None else bool(remapped[3]),
            throttle_reasons=self._throttle_reasons(),
            free_bytes=None if memory is None else int(memory.free),
            total_bytes=None if memory is None else int(memory.total),
            xids=frozenset(self._xids),
        )
        self._judge_loss(has_answered=temperature_c is not None or memory is not None)
        return replace(facts, is_lost=self._is_lost)

    def read_use(self) -> GpuUse:
        """Returns the current utilization. Means cover the time since the previous reading."""
        return self._use.read()

    def close(self) -> None:
        """Frees the driver's resources."""
        self._use.close()
        if self._events is not None:
            self._free_events()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.info("NVML did not shut down: %s", error)

    def _judge_loss(self, *, has_answered: bool) -> None:
        """Marks the GPU as lost at once, and as recovered after several successful readings."""
        if self._is_lost_now:
            self._is_lost, self._num_good = True, 0
        elif self._is_lost and has_answered:
            self._num_good += 1
            self._is_lost = self._num_good < GOOD_READINGS

    def _temperature_c(self) -> float | None:
        sensor = getattr(self._nvml, "NVML_TEMPERATURE_GPU", 0)
        celsius = self._ask(("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), self._handle, sensor)
        return None if celsius is None else float(celsius)

    def _throttle_reasons(self) -> frozenset[str]:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        mask = self._ask(names, self._handle) or 0
        return frozenset(reason for reason, bits in THROTTLE_REASONS.items() if mask & self._constant(bits))

    def _constant(self, names: Sequence[str]) -> int:
        return next((int(getattr(self._nvml, name)) for name in names if hasattr(self._nvml, name)), 0)

    def _take_events(self) -> None:
        for _ in range(MAX_EVENTS_PER_READ if self._events is not None else 0):
            event = self._ask(("nvmlEventSetWait_v2", "nvmlEventSetWait"), self._events, 0)
            if event is None:
                return
            self._xids.add(int(event.eventData))

    def _free_events(self) -> None:
        events, self._events = self._events, None
        self._ask(("nvmlEventSetFree",), events)

    def _ask(self, names: Sequence[str], *arguments: object) -> Any:
        """Returns the result of the first of these functions that succeeds, or None if none does."""
        for name in names:
            function = getattr(self._nvml, name, None)
            if function is None:
                continue
            try:
                return function(*arguments)
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) == getattr(self._nvml, "NVML_ERROR_GPU_IS_LOST", 15):
                    self._is_lost_now = True
        return None


def _by_index(nvml: ModuleType, index: int) -> object:
    return nvml.nvmlDeviceGetHandleByIndex(index)
