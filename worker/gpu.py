"""A worker's look at its own GPU, again and again, on a thread that may wait for the driver.

Reads and passes on; what the facts amount to is the gateway's judgement. Calls of NVML take the driver's locks and may
block for seconds, and one that waits for a broken GPU may never return: nobody else waits for this thread.
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
"""As often as an idle worker reports. Chips take seconds to heat up; a reading takes the driver milliseconds."""
SILENT_S = 10.0
"""A GPU whose reading takes longer counts as one that does not answer. A driver that is busy with the start of another
process, or with another GPU, may take seconds."""
RELEASE_S = 0.5
"""How long the end waits for a reading that is under way."""

logger = logging.getLogger(__name__)


def watch_gpu(device: str | None) -> "GpuWatch | None":
    """Begins to watch the GPU of this UUID (`GPU-…`); None, and nothing is done, without a device."""
    return None if device is None else GpuWatch(lambda: open_gpu(device))


class GpuWatch:
    """The newest facts of one GPU. `open_reader` is called on the thread; None: nobody can be asked."""

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
        """When the reading began that is under way, or None."""
        # A daemon: the process must not wait for it.
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def message(self) -> worker_pb2.GpuFacts | None:
        """What is known, the same object as long as it is the same; None: nothing. From any thread, waits for nothing.

        Must not be changed.
        """
        message = self._message
        return _LOST if message is not None and self._is_silent() else message

    def use(self) -> GpuUse | None:
        """How much it does, as of the last reading; None where that is nothing or long ago. From any thread."""
        return None if self._is_silent() else self._use

    def release(self) -> None:
        """Ends the watch. A reading that hangs is left behind."""
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
        except Exception:  # the root of the thread: the worker works as well without
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
        except Exception:  # whatever a module of another version does: nothing is decided by these figures
            logger.exception("how much the GPU does is no longer read")
            self._reads_use, self._use = False, None


def gpu_message(facts: GpuFacts) -> worker_pb2.GpuFacts:
    """Facts as they travel with a session's events."""
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
