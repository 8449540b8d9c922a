"""What the clients' programs share: where the server is, and how they tell what works. They import nothing of ours."""

import json
import os
import sys
from collections.abc import Callable

URL = os.environ["COMPAT_URL"]
GRPC = os.environ["COMPAT_GRPC"]
KEY = os.environ["COMPAT_KEY"]
MODEL = os.environ["COMPAT_MODEL"]

_results: dict[str, str] = {}


def check(name: str) -> Callable[[Callable[[], None]], None]:
    """Runs the function that follows, and notes whether it raised."""

    def run(function: Callable[[], None]) -> None:
        try:
            function()
            _results[name] = ""
        except Exception as error:  # noqa: BLE001 - whatever a client raises is the finding
            _results[name] = f"{type(error).__name__}: {error}"[:300]

    return run


def finish(version: str) -> None:
    """Tells all findings, as JSON."""
    json.dump({"version": version, "checks": _results}, sys.stdout)
