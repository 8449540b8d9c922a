"""Pages that outlive their attempt: the next attempt of the request hands them over again and computes nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.protocol.messages import TransferId
from prefill_worker import kept
from services.engine.steps.step import SampledToken, StepResult
from services.runtime.errors import TransferFailed, WorkerUnavailable
from tests.waiting import HANG_LIMIT_S
from worker.attempts import AttemptKey

Make = Callable[..., Any]
PROMPT = list(range(1, 21))  # five pages


def transfer(bench: Any, *, attempt: int = 1) -> Any:
    """The transfer of an attempt of `r`, as soon as there is one."""
    return bench.links.transfers.get(TransferId("r", attempt))


async def until_sealed(bench: Any, *, attempt: int = 1) -> None:
    await bench.until(lambda: bool(transfer(bench, attempt=attempt) and transfer(bench, attempt=attempt).sealed))


def pages_sent(bench: Any, *, attempt: int = 1) -> list[int]:
    return [page_id for _, page_ids in transfer(bench, attempt=attempt).sent for page_id in page_ids]


def computed_tokens(bench: Any) -> float:
    return bench.metrics.registry.get_sample_value("tandem_computed_tokens_total", {"worker": "prefill-0"})


async def test_after_a_handoff_the_pages_are_handed_over_again_without_computing(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    await gateway.event("r", "handed_off")
    await bench.until_free(num_cached=5)
    for attempt in (2, 3):
        gateway.prefill("r", PROMPT, attempt=attempt)
        handed_off = await gateway.event("r", "handed_off", attempt=attempt)
        assert handed_off.num_pages == 5
        assert gateway.kinds("r", attempt=attempt) == ["prefill_started", "tokens", "handed_off"]
        started = await gateway.event("r", "prefill_started", attempt=attempt)
        assert started.num_cached_tokens == 20
        first = await gateway.event("r", "tokens")
        assert await gateway.event("r", "tokens", attempt=attempt) == first
        assert pages_sent(bench, attempt=attempt) == pages_sent(bench)
        assert transfer(bench, attempt=attempt).sealed == transfer(bench).sealed
        await bench.until_free(num_cached=5)
    assert computed_tokens(bench) == 20
    assert (await gateway.event("r", "prefill_started")).num_cached_tokens == 0
    hits = bench.metrics.registry.get_sample_value("tandem_cached_tokens_total", {"worker": "prefill-0"})
    assert hits == 40


async def test_the_first_token_comes_again_with_its_logprobs(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench()
    token = SampledToken(7, -0.25, ((7, -0.25), (3, -2.0)))
    monkeypatch.setattr(bench.runner, "run", lambda plan: StepResult([token]))
    gateway = bench.gateway()
    gateway.prefill("r", [1], logprobs=2)
    await gateway.event("r", "handed_off")
    gateway.prefill("r", [1], logprobs=2, attempt=2)
    first = await gateway.event("r", "tokens")
    assert await gateway.event("r", "tokens", attempt=2) == first
    assert first.logprobs[0].logprob == -0.25


async def test_what_was_emitted_is_not_told_again(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    first = (await gateway.event("r", "tokens")).token_ids[0]
    await gateway.event("r", "handed_off")
    gateway.prefill("r", PROMPT, attempt=2, emitted_token_ids=[first, 7])
    await gateway.event("r", "handed_off", attempt=2)
    assert gateway.kinds("r", attempt=2) == ["prefill_started", "handed_off"]
    assert transfer(bench, attempt=2).sealed["first_token_id"] == first
    # The third has emitted nothing, and the second never sampled: the first one's token is still known.
    gateway.prefill("r", PROMPT, attempt=3)
    await gateway.event("r", "handed_off", attempt=3)
    assert (await gateway.event("r", "tokens", attempt=3)).token_ids == [first]
    assert computed_tokens(bench) == 20


async def test_a_token_that_was_never_sampled_here_is_computed_for_who_wants_it(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT, emitted_token_ids=[3])
    await gateway.event("r", "handed_off")
    gateway.prefill("r", PROMPT, attempt=2)
    await gateway.event("r", "handed_off", attempt=2)
    assert (await gateway.event("r", "tokens", attempt=2)).token_ids == [sum(PROMPT)]
    assert computed_tokens(bench) == 20 + 4, "the last page is computed again, for the token that comes out of it"


@pytest.mark.parametrize(
    ("changed", "num_computed", "num_cached"),
    [
        ({"prompt": [9, *PROMPT[1:]]}, 20, 10),
        ({"cache_salt": "another"}, 20, 10),
        ({"prompt": PROMPT[:-1]}, 3, 6),
        ({"seed": 2}, 4, 6),
        ({"logprobs": 1}, 4, 6),
        ({"emitted_token_ids": [5]}, 4, 6),
    ],
)
async def test_of_another_prompt_or_another_choice_what_differs_is_computed(
    make_bench: Make, changed: dict[str, Any], num_computed: int, num_cached: int
) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    await gateway.event("r", "handed_off")
    fields = {"prompt": PROMPT} | changed
    gateway.prefill("r", attempt=2, **fields)
    await gateway.event("r", "handed_off", attempt=2)
    assert computed_tokens(bench) == 20 + num_computed
    started = await gateway.event("r", "prefill_started", attempt=2)
    assert started.num_cached_tokens == len(fields["prompt"]) - num_computed
    # All pages of the first one have a name; of the second one's, all that differ, or the last, which is kept.
    await bench.until_free(num_cached=num_cached)


@pytest.mark.parametrize("how", ["transfer", "cancel", "newer"])
async def test_a_computed_prompt_is_kept_however_its_transfer_ended(make_bench: Make, how: str) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    await gateway.event("r", "tokens")
    await until_sealed(bench)
    bench.links.holds_commits = False
    if how == "transfer":
        transfer(bench).error = WorkerUnavailable("the decode worker died")
        transfer(bench).may_commit.set()
        await gateway.event("r", "failed")
    elif how == "cancel":
        gateway.cancel("r")
    gateway.prefill("r", PROMPT, attempt=2)
    await gateway.event("r", "handed_off", attempt=2)
    assert (await gateway.event("r", "prefill_started", attempt=2)).num_cached_tokens == 20
    assert pages_sent(bench, attempt=2) == pages_sent(bench)
    assert computed_tokens(bench) == 20
    await bench.until_free(num_cached=5)


async def test_pages_that_are_still_read_are_not_waited_for_for_long(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = bench.links.holds_aborts = True
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    await until_sealed(bench)
    bench.links.holds_commits = bench.links.holds_aborts = False
    gateway.prefill("r", PROMPT, attempt=2)
    await gateway.event("r", "handed_off", attempt=2)
    assert (await gateway.event("r", "prefill_started", attempt=2)).num_cached_tokens == 16
    first, second = pages_sent(bench), pages_sent(bench, attempt=2)
    assert first[:4] == second[:4], "nobody writes to them"
    assert first[4] != second[4]
    transfer(bench).may_abort.set()
    await bench.until_free(num_cached=6)


async def test_of_half_a_prompt_the_full_pages_are_found(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=4)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    await gateway.event("r", "prefill_started")
    transfer(bench).error = TransferFailed("the channel broke")
    bench.runner.closes_gate = True
    bench.runner.gate.set()
    await gateway.event("r", "failed")
    await bench.until(lambda: not bench.worker._tasks)
    bench.runner.closes_gate = False
    bench.runner.gate.set()  # the next step may have begun
    await bench.until(lambda: bench.worker.load().pages_cached > 0)
    await bench.until_free()
    num_computed = 4 * bench.runner.num_steps
    assert num_computed in (4, 8)
    gateway.prefill("r", PROMPT, attempt=2)
    await gateway.event("r", "handed_off", attempt=2)
    assert (await gateway.event("r", "prefill_started", attempt=2)).num_cached_tokens == num_computed


async def test_an_answer_of_one_token_is_not_kept(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [*PROMPT, 7], max_tokens=1)
    await gateway.event("r", "finished")
    await bench.until_free(num_cached=5)
    assert not bench.worker._kept


async def test_kept_pages_give_way_to_prompts_and_what_lost_one_is_computed(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    for num_requests, request_id in enumerate("rst", start=1):
        gateway.prefill(request_id, PROMPT, cache_salt=request_id)
        await gateway.event(request_id, "handed_off")
        await bench.until_free(num_cached=5 * num_requests)
    gateway.prefill("big", [1] * 12)  # three pages, of which one is free
    await gateway.event("big", "handed_off")
    gateway.prefill("r", PROMPT, attempt=2, cache_salt="r")
    gateway.prefill("t", PROMPT, attempt=2, cache_salt="t")
    await gateway.event("r", "handed_off", attempt=2)
    await gateway.event("t", "handed_off", attempt=2)
    assert (await gateway.event("r", "prefill_started", attempt=2)).num_cached_tokens == 12, (
        "the end of the oldest was evicted"
    )
    assert (await gateway.event("t", "prefill_started", attempt=2)).num_cached_tokens == 20
    await bench.until_free(num_cached=16)


async def test_kept_pages_never_keep_a_prompt_out(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 60)
    await gateway.event("r", "handed_off")
    gateway.prefill("s", [2] * 60)
    await gateway.event("s", "handed_off")
    await bench.until_free(num_cached=16)


async def test_where_the_books_have_no_room_it_stands_in_the_queue(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", PROMPT)
    await gateway.event("r", "handed_off")
    bench.runner.gate.clear()
    gateway.prefill("big", [1] * 60)
    await gateway.event("big", "prefill_started")
    gateway.prefill("r", PROMPT, attempt=2)
    await bench.until(lambda: bench.worker.load().waiting == 1)
    bench.runner.gate.set()
    await gateway.event("r", "handed_off", attempt=2)
    await bench.until_free(num_cached=16)


async def test_kept_pages_expire(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_S", 0.05)
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [*PROMPT, 7])
    await gateway.event("r", "handed_off")
    await bench.until(lambda: bench.worker.load().pages_free == 11)
    assert not bench.worker._kept
    assert not bench.worker._engine._kept
    assert bench.worker.load().pages_cached == 5, "what is full is still found"
    gateway.prefill("r", [*PROMPT, 7], attempt=2)
    await gateway.event("r", "handed_off", attempt=2)
    assert (await gateway.event("r", "prefill_started", attempt=2)).num_cached_tokens == 20
    assert computed_tokens(bench) == 22


@pytest.mark.parametrize("how", ["cancel", "drop", "newer"])
@pytest.mark.parametrize("phase", ["waiting", "taking", "reserving", "sealing"])
async def test_an_end_in_any_phase_of_the_second_handover_leaves_nothing(
    make_bench: Make, phase: str, how: str
) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    bench.links.holds_aborts = phase == "waiting"
    gateway, other = bench.gateway(), bench.gateway()
    other.prefill("r", PROMPT)
    await until_sealed(bench)
    if phase != "waiting":
        transfer(bench).may_commit.set()
        await other.event("r", "handed_off")
        await bench.until_free(num_cached=5)
    if phase == "taking":
        bench.runner.gate.clear()
        other.prefill("busy", [5])
        await other.event("busy", "prefill_started")
    if phase == "reserving":
        bench.links.may_reserve.clear()
    asked = len(bench.links.asked)
    gateway.prefill("r", PROMPT, attempt=2)
    match phase:
        case "waiting" | "taking":
            await bench.until(lambda: len(bench.worker._attempts) > (phase == "taking"))
        case "reserving":
            await bench.until(lambda: len(bench.links.asked) > asked)
        case "sealing":
            await until_sealed(bench, attempt=2)
    bench.links.holds_commits = False
    match how:
        case "cancel":
            gateway.cancel("r", attempt=2)
        case "drop":
            gateway.drop()
        case "newer":
            gateway.prefill("r", [9] * 20, attempt=3)
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 2)) is None)
    bench.runner.gate.set()
    bench.links.may_reserve.set()
    for ended in bench.links.transfers.values():
        ended.may_commit.set()
        ended.may_abort.set()
    if how == "newer":
        await gateway.event("r", "handed_off", attempt=3)
    await bench.until_free(num_cached=5 + 5 * (how == "newer") + (phase == "taking"))
    assert not {"failed", "refused", "handed_off"} & set(gateway.kinds("r", attempt=2))


async def test_a_worker_that_leaves_frees_what_it_kept(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [*PROMPT, 7])
    await gateway.event("r", "handed_off")
    await bench.until_free(num_cached=6)
    await asyncio.wait_for(bench.worker.close(), HANG_LIMIT_S)
    assert bench.allocator.counts() == (16, 11, 5, 0, 0)
