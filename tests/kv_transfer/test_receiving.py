"""Where a receiver's channels listen, and what senders are told of it."""

import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest

from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.receiving import ChannelAddress, LinkReceiver, RingConfig
from protos import link_pb2
from services.runtime.errors import PeerUnreachable
from tests.free_ports import free_port
from tests.kv_transfer.conftest import Target, identity, make_pool


def receiver_with(transport: str, *, timeouts: Timeouts | None = None, **places: Any) -> LinkReceiver:
    target = Target(make_pool(seed=2))
    return LinkReceiver(
        LinkSetup(identity("decode-0"), target.pool, target.allocator, (transport,), timeouts or Timeouts()),
        target,
        address=ChannelAddress(**places),
        ring=RingConfig(slot_bytes=20_000, ring_bytes=80_000, device_slot_bytes=20_000),
    )


@pytest.mark.parametrize(
    ("host", "advertise_host", "advertised"),
    [
        ("127.0.0.1", None, "127.0.0.1:{port}"),
        ("0.0.0.0", "192.0.2.7", "192.0.2.7:40007"),
        ("::1", None, "[::1]:{port}"),
        ("::", "2001:db8::7", "[2001:db8::7]:40007"),
    ],
)
async def test_pages_arrive_at_the_given_port(host: str, advertise_host: str | None, advertised: str) -> None:
    port = free_port(host)
    mapped = None if advertise_host is None else 40007
    receiver = receiver_with("tcp", host=host, port=port, advertise_host=advertise_host, advertise_port=mapped)
    try:
        listener = receiver._listener("tcp")
        assert listener.address.endswith(f":{port}")
        assert receiver._advertised(listener.address, "tcp") == advertised.format(port=port)
        for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as client:
                client.settimeout(5)
                is_reached = client.connect_ex((loopback, port)) == 0
                assert is_reached == (host in (loopback, "::") or (host == "0.0.0.0" and loopback == "127.0.0.1"))
    finally:
        await receiver.close()


async def test_a_port_that_is_taken_is_told_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        receiver_with("tcp", port=taken.getsockname()[1])


async def test_with_auto_only_the_channel_between_hosts_has_the_port() -> None:
    port = free_port("127.0.0.1")
    receiver = receiver_with("auto", port=port, advertise_port=40007)
    try:
        assert list(receiver._listeners) == ["tcp"]
        shared = receiver._listener("shm").address
        assert receiver._advertised(shared, "shm") == shared
    finally:
        await receiver.close()


async def test_a_sender_that_opens_no_link_is_unreachable_and_the_receiver_is_well() -> None:
    async def nothing() -> AsyncIterator[link_pb2.LinkMessage]:
        for message in ():
            yield message

    receiver = receiver_with("shm", timeouts=Timeouts(connect_s=0.0))
    with pytest.raises(PeerUnreachable, match="did not introduce itself"):
        await receiver._receive_hello(nothing())
    with pytest.raises(PeerUnreachable, match="did not open its channel"):
        await receiver._await_channel(Future())
    await receiver.close()
