"""Places for messages that are being received: how many at once, for which account, and which one is cut off.

A message's size is known only when it has arrived, so each counts as the largest until then. Knows no gRPC.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from services.runtime.errors import InvalidRequest, Overloaded, RateLimited

STRANGERS = "\0strangers"
"""The account of callers that need no key, such as probes."""
OPERATORS = "\0operators"
"""The account of callers with an operator's certificate."""
ACCOUNT_PART = 4
"""An account may have one part in this many of all places; the empty account, everybody without keys, all of them."""
MAX_WAITING = 256
"""The most calls of one account that wait for a place."""
RECEIVE_TIMEOUT_S = 30.0
"""Time for a message to arrive, and before that for a place."""
STRANGERS_TIMEOUT_S = 5.0
PATIENCE_S = 2.0
"""A message that has been on its way for longer loses its place when others wait for one."""
RETRY_AFTER_S = 1.0


class Places:
    """At most `num_places` messages are being received at once. To be used on one event loop."""

    def __init__(self, num_places: int) -> None:
        assert num_places > 0
        self.num_taken = 0
        self.num_refused: Counter[str] = Counter()
        """Calls without a place, by "waiting" (too many wait), "time" (none came free) and "cut off"."""
        self._num_places = num_places
        self._held: dict[str, list[_Place]] = {}
        """By account, oldest first."""
        self._waiting: dict[str, deque[asyncio.Future[_Place]]] = {}
        """By account, in the order in which they come to their turn."""

    @contextlib.asynccontextmanager
    async def place(self, account: str) -> AsyncIterator[None]:
        """The time in which one message is received.

        Raises RateLimited where too many of the account wait or others need the place, Overloaded where none comes
        free, InvalidRequest where the message takes too long.
        """
        place = self._take(account) if self._has_room(account) else await self._wait_for(account)
        limit = place.limit = asyncio.timeout(_timeout_s(account))
        try:
            async with limit:
                if place.is_cut_off:
                    limit.reschedule(0)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late(place) from None
        finally:
            self._give_back(place)

    def _late(self, place: "_Place") -> InvalidRequest | RateLimited:
        if not place.is_cut_off:
            return InvalidRequest(f"the message did not arrive within {_timeout_s(place.account):g} s")
        self.num_refused["cut off"] += 1
        return RateLimited(
            f"the message was on its way for more than {_patience_s(place.account):g} s while others waited",
            retry_after_s=RETRY_AFTER_S,
            limit="message_memory",
        )

    def _has_room(self, account: str) -> bool:
        return self.num_taken < self._num_places and len(self._held.get(account, ())) < self._most_of(account)

    def _most_of(self, account: str) -> int:
        return self._num_places if not account else max(1, self._num_places // ACCOUNT_PART)

    def _take(self, account: str) -> "_Place":
        place = _Place(account, asyncio.get_running_loop().time())
        self._held.setdefault(account, []).append(place)
        self.num_taken += 1
        return place

    def _give_back(self, place: "_Place") -> None:
        held = self._held[place.account]
        held.remove(place)
        if not held:
            del self._held[place.account]
        self.num_taken -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Gives free places to those that wait, the accounts in turn."""
        for account in list(self._waiting):
            if not self._has_room(account):
                continue
            waiting = self._waiting.pop(account)
            waiting.popleft().set_result(self._take(account))
            if waiting:
                self._waiting[account] = waiting  # behind all others

    async def _wait_for(self, account: str) -> "_Place":
        if len(self._waiting.get(account, ())) >= MAX_WAITING:
            self.num_refused["waiting"] += 1
            raise RateLimited(
                f"{MAX_WAITING} calls of this tenant wait to be received already",
                retry_after_s=RETRY_AFTER_S,
                limit="message_memory",
            )
        future: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(future)
        is_taken = False
        try:
            async with asyncio.timeout(_timeout_s(account)):
                while True:
                    self._cut_off_one(account)
                    await asyncio.wait((future,), timeout=PATIENCE_S)
                    if future.done():
                        is_taken = True
                        return future.result()
        except TimeoutError:
            self.num_refused["time"] += 1
            raise Overloaded("too many messages are being received", retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._stop_waiting(account, future)
            if future.done() and not is_taken:
                self._give_back(future.result())

    def _stop_waiting(self, account: str, future: "asyncio.Future[_Place]") -> None:
        waiting = self._waiting.get(account)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[account]

    def _cut_off_one(self, account: str) -> None:
        """Takes the place of the oldest message that stands in the way of this account, unless it is still young."""
        own = self._held.get(account, [])
        crowded = own if len(own) >= self._most_of(account) else max(self._held.values(), key=len, default=[])
        oldest = next((place for place in crowded if not place.is_cut_off), None)
        if oldest is None:
            return
        if asyncio.get_running_loop().time() - oldest.taken_at_s >= _patience_s(oldest.account):
            oldest.cut_off()


class _Place:
    __slots__ = ("account", "is_cut_off", "limit", "taken_at_s")

    def __init__(self, account: str, taken_at_s: float) -> None:
        self.account = account
        self.taken_at_s = taken_at_s
        self.is_cut_off = False
        self.limit: asyncio.Timeout | None = None

    def cut_off(self) -> None:
        self.is_cut_off = True
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(0)


def _timeout_s(account: str) -> float:
    return STRANGERS_TIMEOUT_S if account == STRANGERS else RECEIVE_TIMEOUT_S


def _patience_s(account: str) -> float:
    return 0.0 if account == STRANGERS else PATIENCE_S
