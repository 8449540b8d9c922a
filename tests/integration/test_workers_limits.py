"""How soon workers let go of what is cancelled, that a long step is no silence, and how they end when one hangs."""

import asyncio
import itertools
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protos import cluster_pb2, worker_pb2
from tests.waiting import HANG_LIMIT_S

VOCAB_SIZE = 331
# Small chunks make a long prompt take many steps, so that there is a middle to interrupt.
FLAGS = {"chunk_tokens": 16, "kv_pages": 300}
PHASES = (
    "queued",
    "reserving",
    "prefilling",
    "transferring",
    "committing",
    "decoding",
    "paused",
    "handing_over",
    "session",
)
Make = Callable[..., Any]


def prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


async def until_free(gateway: Any) -> None:
    """Waits until each worker says that it holds nothing."""
    async with asyncio.timeout(HANG_LIMIT_S):
        for session in (gateway.prefill, *gateway.decodes):
            while True:
                load = session.load
                if not (load.pages.reserved or load.pages.used or load.running or load.waiting or load.promised_pages):
                    break
                await asyncio.sleep(0.001)


async def test_what_is_cancelled_is_let_go_at_once_in_every_phase(start_worker: Make, make_gateway: Make) -> None:
    prefill = start_worker("prefill", "prefill-cancel", **FLAGS)
    decodes = [start_worker("decode", f"decode-cancel-{n}", **FLAGS) for n in range(2)]
    watching = await make_gateway().connected_to(prefill, *decodes)
    source = random.Random(1)
    took_s: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for number in range(6 * len(PHASES)):
        phase = PHASES[number % len(PHASES)]
        gateway = await make_gateway().connected_to(prefill, *decodes)
        length = 1500 if phase in ("queued", "prefilling", "transferring") else 600
        answers = [await gateway.begin(f"c{number}", prompt(length), max_tokens=500)]
        answer = answers[0]
        match phase:
            case "queued":
                await answer.until("prefill_started")
                answers.append(await gateway.begin(f"q{number}", prompt(1400), max_tokens=300))
            case "reserving":
                await asyncio.sleep(source.random() * 0.003)
            case "prefilling":
                await answer.until("prefill_started")
            case "transferring":
                await answer.until("prefill_started")
                await asyncio.sleep(source.random() * 0.1)
            case "committing":
                await answer.until("tokens")
            case "decoding" | "session":
                await answer.until("decode_started")
            case "paused" | "handing_over":
                await answer.until("decode_started")
                await gateway.pause(answer)
        if phase == "handing_over":
            answers.append(await gateway.admit_from_decode(answer, answer.token_ids, decode=1))
            await gateway.hand_over(answer, answers[1])
            await asyncio.sleep(source.random() * 0.005)
        began = time.monotonic()
        if phase == "session":
            await gateway.drop()
        else:
            for held in answers:
                await gateway.cancel(held)
        await until_free(watching)
        took_s[phase].append(time.monotonic() - began)
        assert all("finished" not in held.events for held in answers), f"{phase} came too late"
        if phase != "session":
            await gateway.drop()
    every = sorted(taken for several in took_s.values() for taken in several)
    p99_s = every[round(0.99 * (len(every) - 1))]
    slowest = {phase: round(1000 * max(several)) for phase, several in took_s.items()}
    p50_s = every[len(every) // 2]
    print(f"freed after a cancel: p50 {1000 * p50_s:.0f} ms, p99 {1000 * p99_s:.0f} ms, {slowest}")  # noqa: T201
    # The promise is 500 ms; the machine that tests may have other things to do.
    assert p99_s < 3.0
    for worker in (prefill, *decodes):
        await worker.until_free()


@pytest.fixture
def long_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a context that makes one step last for seconds."""
    folder = tmp_path / "long-model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 65_536
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_computes_one_long_step_is_not_silent(
    long_model: Path, start_worker: Make, make_gateway: Make, role: str
) -> None:
    flags = {"model": long_model, "chunk_tokens": 32_768, "kv_pages": 2100}
    prefill = start_worker("prefill", f"prefill-long-{role}", **flags)
    decode = start_worker("decode", f"decode-long-{role}", **flags)
    gateway = await make_gateway().connected_to(prefill, decode)
    session = gateway.prefill if role == "prefill" else gateway.decode
    answer = await gateway.begin("long", prompt(32_000), max_tokens=2, local=role == "decode", deadline_ms=500_000)
    begun = time.monotonic()
    leases = []
    worker = prefill if role == "prefill" else decode
    while not {"tokens", "failed"} & set(answer.events):
        leases.append((await worker.find()) is not None)
        await asyncio.sleep(0.2)
    step_s = time.monotonic() - begun
    assert answer.error is None, answer.error
    assert step_s > 4, "the step was too short to show anything"
    during = [begun, *(at for at in session.arrivals_s if begun < at < begun + step_s), begun + step_s]
    gap_s = max(after - before for before, after in itertools.pairwise(during))
    print(f"a step of {step_s:.1f} s: longest silence {gap_s:.2f} s")  # noqa: T201
    assert gap_s < 2.5, "a peer counts as dead after 3 s"
    assert all(leases), "its lease lived on"
    await answer.until("finished")
    for worker in (prefill, decode):
        await worker.until_free()


HANG = """
import threading
from services.engine.runner import ModelRunner
compute = ModelRunner.compute
def hang(self, step):
    # Alone, or in one step with the prompt behind it.
    if step.packed is not None and len(step.packed.token_ids) in (77, 77 + 30):
        threading.Event().wait()
    return compute(self, step)
ModelRunner.compute = hang
"""


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_hangs_ends_its_worker(start_worker: Make, make_gateway: Make, role: str) -> None:
    others = {"chunk_tokens": 512, "kv_pages": 300}
    hanging = others | {"step_timeout": 1.5, "before": HANG}
    prefill = start_worker("prefill", f"prefill-hang-{role}", **(hanging if role == "prefill" else others))
    decode = start_worker("decode", f"decode-hang-{role}", **(hanging if role == "decode" else others))
    gateway = await make_gateway().connected_to(prefill, decode)
    assert len(await gateway.generate("fine", prompt(76))) == 16
    stuck = await gateway.begin("stuck", prompt(77), local=role == "decode")
    waiting = await gateway.begin("waiting", prompt(30), local=role == "decode")
    for answer in (stuck, waiting):
        await answer.until("failed")
    await stuck.until_error_of(role)
    assert stuck.errors[role].code == worker_pb2.ERROR_CODE_INTERNAL
    ended, other = (prefill, decode) if role == "prefill" else (decode, prefill)
    assert await ended.ended(timeout_s=HANG_LIMIT_S) == 1, ended.log.read_text()
    assert "did not end in time" in ended.log.read_text()
    await ended.until_state(None)
    for answer in (stuck, waiting):
        await gateway.cancel(answer)
    await other.until_free()


async def test_a_drain_that_takes_too_long_ends_with_clear_errors_and_a_clean_exit(
    start_worker: Make, make_gateway: Make
) -> None:
    prefill = start_worker("prefill", "prefill-late", **FLAGS)
    decode = start_worker("decode", "decode-late", drain_timeout=1, **FLAGS)
    gateway = await make_gateway().connected_to(prefill, decode)
    paused = await gateway.begin("paused", prompt(20), max_tokens=500)
    await paused.until("decode_started")
    await gateway.pause(paused)
    decode.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(HANG_LIMIT_S):
        while gateway.decode.load.state != cluster_pb2.WORKER_STATE_DRAINING:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    late = await gateway.begin("late", prompt(5))
    assert late.error.code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    await paused.until("failed")
    assert paused.error.code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    assert "leaving" in paused.error.message
    assert await decode.ended() == 0, decode.log.read_text()
    assert "longer than its limit" in decode.log.read_text()
    await decode.until_state(None)
    await prefill.until_free()


async def test_a_draining_decode_worker_takes_what_it_admitted_and_hands_it_over(
    start_worker: Make, make_gateway: Make
) -> None:
    prefill = start_worker("prefill", "prefill-drain", **FLAGS)
    leaving = start_worker("decode", "decode-leaving", **FLAGS)
    staying = start_worker("decode", "decode-staying", **FLAGS)
    gateway = await make_gateway().connected_to(prefill, leaving, staying)
    whole = await gateway.generate("whole", prompt(700), max_tokens=300, decode=1)
    answer = await gateway.begin("moves", prompt(700), max_tokens=300)
    await answer.until("prefill_started")
    leaving.process.send_signal(signal.SIGTERM)
    await leaving.until_state("draining")
    await gateway.pause(answer)
    assert answer.error is None, "its transfer continued"
    tokens = dict(answer.tokens)
    moved = await gateway.admit_from_decode(answer, [tokens[index] for index in sorted(tokens)], decode=1)
    await gateway.hand_over(answer, moved)
    assert await leaving.ended() == 0, leaving.log.read_text()
    await answer.until("moved")
    await moved.until("finished", "failed")
    assert tokens | moved.tokens == dict(enumerate(whole))
    await staying.until_free()
    await prefill.until_free()
