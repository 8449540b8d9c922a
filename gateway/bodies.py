"""Bodies of requests until they are understood: what they may take together, and long ones beside the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.runtime.errors import Overloaded

LONG_BODY_BYTES = 256 * 1024
"""Longer ones are read in a thread: 8 MiB of empty objects take a second and more, in which no stream would go on."""

T = TypeVar("T")
Claim = Callable[[int], None]


class Bodies:
    """All bodies that are being received or read; together they have at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        """Of all that are here now."""
        self._max_bytes = max_bytes
        self._long = asyncio.Lock()

    async def take(self, receive: Callable[[Claim], Awaitable[bytes]], read: Callable[[bytes], T]) -> T:
        """What `read` makes of the body that `receive` gets.

        `receive` claims the bytes as they come, which raises Overloaded for those that find no room. What a client
        announces takes none: it may never come.
        """
        num_bytes = 0

        def claim(more: int) -> None:
            nonlocal num_bytes
            if self.num_bytes + more > self._max_bytes:
                raise Overloaded("the bodies of requests that are being sent take all the memory that they may")
            self.num_bytes += more
            num_bytes += more

        try:
            body = await receive(claim)
            if len(body) <= LONG_BODY_BYTES:
                return read(body)
            # One at a time: several threads would take the interpreter from the event loop in turns.
            async with self._long:
                return await asyncio.to_thread(read, body)
        finally:
            self.num_bytes -= num_bytes
