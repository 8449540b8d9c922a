"""Tests of real time. They run alone on the machine, one at a time: `make test-timing`, a part of `make test-all`."""

from pathlib import Path

import pytest

from tests.gateway.conftest import model_folder
from tests.gateway.models.test_tokenizer import model
from tests.services.cluster.conftest import client, patient_store, redis_server, store
from tests.services.cluster.test_rate_limits import gateways
from tests.services.structured.conftest import begin, demo_tokenizer, grammars

__all__ = [
    "begin",
    "client",
    "demo_tokenizer",
    "gateways",
    "grammars",
    "model",
    "model_folder",
    "patient_store",
    "redis_server",
    "store",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, so that no other run includes them."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.timing)
