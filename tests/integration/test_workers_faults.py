"""Cancelled, dropped, killed, late, refused, told to leave: whatever happens to two workers, nothing stays held."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from protos import worker_pb2
from tests.waiting import HANG_LIMIT_S

VOCAB_SIZE = 331
# Small chunks make a long prompt take many steps, so that there is a middle to interrupt.
FLAGS = {"chunk_tokens": 16, "kv_pages": 300, "page_size": 16}
Make = Callable[..., Any]


def prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def decode_worker(start_worker: Make) -> Any:
    return start_worker("decode", "decode-0", max_batch=8, max_admitted=32, **FLAGS)


@pytest.fixture(scope="module")
def prefill_worker(start_worker: Make) -> Any:
    return start_worker("prefill", "prefill-0", **FLAGS)


@pytest.fixture
async def pair(prefill_worker: Any, decode_worker: Any, make_gateway: Make) -> AsyncIterator[Any]:
    """A gateway and its two workers; nothing may be held at the end."""
    yield await make_gateway().connected_to(prefill_worker, decode_worker), prefill_worker, decode_worker
    await prefill_worker.until_free()
    await decode_worker.until_free()


async def test_a_hundred_requests_cancelled_at_random_moments_leave_nothing(pair: Any) -> None:
    gateway, _, _ = pair
    source = random.Random(11)
    running = asyncio.Semaphore(12)
    outcomes: list[str] = []

    async def one(number: int) -> None:
        async with running:
            length = source.choice((1, 16, 40, 150, 400))
            begun = asyncio.ensure_future(
                gateway.begin(f"c{number}", prompt(length), local=number % 4 == 3, max_tokens=source.choice((1, 5, 40)))
            )
            await asyncio.sleep(source.random() * 0.12)
            if number % 3:
                if not begun.done():
                    await asyncio.wait((begun,), timeout=source.random() * 0.1)
                answer = gateway.answers[f"c{number}", 1]
                await gateway.cancel(answer)
                await begun if "admitted" in answer.events else begun.cancel()
                outcomes.append("cancelled")
            else:
                answer = await begun
                await answer.until("finished", "failed", "refused")
                assert answer.error is None or answer.events == ["refused"], answer.error
                outcomes.append(answer.events[-1])

    await asyncio.gather(*(one(number) for number in range(100)))
    assert outcomes.count("cancelled") == 66
    assert len(await gateway.generate("after", prompt(33))) == 16


async def test_a_dropped_session_frees_everything_on_both_sides(pair: Any, make_gateway: Make) -> None:
    gateway, prefill, decode = pair
    doomed = await make_gateway().connected_to(prefill, decode)
    for number in range(8):
        await doomed.begin(f"d{number}", prompt(600 if number % 2 else 30), local=number == 3, max_tokens=900)
    await doomed.answers["d0", 1].until("decode_started")
    await doomed.drop()
    await prefill.until_free()
    await decode.until_free()
    assert len(await gateway.generate("after-drop", prompt(20))) == 16


async def test_a_decode_session_that_drops_ends_the_prefill_too(pair: Any, make_gateway: Make) -> None:
    _, prefill, decode = pair
    doomed = await make_gateway().connected_to(prefill, decode)
    answer = await doomed.begin("half", prompt(1500), max_tokens=100)
    await answer.until("prefill_started")
    await doomed.decode.drop()
    await answer.until("failed")
    assert answer.error is not None
    await decode.until_free()
    await prefill.until_free()


async def test_a_deadline_ends_a_request_on_both_sides(pair: Any) -> None:
    gateway, _, _ = pair
    decoding = await gateway.begin("slow-decode", prompt(20), max_tokens=1900, deadline_ms=150)
    local = await gateway.begin("slow-local", prompt(20), deadline_ms=100, local=True, max_tokens=1900)
    for answer in (decoding, local):
        await answer.until("failed", "finished")
        assert answer.error is not None
        assert answer.error.code == worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED


async def test_what_does_not_fit_is_refused_at_once(pair: Any) -> None:
    gateway, _, decode = pair
    holders = []
    while len(holders) < 8:
        crowded = await gateway.begin(f"h{len(holders)}", prompt(1500), max_tokens=500)
        if crowded.events == ["refused"]:
            break
        holders.append(crowded)
    assert len(holders) >= 2
    assert crowded.events == ["refused"]
    assert crowded.error.code == worker_pb2.ERROR_CODE_OVERLOADED
    assert crowded.error.retry_after_ms > 0
    never = await gateway.begin("never", prompt(1500), max_tokens=5000)
    assert never.error.code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    for holder in holders:
        await gateway.cancel(holder)
    await decode.until_free()
    again = await gateway.begin("again", prompt(1500), max_tokens=300)
    assert again.error is None
    await gateway.cancel(again)


async def test_a_prefill_worker_killed_in_mid_transfer_leaves_nothing_at_the_decode_worker(
    decode_worker: Any, start_worker: Make, make_gateway: Make
) -> None:
    victim = start_worker("prefill", "prefill-victim", **FLAGS)
    gateway = await make_gateway().connected_to(victim, decode_worker)
    answers = [await gateway.begin(f"k{n}", prompt(1000 + n), max_tokens=20) for n in range(2)]
    await answers[0].until("prefill_started")
    victim.process.send_signal(signal.SIGKILL)
    answer = answers[0]
    await answer.until("failed", "handed_off")
    assert answer.error is not None
    assert answer.error.code in (
        worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE,
        worker_pb2.ERROR_CODE_TRANSFER_FAILED,
    )
    for other in answers:
        await gateway.cancel(other)
    await decode_worker.until_free()
    assert len(await gateway.generate("survivor", prompt(50), local=True)) == 16


async def test_a_decode_worker_killed_in_mid_transfer_leaves_nothing_at_the_prefill_worker(
    prefill_worker: Any, start_worker: Make, make_gateway: Make
) -> None:
    victim = start_worker("decode", "decode-victim", **FLAGS)
    gateway = await make_gateway().connected_to(prefill_worker, victim)
    answer = await gateway.begin("dk", prompt(1500), max_tokens=20)
    await answer.until("prefill_started")
    victim.process.send_signal(signal.SIGKILL)
    await answer.until("failed")
    assert answer.error.code in (worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE, worker_pb2.ERROR_CODE_TRANSFER_FAILED)
    await prefill_worker.until_free()


async def test_told_to_leave_they_finish_first(start_worker: Make, make_gateway: Make) -> None:
    prefill = start_worker("prefill", "prefill-leaving", **FLAGS)
    decode = start_worker("decode", "decode-leaving", metrics_port=0, **FLAGS)
    gateway = await make_gateway().connected_to(prefill, decode)
    answer = await gateway.begin("last", prompt(700), max_tokens=800)
    await answer.until("prefill_started")
    prefill.process.send_signal(signal.SIGTERM)
    await gateway.decode.send(drain=worker_pb2.DrainWorker())
    await decode.until_state("draining")
    late = await gateway.begin("late", prompt(5))
    assert late.error.code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    await answer.until("finished", "failed")
    assert answer.error is None
    assert len(answer.token_ids) == 800
    assert await prefill.ended() == 0, prefill.log.read_text()
    assert await decode.ended() == 0, decode.log.read_text()
    for worker in (prefill, decode):
        await worker.until_state(None)


async def test_a_second_signal_does_not_wait(start_worker: Make, make_gateway: Make) -> None:
    decode = start_worker("decode", "decode-stubborn", **FLAGS)
    await decode.until_state("ready")
    gateway = make_gateway()
    await gateway.connect(decode=(decode.address, decode.incarnation))
    held = await gateway.begin("held", prompt(5), local=True, max_tokens=2000)
    assert held.error is None
    decode.process.send_signal(signal.SIGTERM)
    await decode.until_state("draining")
    decode.process.send_signal(signal.SIGTERM)
    assert await decode.ended() == 128 + signal.SIGTERM


async def test_a_wrong_model_or_setting_is_said_in_one_sentence(start_worker: Make, tmp_path: Path) -> None:
    empty = start_worker("prefill", "prefill-empty", model=tmp_path)
    wrong = start_worker("decode", "decode-wrong", kv_memory="1GiB", kv_pages=5)
    for worker, word in ((empty, "config.json"), (wrong, "--kv-memory")):
        assert await worker.ended(timeout_s=HANG_LIMIT_S) == 2
        last = worker.log.read_text().splitlines()[-1]
        assert last.startswith("error: ")
        assert word in last
