"""The socket on which a running `tandem up` takes orders, and the settings of the commands that give them."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.config import option
from services.runtime.errors import TandemError
from services.runtime.kinds import number, url
from services.runtime.orders import MAX_LINE_BYTES

Order = Callable[[Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """The cluster of a `tandem up` on this machine, by its HTTP API."""

    url: str = option(
        url("http", "https"), default="http://127.0.0.1:8000", help="Address of the HTTP API of the `tandem up`."
    )


@dataclass(frozen=True, kw_only=True)
class DrainingSettings(LocalSettings):
    """A command that ends workers."""

    timeout: float = option(
        number(0, 86_400), default=600.0, help="Seconds that running answers get; a worker that has some then ends."
    )


class Fence:
    """Refuses orders of an autoscaler that acts no longer: it was frozen on the way from its decision to the order."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._latest_s, self._latest = -math.inf, ""

    def check(self, lease: Mapping[str, Any] | None) -> None:
        """Lets an order through, from one under no lease or the latest one, while that lasts. Raises TandemError.

        `lease`: the fields of a `services.cluster.leadership.Lease`.
        """
        if lease is None:
            return
        if lease["until_s"] <= self._clock.monotonic():
            raise TandemError("the order came when its lease had ended; another copy of the autoscaler may act by now")
        if lease["since_s"] < self._latest_s:
            raise TandemError(f"{self._latest} acts in place of this copy of the autoscaler by now")
        self._latest_s, self._latest = lease["since_s"], lease["holder"]


@asynccontextmanager
async def taking_orders(path: Path, orders: Mapping[str, Order]) -> AsyncIterator[None]:
    """Answers on the socket while the scope lasts. Orders raise TandemError for what they refuse."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError, ValueError):
            order = json.loads(await reader.readline())
            try:
                done = {"done": await orders[order["do"]](order)}
            except TandemError as error:
                done = {"error": error.message}
            except (KeyError, TypeError, AttributeError):
                done = {"error": "the running `tandem up` does not know this order; is it of another version?"}
            writer.write(json.dumps(done).encode() + b"\n")
            await writer.drain()
        writer.close()

    _remove(path)  # of an earlier life: the HTTP port is ours, so nobody listens on it
    server = await asyncio.start_unix_server(answer, path, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        _remove(path)
        with contextlib.suppress(OSError):  # another cluster of this user runs
            path.parent.rmdir()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
