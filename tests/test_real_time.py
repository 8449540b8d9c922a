"""No test outside `tests/timing` depends on the speed of the machine.

Each finding names the line and the fix. A line that must break a rule says why: `# real time: REASON`.
"""

import ast
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.waiting import HANG_LIMIT_S

TESTS = Path(__file__).parent
PROGRAMS = ("attack", "compat", "containers", "deploy", "faults", "fuzz", "machines", "monitoring", "timing", "traces")
"""Folders of programs that measure, and of tests that run alone."""
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
FIRST_IS_LIMIT = {"asyncio.timeout", "pytest.mark.timeout"}
LIMITS = {"timeout", "timeout_s", "within_s"}
SHORTEST_LIMIT_S = 10.0
"""A shorter limit belongs to the behavior under test, for example a deadline that must pass."""


def broken_rules(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the fix for each place that depends on the speed of the machine."""
    lines, tree = source.splitlines(), ast.parse(source)
    elapsed = {ast.unparse(node.targets[0]) for node in ast.walk(tree) if _keeps_elapsed_time(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _bounds_elapsed_time(node, elapsed):
            found = node.lineno, "asserts that something took little time: move it to tests/timing, or assert an effect"
        elif isinstance(node, ast.Call) and _has_short_limit(node):
            found = node.lineno, "has a time limit of its own: use HANG_LIMIT_S of tests/waiting.py"
        elif isinstance(node, ast.Call) and _has_fixed_port(node):
            found = node.lineno, "listens on a fixed port: use port 0, or free_port of tests/free_ports.py"
        else:
            continue
        if "# real time: " not in lines[found[0] - 1]:
            yield found


def _keeps_elapsed_time(node: ast.AST) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_elapsed_time(node.value)


def _bounds_elapsed_time(node: ast.Compare, elapsed: Set[str]) -> bool:
    operands = [node.left, *node.comparators]
    for index, operator in enumerate(node.ops):
        smaller = operands[index] if isinstance(operator, ast.Lt | ast.LtE) else None
        if isinstance(operator, ast.Gt | ast.GtE):
            smaller = operands[index + 1]
        parts = [] if smaller is None else ast.walk(smaller)
        if any(_is_elapsed_time(part) or (isinstance(part, ast.Name) and part.id in elapsed) for part in parts):
            return True
    return False


def _is_elapsed_time(node: ast.AST) -> bool:
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    return is_difference and isinstance(node.left, ast.Call) and _name(node.left) in CLOCKS


def _has_short_limit(node: ast.Call) -> bool:
    limits = [keyword.value for keyword in node.keywords if keyword.arg in LIMITS]
    if ast.unparse(node.func) in FIRST_IS_LIMIT or _name(node) in ("wait", "join", "result"):
        limits += node.args[:1]
    elif _name(node) in ("wait_for", "to_thread"):
        limits += node.args[1:2]
    values = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
    return any(isinstance(value, int | float) and SHORTEST_LIMIT_S <= value <= HANG_LIMIT_S for value in values)


def _has_fixed_port(node: ast.Call) -> bool:
    if _name(node) not in ("bind", "create_server", "start_server", "serve"):
        return False
    addresses = [part for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Tuple)]
    ports = [address.elts[1] for address in addresses if len(address.elts) == 2]
    return any(isinstance(port, ast.Constant) and isinstance(port.value, int) and port.value > 0 for port in ports)


def _name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_no_test_depends_on_the_speed_of_the_machine() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line} {way_out}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in PROGRAMS
        for line, way_out in broken_rules(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began_s < 2",
        "took_s = loop.time() - began_s\nassert 0.1 < took_s < 2",
        "assert 2 > time.perf_counter() - began_s",
        "async with asyncio.timeout(60):\n    pass",
        "await asyncio.wait_for(task, 15)",
        "subprocess.run(command, timeout=60)",
        "thread.join(30)",
        "pytestmark = pytest.mark.timeout(240)",
        "socket.create_server(('127.0.0.1', 8000))",
    ],
)
def test_each_rule_finds_what_breaks_it(source: str) -> None:
    assert list(broken_rules(source))


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began_s >= 2",
        "assert time.monotonic() < give_up_at_s",
        "async with asyncio.timeout(HANG_LIMIT_S):\n    pass",
        "await asyncio.wait_for(task, 0.1)",
        "socket.create_server(('127.0.0.1', 0))",
        "assert time.monotonic() - began_s < 2  # real time: the kernel's own timer",
    ],
)
def test_other_places_are_let_through(source: str) -> None:
    assert not list(broken_rules(source))
