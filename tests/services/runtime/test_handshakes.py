"""What is said of handshakes that fail, by a server on a real socket and by one in memory."""

import asyncio
import contextlib
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from gateway.http.server import HttpServer
from services.runtime.clock import ManualClock
from services.runtime.handshakes import FAILED_BURST, UNBELIEVED, log_failures
from services.runtime.tls import Identity
from tests.certificates import Authority
from tests.waiting import HANG_LIMIT_S


async def never_called(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody came through")


def shake_hands(port: int, context: ssl.SSLContext) -> None:
    """Connects as most programs do; asyncio's clients leave without saying why."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_LIMIT_S) as plain:
        context.wrap_socket(plain, server_hostname="127.0.0.1")


async def test_a_client_without_tls_and_one_without_the_ca_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    server = HttpServer(never_called, identity=Identity(authority.issue("web")))
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(HANG_LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.to_thread(shake_hands, port, ssl.create_default_context(cafile=stranger.path))
            # One that only looks whether the port is open is no failure.
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            while len(caplog.records) < 2:  # noqa: ASYNC110 - the server's task writes them
                await asyncio.sleep(0.01)
    finally:
        await server.stop(1)
    said = [(record.levelno, record.message, record.__dict__["found"]) for record in caplog.records]
    message = "a TLS handshake with a client failed"
    assert said[0][:2] == said[1][:2] == (logging.WARNING, message)
    assert "https://" in said[0][2]
    assert said[1][2] == UNBELIEVED
    assert len(said) == 2


def fail(context: ssl.SSLContext) -> None:
    down, up = ssl.MemoryBIO(), ssl.MemoryBIO()
    down.write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ssl.SSLError, match="HTTP_REQUEST"):
        context.wrap_bio(down, up, server_side=True).do_handshake()


def test_many_failures_are_few_lines_that_say_how_many_they_stand_for(caplog: pytest.LogCaptureFixture) -> None:
    clock, context = ManualClock(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    log_failures(context, clock=clock)
    for _ in range(FAILED_BURST + 7):
        fail(context)
    assert len(caplog.records) == FAILED_BURST
    clock.advance(10.0)
    fail(context)
    assert [record.__dict__["others"] for record in caplog.records] == [0] * FAILED_BURST + [7]
