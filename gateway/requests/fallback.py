"""The answers of one call from the first of its models that takes it: `large -> small`, before the first token.

A chain may begin with an answer that was kept, and end with a shorter one of the model itself.

    not allowed      the model that was asked for, however long that takes
    allowed          the same until it has had no place at its workers for `fallback_after_s`, at once where it has no
                     worker, or until it fails for want of one; then the next model that has a worker and can take the
                     call, checked and tokenized anew; and so on

As soon as a client may have seen something of one answer, all of them stay with that model. Where no other model
can take the call, it waits on as if it had not been allowed, and what it fails with is what the first model said.
Knows neither HTTP nor how a model finds a worker.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.models.answer_text import AnswerText
from gateway.requests.call import AcceptedCall, AnswerSpec
from gateway.requests.delivery import FastPath
from gateway.types import Delta
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import Overloaded, TandemError, TransferFailed, WorkerUnavailable, forget_frames

RETRY_AFTER_S = 2.0
"""What a client is told whose models had no room."""

Stream = AsyncGenerator[Delta, None]

FALLS_BACK = (Overloaded, TransferFailed, WorkerUnavailable)
"""Failures after which another model may answer: its workers can have room, or a working path between them."""


class Runs(Protocol):
    """What generates answers; `Requests` is one."""

    def run(self, spec: AnswerSpec, fast_path: FastPath | None = None) -> Stream:
        """Generates one answer."""
        ...

    def fallback_after_s(self, model: str) -> float:
        """Returns how long a call that may fall back waits for a worker of this model."""
        ...

    def is_served(self, spec: AnswerSpec) -> bool:
        """Returns whether an answer has workers now; a call that may fall back waits for no others."""
        ...

    async def prepare_fallback(self, accepted: AcceptedCall) -> list[AnswerSpec] | None:
        """Returns the call's answers for the next of its models that can take them; None: no such model is left."""
        ...

    def new_text(self, spec: AnswerSpec) -> AnswerText:
        """Returns what turns the answer's tokens into text, from its first token on."""
        ...

    def note_fallback(self, asked: str, answering: str, reason: str) -> None:
        """Counts a call that another model answers."""
        ...


@contextlib.asynccontextmanager
async def begun(
    runs: Runs,
    accepted: AcceptedCall,
    specs: Sequence[AnswerSpec],
    *,
    fast_paths: Sequence[FastPath] = (),
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[list[Stream]]:
    """A stream for each of the specs, which are the call's; leaving the block ends them.

    From then on `accepted` says which model they come from. `fast_paths` has one of each answer, or is empty; nothing
    may be set to take their deltas before the block is entered. Raises what `Requests.run` raises.
    """
    if not accepted.fallbacks:
        yield streams_of(runs, specs, fast_paths)
        return
    asked, first_failure, is_kept = accepted.model, None, False
    while True:
        streams = streams_of(runs, specs, fast_paths)
        if is_kept:
            streams = [_from_its_start(runs, *each) for each in zip(specs, streams, strict=True)]
        starts = [_Start(stream) for stream in streams]
        try:
            refusal = await _refusal(runs, accepted, starts, clock)
            if refusal is None:
                yield [start.stream() for start in starts]
                return
        finally:
            await _end(starts)
        first_failure = first_failure or refusal.failure
        if refusal.instead is None:
            raise first_failure
        specs = refusal.instead
        reason = "overloaded" if isinstance(first_failure, Overloaded) else "unavailable"
        is_kept = bool(specs[0].emitted_token_ids)
        answering, limit = specs[0].model, ""
        if is_kept:
            answering += " (kept)"
        elif answering == asked:
            answering, limit = f"{asked} (shorter)", f"; max_tokens={specs[0].sampling.max_tokens}"
        accepted.fall_back(specs, f"{asked} -> {answering}; reason={reason}{limit}")
        runs.note_fallback(asked, answering, reason)


def streams_of(runs: Runs, specs: Sequence[AnswerSpec], fast_paths: Sequence[FastPath]) -> list[Stream]:
    """Returns a stream for each of the specs of a call that stays with its model."""
    return [runs.run(*each) for each in itertools.zip_longest(specs, fast_paths)]


async def _from_its_start(runs: Runs, spec: AnswerSpec, rest: Stream) -> Stream:
    """Yields an answer whose first tokens are known as if they were new, then the rest of it."""
    async with contextlib.aclosing(rest):
        yield Delta(0, list(spec.emitted_token_ids), runs.new_text(spec).push(spec.emitted_token_ids).text)
        async for delta in rest:
            yield delta


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A model does not answer, why, and the call's answers for another one; None: there is no other."""

    failure: TandemError
    instead: list[AnswerSpec] | None


async def _refusal(runs: Runs, accepted: AcceptedCall, starts: Sequence["_Start"], clock: Clock) -> _Refusal | None:
    """Waits until one answer has begun (None), or another model should be asked."""
    is_served = runs.is_served(accepted.specs[0])
    after_s = runs.fallback_after_s(accepted.model) if is_served else 0.0
    totals = accepted.specs[0].totals
    firsts = [start.first for start in starts]
    while True:
        since_s = clock.monotonic() if totals.placed else totals.waiting_since_s
        patience_s = max(0.0, since_s + after_s - clock.monotonic()) if accepted.fallbacks else None
        done, _ = await asyncio.wait(firsts, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if _has_begun(firsts):
            return None
        for failure in (first.exception() for first in done):
            if isinstance(failure, FALLS_BACK):
                return _Refusal(failure, await runs.prepare_fallback(accepted))
            if failure is not None:
                raise failure
        if not totals.placed and clock.monotonic() >= totals.waiting_since_s + after_s:
            instead = await runs.prepare_fallback(accepted)
            if instead is not None and not _has_begun(firsts):
                return _Refusal(_impatience(is_served=is_served), instead)


def _impatience(*, is_served: bool) -> TandemError:
    what = "no worker had room in time"
    if is_served:
        return Overloaded(what, retry_after_s=RETRY_AFTER_S, reason="wait")
    return WorkerUnavailable(what, retry_after_s=RETRY_AFTER_S)


def _has_begun(firsts: Sequence["asyncio.Task[Delta]"]) -> bool:
    return any(first.done() and first.exception() is None for first in firsts)


async def _end(starts: Sequence["_Start"]) -> None:
    for start in starts:
        start.first.cancel()
    for result in await asyncio.gather(*(start.first for start in starts), return_exceptions=True):
        if isinstance(result, TandemError):
            forget_frames(result)
    await asyncio.gather(*(start.close() for start in starts))


class _Start:
    """One answer that begins at once, before anything reads it. Must be closed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.first = asyncio.create_task(self._read_first(), name="first token")

    async def stream(self) -> Stream:
        """Yields all of the answer."""
        yield await self.first
        async for delta in self._stream:
            yield delta

    async def close(self) -> None:
        """Ends what is left of it; it is no longer read, and its first token has arrived or will not come."""
        await self._stream.aclose()

    async def _read_first(self) -> Delta:
        return await anext(self._stream)
