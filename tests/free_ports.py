"""Ports for servers that tests start. Two test processes of a machine never receive the same one.

A port that the kernel gave to a probe can be given to another program before the server binds it. So ports come from
below the range that the kernel uses for outgoing connections, and each test process claims its own subrange.
"""

import contextlib
import itertools
import socket

FIRST_PORT, LAST_PORT = 20_000, 32_000
PORTS_PER_PROCESS = 400


def _claim() -> tuple[socket.socket, int]:
    """Claims a subrange until this process ends. Returns what holds the claim, and the first port."""
    for first in range(FIRST_PORT, LAST_PORT, PORTS_PER_PROCESS):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0tandem-test-ports-{first}")  # a name without a file, in this network namespace
        except OSError:
            holder.close()
        else:
            return holder, first
    raise RuntimeError("more test processes run than there are subranges of ports")


_holder, _first = _claim()
_ports = itertools.cycle(range(_first, _first + PORTS_PER_PROCESS))


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port on which nothing listens. Raises RuntimeError if the whole subrange is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in itertools.islice(_ports, PORTS_PER_PROCESS):
        # A server at "::" takes the port in both families, and either may be another program's.
        with contextlib.suppress(OSError):
            socket.create_server((host, port), family=family, dualstack_ipv6=host == "::").close()
            return port
    raise RuntimeError(f"no free port among {PORTS_PER_PROCESS} from {_first} on")
