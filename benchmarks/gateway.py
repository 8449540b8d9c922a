"""Requests and streamed tokens per second of the gateway with instant workers, beside a bare endpoint.

`python -m benchmarks.gateway [--json FILE]`. The gateway has one core for itself; Redis, the fake workers and the load
client share another one. Each figure is given per second of wall time and per second of the gateway's own CPU time: on
a busy machine the second is the one to trust, and against the bare endpoint, which returns the same bytes in the same
run, more than by itself. A stream has 64 tokens; of 64 streams, each step's tokens come in one message of the worker,
and there is time for each to go out by itself. Then there are 1,024 streams of 256 tokens, more than the gateway's core
can send one by one: how many it delivers, and in how many events. Latencies are those of one client at a time, whose
workers answer at once.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import Ratio, add_arguments, leave
from services.cluster.embedded_redis import EmbeddedRedis

MODEL = Path(__file__).parent.parent / "demo" / "model"
CLUSTER = "bench-gateway"
NUM_CONNECTIONS = 64
ANSWER_TOKENS = 16
STREAM_TOKENS = 64
NUM_FLOODING = 1024
FLOODING_TOKENS = 256
WHOLE_STEP_MS = 1.0
STREAM_STEP_MS = 10.0
FLOOD_SETTLES_S = 3.0
"""Until all have begun and the gateway has found its pace."""
WARM_UP_S = 1.0
NUM_LATENCIES = 300
TARGET_REQUESTS_PER_S = 4000
TARGET_TOKENS_PER_S = 60_000
READY_TIMEOUT_S = 120.0
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

SERVER_CORE = 0
CLIENT_CORE = 1

WHOLE = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": ANSWER_TOKENS, "temperature": 0}
STREAMED = {**WHOLE, "max_tokens": STREAM_TOKENS, "stream": True}
FLOODING = {**STREAMED, "max_tokens": FLOODING_TOKENS}

_GENERATED = re.compile(r"^tandem_generated_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """What one run of the load client saw, and the CPU time that the server spent meanwhile."""

    num_requests: int
    num_refused: int
    num_bytes: int
    num_events: int
    wall_s: float
    server_cpu_s: float

    @property
    def per_wall_s(self) -> float:
        """Requests per second."""
        return self.num_requests / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        """Requests per second of the server's CPU time."""
        return self.num_requests / max(self.server_cpu_s, 1e-9)


@dataclass(frozen=True)
class Flood:
    """What a gateway delivers that is offered more than it can; of a time in the middle of it."""

    offered_per_s: float
    tokens_per_s: float
    tokens_per_event: float
    num_refused: int
    """Requests that were told to come later, of the first that the gateway ever saw at once."""


def main() -> None:
    """The command line; the hidden roles are the processes that a run consists of."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="Time of each measurement.")
    parser.add_argument("--role", choices=("run", "client", "floor"), default="run", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--request", default="", help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, default=NUM_CONNECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "client":
        load = _load_forever(arguments.port, arguments.request.encode(), arguments.connections, arguments.seconds)
        print(json.dumps(uvloop.run(load)))
    elif arguments.role == "floor":
        _serve_floor(arguments.port, arguments.answer.encode())
    else:
        figures = measure(arguments.seconds)
        _report(figures)
        leave(arguments, "gateway", figures, {"requests over a bare endpoint": Ratio(figures["ratio_to_floor_by_cpu"])})


def measure(seconds: float) -> dict[str, Any]:
    """All figures."""
    with EmbeddedRedis() as redis, gateway_process(redis.url) as (gateway_pid, port):
        with fake_workers(redis.url, step_ms=WHOLE_STEP_MS, tokens_per_step=ANSWER_TOKENS):
            await_ready(port)
            answer = post(port, WHOLE)
            whole = measure_load(gateway_pid, port, WHOLE, seconds)
            with _floor(answer) as (floor_pid, floor_port):
                floor = measure_load(floor_pid, floor_port, WHOLE, seconds)
        await_ready(port, is_ready=False)
        with fake_workers(redis.url, step_ms=STREAM_STEP_MS, tokens_per_step=1):
            await_ready(port)
            streamed = measure_load(gateway_pid, port, STREAMED, seconds)
            flood = _flood(port, seconds)
        await_ready(port, is_ready=False)
        with fake_workers(redis.url, step_ms=0.0, tokens_per_step=1):
            await_ready(port)
            ttft_ms = statistics.median(uvloop.run(_first_tokens_s(port))) * 1e3
    return {
        "requests_per_wall_s": whole.per_wall_s,
        "requests_per_gateway_cpu_s": whole.per_cpu_s,
        "gateway_cpu_us_per_request": 1e6 / whole.per_cpu_s,
        "floor_requests_per_wall_s": floor.per_wall_s,
        "floor_requests_per_cpu_s": floor.per_cpu_s,
        "ratio_to_floor_by_cpu": whole.per_cpu_s / floor.per_cpu_s,
        "streamed_tokens_per_wall_s": streamed.per_wall_s * STREAM_TOKENS,
        "streamed_tokens_per_gateway_cpu_s": streamed.per_cpu_s * STREAM_TOKENS,
        "gateway_cpu_us_per_streamed_event": streamed.server_cpu_s / max(1, streamed.num_events) * 1e6,
        "flooded_tokens_per_wall_s": flood.tokens_per_s,
        "ttft_p50_ms": ttft_ms,
        "target_requests_per_s": TARGET_REQUESTS_PER_S,
        "target_tokens_per_s": TARGET_TOKENS_PER_S,
        "whole": asdict(whole),
        "floor": asdict(floor),
        "streamed": asdict(streamed),
        "flood": asdict(flood),
    }


def _report(figures: dict[str, Any]) -> None:
    print(f"gateway, {NUM_CONNECTIONS} connections, {ANSWER_TOKENS} tokens in one JSON answer, instant workers")
    print(f"  requests/s                {figures['requests_per_wall_s']:10.0f}")
    print(f"  requests/s of own CPU     {figures['requests_per_gateway_cpu_s']:10.0f}   target {TARGET_REQUESTS_PER_S}")
    print(f"  CPU per request           {figures['gateway_cpu_us_per_request']:10.0f} us")
    print(f"  bare endpoint, requests/s {figures['floor_requests_per_wall_s']:10.0f}")
    print(f"  ratio to it, by CPU       {figures['ratio_to_floor_by_cpu']:10.3f}")
    print(f"streamed, {NUM_CONNECTIONS} streams of {STREAM_TOKENS} tokens, a step each {STREAM_STEP_MS:g} ms")
    print(f"  tokens/s                  {figures['streamed_tokens_per_wall_s']:10.0f}")
    tokens_per_s = figures["streamed_tokens_per_gateway_cpu_s"]
    print(f"  tokens/s of own CPU       {tokens_per_s:10.0f}")
    flood = figures["flood"]
    print(f"flooded, {NUM_FLOODING} streams of {FLOODING_TOKENS} tokens, {flood['offered_per_s']:.0f} tokens/s at most")
    print(f"  tokens/s                  {flood['tokens_per_s']:10.0f}   target {TARGET_TOKENS_PER_S}")
    print(f"  tokens in an event        {flood['tokens_per_event']:10.2f}")
    print(f"  told to come later        {flood['num_refused']:10d}")
    print(f"time to the first token of one client, p50 {figures['ttft_p50_ms']:.2f} ms")


def _flood(port: int, seconds: float) -> Flood:
    """Offers more than can be delivered, and reads the gateway's own count of tokens around some seconds of it."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--role", "client", "--port", str(port)]
    command += ["--request", json.dumps(FLOODING), "--connections", str(NUM_FLOODING)]
    command += ["--seconds", str(FLOOD_SETTLES_S + seconds + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        time.sleep(FLOOD_SETTLES_S)
        before = _delivered(port)
        began_s = time.monotonic()
        time.sleep(seconds)
        after = _delivered(port)
        took_s = time.monotonic() - began_s
        assert client.stdout is not None
        load = json.loads(client.stdout.read())
    if client.returncode:
        raise RuntimeError("a stream failed")
    tokens_per_s = (after - before) / took_s
    events_per_s = load["num_events"] / load["wall_s"]
    return Flood(NUM_FLOODING / STREAM_STEP_MS * 1e3, tokens_per_s, tokens_per_s / events_per_s, load["num_refused"])


def _delivered(port: int) -> float:
    """Tokens so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        tokens = _GENERATED.search(response.read().decode())
    assert tokens is not None
    return float(tokens[1])


def measure_load(server_pid: int, port: int, body: dict[str, Any], seconds: float) -> Load:
    """Loads a server for a while after warming it up; CPU time is read around the counted part."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--role", "client", "--port", str(port)]
    request = json.dumps(body)
    subprocess.run([*command, "--request", request, "--seconds", str(WARM_UP_S)], check=True, capture_output=True)
    cpu_before_s = _cpu_s(server_pid)
    client = subprocess.run(
        [*command, "--request", request, "--seconds", str(seconds)], check=True, capture_output=True, text=True
    )
    load = Load(**json.loads(client.stdout), server_cpu_s=_cpu_s(server_pid) - cpu_before_s)
    if load.num_refused:
        raise RuntimeError(f"{load.num_refused} requests were refused")
    return load


def _cpu_s(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


@contextlib.contextmanager
def gateway_process(redis_url: str, *flags: str) -> Iterator[tuple[int, int]]:
    """A gateway's process id and its HTTP port."""
    port = _free_port()
    command = [sys.executable, "-m", "gateway", "--model", str(MODEL), "--model-name", "bench", "--redis", redis_url]
    command += ["--cluster", CLUSTER, "--http-port", str(port), "--grpc-port", "0", "--log-level", "warning"]
    command += ["--drain-s", "1", *flags]
    with _process(command, core=SERVER_CORE) as pid:
        _await_port(port)
        yield pid, port


@contextlib.contextmanager
def fake_workers(redis_url: str, *, step_ms: float, tokens_per_step: int) -> Iterator[None]:
    """Workers of the gateways' cluster that compute nothing."""
    command = [sys.executable, "-m", "benchmarks.fake_worker", "--redis", redis_url, "--cluster", CLUSTER]
    command += ["--step-ms", str(step_ms), "--tokens-per-step", str(tokens_per_step)]
    with _process(command, core=CLIENT_CORE):
        yield


@contextlib.contextmanager
def _floor(answer: bytes) -> Iterator[tuple[int, int]]:
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.gateway", "--role", "floor", "--port", str(port)]
    with _process([*command, "--answer", answer.decode()], core=SERVER_CORE) as pid:
        _await_port(port)
        yield pid, port


@contextlib.contextmanager
def _process(command: list[str], *, core: int) -> Iterator[int]:
    process = subprocess.Popen(command)
    if (os.cpu_count() or 1) > max(SERVER_CORE, CLIENT_CORE):
        os.sched_setaffinity(process.pid, {core})
        os.sched_setaffinity(0, {CLIENT_CORE})
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _serve_floor(port: int, answer: bytes) -> None:
    """The least that a Python HTTP server can do: read the body, return bytes."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def complete(request: Request) -> Response:
        await request.body()
        return Response(answer, media_type="application/json")

    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )


class _Connection(asyncio.Protocol):
    """One keep-alive connection that asks again as soon as it has an answer, and later where it is told so."""

    _RETRY_AFTER = re.compile(rb"retry-after: (\d+)", re.IGNORECASE)
    _LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
    _LAST_CHUNK = b"\r\n0\r\n\r\n"

    def __init__(self, request: bytes, tally: dict[str, int], failed: "asyncio.Future[None]") -> None:
        self._request = request
        self._tally = tally
        self._failed = failed
        self._head = b""
        self._has_head = False
        self._retry_after_s: int | None = None
        """What a refusal says."""
        self._num_left: int | None = None
        """Bytes of the body to come; None: it has chunks."""
        self._last = b""
        """The last bytes of the chunks, as many as the end has."""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._tally["num_bytes"] += len(data)
        self._tally["num_events"] += data.count(b"data: {")
        if not self._has_head:
            self._head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                return
            retry_after = self._RETRY_AFTER.search(self._head)
            self._retry_after_s = int(retry_after[1]) if retry_after else None
            if not self._head.startswith(b"HTTP/1.1 200") and self._retry_after_s is None:
                self._fail((self._head + end + data)[:500].decode(errors="replace"))
                return
            self._has_head = True
            length = self._LENGTH.search(self._head)
            self._num_left = int(length[1]) if length else None
        if self._num_left is None:
            self._last = (self._last + data)[-len(self._LAST_CHUNK) :]
            is_complete = self._last == self._LAST_CHUNK
        else:
            self._num_left -= len(data)
            is_complete = not self._num_left
        if is_complete:
            self._head, self._has_head, self._last = b"", False, b""
            if self._retry_after_s is None:
                self._tally["num_requests"] += 1
                self._transport.write(self._request)
            else:
                self._tally["num_refused"] += 1
                asyncio.get_running_loop().call_later(self._retry_after_s, self._transport.write, self._request)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the server closed a connection")

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(RuntimeError(why))


async def _load_forever(port: int, body: bytes, num_connections: int, seconds: float) -> dict[str, float]:
    """Keeps all connections busy for a while. Raises RuntimeError on any answer but 200 and "later"."""
    loop = asyncio.get_running_loop()
    request = http_request(body)
    tally = {"num_requests": 0, "num_refused": 0, "num_bytes": 0, "num_events": 0}
    failed: asyncio.Future[None] = loop.create_future()
    started_s = time.perf_counter()
    for _ in range(num_connections):
        await loop.create_connection(lambda: _Connection(request, tally, failed), "127.0.0.1", port)
    await asyncio.wait((failed,), timeout=seconds)
    if failed.done():
        failed.result()
    return {**tally, "wall_s": time.perf_counter() - started_s}


async def _first_tokens_s(port: int) -> list[float]:
    """Seconds from a streamed request to its first event, one request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times_s = []
    for _ in range(NUM_LATENCIES):
        asked_s = time.perf_counter()
        writer.write(http_request(json.dumps(STREAMED).encode()))
        await reader.readuntil(b"data: {")
        times_s.append(time.perf_counter() - asked_s)
        await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    return times_s[NUM_LATENCIES // 10 :]


def http_request(body: bytes) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


def post(port: int, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: bytes = response.read()
    return answer


def await_ready(port: int, *, is_ready: bool = True) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster", timeout=1) as response:
                workers = json.load(response)["workers"]
            if sum(worker["state"] == "ready" for worker in workers) == (2 if is_ready else 0):
                return
        time.sleep(0.05)
    raise TimeoutError("the gateway did not see the workers come or go in time")


def _await_port(port: int) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
