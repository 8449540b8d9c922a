"""The secret that a cluster's processes share through their Redis, where no file or variable gives them one.

Every process that can write to that Redis is then a member. It is asked again with each renewal and each look at the
workers, so a Redis that has lost its memory has the secret back within a second, from whichever process is first. A
process that has only just started may be that one and put its own there; the others adopt it and keep theirs beside it.
"""

import redis

from services.cluster.keys import Keys
from services.cluster.redis_store import Script, Store, run_script
from services.runtime.cluster_secret import SHARED_CHARACTERS, Secrets


def share(client: "redis.Redis", keys: Keys, secrets: Secrets) -> None:
    """Takes over the secret that Redis holds, or puts ours there; for a thread's connection. Raises RedisError."""
    if secrets.is_shared:
        secrets.adopt(run_script(client, _SHARE, (keys.secret,), (secrets.offer, SHARED_CHARACTERS)))


async def share_through(store: Store, secrets: Secrets) -> None:
    """Takes over the secret that Redis holds, or puts ours there; on an event loop. Raises StoreUnavailable."""
    if secrets.is_shared:
        secrets.adopt(await store.run(_SHARE, (store.keys.secret,), (secrets.offer, SHARED_CHARACTERS)))


# KEYS: the secret. ARGV: ours, its length. Answers what it is from now on: what the key held, unless that was no
# secret.
_SHARE = Script("""
local held = redis.call('TYPE', KEYS[1]).ok == 'string' and redis.call('GETRANGE', KEYS[1], 0, ARGV[2])
if held and #held == tonumber(ARGV[2]) and not string.find(held, '%X') then return held end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
""")
