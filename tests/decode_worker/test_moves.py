"""A sequence leaves one decode worker and continues at another: Pause, Unpause, HandOver, Admit with `from_decode`."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.protocol.messages import TransferId
from protos import worker_pb2
from services.runtime.errors import NoFreePages, RequestCancelled, TandemError, TransferFailed, WorkerUnavailable
from services.runtime.telemetry import DECODE_SPAN
from tests.kept_spans import KeptSpans
from tests.waiting import settle
from worker.attempts import AttemptKey

Make = Callable[..., Any]
PROMPT = [1, 2, 3, 4, 5]
FULL = 20


def answer(num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(sum(tokens) % 1000)
    return tokens[len(PROMPT) :]


async def paused_after(bench: Any, gateway: Any, *, at_step: int, **fields: Any) -> int:
    """Has `r` decoded for a while and paused; returns how many tokens it has."""
    bench.runner.pause_at_step = at_step
    gateway.admit("r", PROMPT, max_tokens=FULL, local=True, **fields)
    await bench.until(lambda: not bench.runner.gate.is_set())
    gateway.pause("r")
    # The command is handled while the step runs, so the pause comes right after the step.
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)).wants_pause)
    bench.runner.gate.set()
    return int((await gateway.event("r", "paused")).num_tokens)


async def test_a_paused_sequence_says_so_after_its_last_token_and_keeps_its_pages(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    num_tokens = await paused_after(bench, gateway, at_step=5)
    assert num_tokens == 5
    assert list(gateway.tokens("r").values()) == answer(num_tokens)
    assert gateway.kinds("r")[-1] == "paused"
    assert bench.allocator.num_used_pages == 3, "of five tokens and four whose KV is computed"
    steps = bench.runner.num_steps
    gateway.admit("s", [1], max_tokens=6, local=True)
    await gateway.event("s", "finished")
    assert bench.runner.num_steps == steps + 6, "others continue"
    assert len(gateway.tokens("r")) == num_tokens
    gateway.unpause("r")
    await gateway.event("r", "finished")
    assert list(gateway.tokens("r").values()) == answer(FULL)
    await bench.until_free()


async def test_one_that_ends_with_that_step_finishes_and_is_not_paused(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.pause_at_step = 3
    gateway.admit("r", PROMPT, max_tokens=3, local=True)
    await bench.until(lambda: not bench.runner.gate.is_set())
    gateway.pause("r")
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)).wants_pause)
    bench.runner.gate.set()
    await gateway.event("r", "finished")
    await bench.until_free()
    assert "paused" not in gateway.kinds("r")


@pytest.mark.parametrize("when", ["admitted", "receiving"])
async def test_one_that_waits_for_its_pages_is_paused_before_it_decodes(make_bench: Make, when: str) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", PROMPT, max_tokens=6)
    await gateway.event("r", "admitted")
    if when == "receiving":
        await bench.worker.arrivals.reserve(TransferId("r", 1), 5)
    gateway.pause("r")
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)).wants_pause)
    assert "paused" not in gateway.kinds("r")
    if when == "admitted":
        await bench.worker.arrivals.reserve(TransferId("r", 1), 5)
    await bench.worker.arrivals.commit(TransferId("r", 1), first_token_id=15, sampling_position=6)
    assert (await gateway.event("r", "paused")).num_tokens == 1
    assert bench.runner.num_steps == 0
    gateway.unpause("r")
    await gateway.event("r", "finished")
    assert list(gateway.tokens("r").values()) == answer(6)[1:]


async def test_what_must_be_replayed_is_replayed_before_the_pause(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    emitted = answer(4)
    gateway.admit("r", PROMPT, max_tokens=6, emitted_token_ids=emitted, attempt=2)
    await gateway.event("r", "admitted", attempt=2)
    gateway.pause("r", attempt=2)
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 2)).wants_pause)
    await bench.hand_over("r", PROMPT, attempt=2, first=emitted[0])
    assert (await gateway.event("r", "paused", attempt=2)).num_tokens == 4
    assert bench.runner.num_steps == 3
    gateway.hand_over("r", attempt=2, next_attempt=3)
    await gateway.event("r", "handed_off", attempt=2)
    sealed = bench.links.transfers[TransferId("r", 3)].sealed
    assert sealed == {"num_tokens": 8, "first_token_id": emitted[-1], "sampling_position": 9}
    await bench.until_free()


async def test_pause_and_unpause_in_one_breath_change_nothing(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.pause_at_step = 4
    gateway.admit("r", PROMPT, max_tokens=FULL, local=True)
    await bench.until(lambda: not bench.runner.gate.is_set())
    gateway.pause("r")
    gateway.unpause("r")
    gateway.unpause("nobody")
    gateway.pause("nobody")
    gateway.admit("s", [1], max_tokens=1, local=True)
    await gateway.event("s", "admitted")
    bench.runner.gate.set()
    await gateway.event("r", "finished")
    assert list(gateway.tokens("r").values()) == answer(FULL)
    assert "paused" not in gateway.kinds("r")
    await bench.until_free()


async def test_another_gateway_cannot_pause(make_bench: Make) -> None:
    bench = make_bench()
    gateway, other = bench.gateway(), bench.gateway()
    gateway.admit("r", PROMPT, max_tokens=6)
    await gateway.event("r", "admitted")
    other.pause("r")
    other.admit("s", [1], max_tokens=1, local=True)
    await other.event("s", "finished")
    assert not bench.worker._attempts.find(AttemptKey("r", 1)).wants_pause


async def test_handing_over_sends_all_pages_and_ends_the_attempt(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    num_tokens = await paused_after(bench, gateway, at_step=5)
    pages = list(bench.worker.engine._sequences["r", 1].page_table)
    gateway.hand_over("r", next_attempt=4)
    await bench.until(lambda: TransferId("r", 4) in bench.links.transfers)
    transfer = bench.links.transfers[TransferId("r", 4)]
    await bench.until(lambda: bool(transfer.sealed))
    assert bench.links.asked == [("other:1", "d" * 32, TransferId("r", 4))]
    num_computed = len(PROMPT) + num_tokens - 1
    assert transfer.num_tokens == num_computed
    assert transfer.sent == [(0, tuple(pages))]
    assert len(pages) == 3
    assert transfer.sealed == {
        "num_tokens": num_computed,
        "first_token_id": answer(num_tokens)[-1],
        "sampling_position": num_computed + 1,
    }
    gateway.unpause("r")
    gateway.hand_over("r", next_attempt=5)
    gateway.admit("s", [1], max_tokens=1, local=True)
    await gateway.event("s", "finished")
    assert bench.allocator.num_used_pages == 3, "they are still read"
    transfer.may_commit.set()
    handed_off = await gateway.event("r", "handed_off")
    assert (handed_off.num_pages, handed_off.num_bytes, handed_off.transport) == (3, 192, "fake")
    assert gateway.kinds("r")[-2:] == ["paused", "handed_off"]
    assert transfer.abort_reason is None
    await bench.until_free()
    value = bench.metrics.registry.get_sample_value
    assert value("tandem_attempts_total", {"worker": "decode-0", "outcome": "handed_off"}) == 1
    assert value("tandem_transferred_bytes_total", {"worker": "decode-0"}) == 192
    for name in ("tandem_transfer_seconds_count", "tandem_transfer_exposed_seconds_count"):
        assert value(name, {"worker": "decode-0"}) == 1
    assert 0 < value("tandem_transfer_seconds_sum", {"worker": "decode-0"}) < 60


@pytest.mark.parametrize("error", [None, TransferFailed("the channel broke")])
async def test_what_is_sent_to_the_other_worker_is_a_span(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch, error: TandemError | None
) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    await paused_after(bench, gateway, at_step=5, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    gateway.hand_over("r", next_attempt=4)
    await bench.until(lambda: TransferId("r", 4) in bench.links.transfers)
    transfer = bench.links.transfers[TransferId("r", 4)]
    transfer.error = error
    transfer.may_commit.set()
    await gateway.event("r", "failed" if error else "handed_off")
    await bench.until_free()
    sending, steps = spans.one("kv_transfer.send"), spans.one("decode.steps")
    assert sending.parent_id == steps.parent_id == int("cd" * 8, 16) + DECODE_SPAN
    assert sending.error_type == ("TransferFailed" if error else "")
    assert sending.attributes.get("tandem.kv.bytes") == (None if error else 192)
    assert steps.start_unix_ns <= steps.end_unix_ns <= sending.start_unix_ns <= sending.end_unix_ns


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
async def test_what_comes_from_a_decode_worker_goes_on_without_replay(make_bench: Make, num_tokens: int) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    emitted = answer(num_tokens)
    gateway.admit("r", PROMPT, max_tokens=FULL, emitted_token_ids=emitted, attempt=2, from_decode=True)
    await gateway.event("r", "admitted", attempt=2)
    num_computed = len(PROMPT) + num_tokens - 1
    reserved = await bench.worker.arrivals.reserve(TransferId("r", 2), num_computed)
    assert len(reserved.page_ids) == -(-num_computed // 4)
    await bench.worker.arrivals.commit(
        TransferId("r", 2), first_token_id=emitted[-1], sampling_position=num_computed + 1
    )
    await gateway.event("r", "finished", attempt=2)
    assert bench.runner.num_steps == FULL - num_tokens
    assert gateway.tokens("r", attempt=2) == dict(list(enumerate(answer(FULL)))[num_tokens:])
    assert gateway.kinds("r", attempt=2)[:3] == ["admitted", "decode_started", "tokens"]
    await bench.until_free()


@pytest.mark.parametrize("wrong", ["prompt_only", "one_more", "first_token", "position"])
async def test_pages_that_do_not_continue_the_answer_are_not_taken(make_bench: Make, wrong: str) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    emitted = answer(4)
    gateway.admit("r", PROMPT, max_tokens=FULL, emitted_token_ids=emitted, attempt=2, from_decode=True)
    await gateway.event("r", "admitted", attempt=2)
    if wrong in ("prompt_only", "one_more"):
        with pytest.raises(TransferFailed):
            await bench.worker.arrivals.reserve(TransferId("r", 2), 5 if wrong == "prompt_only" else 9)
        return
    await bench.worker.arrivals.reserve(TransferId("r", 2), 8)
    seal = {"first_token_id": emitted[0 if wrong == "first_token" else -1], "sampling_position": 9}
    seal["sampling_position"] -= wrong == "position"
    with pytest.raises(TransferFailed):
        await bench.worker.arrivals.commit(TransferId("r", 2), **seal)
    await bench.worker.arrivals.release(TransferId("r", 2), TransferFailed("not taken"))
    await gateway.event("r", "failed", attempt=2)
    await bench.until_free()


@pytest.mark.parametrize("fields", [{"local": True, "emitted_token_ids": [15]}, {}])
async def test_an_admission_from_a_decode_worker_needs_tokens_and_pages(make_bench: Make, fields: Any) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", PROMPT, from_decode=True, **fields)
    assert (await gateway.event("r", "refused")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    await bench.until_free()


@pytest.mark.parametrize("next_attempt", [1, 0])
async def test_a_handover_to_an_older_attempt_is_refused(make_bench: Make, next_attempt: int) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    await paused_after(bench, gateway, at_step=2)
    gateway.hand_over("r", next_attempt=next_attempt)
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    assert not bench.links.asked
    await bench.until_free()


async def test_only_what_is_paused_is_handed_over(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", PROMPT)
    gateway.hand_over("nobody")
    gateway.hand_over("r")
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    await bench.until_free()
    assert not gateway.kinds("nobody")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoFreePages("full"), worker_pb2.ERROR_CODE_OVERLOADED),
        (WorkerUnavailable("gone"), worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE),
        (RuntimeError("a bug"), worker_pb2.ERROR_CODE_TRANSFER_FAILED),
    ],
)
@pytest.mark.parametrize("when", ["reserve", "seal"])
async def test_a_handover_that_fails_is_answered_and_frees_the_pages_when_nothing_reads_them(
    make_bench: Make, when: str, error: Exception, code: int
) -> None:
    bench = make_bench()
    bench.links.holds_commits = bench.links.holds_aborts = True
    gateway = bench.gateway()
    await paused_after(bench, gateway, at_step=5)
    if when == "reserve":
        bench.links.error = error
    gateway.hand_over("r")
    if when == "seal":
        await bench.until(lambda: TransferId("r", 2) in bench.links.transfers)
        transfer = bench.links.transfers[TransferId("r", 2)]
        transfer.error = error
        transfer.may_commit.set()
    failed = await gateway.event("r", "failed")
    assert failed.code == code
    assert "bug" not in failed.message
    if when == "seal":
        gateway.admit("s", [1], max_tokens=1, local=True)
        await gateway.event("s", "finished")
        assert bench.allocator.num_used_pages == 3, "a copy may still read them"
        transfer.may_abort.set()
    await bench.until_free()
    assert gateway.kinds("r").count("failed") == 1


@pytest.mark.parametrize("how", ["cancel", "session", "drop", "newer", "deadline", "engine"])
@pytest.mark.parametrize("phase", ["pausing", "paused", "reserving", "sealing"])
async def test_an_end_in_any_phase_of_a_move_leaves_nothing(make_bench: Make, phase: str, how: str) -> None:
    bench = make_bench()
    bench.links.holds_commits = bench.links.holds_aborts = True
    gateway = bench.gateway()
    bench.runner.pause_at_step = 4
    gateway.admit("r", PROMPT, max_tokens=FULL, local=True)
    await bench.until(lambda: not bench.runner.gate.is_set())
    gateway.pause("r")
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)).wants_pause)
    if phase == "reserving":
        bench.links.may_reserve.clear()
    if phase != "pausing":
        bench.runner.gate.set()
        await gateway.event("r", "paused")
    if phase in ("reserving", "sealing"):
        gateway.hand_over("r")
        await bench.until(lambda: bool(bench.links.asked))
    if phase == "sealing":
        await bench.until(lambda: any(t.sealed for t in bench.links.transfers.values()))
    match how:
        case "cancel":
            gateway.cancel("r")
        case "session":
            await gateway.leave()
        case "drop":
            gateway.drop()
        case "newer":
            gateway.admit("r", [2] * 6, max_tokens=2, attempt=2, local=True)
        case "deadline":
            attempt = bench.worker._attempts.find(AttemptKey("r", 1))
            assert attempt.deadline is not None
            bench.worker._expire(attempt)
        case "engine":
            bench.runner.error = RuntimeError("the device is gone")
            gateway.admit("s", [1], local=True)
            bench.runner.gate.set()
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)) is None)
    bench.runner.gate.set()
    if phase == "sealing":
        if how != "engine":
            await settle()
            assert bench.allocator.num_used_pages >= 2, "a copy may still read them"
        (transfer,) = bench.links.transfers.values()
        await bench.until(lambda: transfer.abort_reason is not None)
        assert isinstance(transfer.abort_reason, TandemError)
        transfer.may_abort.set()
    await bench.until(lambda: not bench.worker._tasks)
    if how == "engine":
        assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_INTERNAL
        return
    if how == "newer":
        await gateway.event("r", "finished", attempt=2)
    await bench.until_free()
    assert ("failed" in gateway.kinds("r")) == (how == "deadline")
    assert "handed_off" not in gateway.kinds("r")


async def test_an_attempt_whose_sender_had_given_up_is_ended(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.gate.clear()
    for request_id, error in (("a", TransferFailed("late")), ("b", RequestCancelled("cancelled"))):
        gateway.admit(request_id, PROMPT, max_tokens=FULL)
        await gateway.event(request_id, "admitted")
        taking = asyncio.create_task(bench.hand_over(request_id, PROMPT))
        bench.runner.gate.set()
        await taking
        for _ in range(2):
            await bench.worker.arrivals.abandon(TransferId(request_id, 1), error)
    await bench.worker.arrivals.abandon(TransferId("nobody", 1), TransferFailed("x"))
    assert (await gateway.event("a", "failed")).code == worker_pb2.ERROR_CODE_TRANSFER_FAILED
    await bench.until_free()
    assert gateway.kinds("a").count("failed") == 1
    assert "failed" not in gateway.kinds("b")
