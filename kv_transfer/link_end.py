"""The parts that both ends of a Link share: their setup, and how they run a state machine.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.page_bytes import PageGenerations, PageMemory, channel_device, wire_layout
from kv_transfer.protocol.actions import Action
from kv_transfer.protocol.counters import Counters
from kv_transfer.protocol.messages import Message, WireLayout
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.transports.registry import AUTO, Reach, Transports
from kv_transfer.transports.tls import ChannelTls
from kv_transfer.wire import LinkIdentity, Outbox
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import TandemError, TransferFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkSetup:
    """Setup of all Links of a worker, both for sending and for receiving.

    `generations` shows whether a page is still in the use that a transfer expects. `transports` are the channels to
    offer or to accept, best first; `auto` stands for all channels that these pages can use. With `tls`, pages travel
    between hosts only encrypted.
    """

    identity: LinkIdentity
    pool: PageMemory
    generations: PageGenerations
    transports: Sequence[str] = (AUTO,)
    timeouts: Timeouts = field(default_factory=Timeouts)
    counters: Counters = field(default_factory=Counters)
    tls: ChannelTls | None = None
    clock: Clock = SYSTEM_CLOCK

    @functools.cached_property
    def layout(self) -> WireLayout:
        """The pool's layout, in the form that is sent to the peer."""
        identity = self.identity
        return wire_layout(
            self.pool.layout,
            fingerprint=identity.layout_fingerprint,
            exact=identity.exact,
            arithmetic=identity.arithmetic,
            tensor_parallel=identity.tensor_parallel,
            pipeline_parallel=identity.pipeline_parallel,
        )

    @functools.cached_property
    def available(self) -> Transports:
        """The transports that these pages can use."""
        return Transports(channel_device(self.pool), self.pool.layout.page_bytes, self.tls)

    @functools.cached_property
    def reach(self) -> Reach:
        """The host and GPU of the pages, which determine which peers can share their memory."""
        return Reach(self.identity.host_id).at(channel_device(self.pool))


class LinkEnd(ABC):
    """Executes the actions of a state machine and feeds events to it. `name` identifies the Link in log lines."""

    def __init__(self, name: str) -> None:
        self.outbox = Outbox()
        self._name = name
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def fail(self, error: TandemError) -> None:
        """Ends the Link permanently. Idempotent."""

    @abstractmethod
    def _perform(self, actions: Sequence[Action]) -> None:
        """Executes the actions of the state machine."""

    def _perform_last(self, actions: Sequence[Action]) -> None:
        """Executes actions after the Link has ended.

        An error in one transfer must not keep the other transfers from ending.
        """
        for action in actions:
            try:
                self._perform([action])
            except Exception:
                logger.critical("the %s contradicts itself", self._name, exc_info=True)

    def _send_message(self, message: Message) -> None:
        try:
            self.outbox.put(message)
        except TransferFailed as error:
            self._loop.call_soon(self.fail, error)

    def _from_thread(self, call: Callable[..., object], *args: object) -> None:
        """Schedules a call on the event loop, from any thread. An exception of the call ends the Link."""
        # The loop may already be closed at process exit. Then no task is left that could handle the call.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, call, *args)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            logger.critical("the %s contradicts itself", self._name, exc_info=True)
            self.fail(TransferFailed("the Link broke"))
