"""Ports for servers that tests start. Two test processes never receive the same one.

A port that the kernel gave to a probe can be given to another program before the server binds it. So ports come from
below the range that the kernel uses for outgoing connections, and each test process has a part of its own.
"""

import contextlib
import itertools
import os
import socket

FIRST_PORT, LAST_PORT = 20_000, 32_000
PORTS_PER_PROCESS = 600

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_first = FIRST_PORT + _worker * PORTS_PER_PROCESS % (LAST_PORT - FIRST_PORT)
# A run that follows another one on the same machine does not begin with its ports, which may be in TIME_WAIT.
_ports = itertools.cycle(range(_first, _first + PORTS_PER_PROCESS))
for _ in range(os.getpid() % PORTS_PER_PROCESS):
    next(_ports)


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port on which nothing listens. Raises RuntimeError if the whole part is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in itertools.islice(_ports, PORTS_PER_PROCESS):
        # A server at "::" takes the port in both families, and either may be another program's.
        with contextlib.suppress(OSError):
            socket.create_server((host, port), family=family, dualstack_ipv6=host == "::").close()
            return port
    raise RuntimeError(f"no free port among {PORTS_PER_PROCESS} from {_first} on")
