"""The address of the client that a request comes from, also behind proxies that are trusted to tell it.

Any client can write X-Forwarded-For; only what a trusted proxy added to it is believed. Knows no route.
"""

import ipaddress
from collections.abc import Sequence

from gateway.http.exchange import App, Receive, Scope, Send, header_values
from gateway.observability.request_log import CLIENT_ADDRESS

FORWARDED_FOR = "x-forwarded-for"
MAX_READ = 32
"""Entries of a header that are read, from its end."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """Networks of proxies; `given` are their addresses, as in `10.0.0.0/8,::1`."""

    def __init__(self, given: str) -> None:
        self._networks = [ipaddress.ip_network(one.strip(), strict=False) for one in given.split(",")]

    def client_of(self, peer: str, forwarded: Sequence[str]) -> str:
        """Returns the last address that is not a trusted proxy's, of the values of X-Forwarded-For and then the peer.

        Empty for a peer without an address. An entry that is no address ends the search: a trusted proxy told it.
        """
        address = _address(peer)
        told = [entry for value in forwarded for entry in value.split(",")][-MAX_READ:]
        while address is not None and told and any(address in network for network in self._networks):
            before = _address(told.pop())
            if before is None:
                break
            address = before
        return "" if address is None else str(address)


class ClientAddresses:
    """An ASGI application before another: notes for the request log which client asks."""

    def __init__(self, app: App, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        peer = scope["client"][0] if scope["client"] else ""
        forwarded = header_values(scope["headers"], FORWARDED_FOR.encode())
        CLIENT_ADDRESS.set(self._proxies.client_of(peer, forwarded))
        await self._app(scope, receive, send)


def _address(text: str) -> Address | None:
    """Returns an address, which may stand in brackets and have a port; None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
