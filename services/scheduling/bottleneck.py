"""Which role and which resource hold a model's workers back now, and what one more worker of each kind would bring.

Every resource has a load, from 0 to 1: the share of its time that is taken, or of its pages. Computing, sending and
the gateway's thread are flows. The fullest flow holds the model back: while it has no time left, nothing else brings
more. Where requests wait, a flow that is nearly full does, since workers pause between two requests. Pages are a stock,
which fills up behind a full flow, so that they count only where requests wait and no flow is nearly full. Requests that
wait although nothing is full wait for a rule: kept workers, circuits, limits of admission.

The mean over a role's workers counts, each of them clamped: one of k workers that lies moves its role by 1/k at most.
Pure: reads no clock and knows no worker.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Role = Literal["prefill", "decode", "gateway"]
Resource = Literal["compute", "link", "pages", "queue"]
ROLES: tuple[Role, ...] = get_args(Role)

FULL = 0.85
"""The load above which queues grow with each burst."""
EASED = 0.70
"""The load below which what was full no longer is, and from which requests that wait may wait for it."""
CLEARLY = 0.1
"""By how much another load must be higher to be named instead."""
SHORT = 0.5
"""The load from which requests that wait may wait for a resource, pages too: one of them may need the whole rest."""
WAITING = 1.0
"""The mean number of requests that wait from which on some do not just pass through."""
LASTING_S = 8.0
"""The time for which something else must hold back, or nothing, before that is told."""


class Bottleneck(NamedTuple):
    """A resource of a role, full or not."""

    role: Role
    resource: Resource

    def __str__(self) -> str:
        return self.role if self.role == "gateway" else f"{self.role} {self.resource}"


QUEUE = Bottleneck("gateway", "queue")
GATEWAY = Bottleneck("gateway", "compute")


class WorkerUse(NamedTuple):
    """Shares from 0 to 1, means of the last seconds, of one worker's time, of its links' time, and of its pages."""

    role: Role
    compute: float
    link: float
    pages: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was measured of one model lately. `gateway` is the share of time in which the gateway's thread worked.

    `waiting` requests waited in the gateway on average. `is_batch_only`: only batch work runs and waits.
    """

    workers: Sequence[WorkerUse]
    gateway: float = 0.0
    waiting: float = 0.0
    is_batch_only: bool = False


@dataclass(frozen=True, slots=True)
class Gain:
    """What one more of a role would bring: `share` 0.5 is half as many requests more, until `then` is full."""

    role: Role
    share: float
    then: Bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What holds a model back since `since_s`; the loads of all its resources, and what more workers would bring."""

    place: Bottleneck
    loads: Mapping[Bottleneck, float]
    waiting: float
    gains: Sequence[Gain]
    since_s: float
    is_batch_only: bool


def loads_of(snapshot: Snapshot) -> dict[Bottleneck, float]:
    """Returns the load of each resource that exists; roles without workers have none."""
    found: dict[Bottleneck, float] = {}
    for role in ("prefill", "decode"):
        workers = [worker for worker in snapshot.workers if worker.role == role]
        resources: tuple[Resource, ...] = ("compute", "link", "pages") if role == "prefill" else ("compute", "pages")
        for resource in resources if workers else ():
            shares = [_clamped(getattr(worker, resource)) for worker in workers]
            found[Bottleneck(role, resource)] = math.fsum(shares) / len(shares)
    found[GATEWAY] = _clamped(snapshot.gateway)
    return found


def find(snapshot: Snapshot, *before: Bottleneck | None) -> Bottleneck | None:
    """Returns what holds the model back; None: nothing does. Without decode workers that is their lack.

    What was found `before` is found again as long as it is nearly full and nothing else is clearly fuller.
    """
    loads = loads_of(snapshot)
    if Bottleneck("decode", "compute") not in loads:
        return Bottleneck("decode", "compute")
    flows = {place: load for place, load in loads.items() if place.resource != "pages"}
    fullest = max(flows, key=lambda place: flows[place])
    for one in before:
        if one in flows and flows[one] >= max(EASED, flows[fullest] - CLEARLY):
            return one
    if flows[fullest] >= FULL:
        return fullest
    was_waiting = any(one is not None and one.resource in ("pages", "queue") for one in before)
    if snapshot.waiting < (WAITING / 2 if was_waiting else WAITING):
        return None
    if flows[fullest] >= EASED:
        return fullest
    any_place = max(loads, key=lambda place: loads[place])
    return any_place if loads[any_place] >= SHORT else QUEUE


def gains_of(snapshot: Snapshot, place: Bottleneck) -> list[Gain]:
    """Returns what one more worker of each role, or one more gateway, would bring if `place` holds the model back.

    By the planner's rule that capacity is demand over load: the load of k workers falls to k/(k+1) with one more, and
    then the next resource is full. Which end makes a link slow is not known, so that one more worker at either end is
    taken to help. A role without workers cannot be judged; what waits for a rule gains nothing.
    """
    every = loads_of(snapshot)
    if place not in every:
        return []
    loads = {one: load for one, load in every.items() if one.resource != "pages"} | {place: 1.0}
    found = []
    for role in ROLES:
        number = 1 if role == "gateway" else sum(worker.role == role for worker in snapshot.workers)
        if number == 0:
            continue
        after = {
            one: load * number / (number + 1)
            if one.role == role or (one.resource, role) == ("link", "decode")
            else load
            for one, load in loads.items()
        }
        then = max(after, key=lambda one: after[one])
        found.append(Gain(role, 1 / after[then] - 1, then))
    return found


class Judge:
    """Follows one model, and changes its mind only after LASTING_S."""

    def __init__(self) -> None:
        self._told: Bottleneck | None = None
        self._told_since_s = 0.0
        self._other: Bottleneck | None = None
        """What was found last."""
        self._other_since_s = 0.0

    def judge(self, snapshot: Snapshot, now_s: float) -> Finding | None:
        """Returns what holds the model back at this moment of a monotonic clock; None: nothing does."""
        found = find(snapshot, self._told, self._other)
        if found != self._other:
            self._other, self._other_since_s = found, now_s
        if self._other != self._told and now_s - self._other_since_s >= LASTING_S:
            self._told, self._told_since_s = self._other, self._other_since_s
        if self._told is None:
            return None
        return Finding(
            place=self._told,
            loads=loads_of(snapshot),
            waiting=snapshot.waiting,
            gains=gains_of(snapshot, self._told),
            since_s=self._told_since_s,
            is_batch_only=snapshot.is_batch_only,
        )


def said(finding: Finding) -> str:
    """Returns the finding as a sentence for people."""
    place, load = finding.place, finding.loads.get(finding.place)
    words = {
        "compute": f"{load or 0:.0%} of what {place.role} workers can compute is taken",
        "link": f"{load or 0:.0%} of the next second of the links of {place.role} workers is taken by pages",
        "pages": f"{load or 0:.0%} of the pages of {place.role} workers are taken",
        "queue": "nothing is full, so that requests wait for circuits, limits or workers kept for tenants",
    }[place.resource]
    if place == GATEWAY:
        words = f"the gateway works {load or 0:.0%} of the time"
    if load is None and place != QUEUE:
        words = f"no {place.role} worker is ready"
    if finding.waiting >= WAITING:
        words += f", {finding.waiting:.0f} requests wait"
    if finding.is_batch_only:
        words += ", all of it for batch work"
    most = "up to " if place.resource == "link" else ""
    gains = [f"one more {_kind(gain.role)}: {_gained(gain, most)}" for gain in finding.gains]
    return "; ".join((words, *gains))


def _kind(role: Role) -> str:
    return role if role == "gateway" else f"{role} worker"


def _gained(gain: Gain, most: str) -> str:
    return "nothing" if gain.share < 0.01 else f"{most}+{gain.share:.0%} requests, then {gain.then}"


def _clamped(share: float) -> float:
    """Returns a share within 0 and 1; what is no number counts as nothing."""
    return min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
