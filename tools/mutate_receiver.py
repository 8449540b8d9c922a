#!/usr/bin/env python3
"""Takes each check of the handoff's receiver out, one at a time, and sees that a test of the protocol fails.

usage: tools/mutate_receiver.py [--list] [--jobs N] [NAME ...]     (NAME: only mutants whose name contains it)

The checks are found in the source: each condition in FILES that becomes false, each part of an `and` or `or` that is
left out, and the statements of STATEMENTS that are removed. Each mutant is a copy of the protocol in a temporary
folder; the tree itself is never touched. Exit status: 0 all killed, 1 one survived, 2 the lists below no longer fit the
source.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis.stateful  # noqa: F401 - loaded once, for all the forks
import pytest
import xxhash  # noqa: F401
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
PROTOCOL = Path("kv_transfer/protocol")
TRANSFER = "receiver_transfer.py"
FILES = ("receiver.py", TRANSFER, "frames.py", "fence.py")
COPIED = (PROTOCOL, Path("tests/kv_transfer/protocol"))
COPIED_FILES = (
    "kv_transfer/__init__.py",
    "services/__init__.py",
    "services/runtime/__init__.py",
    "services/runtime/errors.py",
    "tests/examples.py",
)
SETTINGS = "[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n"
# The quick ones first: most mutants end there.
TESTS = ("test_fence.py", "test_frames.py", "test_receiver.py", "test_sender.py", "test_properties.py")
TIMEOUT_S = 300.0

# Statements that are a check or the record that one needs: (file, function, statement, replacement).
STATEMENTS: tuple[tuple[str, str, str, str], ...] = (
    ("receiver.py", "", "MAX_CHECKSUM_MISMATCHES = 3", "MAX_CHECKSUM_MISMATCHES = 10**9"),
    (TRANSFER, "ReceiverTransfer.fail", "actions.append(Revoke(self.id))", "pass"),
    (
        TRANSFER,
        "ReceiverTransfer.on_chunk",
        "self._mark_covered(header.first_page, header.num_pages)",
        "pass",
    ),
    (TRANSFER, "ReceiverTransfer.on_chunk", "self._num_outstanding += 1", "pass"),
    (TRANSFER, "ReceiverTransfer._release_when_idle", "self._holds_pages = False", "pass"),
    ("receiver.py", "ReceiverLink._on_abort", "self._fence.close(message.id)", "pass"),
    ("receiver.py", "ReceiverLink.placement", "self._num_checksum_mismatches += 1", "pass"),
    ("receiver.py", "ReceiverLink.on_message", "self._liveness.heard(now)", "pass"),
    ("frames.py", "PlacementTable.revoke", "ticket.is_wanted = False", "pass"),
    ("frames.py", "PlacementTable.begin", "self._last_seq = seq", "pass"),
    ("frames.py", "PlacementTable.begin", "ticket.is_busy = True", "pass"),
    ("frames.py", "PlacementTable.finish", "ticket.is_busy = False", "pass"),
    ("frames.py", "PlacementTable.close", "self._is_closed = True", "pass"),
    ("frames.py", "PlacementTable.close", "self._tickets.clear()", "pass"),
    ("frames.py", "PlacementTable._withdraw", "self._last_seq = ticket.end_seq - 1", "pass"),
    ("frames.py", "PlacementTable._lose", "ticket.is_wanted = False", "pass"),
    ("fence.py", "Fence.leave", "entry.is_running = False", "pass"),
    ("fence.py", "Fence.leave", "entry.is_committed = is_committed", "pass"),
)

# Changes that nothing can tell, with the reason: (file, function, change).
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        TRANSFER,
        "ReceiverTransfer._end",
        "is_committed: never",
    ): "a committed transfer has no error anyway",
    (
        "receiver.py",
        "ReceiverLink._on_abort",
        "message.id is not None: always",
    ): "for the type checker: no transfer has the id None",
    (
        "receiver.py",
        "ReceiverLink._on_abort",
        "message.id is None: never",
    ): "for the type checker: on_message lets no Abort without an id through",
    (
        TRANSFER,
        "ReceiverTransfer._release_when_idle",
        "TransferFailed('the transfer failed'): left out",
    ): "for the type checker: a failed transfer has an error",
    (
        "frames.py",
        "PlacementTable.begin",
        "ticket.is_wanted: left out",
    ): "_lose asks again",
}


@dataclass(frozen=True)
class Mutant:
    """One change: `text` is the whole changed file."""

    name: str
    file: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """Which test killed the mutant; None if none did."""

    mutant: Mutant
    killer: str | None


class _Conditions(ast.NodeVisitor):
    """Collects (function, node, replacement, what) for each condition and each of its parts."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.expr, ast.expr, str]] = []
        self._path: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def visit_If(self, node: ast.If) -> None:
        self._add(node.test, ast.Constant(False), "never")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(node.test, ast.Constant(False), "never")
        self._add(node.test, ast.Constant(True), "always")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add(test, ast.Constant(True), "always")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for part in node.values:
            self._add(part, ast.Constant(isinstance(node.op, ast.And)), "left out")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        weaker = {ast.LtE: ast.Lt, ast.Lt: ast.LtE, ast.GtE: ast.Gt, ast.Gt: ast.GtE}
        if len(node.ops) == 1 and type(node.ops[0]) in weaker:
            other = copy.deepcopy(node)
            other.ops = [weaker[type(node.ops[0])]()]
            self._add(node, other, f"becomes {ast.unparse(other)}")
        self.generic_visit(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    def _add(self, node: ast.expr, replacement: ast.expr, what: str) -> None:
        self.found.append((".".join(self._path), node, replacement, what))


class StaleList(Exception):
    """An entry of a list in this file fits nothing in the source."""


def mutants_of(file: str, root: Path) -> Iterator[Mutant]:
    """Yield all mutants of one file below `root`. Raises StaleList."""
    source = (root / PROTOCOL / file).read_text()
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    conditions = _Conditions()
    conditions.visit(tree)
    unused = {each for each in EQUIVALENT if each[0] == file}
    for where, node, replacement, what in conditions.found:
        text = ast.unparse(node)
        key = (file, where, f"{text}: {what}")
        if key in EQUIVALENT:
            unused.discard(key)
            continue
        yield Mutant(f"{file}:{node.lineno} {where}: {text}: {what}", file, _replaced(lines, node, replacement))
    if unused:
        raise StaleList(f"in EQUIVALENT, but not in {file}: {sorted(unused)}")
    for name, where, statement, other in STATEMENTS:
        if name != file:
            continue
        matches = [each for path, each in _statements(tree, "") if path == where and ast.unparse(each) == statement]
        if len(matches) != 1:
            raise StaleList(f"{file}, {where}: {len(matches)} times `{statement}`, not once")
        text = _replaced(lines, matches[0], ast.parse(other).body[0])
        change = "removed" if other == "pass" else f"becomes {other}"
        yield Mutant(f"{file}:{matches[0].lineno} {where}: {statement}: {change}", file, text)


def _statements(node: ast.AST, path: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        inner = path
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{path}.{child.name}".strip(".")
        elif isinstance(child, ast.stmt):
            yield path, child
        yield from _statements(child, inner)


def _replaced(lines: list[str], node: ast.expr | ast.stmt, replacement: ast.AST) -> str:
    """Return the source with the text of one node replaced, in parentheses where it is an expression."""
    text = ast.unparse(replacement)
    if isinstance(node, ast.expr):
        text = f"({text})"
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    begin = sum(len(line.encode()) for line in lines[: node.lineno - 1]) + node.col_offset
    end = sum(len(line.encode()) for line in lines[: node.end_lineno - 1]) + node.end_col_offset
    whole = "".join(lines).encode()
    return (whole[:begin] + text.encode() + whole[end:]).decode()


class _Trial:
    """The protocol's tests in a process of their own, on a copy of the tree with one mutant in it."""

    def __init__(self, mutant: Mutant, original: Path, tests: Sequence[str]) -> None:
        self.mutant = mutant
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-mutant-")
        root = Path(self._folder.name) / "tree"
        shutil.copytree(original, root)
        if mutant.file:
            (root / PROTOCOL / mutant.file).write_text(mutant.text)
        self._report = root / "report.txt"
        # A fork has pytest and hypothesis loaded already; nothing of the tree is imported before.
        self._process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(root, self._report, tests))
        self._process.start()

    def verdict(self) -> Verdict:
        """Wait for the end and say which test failed first. Raises RuntimeError if the tests did not run."""
        self._process.join(TIMEOUT_S)
        try:
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
                return Verdict(self.mutant, "(the tests did not end)")
            report = self._report.read_text()
            if self._process.exitcode == 0:
                return Verdict(self.mutant, None)
            killer = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+?)(?: - .*)?$", report, re.MULTILINE)
            if self._process.exitcode != 1 or killer is None:
                raise RuntimeError(f"{self.mutant.name}: the tests could not be run:\n{report}")
            return Verdict(self.mutant, killer[1])
        finally:
            self._folder.cleanup()


def _copy_tree(to: Path) -> None:
    """Copy what the tests need, once: the tree may change while the mutants are tried."""
    for each in COPIED:
        shutil.copytree(ROOT / each, to / each, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED_FILES:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    (to / "pytest.ini").write_text(SETTINGS)


def _run_tests(root: Path, report: Path, tests: Sequence[str]) -> None:
    output = os.open(report, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    status = pytest.main(["-x", "-q", *(f"tests/kv_transfer/protocol/{name}" for name in tests)])
    sys.stdout.flush()
    os._exit(int(status))


def _verdicts(mutants: list[Mutant], num_jobs: int, original: Path, tests: Sequence[str]) -> Iterator[Verdict]:
    running: deque[_Trial] = deque()
    for mutant in mutants:
        running.append(_Trial(mutant, original, tests))
        if len(running) >= num_jobs:
            yield running.popleft().verdict()
    while running:
        yield running.popleft().verdict()


def main() -> int:
    """Try all mutants and print what became of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--list", action="store_true", help="only name the mutants")
    parser.add_argument("--properties", action="store_true", help="only the property tests; some mutants then survive")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as folder:
        original = Path(folder)
        _copy_tree(original)
        try:
            mutants = [mutant for file in FILES for mutant in mutants_of(file, original)]
        except StaleList as error:
            sys.stderr.write(f"{error}\n")
            return 2
        mutants = [each for each in mutants if not options.names or any(name in each.name for name in options.names)]
        if options.list:
            sys.stdout.write("".join(f"{each.name}\n" for each in mutants))
            return 0
        return _try_all(mutants, options.jobs, original, TESTS[-1:] if options.properties else TESTS)


def _try_all(mutants: list[Mutant], num_jobs: int, original: Path, tests: Sequence[str]) -> int:
    # These tests need no plugins, and loading them takes longer than most mutants live.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["TANDEM_ALL_EXAMPLES"] = "1"
    # Each mutant sees the same examples, and none is made smaller: that it fails is enough.
    quick = settings(settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
    settings.register_profile("mutants", quick)
    settings.load_profile("mutants")
    (unharmed,) = _verdicts([Mutant("nothing", "", "")], 1, original, tests)
    if unharmed.killer is not None:
        sys.stderr.write(f"the tests fail without any mutant: {unharmed.killer}\n")
        return 2
    num_survivors = 0
    for verdict in _verdicts(mutants, num_jobs, original, tests):
        num_survivors += verdict.killer is None
        outcome = "SURVIVED" if verdict.killer is None else "killed"
        sys.stdout.write(f"{outcome:<9} {verdict.mutant.name}\n          {verdict.killer or ''}\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"{len(mutants) - num_survivors} of {len(mutants)} killed, {len(EQUIVALENT)} known to be equivalent\n"
    )
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
