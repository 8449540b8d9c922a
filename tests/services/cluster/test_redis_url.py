"""What a Redis URL says, and what is said of one that is wrong."""

from pathlib import Path

import pytest

from services.cluster.redis_url import SENTINEL_PORT, check_url, sentinels_of
from services.runtime.config import Setting
from services.runtime.errors import ConfigError
from services.runtime.kinds import redis_url

SETTING = Setting("redis", kind=redis_url(), help="", default=None)


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


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "redis+sentinel"])
@pytest.mark.parametrize("password", ["hunter/2", "12/hunter", "hunter?2", "hunter#2", "a/b@c", "/", "a?b=c/d"])
def test_a_password_with_a_character_that_must_be_encoded_is_the_reason(scheme: str, password: str) -> None:
    url = f"{scheme}://tandem:{password}@host:6379/0"
    for check in (check_url, lambda url: SETTING.parse(url, "--redis")):
        with pytest.raises(ConfigError, match="%2F, %3F or %23") as refused:
            check(url)
        assert f"{password}@" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:a%2Fb%3Fc%23d@h:1/0",
        "redis://h/0?password=a@b&username=c@d",
        "redis://h?password=a@b",
        "unix:///run/a@b/redis.sock",
        "unix://u:p@/run/redis.sock",
        "redis+sentinel://u:p@a,b/service?sentinel_password=a@b",
    ],
)
def test_an_at_sign_that_is_allowed_is_no_reason(url: str) -> None:
    assert check_url(url) == redis_url().parse(url) == url


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
