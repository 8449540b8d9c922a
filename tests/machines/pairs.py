"""Faults on the path between one prefill and one decode worker, as data, and the bounds that a cluster must keep."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tests.faults.report import Row
from tests.machines.scenarios import DECODE, PREFILL

TRANSFER_PORT = 7000
FAULT_S = 20.0
LONGEST_WAIT_S = 2.0
"""Limit of a gap between tokens, and of a wait for a first token, after the pair's first failed handoff."""
NAMED_WITHIN_S = 5.0
"""Limit of the time from the pair's first failed handoff until `tandem doctor` names the pair."""
MODES = {"remote": ["--local-prefill-tokens=0"], "auto": []}
"""Gateway flags by mode: every prompt is handed over, or the gateway decides."""
COLUMNS = (
    "answers",
    "lost",
    "different",
    "handoffs",
    "failed",
    "attempts",
    "gap_s",
    "wait_s",
    "named_s",
    "others",
    "before",
)
_WORKER = re.compile(r"\b(?:prefill|decode)-\d+\b")

Pair = tuple[str, str]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    `to_decode` and `to_prefill` are nftables rules for the packets of the pair, by the worker that receives them.
    """

    name: str
    to_decode: str = ""
    to_prefill: str = ""
    has_silent_address: bool = False
    """Whether the decode worker's name has a second address, which is tried first and never answers."""
    from_start: bool = False
    """Whether the fault exists before the workers start, so that no Link is open yet."""
    is_felt: bool = True
    """Whether a handoff that is tried fails. Otherwise one may fail, and `tandem doctor` need not name the pair."""
    only_delays: bool = False
    """Whether handoffs may take long without a failure. Waits count only after a failed one, and `tandem doctor` may
    name the pair as slow."""


_LOSS = "numgen random mod 100 < 8 drop"
_CLOSED = f"tcp dport {TRANSFER_PORT} drop"
FAULTS = (
    Fault("nothing", is_felt=False),
    Fault("cut", to_decode="drop"),
    Fault("cut backward", to_prefill="drop"),
    Fault("payload port closed", to_decode=_CLOSED),
    Fault("payload port closed from the start", to_decode=_CLOSED, from_start=True),
    Fault("silent first address", has_silent_address=True, from_start=True, is_felt=False),
    Fault("large frames lost", to_decode="meta length > 1400 drop"),
    Fault("large frames lost from the start", to_decode="meta length > 1400 drop", from_start=True, is_felt=False),
    Fault("8 % loss", to_decode=_LOSS, to_prefill=_LOSS, is_felt=False, only_delays=True),
)


@dataclass(frozen=True)
class PairScenario:
    """A fault of one pair in one mode. `slow`: a decode worker that is ejected as slow before the fault begins."""

    fault: Fault
    pair: Pair
    mode: str
    slow: str = ""
    short: bool = False

    @property
    def name(self) -> str:
        beside = f" while {self.slow} is slow" if self.slow else ""
        return f"pairs {self.mode} {' '.join(self.pair)}: {self.fault.name}{beside}"


def _made() -> list[PairScenario]:
    nothing, cut, *_ = FAULTS
    alone = (PREFILL[0], DECODE[0])
    made = []
    for mode in MODES:
        made.append(PairScenario(nothing, alone, mode))
        made += [
            PairScenario(*each, mode) for each in itertools.product(FAULTS[1:], itertools.product(PREFILL, DECODE))
        ]
        made.append(PairScenario(cut, alone, mode, slow=DECODE[1]))
    return made


PAIRS = {scenario.name: scenario for scenario in _made()}


def ruleset(rules: Iterable[tuple[str, str]]) -> str:
    """Returns the input to `nft` that applies (address of the sender, rule) pairs to received packets."""
    lines = [f"ip saddr {source} {rule}" for source, rule in rules if rule]
    return "\n".join(
        [
            "flush ruleset",
            "table ip pairs {",
            "chain input {",
            "type filter hook input priority 0",
            *lines,
            "}",
            "}",
            "",
        ]
    )


@dataclass
class Stream:
    """Moments of one request: when it was sent, and when tokens of each of its choices arrived."""

    sent_s: float
    arrivals_s: Sequence[Sequence[float]]


@dataclass
class Evidence:
    """Everything that was observed in one scenario; moments are of one monotonic clock."""

    began_s: float
    streams: list[Stream] = field(default_factory=list)
    num_handoffs: int = 0
    """Attempts on the pair, whether or not they failed."""
    failed_s: list[float] = field(default_factory=list)
    """When attempts on the pair failed."""
    max_attempts: int = 0
    accused: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    """When `tandem doctor` was run, and the workers and pairs that it named, with its words."""


def accused(texts: Iterable[str]) -> dict[str, str]:
    """Returns the findings by the worker that they name. A finding that names two workers is about their pair."""
    found: dict[str, str] = {}
    for text in texts:
        workers = sorted(set(_WORKER.findall(text)), reverse=True)
        found |= dict.fromkeys([" to ".join(workers)] if len(workers) == 2 else workers, text)
    return found


def judge(scenario: PairScenario, evidence: Evidence, row: Row) -> None:
    """Adds the figures of a scenario to its row, and a problem for each bound that was exceeded."""
    pair = " to ".join(scenario.pair)
    failed_s = min((at_s for at_s in evidence.failed_s if at_s >= evidence.began_s), default=math.inf)
    named_s = min((at_s for at_s, found in evidence.accused if pair in found), default=math.inf)
    named_after_s = max(0.0, named_s - failed_s) if math.isfinite(failed_s) else math.inf
    gap_s, wait_s = longest_waits(evidence.streams, failed_s if math.isfinite(failed_s) else evidence.began_s)
    others = {name: text for _, found in evidence.accused for name, text in found.items()}
    before = {name for at_s, found in evidence.accused if at_s < evidence.began_s for name in found}
    for expected in (pair, scenario.slow):
        others.pop(expected, None)
    row.figures |= {
        "handoffs": evidence.num_handoffs,
        "failed": len(evidence.failed_s),
        "attempts": evidence.max_attempts,
        "first_failed_s": _shown(failed_s - evidence.began_s),
        "gap_s": _shown(gap_s),
        "wait_s": _shown(wait_s),
        "named_s": _shown(named_after_s),
        "others": ", ".join(sorted(others)) or "-",
        "before": ", ".join(sorted(before)) or "-",
    }
    if not evidence.num_handoffs:
        row.problems.append("no handoff was tried between the two workers, so the scenario shows nothing")
    counts = math.isfinite(failed_s) or not scenario.fault.only_delays
    if counts and max(gap_s, wait_s) > LONGEST_WAIT_S:
        row.problems.append(f"a gap of {gap_s:.1f} s or a wait of {wait_s:.1f} s is longer than {LONGEST_WAIT_S:g} s")
    row.problems += _naming_problems(scenario, has_failed=math.isfinite(failed_s), named_after_s=named_after_s)
    if math.isfinite(named_s) and math.isinf(failed_s) and not scenario.fault.only_delays:
        row.problems.append("doctor named the pair although none of its handoffs failed")
    row.problems += [f"doctor named {name}: {text}" for name, text in others.items()]


def _naming_problems(scenario: PairScenario, *, has_failed: bool, named_after_s: float) -> list[str]:
    if not scenario.fault.is_felt:
        return []
    if not has_failed:  # a gateway that decides may avoid the pair before a handoff fails
        return ["no handoff failed, so the scenario shows nothing"] if scenario.mode == "remote" else []
    if named_after_s > NAMED_WITHIN_S:
        return [f"doctor named the pair {_shown(named_after_s)} s after its first failed handoff"]
    return []


def longest_waits(streams: Collection[Stream], since_s: float) -> tuple[float, float]:
    """Returns the longest gap between tokens and the longest wait for a first token, both counted from `since_s`."""
    gaps, waits = [0.0], [0.0]
    for stream in streams:
        for arrivals_s in stream.arrivals_s:
            moments = [max(since_s, at_s) for at_s in (stream.sent_s, *arrivals_s)]
            steps_s = [b - a for a, b in itertools.pairwise(moments)]
            waits += steps_s[:1]
            gaps += steps_s[1:]
    return max(gaps), max(waits)


def table(rows: Sequence[Row]) -> str:
    """Returns all rows as text, followed by their problems."""
    lines = [("scenario", *COLUMNS, "")]
    for row in rows:
        values = {"answers": row.answers, "lost": row.lost, "different": row.different, **row.figures}
        cells = [str(values.get(column, "-")) for column in COLUMNS]
        lines.append((row.fault, *cells, "ok" if row.is_good else "FAILED"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"{row.fault}: PROBLEM {problem}" for row in rows for problem in (*row.problems[:10], *row.leaks[:10])]
    return "\n".join(text)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else "-"
