"""The kernels that the engine would launch compile for an H100, on any machine, and keep to its registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[4] / "tools" / "compile_kernels.py"
KERNELS = [
    "_norm",
    "_rope_and_write",
    "_prefill_tiles",
    "_decode_splits",
    "_join_splits",
    "_silu_and_multiply",
    "_choose_in_block",
    "_choose_among_blocks",
]


def compiled(*models: str) -> str:
    # A process of its own: in this one kernels are interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), *models]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)  # seconds of a core, and there may be few
def test_kernels_compile_for_an_h100_and_spill_nothing() -> None:
    output = compiled("Qwen3-0.6B")
    for kernel in KERNELS:
        assert kernel in output
    for kernel in ("_prefill_tiles", "_decode_splits"):
        assert any(kernel in line and "tensor cores" in line for line in output.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_of_every_shape_spill_nothing() -> None:
    compiled("all")
