"""What a start's time is made of and no busy machine changes: how much is imported, and that nothing is compiled.

`python -m benchmarks.startup` has the seconds.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).parents[1]
MOST_MODULES = {
    "cli.main": 200,
    "cli.up": 550,
    "gateway.__main__": 950,
    "prefill_worker.__main__": 1800,
    "decode_worker.__main__": 1800,
    "dual_worker.__main__": 1800,
}
"""At most about a fifth more than there are; torch alone has 1,100."""
NOT_AT_START = {
    *("transformers", "triton", "sympy", "pandas", "scipy", "networkx"),
    *("torch._dynamo", "torch._inductor", "pytest", "hypothesis", "setuptools", "pip"),
}
"""Each takes long to import and is used, if at all, when a request comes."""

LIST = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""


@pytest.fixture(scope="module", params=MOST_MODULES)
def program(request):
    """A program's module, and the modules that its import loads, with their files."""
    command = [sys.executable, "-c", LIST, request.param]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S)
    return request.param, json.loads(listed.stdout)


def test_no_more_is_imported_than_a_start_has_time_for(program):
    name, modules = program
    assert len(modules) <= MOST_MODULES[name]
    assert NOT_AT_START & modules.keys() == set()


def test_installing_leaves_nothing_to_compile(program):
    stamp = Path(sys.prefix) / ".installed"
    if not stamp.is_file() or stamp.read_text().strip() != wanted_stamp():
        pytest.skip("this environment was not made by this tools/install.sh")
    files = [Path(file) for file in program[1].values() if file and file.endswith(".py")]
    installed = [file for file in files if file.is_relative_to(sys.prefix)]
    assert installed
    assert [file for file in installed if not Path(importlib.util.cache_from_source(str(file))).is_file()] == []


def wanted_stamp() -> str:
    """What tools/install.sh writes when it has finished."""
    parts = [f"{ROOT}\n".encode()]
    inputs = ("pyproject.toml", "constraints.txt", "requirements/serve.lock", "tools/install.sh")
    parts += [(ROOT / name).read_bytes() for name in inputs]
    return hashlib.sha256(b"".join(parts)).hexdigest()
