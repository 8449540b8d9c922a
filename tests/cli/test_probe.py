"""`tandem probe`: against servers of ours, with and without TLS, and against sockets that are not servers."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from services.runtime import rpc
from services.runtime.tls import Identity
from tests.certificates import Authority
from tests.waiting import HANG_LIMIT_S


async def probe(*words: str) -> tuple[int, str]:
    """The exit code and what was said, of a process of its own: this one's event loop has the server."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "probe", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), HANG_LIMIT_S)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_a_server_lives_before_it_is_ready_and_after() -> None:
    server = rpc.make_server(["a.Service"])
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    assert await probe("live", address) == (0, f"{address} is live\n")
    assert await probe("ready", address) == (1, f"error: {address} is not ready\n")
    await server.set_serving(True)
    assert await probe("ready", address) == (0, f"{address} is ready\n")
    await server.set_serving(False)
    assert (await probe("live", address), (await probe("ready", address))[0]) == ((0, f"{address} is live\n"), 1)
    await server.stop(0)
    code, said = await probe("live", address)
    assert (code, "nothing listens there" in said) == (1, True)


async def test_a_worker_with_mutual_tls_is_asked_with_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("worker", roles=("decode",))
    monkeypatch.setattr(rpc, "_identity", Identity(files))
    server = rpc.make_server(["a.Service"])
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.set_serving(True)
    flags = [f"--tls-ca={authority.path}", f"--tls-cert={files.cert}", f"--tls-key={files.key}"]
    assert await probe("ready", address, *flags) == (0, f"{address} is ready\n")
    code, said = await probe("live", address, "--timeout=2")
    assert (code, "cannot be asked" in said) == (1, True)
    await server.stop(0)


def test_a_gateways_pages(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /health"], api.routes["GET /ready"] = (200, {}), (503, {})
    assert main(["probe", "live", api.url]) == 0
    assert main(["probe", "ready", api.url]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{api.url} is live\n", f"error: {api.url} is not ready\n")


def test_what_does_not_answer_is_not_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["probe", "live", address, "--timeout=0.3"]) == 1
        assert main(["probe", "live", f"http://{address}", "--timeout=0.3"]) == 1


def test_other_questions_are_refused() -> None:
    assert main(["probe", "well", "127.0.0.1:1"]) == 2
