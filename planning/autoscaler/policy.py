"""How many prefill and decode workers there should be: one decision for both, each with its reason.

Every interval: what is forecast until a worker that is started now would be ready, what that takes by the closed forms
of the planner, and what the backlog takes on top. More is asked for at once; less only after nothing more was needed
for `settle_s`, so that a wave does not make workers come and go. Where one role has too many workers and the other too
few, a worker changes its role, which is quicker than a start. Where the budget is too small for both, they share it by
what they need; a new split stays for `settle_s`, because what is needed by either changes with every look and a change
of roles costs both. Reads no clock and acts on nothing.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from planning.autoscaler.forecast import Forecaster

Need = Callable[[float, float, float], tuple[float, float]]
"""Prefill and decode workers, as fractions, for requests per second, mean prompt tokens and mean answer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerSettings:
    """Limits and times, in workers and seconds."""

    start_up_s: float
    """From the order of a worker until it takes requests."""
    interval_s: float = 10.0
    settle_s: float = 30.0
    backlog_s: float = 20.0
    """Within this time and that of a start-up more workers are to work off a backlog."""
    min_prefill: int = 1
    min_decode: int = 1
    max_workers: int = 1000
    """The budget: workers of both roles together."""
    headroom: float = 1.1
    changes_roles: bool = True
    give_up_s: float = 600.0
    """No more workers of a role are ordered while some are this late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What gateways know: since the last observation, and now."""

    now_s: float
    elapsed_s: float
    """Time in which requests were counted; 0: they say nothing."""
    num_arrived: int
    mean_prompt: float
    mean_answer: float
    backlog_s: float
    """Seconds of one prefill worker's time that waiting prompts take."""
    prefill: int
    """Workers that take requests."""
    decode: int
    starting_prefill: int = 0
    starting_decode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be: workers of each role, of which some come from the other role. `reason` says why."""

    prefill: int
    decode: int
    to_prefill: int = 0
    to_decode: int = 0
    reason: str = ""

    @property
    def is_change(self) -> bool:
        """Whether anything is to be done."""
        return not self.reason.startswith("stays")


class Autoscaler:
    """Decides from one observation after the other."""

    def __init__(self, settings: AutoscalerSettings, need: Need, *, season_s: float | None = None) -> None:
        self.settings = settings
        season = None if season_s is None else round(season_s / settings.interval_s)
        self._forecaster = Forecaster(settings.interval_s, season=season)
        self.need = need
        """May be replaced between two decisions."""
        self._wanted: deque[tuple[float, int, int]] = deque()
        self._starting: dict[str, tuple[int, int, float]] = {}
        """By role: workers that were starting and ready at the last decision, and since when none has come."""
        self._split_stays_until_s = -math.inf

    def decide(self, seen: Observation) -> Decision:
        """Returns what is to be done now."""
        settings = self.settings
        if seen.elapsed_s > 0:
            self._forecaster.add(max(0, seen.num_arrived) / seen.elapsed_s)
        missing = self._missing(seen)
        reach_s = settings.start_up_s + settings.interval_s
        steps = [step * settings.interval_s for step in range(math.ceil(reach_s / settings.interval_s) + 1)]
        # What is missing later cannot be had sooner, so that the uncertainty counts the more the farther ahead it is.
        upper = max(self._forecaster.ahead(step, caution=step / steps[-1]).upper for step in steps)
        least_prefill, least_decode = self.need(upper, seen.mean_prompt, seen.mean_answer)
        # What is ordered for a backlog comes when what is on its way already has worked off a part of it.
        extra = seen.backlog_s / (settings.backlog_s + settings.start_up_s)
        wanted_prefill = max(settings.min_prefill, math.ceil(settings.headroom * least_prefill + extra))
        wanted_decode = max(settings.min_decode, math.ceil(settings.headroom * least_decode))
        has_prefill, has_decode = seen.prefill + seen.starting_prefill, seen.decode + seen.starting_decode
        if not self._wanted:  # what was decided before this autoscaler began had its reasons
            self._wanted.append((seen.now_s, has_prefill, has_decode))
        self._wanted.append((seen.now_s, wanted_prefill, wanted_decode))
        while self._wanted[0][0] < seen.now_s - settings.settle_s:
            self._wanted.popleft()
        # Never fewer than anything in the settling time has asked for.
        prefill = max(wanted_prefill, min(has_prefill, max(one for _, one, _ in self._wanted)))
        decode = max(wanted_decode, min(has_decode, max(one for _, _, one in self._wanted)))
        prefill, decode, is_cut = self._within_budget(seen, prefill, decode)
        # What does not come is not ordered again, and no more of its kind.
        prefill = min(prefill, has_prefill) if missing["prefill"] else prefill
        decode = min(decode, has_decode) if missing["decode"] else decode
        words = (
            f"up to {upper:.1f} requests/s within {reach_s:.0f} s, {seen.mean_prompt:.0f} in and "
            f"{seen.mean_answer:.0f} out: {least_prefill:.1f} prefill and {least_decode:.1f} decode workers, "
            f"times {settings.headroom:g} for headroom"
            + (f", {extra:.1f} more for a backlog of {seen.backlog_s:.0f} s" if extra >= 0.1 else "")
            + (f"; the budget is {settings.max_workers} workers" if is_cut else "")
            + "".join(f"; {num} {role} workers do not come and are given up" for role, num in missing.items() if num)
        )
        return self._decision(seen, prefill, decode, words=words)

    def _decision(self, seen: Observation, prefill: int, decode: int, *, words: str) -> Decision:
        more_prefill = prefill - seen.prefill - seen.starting_prefill
        more_decode = decode - seen.decode - seen.starting_decode
        if more_prefill == more_decode == 0:
            return Decision(prefill=prefill, decode=decode, reason=f"stays: {words}")
        to_prefill = to_decode = 0
        if self.settings.changes_roles:
            to_prefill = max(0, min(more_prefill, -more_decode, seen.decode - self.settings.min_decode))
            to_decode = max(0, min(more_decode, -more_prefill, seen.prefill - self.settings.min_prefill))
        return Decision(
            prefill=prefill,
            decode=decode,
            to_prefill=to_prefill,
            to_decode=to_decode,
            reason=f"{seen.prefill}+{seen.starting_prefill}:{seen.decode}+{seen.starting_decode} becomes "
            f"{prefill}:{decode}"
            + (f", {to_prefill + to_decode} by a change of role" if to_prefill + to_decode else "")
            + f": {words}",
        )

    def _within_budget(self, seen: Observation, prefill: int, decode: int) -> tuple[int, int, bool]:
        """Returns how many of each role the budget allows, and whether it allows fewer than asked for."""
        settings, most = self.settings, self.settings.max_workers
        if prefill + decode <= most:
            return prefill, decode, False
        share = round(most * prefill / (prefill + decode))
        share = max(settings.min_prefill, min(most - settings.min_decode, share))
        has_prefill = seen.prefill + seen.starting_prefill
        is_used_up = has_prefill + seen.decode + seen.starting_decode == most
        if is_used_up and share != has_prefill:
            if seen.now_s < self._split_stays_until_s:
                share = has_prefill
            else:
                self._split_stays_until_s = seen.now_s + settings.settle_s
        return share, most - share, True

    def _missing(self, seen: Observation) -> dict[str, int]:
        """Returns how many workers of each role were ordered so long ago that they will hardly come."""
        found = {}
        numbers = (
            ("prefill", seen.starting_prefill, seen.prefill),
            ("decode", seen.starting_decode, seen.decode),
        )
        for role, num, ready in numbers:
            before, ready_before, since_s = self._starting.get(role, (0, 0, 0.0))
            if num == 0 or before == 0 or ready > ready_before:
                since_s = seen.now_s  # some came, or nothing had been ordered
            self._starting[role] = num, ready, since_s
            is_lost = seen.now_s - since_s > self.settings.start_up_s + self.settings.give_up_s
            found[role] = num if is_lost else 0
        return found
