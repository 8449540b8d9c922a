"""Connections to hosts with several addresses, over real sockets; a listener with a full backlog does not answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from services.runtime.dialling import _alternating_families, _Attempts, dial

Target = tuple[str, int]
HANG_S = 30.0


@contextlib.contextmanager
def listening() -> Iterator[Target]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@contextlib.contextmanager
def silent() -> Iterator[Target]:
    """An address whose kernel drops connection requests: its backlog is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()


def closed() -> Target:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()  # type: ignore[no-any-return]


def resolving(*targets: Target) -> Any:
    return lambda host, port: [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", each) for each in targets]


def test_one_address_that_answers() -> None:
    with listening() as target, dial(*target, timeout_s=HANG_S) as sock:
        assert sock.getpeername() == target
        assert sock.gettimeout() == HANG_S


def test_a_silent_address_does_not_delay_the_next_one() -> None:
    with silent() as first, listening() as second:
        with dial("twice", 1, timeout_s=HANG_S, resolve=resolving(first, second)) as sock:
            assert sock.getpeername() == second


def test_an_address_that_refuses_is_followed_by_the_next_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.dialling.STAGGER_S", HANG_S)
    with listening() as second:
        with dial("twice", 1, timeout_s=HANG_S, resolve=resolving(closed(), second)) as sock:
            assert sock.getpeername() == second


def test_all_addresses_refuse() -> None:
    one, other = closed(), closed()
    with pytest.raises(ConnectionRefusedError) as caught:
        dial("twice", 1, timeout_s=HANG_S, resolve=resolving(one, other))
    assert caught.value.strerror is not None
    assert f"127.0.0.1:{one[1]}: Connection refused; 127.0.0.1:{other[1]}" in caught.value.strerror


def test_no_address_answers_in_time() -> None:
    with silent() as one, silent() as other, pytest.raises(TimeoutError) as caught:
        dial("twice", 1, timeout_s=0.5, resolve=resolving(one, other))
    assert caught.value.strerror is not None
    assert f"127.0.0.1:{one[1]}: no answer within 0.5 s" in caught.value.strerror
    assert f"127.0.0.1:{other[1]}: no answer within 0.5 s" in caught.value.strerror


def test_a_silent_address_that_begins_to_answer_is_found_by_a_later_attempt() -> None:
    """The first packet is lost: here, the first attempt meets a full backlog."""
    addresses: list[Any] = []
    with silent() as lost, listening() as target:
        with pytest.MonkeyPatch.context() as patch:
            start = _Attempts._start

            def start_elsewhere(self: _Attempts, address: Any) -> None:
                addresses.append(address)
                start(self, (*address[:4], lost if len(addresses) == 1 else target))

            patch.setattr(_Attempts, "_start", start_elsewhere)
            with dial("once", 1, timeout_s=HANG_S, resolve=resolving(lost)) as sock:
                assert sock.getpeername() == target
    assert len(addresses) == 2


def test_a_name_without_addresses_fails() -> None:
    with pytest.raises(OSError, match="no connection"):
        dial("nobody", 1, timeout_s=HANG_S, resolve=resolving())


def test_families_alternate() -> None:
    four = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"192.0.2.{n}", 1)) for n in range(2)]
    six = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"2001:db8::{n}", 1, 0, 0)) for n in range(3)]
    assert _alternating_families([*six, *four]) == [six[0], four[0], six[1], four[1], six[2]]


def test_losing_connections_are_closed() -> None:
    with listening() as winner, silent() as loser:
        with dial("twice", 1, timeout_s=HANG_S, resolve=resolving(loser, winner)):
            pass  # an unclosed socket is a warning, which is an error here
