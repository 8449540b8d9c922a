import socket

import pytest

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.probe import probe
from services.runtime.errors import ConfigError, StoreUnavailable


def test_a_redis_says_what_it_is(redis_server: EmbeddedRedis) -> None:
    facts = probe(redis_server.url)
    assert 0 < facts.ping_s < 1
    assert abs(facts.clock_ahead_s) < 5
    assert facts.version.count(".") == 2
    assert facts.used_bytes > 0


def test_one_that_is_none() -> None:
    with pytest.raises(ConfigError):
        probe("http://127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreUnavailable):
        probe(f"redis://127.0.0.1:{port}")
