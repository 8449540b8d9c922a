"""Which model is awake on workers that several models share: pure decisions over what a gateway sees.

A model wakes where a request waits for it and it is awake nowhere. The group (workers that change their model together)
that is spared most easily changes: one whose model is awake elsewhere too, then one with nothing to do, the one whose
model was used least recently first. A group that is busy changes once its model has had its turn. No model is awake for
less time than it takes to change it, so that at least half of the time is spent serving.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

UNMEASURED_S = 1.0
"""What a switch is taken to last before one was measured."""
WEIGHT = 0.3
"""The part of the newest switch in the usual time of a switch."""
SLOW_FACTOR = 5.0
MIN_LIMIT_S = 60.0
"""A switch that takes longer than both this and the usual time times SLOW_FACTOR has failed."""
REST_S = 60.0
"""The time for which a model is not tried again whose waking has failed."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that change their model together.

    `awake_s`: seconds since its model is awake in all of them; None: it is not, or not yet. `idle_s`: seconds since its
    model had a request last; 0: it has one.
    """

    name: str
    model: str
    awake_s: float | None
    idle_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """A group is to have another model."""

    group: str
    model: str


class SwitchTimes:
    """What switches took, by where the weights were: asleep in memory, or on disk. Seconds."""

    def __init__(self) -> None:
        self._usual_s: dict[bool, float] = {}

    def note(self, seconds: float, *, was_asleep: bool) -> None:
        """Notes a switch that came to its end."""
        before = self._usual_s.get(was_asleep, seconds)
        self._usual_s[was_asleep] = before + WEIGHT * (seconds - before)

    def usual_s(self, *, is_asleep: bool) -> float:
        """Returns how long a switch to a model takes."""
        known = self._usual_s
        return known.get(is_asleep, known.get(not is_asleep, UNMEASURED_S))

    @property
    def measured_s(self) -> dict[Literal["asleep", "disk"], float]:
        """What switches took, by where the weights were; what was not measured is absent."""
        return {"asleep" if is_asleep else "disk": round(seconds, 3) for is_asleep, seconds in self._usual_s.items()}

    @property
    def limit_s(self) -> float:
        """After this time a switch has failed."""
        return max(MIN_LIMIT_S, SLOW_FACTOR * max(self._usual_s.values(), default=0.0))


def next_switch(
    groups: Sequence[WorkerGroup],
    waiting_s: Mapping[str, float],
    *,
    turn_s: float,
    switch_s: float,
    resting: Iterable[str] = (),
) -> Switch | None:
    """Returns the change of model that is due now; None: none is.

    `waiting_s` is how long the oldest request of each model has waited; models that are `resting` wait for nothing.
    """
    wished = [group.model for group in groups]
    wanted = [model for model in waiting_s if model not in wished and model not in set(resting)]
    ready = [group for group in groups if group.awake_s is not None and group.awake_s >= switch_s]
    for model in sorted(wanted, key=lambda one: -waiting_s[one]):
        spare = [group for group in ready if group.idle_s > 0 or wished.count(group.model) > 1]
        if spare:
            return Switch(max(spare, key=lambda group: (wished.count(group.model) > 1, group.idle_s)).name, model)
        done = [group for group in ready if group.awake_s is not None and group.awake_s >= turn_s]
        if done:
            return Switch(max(done, key=lambda group: group.awake_s or 0.0).name, model)
    return None
