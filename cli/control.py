"""The socket on which a running `tandem up` takes orders from commands of the same user, and how they give them.

A line of JSON each way: {"do": NAME, ...}, then {"done": ...} or {"error": SENTENCE}. The socket's name is the port of
the HTTP API, which is what the commands know of the cluster.
"""

import asyncio
import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.runtime.config import option
from services.runtime.errors import ConfigError, TandemError
from services.runtime.kinds import number, url

MAX_LINE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
PRIVATE = 0o700

Order = Callable[[Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """The cluster of a `tandem up` on this machine, by its HTTP API."""

    url: str = option(
        url("http", "https"), default="http://127.0.0.1:8000", help="Address of the HTTP API of the `tandem up`."
    )


@dataclass(frozen=True, kw_only=True)
class DrainingSettings(LocalSettings):
    """A command that ends workers."""

    timeout: float = option(
        number(0, 86_400), default=600.0, help="Seconds that running answers get; a worker that has some then ends."
    )


class NoLocalCluster(TandemError):
    """No `tandem up` of this user runs there."""


class Refused(TandemError):
    """The running `tandem up` refuses the order, and says why."""


def socket_path(http_port: int) -> Path:
    """Returns where the socket of the cluster with this HTTP port is. Raises ConfigError for a folder not our own."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) / "tandem" if given else Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}"
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{folder} must be a folder of this user that nobody else may enter (mode 0700)")
    return folder / f"up-{http_port}.sock"


@asynccontextmanager
async def taking_orders(path: Path, orders: Mapping[str, Order]) -> AsyncIterator[None]:
    """Answers on the socket while the scope lasts. Orders raise TandemError for what they refuse."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError, ValueError):
            order = json.loads(await reader.readline())
            try:
                done = {"done": await orders[order["do"]](order)}
            except TandemError as error:
                done = {"error": error.message}
            except (KeyError, TypeError, AttributeError):
                done = {"error": "the running `tandem up` does not know this order; is it of another version?"}
            writer.write(json.dumps(done).encode() + b"\n")
            await writer.drain()
        writer.close()

    _remove(path)  # of an earlier life: the HTTP port is ours, so nobody listens on it
    server = await asyncio.start_unix_server(answer, path, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        _remove(path)
        with contextlib.suppress(OSError):  # another cluster of this user runs
            path.parent.rmdir()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def order(address: str, name: str, /, *, timeout_s: float | None = None, **arguments: object) -> Any:
    """Gives an order to the `tandem up` of an HTTP address and returns its answer; `timeout_s`: None waits for good.

    Raises NoLocalCluster or Refused.
    """
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(str(socket_path(port)))
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps({"do": name, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline(MAX_LINE_BYTES))
    except (OSError, ValueError) as error:
        raise NoLocalCluster(
            f"no `tandem up` of this user with HTTP port {port} answers on this machine; --url names another one"
        ) from error
    if "error" in answer:
        raise Refused(answer["error"])
    return answer["done"]
