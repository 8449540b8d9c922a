"""The connection to Redis: short timeouts, a circuit breaker, Lua that survives a restart. Knows no key's meaning.

A call either answers within the timeout or raises StoreUnavailable. While the breaker is open it raises at once, so
a Redis that is frozen costs one timeout per `open_s` and not one per request. The timeout follows the measured round
trip, and connecting, which takes several, has a limit of its own (`connections`).
"""

import asyncio
import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import redis.asyncio
import redis.sentinel
from redis.asyncio.client import PubSub
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from services.cluster.advice import is_permission_denied
from services.cluster.connections import Availability, Connections, RoundTrip, end_task
from services.cluster.keys import Keys
from services.cluster.redis_url import CLIENT_OPTIONS, check_url, sentinels_of
from services.runtime.breaker import Breaker
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreRefused, StoreUnavailable

TIMEOUT_S = 0.1
"""Time for an answer, on top of what the round trip takes."""
BREAKER_OPEN_S = 1.0
DENIED_FOR_S = 5.0
"""Time for which a denied command makes Redis count as unavailable. Gateways repeat each command more often."""
PATIENT_TIMEOUT_S = 1.0
"""Time-out of subscriptions, and of calls without whose answer nothing can continue."""
MAX_LATE_CALLS = 2
"""Maximum number of timed-out calls that keep a connection while their reply is still wanted."""
THREAD_TIMEOUT_S = 0.5
"""Time-out of calls from a thread of its own, which keeps no request waiting."""


@dataclass(slots=True)
class StoreStats:
    """Counts since the start, for metrics."""

    num_calls: int = 0
    num_failed_calls: int = 0
    """Calls that timed out or met an error."""
    num_skipped_calls: int = 0
    """Calls that were not made because the breaker was open."""
    num_rejected_values: int = 0
    """Values read from Redis that are not what their key should hold."""


class Script:
    """A Lua script, addressed by its digest and sent again whenever Redis does not know it."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.digest = hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()


class Store:
    """One cluster's Redis, for one event loop.

    `url` is redis://, rediss://, unix:// or redis+sentinel:// (see `redis_url`). Raises ConfigError for any other.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str,
        timeout_s: float = TIMEOUT_S,
        breaker_open_s: float = BREAKER_OPEN_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.keys = Keys(cluster)
        self.stats = StoreStats()
        self.last_failure = ""
        """Why the last call that failed did so."""
        self.round_trip = RoundTrip()
        self._availability = Availability()
        self._denied_at_s = -math.inf
        self._timeout_s = timeout_s
        self._clock = clock
        self._breaker = Breaker(max_errors=1, first_open_s=breaker_open_s, max_open_s=breaker_open_s)
        self._left_calls: set[asyncio.Task[Any]] = set()
        self._num_late_calls = 0
        check_url(url)
        self._client = redis.asyncio.Redis.from_pool(Connections.to(url, self.round_trip, wait_s=timeout_s))
        self._patient_client = redis.asyncio.Redis.from_pool(
            Connections.to(url, self.round_trip, wait_s=PATIENT_TIMEOUT_S)
        )

    @property
    def is_available(self) -> bool:
        """Whether Redis has replied to the last call."""
        return not self._breaker.is_open

    @property
    def is_up(self) -> bool:
        """Whether Redis counts as available, for views. Single time-outs of a slow Redis do not change it.

        A Redis that denies a command counts as unavailable, because no worker can join.
        """
        now_s = self._clock.monotonic()
        return self._availability.is_up(now_s) and now_s - self._denied_at_s >= DENIED_FOR_S

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        *,
        on_late: Callable[[Any], None] | None = None,
    ) -> Any:
        """Runs a script and returns its reply, with bytes for strings. Raises StoreUnavailable.

        A call that timed out may have run. `on_late` receives its reply, if that still arrives. The store waits for at
        most MAX_LATE_CALLS such replies, because each occupies a connection.
        """
        began_s = self._clock.monotonic()
        if not self._breaker.lets_through(began_s):
            self.stats.num_skipped_calls += 1
            raise StoreUnavailable("Redis did not answer a moment ago")
        self.stats.num_calls += 1
        is_probe = self._breaker.begin(began_s)
        call = self._begin(self._client, script, keys, args)
        try:
            await self._wait(call, self._timeout_s)
        except BaseException:
            if is_probe:
                self._breaker.abandoned()
            raise
        else:
            now_s = self._clock.monotonic()
            if _has_reached_redis(call):
                self._breaker.succeeded(now_s)
            else:
                self._breaker.failed(now_s, is_probe=is_probe)
            return self._outcome(call)
        finally:
            self._leave(call, on_late)

    async def run_patiently(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Runs a script whose caller needs the answer: also while the breaker is open, and for PATIENT_TIMEOUT_S.

        Raises StoreUnavailable.
        """
        self.stats.num_calls += 1
        call = self._begin(self._patient_client, script, keys, args)
        try:
            await self._wait(call, PATIENT_TIMEOUT_S)
            return self._outcome(call)
        finally:
            self._leave(call)

    async def info(self, section: str) -> dict[str, Any]:
        """What Redis says of itself; nothing where it refuses to say it. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(PATIENT_TIMEOUT_S):
                return dict(await self._patient_client.info(section))
        except ResponseError:
            return {}
        except (TimeoutError, RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis did not answer: {type(error).__name__}") from error

    def subscriber(self) -> PubSub:
        """A subscription on a connection of its own; the caller closes it."""
        return self._patient_client.pubsub()

    async def close(self) -> None:
        """Closes all connections."""
        for call in tuple(self._left_calls):
            await end_task(call)
        for client in (self._client, self._patient_client):
            # By then its connections are closed, and only the word of it has not come in time.
            with contextlib.suppress(redis.exceptions.TimeoutError):
                await client.aclose()

    async def _wait(self, call: asyncio.Task[Any], timeout_s: float) -> None:
        began_s = self._clock.monotonic()
        await asyncio.wait((call,), timeout=timeout_s + self.round_trip.limit_s)
        now_s = self._clock.monotonic()
        has_answered = _has_reached_redis(call)
        if _has_succeeded(call):
            self.round_trip.observe(now_s - began_s)
        if has_answered or not call.done():
            self.round_trip.observe_wait(now_s - began_s)
        self._availability.note(now_s, has_answered=has_answered)

    def _leave(self, call: asyncio.Task[Any], on_late: Callable[[Any], None] | None = None) -> None:
        """Cancels a call whose caller no longer waits, unless its reply is wanted. Keeps a reference until it ends."""
        if call.done():
            self._forget(call)  # the caller may have been cancelled at that very moment
            return
        self._left_calls.add(call)
        call.add_done_callback(self._forget)
        if on_late is None or self._num_late_calls >= MAX_LATE_CALLS:
            call.cancel()
            return
        self._num_late_calls += 1

        def end(done: asyncio.Task[Any]) -> None:  # runs when the connection times out, at the latest
            self._num_late_calls -= 1
            if _has_succeeded(done):
                on_late(done.result())

        call.add_done_callback(end)

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._left_calls.discard(call)
        if not call.cancelled():
            call.exception()  # redis-py may make a time-out of the cancellation; the caller was told before

    def _begin(
        self,
        client: redis.asyncio.Redis,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
    ) -> asyncio.Task[Any]:
        # In a task of its own, because redis-py may swallow a cancellation while it connects.
        return asyncio.create_task(_run(client, script, keys, args))

    def _outcome(self, call: asyncio.Task[Any]) -> Any:
        if _has_succeeded(call):
            return call.result()
        self.stats.num_failed_calls += 1
        error = _unavailable(call)
        self.last_failure = str(error.__cause__ or error)
        if is_permission_denied(self.last_failure):
            self._denied_at_s = self._clock.monotonic()
        raise error


async def _run(
    client: redis.asyncio.Redis, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]
) -> Any:
    try:
        return await cast(Any, client.evalsha(script.digest, len(keys), *keys, *args))
    except NoScriptError:
        return await cast(Any, client.eval(script.body, len(keys), *keys, *args))


def _has_succeeded(call: asyncio.Task[Any]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def thread_client(url: str) -> "redis.Redis":
    """A connection for one thread, which sees every error itself. Raises ConfigError for a URL of another kind."""
    check_url(url)
    limits: dict[str, Any] = {"socket_timeout": THREAD_TIMEOUT_S, "socket_connect_timeout": THREAD_TIMEOUT_S}
    limits |= CLIENT_OPTIONS
    sentinels = sentinels_of(url)
    if sentinels is None:
        return redis.Redis.from_url(url, **limits)
    asked = {"ssl": sentinels.has_tls, **limits, **sentinels.sentinel}
    found = redis.sentinel.Sentinel(sentinels.addresses, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    arguments = {**limits, **sentinels.server, "ssl": sentinels.has_tls}
    return cast(redis.Redis, found.master_for(sentinels.service, **arguments))  # type: ignore[no-untyped-call]


def run_script(client: "redis.Redis", script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
    """Runs a script and returns its answer, with bytes for texts. Raises RedisError."""
    try:
        return client.evalsha(script.digest, len(keys), *keys, *args)
    except NoScriptError:
        return client.eval(script.body, len(keys), *keys, *args)


def _has_reached_redis(call: asyncio.Task[Any]) -> bool:
    """Returns whether Redis has replied to this call, and so would reply to others."""
    return _has_succeeded(call) or (
        call.done() and not call.cancelled() and (is_permanent(call.exception()) or _is_full(call.exception()))
    )


def is_permanent(error: BaseException | None) -> bool:
    """Returns whether Redis would refuse the same command again, however long the caller waits.

    An error in a script, a key of another type and a missing right are permanent. A Redis that loads its data, cannot
    write, has no memory left or runs a slow script is not.
    """
    if not isinstance(error, ResponseError) or isinstance(error, (*_OUTAGES, OutOfMemoryError)):
        return False
    return _PASSING_CODE.search(str(error)) is None


def _is_full(error: BaseException | None) -> bool:
    """Returns whether Redis has no memory for a write. It still replies to reads."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and "OOM " in str(error))


_OUTAGES = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
# A script passes on the error of its command with the code somewhere in the text (Redis 6) or at its start (Redis 7).
_PASSING_CODE = re.compile(
    r"(?:^|[ -])(?:LOADING|READONLY|MASTERDOWN|BUSY|TRYAGAIN|CLUSTERDOWN|OOM|MISCONF|NOREPLICAS|UNKILLABLE) "
)


def _unavailable(call: asyncio.Task[Any]) -> StoreUnavailable:
    error = call.exception() if call.done() and not call.cancelled() else None
    if error is None:
        return StoreUnavailable("Redis did not answer in time")
    if not isinstance(error, RedisError | OSError):
        raise error
    unavailable = StoreUnavailable(f"Redis did not answer: {type(error).__name__}")
    if is_permanent(error):
        unavailable = StoreRefused(f"Redis refused a command: {error!s:.200}")
    unavailable.__cause__ = error
    return unavailable
