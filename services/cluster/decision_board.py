"""The last decisions of a cluster's autoscaler, for gateways to show: a text in Redis. Does not know how it decides."""

import msgspec

from services.cluster.redis_store import Script, Store

NUM_KEPT = 10
KEPT_S = 86_400
MAX_CHARS = 1000
"""A longer text is cut."""


class ShownDecision(msgspec.Struct, frozen=True):
    """What was ordered at a moment, in seconds since 1970, or why it could not be; and why it was wanted."""

    at_unix_s: float
    done: str
    reason: str


class DecisionBoard:
    """The list of one cluster, to which one autoscaler adds at a time. Its methods raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, decision: ShownDecision) -> None:
        """Adds a decision; beyond NUM_KEPT, the oldest is dropped."""
        cut = ShownDecision(decision.at_unix_s, decision.done[:MAX_CHARS], decision.reason[:MAX_CHARS])
        kept = [cut, *await self.read()][:NUM_KEPT]
        await self._store.run_patiently(_PUT, (self._store.keys.decisions,), (msgspec.json.encode(kept), KEPT_S))

    async def read(self) -> list[ShownDecision]:
        """Returns the decisions, latest first; no one where something else stands in their place."""
        found = await self._store.run_patiently(_READ, (self._store.keys.decisions,), ())
        try:
            return msgspec.json.decode(found or b"[]", type=list[ShownDecision])[:NUM_KEPT]
        except (msgspec.DecodeError, TypeError):
            return []


_PUT = Script("return redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])")
_READ = Script("return redis.call('GET', KEYS[1])")
