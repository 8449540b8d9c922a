"""`python -m gateway` as a process: exit codes, settings, signals."""

import asyncio
import json
import re
import signal
import sys

import httpx
import pytest

from tests.waiting import HANG_LIMIT_S


async def start(*arguments):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def run(*arguments):
    process = await start(*arguments)
    async with asyncio.timeout(HANG_LIMIT_S):
        out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
        ([], "--model"),
        (["--model", ".", "--models", "models.toml"], "--models and --model or --model-name are both given"),
        (["--model-name", "m", "--models", "models.toml"], "--models and --model or --model-name are both given"),
        (["--models", "/nowhere/models.toml"], "the models file /nowhere/models.toml does not exist"),
        (["--model", ".", "--http-port", "70000"], "--http-port is '70000'"),
        (["--model", ".", "--routing", "best"], "one of hybrid, least_loaded"),
        (["--model", ".", "--nonsense", "1"], "--nonsense"),
    ],
)
async def test_bad_settings_end_with_2_and_one_sentence(arguments, words):
    code, out, error = await run(*arguments)
    assert (code, out) == (2, "")
    assert words in error
    assert error.count("\n") == 1


async def test_help_names_flags_and_variables():
    code, out, _ = await run("--help")
    assert code == 0
    assert "--failover-wait-s" in out
    assert "TANDEM_FAILOVER_WAIT_S" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serves_until_a_signal_and_never_loads_torch(model_folder, redis_url, cluster_name, number):
    arguments = ["--model", str(model_folder), "--redis", redis_url, "--cluster", cluster_name]
    process = await start(*arguments, "--http-port", "0", "--grpc-port", "0", "--drain-s", "1")
    async with asyncio.timeout(HANG_LIMIT_S):
        listening = json.loads(await process.stderr.readline())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening['http_port']}") as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
    with open(f"/proc/{process.pid}/maps") as maps:  # noqa: ASYNC230 - no disk is behind it
        assert not re.search(r"libtorch|_C\.cpython.*torch", maps.read())
    process.send_signal(number)
    async with asyncio.timeout(HANG_LIMIT_S):
        await process.communicate()
    assert process.returncode == 0


async def test_taken_port_is_a_bad_setting(model_folder, redis_url):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    arguments = ["--model", str(model_folder), "--redis", redis_url, "--http-port", str(port), "--grpc-port", "0"]
    code, _, error = await run(*arguments)
    server.close()
    await server.wait_closed()
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in error
