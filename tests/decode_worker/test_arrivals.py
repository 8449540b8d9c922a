"""Pages that a transfer brings: what is set aside, committed, refused and given back."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.protocol.messages import TransferId
from protos import worker_pb2
from services.runtime.errors import (
    DeadlineExceeded,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerUnavailable("the sender fell silent"), worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE),
        (TransferFailed("chunk 1 did not arrive whole"), worker_pb2.ERROR_CODE_TRANSFER_FAILED),
        (DeadlineExceeded("late"), worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED),
        (RequestCancelled("the first token ended the answer"), None),
    ],
)
async def test_a_transfer_that_ends_without_commit_ends_the_attempt(
    make_bench: Make, error: TandemError, code: int | None
) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6)
    await gateway.event("r", "admitted")
    await bench.worker.arrivals.reserve(TransferId("r", 1), 6)
    await bench.worker.arrivals.release(TransferId("r", 1), error)
    if code is not None:
        assert (await gateway.event("r", "failed")).code == code
    await bench.until_free()
    assert ("failed" in gateway.kinds("r")) == (code is not None)


@pytest.mark.parametrize("wrong", ["unknown", "older", "twice", "local", "length"])
async def test_a_reservation_that_fits_no_admission_takes_nothing(make_bench: Make, wrong: str) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6, attempt=2, local=wrong == "local", deadline_ms=20_000)
    await gateway.event("r", "admitted", attempt=2)
    if wrong == "twice":
        await bench.worker.arrivals.reserve(TransferId("r", 2), 6)
    transfer_id = {"unknown": TransferId("x", 2), "older": TransferId("r", 1)}.get(wrong, TransferId("r", 2))
    before = bench.allocator.num_reserved_pages
    with pytest.raises(TransferFailed):
        await bench.worker.arrivals.reserve(transfer_id, 7 if wrong == "length" else 6)
    await bench.worker.arrivals.release(TransferId("nobody", 1), TransferFailed("x"))
    assert bench.allocator.num_reserved_pages == before


@pytest.mark.parametrize(
    "seal",
    [
        {"first_token_id": 9, "sampling_position": 8},
        {"first_token_id": 5000, "sampling_position": 7},
    ],
)
async def test_a_seal_that_contradicts_the_request_is_not_committed(make_bench: Make, seal: dict[str, int]) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6)
    await gateway.event("r", "admitted")
    await bench.worker.arrivals.reserve(TransferId("r", 1), 6)
    with pytest.raises(TandemError):
        await bench.worker.arrivals.commit(TransferId("r", 1), **seal)
    await bench.worker.arrivals.release(TransferId("r", 1), TransferFailed("the worker would not take the pages"))
    await gateway.event("r", "failed")
    await bench.until_free()
    assert not gateway.tokens("r")


async def test_a_transfer_that_failed_is_told_before_the_word_of_a_cancel(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6)
    await gateway.event("r", "admitted")
    await bench.worker.arrivals.reserve(TransferId("r", 1), 6)
    await bench.worker.arrivals.release(TransferId("r", 1), TransferFailed("the sender is gone"))
    gateway.cancel("r", wants_word=True)
    assert not (await gateway.event("r", "cancelled")).has_begun
    assert gateway.kinds("r") == ["admitted", "failed", "cancelled"]


@pytest.mark.parametrize("how", ["cancel", "release"])
async def test_a_transfer_that_ends_early_leaves_nothing_to_find_but_what_was_here(make_bench: Make, how: str) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("first", [1] * 9, local=True, max_tokens=1)
    await gateway.event("first", "finished")
    await bench.until_free(num_cached=2)
    gateway.admit("r", [1] * 9 + [2] * 9)
    await gateway.event("r", "admitted")
    await bench.worker.arrivals.reserve(TransferId("r", 1), 18)
    assert bench.allocator.counts() == (16, 11, 0, 3, 2)
    if how == "cancel":
        gateway.cancel("r")
    else:
        await bench.worker.arrivals.release(TransferId("r", 1), TransferFailed("broken"))
    await bench.until_free(num_cached=2)
