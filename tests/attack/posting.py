"""`python -m tests.attack.posting`: sends requests again and again, as its standard input says, until it is killed.

A program of its own, so that what it takes to send them and to read their answers is not taken from the loop that
measures. It runs at the lowest priority: a client's own machine pays for what it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from tests.attack.base import ATTACKER, Target

NONCE = "a name of each request's own"
RETRY_S = 0.05


@dataclass(frozen=True)
class Posting:
    """`num_clients` for each of the bodies. `is_new`: with a prompt of which no page is cached."""

    path: str
    bodies: tuple[dict[str, Any], ...]
    num_clients: int = 1
    is_named: bool = False
    is_new: bool = False

    def document(self, target: Target) -> bytes:
        """What the program reads."""
        return json.dumps({"http": target.http, "keys": target.keys, "posting": asdict(self)}).encode()


async def post(http: httpx.AsyncClient, posting: Posting, body: dict[str, Any]) -> None:
    """Sends one request again and again."""
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    while True:
        if posting.is_named:
            headers["x-request-id"] = f"fair-{random.getrandbits(64):x}"
        data = content.replace(NONCE.encode(), f"{random.getrandbits(64):x}".encode())
        if posting.is_new:
            data = json.dumps(body | {"cache_salt": f"{random.getrandbits(64):x}"}).encode()
        with contextlib.suppress(httpx.HTTPError):
            async with http.stream("POST", posting.path, content=data, headers=headers) as answer:
                async for _ in answer.aiter_raw():
                    pass
            if answer.status_code == 200:
                continue
        await asyncio.sleep(RETRY_S)


async def main(document: dict[str, Any]) -> None:
    """Sends until the process is killed."""
    posting = Posting(**document["posting"])
    target = Target(document["http"], "", document["keys"])
    async with target.client(ATTACKER) as http:
        clients = [post(http, posting, body) for body in posting.bodies for _ in range(posting.num_clients)]
        await asyncio.gather(*clients)


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(main(json.load(sys.stdin)))
