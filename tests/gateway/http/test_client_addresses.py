"""Whose address a request has: what trusted proxies tell is believed, what clients write is not."""

import pytest

from gateway.http.client_addresses import MAX_READ, ClientAddresses, TrustedProxies
from gateway.observability.request_log import CLIENT_ADDRESS

PROXIES = TrustedProxies("10.0.0.0/8, ::1")


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9, 198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9", "198.51.100.7, 10.2.3.4"], "198.51.100.7"),
        ("10.0.0.1", ["10.9.9.9"], "10.9.9.9"),
        ("10.0.0.1", ["unknown"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9, <script>, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["198.51.100.7:4711"], "198.51.100.7"),
        ("::1", ["[2001:db8::5]:80"], "2001:db8::5"),
        ("::ffff:10.0.0.1", ["2001:db8::5"], "2001:db8::5"),
        ("", ["198.51.100.7"], ""),
        ("10.0.0.1", ["203.0.113.9, " + "10.0.0.2, " * MAX_READ + "10.0.0.3"], "10.0.0.2"),
    ],
)
def test_client_of(peer, forwarded, client):
    assert PROXIES.client_of(peer, forwarded) == client


async def test_the_application_runs_with_the_address():
    seen = []

    async def noting(scope, receive, send):
        seen.append(CLIENT_ADDRESS.get())

    guard = ClientAddresses(noting, PROXIES)
    for client in (("10.0.0.1", 5), None):
        scope = {"client": client, "headers": [(b"x-forwarded-for", b"198.51.100.7")]}
        await guard(scope, None, None)
    assert seen == ["198.51.100.7", ""]
