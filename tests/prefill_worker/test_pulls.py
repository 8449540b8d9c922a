"""Pulled prefixes: what arrives is found, what does not is computed, and every page and place comes back."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.prefixes import WantedPrefix
from kv_transfer.protocol.messages import TransferId
from kv_transfer.receive_link import Reserved
from protos import worker_pb2
from services.runtime.errors import RequestCancelled, TandemError, TransferFailed, WorkerUnavailable
from tests.prefill_worker.conftest import NUM_PAGES, PAGE_SIZE, Bench, Gateway

PROMPT = list(range(1, 15))
"""Three whole pages, and two tokens."""


class Receiver:
    """Stands for the LinkReceiver: notes what is aborted."""

    def __init__(self) -> None:
        self.aborted: list[TransferId] = []

    def abort(self, transfer_id: TransferId, error: TandemError) -> None:
        self.aborted.append(transfer_id)

    async def close(self) -> None:
        pass


class Holder:
    """Stands for another worker: `script` is what its transfer does with the target."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.receiver = bench, Receiver()
        self.asked: list[WantedPrefix] = []
        self.limits_s: list[float] = []
        self.script: Callable[[TransferId], Any] = self.give
        bench.worker.pulls.attach(self.receiver)  # type: ignore[arg-type]

    async def ask(self, wanted: WantedPrefix, *, holder: Any, asker: Any, deadline: Any) -> int:
        self.asked.append(wanted)
        self.limits_s.append(deadline.remaining_s())
        return int(await self.script(wanted.transfer_id))

    async def reserve(self, transfer_id: TransferId, num_tokens: int = 12) -> Reserved:
        return await self.bench.worker.pulls.reserve(transfer_id, num_tokens)

    async def commit(self, transfer_id: TransferId, num_tokens: int = 12, **changed: int) -> None:
        seal = {"first_token_id": PROMPT[num_tokens], "sampling_position": num_tokens + 1} | changed
        await self.bench.worker.pulls.commit(transfer_id, **seal)

    async def give(self, transfer_id: TransferId, num_tokens: int = 12) -> int:
        await self.reserve(transfer_id, num_tokens)
        await self.commit(transfer_id, num_tokens)
        return 640


@pytest.fixture
async def holder(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> Holder:
    made = Holder(make_bench())
    monkeypatch.setattr("prefill_worker.pulls.ask_for_prefix", made.ask)
    return made


def pull(gateway: Gateway, name: str, *, num_tokens: int = 12, limit_ms: int = 5000) -> None:
    """Has a prompt computed, whose beginning another worker has."""
    gateway.prefill(name, PROMPT, pull=worker_pb2.Pull(address="h:1", num_tokens=num_tokens, limit_ms=limit_ms))


async def handed_off(gateway: Gateway, name: str) -> Any:
    await gateway.event(name, "handed_off")
    return await gateway.event(name, "prefill_started")


async def test_what_arrives_is_not_computed_and_is_there_for_the_next_prompt(holder: Holder) -> None:
    gateway = holder.bench.gateway()
    pull(gateway, "r")
    started = await handed_off(gateway, "r")
    assert (started.num_pulled_tokens, started.num_cached_tokens, started.pulled_bytes) == (12, 12, 640)
    (wanted,) = holder.asked
    assert (wanted.token_ids, wanted.page_size, wanted.transfer_id) == (PROMPT[:13], PAGE_SIZE, TransferId("r", 1))
    assert (await gateway.event("r", "tokens")).token_ids == [sum(PROMPT)]
    gateway.prefill("s", PROMPT)
    assert (await handed_off(gateway, "s")).num_cached_tokens == 12
    await holder.bench.until_free()
    assert not holder.receiver.aborted


async def test_a_holder_may_have_less(holder: Holder) -> None:
    gateway, holder.script = holder.bench.gateway(), lambda transfer_id: holder.give(transfer_id, 8)
    pull(gateway, "r")
    started = await handed_off(gateway, "r")
    assert (started.num_pulled_tokens, started.num_cached_tokens) == (8, 8)
    await holder.bench.until_free()


@pytest.mark.parametrize("num_tokens", [0, 3, 99])
async def test_whole_pages_are_asked_for_and_never_the_last_token(holder: Holder, num_tokens: int) -> None:
    gateway = holder.bench.gateway()
    pull(gateway, "r", num_tokens=num_tokens)
    assert (await handed_off(gateway, "r")).num_pulled_tokens == (12 if num_tokens == 99 else 0)
    assert [len(wanted.token_ids) for wanted in holder.asked] == ([13] if num_tokens == 99 else [])


async def test_a_prompt_of_whole_pages_has_one_left_to_compute(holder: Holder) -> None:
    gateway, holder.script = holder.bench.gateway(), lambda transfer_id: holder.give(transfer_id, 8)
    gateway.prefill("r", PROMPT[:12], pull=worker_pb2.Pull(address="h:1", num_tokens=12, limit_ms=5000))
    assert (await handed_off(gateway, "r")).num_pulled_tokens == 8
    assert holder.asked[0].token_ids == PROMPT[:9]


async def test_a_failure_before_pages_are_reserved_costs_a_computation(holder: Holder) -> None:
    async def refuse(transfer_id: TransferId) -> int:
        raise WorkerUnavailable("the holder is gone")

    gateway, holder.script = holder.bench.gateway(), refuse
    pull(gateway, "r")
    started = await handed_off(gateway, "r")
    assert (started.num_pulled_tokens, started.num_cached_tokens) == (0, 0)
    assert holder.receiver.aborted == [TransferId("r", 1)]
    with pytest.raises(TransferFailed, match="no prefix is awaited"):
        await holder.reserve(TransferId("r", 1))
    await holder.bench.until_free()


async def test_pages_of_a_transfer_that_failed_are_freed_and_not_found(holder: Holder) -> None:
    async def fail(transfer_id: TransferId) -> int:
        await holder.reserve(transfer_id)
        await holder.bench.worker.pulls.release(transfer_id, TransferFailed("a checksum"))
        raise TransferFailed("a checksum")

    gateway, holder.script = holder.bench.gateway(), fail
    pull(gateway, "r")
    assert (await handed_off(gateway, "r")).num_cached_tokens == 0
    await holder.bench.until_free()


async def test_pages_that_may_still_be_written_to_stay_held_when_the_time_is_over(holder: Holder) -> None:
    async def hang(transfer_id: TransferId) -> int:
        await holder.reserve(transfer_id)
        await asyncio.Event().wait()
        return 0

    gateway, holder.script = holder.bench.gateway(), hang
    pull(gateway, "r", limit_ms=30)
    started = await handed_off(gateway, "r")
    assert (started.num_pulled_tokens, started.num_cached_tokens) == (0, 0)
    assert started.pull_s >= 0.03
    assert holder.receiver.aborted == [TransferId("r", 1)]
    await holder.bench.until(lambda: holder.bench.worker.load().pages_reserved == 3)
    await holder.bench.worker.pulls.release(TransferId("r", 1), RequestCancelled("it was given up"))
    await holder.bench.until_free()


async def test_a_cancelled_attempt_gives_its_pull_up(holder: Holder) -> None:
    entered = asyncio.Event()

    async def hang(transfer_id: TransferId) -> int:
        await holder.reserve(transfer_id)
        entered.set()
        await asyncio.Event().wait()
        return 0

    gateway, holder.script = holder.bench.gateway(), hang
    pull(gateway, "r")
    await entered.wait()
    gateway.cancel("r")
    await holder.bench.until(lambda: bool(holder.receiver.aborted))
    with pytest.raises(TransferFailed):
        await holder.reserve(TransferId("r", 1))
    await holder.bench.worker.pulls.release(TransferId("r", 1), RequestCancelled("it was given up"))
    await holder.bench.until_free(num_cached=0)


@pytest.mark.parametrize("changed", [{"first_token_id": 99}, {"sampling_position": 12}])
async def test_a_seal_of_another_prompt_is_refused(holder: Holder, changed: dict[str, int]) -> None:
    async def lie(transfer_id: TransferId) -> int:
        await holder.reserve(transfer_id)
        try:
            await holder.commit(transfer_id, **changed)
        except TransferFailed as error:
            await holder.bench.worker.pulls.release(transfer_id, error)
            raise
        return 0

    gateway, holder.script = holder.bench.gateway(), lie
    pull(gateway, "r")
    assert (await handed_off(gateway, "r")).num_cached_tokens == 0
    await holder.bench.until_free()


@pytest.mark.parametrize("num_tokens", [16, 6, 0])
async def test_other_pages_than_those_that_are_awaited_are_refused(holder: Holder, num_tokens: int) -> None:
    async def send(transfer_id: TransferId) -> int:
        return int(bool(await holder.reserve(transfer_id, num_tokens)))

    gateway, holder.script = holder.bench.gateway(), send
    pull(gateway, "r")
    assert (await handed_off(gateway, "r")).num_cached_tokens == 0
    await holder.bench.until_free()


async def test_a_prompt_for_whose_pull_no_page_is_free_is_computed(holder: Holder) -> None:
    may_go = asyncio.Event()

    async def wait(transfer_id: TransferId) -> int:
        await may_go.wait()
        raise TransferFailed("never mind")

    gateway, holder.script = holder.bench.gateway(), wait
    # Two prompts of four pages, and two pulls of three: a third one has no room.
    holder.bench.runner.gate.clear()
    for name in ("first", "second"):
        gateway.prefill(name, [len(name)] * 14)
    await holder.bench.until(lambda: holder.bench.worker.load().running == 2)
    for number in range(3):
        pull(gateway, f"r{number}")
    await holder.bench.until(lambda: holder.bench.worker.load().waiting == 3)
    assert holder.bench.worker.load().promised_pages == NUM_PAGES - 2
    holder.bench.runner.gate.set()
    may_go.set()
    for number in range(3):
        await handed_off(gateway, f"r{number}")
    assert [wanted.transfer_id.request_id for wanted in holder.asked] == ["r0", "r1"]
    await holder.bench.until_free()


async def test_few_prefixes_are_fetched_at_a_time(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = asyncio.Event()

    async def wait(transfer_id: TransferId) -> int:
        await may_go.wait()
        raise TransferFailed("never mind")

    monkeypatch.setattr("prefill_worker.pulls.MAX_PULLS", 1)
    gateway, holder.script = holder.bench.gateway(), wait
    pull(gateway, "r0")
    await holder.bench.until(lambda: len(holder.asked) == 1)
    pull(gateway, "r1")
    await handed_off(gateway, "r1")
    may_go.set()
    await handed_off(gateway, "r0")
    assert len(holder.asked) == 1
    await holder.bench.until_free()
