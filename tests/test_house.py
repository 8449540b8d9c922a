"""The house keeps its size: how long files and functions are, and the core path that the architecture page names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("services", "kv_transfer", "worker", "gateway", "prefill_worker", "decode_worker", "planning", "cli")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
MAX_CORE_FILES, MAX_CORE_LINES = 20, 8_000

LONG_FILES = {
    "kv_transfer/protocol/receiver.py": 557,
    "services/engine/cache/pages.py": 700,
    "services/scheduling/queue.py": 519,
}
"""Those that are longer, and what they may have at most: the lists become shorter, and never longer."""
LONG_FUNCTIONS: dict[str, int] = {}


def sources() -> Iterator[tuple[str, str]]:
    """Each module's path and text, without generated ones."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def functions(node: ast.AST, path: str = "") -> Iterator[tuple[str, int]]:
    """Each function's name within its module, and its lines."""
    for child in ast.iter_child_nodes(node):
        name = path
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{path}.{child.name}" if path else child.name
            if not isinstance(child, ast.ClassDef):
                yield name, (child.end_lineno or child.lineno) - child.lineno + 1
        yield from functions(child, name)


def judged(lines: dict[str, int], most: int, exceptions: dict[str, int]) -> list[str]:
    """What is too long, and which exceptions are not needed."""
    too_long = [f"{name}: {num} lines" for name, num in lines.items() if num > max(most, exceptions.get(name, 0))]
    return too_long + [f"{name}: no exception any longer" for name in exceptions if lines.get(name, 0) <= most]


def test_no_file_is_too_long() -> None:
    assert judged({name: len(text.splitlines()) for name, text in sources()}, MAX_FILE_LINES, LONG_FILES) == []


def test_no_function_is_too_long() -> None:
    lines = {
        f"{name}:{function}": num
        for name, text in sources()
        if not name.endswith("_triton.py")  # a kernel is one function
        for function, num in functions(ast.parse(text))
    }
    assert len(lines) > 2000
    assert judged(lines, MAX_FUNCTION_LINES, LONG_FUNCTIONS) == []


def test_no_two_public_classes_of_a_package_have_one_name() -> None:
    homes: dict[tuple[str, str], list[str]] = {}
    for path, text in sources():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault((path.partition("/")[0], node.name), []).append(path)
    assert len(homes) > 800
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_what_is_judged() -> None:
    assert judged({"a": 500, "b": 501, "c": 600, "d": 601}, 500, {"c": 600, "d": 600}) == [
        "b: 501 lines",
        "d: 601 lines",
    ]
    assert judged({"a": 500}, 500, {"a": 600, "gone": 600}) == [
        "a: no exception any longer",
        "gone: no exception any longer",
    ]


def test_the_core_path_can_be_read_in_a_day() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## The core path")[2]
    files = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert 15 < len(files) <= MAX_CORE_FILES
    assert sum(len((ROOT / name).read_text().splitlines()) for name in files) <= MAX_CORE_LINES


def test_the_page_names_every_room_of_the_gateway() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.name for path in (ROOT / "gateway").iterdir() if (path / "__init__.py").exists()}
    assert len(rooms) > 10
    assert {name for name in rooms if f"| `{name}/` |" not in page} == set()
