"""What a Redis says of itself, asked once: it shows whether a cluster can rely on that Redis."""

import time
from dataclasses import dataclass

import redis

from services.cluster.redis_store import thread_client
from services.runtime.errors import StoreUnavailable

NUM_PINGS = 20


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """`ping_s`: the middle one of several round trips. `clock_ahead_s`: how far its clock is ahead of ours, with an
    error of half a round trip at most. `max_bytes` 0: no limit. `eviction`: what happens at the limit, such as
    `noeviction`; `num_evicted_keys`: those that were thrown away since its start.
    """

    version: str
    ping_s: float
    clock_ahead_s: float
    used_bytes: int
    max_bytes: int
    eviction: str
    num_evicted_keys: int = 0


def probe(url: str) -> RedisFacts:
    """Asks the Redis at `url`.

    Raises:
        ConfigError: the URL is of another kind.
        StoreUnavailable: no Redis answers there, or it answers with an error.
    """
    client = thread_client(url)
    try:
        pings = []
        for _ in range(NUM_PINGS):
            started_s = time.perf_counter()
            client.ping()
            pings.append(time.perf_counter() - started_s)
        seconds, microseconds = client.time()
        ahead_s = seconds + microseconds / 1e6 - time.time()
        server, memory, stats = client.info("server"), client.info("memory"), client.info("stats")
    except redis.RedisError as error:
        raise StoreUnavailable(f"Redis does not answer: {error}") from error
    finally:
        client.close()
    return RedisFacts(
        version=str(server.get("redis_version", "unknown")),
        ping_s=sorted(pings)[NUM_PINGS // 2],
        clock_ahead_s=ahead_s,
        used_bytes=int(memory.get("used_memory", 0)),
        max_bytes=int(memory.get("maxmemory", 0)),
        eviction=str(memory.get("maxmemory_policy", "unknown")),
        num_evicted_keys=int(stats.get("evicted_keys", 0)),
    )
