"""Checks that the tests of deploy/monitoring/rules.yml notice each small change of a rule: `make test-alert-mutants`.

The changes are to numbers (a quarter more, a fifth less, small counts by one), comparisons, label matchers, grouping
labels, parts of `and`, `or`, and `unless`, `for`, and the severity of each alert, and to the recorded series that
alerts read. promtool then runs the tests of the alert, or of all alerts that read the series. Exit status: 0 if each
change failed a test, 1 if one did not, 2 if a test fails without a change.

    python -m tests.monitoring.mutate [--list] [--jobs N] [NAME ...]     (NAME: only rules whose name contains it)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.monitoring.deployed_files import ALERTS, NAME, RECORDED, TEST_FILES, Rule, needed, tests_of

TIMEOUT_S = 120
FACTORS = (1.25, 0.8)
MAX_COUNTED = 10
"""A whole number up to this one becomes the next one and the one before."""
OPPOSITES = {">": "<", "<": ">", "==": "!=", "!=": "==", ">=": "<", "<=": ">"}

# What a number is not a part of: strings, ranges, names.
_STRING = r'"[^"]*"'
_RANGE = r"\[[^\]]*\]"
_NUMBER = re.compile(rf"{_STRING}|{_RANGE}|{NAME}|(?P<number>\d+(?:\.\d+)?)")
_COMPARISON = re.compile(rf"{_STRING}|\{{[^}}]*\}}|(?P<comparison>==|!=|>=|<=|>|<)")
_MATCHERS = re.compile(r"\{(?P<matchers>[^}]*)\}")
_MATCHER = re.compile(rf"({NAME})(=~|!~|!=|=)({_STRING})")
_GROUPING = re.compile(r"\bby \((?P<labels>[^)]*)\)")
_LOGIC = re.compile(rf"{_STRING}|(?P<logic>\b(?:and|or|unless)\b(?: on \([^)]*\))?)")


@dataclass(frozen=True)
class Mutant:
    """Rules of which one is broken: recorded series, and the alerts whose tests must fail."""

    name: str
    alerts: Sequence[Rule]
    records: Mapping[str, str]
    is_record: bool = False
    """Whether the broken rule is a recorded series."""


@dataclass(frozen=True)
class Verdict:
    """`failed` is whether a test has failed; `output` is what promtool said."""

    mutant: Mutant
    failed: bool
    output: str


def broken(expr: str) -> Iterator[tuple[str, str]]:
    """Yields what is broken in an expression, and the broken expression."""
    for found in _NUMBER.finditer(expr):
        if text := found["number"]:
            for value in _near(float(text)):
                yield f"{text} at {found.start()} becomes {value:g}", _put(expr, found.span(), f"{value:g}")
    for found in _COMPARISON.finditer(expr):
        if text := found["comparison"]:
            yield f"{text} at {found.start()} becomes {OPPOSITES[text]}", _put(expr, found.span(), OPPOSITES[text])
    for found in _MATCHERS.finditer(expr):
        yield from _without_matchers(expr, found)
    for found in _GROUPING.finditer(expr):
        labels = re.split(r",\s*", found["labels"])
        for label in labels:
            if label != "le":
                rest = ", ".join(other for other in labels if other != label)
                yield f"by ({label}) at {found.start()} is left out", _put(expr, found.span("labels"), rest)
    for found in _LOGIC.finditer(expr):
        if found["logic"]:
            yield from _halves(expr, found)


def _near(value: float) -> list[float]:
    if value.is_integer() and value <= MAX_COUNTED:
        return [value + 1, *([value - 1] if value else [])]
    return [value * factor for factor in FACTORS]


def _without_matchers(expr: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
    offset = found.start("matchers")
    matchers = list(_MATCHER.finditer(found["matchers"]))
    for matcher in matchers:
        rest = ",".join(other[0] for other in matchers if other is not matcher)
        yield f"{matcher[0]} at {offset} is left out", _put(expr, found.span("matchers"), rest)
        # Each way in which a pattern matches is needed, and each one that it does not match.
        ways = matcher[3].strip('"').split("|")
        for way in ways if len(ways) > 1 else ():
            fewer = "|".join(other for other in ways if other != way)
            start, end = matcher.span(3)
            yield f"{way} of {matcher[0]} is left out", _put(expr, (offset + start, offset + end), f'"{fewer}"')


def _halves(expr: str, found: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yields the expression with either side alone, within the parentheses in which the operator stands."""
    start, end = _enclosing(expr, found.start())
    left, right = expr[start : found.start()].strip(), expr[found.end() : end].strip()
    yield f"right of {found['logic']} is left out", _put(expr, (start, end), left)
    if not found["logic"].startswith("unless"):
        yield f"left of {found['logic']} is left out", _put(expr, (start, end), right)


def _enclosing(expr: str, place: int) -> tuple[int, int]:
    depth, start = 0, place
    while start > 0:
        depth += {")": 1, "(": -1}.get(expr[start - 1], 0)
        if depth < 0:
            break
        start -= 1
    depth, end = 0, place
    while end < len(expr):
        depth += {"(": 1, ")": -1}.get(expr[end], 0)
        if depth < 0:
            break
        end += 1
    return start, end


def _put(text: str, span: tuple[int, int], new: str) -> str:
    return text[: span[0]] + new + text[span[1] :]


def mutants() -> Iterator[Mutant]:
    """Yields every broken rule."""
    for alert in ALERTS:
        name, for_ = alert["alert"], alert.get("for", "0m")
        for what, expr in broken(alert["expr"]):
            yield Mutant(f"{name}: {what}", [alert | {"expr": expr}], RECORDED)
        for other in ("20m",) if for_ == "0m" else ("0m", _doubled(for_)):
            yield Mutant(f"{name}: for {for_} becomes {other}", [alert | {"for": other}], RECORDED)
        other = "warning" if alert["labels"]["severity"] == "info" else "info"
        yield Mutant(f"{name}: the severity becomes {other}", [alert | {"labels": {"severity": other}}], RECORDED)
    for name, expr in RECORDED.items():
        readers = [alert for alert in ALERTS if name in needed(alert["expr"])]
        for what, other in broken(expr) if readers else ():
            yield Mutant(f"{name}: {what}", readers, RECORDED | {name: other}, is_record=True)


def _doubled(duration: str) -> str:
    return f"{2 * int(duration[:-1])}{duration[-1]}"


def judge(mutant: Mutant) -> Verdict:
    """Runs the tests of the mutant's alerts, as they are written for the rules that are not broken."""
    with tempfile.TemporaryDirectory(prefix="tandem-rules-") as folder:
        rules = [{"record": name, "expr": expr} for name, expr in mutant.records.items()]
        groups = [{"name": "mutant", "rules": [*rules, *mutant.alerts]}]
        (Path(folder) / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
        alerts, files = {alert["alert"] for alert in mutant.alerts}, []
        for file_name in TEST_FILES:
            document = tests_of(file_name, alerts, with_records=mutant.is_record)
            del document["group_eval_order"]
            if document["tests"]:
                (Path(folder) / file_name).write_text(yaml.safe_dump(document))
                files.append(file_name)
        checked = _promtool(folder, "check", "rules", "rules.yml")
        if checked.returncode:
            raise RuntimeError(f"{mutant.name} is no rule: {checked.stdout}{checked.stderr}")
        tested = _promtool(folder, "test", "rules", *files)
        return Verdict(mutant, tested.returncode != 0, tested.stdout + tested.stderr)


def _promtool(folder: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def main() -> int:
    """Tries all mutants, and prints those that no test has seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only rules whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="rules at a time (default 2)")
    parser.add_argument("--list", action="store_true", help="only name the broken rules")
    options = parser.parse_args()
    chosen = [one for one in mutants() if not options.names or any(name in one.name for name in options.names)]
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    whole = judge(Mutant("nothing", ALERTS, RECORDED, is_record=True))
    if whole.failed:
        print(whole.output)
        return 2
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, chosen):
            if not verdict.failed:
                survivors.append(verdict.mutant.name)
                print(f"no test sees {verdict.mutant.name}", flush=True)
    print(f"{len(chosen)} broken rules, {len(survivors)} of which no test has seen")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
