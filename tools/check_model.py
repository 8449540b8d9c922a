#!/usr/bin/env python3
"""Checks spec/handoff.pml with Spin: it must hold with all fences, and break with any one of them taken out.

usage: tools/check_model.py [VARIANT ...]     (all of them if none is named; --list names them)

Needs spin and gcc and installs nothing. Exit status: 0 as expected, 1 not, 2 a tool is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "spec" / "handoff.pml"
TIMEOUT_S = 600.0
HOLDS, BREAKS = "holds", "breaks"


@dataclass(frozen=True)
class Variant:
    """One run of Spin. `finds_cycles` looks for runs without end instead of wrong states."""

    name: str
    expected: str
    defines: tuple[str, ...]
    what: str
    finds_cycles: bool = False


VARIANTS = (
    Variant("fences", HOLDS, ("MAX_FAULTS=2",), "one page, two faults"),
    Variant("two_pages", HOLDS, ("CHUNKS=2", "MAX_FAULTS=0"), "two pages; overtaking and giving up, but no faults"),
    Variant("ends", HOLDS, ("MAX_FAULTS=1",), "nothing goes in circles, so each run ends", finds_cycles=True),
    Variant("reliable", HOLDS, ("CHUNKS=2", "RELIABLE"), "where nothing goes wrong, the transfer is committed"),
    Variant("SHOW_COMMIT", BREAKS, ("MAX_FAULTS=0",), "a commit is reached at all"),
    Variant("NO_ATTEMPT_FENCE", BREAKS, ("MAX_FAULTS=1",), "an older attempt may begin after a newer one"),
    Variant("NO_CANCEL_FENCE", BREAKS, ("MAX_FAULTS=1",), "an abort that overtakes its Reserve is forgotten"),
    Variant("NO_INCARNATION_FENCE", BREAKS, ("MAX_FAULTS=1",), "messages reach a later life of the receiver"),
    Variant("NO_REVOKE", BREAKS, ("MAX_FAULTS=1",), "pages are released while a copy writes to them"),
    Variant("NO_SENDER_WAIT", BREAKS, ("MAX_FAULTS=1",), "pages are released while they are read"),
    Variant("NO_SEAL_CHECK", BREAKS, ("MAX_FAULTS=1",), "a seal is believed without looking at what arrived"),
    Variant("NO_CHECKSUM", BREAKS, ("MAX_FAULTS=1",), "a damaged frame is copied"),
    Variant("NO_REPLAY_FENCE", BREAKS, ("MAX_FAULTS=1",), "a frame that comes twice is copied twice"),
    Variant("NO_GENERATION", BREAKS, ("MAX_FAULTS=1",), "a page that was given away is read or written all the same"),
    Variant("NO_DEADLINE", BREAKS, ("MAX_FAULTS=1",), "nobody gives up"),
)


@dataclass(frozen=True)
class Outcome:
    """What Spin found; `violation` is the first one, in the model's words."""

    found: str
    violation: str
    num_states: int
    wall_s: float


def check(variant: Variant) -> Outcome:
    """Run one variant. Raises RuntimeError if Spin or the compiler fails, or the search was cut short."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        shutil.copy(MODEL, folder)
        defines = [f"-D{each}" for each in variant.defines]
        if variant.expected == BREAKS:
            defines.append(f"-D{variant.name}")
        _run(["spin", "-a", *defines, MODEL.name], folder)
        # A search that stops at its first find is shorter than its own optimisation.
        level = "-O2" if variant.expected == HOLDS else "-O0"
        kind = ["-DNP"] if variant.finds_cycles else ["-DSAFETY", "-DNOFAIR"]
        _run(["gcc", "-w", level, *kind, "-o", "pan", "pan.c"], folder)
        report = _run(["./pan", "-m1000000", "-w24", *(["-l"] if variant.finds_cycles else [])], folder)
    num_errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    if num_errors is None or states is None:
        raise RuntimeError(f"Spin's report cannot be read:\n{report}")
    violation = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", report, re.MULTILINE)
    found = BREAKS if int(num_errors[1]) else HOLDS
    is_whole = "max search depth too small" not in report and "out of memory" not in report
    if found == HOLDS and not is_whole:
        raise RuntimeError(f"the search was cut short:\n{report}")
    return Outcome(found, violation[1] if violation else "", int(states[1]), time.monotonic() - begun)


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(names: list[str]) -> int:
    """Check the named variants, or all, and print a table."""
    if names == ["--list"]:
        _say("\n".join(variant.name for variant in VARIANTS))
        return 0
    unknown = set(names) - {variant.name for variant in VARIANTS}
    if unknown:
        sys.stderr.write(f"no such variant: {', '.join(sorted(unknown))}\n")
        return 1
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            sys.stderr.write(f"The model needs {tool}, which is not here: apt-get install {tool}\n")
            return 2
    _say(f"{'variant':<22}{'expected':<10}{'found':<8}{'states':>10}{'seconds':>9}  what, and the violation")
    num_wrong = 0
    for variant in VARIANTS:
        if names and variant.name not in names:
            continue
        outcome = check(variant)
        is_right = outcome.found == variant.expected
        num_wrong += not is_right
        line = (
            f"{variant.name:<22}{variant.expected:<10}{outcome.found:<8}{outcome.num_states:>10}{outcome.wall_s:>9.1f}"
        )
        _say(f"{line}  {variant.what}{'' if is_right else '   <-- WRONG'}")
        if outcome.violation:
            _say(f"{'':61}{outcome.violation}")
    _say("all as expected" if num_wrong == 0 else f"{num_wrong} NOT as expected")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
