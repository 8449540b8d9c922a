"""What probes say of real processes: loading, ready, draining, fenced, frozen, and without Redis or workers."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.registry import WorkerLease, new_incarnation
from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "demo" / "model"
LIMIT_S = HANG_LIMIT_S
Start = Callable[..., Any]


async def probe(address: str) -> tuple[bool, bool]:
    """Whether the process at an address lives, and whether it is ready."""
    codes = []
    for question in ("live", "ready"):
        command = (sys.executable, "-m", "cli.main", "probe", question, address, "--timeout=3")
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        codes.append(await asyncio.wait_for(process.wait(), LIMIT_S))
    assert set(codes) <= {0, 1}
    return codes[0] == 0, codes[1] == 0


async def until(address: str, expected: tuple[bool, bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (found := await probe(address)) != expected:
            assert found != (False, True)


@pytest.mark.parametrize("why", ["SIGTERM", pytest.param("fenced", marks=pytest.mark.slow)])
async def test_a_worker_is_ready_from_its_load_to_its_drain(
    start_worker: Start, make_gateway: Start, redis_url: str, why: str
) -> None:
    port, name = free_port(), f"probed-{why.lower()}"
    address = f"127.0.0.1:{port}"
    worker = start_worker("decode", name, port=port, before="import sys; sys.stdin.readline()", stdin=subprocess.PIPE)
    assert await probe(address) == (False, False), "it has not loaded yet"
    worker.process.stdin.write(b"\n")
    worker.process.stdin.flush()
    await worker.until_state("ready")
    await until(address, (True, True))

    helper = start_worker("prefill", f"helper-{why.lower()}")
    await helper.until_state("ready")
    gateway = await make_gateway().connected_to(helper, worker)
    answer = await gateway.begin("long", [5] * 40, max_tokens=1500, ignore_eos=True)
    await answer.until("tokens")
    newer = None
    if why == "SIGTERM":
        worker.process.send_signal(signal.SIGTERM)
    else:
        record = msgspec.structs.replace(worker.record, incarnation=new_incarnation())
        record = msgspec.structs.replace(record, started_unix_ns=record.started_unix_ns + 10**9)
        newer = WorkerLease(redis_url, cluster=worker.cluster, record=record)
        newer.start()
    try:
        await until(address, (True, False))
    finally:
        if newer is not None:
            newer.release()
    worker.process.send_signal(signal.SIGKILL)
    await until(address, (False, False))


@pytest.mark.slow
async def test_a_frozen_worker_does_not_live(start_worker: Start) -> None:
    worker = start_worker("decode", "frozen")
    await worker.until_state("ready")
    worker.process.send_signal(signal.SIGSTOP)
    assert await probe(worker.address) == (False, False)
    worker.process.send_signal(signal.SIGCONT)
    await until(worker.address, (True, True))


class Programs:
    """A gateway and a worker of the demo model, each a process, that look for Redis at one socket."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.redis_url = redis_url
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.http, self.grpc, self.worker = free_port(), free_port(), free_port()

    def start(self, module: str, **flags: Any) -> None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        command = [sys.executable, "-m", module, f"--model={DEMO_MODEL}", f"--redis={self.redis_url}", *words]
        with (self.folder / module).open("wb") as log:
            self.processes[module] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(HANG_LIMIT_S)


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.mark.slow
async def test_neither_redis_nor_workers_decide_about_life(redis: EmbeddedRedis, tmp_path: Path) -> None:
    programs = Programs(redis.url, tmp_path)
    gateway, page = f"127.0.0.1:{programs.grpc}", f"http://127.0.0.1:{programs.http}"
    worker = f"127.0.0.1:{programs.worker}"
    redis.kill()
    try:
        programs.start("gateway", http_port=programs.http, grpc_port=programs.grpc, linger_s=30, drain_s=30)
        programs.start("decode_worker", id="decode-0", port=programs.worker, threads=1, kv_pages=64)
        for address in (gateway, page, worker):
            await until(address, (True, False))
        redis.start()
        for address in (worker, gateway, page):
            await until(address, (True, True))
        redis.kill()
        await asyncio.sleep(4)  # longer than a lease
        for address in (gateway, page, worker):
            assert await probe(address) == (True, True), address
        programs.processes["gateway"].send_signal(signal.SIGTERM)
        for address in (gateway, page):
            await until(address, (True, False))
        redis.start()
    finally:
        programs.end()
