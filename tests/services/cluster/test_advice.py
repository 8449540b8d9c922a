"""Advice about a Redis that fails, by the texts of Redis 7.0 and of later versions and Valkey."""

import contextlib

import pytest
import redis

from services.cluster.advice import is_permission_denied, redis_remedy
from services.cluster.redis_store import Script, Store
from services.runtime.errors import StoreUnavailable
from tests.limited_redis import USER, LimitedRedis
from tests.waiting import until

DENIED = {
    "User tandem has no permissions to run the 'time' command": "add +time to the ACL rules of tandem",
    "this user has no permissions to run the 'time' command": "add +time to the ACL rules of the user in --redis",
    "ACL failure in script: User tandem has no permissions to run the 'del' command script: on @user_script:1.": "+del",
    "The user executing the script can't run this command or subcommand script: 104ae, on @user_script:1.": "ACL LOG",
    "No permissions to access a key": "~tandem:*",
    "ACL failure in script: No permissions to access a key script: on @user_script:1.": "~tandem:*",
    "The user executing the script can't access at least one of the keys mentioned": "~tandem:*",
    "this user has no permissions to access one of the channels used as arguments": "&tandem:*",
}
OTHERS = {
    "invalid username-password pair or user is disabled.": "password",
    "Error 111 connecting to 127.0.0.1:1. Connection refused.": "start Redis",
    "Redis did not answer in time": "network",
}


@pytest.mark.parametrize(("error", "advice"), [*DENIED.items(), *OTHERS.items()])
def test_each_error_has_its_advice(error: str, advice: str) -> None:
    assert advice in redis_remedy(error)
    assert is_permission_denied(error) == (error in DENIED)
    assert "several-machines.md" in redis_remedy(error) or error in OTHERS


async def test_a_real_server_that_denies_a_command_is_unavailable_and_the_rule_is_named() -> None:
    with LimitedRedis() as server, redis.Redis.from_url(server.admin_url) as admin:
        store = Store(server.url, cluster="test", timeout_s=5.0)
        now = Script("return redis.call('TIME')")
        try:
            await store.run(now, (), ())
            assert store.is_up
            admin.execute_command("ACL", "SETUSER", USER, "-time")
            with pytest.raises(StoreUnavailable):
                await store.run(now, (), ())
            assert not store.is_up
            remedy = redis_remedy(store.last_failure)
            assert "+time" in remedy or "ACL LOG" in remedy, store.last_failure
            admin.execute_command("ACL", "SETUSER", USER, "+time")

            async def is_up() -> bool:
                with contextlib.suppress(StoreUnavailable):  # The breaker is open for a second.
                    await store.run(now, (), ())
                return store.is_up

            await until(is_up)
        finally:
            await store.close()
