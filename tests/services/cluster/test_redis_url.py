"""What a Redis URL says, and what is said of one that is wrong."""

from pathlib import Path

import pytest

from services.cluster.redis_url import SENTINEL_PORT, check_url, sentinels_of
from services.runtime.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "http://x",
        "localhost:6379",
        "",
        "redis://127.0.0.1:port",
        "redis://127.0.0.1/?no_such_word=1",
        "redis+sentinel://one,two",
        "redis+sentinel:///service",
        "redis+sentinel://one:port/service",
    ],
)
def test_a_url_that_cannot_be_used_is_a_settings_error(url: str) -> None:
    with pytest.raises(ConfigError):
        check_url(url)


@pytest.mark.parametrize(
    "url", ["redis://localhost", "rediss://u:p@h:1/2", "unix:///run/redis.sock", "redis+sentinel://a,b:7,[::1]:8/main"]
)
def test_a_url_that_can_be_used_is_given_back(url: str) -> None:
    assert check_url(url) == url


def test_no_error_shows_the_password() -> None:
    with pytest.raises(ConfigError) as refused:
        check_url("redis://user:hunter2@127.0.0.1:port")
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(refused.value.__cause__)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        check_url(f"rediss://h?ssl_ca_certs={tmp_path}/none")


def test_sentinels_their_service_and_both_passwords() -> None:
    found = sentinels_of("rediss+sentinel://u:p@a,b:7,[::1]:8/my%20service/3?sentinel_password=s&socket_timeout=2")
    assert found is not None
    assert found.addresses == (("a", SENTINEL_PORT), ("b", 7), ("::1", 8))
    assert (found.service, found.has_tls) == ("my service", True)
    assert (found.server["username"], found.server["password"], found.server["db"]) == ("u", "p", 3)
    assert "sentinel_password" not in found.server
    assert found.sentinel == {"password": "s"}
    assert sentinels_of("redis://a") is None
