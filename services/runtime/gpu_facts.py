"""What a GPU says about its own health, as data. Knows neither how it is asked nor what follows from it."""

from dataclasses import dataclass

THROTTLE_REASONS = {
    "sw_power_cap": ("nvmlClocksEventReasonSwPowerCap", "nvmlClocksThrottleReasonSwPowerCap"),
    "hw_slowdown": ("nvmlClocksThrottleReasonHwSlowdown",),
    "sw_thermal": ("nvmlClocksEventReasonSwThermalSlowdown", "nvmlClocksThrottleReasonSwThermalSlowdown"),
    "hw_thermal": ("nvmlClocksThrottleReasonHwThermalSlowdown",),
    "hw_power_brake": ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown",),
}
"""Our names, and under which names releases of the package have the bit."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a GPU says about itself. None: it does not say that.

    `temperature_c` of the chip, and `slowdown_c`, where it throttles itself. `num_uncorrected` counts memory errors
    since the driver was loaded that could not be corrected. `is_remap_pending`: rows of memory are to be replaced at
    the next reset; `has_remap_failed`: none are left to replace them. `throttle_reasons`: keys of `THROTTLE_REASONS`.
    `xids`: the driver's numbers of critical faults since the reader was opened; they stay, since what ran on the GPU
    then does not come back by itself. `is_lost`: it does not answer, or has not answered often enough since.
    """

    temperature_c: float | None = None
    slowdown_c: float | None = None
    num_uncorrected: int | None = None
    is_remap_pending: bool | None = None
    has_remap_failed: bool | None = None
    throttle_reasons: frozenset[str] = frozenset()
    free_bytes: int | None = None
    total_bytes: int | None = None
    xids: frozenset[int] = frozenset()
    is_lost: bool = False
