"""Several answers of one call at once: all of them whole, or their parts as they come.

Knows neither what an answer is made of nor where it goes. Whatever ends one answer badly ends the call.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeAlias, TypeVar

from services.runtime.errors import TandemError, forget_frames

Part = TypeVar("Part")
Result = TypeVar("Result")
_Parts: TypeAlias = "asyncio.Queue[tuple[int, Part] | None]"

MAX_WAITING_PARTS = 4
"""Parts that wait for a reader; the answers' own buffers hold the rest."""


async def all_of(work: Sequence[Awaitable[Result]]) -> list[Result]:
    """Returns all results in order. The first failure cancels the rest and is raised when they have ended."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def merged(streams: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[tuple[int, Part], None]:
    """(index of the stream, part) as they come; use with `contextlib.aclosing`. All streams are closed at the end."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for part in only:
                yield 0, part
        return
    parts: _Parts[Part] = asyncio.Queue(MAX_WAITING_PARTS)
    tasks = [asyncio.create_task(_forward(index, stream, parts)) for index, stream in enumerate(streams)]
    whole = asyncio.ensure_future(_close_when_done(tasks, parts))
    try:
        while (item := await parts.get()) is not None:
            yield item
        await whole
    finally:
        await _end([*tasks, whole])


async def _forward(index: int, stream: AsyncGenerator[Part, None], parts: "_Parts[Part]") -> None:
    async with contextlib.aclosing(stream):
        async for part in stream:
            await parts.put((index, part))


async def _close_when_done(tasks: "Sequence[asyncio.Task[None]]", parts: "_Parts[Part]") -> None:
    """Ends the reader's loop when all are done or one has failed; awaiting this raises the failure.

    When it is cancelled it must not wait for room: the reader that cancels it no longer reads.
    """
    try:
        await asyncio.gather(*tasks)
    except Exception:
        await parts.put(None)
        raise
    await parts.put(None)


async def _end(tasks: "Sequence[asyncio.Future[Result]]") -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, TandemError):
            forget_frames(result)
