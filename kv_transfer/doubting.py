"""Tries links again that nothing was sent over for a while: a slow one may have recovered, and nobody would notice.

When a link is due is the meter's decision (`services.scheduling.links`), how it is measured `kv_transfer.measure`'s;
this file has the receivers and the time. One probe runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from kv_transfer.measure import LIMIT_S, Measured
from kv_transfer.transports.registry import DEVICE_NAMES
from services.runtime.background_tasks import supervise
from services.runtime.clock import Clock
from services.runtime.errors import TandemError
from services.scheduling.links import LinkMeters

TICK_S = 1.0
SETTLED_S = 5.0
"""Time after a Link was made until what it was made for is on its way."""
PROBE_TIMEOUT_S = LIMIT_S + 4.0
"""With the time in which the receiver measures for others."""
MAX_FAILURES = 20
"""A receiver that this number of probes in a row did not reach is forgotten."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Receiver:
    key: tuple[str, str]
    transport: str
    noted_s: float
    num_failures: int = 0


class LinkDoubts:
    """Probes the links of one sending worker when they are due. Belongs to the event loop.

    `probe(key, transport)` measures the channel that is in use to a receiver, with little traffic. Channels of a device
    are not tried: to open one takes long, and memory of the device.
    """

    def __init__(
        self,
        meters: LinkMeters,
        probe: Callable[[tuple[str, str], str], Awaitable[Measured]],
        *,
        clock: Clock,
    ) -> None:
        self._meters = meters
        self._probe = probe
        self._clock = clock
        self._receivers: dict[str, _Receiver] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, receiver_id: str, key: tuple[str, str], transport: str) -> None:
        """A Link to the receiver was made, over this transport. `key`: its address and incarnation."""
        if transport in DEVICE_NAMES:
            self._receivers.pop(receiver_id, None)
            return
        self._receivers[receiver_id] = _Receiver(key, transport, self._clock.monotonic())
        if self._task is None or self._task.done():
            self._task = supervise(self._run, name="doubt-links")

    async def close(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while self._receivers:
            await asyncio.sleep(TICK_S)
            for receiver_id, receiver in list(self._receivers.items()):
                now_s = self._clock.monotonic()
                is_settled = now_s - receiver.noted_s >= SETTLED_S
                if is_settled and self._meters.to(receiver_id).is_due(now_s):
                    await self._try(receiver_id, receiver)

    async def _try(self, receiver_id: str, receiver: _Receiver) -> None:
        meter = self._meters.to(receiver_id)
        meter.tried(self._clock.monotonic())
        before = meter.opinion.speed
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                measured = await self._probe(receiver.key, receiver.transport)
        except (TandemError, grpc.aio.AioRpcError, TimeoutError) as error:
            logger.debug("the link to %s could not be tried: %s", receiver_id, error)
            measured = Measured()
        if not measured.rounds:
            receiver.num_failures += 1
            if receiver.num_failures >= MAX_FAILURES and self._receivers.get(receiver_id) is receiver:
                del self._receivers[receiver_id]
            return
        receiver.num_failures = 0
        measured.teach(meter.opinion, receiver.transport, self._clock.monotonic())
        if not 0.5 < meter.opinion.speed.bytes_per_s / before.bytes_per_s < 2:
            rates = before.bytes_per_s / 1e6, meter.opinion.speed.bytes_per_s / 1e6
            logger.info("the link to %s carries %.3g MB/s, and no longer %.3g MB/s", receiver_id, *reversed(rates))
