"""What both ends of a Link do with their state machine, whichever way pages go. Belongs to one event loop."""

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
    """What a worker brings to all its Links, those on which it sends and those on which it receives.

    `generations` tells whether pages are still in the use that was meant. `transports` are the channels to offer or to
    take, best first; `auto` stands for all that these pages can use. With `tls` pages travel between hosts encrypted or
    not at all.
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
        """The pool's layout, as the other end is told it."""
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
        """The processes that the pages' memory can be shared with."""
        return Reach(self.identity.host_id).at(channel_device(self.pool))


class LinkEnd(ABC):
    """Carries out a machine's actions and tells it what happens. `name` is how log lines call it."""

    def __init__(self, name: str) -> None:
        self.outbox = Outbox()
        self._name = name
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def fail(self, error: TandemError) -> None:
        """Ends the Link for good. Idempotent."""

    @abstractmethod
    def _perform(self, actions: Sequence[Action]) -> None:
        """Carries out what the machine decided."""

    def _perform_last(self, actions: Sequence[Action]) -> None:
        """Carries out actions when the Link is over: one transfer's trouble must not keep the others from ending."""
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
        """Has the event loop make a call, from any thread; what it raises ends the Link."""
        # The loop may be gone at the very end of the process; then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, call, *args)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception:
            logger.critical("the %s contradicts itself", self._name, exc_info=True)
            self.fail(TransferFailed("the Link broke"))
