"""`python -m tests.attack.bodies HOST PORT NUMBER MIB`: bodies without their ends, held open while the peer lets it.

A program of its own, so that what it takes to send them is not taken from the loop that measures. It runs at the lowest
priority: a client's own machine pays for what it sends. The API key comes as the first line of the standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

RETRY_S = 0.05


async def hold(host: str, port: int, data: bytes) -> None:
    """Sends this again and again, each time until the peer answers or ends the connection."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(data)
                await reader.read(1)
            finally:
                writer.transport.abort()
        await asyncio.sleep(RETRY_S)


async def main(host: str, port: int, number: int, mib: int) -> None:
    """Holds `number` bodies at once until the process is killed."""
    key = sys.stdin.readline().strip()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {mib << 20}\r\n\r\n"
    data = head.encode() + b" " * ((mib << 20) - 1)
    await asyncio.gather(*(hold(host, port, data) for _ in range(number)))


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
