"""Worker processes that believe that their model is on a GPU: gateways hear what it says, and it holds up nothing."""

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.waiting import HANG_LIMIT_S

Start = Callable[..., Any]

ON_A_GPU = """
import sys, time
from services.engine.engine import EngineParts
from tests.fake_nvml import Nvml
EngineParts.gpu_uuid = "GPU-1234"
nvml = sys.modules["pynvml"] = Nvml()
"""
THAT_HANGS = """
class Endless:
    total = 100
    free = property(lambda self: time.sleep(600))
nvml.answers["nvmlDeviceGetMemoryInfo"] = Endless()
"""


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_gateways_hear_what_the_gpu_of_a_worker_says(start_worker: Start, make_gateway: Any, role: str) -> None:
    gateway = make_gateway()
    worker = start_worker(role, f"{role}-gpu", before=ON_A_GPU, metrics_port=0)
    await worker.until_state("ready")
    await gateway.connect(**{role: (worker.address, worker.incarnation)})
    session = getattr(gateway, role)
    async with asyncio.timeout(HANG_LIMIT_S):
        while not session.gpus:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)
    assert (session.gpus[0].temperature_c, session.gpus[0].total_bytes) == (41.0, 85_520_809_984)
    (port,) = [line["port"] for line in map(json.loads, worker.log.read_text().splitlines()) if "port" in line]
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    assert f'tandem_gpu_power_watts{{worker="{role}-gpu"}} 412.0' in page
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_driver_that_hangs_keeps_no_worker_from_starting_and_ending(start_worker: Start) -> None:
    worker = start_worker("decode", "decode-hangs", before=ON_A_GPU + THAT_HANGS)
    await worker.until_state("ready")
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ended() == 0
