"""A circuit breaker: what fails again and again is left alone for a while, then tried with one request. Pure.

Time is an argument, in seconds of one monotonic clock. Some errors within ten seconds open it. After a while it lets
one request through as a probe; a success closes it, an error doubles the time until the next probe, up to a limit. A
caller that knows a better reason than errors trips it.

What flaps would be let in at each good moment. So there is a probation, where the owner wants it: probes must be good
for 3 s on end, one a second, and for four times as long with each further opening, up to a limit. Every 30 s that the
breaker stays closed take one such step back. That ejections last longer the more of them there were comes from Envoy's
outlier detection; that one good moment is not enough is ours.
"""

from collections import deque
from typing import Literal

CircuitState = Literal["closed", "suspected", "open", "half_open"]
"""What is `open` or `half_open` (being tried) gets no work. A worker that is `suspected` should get none, and does,
since no more of its role can be spared."""

MAX_ERRORS = 3
WINDOW_S = 10.0
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 60.0
FIRST_PROBATION_S = 3.0
"""How long probes must be good after a breaker has opened for the first time."""
PROBATION_GROWTH = 4.0
PROBE_AGAIN_S = 1.0
"""The time between two good probes of a breaker on probation."""
FORGIVE_S = 30.0
"""A breaker that stays closed for this long counts one opening less."""


class Breaker:
    """Guards one thing: `max_errors` within `window_s` open it.

    Its first probe comes `first_open_s` after it has opened, and none later than `max_open_s` after the one before. No
    probation is longer than `max_probation_s`; 0: there is no probation.
    """

    __slots__ = (
        "_closed_at_s",
        "_errors_s",
        "_first_open_s",
        "_good_since_s",
        "_max_open_s",
        "_max_probation_s",
        "_open_s",
        "_probe_at_s",
        "_window_s",
        "is_probing",
        "num_openings",
        "opened_at_s",
        "touched_s",
    )

    def __init__(
        self,
        *,
        max_errors: int = MAX_ERRORS,
        window_s: float = WINDOW_S,
        first_open_s: float = FIRST_OPEN_S,
        max_open_s: float = MAX_OPEN_S,
        max_probation_s: float = 0.0,
    ) -> None:
        self.opened_at_s: float | None = None
        """When it opened; None: it is closed."""
        self.is_probing = False
        """Whether a probe is under way."""
        self.num_openings = 0
        """How often it has opened lately, this time included."""
        self.touched_s = 0.0
        """When something was last noted of it, apart from the beginning of requests."""
        self._first_open_s, self._max_open_s, self._window_s = first_open_s, max_open_s, window_s
        self._max_probation_s = max_probation_s
        self._errors_s: deque[float] = deque(maxlen=max_errors)
        """When the last errors happened, while it is closed."""
        self._open_s = first_open_s
        self._probe_at_s = self._closed_at_s = 0.0
        self._good_since_s: float | None = None
        """Since when all its probes have been good; None: the last one was not, or no probe has ended yet."""

    @property
    def is_open(self) -> bool:
        """Whether it is open, also while a probe is under way."""
        return self.opened_at_s is not None

    @property
    def state(self) -> CircuitState:
        """The state in the words of circuit breakers; half open: tried with one request now."""
        if self.opened_at_s is None:
            return "closed"
        return "half_open" if self.is_probing else "open"

    def lets_through(self, now_s: float) -> bool:
        """Returns whether a request may be made: the breaker is closed, or the request would be the probe."""
        return self.opened_at_s is None or (now_s >= self._probe_at_s and not self.is_probing)

    def begin(self, now_s: float) -> bool:
        """Notes that a request begins. True: it is the probe, and its end must be reported, whatever it is."""
        if self.opened_at_s is None or not self.lets_through(now_s):
            return False
        self.is_probing = True
        return True

    def succeeded(self, now_s: float) -> bool:
        """Notes a success: closes an open breaker that is not on probation. Returns whether it closed.

        A success does not clear the errors of a closed breaker: those only grow old.
        """
        if self.opened_at_s is None:
            return False
        self.touched_s = now_s
        if self._good_since_s is None:
            self._good_since_s = now_s
        self.is_probing = False
        if now_s - self._good_since_s < self._probation_s():
            self._probe_at_s = now_s + PROBE_AGAIN_S
            return False
        self.opened_at_s, self._closed_at_s = None, now_s
        self._errors_s.clear()
        return True

    def failed(self, now_s: float, *, is_probe: bool = False) -> None:
        """Notes an error. While the breaker is open, only an error of the probe counts."""
        self.touched_s = now_s
        if self.opened_at_s is None:
            errors_s = self._errors_s
            errors_s.append(now_s)
            if len(errors_s) == errors_s.maxlen and now_s - errors_s[0] <= self._window_s:
                self._open(now_s)
        elif is_probe:
            self.is_probing, self._good_since_s = False, None
            self._open_s = min(2 * self._open_s, self._max_open_s)
            self._probe_at_s = now_s + self._open_s

    def trip(self, now_s: float) -> None:
        """Opens a closed breaker at once, for a reason of the caller's; an open one stays as it is."""
        self.touched_s = now_s
        if self.opened_at_s is None:
            self._open(now_s)

    def abandoned(self) -> None:
        """Notes that the probe ended without saying anything about the other side; the next request is the probe."""
        self.is_probing = False

    def _open(self, now_s: float) -> None:
        num_forgiven = int((now_s - self._closed_at_s) / FORGIVE_S)
        self.num_openings = max(0, self.num_openings - num_forgiven) + 1
        self.opened_at_s, self._good_since_s = now_s, None
        self._open_s = self._first_open_s
        self._probe_at_s = now_s + self._open_s

    def _probation_s(self) -> float:
        longer = PROBATION_GROWTH ** min(30, self.num_openings - 1)
        return min(self._max_probation_s, FIRST_PROBATION_S * longer)
