"""How commands and services give orders to a running `tandem up` of the same user: over a socket in its own folder.

A line of JSON each way: {"do": NAME, ...}, then {"done": ...} or {"error": SENTENCE}. The socket's name is the port of
the HTTP API, which is what those that give orders know of the cluster.
"""

import json
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.runtime.errors import ConfigError, TandemError

MAX_LINE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
PRIVATE = 0o700


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
