"""Whole handoffs between two pools in one process: real gRPC, real channels, every transport."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kv_transfer.protocol.actions import Action
from kv_transfer.protocol.counters import Reason
from kv_transfer.protocol.messages import Committed, Message, TransferId
from kv_transfer.protocol.receiver import ReceiverLink
from kv_transfer.protocol.sender import SenderLink
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.send_link import SendTransfer
from kv_transfer.transports.base import Bytes, SendChannel
from kv_transfer.transports.registry import transport_named
from services.runtime.clock import Deadline
from services.runtime.errors import (
    ChannelUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    NoFreePages,
    PeerUnreachable,
    RequestCancelled,
    StaleIncarnation,
    TransferFailed,
    WorkerUnavailable,
)
from tests.kv_transfer.conftest import Pair, PairMaker, identity, make_pool, tokens_of
from tests.waiting import HANG_LIMIT_S, until

NAMES = ("loopback", "shm", "tcp")
PHASES = ("reserving", "granted", "streaming", "committing")
CANCELLED = RequestCancelled("the client went away")


@pytest.fixture(params=NAMES)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def page_table(num_pages: int) -> list[int]:
    """Some neighbours, some not, some backwards."""
    return [*range(num_pages - 1, num_pages // 2, -1), *range(num_pages // 2 + 1)]


# --- the same pages arrive ---


@pytest.mark.parametrize(("page_size", "own_page_size"), [(16, 16), (16, 64), (64, 16), (16, 24), (32, 16)])
async def test_what_was_sent_arrives(make_pair: PairMaker, transport: str, page_size: int, own_page_size: int) -> None:
    source = make_pool(page_size=page_size, seed=1)
    pair = await make_pair(transport, source=source, pool=make_pool(page_size=own_page_size, seed=2))
    for num_tokens in (1, page_size - 1, page_size, page_size + 1, 5 * page_size, 333):
        table = page_table(source.layout.num_pages_for(num_tokens))
        transfer = await pair.hand_over(table, num_tokens)
        pair.assert_arrived(transfer, table, num_tokens)
        pair.target.allocator.release(pair.target.committed[transfer.id])
    await pair.wait_all_free()
    assert pair.receiver.counters.snapshot() == {}
    assert pair.links.counters.snapshot() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_half_precision_arrives_bit_for_bit(make_pair: PairMaker, transport: str, dtype: torch.dtype) -> None:
    source = make_pool(dtype=dtype, seed=1)
    pair = await make_pair(transport, source=source, pool=make_pool(page_size=64, dtype=dtype, seed=2))
    transfer = await pair.hand_over([5, 6, 7, 1], 61)
    pair.assert_arrived(transfer, [5, 6, 7, 1], 61)


async def test_pages_larger_than_a_slot_make_the_slot_grow(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport, slot_bytes=100)
    transfer = await pair.hand_over([3, 1, 2], 48)
    pair.assert_arrived(transfer, [3, 1, 2], 48)


@pytest.mark.parametrize(
    ("page_size", "own_page_size", "cached", "granted"), [(16, 16, 32, 32), (16, 64, 64, 64), (64, 16, 80, 64)]
)
async def test_a_cached_prefix_is_neither_sent_nor_written(
    make_pair: PairMaker, page_size: int, own_page_size: int, cached: int, granted: int
) -> None:
    source = make_pool(page_size=page_size, seed=1)
    pair = await make_pair("shm", source=source, pool=make_pool(page_size=own_page_size, seed=2))
    pair.target.num_cached_tokens = cached
    before = pair.target.pool.data.clone()
    table = page_table(source.layout.num_pages_for(200))
    transfer = await pair.reserve(200)
    assert transfer.num_cached_tokens == granted
    transfer.send(0, table)  # what is cached is left out by the transfer itself
    stats = await transfer.seal(num_tokens=200, first_token_id=7, sampling_position=201)
    assert stats.num_pages == len(table) - granted // page_size
    assert stats.num_bytes == stats.num_pages * source.layout.page_bytes
    own_table = pair.target.committed[transfer.id]
    arrived = tokens_of(pair.target.pool, own_table, 200)
    kept = torch.cat([before[page_id] for page_id in own_table], dim=3)
    assert torch.equal(arrived[:, :, :, :cached], kept[:, :, :, :cached])
    assert torch.equal(arrived[:, :, :, cached:], tokens_of(source, table, 200)[:, :, :, cached:])


async def test_a_prompt_that_is_cached_whole_sends_nothing(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.target.num_cached_tokens = 64
    transfer = await pair.reserve(64)
    stats = await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
    assert (stats.num_pages, stats.num_bytes) == (0, 0)
    assert transfer.id in pair.target.committed


async def test_nothing_else_in_the_pool_is_touched(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport, pool=make_pool(page_size=64, seed=2))
    before = pair.target.pool.data.clone()
    transfer = await pair.hand_over([0, 1, 2, 3, 4], 70)
    others = sorted(set(range(64)) - set(pair.target.committed[transfer.id]))
    assert torch.equal(pair.target.pool.data[others], before[others])


async def test_many_transfers_share_a_link(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport, pool=make_pool(num_pages=200, seed=2))

    async def one(index: int) -> None:
        table = [(index * 7 + page) % 64 for page in range(6)]
        transfer = await pair.hand_over(table, 90, pages_at_once=1 + index % 4)
        pair.assert_arrived(transfer, table, 90)

    await asyncio.gather(*(one(index) for index in range(30)))
    await pair.wait_all_free()


async def test_chunks_travel_before_the_seal(make_pair: PairMaker, transport: str) -> None:
    pair = await make_pair(transport)
    transfer = await pair.reserve(64)
    transfer.send(0, [1, 2])
    await until(
        lambda: torch.equal(
            tokens_of(pair.target.pool, pair.target.held[transfer.id][:2], 32), tokens_of(pair.source, [1, 2], 32)
        )
    )
    transfer.send(2, [3, 4])
    stats = await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
    assert stats.transport == transport
    assert 0 < stats.exposed_s < 5


# --- refusals ---


async def test_a_refusal_says_when_to_ask_again(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.target.refuse = NoFreePages("full", retry_after_s=2.5)
    with pytest.raises(NoFreePages, match="full") as caught:
        await pair.reserve(10)
    assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize("error", [NoFreePages("full"), InvalidRequest("no such admission"), TransferFailed("no")])
async def test_a_refused_reservation_reaches_the_sender_as_it_is(make_pair: PairMaker, error: Exception) -> None:
    pair = await make_pair("shm")
    pair.target.refuse = error  # type: ignore[assignment]
    with pytest.raises(type(error), match=str(error)):
        await pair.reserve(10)
    await pair.wait_all_free()


async def test_a_worker_that_fails_oddly_is_told_without_its_text(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.target.refuse = RuntimeError("secret detail")  # type: ignore[assignment]
    with pytest.raises(TransferFailed) as caught:
        await pair.reserve(10)
    assert "secret" not in caught.value.message


async def test_a_commit_that_the_worker_refuses_fails_and_releases(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.target.refuse_commit = TransferFailed("no longer ours")
    with pytest.raises(TransferFailed, match="no longer ours"):
        await pair.hand_over([1, 2], 30)
    await pair.wait_all_free()
    assert len(pair.target.released) == 1


@pytest.mark.parametrize("mismatch", ["fingerprint", "dtype", "heads"])
async def test_pages_that_do_not_fit_are_refused_before_any_byte(make_pair: PairMaker, mismatch: str) -> None:
    source = make_pool(seed=1)
    if mismatch == "dtype":
        source = make_pool(dtype=torch.bfloat16, seed=1)
    if mismatch == "heads":
        layout = dataclasses.replace(source.layout, num_kv_heads=4)
        source = type(source)(layout, 8)
    sender = identity("prefill-0", fingerprint="e" * 32) if mismatch == "fingerprint" else None
    pair = await make_pair("shm", source=source, sender_identity=sender)
    with pytest.raises(LayoutMismatch):
        await pair.reserve(10)
    assert pair.receiver.counters[Reason.LAYOUT_MISMATCH] == 1
    assert not pair.target.held
    assert not pair.target.released


@pytest.mark.parametrize(
    ("arithmetics", "exact", "is_said"),
    [(("avx2", "avx512"), True, True), (("avx2", "avx2"), True, False), (("avx2", "avx512"), False, False)],
)
async def test_another_arithmetic_is_said_and_no_fault(
    make_pair: PairMaker, caplog: pytest.LogCaptureFixture, arithmetics: tuple[str, str], *, exact: bool, is_said: bool
) -> None:
    pair = await make_pair(
        "shm",
        sender_identity=identity("prefill-0", arithmetic=arithmetics[0]),
        receiver_identity=identity("decode-0", arithmetic=arithmetics[1], exact=exact),
    )
    with caplog.at_level(logging.INFO, logger="kv_transfer.wire"):
        await pair.assert_works()
    said = [record.getMessage() for record in caplog.records if record.name == "kv_transfer.wire"]
    expected = ["prefill-0 computes with 'avx2', this worker with 'avx512'"]
    expected += ["decode-0 computes with 'avx512', this worker with 'avx2'"]
    assert sorted(said) == sorted(expected if is_said else [])
    assert pair.receiver.counters.snapshot() == {}


async def test_another_incarnation_of_the_receiver_is_not_used(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.incarnation = secrets.token_hex(16)
    with pytest.raises(StaleIncarnation, match="incarnation"):
        await pair.reserve(10)
    assert pair.receiver.counters[Reason.STALE_INCARNATION] == 1


async def test_a_receiver_that_cannot_be_reached_is_named_with_the_reason(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.address = "127.0.0.1:1"
    with pytest.raises(PeerUnreachable, match=r"prefill-0 .* 127\.0\.0\.1:1: the connection is refused"):
        await pair.reserve(10)


async def test_an_unusable_reservation_is_never_written_to(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    reserve = pair.target.reserve

    async def reserve_wrongly(transfer_id: TransferId, num_tokens: int):  # type: ignore[no-untyped-def]
        reserved = await reserve(transfer_id, num_tokens)
        return dataclasses.replace(reserved, page_ids=[999, *reserved.page_ids[1:]])

    pair.target.reserve = reserve_wrongly  # type: ignore[method-assign]
    with pytest.raises(TransferFailed):
        await pair.reserve(64)
    await pair.wait_all_free()


async def test_pages_out_of_order_are_the_callers_mistake(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    transfer = await pair.reserve(64)
    transfer.send(0, [1])
    for first_page, page_ids in ((2, [3]), (0, [1]), (1, [2, 3, 4, 5])):
        with pytest.raises(ValueError, match="was next"):
            transfer.send(first_page, page_ids)
    with pytest.raises(ValueError, match="pages sent"):
        await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
    transfer.send(1, [2, 3, 4])
    await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
    pair.assert_arrived(transfer, [1, 2, 3, 4], 64)


# --- pages are asked for ---


async def test_who_asks_does_not_wait_for_the_answer(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.target.gate("reserve")
    transfer = await asyncio.wait_for(pair.ask(64), HANG_LIMIT_S)
    await asyncio.wait_for(pair.target.arrived["reserve"].wait(), HANG_LIMIT_S)
    with pytest.raises(TransferFailed, match="reserving"):
        transfer.send(0, [1])
    pair.target.gates["reserve"].set()
    await transfer.granted()
    transfer.send(0, [1, 2, 3, 4])
    await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
    pair.assert_arrived(transfer, [1, 2, 3, 4], 64)


async def test_a_refusal_comes_to_who_waits_for_the_answer(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.target.pool_is_full = True
    transfer = await pair.ask(64)
    with pytest.raises(NoFreePages):
        await transfer.granted()
    await asyncio.wait_for(transfer.abort(CANCELLED), HANG_LIMIT_S)
    await pair.wait_all_free()


@pytest.mark.parametrize("end", ["cancel", "link"])
async def test_a_question_is_asked_when_it_has_left(make_pair: PairMaker, end: str) -> None:
    pair = await make_pair("shm")
    await (await pair.reserve(16)).abort(CANCELLED)  # the Link is made
    link = next(iter(pair.links._links.values())).result()
    call, is_writing = link._opened.call, asyncio.Event()

    class Stalled:
        """The other side's window is full: a write does not end."""

        async def write(self, message: object) -> None:
            is_writing.set()
            await asyncio.Event().wait()

        def cancel(self) -> None:
            call.cancel()

    object.__setattr__(link._opened, "call", Stalled())
    asking = asyncio.create_task(pair.ask(64))
    await is_writing.wait()
    await asyncio.sleep(0.02)
    assert not asking.done()
    if end == "cancel":
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not link._handles)
        return
    link.fail(WorkerUnavailable("the Link broke"))
    transfer = await asyncio.wait_for(asking, HANG_LIMIT_S)
    with pytest.raises(WorkerUnavailable):
        await transfer.granted()
    await pair.assert_works()


# --- attempts ---


async def test_an_attempt_that_ended_cannot_begin_again(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    for attempt in (1, 3):
        transfer = await pair.reserve(16, request_id="r", attempt=attempt)
        await transfer.abort(CANCELLED)
        await pair.wait_all_free()
    for attempt in (1, 2, 3):
        with pytest.raises(TransferFailed, match="attempt"):
            await pair.reserve(16, request_id="r", attempt=attempt)
    assert pair.receiver.counters[Reason.STALE_ATTEMPT] == 3
    await (await pair.reserve(16, request_id="r", attempt=4)).abort(CANCELLED)


async def test_a_newer_attempt_ends_the_older_one(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    older = await pair.reserve(48, request_id="r", attempt=1)
    older.send(0, [1, 2])
    newer = await pair.reserve(48, request_id="r", attempt=2)
    await until(lambda: older.error is not None)
    newer.send(0, [4, 5, 6])
    await newer.seal(num_tokens=48, first_token_id=7, sampling_position=49)
    pair.assert_arrived(newer, [4, 5, 6], 48)
    with pytest.raises(TransferFailed):
        older.send(2, [3])
    assert pair.receiver.counters[Reason.SUPERSEDED_ATTEMPT] == 1
    await pair.wait_all_free()


async def test_a_cancelled_attempt_is_kept_out_when_its_reserve_comes_late(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    pair.receiver.abort(TransferId("r", 1), CANCELLED)
    with pytest.raises(TransferFailed):
        await pair.reserve(16, request_id="r", attempt=1)


# --- aborts ---


async def _advance(pair: Pair, phase: str) -> tuple[TransferId, asyncio.Task[SendTransfer]]:
    """Bring a transfer of four pages to a phase and hold it there. The task ends with the transfer."""
    gate = {"reserving": "reserve", "committing": "commit"}.get(phase)
    if gate is not None:
        pair.target.gate(gate)
    transfer_id = TransferId(f"request-{pair.num_started + 1}", 1)
    reached = asyncio.Event()

    async def run() -> SendTransfer:
        transfer = await pair.reserve(64)
        if phase == "granted":
            reached.set()
            await transfer.released.wait()
        transfer.send(0, [1, 2])
        if phase == "streaming":
            reached.set()
            await transfer.released.wait()
        transfer.send(2, [3, 4])
        await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
        return transfer

    task = asyncio.create_task(run())
    await (pair.target.arrived[gate].wait() if gate is not None else reached.wait())
    return transfer_id, task


@pytest.mark.parametrize("phase", PHASES)
async def test_the_receiver_may_abort_at_any_time(make_pair: PairMaker, transport: str, phase: str) -> None:
    pair = await make_pair(transport)
    transfer_id, task = await _advance(pair, phase)
    for _ in range(3):
        pair.receiver.abort(transfer_id, CANCELLED)
    for gate in pair.target.gates.values():
        gate.set()
    if phase == "committing":
        # Too late: the worker is taking the pages over, and what it does next is its own affair.
        assert (await task).id in pair.target.committed
    else:
        with pytest.raises(RequestCancelled):
            await task
        assert [each[0] for each in pair.target.released] == [transfer_id]
    await pair.wait_all_free()
    await pair.assert_works()


@pytest.mark.parametrize("phase", PHASES)
async def test_the_sender_may_abort_at_any_time(make_pair: PairMaker, transport: str, phase: str) -> None:
    pair = await make_pair(transport)
    transfer_id, task = await _advance(pair, phase)
    link = await next(iter(pair.links._links.values()))
    handle = link._handles[transfer_id]
    async with asyncio.timeout(HANG_LIMIT_S):
        for _ in range(3):
            await handle.abort(CANCELLED)
    assert handle.released.is_set()
    with pytest.raises(RequestCancelled):
        await task
    for gate in pair.target.gates.values():
        gate.set()
    await pair.wait_all_free()
    if phase == "committing":
        # The worker took the pages over, but the code that asked for the transfer was told that it failed.
        await until(lambda: [each[0] for each in pair.target.abandoned] == [transfer_id])
        assert isinstance(pair.target.abandoned[0][1], RequestCancelled)
    else:
        assert [each[0] for each in pair.target.released] == [transfer_id]
    assert not pair.target.committed
    await pair.assert_works()


@pytest.mark.parametrize("phase", ["reserving", "committing"])
async def test_a_cancelled_caller_gives_up_its_transfer(make_pair: PairMaker, phase: str) -> None:
    pair = await make_pair("shm")
    _, task = await _advance(pair, phase)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for gate in pair.target.gates.values():
        gate.set()
    await pair.wait_all_free()
    await pair.assert_works()


async def test_abort_after_the_end_changes_nothing(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    transfer = await pair.hand_over([1, 2], 30)
    await transfer.abort(CANCELLED)
    pair.receiver.abort(transfer.id, CANCELLED)
    pair.assert_arrived(transfer, [1, 2], 30)
    assert transfer.error is None
    assert not pair.target.released


async def test_aborts_at_random_moments_leak_nothing(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    pair = await make_pair(transport, pool=make_pool(num_pages=400, seed=2))
    commit, is_committing = pair.target.commit, defaultdict[TransferId, asyncio.Event](asyncio.Event)

    async def commit_after_a_while(transfer_id: TransferId, **values: int) -> None:
        is_committing[transfer_id].set()
        await asyncio.sleep(0.005)
        await commit(transfer_id, **values)

    monkeypatch.setattr(pair.target, "commit", commit_after_a_while)
    random = np.random.default_rng(5)
    aborted_at_receiver: set[TransferId] = set()

    async def one(delay_s: float | None, *, at_receiver: bool) -> None:
        transfer = await pair.reserve(100)
        table = page_table(7)

        async def send() -> None:
            for page in range(7):
                transfer.send(page, [table[page]])
                await asyncio.sleep(0)
            await transfer.seal(num_tokens=100, first_token_id=7, sampling_position=101)

        sending = asyncio.create_task(send())
        if delay_s is None:
            await is_committing[transfer.id].wait()
        else:
            await asyncio.sleep(delay_s)
        if at_receiver:
            pair.receiver.abort(transfer.id, CANCELLED)
        else:
            await transfer.abort(CANCELLED)
        try:
            await sending
        except RequestCancelled:
            if at_receiver:
                assert transfer.id not in pair.target.committed
                aborted_at_receiver.add(transfer.id)
            else:
                await until(lambda: transfer.id not in pair.target.committed)
        else:
            pair.assert_arrived(transfer, table, 100)

    # Few of the delays end while the worker takes pages over; the last ten transfers are given up just then.
    delays = [*map(float, random.uniform(0, 0.02, 40)), *[None] * 10]
    await asyncio.gather(*(one(delay, at_receiver=bool(index % 2)) for index, delay in enumerate(delays)))
    await pair.wait_all_free()
    # What the receiver itself gives up is never committed, not even to be abandoned right afterwards.
    assert aborted_at_receiver <= {each[0] for each in pair.target.released}
    assert not aborted_at_receiver & {each[0] for each in pair.target.abandoned}
    # Giving up is no fault: what the counters call a loss must stay worth looking at.
    assert pair.receiver.counters[Reason.LOST_FRAME] == 0
    await pair.assert_works()


# --- deadlines ---


@pytest.mark.parametrize("phase", PHASES)
async def test_the_deadline_ends_a_transfer_in_every_phase(make_pair: PairMaker, phase: str) -> None:
    pair = await make_pair("shm")
    await (await pair.reserve(16)).abort(CANCELLED)  # the Link is made, so that only the transfer takes time
    reserve = pair.reserve

    async def reserve_briefly(num_tokens: int) -> SendTransfer:
        return await reserve(num_tokens, within_s=0.5)

    pair.reserve = reserve_briefly  # type: ignore[method-assign, assignment]
    _, task = await _advance(pair, phase)
    with pytest.raises(DeadlineExceeded):
        await task
    for gate in pair.target.gates.values():
        gate.set()
    await pair.wait_all_free()


async def test_a_deadline_that_passed_starts_nothing(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    with pytest.raises(DeadlineExceeded):
        await pair.links.reserve(
            pair.address, pair.incarnation, TransferId("r", 1), num_tokens=5, deadline=Deadline.after(0)
        )


# --- a worker that does not answer ---


async def test_pages_that_are_set_aside_too_late_go_back(make_pair: PairMaker) -> None:
    pair = await make_pair("shm", timeouts=Timeouts(worker_s=0.3))
    pair.target.gate("reserve")
    with pytest.raises(TransferFailed, match="did not reserve in time"):
        await pair.reserve(16)
    assert pair.receiver.counters[Reason.WORKER_SILENT] == 1
    assert pair.receiver.num_transfers == 1  # somebody still owes it pages
    pair.target.gates["reserve"].set()
    await pair.wait_all_free()
    assert len(pair.target.released) == 1
    await pair.assert_works()


async def test_a_refusal_that_comes_too_late_releases_nothing(make_pair: PairMaker) -> None:
    pair = await make_pair("shm", timeouts=Timeouts(worker_s=0.3))
    pair.target.gate("reserve")
    task = asyncio.create_task(pair.reserve(16))
    await pair.target.arrived["reserve"].wait()
    with pytest.raises(TransferFailed, match="did not reserve in time"):
        await task
    pair.target.pool_is_full = True
    pair.target.gates["reserve"].set()
    await pair.wait_all_free()
    assert not pair.target.released


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_commit_that_succeeds_too_late_is_abandoned(make_pair: PairMaker, *, is_refused: bool) -> None:
    pair = await make_pair("shm", timeouts=Timeouts(worker_s=0.3))
    pair.target.gate("commit")
    if is_refused:
        pair.target.refuse_commit = NoFreePages("after all not")
    with pytest.raises(TransferFailed, match="did not commit in time"):
        await pair.hand_over([1, 2], 30)
    assert pair.receiver.counters[Reason.WORKER_SILENT] == 1
    assert pair.target.held
    pair.target.gates["commit"].set()
    await pair.wait_all_free()
    await until(lambda: len(pair.target.released if is_refused else pair.target.abandoned) == 1)
    assert len(pair.target.released) + len(pair.target.abandoned) == 1
    assert not pair.target.committed
    pair.target.refuse_commit = None
    await pair.assert_works()


async def test_pages_that_do_not_come_back_are_counted_and_hold_nobody_up(make_pair: PairMaker) -> None:
    pair = await make_pair("shm", timeouts=Timeouts(worker_s=0.3))
    transfer = await pair.reserve(16)
    pair.target.gate("release")
    await transfer.abort(CANCELLED)
    await until(lambda: pair.receiver.counters[Reason.WORKER_SILENT] == 1)
    assert pair.receiver.num_transfers == 1
    other = await pair.hand_over([1, 2], 30)
    pair.assert_arrived(other, [1, 2], 30)
    await asyncio.sleep(0.5)  # several looks at the clock: it is counted once
    pair.target.gates["release"].set()
    await pair.wait_all_free()
    assert pair.receiver.counters[Reason.WORKER_SILENT] == 1


async def test_an_abort_that_crosses_the_commit_ends_what_was_begun(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    transfer = await pair.reserve(30)
    link = await next(iter(pair.links._links.values()))
    heard = link._machine.on_message

    def miss_the_commit(message: Message, now: float) -> list[Action]:
        return [] if isinstance(message, Committed) else heard(message, now)

    link._machine.on_message = miss_the_commit  # type: ignore[method-assign]
    transfer.send(0, [1, 2])
    sealing = asyncio.create_task(transfer.seal(num_tokens=30, first_token_id=7, sampling_position=31))
    await until(lambda: transfer.id in pair.target.committed)
    await until(lambda: pair.receiver.num_transfers == 0)
    await transfer.abort(CANCELLED)
    with pytest.raises(RequestCancelled):
        await sealing
    link._machine.on_message = heard  # type: ignore[method-assign]
    await until(lambda: pair.target.abandoned != [])
    assert [(each[0], type(each[1])) for each in pair.target.abandoned] == [(transfer.id, RequestCancelled)]
    assert pair.target.allocator.counts().free == pair.target.pool.num_pages
    await pair.assert_works()


async def test_a_worker_that_fails_to_abandon_does_not_end_the_link(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("shm")
    abandoning = asyncio.Event()

    async def fail(*_: object) -> None:
        abandoning.set()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(pair.target, "abandon", fail)
    _, task = await _advance(pair, "committing")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    pair.target.gates["commit"].set()
    await abandoning.wait()
    (link,) = pair.receiver._links
    await pair.assert_works()
    assert pair.receiver._links == (link,)


async def test_a_receiver_that_does_not_answer_in_time_fails_the_transfer(make_pair: PairMaker) -> None:
    pair = await make_pair("shm", timeouts=Timeouts(reserve_s=0.3))
    pair.target.gate("reserve")
    with pytest.raises(TransferFailed, match="in time to reserve"):
        await pair.reserve(16)
    pair.target.gates["reserve"].set()
    await pair.wait_all_free()


# --- corruption and replay ---


class _Meddler(SendChannel):
    """Stands between the sender and its channel."""

    def __init__(self, channel: SendChannel, how: str) -> None:
        self._channel = channel
        self._how = how
        self.num_posts = 0

    def post(self, seq: int, digest: bytes, buffers: Sequence[Bytes], *, timeout_s: float) -> None:
        self.num_posts += 1
        data = np.concatenate([np.empty(0, dtype=np.uint8), *buffers])
        is_due = self.num_posts == 2
        if is_due and self._how == "flip a bit":
            data[data.size // 2] ^= 1
        if is_due and self._how == "short write":
            data = data[:-4]
        if is_due and self._how == "empty":
            data = data[:0]
        if is_due and self._how == "wrong digest":
            digest = bytes(16)
        if is_due and self._how == "lose":
            return
        if is_due and self._how == "early":
            seq += 1
        self._channel.post(seq, digest, [data], timeout_s=timeout_s)
        if is_due and self._how == "replay":
            self._channel.post(seq, digest, [data], timeout_s=timeout_s)
        if is_due and self._how == "stale":
            self._channel.post(0, digest, [data], timeout_s=timeout_s)

    def shutdown(self) -> None:
        self._channel.shutdown()

    def close(self) -> None:
        self._channel.close()


def _meddle(monkeypatch: pytest.MonkeyPatch, transport: str, how: str) -> None:
    real = transport_named(transport)
    kind = type(real)
    opened = kind.open
    meddled: list[_Meddler] = []

    def open_meddled(self, *arguments, **options):  # type: ignore[no-untyped-def]
        channel = opened(self, *arguments, **options)
        if meddled:
            return channel
        meddled.append(_Meddler(channel, how))
        return meddled[0]

    monkeypatch.setattr(kind, "open", open_meddled)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("flip a bit", Reason.CHECKSUM_MISMATCH),
        ("wrong digest", Reason.CHECKSUM_MISMATCH),
        ("short write", Reason.WRONG_SIZE),
        ("empty", Reason.SEAL_MISMATCH),
        ("lose", Reason.LOST_FRAME),
        ("early", Reason.LOST_FRAME),
    ],
)
async def test_corruption_is_detected_and_counted_and_fails_closed(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, transport: str, how: str, reason: Reason
) -> None:
    _meddle(monkeypatch, transport, how)
    pair = await make_pair(transport)
    is_gap = reason is Reason.LOST_FRAME
    with pytest.raises(TransferFailed):
        await pair.hand_over(page_table(9), 140)
    # After a gap it is one or the other: whether the next frame's header came before the frame.
    reasons = (reason, Reason.CHANNEL_BROKEN) if is_gap else (reason,)

    def num_counted() -> int:
        return sum(pair.receiver.counters[each] for each in reasons)

    if is_gap:
        await until(lambda: num_counted() >= 1)
    assert num_counted() == 1
    assert not pair.target.committed
    await pair.wait_all_free()
    assert num_counted() == 1
    await pair.assert_works(may_begin_anew=is_gap)


@pytest.mark.parametrize("how", ["replay", "stale"])
async def test_a_repeated_frame_is_dropped_and_counted(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, transport: str, how: str
) -> None:
    _meddle(monkeypatch, transport, how)
    pair = await make_pair(transport)
    table = page_table(9)
    transfer = await pair.hand_over(table, 140)
    pair.assert_arrived(transfer, table, 140)
    assert pair.receiver.counters[Reason.REPLAYED_FRAME] == 1


async def test_a_channel_that_keeps_corrupting_is_given_up(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_post = type(transport_named("loopback")).open

    def open_bad(self, *arguments, **options):  # type: ignore[no-untyped-def]
        channel = real_post(self, *arguments, **options)
        post = channel.post
        channel.post = lambda seq, digest, buffers, timeout_s: post(seq, bytes(16), buffers, timeout_s=timeout_s)
        return channel

    monkeypatch.setattr(type(transport_named("loopback")), "open", open_bad)
    pair = await make_pair("loopback")
    for _ in range(3):
        with pytest.raises(TransferFailed):
            await pair.hand_over([1, 2, 3], 48)
    await until(lambda: pair.receiver.counters[Reason.LINK_LOST] == 1)
    monkeypatch.undo()
    await until(lambda: not pair.links._links)
    await pair.assert_works()


# --- Links that break ---


@pytest.mark.parametrize("phase", PHASES)
async def test_the_end_of_the_sending_worker_frees_the_receivers_pages(
    make_pair: PairMaker, transport: str, phase: str
) -> None:
    pair = await make_pair(transport)
    _, task = await _advance(pair, phase)
    await pair.links.close()
    with pytest.raises(WorkerUnavailable):
        await task
    for gate in pair.target.gates.values():
        gate.set()
    await pair.wait_all_free()
    given_up = [error for _, error in pair.target.released + pair.target.abandoned]
    assert all(isinstance(error, TransferFailed) for error in given_up), "the receiving worker itself is well"
    with pytest.raises(WorkerUnavailable):
        await pair.reserve(16)


@pytest.mark.parametrize("phase", PHASES)
async def test_the_end_of_the_receiving_worker_fails_the_transfer(
    make_pair: PairMaker, transport: str, phase: str
) -> None:
    pair = await make_pair(transport)
    _, task = await _advance(pair, phase)
    closing = asyncio.create_task(pair.receiver.close())
    with pytest.raises(TransferFailed):
        await task
    for gate in pair.target.gates.values():
        gate.set()
    await closing
    assert not pair.target.held


@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_a_broken_channel_is_made_again_and_never_reused(make_pair: PairMaker, transport: str, end: str) -> None:
    pair = await make_pair(transport)
    transfer = await pair.reserve(64)
    transfer.send(0, [1, 2])
    send_link = await next(iter(pair.links._links.values()))
    (receive_link,) = pair.receiver._links
    channel = send_link._opened.channel if end == "sender" else receive_link._placer._channel
    channel.shutdown()
    await until(lambda: transfer.error is not None)
    await transfer.released.wait()
    with pytest.raises(TransferFailed):
        transfer.send(2, [3, 4])
    await pair.wait_all_free()
    await pair.assert_works()
    assert await next(iter(pair.links._links.values())) is not send_link


@pytest.mark.parametrize(("machine", "event"), [(SenderLink, "chunk_posted"), (ReceiverLink, "placement")])
async def test_a_machine_that_fails_ends_its_link_at_once(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, machine: type, event: str
) -> None:
    pair = await make_pair("shm", timeouts=Timeouts(commit_s=60.0, stall_s=60.0))
    transfer = await pair.reserve(64)

    def contradict(*args: object, **more: object) -> None:
        raise ValueError("impossible")

    with monkeypatch.context() as patch:
        patch.setattr(machine, event, contradict)
        transfer.send(0, [1, 2])
        async with asyncio.timeout(HANG_LIMIT_S):
            await until(lambda: transfer.error is not None)
    assert isinstance(transfer.error, TransferFailed)
    await pair.assert_works()


async def test_a_receiver_that_stalls_the_channel_fails_the_transfer(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is taken from the ring, though the Link beats on: the channel's own limit must end it."""
    pair = await make_pair("loopback", timeouts=Timeouts(stall_s=0.5))
    transfer = await pair.reserve(1000)
    (receive_link,) = pair.receiver._links
    receive_link._placer._channel.poll = lambda timeout_s: time.sleep(0.05)
    transfer.send(0, page_table(63))
    with pytest.raises(TransferFailed):
        await transfer.seal(num_tokens=1000, first_token_id=7, sampling_position=1001)
    await pair.wait_all_free()


async def test_an_odd_failure_while_posting_still_releases_the_senders_pages(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("shm")
    transfer = await pair.reserve(64)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    send_link = await next(iter(pair.links._links.values()))
    monkeypatch.setattr(send_link._opened.channel, "post", fail)
    for page in range(4):
        transfer.send(page, [page])
    async with asyncio.timeout(HANG_LIMIT_S):
        await transfer.released.wait()
    with pytest.raises(TransferFailed):
        await transfer.seal(num_tokens=64, first_token_id=7, sampling_position=65)
    await pair.wait_all_free()
    await pair.assert_works()


async def test_two_callers_share_the_making_of_a_link(make_pair: PairMaker) -> None:
    pair = await make_pair("shm")
    transfers = await asyncio.gather(*(pair.reserve(16) for _ in range(5)))
    assert len(pair.receiver._links) == 1
    await asyncio.gather(*(transfer.abort(CANCELLED) for transfer in transfers))


# --- which channel ---


async def test_auto_takes_tcp_between_hosts(make_pair: PairMaker) -> None:
    pair = await make_pair("auto", sender_identity=identity("prefill-0", host_id="elsewhere"))
    assert (await pair.hand_over([1], 16)).transport == "tcp"


async def test_auto_falls_back_to_tcp_where_shared_memory_does_not_open(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transports.shm._connect", _raise_os_error)
    pair = await make_pair("auto")
    assert (await pair.hand_over([1], 16)).transport == "tcp"


async def test_workers_without_a_common_transport_report_what_each_of_them_has(make_pair: PairMaker) -> None:
    pair = await make_pair("shm", receiver_transports=("tcp",))
    with pytest.raises(ChannelUnreachable, match="prefill-0 offers shm, and decode-0 accepts tcp"):
        await pair.reserve(16)


def _raise_os_error(*_: object) -> None:
    raise OSError("no such socket in this namespace")
