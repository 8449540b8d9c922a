"""Probes links again that have carried no traffic for a while, because a slow link may have recovered unnoticed.

The meter (`services.scheduling.links`) decides when a link is due, and `kv_transfer.measure` measures it. This module
has the list of receivers and the timing. One probe runs at a time.
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
"""Delay after a Link opens before it is probed, in seconds, so that the transfer that needed the Link is sent first."""
PROBE_TIMEOUT_S = LIMIT_S + 4.0
"""Timeout of one probe, in seconds. Includes the time in which the receiver measures links of other senders."""
MAX_FAILURES = 20
"""Number of consecutive failed probes after which a receiver is dropped."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Receiver:
    key: tuple[str, str]
    transport: str
    noted_s: float
    num_failures: int = 0


class LinkDoubts:
    """Probes the links of one sending worker when they are due. Belongs to the event loop.

    `probe(key, transport)` measures the channel in use to a receiver, with little traffic. Device channels are not
    probed: opening one takes long and occupies device memory.
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
        """Records that a Link to the receiver opened over this transport. `key` is its address and incarnation."""
        if transport in DEVICE_NAMES:
            self._receivers.pop(receiver_id, None)
            return
        self._receivers[receiver_id] = _Receiver(key, transport, self._clock.monotonic())
        if self._task is None or self._task.done():
            self._task = supervise(self._run, name="doubt-links")

    async def close(self) -> None:
        """Stops probing."""
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
