"""Opens TCP connections to a host that may have several addresses, some of which may not answer.

Follows RFC 8305 ("Happy Eyeballs"): attempts start one after the other, run in parallel, and the first one to connect
wins.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from typing import Any, TypeAlias

from services.runtime.addresses import join_host_port

STAGGER_S = 0.25
"""Delay after which the next address is tried while the previous attempts are still pending, in seconds."""

REPEAT_S = 0.3
"""Interval at which silent addresses are tried again, in seconds, so that a lost packet does not cost a second."""

_AddressInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]
Resolve: TypeAlias = Callable[[str, int], Iterable[_AddressInfo]]


def resolve_tcp(host: str, port: int) -> list[_AddressInfo]:
    """Returns the TCP addresses of a host, as `socket.getaddrinfo` does. Raises OSError."""
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def dial(host: str, port: int, *, timeout_s: float, resolve: Resolve = resolve_tcp) -> socket.socket:
    """Returns a connected TCP socket with `timeout_s` as its timeout.

    Every address gets the time that is left when its attempt starts, so a silent address does not delay the others.
    Silent addresses are tried again with a new connection until the time is over.
    Raises OSError with the reason, of each address if there are several, and TimeoutError if one did not answer.
    """
    attempts = _Attempts(_alternating_families(resolve(host, port)), timeout_s)
    with attempts:
        sock = attempts.first()
    sock.settimeout(timeout_s)
    return sock


def _alternating_families(found: Iterable[_AddressInfo]) -> list[_AddressInfo]:
    """Orders addresses so that IPv6 and IPv4 alternate, starting with the first one's family (RFC 8305, section 4)."""
    found = list(dict.fromkeys(found))
    first = [each for each in found if each[0] == found[0][0]]
    rest = [each for each in found if each[0] != found[0][0]]
    return [each for each in chain.from_iterable(zip_longest(first, rest)) if each is not None]


class _Attempts:
    """Pending connections to the addresses of one host. Leaving the scope closes all but the returned one."""

    def __init__(self, addresses: Iterable[_AddressInfo], timeout_s: float) -> None:
        self._untried = deque(addresses)
        self._is_alone = len(self._untried) == 1
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._selector = selectors.DefaultSelector()
        self._failures: list[OSError] = []
        self._reasons: list[str] = []

    def __enter__(self) -> _Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            _socket_of(key).close()
        self._selector.close()

    def first(self) -> socket.socket:
        """Returns the first connection that is established. Raises OSError on timeout."""
        next_start_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            is_idle = not self._selector.get_map()
            if now_s >= self._deadline_s or (is_idle and not self._untried):
                raise self._failure()
            if is_idle or now_s >= next_start_s:
                if not self._untried:
                    self._untried.extend(dict.fromkeys(key.data for key in self._selector.get_map().values()))
                self._start(self._untried.popleft())
                next_start_s = now_s + (STAGGER_S if self._untried else REPEAT_S)
                continue
            for key, _ in self._selector.select(max(0.0, min(self._deadline_s, next_start_s) - now_s)):
                sock = self._established(key)
                if sock is not None:
                    return sock
                if self._untried:
                    next_start_s = now_s  # RFC 8305, section 5: a failed attempt starts the next one at once

    def _start(self, address: _AddressInfo) -> None:
        family, kind, protocol, _, target = address
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # for example a family that this machine does not have
            self._note(target, error)
            return
        sock.setblocking(False)
        code = sock.connect_ex(target)
        if code in (0, errno.EINPROGRESS, errno.EINTR):
            self._selector.register(sock, selectors.EVENT_WRITE, address)
        else:
            sock.close()
            self._note(target, OSError(code, os.strerror(code)))

    def _established(self, key: selectors.SelectorKey) -> socket.socket | None:
        sock = _socket_of(key)
        self._selector.unregister(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            return sock
        sock.close()
        self._note(key.data[4], OSError(code, os.strerror(code)))
        return None

    def _note(self, target: tuple[Any, ...], error: OSError) -> None:
        self._failures.append(error)
        self._reasons.append(self._reason(target, error.strerror or str(error)))

    def _reason(self, target: tuple[Any, ...], reason: str) -> str:
        return reason if self._is_alone else f"{join_host_port(target[0], target[1])}: {reason}"

    def _failure(self) -> OSError:
        silent = list(dict.fromkeys(key.data[4] for key in self._selector.get_map().values()))
        reasons = self._reasons + [self._reason(each, f"no answer within {self._timeout_s:.3g} s") for each in silent]
        message = "; ".join(reasons) or f"no connection within {self._timeout_s:.3g} s"
        if silent or not self._failures:
            return TimeoutError(errno.ETIMEDOUT, message)
        return OSError(self._failures[-1].errno, message)  # Python picks the subclass, such as ConnectionRefusedError


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    sock = key.fileobj
    assert isinstance(sock, socket.socket), "only sockets are registered"
    return sock
