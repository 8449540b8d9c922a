"""What is wrong with the cluster now, as this gateway sees it: each trouble with its cause and what to do about it.

Parts of the gateway report here when a trouble begins and when it is over; `/cluster`, the metrics, the dashboard and,
through them, `tandem status` and `tandem doctor` show what stands here. Finds nothing out itself.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from services.runtime.clock import SYSTEM_CLOCK, Clock

Kind = Literal[
    "api_keys",
    "background_task",
    "certificate",
    "circuit",
    "clock",
    "flapping",
    "gone",
    "hot_spot",
    "kernels",
    "left_out",
    "link",
    "log",
    "missing",
    "quarantine",
    "redis",
    "redis_slow",
    "storage",
    "unreachable",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SAID: Mapping[Kind, tuple[str, str]] = {
    "api_keys": ("the file of API keys cannot be read; the old keys stay", "the file of API keys can be read again"),
    "background_task": ("a background task keeps failing", "a background task works again"),
    "certificate": ("a TLS certificate must be renewed", "a TLS certificate is good again"),
    "clock": ("the clock of a worker is wrong", "the clock of a worker is right again"),
    "flapping": ("worker keeps failing", "worker no longer keeps failing"),
    "gone": ("a worker is gone", "a worker is no longer missed"),
    "hot_spot": ("a worker is loaded far above the others", "a worker is no longer loaded far above the others"),
    "kernels": ("a worker computes without compiled kernels", "no longer: it computes with them or has left"),
    "left_out": ("a worker is left out", "a worker is no longer left out"),
    "link": ("a link between workers is slow or loses large packets", "a link between workers works again"),
    "log": ("log lines are lost", "log can be written again"),
    "missing": ("there are fewer workers than expected", "there are as many workers as expected"),
    "quarantine": ("requests are in quarantine", "no request is in quarantine any longer"),
    "redis": ("Redis does not answer or denies commands; no worker can join", "Redis answers again"),
    "redis_slow": ("Redis is far away or slow", "Redis is fast again"),
    "storage": ("the memory of Redis needs care", "the memory of Redis is in order again"),
    "unreachable": ("a worker cannot be reached", "a worker can be reached again or has left"),
}
"""What the log says when a trouble begins and when it is over. Circuits are logged where they open and close."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TroubleReport:
    """One thing that is wrong. `subject` is where it is wrong: a worker's id, `redis`, `gateway`, a role.

    `since_unix_s` is when it was first seen, in seconds since 1970; `remedy` says what to do, for a person.
    """

    kind: Kind
    subject: str
    cause: str
    remedy: str
    since_unix_s: float


class Found(NamedTuple):
    """Why something is wrong, and what to do about it."""

    cause: str
    remedy: str


class Troubles:
    """The troubles of this moment, each once by kind and subject. To be used on one thread.

    `listeners` are called with each that begins (True) and each that is over (False), once.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._now: dict[tuple[Kind, str], TroubleReport] = {}
        self.listeners: list[Callable[[TroubleReport, bool], None]] = [self._log]

    def begin(self, kind: Kind, subject: str, cause: str, remedy: str) -> None:
        """Notes a trouble. If it is known already, its cause and remedy are replaced and nothing is logged."""
        known = self._now.get((kind, subject))
        if known is not None:
            if (known.cause, known.remedy) != (cause, remedy):
                self._now[kind, subject] = replace(known, cause=cause, remedy=remedy)
            return
        trouble = TroubleReport(kind, subject, cause, remedy, self._unix_s())
        self._now[kind, subject] = trouble
        self._tell(trouble, True)

    def end(self, kind: Kind, subject: str) -> None:
        """Notes that a trouble is over. Logs nothing if there was no such trouble."""
        trouble = self._now.pop((kind, subject), None)
        if trouble is not None:
            self._tell(trouble, False)

    def settle(self, kind: Kind, found: Mapping[str, Found]) -> None:
        """Takes all troubles of a kind, by subject: those not in `found` are over."""
        for known_kind, subject in list(self._now):
            if known_kind == kind and subject not in found:
                self.end(kind, subject)
        for subject, (cause, remedy) in found.items():
            self.begin(kind, subject, cause, remedy)

    def all(self) -> list[TroubleReport]:
        """Returns the troubles of this moment, in order of kind and subject."""
        return [self._now[key] for key in sorted(self._now)]

    def of(self, kind: Kind) -> list[TroubleReport]:
        """Returns the troubles of a kind, in order of subject."""
        return [trouble for trouble in self.all() if trouble.kind == kind]

    def counts(self) -> Mapping[Kind, int]:
        """Returns how many troubles there are of each kind, kinds without any included."""
        found = Counter(kind for kind, _ in self._now)
        return {kind: found[kind] for kind in KINDS}

    def _tell(self, trouble: TroubleReport, has_begun: bool) -> None:
        for listen in self.listeners:
            listen(trouble, has_begun)

    def _log(self, trouble: TroubleReport, has_begun: bool) -> None:
        if trouble.kind not in _SAID:
            return
        began, ended = _SAID[trouble.kind]
        facts: dict[str, object] = {"kind": trouble.kind, "subject": trouble.subject, "cause": trouble.cause}
        if has_begun:
            logger.warning(began, extra={**facts, "remedy": trouble.remedy})
        else:
            logger.warning(ended, extra={**facts, "lasted_s": round(self._unix_s() - trouble.since_unix_s, 1)})

    def _unix_s(self) -> float:
        return self._clock.unix_ns() / 1e9
