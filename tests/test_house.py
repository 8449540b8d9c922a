"""The house keeps its size: how long files and functions are, and the core path that the architecture page names."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "services",
    "kv_transfer",
    "worker",
    "gateway",
    "prefill_worker",
    "decode_worker",
    "dual_worker",
    "planning",
    "cli",
    "tandem",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
MAX_PARAMETERS, MAX_POSITIONAL = 6, 2
MAX_CORE_FILES, MAX_CORE_LINES = 20, 8_000

LONG_FILES: dict[str, int] = {}
"""Those that are longer, and what they may have at most: the lists become shorter, and never longer."""
LONG_FUNCTIONS: dict[str, int] = {}

MANY_PARAMETERS = {
    "decode_worker/engine_loop.py:decode_loop": 7,
    "decode_worker/scheduler.py:BatchScheduler.__init__": 7,
    "decode_worker/scheduler.py:BatchScheduler.add": 8,
    "gateway/requests/acceptance.py:Acceptance.__init__": 9,
    "gateway/requests/lifecycle.py:Requests.__init__": 14,
    "services/cluster/files.py:FileStore.commit": 7,
    "services/cluster/registry.py:WorkerLease.__init__": 7,
    "services/engine/engine.py:_with_pool": 8,
    "services/engine/engine.py:load_engine": 13,
}
MANY_POSITIONAL = {
    "cli": 12,
    "decode_worker": 7,
    "gateway": 78,
    "kv_transfer": 59,
    "planning": 11,
    "services": 80,
    "worker": 16,
}
"""Public functions of each package that take more than MAX_POSITIONAL arguments by position, from before the rule."""


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


def parameters(node: ast.AST, path: str = "", *, is_class: bool = False) -> Iterator[tuple[str, int, int]]:
    """Each function's name within its module, its parameters and those by position, without `self` and `cls`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{path}.{child.name}".lstrip(".")
            is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in child.decorator_list)
            given = child.args
            num_positional = len(given.posonlyargs) + len(given.args) - (is_class and not is_static)
            yield name, num_positional + len(given.kwonlyargs), num_positional
            yield from parameters(child, name)
        elif isinstance(child, ast.ClassDef):
            yield from parameters(child, f"{path}.{child.name}".lstrip("."), is_class=True)
        else:
            yield from parameters(child, path, is_class=is_class)


def is_public(name: str) -> bool:
    """Whether it is to be called from other modules; names with two underscores on both sides are."""
    return not any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


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


def test_no_function_has_too_many_parameters() -> None:
    found = [
        (f"{path}:{name}", num, num_positional)
        for path, text in sources()
        if not path.endswith("_triton.py")
        for name, num, num_positional in parameters(ast.parse(text))
    ]
    assert judged({name: num for name, num, _ in found}, MAX_PARAMETERS, MANY_PARAMETERS) == []
    many = Counter(
        name.partition("/")[0]
        for name, _, num_positional in found
        if num_positional > MAX_POSITIONAL and is_public(name.partition(":")[2])
    )
    assert {package: num for package, num in many.items() if num > MANY_POSITIONAL.get(package, 0)} == {}


def test_what_counts_as_a_parameter() -> None:
    text = (
        "class A:\n def f(self, a, /, b, *c, d, **e): ...\n @staticmethod\n def g(a): ...\ndef _h():\n def i(a, b): ..."
    )
    assert [*parameters(ast.parse(text))] == [("A.f", 3, 2), ("A.g", 1, 1), ("_h", 0, 0), ("_h.i", 2, 2)]
    assert [*map(is_public, ("A.f", "A.__init__", "_h", "A._f", "_h.i"))] == [True, True, False, False, False]


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
