"""A Redis behind TLS: `rediss://` reaches it from the event loop and from threads, and believes only its CA."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.redis_store import Script, Store, run_script, thread_client
from services.runtime.errors import StoreUnavailable
from tests.certificates import Authority

ECHO = Script("return ARGV[1]")


@contextlib.asynccontextmanager
async def behind_tls(redis_url: str, authority: Authority) -> AsyncIterator[str]:
    """The address, without its scheme, of a Redis' Unix socket with TLS in front of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = authority.issue("redis")
    context.load_cert_chain(files.cert, files.key)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(redis_url.removeprefix("unix://"))
        await asyncio.gather(pass_on(reader, inner_writer), pass_on(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_rediss_reaches_it_and_believes_its_ca_alone(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    with EmbeddedRedis() as server:
        async with behind_tls(server.url, authority) as address:
            url = f"rediss://{address}?ssl_ca_certs={authority.path}"
            store = Store(url, cluster="c", timeout_s=5.0)
            assert await store.run(ECHO, (), ("x",)) == b"x"
            await store.close()

            with thread_client(url) as client:
                assert await asyncio.to_thread(run_script, client, ECHO, (), ("y",)) == b"y"

            for wrong in (f"rediss://{address}?ssl_ca_certs={other.path}", f"rediss://{address}", f"redis://{address}"):
                refused = Store(wrong, cluster="c", timeout_s=5.0)
                with pytest.raises(StoreUnavailable):
                    await refused.run(ECHO, (), ("x",))
                await refused.close()
                with thread_client(wrong) as client, pytest.raises(redis.ConnectionError):
                    await asyncio.to_thread(run_script, client, ECHO, (), ("y",))
