"""A server's address: what it binds, which users it lets in at a socket, and how it ends."""

import asyncio
import socket

import httpx
import pytest

from gateway.http.server import HttpServer
from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello", "more_body": False})


async def get(port):
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/")).text


async def test_it_says_which_free_port_it_has_and_gives_it_back():
    server = HttpServer(hello)
    port = await server.start("127.0.0.1", 0)
    assert await get(port) == "hello"
    async with asyncio.timeout(HANG_LIMIT_S):
        while server.connections.num_open:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
    async with asyncio.timeout(HANG_LIMIT_S):
        await server.stop(10 * HANG_LIMIT_S)  # No connection is open, so the grace period does not begin.
    with pytest.raises(httpx.ConnectError):
        await get(port)


async def test_a_taken_port_is_a_bad_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await HttpServer(hello).start("127.0.0.1", port)


async def test_a_closed_listener_takes_nobody_new_and_ends_no_request():
    may_end = asyncio.Event()

    async def slow(scope, receive, send):
        await may_end.wait()
        await hello(scope, receive, send)

    server = HttpServer(slow)
    port = await server.start("127.0.0.1", 0)
    asking = asyncio.create_task(get(port))
    async with asyncio.timeout(HANG_LIMIT_S):
        while not server.connections.num_open:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        server.close_listener()
        with pytest.raises(httpx.ConnectError):
            await get(port)
        may_end.set()
        assert await asking == "hello"
    await server.stop(1.0)


async def test_an_answer_of_a_leaving_server_ends_its_connection():
    server = HttpServer(hello)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/"
        assert "connection" not in (await client.get(url)).headers
        server.begin_to_leave()
        assert (await client.get(url)).headers["connection"] == "close"
    await server.stop(1.0)


async def test_a_socket_is_this_users_and_takes_the_place_of_a_dead_one(tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = HttpServer(hello)
    await server.start_on_socket(path)
    assert path.stat().st_mode & 0o777 == 0o600
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
        assert (await client.get("http://localhost/")).text == "hello"
    with pytest.raises(ConfigError, match="cannot listen"):
        await HttpServer(hello).start_on_socket(path)
    await server.stop(1.0)
    assert not path.exists()
