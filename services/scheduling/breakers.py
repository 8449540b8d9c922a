"""The circuit breakers of all workers, or pairs of workers, of one gateway, under any hashable key. Pure.

The caller decides what an open breaker means.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from services.runtime.breaker import MAX_ERRORS, MAX_OPEN_S, WINDOW_S, Breaker, CircuitState

Key = TypeVar("Key", bound=Hashable)

FORGET_AFTER_S = 600.0


class Breakers:
    """All breakers of one gateway. The parameters are those of each breaker."""

    def __init__(
        self,
        *,
        max_errors: int = MAX_ERRORS,
        window_s: float = WINDOW_S,
        max_open_s: float = MAX_OPEN_S,
        max_probation_s: float = 0.0,
    ) -> None:
        self._max_errors, self._window_s = max_errors, window_s
        self._max_open_s = max_open_s
        self._max_probation_s = max_probation_s
        self._breakers: dict[Hashable, Breaker] = {}

    @property
    def num_open(self) -> int:
        """Breakers that are open now, those with a probe under way included."""
        # Asked several times for each request, and nearly always nothing has failed lately.
        return sum(breaker.opened_at_s is not None for breaker in self._breakers.values()) if self._breakers else 0

    def known(self) -> list[Any]:
        """Returns the keys with an open breaker or a counted error."""
        return list(self._breakers)

    def is_open(self, key: Hashable) -> bool:
        """Returns whether this breaker is open."""
        return self.opened_at_s(key) is not None

    def opened_at_s(self, key: Hashable) -> float | None:
        """Returns since when this breaker has been open; None: it is not."""
        breaker = self._breakers.get(key)
        return None if breaker is None else breaker.opened_at_s

    def num_openings(self, key: Hashable) -> int:
        """Returns how often the breaker has opened lately, this time included."""
        breaker = self._breakers.get(key)
        return 0 if breaker is None else breaker.num_openings

    def is_probing(self, key: Hashable) -> bool:
        """Returns whether a probe is under way there."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.is_probing

    def state(self, key: Hashable) -> CircuitState:
        """Returns the state of this breaker."""
        breaker = self._breakers.get(key)
        return "closed" if breaker is None else breaker.state

    def opened(self, group: Sequence[Key]) -> list[Key]:
        """Returns the members of the group that are open, in the order in which they opened."""
        return self._in_order(key for key in group if self.is_open(key))

    def shut(self, group: Sequence[Key], now_s: float) -> list[Key]:
        """Returns the members of the group that should be left alone, in the order in which they opened."""
        breakers = self._breakers
        return self._in_order(key for key in group if (one := breakers.get(key)) and not one.lets_through(now_s))

    def begin(self, key: Hashable, now_s: float) -> bool:
        """Notes that a request goes there. True: it is the probe, and its end must be reported, whatever it is."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.begin(now_s)

    def succeeded(self, key: Hashable, now_s: float) -> bool:
        """Notes a success; returns whether it closed an open breaker."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.succeeded(now_s)

    def failed(self, key: Hashable, now_s: float, *, is_probe: bool = False) -> None:
        """Notes an error. While the breaker is open, only an error of the probe counts."""
        self._at(key, now_s).failed(now_s, is_probe=is_probe)

    def trip(self, key: Hashable, now_s: float) -> None:
        """Opens a closed breaker at once, for a reason of the caller's; an open one stays as it is."""
        self._at(key, now_s).trip(now_s)

    def abandoned(self, key: Hashable) -> None:
        """Notes that the probe ended without saying anything about the other side; the next request is the probe."""
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.abandoned()

    def forget(self, key: Hashable) -> None:
        """Drops a breaker and the errors that it has counted."""
        self._breakers.pop(key, None)

    def _in_order(self, keys: Iterable[Key]) -> list[Key]:
        return sorted(keys, key=lambda key: self._breakers[key].opened_at_s or 0.0)

    def _at(self, key: Hashable, now_s: float) -> Breaker:
        breaker = self._breakers.get(key)
        if breaker is None:
            self._forget_old(now_s)
            breaker = self._breakers[key] = Breaker(
                max_errors=self._max_errors,
                window_s=self._window_s,
                max_open_s=self._max_open_s,
                max_probation_s=self._max_probation_s,
            )
        return breaker

    def _forget_old(self, now_s: float) -> None:
        """Drops breakers that nothing has touched for ten minutes, since workers come and go."""
        for key, breaker in list(self._breakers.items()):
            if now_s - breaker.touched_s > FORGET_AFTER_S and not breaker.is_probing:
                del self._breakers[key]
