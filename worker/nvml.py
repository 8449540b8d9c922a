"""What a GPU says about its own health, through NVIDIA's management library, where there is one.

Reads facts and judges nothing; `services.scheduling.health` does. The package `nvidia-ml-py` is optional, so is the
driver, and most of what can be asked is not answered by every GPU, every driver, or inside every container: each fact
is asked for by itself, and left out where there is no answer. A reading waits for the driver, some calls long; it
belongs on a thread that may wait.
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
"""The readings on end that a lost GPU must answer before it no longer counts as lost."""


def open_gpu(device: int | str, *, nvml: ModuleType | None = None) -> "GpuReader | None":
    """Returns the reader of a GPU, by its index in NVML's order or its UUID (`GPU-…`); None without NVML or GPU.

    NVML knows nothing of CUDA_VISIBLE_DEVICES: a caller with a CUDA index passes that device's UUID. `nvml`: the module
    to use instead of the installed one.
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
    """Returns how many GPUs NVML shows; 0 without NVML. `nvml`: the module to use instead of the installed one."""
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
    """Asks one GPU. Close it when done; one thread at a time."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml = nvml
        self._handle = handle
        self._is_lost = False
        self._is_lost_now = False
        """Whether it is lost in the present reading."""
        self._num_good = 0
        """The readings since it was last lost."""
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
        """Returns all that the GPU says now. A fact that cannot be had is None, never an error."""
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
        """Returns how much it does now, since the last time where that is a mean."""
        return self._use.read()

    def close(self) -> None:
        """Gives back what the driver keeps for it."""
        self._use.close()
        if self._events is not None:
            self._free_events()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.info("NVML did not shut down: %s", error)

    def _judge_loss(self, *, has_answered: bool) -> None:
        """Counts the GPU as lost at once, and as back when it has answered for a while."""
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
        """Returns what the first of these functions that answers says; None where none does."""
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
