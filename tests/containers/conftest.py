"""Tests of containers run when they are asked for: they need images, podman, and most of a machine."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") == "containers":
        return
    reason = pytest.mark.skip(reason="`make test-containers` runs them")
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(reason)
