"""Tests of real time. They run alone on the machine, one at a time: `make test-timing`, a part of `make test-all`."""

from pathlib import Path

import pytest

from tests.gateway.conftest import (
    cluster_name,
    make_system,
    model_folder,
    pair_type,
    patience,
    redis_url,
    tokenizer,
    worker_type,
)
from tests.gateway.models.test_tokenizer import model
from tests.gateway.observability.test_tracing import answer, pair, spans, system
from tests.services.cluster.conftest import client, new_record, patient_store, redis_server, store
from tests.services.cluster.test_rate_limits import gateways
from tests.services.structured.conftest import begin, demo_tokenizer, grammars

__all__ = [
    "answer",
    "begin",
    "client",
    "cluster_name",
    "demo_tokenizer",
    "gateways",
    "grammars",
    "make_system",
    "model",
    "model_folder",
    "new_record",
    "pair",
    "pair_type",
    "patience",
    "patient_store",
    "redis_server",
    "redis_url",
    "spans",
    "store",
    "system",
    "tokenizer",
    "worker_type",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, so that no other run includes them."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.timing)
