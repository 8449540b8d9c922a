"""The packages that come with an extra of the distribution, and what to say where they are not installed."""

import importlib.util

from services.runtime.errors import ConfigError

DISTRIBUTION = "tandem-serving"
PACKAGES = {"worker": ("torch", "numpy", "safetensors", "xxhash")}
"""What pyproject.toml lists for each extra, as it is imported."""


def check(extra: str) -> None:
    """Returns where the packages of an extra are installed. Raises ConfigError, which says how to install them."""
    missing = [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a {extra} needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed here: "
            f"pip install '{DISTRIBUTION}[{extra}]'"
        )
