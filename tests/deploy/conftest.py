"""Most tests of deploy/ need tools that only `make test-deploy` installs: those with the mark `deploy`."""

import pytest

from tests.deploy.manifests import TOOLS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (TOOLS / ".installed").exists():
        return
    reason = pytest.mark.skip(reason="needs the tools that `make test-deploy` installs")
    for item in items:
        if item.get_closest_marker("deploy") is not None:
            item.add_marker(reason)
