"""What the process tells the service manager that started it (systemd, or another one with its protocol), if one did.

The protocol is `sd_notify`: datagrams to the Unix socket that NOTIFY_SOCKET names. Without that variable every function
here does nothing. A manager that does not listen changes nothing but the log: to run is more important than to be seen.
"""

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping

SOCKET_ENV, WATCHDOG_ENV, WATCHDOG_PID_ENV = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
SEND_TIMEOUT_S = 0.5
"""The time that a full queue of the manager may hold this process up."""

logger = logging.getLogger(__name__)


def tell_ready(status: str) -> None:
    """Says that the start is over and the process serves; `status` is one line for people."""
    _send("READY=1", _status(status))


def tell_status(status: str) -> None:
    """Says in one line what the process does now."""
    _send(_status(status))


def tell_stopping(status: str) -> None:
    """Says that the process is on its way to its end."""
    _send("STOPPING=1", _status(status))


def ask_for_time(start_s: float) -> None:
    """Has the manager wait for `tell_ready` for `start_s` seconds from now, if that is longer than it would wait."""
    _send(f"EXTEND_TIMEOUT_USEC={round(start_s * 1e6)}")


async def keep_watchdog() -> None:
    """Says again and again that the event loop runs, if the manager has a watchdog for this process; until cancelled.

    A loop that hangs says nothing, and the manager ends and restarts the process.
    """
    usec, pid = os.environ.get(WATCHDOG_ENV, ""), os.environ.get(WATCHDOG_PID_ENV, "")
    if not usec.isdecimal() or not int(usec) or pid not in ("", str(os.getpid())):
        return
    while True:
        _send("WATCHDOG=1")
        await asyncio.sleep(int(usec) / 1e6 / 3)


def hide_from_children(environment: MutableMapping[str, str]) -> None:
    """Takes the manager's variables out of an environment for children, which must not speak for their parent."""
    for name in (SOCKET_ENV, WATCHDOG_ENV, WATCHDOG_PID_ENV):
        environment.pop(name, None)


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())}"


def _send(*lines: str) -> None:
    address = os.environ.get(SOCKET_ENV, "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(SEND_TIMEOUT_S)
            sender.sendto("\n".join(lines).encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        logger.warning("the service manager cannot be told", extra={"lines": lines, "error": str(error)})
