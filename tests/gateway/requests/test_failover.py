"""Which failures of an attempt are tried again, how often, and what they are called."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import CrowdedOut
from gateway.requests.dispatch import Dispatcher
from gateway.requests.failover import MAX_CROWDINGS, MAX_FAILURES, MAX_PATHS, TRY_AGAIN, Failover, reason_of
from gateway.requests.fault import Fault
from gateway.requests.policies import Policies
from gateway.topology.events import Unfit
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    Quarantined,
    TandemError,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)
from services.scheduling.routing.router import Router
from tests.examples import examples


@pytest.mark.parametrize(
    ("error_type", "reason"),
    [
        (WorkerLost, "worker_lost"),
        (WorkerUnavailable, "worker_unavailable"),
        (Unfit, "worker_unavailable"),
        (TransferFailed, "transfer_failed"),
        (LayoutMismatch, "layout_mismatch"),
        (InternalError, "internal_error"),
    ],
)
def test_each_failure_that_is_tried_again_has_one_of_a_few_reasons(error_type: type, reason: str) -> None:
    assert issubclass(error_type, TRY_AGAIN)
    assert reason_of(error_type("words")) == reason


def test_every_kind_that_is_tried_again_has_a_reason() -> None:
    assert len({reason_of(kind("words")) for kind in TRY_AGAIN}) == len(TRY_AGAIN)


@pytest.mark.parametrize("error_type", [DeadlineExceeded, InvalidRequest, Overloaded, Quarantined])
def test_what_is_the_requests_own_or_has_no_room_is_not_tried_again(error_type: type) -> None:
    assert not issubclass(error_type, TRY_AGAIN)


PAIRS = [(f"p{prefill}", f"d{decode}") for prefill in range(2) for decode in range(2)]


class Request:
    """A request whose attempts end as a test decides, and the failover that follows. No wait takes time."""

    def __init__(self, max_attempts: int = 3) -> None:
        sampling = SimpleNamespace(max_tokens=100, prompt_logprobs=None)
        facts, totals = SimpleNamespace(sharers=""), SimpleNamespace(placed=set(), waiting_since_s=0.0)
        spec = SimpleNamespace(
            request_id="r", sampling=sampling, emitted_token_ids=(), prompt_token_ids=(1, 2), layout="", facts=facts,
            totals=totals, choice=0,
        )  # fmt: skip
        clock, nothing = SimpleNamespace(monotonic=lambda: 0.0), lambda *_, **__: None
        self.answer = RunningAnswer(
            cast(Any, spec), cast(Any, None), cast(Any, clock), queue_entry=cast(Any, None), lane=cast(Any, None)
        )
        self.num_ended = 0
        self.rests: list[float] = []
        self.answer.mailbox = cast(Any, SimpleNamespace(rest=self._rest))
        dispatcher = SimpleNamespace(on_trial=set(), note_failure=nothing)
        quarantine = SimpleNamespace(
            hear_out=self._pass, judge=self._pass, await_trial=self._pass, counts=lambda strike: False
        )
        metrics = SimpleNamespace(retries=SimpleNamespace(inc=nothing), delayed_retries=SimpleNamespace(inc=nothing))
        self.failover = Failover(
            cast(Any, quarantine), cast(Any, dispatcher),
            policies=Policies(Router(), max_attempts=max_attempts), metrics=cast(Any, metrics), clock=cast(Any, clock),
        )  # fmt: skip
        self.paths: list[tuple[str, str]] = []

    async def _rest(self, seconds: float) -> None:
        self.rests.append(seconds)

    async def _pass(self, *_: Any) -> None: ...

    def pair(self) -> tuple[str, str] | None:
        """The pair of the next attempt, as the dispatcher chooses it; None: one worker does everything."""
        if self.answer.avoids_handoffs:
            return None
        return next((pair for pair in PAIRS if pair not in self.answer.failed_paths), None)

    async def end_all(self, kinds: Iterable[str]) -> None:
        """Ends one attempt after the other. Raises what ends the request."""
        for kind in kinds:
            self.num_ended += 1
            await self.end(kind)

    async def end(self, kind: str) -> None:
        """Ends the next attempt, and returns when another one may follow. Raises what ends the request."""
        pair = self.pair()
        if kind == "token":
            self.answer.tokens.token_ids.append(7)
            kind = "internal"
        if kind == "path" and pair is not None:
            self.paths.append(pair)
        error: TandemError = {"path": TransferFailed("x"), "death": WorkerLost("x")}.get(kind, WorkerUnavailable("x"))
        fault = Fault(error, is_between=kind == "path" and pair is not None)
        prefill, decode = pair or (None, "d0")
        named = [name and SimpleNamespace(peer=SimpleNamespace(incarnation=name)) for name in (prefill, decode)]
        self.answer.attempt = cast(Any, SimpleNamespace(
            prefill=named[0], decode=named[1], fault=fault, is_move=False, prompt_done_at_s=None, close=lambda: None,
        ))  # fmt: skip
        if kind == "crowded":
            await self.failover.after_crowding(self.answer, CrowdedOut("x"))
        else:
            await self.failover.after(self.answer, error)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.sampled_from(["path", "path", "internal", "death", "crowded", "token"]), min_size=200, max_size=200),
)
def test_whatever_fails_a_request_ends_and_uses_no_failed_path_again(max_attempts: int, kinds: list[str]) -> None:
    async def run() -> None:
        request = Request(max_attempts)
        with pytest.raises(TandemError):
            await request.end_all(kinds)
        assert request.num_ended <= MAX_FAILURES * MAX_CROWDINGS
        assert len(request.paths) == len(set(request.paths)), "a path that failed was used again"

    asyncio.run(run())


async def test_failed_paths_do_not_count_against_the_attempts_and_the_last_attempt_uses_none() -> None:
    request = Request(max_attempts=1)
    for _ in range(MAX_PATHS - 1):
        assert request.pair() is not None
        await request.end("path")
    assert request.pair() is None
    with pytest.raises(WorkerUnavailable):
        await request.end("internal")


async def test_a_failed_path_waits_little_for_the_retry_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request()
    request.failover._budget._filled = -1000.0
    await request.end("path")
    assert request.rests == [0.5]
    await request.end("internal")
    assert request.rests[1] == Policies(Router()).failover_wait_s


async def test_an_attempt_without_room_waits_longer_each_time_and_counts_at_last() -> None:
    request = Request(max_attempts=2)
    for _ in range(MAX_CROWDINGS):
        await request.end("crowded")
    assert request.rests == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert request.answer.crowded_at == "d0"
    assert request.answer.is_last_attempt
    with pytest.raises(Overloaded):
        await request.end_all(["crowded"] * MAX_CROWDINGS)


def dispatcher() -> Any:
    """A dispatcher of one pair of workers, of which the decode worker is ejected."""
    found: Any = Dispatcher.__new__(Dispatcher)
    found.watch = SimpleNamespace(last_resort=lambda ids: ids, usable=lambda ids: ids[:1], has_weak_gpus=False)
    found.pairs = SimpleNamespace(has_blocked=False, is_blocked=lambda pair: False)
    session = SimpleNamespace(peer=None)
    found._topology = SimpleNamespace(
        is_uniform=lambda model: True, decode_session=lambda decode_id: session, prefill_ids=lambda model, decode: ["p"]
    )
    return found


async def test_the_limits_of_a_last_attempt_end_with_the_next_token() -> None:
    """An answer that moves, or finds no room, has no failure that would decide anew."""
    request, used = Request(max_attempts=2), dispatcher()
    answer: Any = request.answer
    answer.spec.model = "m"
    views = SimpleNamespace(worker_ids=["a", "b"], only=sorted)

    def limits() -> tuple[Any, bool]:
        p, d = (SimpleNamespace(worker_id=name, incarnation=name) for name in "pd")
        return used._usable(answer, views, None, None), used._fits(answer)(p, d)

    await request.end("internal")
    for _ in range(MAX_PATHS - 1):
        await request.end("path")
    assert limits() == (views, False)
    answer.tokens.token_ids.append(7)
    assert limits() == (["a"], True)
