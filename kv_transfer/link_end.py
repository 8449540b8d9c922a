"""What both ends of a Link do with their state machine, whichever way pages go. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kv_transfer.protocol.actions import Action
from kv_transfer.protocol.messages import Message
from kv_transfer.wire import Outbox
from services.runtime.errors import TandemError, WorkerUnavailable

logger = logging.getLogger(__name__)


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
        except WorkerUnavailable as error:
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
            self.fail(WorkerUnavailable("the Link broke"))
