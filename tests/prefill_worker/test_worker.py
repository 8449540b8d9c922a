import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protos import inference_pb2, worker_pb2
from services.runtime.errors import InvariantViolated, NoFreePages, RequestCancelled, TransferFailed
from services.scheduling.speedometer import MIN_STEPS
from tests.fake_links import CARRIED
from tests.kept_spans import KeptSpans
from tests.waiting import HANG_LIMIT_S, settle
from worker.attempts import AttemptKey
from worker.sessions import SessionLimits

Make = Callable[..., Any]


async def test_the_first_token_goes_out_before_the_pages_are_committed(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3, 4, 5])
    tokens = await gateway.event("r", "tokens")
    assert (tokens.first_index, list(tokens.token_ids)) == (0, [15])
    transfer = next(iter(bench.links.transfers.values()))
    await bench.until(lambda: bool(transfer.sealed))
    assert transfer.sealed == {"num_tokens": 5, "first_token_id": 15, "sampling_position": 6}
    assert gateway.kinds("r") == ["prefill_started", "tokens"]
    assert bench.allocator.num_used_pages == 2, "pages are held until the commit"
    transfer.may_commit.set()
    handed_off = await gateway.event("r", "handed_off")
    assert (handed_off.num_pages, handed_off.num_bytes, handed_off.exposed_s) == (2, 128, 0.5)
    assert handed_off.transport == "fake"
    await bench.until_free(num_cached=2)
    assert transfer.abort_reason is None
    assert bench.links.asked[0][:2] == ("decode:1", "d" * 32)


async def test_a_worker_without_a_link_to_the_decode_worker_says_that_it_opens_one(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.is_open = False
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3])
    await gateway.event("r", "handed_off")
    assert gateway.kinds("r")[:2] == ["opening_link", "prefill_started"]
    bench.links.is_open = True
    gateway.prefill("s", [1, 2, 4])
    await gateway.event("s", "handed_off")
    assert gateway.kinds("s")[0] == "prefill_started"


async def test_gateways_hear_at_once_that_pages_came_free(make_bench: Make) -> None:
    bench = make_bench()
    bench.worker.sessions._limits = SessionLimits(beat_s=60)  # so that it is not the regular beat that brings it
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3])
    await gateway.event("r", "handed_off")
    await bench.until(lambda: gateway.loads[-1].pages.used == 0 and gateway.loads[-1].running == 0)


async def test_complete_pages_are_sent_chunk_by_chunk(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=10)
    gateway = bench.gateway()
    gateway.prefill("r", list(range(30)))
    handed_off = await gateway.event("r", "handed_off")
    transfer = next(iter(bench.links.transfers.values()))
    assert [(first, len(pages)) for first, pages in transfer.sent] == [(0, 2), (2, 3), (5, 3)]
    assert [chunk.num_tokens for chunk in handed_off.chunks] == [10, 10, 10]
    began_s = [chunk.began_s for chunk in handed_off.chunks]
    assert 0 <= began_s[0] <= began_s[1] <= began_s[2] < 60
    assert all(0 < chunk.spent_s < 60 for chunk in handed_off.chunks)
    await bench.until_free(num_cached=8)


async def test_emitted_tokens_are_not_sampled_again(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], emitted_token_ids=[77, 78], attempt=2)
    await gateway.event("r", "handed_off", attempt=2)
    assert "tokens" not in gateway.kinds("r", attempt=2)
    transfer = next(iter(bench.links.transfers.values()))
    assert transfer.sealed == {"num_tokens": 3, "first_token_id": 77, "sampling_position": 4}


@pytest.mark.parametrize("stop", [{"max_tokens": 1}, {"eos_token_ids": [6]}])
async def test_a_first_token_that_ends_the_answer_aborts_the_transfer(make_bench: Make, stop: dict[str, Any]) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3], **stop)
    finished = await gateway.event("r", "finished")
    reason = inference_pb2.FINISH_REASON_LENGTH if "max_tokens" in stop else inference_pb2.FINISH_REASON_STOP
    assert finished.reason == reason
    await bench.until_free(num_cached=0)
    assert gateway.kinds("r") == ["prefill_started", "tokens", "finished"]
    assert isinstance(next(iter(bench.links.transfers.values())).abort_reason, RequestCancelled)


async def test_pages_are_not_freed_before_the_abort_is_over(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = bench.links.holds_aborts = True
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await gateway.event("r", "tokens")
    gateway.cancel("r")
    transfer = next(iter(bench.links.transfers.values()))
    await bench.until(lambda: transfer.abort_reason is not None)
    gateway.cancel("r")
    await settle()
    assert bench.allocator.num_used_pages == 5
    transfer.may_abort.set()
    await bench.until_free(num_cached=5)
    assert gateway.kinds("r") == ["prefill_started", "tokens"]


@pytest.mark.parametrize("how", ["cancel", "session", "drop", "newer"])
@pytest.mark.parametrize("phase", ["queued", "asking", "reserving", "beginning", "computing", "sealing"])
async def test_an_end_in_any_phase_leaves_nothing(make_bench: Make, phase: str, how: str) -> None:
    bench = make_bench(chunk_tokens=4)
    if phase == "beginning":
        bench.runner.gate.clear()
        busy = bench.gateway()
        busy.prefill("busy", [7, 7])
        await busy.event("busy", "prefill_started")
    bench.links.holds_commits = True
    gateway, other = bench.gateway(), bench.gateway()
    if phase == "queued":
        bench.runner.gate.clear()
        other.prefill("first", [1] * 60)
        await other.event("first", "prefill_started")
    if phase == "asking":
        bench.links.may_ask.clear()
    if phase == "reserving":
        bench.links.may_reserve.clear()
    if phase == "computing":
        bench.runner.gate.clear()
    gateway.prefill("r", [1] * 20)
    match phase:
        case "queued":
            await bench.until(lambda: bench.worker.load().waiting == 1)
        case "asking":
            await bench.until(lambda: bool(bench.links.wanted))
        case "reserving":
            await bench.until(lambda: bench.runner.num_steps == 5)
        case "beginning":  # the engine is busy and has not said yet what of the prompt it has
            await bench.until(lambda: any(a.has_begun for a in bench.worker._attempts if a.spec.key == ("r", 1)))
            assert not gateway.kinds("r")
        case "computing":
            await gateway.event("r", "prefill_started")
        case "sealing":
            await gateway.event("r", "tokens")
            await bench.until(lambda: any(t.sealed for t in bench.links.transfers.values()))
    match how:
        case "cancel":
            gateway.cancel("r")
        case "session":
            await gateway.leave()
        case "drop":
            gateway.drop()
        case "newer":
            gateway.prefill("r", [2] * 20, attempt=2)
    await bench.until(lambda: bench.worker._attempts.find(AttemptKey("r", 1)) is None)
    bench.links.holds_commits = False
    bench.runner.gate.set()
    bench.links.may_ask.set()
    bench.links.may_reserve.set()
    for transfer in bench.links.transfers.values():
        transfer.may_commit.set()
    if how == "newer":
        await gateway.event("r", "handed_off", attempt=2)
    # Pages that are full stay; as much of the first one's is evicted as another one needs.
    if phase == "beginning":
        await busy.event("busy", "handed_off")
    num_computed = {"queued": 15, "asking": 0, "reserving": 5, "beginning": 1, "computing": 1, "sealing": 5}[phase]
    await bench.until_free(num_cached=min(16, num_computed + 5 * (how == "newer")))
    assert not {"failed", "refused", "handed_off"} & set(gateway.kinds("r"))


async def test_pages_that_are_here_are_sent_at_once_and_not_computed(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=8)
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 14)
    await gateway.event("r", "handed_off")
    bench.runner.gate.clear()
    gateway.prefill("s", [1] * 13 + [2] * 5)
    assert (await gateway.event("s", "prefill_started")).num_cached_tokens == 12
    transfer = list(bench.links.transfers.values())[-1]
    await bench.until(lambda: bool(transfer.sent))
    assert [(first, len(pages)) for first, pages in transfer.sent] == [(0, 3)], "before anything is computed"
    assert (
        transfer.sent[0][1]
        == next(iter(bench.links.transfers.values())).sent[0][1]
        + (next(iter(bench.links.transfers.values())).sent[1][1][:1])
    )
    bench.runner.gate.set()
    await gateway.event("s", "handed_off")
    assert [(first, len(pages)) for first, pages in transfer.sent] == [(0, 3), (3, 2)]
    assert transfer.sealed["num_tokens"] == 18
    value = bench.metrics.registry.get_sample_value
    assert value("tandem_computed_tokens_total", {"worker": "prefill-0"}) == 14 + 6
    assert value("tandem_cached_tokens_total", {"worker": "prefill-0"}) == 12
    await bench.until_free(num_cached=6)


async def test_tenants_share_no_page(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    for request_id, salt in (("a", "one"), ("b", "two"), ("c", ""), ("d", "two")):
        gateway.prefill(request_id, [1] * 9, cache_salt=salt)
        await gateway.event(request_id, "handed_off")
    cached = [(await gateway.event(request_id, "prefill_started")).num_cached_tokens for request_id in "abcd"]
    assert cached == [0, 0, 0, 8]


async def test_who_asks_hears_which_pages_come_and_go(make_bench: Make) -> None:
    heard: list[tuple[int, int]] = []
    bench = make_bench(on_pages_changed=lambda added, evicted: heard.append((len(added), len(evicted))))
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 60)
    await gateway.event("r", "handed_off")
    gateway.prefill("s", [2] * 60)
    await gateway.event("s", "handed_off")
    await bench.until_free()
    assert [sum(numbers) for numbers in zip(*heard, strict=True)] == [30, 15 - 1]
    assert (0, 0) not in heard


async def test_what_is_cached_is_no_work_that_others_wait_for(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=8)
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await gateway.event("r", "handed_off")
    bench.runner.gate.clear()
    bench.links.may_ask.clear()
    gateway.prefill("s", [1] * 21)
    gateway.prefill("t", [2] * 22)
    await bench.until(lambda: bench.worker.load().waiting == 1)
    bench.links.may_ask.set()
    await bench.until(lambda: bench.worker.load().running == 2)
    assert bench.worker.load().waiting_tokens == 1 + 22, "the second has its turn although the first has 21 tokens"
    bench.runner.gate.set()
    await gateway.event("t", "handed_off")


async def test_a_cancel_before_the_task_began_leaves_nothing(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    gateway.cancel("r")
    gateway.prefill("s", [1, 2])
    await gateway.event("s", "handed_off")
    await bench.until_free(num_cached=1)
    assert "failed" not in gateway.kinds("r")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoFreePages("full"), worker_pb2.ERROR_CODE_OVERLOADED),
        (TransferFailed("broken"), worker_pb2.ERROR_CODE_TRANSFER_FAILED),
        (RuntimeError("a bug"), worker_pb2.ERROR_CODE_INTERNAL),
    ],
)
@pytest.mark.parametrize("when", ["ask", "reserve", "seal"])
async def test_a_failure_is_answered_and_frees_everything(
    make_bench: Make, when: str, error: Exception, code: int
) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    if when == "ask":
        bench.links.ask_error = error
    if when == "reserve":
        bench.links.error = error
        bench.links.may_reserve.clear()
        bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    if when == "reserve":
        await bench.until(lambda: bench.runner.num_begun == 1)
        bench.links.may_reserve.set()
    if when == "seal":
        await gateway.event("r", "tokens")
        transfer = next(iter(bench.links.transfers.values()))
        transfer.error = error
        transfer.may_commit.set()
    failed = await gateway.event("r", "failed")
    assert failed.code == code
    assert "bug" not in failed.message
    await bench.until(lambda: not bench.worker._tasks)
    bench.runner.gate.set()
    # What the engine was at when the pages were refused is computed, and the rest is not.
    await bench.until_free(num_cached={"ask": 0, "reserve": 2, "seal": 5}[when])


async def test_a_prompt_is_computed_while_its_pages_are_waited_for(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=8)
    bench.links.may_ask.clear()
    bench.links.may_reserve.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await bench.until(lambda: bool(bench.links.wanted))
    await settle()
    assert not gateway.kinds("r"), "nothing is begun of which the decode worker may never hear"
    bench.links.may_ask.set()
    await bench.until(lambda: bench.runner.num_steps == 3)
    await gateway.event("r", "prefill_started")
    transfer = next(iter(bench.links.transfers.values()))
    assert not transfer.sent
    bench.links.may_reserve.set()
    await gateway.event("r", "handed_off")
    assert gateway.kinds("r") == ["prefill_started", "tokens", "handed_off"]
    assert [len(pages) for _, pages in transfer.sent] == [2, 2, 1]
    await bench.until_free(num_cached=5)


async def test_a_transfer_that_breaks_stops_the_computation(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=4)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 60)
    await gateway.event("r", "prefill_started")
    next(iter(bench.links.transfers.values())).error = TransferFailed("the channel broke")
    bench.runner.closes_gate = True
    bench.runner.gate.set()
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_TRANSFER_FAILED
    await bench.until(lambda: not bench.worker._tasks)
    bench.runner.gate.set()
    await bench.until_free()
    assert bench.runner.num_steps <= 2


async def test_a_deadline_ends_it_with_an_answer(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.may_reserve.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20, deadline_ms=30)
    failed = await gateway.event("r", "failed")
    assert failed.code == worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    await bench.until_free()


async def test_a_full_queue_refuses_at_once_with_a_time_to_come_back(make_bench: Make) -> None:
    bench = make_bench(max_waiting=1)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("long", [1] * 60)
    gateway.prefill("waits", [1] * 20)
    gateway.prefill("refused", [1] * 20)
    refused = await gateway.event("refused", "refused")
    assert refused.code == worker_pb2.ERROR_CODE_OVERLOADED
    assert refused.retry_after_ms > 0
    bench.runner.gate.set()
    await gateway.event("waits", "handed_off")
    await bench.until_free(num_cached=16)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [1000]},
        {"prompt": [1] * 64},
        {"prompt": [1], "emitted_token_ids": [5000]},
        {"prompt": [1], "attempt": 0},
        {"prompt": [1], "max_tokens": 0},
    ],
)
async def test_nonsense_is_refused_and_the_session_goes_on(make_bench: Make, fields: dict[str, Any]) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    attempt = fields.get("attempt", 1)
    gateway.prefill("bad", **fields)
    refused = await gateway.event("bad", "refused", attempt=attempt)
    assert refused.code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    gateway.prefill("good", [1, 2])
    await gateway.event("good", "handed_off")
    await bench.until_free(num_cached=1)


async def test_a_repeated_or_older_attempt_is_refused(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2], attempt=2)
    await gateway.event("r", "tokens", attempt=2)
    gateway.prefill("r", [1, 2], attempt=1)
    await gateway.event("r", "refused", attempt=1)
    gateway.prefill("r", [1, 2], attempt=2)
    await gateway.event("r", "refused", attempt=2)
    assert bench.worker._attempts.find(AttemptKey("r", 2)) is not None


async def test_who_cancels_and_asks_hears_that_the_worker_lives(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2])
    await gateway.event("r", "tokens")
    for request_id in ("r", "unknown"):
        gateway.cancel(request_id, wants_word=True)
        assert (await gateway.event(request_id, "cancelled")).has_begun == (request_id == "r")
    await bench.until_free()


async def test_a_cancel_from_another_gateway_is_ignored(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway, other = bench.gateway(), bench.gateway()
    gateway.prefill("r", [1, 2])
    await gateway.event("r", "tokens")
    other.cancel("r", wants_word=True)
    assert not (await other.event("r", "cancelled")).has_begun
    other.prefill("s", [1])
    await other.event("s", "tokens")
    next(iter(bench.links.transfers.values())).may_commit.set()
    await gateway.event("r", "handed_off")


async def test_the_next_prompt_reserves_while_the_first_is_computed(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=8)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("a", [1] * 8)
    gateway.prefill("b", [2] * 8)
    gateway.prefill("c", [3] * 8)
    await bench.until(lambda: len(bench.links.transfers) == 2)
    await settle()
    assert [t.transfer_id.request_id for t in bench.links.transfers.values()] == ["a", "b"]
    bench.runner.gate.set()
    await gateway.event("c", "handed_off")
    await bench.until_free(num_cached=6)


async def test_draining_finishes_what_it_has_and_refuses_the_rest(make_bench: Make) -> None:
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2])
    await gateway.event("r", "tokens")
    gateway.send(worker_pb2.PrefillCommand(drain=worker_pb2.DrainWorker()))
    await asyncio.wait_for(bench.worker.drain_requested.wait(), HANG_LIMIT_S)
    bench.worker.begin_drain()
    gateway.prefill("late", [1])
    assert (await gateway.event("late", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    idle = asyncio.create_task(bench.worker.wait_idle())
    await settle()
    assert not idle.done()
    next(iter(bench.links.transfers.values())).may_commit.set()
    await asyncio.wait_for(idle, HANG_LIMIT_S)
    await gateway.event("r", "handed_off")
    await bench.until_free(num_cached=1)


async def test_a_broken_engine_answers_everything_and_ends_the_worker(make_bench: Make) -> None:
    bench = make_bench()
    bench.runner.error = RuntimeError("the device is gone")
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    failed = await gateway.event("r", "failed")
    assert (failed.code, failed.message) == (worker_pb2.ERROR_CODE_INTERNAL, "internal error")
    with pytest.raises(RuntimeError, match="device"):
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)
    gateway.prefill("s", [1])
    assert (await gateway.event("s", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE


async def test_wrong_books_of_an_idle_engine_end_the_worker(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await gateway.event("r", "handed_off")
    bench.allocator._num_in_state[0] -= 1
    with pytest.raises(InvariantViolated, match="page allocator"):
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)


async def test_logprobs_travel_only_when_asked_for(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.engine.steps.step import SampledToken, StepResult

    bench = make_bench()
    token = SampledToken(7, -0.25, ((7, -0.25), (3, -2.0)))
    monkeypatch.setattr(bench.runner, "run", lambda plan: StepResult([token]))
    gateway = bench.gateway()
    gateway.prefill("r", [1], logprobs=2)
    tokens = await gateway.event("r", "tokens")
    assert [(entry.token_id, entry.logprob) for entry in tokens.logprobs[0].top] == [(7, -0.25), (3, -2.0)]
    assert tokens.logprobs[0].logprob == -0.25


async def test_metrics_follow_the_load(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await gateway.event("r", "handed_off")
    await bench.until_free(num_cached=5)
    value = bench.metrics.registry.get_sample_value
    assert value("tandem_computed_tokens_total", {"worker": "prefill-0"}) == 20
    assert value("tandem_attempts_total", {"worker": "prefill-0", "outcome": "handed_off"}) == 1
    assert value("tandem_transferred_bytes_total", {"worker": "prefill-0"}) == 5 * 64
    assert value("tandem_prefix_queried_tokens_total", {"worker": "prefill-0"}) == 20
    num_steps = value("tandem_step_seconds_count", {"worker": "prefill-0"})
    assert value("tandem_step_sequences_sum", {"worker": "prefill-0"}) == num_steps > 0, "one prompt at a time"
    assert value("tandem_step_tokens_sum", {"worker": "prefill-0"}) == 20
    assert value("tandem_transfer_seconds_count", {"worker": "prefill-0"}) == 1
    assert value("tandem_transfer_exposed_seconds_count", {"worker": "prefill-0"}) == 1
    assert 0 < value("tandem_transfer_seconds_sum", {"worker": "prefill-0"}) < 60


async def test_chunks_and_the_sending_are_spans_of_the_attempt(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench(chunk_tokens=8)
    gateway = bench.gateway()
    for name, traceparent in (("untraced", ""), ("not-sampled", f"00-{'ab' * 16}-{'cd' * 8}-00")):
        gateway.prefill(name, [1] * 3, traceparent=traceparent)
        await gateway.event(name, "handed_off")
    gateway.prefill("r", [1] * 20, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    await gateway.event("r", "handed_off")
    assert [span.name for span in spans.spans] == ["prefill.chunk"] * 3 + ["kv_transfer.send"]
    assert {span.context.trace_id for span in spans.spans} == {int("ab" * 16, 16)}
    assert {span.parent_id for span in spans.spans} == {int("cd" * 8, 16)}, "the gateway's span of this attempt"
    *chunks, sending = spans.spans
    assert [chunk.attributes["tandem.tokens"] for chunk in chunks] == [8, 8, 4]
    assert [chunk.attributes["tandem.start"] for chunk in chunks] == [0, 8, 16]
    assert chunks[0].end_unix_ns <= sending.start_unix_ns <= sending.end_unix_ns
    assert chunks[-1].end_unix_ns <= sending.end_unix_ns
    said = sending.attributes
    assert (said["tandem.kv.pages"], said["tandem.kv.bytes"]) == (5, 5 * 64)
    # The rate of the link, not of the span, most of which is computation.
    assert said["tandem.kv.gb_per_s"] == pytest.approx(CARRIED.num_bytes / CARRIED.time_s / 1e9)


@pytest.mark.parametrize("error", [TransferFailed("the channel broke"), None])
async def test_a_sending_that_breaks_or_is_cancelled_is_a_span_all_the_same(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch, error: TransferFailed | None
) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench()
    bench.links.holds_commits = True
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    await bench.until(lambda: any(transfer.sealed for transfer in bench.links.transfers.values()))
    if error is None:
        gateway.cancel("r")
    else:
        (transfer,) = bench.links.transfers.values()
        transfer.error = error
        transfer.may_commit.set()
    await bench.until(lambda: bool(spans.named("kv_transfer.send")))
    sending = spans.one("kv_transfer.send")
    assert sending.error_type == ("" if error is None else "TransferFailed")
    assert sending.attributes.get("tandem.is_cancelled", False) is (error is None)


async def test_an_engine_that_hangs_fails_everything_and_ends_the_worker(make_bench: Make) -> None:
    bench = make_bench(step_timeout_s=1.0)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await gateway.event("r", "prefill_started")
    await bench.until(lambda: bench.worker._thread.current_run is not None)
    for _ in range(3):
        assert not bench.worker.failed.done()
        bench.worker.check_engine(0.5)
    bench.worker.check_engine(0.5)
    with pytest.raises(InvariantViolated, match="did not end"):
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_INTERNAL
    gateway.prefill("s", [1])
    assert (await gateway.event("s", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    await asyncio.wait_for(bench.worker.close(), HANG_LIMIT_S)


async def test_what_is_left_at_the_end_of_a_drain_is_told(make_bench: Make) -> None:
    bench = make_bench()
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 20)
    await gateway.event("r", "prefill_started")
    bench.worker.begin_drain()
    closing = asyncio.create_task(bench.worker.close())
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    bench.runner.gate.set()
    await asyncio.wait_for(closing, HANG_LIMIT_S)
    assert not len(bench.worker._attempts)
    assert gateway.kinds("r").count("failed") == 1


async def test_gateways_hear_how_fast_it_is(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.prefill("r", [1] * 7)
    await gateway.event("r", "handed_off")
    await bench.until_free()
    load = bench.worker.load().to_message(is_draining=False)
    assert not load.HasField("prefill_speed"), "one prompt says too little"
    assert not load.HasField("decode_speed")
    assert not load.HasField("link_speed")
    bench.links.meters.to("decode-0").opinion.observe(10**6, 0.5, 0.0)
    load = bench.worker.load().to_message(is_draining=False)
    assert load.link_speed.latency_s + 10**6 / load.link_speed.bytes_per_s == pytest.approx(0.5, rel=0.01)
    for number in range(MIN_STEPS):
        gateway.prefill(f"t{number}", [3 + number] * 7)
        await gateway.event(f"t{number}", "handed_off")
    assert bench.worker.load().to_message(is_draining=False).HasField("prefill_speed")


async def test_gateways_hear_what_the_gpu_says(make_bench: Make) -> None:
    facts = worker_pb2.GpuFacts(temperature_c=61)
    bench = make_bench(gpu=lambda: facts)
    gateway = bench.gateway()
    gateway.prefill("r", [1, 2, 3])
    await gateway.event("r", "handed_off")
    assert gateway.gpus == [facts]
