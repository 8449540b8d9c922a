"""What became better and what became worse: `python -m benchmarks.history [--worse 0.1] [FILE]`.

For each ratio of each benchmark the last run is compared with the median of the earlier ones (the last --runs of them)
on the same kind of machine. Ratios only: times are different on every day of the same machine. A ratio that is worse by
more than --worse, or that no longer reaches its aim, is marked, and the exit code is 1.

The file is what benchmarks append to with `--history` (as `make bench HISTORY=1` does).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import HISTORY, Ratio


@dataclass(frozen=True)
class Change:
    """A ratio of the last run, and what it was before; `before` is None where nothing was."""

    benchmark: str
    machine: str
    name: str
    now: Ratio
    before: float | None
    num_before: int

    @property
    def better_by(self) -> float:
        """Relative change in the good direction; negative: worse. 0 without a past."""
        if not self.before:
            return 0.0
        change = self.now.value / self.before - 1
        return -change if self.now.lower_is_better else change

    def is_regression(self, worse: float) -> bool:
        """Whether it is worse by more than that, or missed an aim that it had reached."""
        if self.before is None:
            return False
        had = Ratio(self.before, self.now.aim, self.now.lower_is_better)
        return self.better_by < -worse or (had.is_reached and not self.now.is_reached)


def main() -> None:
    """Print the comparison; exit 1 where something became worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=HISTORY)
    parser.add_argument("--worse", type=float, default=0.1, help="part by which a ratio may become worse")
    parser.add_argument("--runs", type=int, default=5, help="earlier runs to compare with")
    arguments = parser.parse_args()
    if not arguments.file.exists():
        raise SystemExit(f"{arguments.file} does not exist; benchmarks append to it with --history")
    changes = compare(read(arguments.file.read_text().splitlines()), arguments.runs)
    for line in table(changes, arguments.worse):
        print(line)
    sys.exit(any(change.is_regression(arguments.worse) for change in changes))


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The runs in the order of their dates. Raises SystemExit for a line that is not a run."""
    runs = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                run = json.loads(line)
                _ = run["benchmark"], run["date"], run["machine"], run["ratios"]
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"line {number} of the history is no run: {error!r}") from error
            runs.append(run)
    return sorted(runs, key=lambda run: str(run["date"]))


def compare(runs: Sequence[Mapping[str, Any]], num_earlier: int) -> list[Change]:
    """For each benchmark and kind of machine, the ratios of the last run beside those of earlier ones."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        machine = ", ".join(f"{key} {value}" for key, value in sorted(run["machine"].items()))
        groups.setdefault((run["benchmark"], machine), []).append(run)
    changes = []
    for (benchmark, machine), (*earlier, last) in sorted(groups.items()):
        for name, fields in last["ratios"].items():
            past = [run["ratios"][name]["value"] for run in earlier if name in run["ratios"]][-num_earlier:]
            before = statistics.median(past) if past else None
            changes.append(Change(benchmark, machine, name, Ratio(**fields), before, len(past)))
    return changes


def table(changes: Sequence[Change], worse: float) -> list[str]:
    """Lines to print: machine, benchmark, ratios."""
    lines = []
    shown: tuple[str, str] | None = None
    for change in changes:
        if (change.machine, change.benchmark) != shown:
            shown = (change.machine, change.benchmark)
            lines.append(f"== {change.benchmark} on {change.machine}")
        before = "         new" if change.before is None else f"{change.before:8.3f} ({change.num_before:d})"
        change_shown = "       " if change.before is None else f"{change.better_by:+7.1%}"
        aim = "" if change.now.aim is None else f"  aim {change.now.aim:g}{'' if change.now.is_reached else ', missed'}"
        mark = "  WORSE" if change.is_regression(worse) else ""
        lines.append(f"{change.name:48s} {change.now.value:8.3f}  before {before} {change_shown}{aim}{mark}")
    return lines


if __name__ == "__main__":
    main()
