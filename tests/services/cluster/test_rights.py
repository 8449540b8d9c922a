"""The rights of Redis' user in docs/several-machines.md: all that are needed, and none beside them."""

import importlib
import pkgutil
import re

import pytest
import redis

import services.cluster
from services.cluster import embedded_redis
from services.cluster.redis_store import Script
from tests.limited_redis import LimitedRedis, documented_rules, other_server

BESIDE_SCRIPTS = {"eval", "evalsha", "subscribe", "ping", "info"}
"""What connections, subscriptions and `tandem doctor` say; tests of this folder and of `integration` see them used."""


def commands_of_scripts() -> set[str]:
    found = set()
    for module in pkgutil.iter_modules(services.cluster.__path__):
        for value in vars(importlib.import_module(f"services.cluster.{module.name}")).values():
            if isinstance(value, Script):
                found |= {name.lower() for name in re.findall(r"redis\.p?call\(\s*'(\w+)'", value.body)}
                assert not re.search(r"redis\.p?call\(\s*[^'\s]", value.body), "a command that is not written out"
    return found


def test_the_guide_gives_the_rights_that_are_used_and_no_others() -> None:
    rules = documented_rules()
    assert rules[:5] == ["resetkeys", "~tandem:*", "resetchannels", "&tandem:*", "-@all"]
    assert all(rule.startswith("+") for rule in rules[5:])
    given = {rule.removeprefix("+") for rule in rules[5:]}
    assert given == commands_of_scripts() | BESIDE_SCRIPTS
    assert len(given) > 40


def test_the_user_reaches_nothing_else() -> None:
    with LimitedRedis() as server, redis.Redis.from_url(server.url, driver_info=None) as client:
        for command in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("GET", "other"), ("PUBLISH", "x", "y")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
        with pytest.raises(redis.exceptions.ResponseError, match=r"can.t access|ACL failure|No permissions"):
            client.eval("return redis.call('GET', 'other')", 0)
        assert len(server.refused()) == 6


def test_an_installed_redis_accepts_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    server = other_server()
    if server is None:
        pytest.skip("no redis-server is installed")
    monkeypatch.setattr(embedded_redis, "_binary", lambda: server)
    with LimitedRedis() as started, redis.Redis.from_url(started.url, driver_info=None) as client:
        assert client.ping()
        assert started.refused() == []
