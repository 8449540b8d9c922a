"""Why a process of the cluster cannot be reached, in words, from what gRPC's core writes about a connection.

The texts are the library's own and say so much only there; one that is not known is given by its status code alone,
since it may hold anything. Pure.
"""

from typing import NamedTuple


class Obstacle(NamedTuple):
    """What is in the way, and what to do about it."""

    cause: str
    remedy: str


NETWORK = "look at the network and the firewalls between the gateway and this address, and at --advertise-host"
OTHER_NAME = Obstacle(
    "its certificate is not for the host that it advertises",
    "give it a certificate that names this host, or set --advertise-host to a name in the certificate",
)
NO_TLS = Obstacle(
    "it does not speak TLS, and the caller does",
    "start it with --tls-cert, --tls-key and --tls-ca, as the other processes of the cluster",
)
CLOSED_TO_TLS = Obstacle(
    "it ends the connection before it is set up: it does not believe the caller's certificate",
    "give both certificates that were signed by the same CA (--tls-ca)",
)
CLOSED_TO_PLAIN = Obstacle(
    "it ends the connection before it is set up: it may want TLS, which the caller does not use",
    "give the gateway --tls-cert, --tls-key and --tls-ca too, or start the worker without them",
)
EXPIRED = Obstacle("its certificate has expired", "renew it: the files are read again without a restart")
OTHER_CA = Obstacle(
    "its certificate was not signed by the caller's CA", "give both the same --tls-ca and certificates of that CA"
)
REFUSED = Obstacle(
    "the connection is refused: nothing listens there",
    "see whether the worker runs, and whether --advertise-host and its port are right",
)
NO_ROUTE = Obstacle("there is no route to this address", NETWORK)
NO_NAME = Obstacle(
    "the name of its host cannot be resolved", "set --advertise-host to a name or an address that the gateway knows"
)
RESET = Obstacle("the connection was reset", NETWORK)
ENDED = Obstacle(
    "it ended the connection: its process has ended or is ending", "see whether the worker runs, and its log"
)
SILENT = Obstacle("nothing answers: packets are lost on the way, or its machine is gone or stopped", NETWORK)
OTHER_CLUSTER = "give all processes of the cluster the same --cluster-secret-file, or the same --redis"

_KNOWN: tuple[tuple[tuple[str, ...], Obstacle], ...] = (
    (("hostname verification check failed",), OTHER_NAME),
    (("wrong_version_number",), NO_TLS),
    (("certificate has expired",), EXPIRED),
    (("certificate_verify_failed",), OTHER_CA),
    (("connection refused",), REFUSED),
    (("no route to host", "network is unreachable", "host is unreachable"), NO_ROUTE),
    (("errors resolving", "dns resolution failed", "domain name not found", "name resolution failure"), NO_NAME),
    (("connection reset",), RESET),
    (("timed out", "timeout", "deadline exceeded", "handshaker shutdown"), SILENT),
)


def obstacle(details: str, *, code: str, has_tls: bool) -> Obstacle:
    """Returns what gRPC's details and status code mean; `has_tls`: this process speaks TLS with workers."""
    lowered = details.lower()
    for texts, known in _KNOWN:
        if any(text in lowered for text in texts):
            return known
    if "failed to connect" in lowered and "socket closed" in lowered:
        return CLOSED_TO_TLS if has_tls else CLOSED_TO_PLAIN
    if "socket closed" in lowered:
        return ENDED
    return Obstacle(f"the connection fails ({code})", NETWORK)
