"""The virtual clock: what is to happen, in order of time; what is due at the same time, in order of asking.

Nothing here or in the rest of the package reads a real clock, so a run is a function of its inputs.
"""

import heapq
from collections.abc import Callable


class EventLoop:
    """Calls actions at their virtual time, in seconds from the beginning of the run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Has `action` called at `time_s`, which must not have passed."""
        assert time_s >= self.now_s, "nothing happens in the past"
        heapq.heappush(self._heap, (time_s, self._num_asked, action))
        self._num_asked += 1

    def run(self) -> None:
        """Goes on until nothing more is to happen."""
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
