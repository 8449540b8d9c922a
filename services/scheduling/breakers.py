"""Circuit breakers: what fails again and again is left alone for a while, then tried with one request. Pure.

A breaker guards one worker or one pair of workers, under any hashable key; time is an argument, in seconds of one
monotonic clock. Three errors within ten seconds open it. After one second it lets one request through as a probe; a
success closes it, an error doubles the time until the next probe, up to a minute. A caller that knows a better reason
than errors (`services.scheduling.health`: too slow, silent) trips it.

A worker that flaps would be let in at each good moment. So there is a probation, where the owner wants it: probes must
be good for 3 s on end, one a second, and for four times as long with each further opening, up to a limit. Every 30 s
that the breaker stays closed take one such step back. That ejections last longer the more of them there were comes from
Envoy's outlier detection; that one good moment is not enough is ours.

`usable` has the last word on what an open breaker means: never more than half of a group is left alone, and never its
last member. Where more than that is broken, the fault is elsewhere, or there is nothing better to try.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Key = TypeVar("Key", bound=Hashable)
CircuitState = Literal["closed", "suspected", "open", "half_open"]
"""A worker that is `open` or `half_open` (being tried) gets no work. One that is `suspected` should get none, and does,
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
FORGET_AFTER_S = 600.0


@dataclass(slots=True)
class _Breaker:
    errors_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ERRORS))
    """When the last errors happened, while it is closed."""
    opened_at_s: float | None = None
    """None: closed."""
    open_s: float = FIRST_OPEN_S
    probe_at_s: float = 0.0
    is_probing: bool = False
    touched_s: float = 0.0
    num_openings: int = 0
    closed_at_s: float = 0.0
    good_since_s: float | None = None
    """Since when all its probes have been good; None: the last one was not, or no probe has ended yet."""

    def lets_through(self, now_s: float) -> bool:
        """Whether a request may go there: closed, or it would be the probe."""
        return self.opened_at_s is None or (now_s >= self.probe_at_s and not self.is_probing)

    def open(self, now_s: float) -> None:
        """Opens the breaker: its worker is left alone from now on."""
        num_forgiven = int((now_s - self.closed_at_s) / FORGIVE_S)
        self.num_openings = max(0, self.num_openings - num_forgiven) + 1
        self.opened_at_s, self.good_since_s = now_s, None
        self.open_s = FIRST_OPEN_S
        self.probe_at_s = now_s + self.open_s

    def close(self, now_s: float) -> None:
        """Closes the breaker: its worker is used again."""
        self.opened_at_s, self.closed_at_s = None, now_s
        self.is_probing = False
        self.errors_s.clear()


class Breakers:
    """All breakers of one gateway; none waits longer than `max_open_s` seconds for its next probe.

    No probation is longer than `max_probation_s`; 0: there is no probation.
    """

    def __init__(self, *, max_open_s: float = MAX_OPEN_S, max_probation_s: float = 0.0) -> None:
        self._max_open_s = max_open_s
        self._max_probation_s = max_probation_s
        self._breakers: dict[Hashable, _Breaker] = {}

    @property
    def num_open(self) -> int:
        """Breakers that are open now, those with a probe under way included."""
        # Asked several times for each request, and nearly always nothing has failed lately.
        return sum(breaker.opened_at_s is not None for breaker in self._breakers.values()) if self._breakers else 0

    def is_open(self, key: Hashable) -> bool:
        """Whether this breaker is open."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.opened_at_s is not None

    def opened_at_s(self, key: Hashable) -> float | None:
        """Since when this breaker has been open; None: it is not."""
        breaker = self._breakers.get(key)
        return None if breaker is None else breaker.opened_at_s

    def num_openings(self, key: Hashable) -> int:
        """How often the breaker has opened lately, this time included."""
        breaker = self._breakers.get(key)
        return 0 if breaker is None else breaker.num_openings

    def is_probing(self, key: Hashable) -> bool:
        """Whether a probe is under way there."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.is_probing

    def state(self, key: Hashable) -> CircuitState:
        """Returns the state in the words of circuit breakers; half open: tried with one request now."""
        breaker = self._breakers.get(key)
        if breaker is None or breaker.opened_at_s is None:
            return "closed"
        return "half_open" if breaker.is_probing else "open"

    def opened(self, group: Sequence[Key]) -> list[Key]:
        """Returns the members of the group that are open, in the order in which they opened."""
        found = [key for key in group if self.is_open(key)]
        return sorted(found, key=lambda key: self._breakers[key].opened_at_s or 0.0)

    def shut(self, group: Sequence[Key], now_s: float) -> list[Key]:
        """Returns the members of the group that should be left alone, in the order in which they opened."""
        shut = [key for key in group if (breaker := self._breakers.get(key)) and not breaker.lets_through(now_s)]
        return sorted(shut, key=lambda key: self._breakers[key].opened_at_s or 0.0)

    def usable(self, group: Sequence[Key], now_s: float) -> list[Key]:
        """Returns the members that a request may go to, in the group's order: at least half, rounded up.

        Where not all that should be left alone can be, those that opened first are.
        """
        left_alone = set(self.shut(group, now_s)[: len(group) // 2])
        return [key for key in group if key not in left_alone]

    def begin(self, key: Hashable, now_s: float) -> bool:
        """Notes that a request goes there. True: it is the probe, and its end must be reported, whatever it is."""
        breaker = self._breakers.get(key)
        if breaker is None or breaker.opened_at_s is None or not breaker.lets_through(now_s):
            return False
        breaker.is_probing = True
        return True

    def succeeded(self, key: Hashable, now_s: float) -> bool:
        """Notes a success: closes an open breaker that is not on probation. Returns whether it closed one.

        A success does not clear the errors of a closed breaker: those only grow old.
        """
        breaker = self._breakers.get(key)
        if breaker is None or breaker.opened_at_s is None:
            return False
        breaker.touched_s = now_s
        if breaker.good_since_s is None:
            breaker.good_since_s = now_s
        if now_s - breaker.good_since_s < self._probation_s(breaker):
            breaker.is_probing = False
            breaker.probe_at_s = now_s + PROBE_AGAIN_S
            return False
        breaker.close(now_s)
        return True

    def failed(self, key: Hashable, now_s: float, *, is_probe: bool = False) -> None:
        """Notes an error. While the breaker is open, only an error of the probe counts."""
        breaker = self._touched(key, now_s)
        if breaker.opened_at_s is None:
            breaker.errors_s.append(now_s)
            if len(breaker.errors_s) == MAX_ERRORS and now_s - breaker.errors_s[0] <= WINDOW_S:
                breaker.open(now_s)
        elif is_probe:
            breaker.is_probing, breaker.good_since_s = False, None
            breaker.open_s = min(2 * breaker.open_s, self._max_open_s)
            breaker.probe_at_s = now_s + breaker.open_s

    def trip(self, key: Hashable, now_s: float) -> None:
        """Opens a closed breaker at once, for a reason of the caller's; an open one stays as it is."""
        breaker = self._touched(key, now_s)
        if breaker.opened_at_s is None:
            breaker.open(now_s)

    def abandoned(self, key: Hashable) -> None:
        """Notes that the probe ended without saying anything about the other side; the next request is the probe."""
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.is_probing = False

    def _probation_s(self, breaker: _Breaker) -> float:
        longer = PROBATION_GROWTH ** min(30, breaker.num_openings - 1)
        return min(self._max_probation_s, FIRST_PROBATION_S * longer)

    def _touched(self, key: Hashable, now_s: float) -> _Breaker:
        breaker = self._breakers.get(key)
        if breaker is None:
            self._forget_old(now_s)
            breaker = self._breakers[key] = _Breaker()
        breaker.touched_s = now_s
        return breaker

    def _forget_old(self, now_s: float) -> None:
        """Drops breakers that nothing has touched for ten minutes, since workers come and go."""
        for key, breaker in list(self._breakers.items()):
            if now_s - breaker.touched_s > FORGET_AFTER_S and not breaker.is_probing:
                del self._breakers[key]
