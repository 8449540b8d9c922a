"""A TCP proxy that does what networks do: delay, cut into pieces, break off, fall silent. Needs no root."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from types import TracebackType
from typing import Self

_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes `host:port` on to `to_host:to_port`. Its attributes may be changed at any time."""

    def __init__(self, host: str, port: int, to_host: str, to_port: int) -> None:
        self.latency_s = 0.0
        """Seconds by which each piece is late."""
        self.slice_bytes = 0
        """Most bytes of a piece; 0: pieces stay as they come."""
        self.is_open = asyncio.Event()
        """While it is cleared nothing passes, and nobody is told."""
        self.is_open.set()
        self.num_accepted = 0
        self._address = (host, port)
        self._to = (to_host, to_port)
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, *self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self, chance: random.Random | None) -> None:
        """Breaks all connections, or one, as a peer that crashed does: both ends get a RST."""
        pairs = list(self._pairs)
        if chance is not None and pairs:
            pairs = [chance.choice(pairs)]
        for pair in pairs:
            for writer in pair:
                sock = writer.get_extra_info("socket")
                if sock is not None and sock.fileno() >= 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        ways = [
            asyncio.create_task(self._pass(reader, far_writer)),
            asyncio.create_task(self._pass(far_reader, writer)),
        ]
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways)
        finally:
            self._tasks.difference_update(ways)
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(self.slice_bytes or 65536):
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()
            if not writer.is_closing():
                writer.write_eof()
        except OSError:
            writer.transport.abort()
