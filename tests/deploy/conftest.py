"""Tests of deploy/ need tools that only `make test-deploy` installs."""

from pathlib import Path

import pytest

from tests.deploy.manifests import TOOLS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (TOOLS / ".installed").exists():
        return
    reason = pytest.mark.skip(reason="needs the tools that `make test-deploy` installs")
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(reason)
