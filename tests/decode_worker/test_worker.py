import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from decode_worker.payoff import PLAIN_STEPS
from decode_worker.speculation import Speculation, Speculator
from kv_transfer.protocol.messages import TransferId
from protos import inference_pb2, worker_pb2
from services.engine.steps.step import SampledToken, SampledTokens, StepItem
from services.runtime.clock import ManualClock
from services.runtime.errors import (
    InvariantViolated,
    TandemError,
    TransferFailed,
)
from services.runtime.telemetry import DECODE_SPAN
from services.scheduling.speedometer import MIN_STEPS
from tests.kept_spans import KeptSpans
from tests.waiting import HANG_LIMIT_S, settle
from worker.sessions import SessionLimits

Make = Callable[..., Any]


def answer(prompt: list[int], num_tokens: int) -> dict[int, int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sum(tokens) % 1000)
    return dict(enumerate(tokens[len(prompt) :]))


async def test_gateways_hear_at_once_that_pages_came_free(make_bench: Make) -> None:
    bench = make_bench()
    bench.worker.sessions._limits = SessionLimits(beat_s=60)  # so that it is not the regular beat that brings it
    gateway = bench.gateway()
    bench.runner.pause_at_step = 3
    gateway.admit("r", [1, 2, 3], max_tokens=9, local=True)
    await gateway.event("r", "tokens")
    assert gateway.messages[-1].load.pages.used > 0
    await bench.until(lambda: not bench.runner.gate.is_set())
    gateway.cancel("r")
    bench.runner.gate.set()
    await bench.until_free()
    await bench.until(lambda: gateway.messages[-1].load.pages.used == 0 and not gateway.messages[-1].load.running)


async def test_a_handed_over_request_is_decoded_from_index_one(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3, 4, 5], max_tokens=6)
    await gateway.event("r", "admitted")
    assert bench.worker.load().promised_pages == 2, "the prompt and half of the answer are counted"
    assert bench.allocator.num_free_pages == 16, "and nothing is allocated yet"
    reserved = await bench.worker.arrivals.reserve(TransferId("r", 1), 5)
    assert (len(reserved.page_ids), reserved.num_cached_tokens) == (2, 0)
    assert bench.allocator.num_reserved_pages == 2
    await bench.worker.arrivals.commit(TransferId("r", 1), first_token_id=15, sampling_position=6)
    finished = await gateway.event("r", "finished")
    assert finished.reason == inference_pb2.FINISH_REASON_LENGTH
    expected = answer([1, 2, 3, 4, 5], 6)
    del expected[0]
    assert gateway.tokens("r") == expected
    assert gateway.kinds("r") == ["admitted", "decode_started", *["tokens"] * 5, "finished"]
    await bench.until_free()


async def test_a_local_request_is_decoded_from_index_zero(make_bench: Make) -> None:
    bench = make_bench(chunk_tokens=2)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3, 4, 5], max_tokens=3, local=True)
    await gateway.event("r", "finished")
    assert gateway.tokens("r") == answer([1, 2, 3, 4, 5], 3)
    assert gateway.kinds("r") == [
        "admitted",
        "prefill_started",
        "tokens",
        "decode_started",
        "tokens",
        "tokens",
        "finished",
    ]
    await bench.until_free()


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_resumed_request_goes_on_where_it_was(make_bench: Make, is_local: bool) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    full = answer([1, 2, 3], 8)
    emitted = list(full.values())[:5]
    gateway.admit("r", [1, 2, 3], max_tokens=8, emitted_token_ids=emitted, attempt=2, local=is_local)
    await gateway.event("r", "admitted", attempt=2)
    if not is_local:
        await bench.hand_over("r", [1, 2, 3], attempt=2, first=emitted[0])
    await gateway.event("r", "finished", attempt=2)
    assert gateway.tokens("r", attempt=2) == {index: full[index] for index in (5, 6, 7)}


class SteadySpeculator(Speculator):
    """On a machine whose steps all take a millisecond, so that it proposes whenever it has something."""

    def __init__(self) -> None:
        self._manual = ManualClock()
        super().__init__(clock=self._manual)

    def propose(self, candidates: Any, *, speed: Any) -> Any:
        return super().propose(candidates, speed=None)

    def end_step(self, num_accepted: int, *, is_comparable: bool) -> None:
        self._manual.advance(1e-3)
        super().end_step(num_accepted, is_comparable=is_comparable)


async def test_tokens_of_one_step_come_in_one_event(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts 0 1 2 3 0 1 2 3, and chooses behind each proposal what it would have chosen there."""

    def outcome(item: StepItem) -> SampledToken | SampledTokens | None:
        if not item.is_sampled:
            return None
        last, tokens = item.sequence.token_ids[-1], []
        for proposal in (*item.proposed, None):
            last = (last + 1) % 4
            tokens.append(SampledToken(last))
            if last != proposal:
                break
        return SampledTokens(tuple(tokens)) if item.proposed else tokens[0]

    speculator = SteadySpeculator()
    for _ in range(PLAIN_STEPS):
        speculator.is_open(1)
        speculator.end_step(0, is_comparable=True)
    bench = make_bench(features=[Speculation(speculator)])
    monkeypatch.setattr(bench.runner, "_outcome", outcome)
    gateway = bench.gateway()
    gateway.admit("r", [0, 1, 2, 3, 0, 1], max_tokens=30, local=True)
    finished = await gateway.event("r", "finished")
    assert finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert gateway.tokens("r") == {index: (index + 2) % 4 for index in range(30)}
    num_events = gateway.kinds("r").count("tokens")
    assert num_events == bench.runner.num_steps < 10
    labels = {"worker": "decode-0", "source": "ngram"}
    proposed, accepted = (
        bench.metrics.registry.get_sample_value(f"tandem_speculative_{what}_tokens_total", labels)
        for what in ("proposed", "accepted")
    )
    assert proposed == accepted == 30 - num_events
    await bench.until_free()


async def test_a_stop_token_is_the_last_token(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1, 2], max_tokens=9, local=True, eos_token_ids=[12])
    finished = await gateway.event("r", "finished")
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert gateway.tokens("r") == {0: 3, 1: 6, 2: 12}


async def test_events_of_a_step_travel_together(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.gate.clear()
    gateway.admit("a", [1, 2], max_tokens=3, local=True, knows_handles=False)
    gateway.admit("b", [3, 4], max_tokens=3, local=True, knows_handles=False)
    await gateway.event("b", "admitted")
    bench.runner.gate.set()
    await gateway.event("a", "finished")
    await gateway.event("b", "finished")
    with_tokens = [{e.id.request_id for e in m.events if e.HasField("tokens")} for m in gateway.messages]
    assert {"a", "b"} in with_tokens, "no message held tokens of both requests"
    assert all(m.HasField("load") and m.worker_incarnation == "a" * 32 for m in gateway.messages)


async def test_each_gateway_hears_of_its_own_tokens_in_one_event_as_far_as_there_is_nothing_else_to_say(
    make_bench: Make,
) -> None:
    bench = make_bench()
    one, other = bench.gateway(), bench.gateway()
    bench.runner.gate.clear()
    one.admit("a", [1, 2], max_tokens=3, local=True)
    one.admit("b", [3, 4], max_tokens=3, local=True)
    one.admit("c", [5, 6], max_tokens=3, local=True, knows_handles=False)
    other.admit("d", [7, 8], max_tokens=3, local=True)
    for gateway, name in ((one, "a"), (one, "b"), (one, "c"), (other, "d")):
        await gateway.event(name, "admitted")
    bench.runner.gate.set()
    for gateway, name in ((one, "a"), (one, "b"), (one, "c"), (other, "d")):
        await gateway.event(name, "finished")
    for gateway, most in ((one, [1, 2]), (other, [1])):
        steps = [event.step_tokens for message in gateway.messages for event in message.events]
        handles = [list(step.handles) for step in steps if step.handles]
        assert most in handles, "no event held the tokens of all requests that may be told together"
        assert all(set(some) <= set(most) for some in handles)
    told_alone = [e for m in one.messages for e in m.events if e.HasField("tokens") and e.id.request_id != "c"]
    assert [list(event.tokens.token_ids) for event in told_alone if event.tokens.first_index < 2] == []
    assert one.tokens("a") == {0: 3, 1: 6, 2: 12}
    assert one.tokens("c") == {0: 11, 1: 22, 2: 44}
    assert other.tokens("d") == {0: 15, 1: 30, 2: 60}
    await bench.until_free()


async def test_what_does_not_fit_now_is_refused_at_once_and_what_never_fits_for_good(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("a", [1] * 40, max_tokens=10)
    await gateway.event("a", "admitted")
    gateway.admit("b", [1] * 10, max_tokens=10)
    refused = await gateway.event("b", "refused")
    assert refused.code == worker_pb2.ERROR_CODE_OVERLOADED
    assert refused.retry_after_ms > 0
    gateway.admit("c", [1] * 60, max_tokens=10)
    assert (await gateway.event("c", "refused")).code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    gateway.cancel("a")
    gateway.admit("b", [1] * 10, max_tokens=10, attempt=2)
    await gateway.event("b", "admitted", attempt=2)


async def test_the_number_of_requests_is_bounded_too(make_bench: Make) -> None:
    bench = make_bench(max_admitted=2)
    gateway = bench.gateway()
    for request_id in "abc":
        gateway.admit(request_id, [1], max_tokens=1)
    assert (await gateway.event("c", "refused")).code == worker_pb2.ERROR_CODE_OVERLOADED
    assert gateway.kinds("a") == gateway.kinds("b") == ["admitted"]


@pytest.mark.parametrize("how", ["cancel", "session", "drop", "newer", "deadline"])
@pytest.mark.parametrize("phase", ["admitted", "reserving", "receiving", "waiting", "decoding", "local"])
async def test_an_end_in_any_phase_leaves_nothing(make_bench: Make, phase: str, how: str) -> None:
    bench = make_bench(max_batch=1)
    bench.receiver.holds_pages = True
    gateway, other = bench.gateway(), bench.gateway()
    transfer_id = TransferId("r", 1)
    reserving = None
    if phase in ("waiting", "reserving"):
        bench.runner.gate.clear()
        other.admit("first", [1], max_tokens=8, local=True)
        await other.event("first", "admitted")
        await bench.until(lambda: bench.runner.num_steps > 0)
    deadline_ms = 80 if how == "deadline" else 30_000
    if phase in ("decoding", "local"):
        bench.runner.gate.clear()
    gateway.admit("r", [1] * 6, max_tokens=8, local=phase == "local", deadline_ms=deadline_ms)
    await gateway.event("r", "admitted")
    if phase == "reserving":
        reserving = asyncio.create_task(bench.worker.arrivals.reserve(transfer_id, 6))
        await settle()
        assert not reserving.done()
    if phase == "receiving":
        await bench.worker.arrivals.reserve(transfer_id, 6)
    if phase == "decoding":
        bench.runner.gate.set()
        await bench.worker.arrivals.reserve(transfer_id, 6)
        bench.runner.gate.clear()
        await bench.worker.arrivals.commit(transfer_id, first_token_id=6, sampling_position=7)
        await settle()
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
            failed = await gateway.event("r", "failed")
            assert failed.code == worker_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    await bench.until(lambda: not any(a.spec.key == ("r", 1) for a in bench.worker._attempts))
    if phase in ("receiving", "reserving"):
        assert transfer_id in bench.receiver.aborted
        bench.runner.gate.set()
        if reserving is not None:
            await reserving
        await settle()
        assert bench.allocator.num_reserved_pages == 2, "the transfer may still write into them"
        with pytest.raises(TandemError):
            await bench.worker.arrivals.commit(transfer_id, first_token_id=6, sampling_position=7)
        bench.receiver.let_go(transfer_id)
    bench.runner.gate.set()
    if how == "newer":
        await gateway.event("r", "finished", attempt=2)
    await bench.until_free()
    assert not {"refused", "finished"} & set(gateway.kinds("r"))
    assert ("failed" in gateway.kinds("r")) == (how == "deadline")
    assert gateway.kinds("r").count("failed") <= 1


async def test_a_broken_sequence_fails_alone(make_bench: Make) -> None:
    bench = make_bench()
    bench.runner.broken.add("bad")
    gateway = bench.gateway()
    gateway.admit("bad", [1, 2], local=True)
    gateway.admit("good", [1, 2], local=True)
    failed = await gateway.event("bad", "failed")
    assert (failed.code, failed.message) == (worker_pb2.ERROR_CODE_INTERNAL, "internal error")
    await gateway.event("good", "finished")
    assert gateway.tokens("good") == answer([1, 2], 4)
    await bench.until_free()


async def test_a_broken_engine_answers_everything_and_ends_the_worker(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("waits", [1])
    await gateway.event("waits", "admitted")
    bench.runner.error = RuntimeError("the device is gone")
    gateway.admit("r", [1] * 6, local=True)
    for request_id in ("r", "waits"):
        assert (await gateway.event(request_id, "failed")).code == worker_pb2.ERROR_CODE_INTERNAL
    with pytest.raises(RuntimeError, match="device"):
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)
    gateway.admit("s", [1])
    assert (await gateway.event("s", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE


async def test_wrong_books_of_an_idle_engine_end_the_worker(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6, local=True)
    await gateway.event("r", "finished")
    bench.allocator._num_in_state[0] -= 1
    with pytest.raises(InvariantViolated, match="page allocator"):
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)


async def test_draining_finishes_what_was_admitted_and_refuses_the_rest(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6)
    await gateway.event("r", "admitted")
    gateway.send(worker_pb2.DecodeCommand(drain=worker_pb2.DrainWorker()))
    await asyncio.wait_for(bench.worker.drain_requested.wait(), HANG_LIMIT_S)
    bench.worker.begin_drain()
    gateway.admit("late", [1])
    assert (await gateway.event("late", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    idle = asyncio.create_task(bench.worker.wait_idle())
    await bench.hand_over("r", [1] * 6)
    await gateway.event("r", "finished")
    await asyncio.wait_for(idle, HANG_LIMIT_S)
    await bench.until_free()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [1000]},
        {"prompt": [1], "emitted_token_ids": [5000]},
        {"prompt": [1], "emitted_token_ids": [1, 2, 3, 4]},
        {"prompt": [1], "attempt": 0},
        {"prompt": [1], "max_tokens": 0},
        {"prompt": [1], "max_tokens": 2**31},
    ],
)
async def test_nonsense_is_refused_and_the_session_goes_on(make_bench: Make, fields: dict[str, Any]) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    attempt = fields.get("attempt", 1)
    gateway.admit("bad", local=True, **fields)
    refused = await gateway.event("bad", "refused", attempt=attempt)
    assert refused.code == worker_pb2.ERROR_CODE_INVALID_REQUEST
    gateway.admit("good", [1, 2], local=True)
    await gateway.event("good", "finished")
    await bench.until_free()


@pytest.mark.parametrize(
    ("phase", "has_begun"), [("unknown", False), ("admitted", False), ("receiving", True), ("local", True)]
)
async def test_who_cancels_and_asks_hears_whether_the_prompt_can_have_been_computed(
    make_bench: Make, phase: str, has_begun: bool
) -> None:
    """The prefill worker that knew may have died of it: it computes nothing before pages are reserved here."""
    bench = make_bench()
    gateway = bench.gateway()
    if phase == "local":
        bench.runner.gate.clear()
    if phase != "unknown":
        gateway.admit("r", [1] * 6, max_tokens=8, local=phase == "local")
        await gateway.event("r", "admitted")
    if phase == "receiving":
        await bench.worker.arrivals.reserve(TransferId("r", 1), 6)
    gateway.cancel("r", wants_word=True)
    assert (await gateway.event("r", "cancelled")).has_begun == has_begun
    bench.runner.gate.set()
    await bench.until_free()


async def test_a_cancel_from_another_gateway_is_ignored(make_bench: Make) -> None:
    bench = make_bench()
    gateway, other = bench.gateway(), bench.gateway()
    gateway.admit("r", [1, 2])
    await gateway.event("r", "admitted")
    other.cancel("r", wants_word=True)
    assert not (await other.event("r", "cancelled")).has_begun
    other.admit("s", [1], local=True)
    await other.event("s", "finished")
    await bench.hand_over("r", [1, 2])
    await gateway.event("r", "finished")


async def test_metrics_follow_the_load(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6, max_tokens=3, local=True)
    await gateway.event("r", "finished")
    await bench.until_free()
    value = bench.metrics.registry.get_sample_value
    assert value("tandem_computed_tokens_total", {"worker": "decode-0"}) == 8
    assert value("tandem_attempts_total", {"worker": "decode-0", "outcome": "finished"}) == 1
    assert value("tandem_prefix_queried_tokens_total", {"worker": "decode-0"}) == 6
    num_steps = value("tandem_step_seconds_count", {"worker": "decode-0"})
    for name in ("tandem_step_sequences", "tandem_step_tokens"):
        assert value(f"{name}_count", {"worker": "decode-0"}) == num_steps == bench.runner.num_steps
    assert value("tandem_step_sequences_sum", {"worker": "decode-0"}) == num_steps, "one sequence at a time"
    assert value("tandem_step_tokens_sum", {"worker": "decode-0"}) == 8


async def test_chunks_and_steps_are_spans_of_the_attempt(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench(chunk_tokens=4)
    gateway = bench.gateway()
    for name, traceparent in (("untraced", ""), ("not-sampled", f"00-{'ab' * 16}-{'cd' * 8}-00")):
        gateway.admit(name, [1] * 3, local=True, traceparent=traceparent)
        await gateway.event(name, "finished")
    assert not spans.spans
    gateway.admit("r", [1] * 20, local=True, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    await gateway.event("r", "finished")
    prefill_id = int("cd" * 8, 16)
    assert [span.name for span in spans.spans] == ["prefill.chunk"] * 5 + ["decode.steps"]
    assert {span.context.trace_id for span in spans.spans} == {int("ab" * 16, 16)}
    *chunks, steps = spans.spans
    assert {chunk.parent_id for chunk in chunks} == {prefill_id}
    assert steps.parent_id == prefill_id + DECODE_SPAN
    assert chunks[-1].end_unix_ns <= steps.start_unix_ns <= steps.end_unix_ns
    assert steps.attributes["tandem.tokens"] == 4
    assert steps.attributes["tandem.steps"] == 3, "the first token came with the prompt's last chunk"
    assert (steps.attributes["tandem.batch_mean"], steps.attributes["tandem.batch_max"]) == (1.0, 1)


async def test_a_broken_decode_is_a_failed_span(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = KeptSpans.install(monkeypatch)
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.pause_at_step = 6
    gateway.admit("r", [1] * 3, max_tokens=20, local=True, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    gateway.admit("gone", [1] * 3, max_tokens=20, local=True, traceparent=f"00-{'ef' * 16}-{'cd' * 8}-01")
    await gateway.event("r", "decode_started")
    await gateway.event("gone", "decode_started")
    await bench.until(lambda: not bench.runner.gate.is_set())
    bench.runner.broken.add("r")
    gateway.cancel("gone")
    bench.runner.gate.set()
    await gateway.event("r", "failed")
    await bench.until_free()
    ended = {span.context.trace_id: span for span in spans.named("decode.steps")}
    assert ended[int("ab" * 16, 16)].error_type == "NonFiniteLogits"
    assert ended[int("ef" * 16, 16)].error_type == ""


async def test_an_engine_that_hangs_fails_everything_and_ends_the_worker(make_bench: Make) -> None:
    bench = make_bench(step_timeout_s=1.0)
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6, local=True)
    await gateway.event("r", "admitted")
    await bench.until(lambda: bench.worker._thread.current_run is not None)
    for _ in range(3):
        assert not bench.worker.failed.done()
        bench.worker.check_engine(0.5)
    bench.worker.check_engine(0.5)
    with pytest.raises(InvariantViolated, match="did not end"):
        await asyncio.wait_for(asyncio.shield(bench.worker.failed), HANG_LIMIT_S)
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_INTERNAL
    gateway.admit("s", [1])
    assert (await gateway.event("s", "refused")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    await asyncio.wait_for(bench.worker.close(), HANG_LIMIT_S)


async def test_what_is_left_at_the_end_of_a_drain_is_told(make_bench: Make) -> None:
    bench = make_bench()
    bench.runner.gate.clear()
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6, local=True)
    await gateway.event("r", "admitted")
    bench.worker.begin_drain()
    closing = asyncio.create_task(bench.worker.close())
    assert (await gateway.event("r", "failed")).code == worker_pb2.ERROR_CODE_WORKER_UNAVAILABLE
    bench.runner.gate.set()
    await asyncio.wait_for(closing, HANG_LIMIT_S)
    assert not len(bench.worker._attempts)
    assert gateway.kinds("r").count("failed") == 1


def turn(prompt: list[int], num_tokens: int) -> list[int]:
    """The conversation after an answer to `prompt`."""
    return [*prompt, *answer(prompt, num_tokens).values()]


async def test_the_next_turn_finds_the_pages_that_the_last_answer_left(make_bench: Make) -> None:
    bench = make_bench(exact=True)
    gateway = bench.gateway()
    gateway.admit("r", [1] * 6, max_tokens=7)
    await gateway.event("r", "admitted")
    await bench.hand_over("r", [1] * 6)
    await gateway.event("r", "finished")
    await bench.until_free(num_cached=3)
    said = [*turn([1] * 6, 7), 5]
    gateway.admit("s", said)
    await gateway.event("s", "admitted")
    reserved = await bench.worker.arrivals.reserve(TransferId("s", 1), len(said))
    assert (len(reserved.page_ids), reserved.num_cached_tokens) == (4, 12)
    await bench.worker.arrivals.commit(
        TransferId("s", 1), first_token_id=sum(said) % 1000, sampling_position=len(said) + 1
    )
    await gateway.event("s", "finished")
    assert gateway.tokens("s") == {k: v for k, v in answer(said, 4).items() if k}
    gateway.admit("t", said, local=True)
    assert (await gateway.event("t", "prefill_started")).num_cached_tokens == 12
    await gateway.event("t", "finished")
    assert gateway.tokens("t") == answer(said, 4)
    await bench.until_free()
    value = bench.metrics.registry.get_sample_value
    assert value("tandem_cached_tokens_total", {"worker": "decode-0"}) == 12
    assert value("tandem_computed_tokens_total", {"worker": "decode-0"}) == 6 + 3 + 2 + 3


@pytest.mark.parametrize(("num_emitted", "num_cached"), [(0, 4), (3, 4), (4, 5), (7, 5)])
async def test_a_replay_says_how_much_of_the_prompt_was_here(
    make_bench: Make, num_emitted: int, num_cached: int
) -> None:
    bench = make_bench(exact=True)
    gateway = bench.gateway()
    gateway.admit("r", [1] * 5, max_tokens=8, local=True)
    await gateway.event("r", "finished")
    emitted = list(answer([1] * 5, 8).values())
    gateway.admit("r", [1] * 5, max_tokens=8, local=True, attempt=2, emitted_token_ids=emitted[:num_emitted])
    assert (await gateway.event("r", "prefill_started", attempt=2)).num_cached_tokens == num_cached
    await gateway.event("r", "finished", attempt=2)
    assert gateway.kinds("r", attempt=2).count("prefill_started") == 1
    assert gateway.tokens("r", attempt=2) == dict(list(enumerate(emitted))[num_emitted:])


async def test_tenants_share_no_page(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    for request_id, salt in (("a", "one"), ("b", "two"), ("c", ""), ("d", "two")):
        gateway.admit(request_id, [1] * 9, local=True, cache_salt=salt)
        await gateway.event(request_id, "finished")
    cached = [(await gateway.event(request_id, "prefill_started")).num_cached_tokens for request_id in "abcd"]
    assert cached == [0, 0, 0, 8]
    gateway.admit("e", [1] * 9, cache_salt="three")
    gateway.admit("f", [1] * 9, cache_salt="two")
    await gateway.event("f", "admitted")
    assert (await bench.worker.arrivals.reserve(TransferId("e", 1), 9)).num_cached_tokens == 0
    assert (await bench.worker.arrivals.reserve(TransferId("f", 1), 9)).num_cached_tokens == 8
    for request_id in "ef":
        await bench.worker.arrivals.release(TransferId(request_id, 1), TransferFailed("broken"))
    await bench.until_free()


async def test_who_asks_hears_which_pages_come_and_go(make_bench: Make) -> None:
    heard: list[tuple[int, int]] = []
    bench = make_bench(on_pages_changed=lambda added, evicted: heard.append((len(added), len(evicted))))
    gateway = bench.gateway()
    for request_id, token in (("r", 1), ("s", 2)):
        gateway.admit(request_id, [token] * 40, local=True, max_tokens=1)
        await gateway.event(request_id, "finished")
    await bench.until_free()
    assert [sum(numbers) for numbers in zip(*heard, strict=True)] == [20, 4]
    assert (0, 0) not in heard


async def test_gateways_hear_how_fast_it_is_and_how_much_it_looks_back_on(make_bench: Make) -> None:
    bench = make_bench()
    gateway = bench.gateway()
    bench.runner.pause_at_step = 4
    gateway.admit("r", [1] * 7, max_tokens=9, local=True)
    await bench.until(lambda: bench.worker.load().context_tokens == 9)
    load = bench.worker.load().to_message(is_draining=False)
    assert not load.HasField("prefill_speed"), "one prompt says too little"
    assert load.HasField("decode_speed")
    assert not load.HasField("link_speed")
    bench.runner.gate.set()
    await gateway.event("r", "finished")
    await bench.until_free()
    assert bench.worker.load().context_tokens == 0
    for number in range(MIN_STEPS):
        gateway.admit(f"s{number}", [2 + number] * 7, local=True)
        await gateway.event(f"s{number}", "finished")
    assert bench.worker.load().to_message(is_draining=False).HasField("prefill_speed")


async def test_gateways_hear_what_the_gpu_says(make_bench: Make) -> None:
    facts = worker_pb2.GpuFacts(temperature_c=61)
    bench = make_bench(gpu=lambda: facts)
    gateway = bench.gateway()
    gateway.admit("r", [1, 2, 3], local=True)
    await gateway.event("r", "finished")
    assert [message.gpu for message in gateway.messages if message.HasField("gpu")] == [facts]
    assert len(gateway.messages) > 1
