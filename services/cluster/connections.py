"""Connections to Redis that are made in the background, and the round trip that they measure. Knows no command of ours.

The server may be the primary that sentinels name; they are asked for each new connection.

redis-py connects within the call that needs the connection. A call that waits for 0.1 s would never get one to a Redis
that is 40 ms away: connecting takes up to five round trips, and each try would begin again.
"""

import asyncio
import time
from typing import Any

from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from services.cluster.redis_url import CLIENT_OPTIONS, Sentinels, sentinels_of
from services.runtime.clock import Deadline

MAX_CONNECTIONS = 8
CONNECT_TIMEOUT_S = 5.0
"""Time-out of each step of connecting, and of each answer that nobody waits for any longer."""
SENTINEL_TIMEOUT_S = 0.5
"""Time-out of each step of asking one sentinel; then the next one is asked."""
MAX_ROUND_TRIP_S = 1.0
"""Longest round trip that is counted; a longer one is of a Redis that stood still, not of one that is far."""


AWAY_AFTER_S = 3.0
"""Redis counts as unavailable after calls have failed for this long without an answer in between."""
BACK_AFTER_S = 2.0
"""Redis counts as available again after calls have been answered for this long."""


class RoundTrip:
    """The smoothed time of a round trip and its variation, as TCP's (RFC 6298)."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Mean round trip of calls that were answered. 0 until one was measured."""
        self.waited_s = 0.0
        """Mean time that calls waited, including calls that timed out."""
        self._variation_s = 0.0

    def observe_wait(self, seconds: float) -> None:
        """Records how long a call waited, whether it was answered or timed out."""
        self.waited_s += (seconds - self.waited_s) / 8 if self.waited_s else seconds

    def observe(self, seconds: float) -> None:
        """Takes one measurement."""
        seconds = min(seconds, MAX_ROUND_TRIP_S)
        if not self.mean_s:
            self.mean_s, self._variation_s = seconds, seconds / 2
            return
        self._variation_s += (abs(seconds - self.mean_s) - self._variation_s) / 4
        self.mean_s += (seconds - self.mean_s) / 8

    @property
    def limit_s(self) -> float:
        """Nearly all round trips are shorter than this, in seconds."""
        return self.mean_s + 4 * self._variation_s


class Availability:
    """Whether Redis answers, without flapping if only some calls time out. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._failing_since_s: float | None = None
        """Time of the first failure after the last answer. None if the last call was answered."""
        self._answering_since_s: float | None = None
        """Time of the first answer after an outage. None if there is no outage to recover from."""
        self._is_away = False

    def note(self, now_s: float, *, has_answered: bool) -> None:
        """Records the outcome of a call."""
        is_up = self.is_up(now_s)
        if not has_answered:
            self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
            return
        self._failing_since_s = None
        if not is_up and self._answering_since_s is None:
            self._answering_since_s = now_s

    def is_up(self, now_s: float) -> bool:
        """Returns whether Redis counts as available."""
        if self._failing_since_s is not None and now_s - self._failing_since_s >= AWAY_AFTER_S:
            self._is_away, self._answering_since_s = True, None
        elif self._answering_since_s is not None and now_s - self._answering_since_s >= BACK_AFTER_S:
            self._is_away, self._answering_since_s = False, None
        return not self._is_away


class Connections(BlockingConnectionPool):
    """A pool that finishes a connection also after the call that wanted it has left."""

    def __init__(self, *, round_trip: RoundTrip, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._round_trip = round_trip
        self._connecting: dict[AbstractConnection, asyncio.Task[None]] = {}
        self._primary: _Primary | None = None

    @classmethod
    def to(cls, url: str, round_trip: RoundTrip, *, wait_s: float) -> "Connections":
        """A pool for this URL; a call waits at most `wait_s` for a connection while others use them all."""
        arguments: dict[str, Any] = {
            "round_trip": round_trip,
            "max_connections": MAX_CONNECTIONS,
            "timeout": wait_s,
            "socket_timeout": CONNECT_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            **CLIENT_OPTIONS,
        }
        sentinels = sentinels_of(url)
        if sentinels is None:
            return cls.from_url(url, **arguments)
        kind = SentinelManagedSSLConnection if sentinels.has_tls else SentinelManagedConnection
        primary = _Primary(sentinels)
        pool = cls(connection_class=kind, connection_pool=primary, **{**arguments, **sentinels.server})
        primary.pool = pool
        pool._primary = primary
        return pool

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        """Waits until the connection stands. Raises RedisError; when it is cancelled, connecting continues."""
        task = self._connecting.get(connection)  # redis-py calls it connected before both have shaken hands
        if task is None and _is_broken(connection):
            await connection.disconnect()
        if task is None and not connection.is_connected:
            task = self._connecting[connection] = asyncio.create_task(self._connect(connection))
            task.add_done_callback(lambda done: self._has_connected(connection, done))
        if task is not None:
            await asyncio.shield(task)
        await super().ensure_connection(connection)

    async def aclose(self) -> None:
        """Ends all connections, those under way too."""
        for task in tuple(self._connecting.values()):
            await end_task(task)
        await super().aclose()
        if self._primary is not None:
            await self._primary.aclose()

    async def _connect(self, connection: AbstractConnection) -> None:
        await connection.connect()  # type: ignore[no-untyped-call]
        began_s = time.monotonic()
        await connection.send_command("PING", check_health=False)
        await connection.read_response()
        self._round_trip.observe(time.monotonic() - began_s)

    def _has_connected(self, connection: AbstractConnection, task: "asyncio.Task[None]") -> None:
        self._connecting.pop(connection, None)
        if not task.cancelled():
            task.exception()  # told to the calls that waited, which may be none


class _Primary:
    """Says where the primary is: what redis-py's connections of sentinels ask of their pool."""

    is_master = True
    check_connection = False

    def __init__(self, sentinels: Sentinels) -> None:
        limits = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S, **CLIENT_OPTIONS}
        asked = {"ssl": sentinels.has_tls, **limits, **sentinels.sentinel}
        self._sentinel = Sentinel(sentinels.addresses, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
        self._service = sentinels.service
        self._address: tuple[str, int] | None = None
        self.pool: Connections | None = None

    async def get_master_address(self) -> tuple[str, int]:
        """Asks the sentinels. Connections to an earlier primary that nobody uses are closed. Raises RedisError."""
        address: tuple[str, int] = await self._sentinel.discover_master(self._service)
        if address != self._address:
            self._address = address
            if self.pool is not None:
                await self.pool.disconnect(inuse_connections=False)
        return address

    async def aclose(self) -> None:
        await self._sentinel.aclose()


async def end_task(task: asyncio.Task[Any], *, timeout_s: float = 2.0) -> None:
    """Cancels a task until it has ended: redis-py may swallow one cancellation, or several."""
    deadline = Deadline.after(timeout_s)
    while not task.done() and not deadline.has_passed():
        task.cancel()
        await asyncio.wait((task,), timeout=0.05)


def _is_broken(connection: AbstractConnection) -> bool:
    """Returns whether a connection broke while nobody used it, which redis-py notices only where Redis ended it.

    An event loop may refuse to write there with an error that belongs neither to Redis nor to the system.
    """
    writer = connection._writer
    return writer is not None and writer.is_closing()
