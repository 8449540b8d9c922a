"""Connections that are ended to make room: the idlest of the port, and never one with a call."""

import contextlib
import socket
import time

import pytest

from services.runtime.idle_connections import IdleConnections, _address_of, _end_idlest


@contextlib.contextmanager
def connections(num: int):
    """Yields a listening port, and pairs (client, server) of connections to it, the one that came first the idlest."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port, pairs = listener.getsockname()[1], []
        for _ in range(num):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            server = stack.enter_context(listener.accept()[0])
            pairs.append((client, server))
        for client, server in pairs:
            client.sendall(b"x")
            assert server.recv(1) == b"x"
            time.sleep(0.02)  # silence is told in milliseconds
        yield port, pairs


def is_ended(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_idlest_are_ended_until_enough_are_left() -> None:
    with connections(5) as (port, pairs):
        assert _end_idlest({port}, set(), 5, 3) == 2
        assert [is_ended(client) for client, _ in pairs] == [True, True, False, False, False]


def test_nothing_is_ended_where_there_is_room_or_the_port_is_another() -> None:
    with connections(3) as (port, pairs):
        assert _end_idlest({port}, set(), 4, 1) == 0
        assert _end_idlest({port + 1}, set(), 0, 0) == 0
        assert not any(is_ended(client) for client, _ in pairs)


def test_a_connection_with_a_call_stays() -> None:
    with connections(3) as (port, pairs):
        busy = {pairs[0][0].getsockname()}
        assert _end_idlest({port}, busy, 3, 2) == 1
        assert [is_ended(client) for client, _ in pairs] == [False, True, False]


def test_calls_are_counted_by_their_address() -> None:
    idle = IdleConnections(8)
    with idle.call("ipv4:127.0.0.1:5"), idle.call("ipv4:127.0.0.1:5"):
        assert idle._num_calls == {"ipv4:127.0.0.1:5": 2}
    assert idle._num_calls == {}
    with contextlib.suppress(KeyError), idle.call("ipv4:127.0.0.1:6"):
        raise KeyError
    assert idle._num_calls == {}
    idle._thread.shutdown()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ipv4:127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:[::ffff:10.0.0.1]:7", ("10.0.0.1", 7)),
        ("ipv6:[fe80::1%25eth0]:7", ("fe80::1", 7)),
        ("unix:/tmp/socket", None),
        ("ipv4:127.0.0.1", None),
    ],
)
def test_addresses_are_read_as_grpc_writes_them(written, meant) -> None:
    assert _address_of(written) == meant
