"""Runs the gateway with a probe in its event loop, for `gateway_soak`.

The probe measures the longest pauses of the loop in CPU time of the loop's thread.
"""

import asyncio
import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from benchmarks.soak_sessions import GatewayEnd
from gateway import __main__ as program
from gateway.assembly import Gateway
from services.runtime import process

TICK_S = 0.005
WRITE_S = 1.0
LONG_S = 0.03
"""CPU time after which the probe samples the stack of a pause."""
MAX_STACKS = 20


class Probe:
    """Measures the CPU time of the loop's thread between ticks. A slow callback delays the next tick."""

    def __init__(self, file: Path, *, explains: bool) -> None:
        self._file = file
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.get_ident()
        self._last_s = self._written_s = time.thread_time()
        self._written_at_s = time.monotonic()
        self._max_s = 0.0
        self._stacks: list[str] = []
        if explains:
            threading.Thread(target=self._sample, daemon=True).start()

    def tick(self) -> None:
        """Records the CPU time since the last tick, and schedules the next tick."""
        now_s = time.thread_time()
        self._max_s = max(self._max_s, now_s - self._last_s)
        if time.monotonic() - self._written_at_s >= WRITE_S:
            row = {"max_ms": 1e3 * self._max_s, "cpu_s": now_s - self._written_s, "stacks": self._stacks}
            with self._file.open("a") as opened:
                opened.write(json.dumps(row) + "\n")
            self._max_s, self._stacks = 0.0, []
            self._written_at_s, self._written_s = time.monotonic(), now_s
        self._last_s = time.thread_time()
        asyncio.get_running_loop().call_later(TICK_S, self.tick)

    def _sample(self) -> None:
        while True:
            time.sleep(0.01)
            if time.clock_gettime(self._clock_id) - self._last_s < LONG_S or len(self._stacks) >= MAX_STACKS:
                continue
            frames = traceback.extract_stack(sys._current_frames()[self._thread])
            ours = [f"{Path(frame.filename).stem}.{frame.name}:{frame.lineno}" for frame in frames[-8:]]
            self._stacks.append(" > ".join(ours))


class ProbedGateway(Gateway):
    """A gateway with a probe in its event loop."""

    file = Path()
    explains = False

    async def start(self) -> None:
        """Starts the probe, then the gateway."""
        await GatewayEnd().install(self.file.with_name("sessions"))
        Probe(self.file, explains=self.explains).tick()
        await super().start()


def main() -> NoReturn:
    """Runs the program. Its arguments are FILE, `explain` or `measure`, and the flags of `python -m gateway`."""
    ProbedGateway.file, ProbedGateway.explains = Path(sys.argv[1]), sys.argv[2] == "explain"
    ProbedGateway.file.touch()
    program.Gateway = ProbedGateway  # type: ignore[misc]
    sys.argv[1:] = sys.argv[3:]
    process.run(program.main)


if __name__ == "__main__":
    main()
