"""Monitors the worker's GPU periodically, on a thread that may block on the driver.

This module only reads the GPU. The gateway evaluates the readings. NVML calls take the driver's locks and may block for
seconds, and a call on a broken GPU may never return, so no other thread waits for this one.
"""

import logging
import threading
from collections.abc import Callable

from protos import worker_pb2
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.gpu_facts import GpuFacts
from worker.gpu_use import GpuUse
from worker.nvml import GpuReader, open_gpu

READ_EVERY_S = 1.0
"""As often as an idle worker reports. Chips take seconds to heat up, and a reading takes the driver milliseconds."""
SILENT_S = 10.0
"""A GPU counts as unresponsive if a reading takes longer, in seconds. A driver that starts another process or handles
another GPU may take seconds."""
RELEASE_S = 0.5
"""How long `release` waits for a running reading, in seconds."""

logger = logging.getLogger(__name__)


def watch_gpu(device: str | None) -> "GpuWatch | None":
    """Starts monitoring the GPU with this UUID (`GPU-…`). Returns None if `device` is None."""
    return None if device is None else GpuWatch(lambda: open_gpu(device))


class GpuWatch:
    """Latest readings of one GPU. `open_reader` is called on the thread and returns None if NVML is unavailable."""

    def __init__(
        self,
        open_reader: Callable[[], GpuReader | None],
        *,
        read_every_s: float = READ_EVERY_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._open_reader = open_reader
        self._read_every_s = read_every_s
        self._clock = clock
        self._stop = threading.Event()
        self._facts: GpuFacts | None = None
        self._message: worker_pb2.GpuFacts | None = None
        self._use: GpuUse | None = None
        self._reads_use = True
        self._asked_s: float | None = None
        """Start of the running reading, or None."""
        # A daemon thread, because the process must not wait for it.
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def message(self) -> worker_pb2.GpuFacts | None:
        """Returns the latest readings, or None before the first. Callable from any thread, without blocking.

        Returns the same object until a reading changes. Do not modify it.
        """
        message = self._message
        return _LOST if message is not None and self._is_silent() else message

    def use(self) -> GpuUse | None:
        """Returns the latest utilization, or None if it is unknown or outdated. Callable from any thread."""
        return None if self._is_silent() else self._use

    def release(self) -> None:
        """Stops the monitor. Abandons a reading that hangs."""
        self._stop.set()
        self._thread.join(RELEASE_S)

    def _is_silent(self) -> bool:
        asked_s = self._asked_s
        return asked_s is not None and self._clock.monotonic() - asked_s >= SILENT_S

    def _run(self) -> None:
        try:
            reader = self._open_reader()
            if reader is None:
                return
            try:
                while not self._stop.is_set():
                    self._read(reader)
                    self._stop.wait(self._read_every_s)
            finally:
                reader.close()
        except Exception:  # root of the thread: the worker runs without the monitor
            logger.exception("the GPU is no longer watched")

    def _read(self, reader: GpuReader) -> None:
        self._asked_s = self._clock.monotonic()
        try:
            facts = reader.read()
            if facts != self._facts:
                self._facts, self._message = facts, gpu_message(facts)
            if self._reads_use:
                self._read_use(reader)
        finally:
            self._asked_s = None

    def _read_use(self, reader: GpuReader) -> None:
        try:
            self._use = reader.read_use()
        except Exception:  # a module of another version may raise anything, and nothing depends on these measurements
            logger.exception("how much the GPU does is no longer read")
            self._reads_use, self._use = False, None


def gpu_message(facts: GpuFacts) -> worker_pb2.GpuFacts:
    """Returns the readings as a message of the session."""
    return worker_pb2.GpuFacts(
        temperature_c=facts.temperature_c,
        slowdown_c=facts.slowdown_c,
        num_uncorrected=facts.num_uncorrected,
        is_remap_pending=facts.is_remap_pending,
        has_remap_failed=facts.has_remap_failed,
        throttle_reasons=sorted(facts.throttle_reasons),
        free_bytes=facts.free_bytes,
        total_bytes=facts.total_bytes,
        xids=sorted(facts.xids),
        is_lost=facts.is_lost,
    )


_LOST = gpu_message(GpuFacts(is_lost=True))
