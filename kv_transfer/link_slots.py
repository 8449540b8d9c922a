"""Limits the number of Links of one receiver.

Retires the Link that has been idle longest to free a slot for a new Link.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

KEPT_FREE = 8
"""One in this many slots is reserved for new senders, so that a new sender does not wait for an idle Link to end."""
ROOM_TIMEOUT_S = 2.0
"""Time that a sender has to end a retired Link before the receiver refuses the new sender, in seconds."""
LOOK_S = 0.1


class SlotHolder(Protocol):
    """The part of a Link that slot management needs."""

    @property
    def idle_since_s(self) -> float | None:
        """Time of the last transfer's end or of the last retire request, whichever is later.

        None while a transfer runs.
        """
        ...

    @property
    def is_leaving(self) -> bool:
        """Whether the Link is expected to end soon.

        This is so if the Link is lost, or if its sender was requested to end it less than ROOM_TIMEOUT_S ago and has
        started no transfer since.
        """
        ...

    def retire(self) -> None:
        """Requests that the sender end the Link."""
        ...


L = TypeVar("L", bound=SlotHolder)


class LinkSlots(Generic[L]):
    """The Links of a receiver. A slot is claimed before a Link is opened, and occupied until the Link has ended."""

    def __init__(self, max_links: int) -> None:
        self._max_links = max_links
        self._links: set[L] = set()
        self._num_opening = 0
        self._num_waiting = 0
        self._has_changed = asyncio.Event()

    @property
    def links(self) -> tuple[L, ...]:
        """The Links that occupy a slot."""
        return tuple(self._links)

    @property
    def num_claimed(self) -> int:
        """Number of claimed slots, including slots of Links that are being opened."""
        return len(self._links) + self._num_opening

    async def claim(self) -> bool:
        """Claims a slot for a new Link; `opening` releases the claim. Returns False if every Link is in use.

        Waits up to ROOM_TIMEOUT_S for an idle Link to end. Checks the limit and counts the slot in one step.
        """
        self._num_waiting += 1
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                while self.num_claimed >= self._max_links:
                    if not self._make_room():
                        return False
                    await self._wait_change()
        except TimeoutError:
            return False
        finally:
            self._num_waiting -= 1
        self._num_opening += 1
        if self.num_claimed > self._max_links - self._max_links // KEPT_FREE:
            self._retire_idlest()
        return True

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Keeps the claimed slot while the Link is being opened. In its body, `add` transfers the slot to the Link."""
        try:
            yield
        finally:
            self._num_opening -= 1
            self._has_changed.set()

    def add(self, link: L) -> None:
        """Assigns a slot to a Link."""
        self._links.add(link)

    def remove(self, link: L) -> None:
        """Frees the slot of a Link that has ended."""
        self._links.discard(link)
        self._has_changed.set()

    def _make_room(self) -> bool:
        """Retires as many idle Links as there are waiting senders. Returns False if no Link is about to end."""
        num_leaving = sum(link.is_leaving for link in self._links)
        if num_leaving < self._num_waiting and self._retire_idlest():
            num_leaving += 1
        return num_leaving > 0

    def _retire_idlest(self) -> bool:
        idle = [(link.idle_since_s, link) for link in self._links if not link.is_leaving]
        oldest = min(((since_s, link) for since_s, link in idle if since_s is not None), key=_since, default=None)
        if oldest is None:
            return False
        oldest[1].retire()
        return True

    async def _wait_change(self) -> None:
        self._has_changed.clear()
        with contextlib.suppress(TimeoutError):
            # Poll, because no event reports that a sender has started a transfer on a Link that it was requested to
            # end.
            async with asyncio.timeout(LOOK_S):
                await self._has_changed.wait()


def _since(idle: tuple[float, object]) -> float:
    return idle[0]
