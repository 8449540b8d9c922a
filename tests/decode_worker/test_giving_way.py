"""Preemption in a worker: whatever happens to a sequence that is out of the batch, it answers and leaks nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from decode_worker import pages
from kv_transfer.protocol.messages import TransferId
from protos import worker_pb2
from services.runtime.errors import RequestCancelled
from tests.kept_spans import KeptSpans, events_of
from tests.waiting import HANG_LIMIT_S
from worker.attempts import AttemptKey

Make = Callable[..., Any]
FULL = 44
SWAP = 1 << 20


@pytest.fixture(autouse=True)
def copying_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runner computes in no time."""
    monkeypatch.setattr(pages, "is_swap_cheaper", lambda **_: True)


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sum(tokens) % 1000)
    return tokens[len(prompt) :]


async def pressed(bench: Any, gateway: Any, *, at_step: int = 36, **fields: Any) -> None:
    """Has `a` and `r` decoded in memory for one and a half of them, until `r` has lost its pages; a step waits then."""
    bench.runner.gate.clear()
    gateway.admit("a", [1] * 6, max_tokens=FULL, local=True, service_class=1)
    await bench.until(lambda: bench.runner.num_steps == 1)
    gateway.admit("r", [2] * 6, max_tokens=FULL, local=True, service_class=4, **fields)
    await gateway.event("r", "admitted")
    bench.runner.pause_at_step = at_step
    bench.runner.gate.set()
    await bench.until(lambda: bench.runner.num_steps == at_step)
    await bench.until(lambda: not bench.runner.gate.is_set())
    await bench.until(lambda: bench.worker.load().num_preempted >= 1)
    assert AttemptKey("r", 1) not in bench.worker.engine._pages


def is_swapped(bench: Any) -> bool:
    return AttemptKey("r", 1) in bench.worker.engine._pages._swapped


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("swap_bytes", [0, SWAP])
async def test_each_token_is_emitted_once_whoever_gave_way(make_bench: Make, exact: bool, swap_bytes: int) -> None:
    bench = make_bench(exact=exact, swap_bytes=swap_bytes)
    gateway = bench.gateway()
    await pressed(bench, gateway)
    assert is_swapped(bench) == (swap_bytes > 0)
    bench.runner.gate.set()
    await gateway.event("r", "finished")
    for name, first in (("a", 1), ("r", 2)):
        assert gateway.tokens(name) == dict(enumerate(answer([first] * 6, FULL)))
        kinds = gateway.kinds(name)
        assert kinds.count("decode_started") == kinds.count("prefill_started") == kinds.count("finished") == 1
    await bench.until_free()
    labels = {"worker": "decode-0", "reason": "swapped" if swap_bytes else "recomputed"}
    assert bench.metrics.registry.get_sample_value("tandem_preemptions_total", labels) >= 1


@pytest.mark.parametrize("swap_bytes", [0, SWAP])
@pytest.mark.parametrize("how", ["cancel", "session", "drop", "newer", "deadline", "engine", "close"])
async def test_an_end_while_it_has_no_pages_leaves_nothing(make_bench: Make, how: str, swap_bytes: int) -> None:
    bench = make_bench(swap_bytes=swap_bytes)
    gateway, other = bench.gateway(), bench.gateway()
    await pressed(bench, gateway, deadline_ms=400 if how == "deadline" else 30_000)
    closing = None
    match how:
        case "cancel":
            gateway.cancel("r")
        case "session":
            await gateway.leave()
        case "drop":
            gateway.drop()
        case "newer":
            gateway.admit("r", [3] * 6, max_tokens=2, attempt=2, local=True)
        case "deadline":
            assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        case "engine":
            bench.runner.error = RuntimeError("the device is gone")
        case "close":
            closing = asyncio.create_task(bench.worker.close())
            assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    if how != "engine":
        await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)) is None)
    bench.runner.gate.set()
    if how == "engine":
        assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_INTERNAL
        with pytest.raises(RuntimeError, match="device"):
            await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)
        return
    if closing is not None:
        await closing
    if how == "newer":
        await gateway.event("r", "finished", attempt=2)
    if how in ("cancel", "newer", "deadline"):
        await gateway.event("a", "finished")
        assert gateway.tokens("a") == dict(enumerate(answer([1] * 6, FULL)))
    if closing is None:
        other.admit("after", [4] * 6, max_tokens=3, local=True)
        await other.event("after", "finished")
    await bench.until_free()
    assert not bench.worker.engine._pages._swapped
    if swap_bytes:
        assert bench.worker.engine._pages._swap.num_free_slots == bench.worker.engine._pages._swap.num_slots


@pytest.mark.parametrize("swap_bytes", [0, SWAP])
async def test_one_that_is_to_be_paused_gets_its_pages_back_first(make_bench: Make, swap_bytes: int) -> None:
    bench = make_bench(swap_bytes=swap_bytes, exact=True)
    gateway = bench.gateway()
    await pressed(bench, gateway)
    gateway.pause("r")
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)).wants_pause)
    bench.runner.gate.set()
    paused = await gateway.event("r", "paused")
    assert "finished" in gateway.kinds("a")
    assert list(gateway.tokens("r").values()) == answer([2] * 6, paused.num_tokens)
    assert bench.allocator.num_used_pages == -(-(6 + paused.num_tokens - 1) // 4), "they can be handed over"
    gateway.unpause("r")
    await gateway.event("r", "finished")
    assert list(gateway.tokens("r").values()) == answer([2] * 6, FULL)
    await bench.until_free()


async def test_a_drain_waits_for_who_gave_way(make_bench: Make) -> None:
    bench = make_bench(swap_bytes=SWAP)
    gateway = bench.gateway()
    await pressed(bench, gateway)
    bench.worker.begin_drain()
    idle = asyncio.create_task(bench.worker.wait_idle())
    bench.runner.gate.set()
    await asyncio.wait_for(idle, HANG_LIMIT_S)
    await gateway.event("r", "finished")
    assert list(gateway.tokens("r").values()) == answer([2] * 6, FULL)
    await bench.until_free()


@pytest.mark.parametrize("how", ["commit", "cancel", "engine"])
async def test_a_reservation_waits_for_pages_or_the_end_of_its_attempt(make_bench: Make, how: str) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.gate.clear()
    gateway.admit("a", [1] * 6, max_tokens=FULL, local=True, service_class=1)
    gateway.admit("b", [3] * 26, max_tokens=2, service_class=1)
    await gateway.event("b", "admitted")
    bench.runner.pause_at_step = 40
    bench.runner.gate.set()
    await bench.until(lambda: bench.runner.num_steps == 40)
    await bench.until(lambda: not bench.runner.gate.is_set())
    reserving = asyncio.create_task(bench.worker.arrivals.reserve(TransferId("b", 1), 26))
    await bench.until(lambda: bool(bench.worker.arrivals._receiving))
    bench.runner.pause_at_step = 41
    bench.runner.gate.set()
    await bench.until(lambda: bench.runner.num_steps == 41)
    assert not reserving.done(), "a has eleven of 16 pages and none is to be taken from it"
    assert bench.allocator.num_reserved_pages == 0
    if how == "cancel":
        gateway.cancel("b")
        await bench.until(lambda: TransferId("b", 1) in bench.receiver.aborted)
    if how == "engine":
        bench.runner.error = RuntimeError("the device is gone")
    bench.runner.gate.set()
    if how == "commit":
        reserved = await reserving
        assert len(reserved.page_ids) == 7
        await bench.worker.arrivals.commit(TransferId("b", 1), first_token_id=78, sampling_position=27)
        await gateway.event("b", "finished")
    else:
        with pytest.raises(Exception, match="no longer needed" if how == "cancel" else "worker failed") as caught:
            await reserving
        assert isinstance(caught.value, RequestCancelled) == (how == "cancel")
    if how == "engine":
        bench.worker.failed.exception()
        return
    await gateway.event("a", "finished")
    assert list(gateway.tokens("a").values()) == answer([1] * 6, FULL)
    await bench.until_free()


async def test_urgent_requests_are_admitted_beside_a_full_batch_of_others(make_bench: Make) -> None:
    bench = make_bench(max_batch=2, max_admitted=2)
    gateway = bench.gateway()
    bench.runner.gate.clear()
    for name in ("low", "lower"):
        gateway.admit(name, [1] * 20, max_tokens=8, local=True, service_class=4)
        await gateway.event(name, "admitted")
    gateway.admit("refused", [1], max_tokens=1, local=True, service_class=4)
    assert (await gateway.event("refused", "refused")).code == worker_pb2.ERROR_CODE_OVERLOADED
    gateway.admit("urgent", [2] * 30, max_tokens=8, local=True, service_class=0)
    await gateway.event("urgent", "admitted")
    load = bench.worker.load()
    assert load.running_by_class == (1, 0, 0, 0, 2)
    assert load.promised_pages_by_class == (9, 0, 0, 0, 12)
    bench.runner.gate.set()
    await gateway.event("urgent", "finished")
    for name in ("low", "lower"):
        await gateway.event(name, "finished")
        assert list(gateway.tokens(name).values()) == answer([1] * 20, 8)
    order = [e.id.request_id for e in gateway.events if e.WhichOneof("event") == "finished"]
    assert order[0] == "urgent"
    await bench.until_free()


async def test_a_class_that_does_not_exist_is_refused(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1], local=True, service_class=5)
    assert (await gateway.event("r", "refused")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST


async def test_spans_say_when_a_sequence_gave_way(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench(swap_bytes=SWAP)
    gateway = bench.gateway()
    await pressed(bench, gateway, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    bench.runner.gate.set()
    await gateway.event("r", "finished")
    await bench.until_free()
    steps = spans.one("decode.steps")
    events = [(name, said["tandem.reason"]) for name, said in events_of(steps)]
    assert ("preempted", "swapped") in events
    assert steps.attributes["tandem.preemptions"] == len(events)
