"""`python -m tests.machines.run [SCENARIO …]`: runs scenarios, prints a table. Exit code 1 if anything was not right.

Each answer is compared with that of the undisturbed cluster. Where namespaces are not permitted it says so and exits
with 0.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import signal
import sys
from pathlib import Path

from tests.faults.report import Row, table
from tests.machines import bed
from tests.machines.network import Network, NotPermitted
from tests.machines.pairs import PAIRS, PairScenario
from tests.machines.pairs import table as pair_table
from tests.machines.scenarios import SCENARIOS, Scenario

SHORT_SPECS = 16
"""Requests of the short selection, of which each is answered three times undisturbed first."""


def choose(patterns: list[str], *, short: bool) -> list[Scenario | PairScenario]:
    """Returns the scenarios with these names or patterns, or all except those of pairs. Raises ValueError."""
    known: dict[str, Scenario | PairScenario] = {**SCENARIOS, **(PAIRS if patterns else {})}
    chosen: list[Scenario | PairScenario] = []
    for pattern in patterns or ["*"]:
        found = [scenario for name, scenario in known.items() if fnmatch.fnmatch(name, pattern)]
        if not found:
            raise ValueError(f"no scenario is called {pattern!r}")
        chosen += [scenario for scenario in found if scenario.short or not short]
    return chosen


def main() -> int:
    """The command line."""
    names = "\n".join(f"  {name}" for name in (*SCENARIOS, *PAIRS))
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines.run",
        description=__doc__,
        epilog=f"scenarios:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help="Names, or patterns with *. Default: all but pairs *."
    )
    parser.add_argument("--short", action="store_true", help="only the selection that every change runs")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    settings = parser.parse_args()
    try:
        chosen = choose(settings.scenarios, short=settings.short)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clusters are ended after it too
    needed = ["ip", *bed.ENTER, *(["nft"] if any(isinstance(one, PairScenario) for one in chosen) else [])]
    missing = [program for program in needed if shutil.which(program) is None]
    rows: dict[str, Row] = {}
    try:
        if missing:
            raise NotPermitted(f"{', '.join(missing)} is not installed")
        with Network(bed.machine_names()) as network:
            bed.become_clients(network)
            # What it imports starts threads, and those would stay on the machine on which they began.
            from tests.faults.cases import NUM_SPECS
            from tests.machines.pair_runner import PairRunner
            from tests.machines.runner import Runner

            runner = Runner(network, seed=settings.seed, num_specs=SHORT_SPECS if settings.short else NUM_SPECS)
            pair_runner = PairRunner(network, seed=settings.seed)
            try:
                for scenario in chosen:
                    if isinstance(scenario, PairScenario):
                        runner.close()  # two clusters at once would be in each other's way
                        row, show = pair_runner.run(scenario), pair_table
                    else:
                        row, show = runner.run(scenario), table
                    rows[scenario.name] = row
                    sys.stderr.write(show([row]) + f"\n{row.figures}\n")
                    if settings.json:  # after each: a run that is broken off has told what it found
                        found = [row.to_json() for row in rows.values()]
                        settings.json.write_text(json.dumps(found, indent=1) + "\n")
            finally:
                runner.close()
    except NotPermitted as error:
        sys.stdout.write(f"skipped: machines cannot be made here: {error}\n")
        return 0
    for show, names_of in ((table, SCENARIOS), (pair_table, PAIRS)):
        if shown := [row for name, row in rows.items() if name in names_of]:
            sys.stdout.write(show(shown) + "\n")
    return 0 if all(row.is_good for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
