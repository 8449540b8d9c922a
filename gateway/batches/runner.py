"""The batches that this gateway works on: it claims what nobody has, answers row by row, and lets go of what it loses.

Each row is a request over HTTP without a connection, in the `batch` class, so everything that holds for a request holds
for a row; 429 and 503 are not results but mean "later". What is known of a batch is in `services.cluster.batches`: any
gateway can continue from there, with the rows that have no result yet. Knows no route.
"""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

import msgspec

from gateway.batches.pending import ROW_HEADERS, PendingRow, PendingRows, RowAnswer, ask, later_s
from gateway.batches.rows import (
    EXPIRED,
    TOO_LARGE,
    Checker,
    FileWrong,
    Line,
    LineError,
    lines_of,
    result_line,
    row_of,
    unanswered_line,
)
from gateway.http.exchange import App
from gateway.requests.fan_out import all_of
from gateway.wishes import RESIDENCY
from services.cluster.batch_scripts import Reply, Status
from services.cluster.batches import Batch, BatchStore, Result, has_result
from services.cluster.claimed_work import ClaimedRun, ClaimedWork, Left, until_answered
from services.runtime.errors import StoreRefused, StoreUnavailable, Unauthenticated

MAX_OWNED = 32
"""The most batches that one gateway works on at once."""
MAX_OWNED_OF_TENANT = 4
"""A tenant's share of them; its further ones wait, so that others' do not have to."""
FULL_RETRY_S = 5.0
"""How often a result that found no room is tried again."""
LEAVE_S = 5.0
"""The time that running rows have to end when the gateway leaves."""
MAX_PAUSE_S = 5.0
"""The longest pause of a place whose row was told to come later: the next row may be told so too."""
MAX_UNANSWERED_AT_ONCE = 500
MAX_FAULTS = 3
"""How often a gateway tries a batch that it fails to work on by a fault of its own, until the batch has failed."""

logger = logging.getLogger(__name__)

Outcome = Literal["completed", "failed", "expired", "later"]


class Batches(ClaimedWork["BatchRun"]):
    """The batches of one gateway.

    `app_of` makes the HTTP API as the owner of the API key with a digest sees it; `check_model` raises the error that
    this owner would get for a model; `on_rows` takes what came of asking rows, and of how many. At most `num_rows` rows
    are asked at once; 0: this gateway runs none.
    """

    def __init__(
        self,
        store: BatchStore,
        *,
        gateway_incarnation: str,
        app_of: Callable[[str], App],
        check_model: Callable[[str, str | None], None],
        on_rows: Callable[[Outcome, int], None],
        num_rows: int,
    ) -> None:
        super().__init__(kind="a batch", max_runs=MAX_OWNED if num_rows else 0, max_runs_of_tenant=MAX_OWNED_OF_TENANT)
        self.store = store
        self.files = store.files
        self.app_of = app_of
        self.check_model = check_model
        self.on_rows = on_rows
        self.num_rows = num_rows
        self.slots = asyncio.Semaphore(num_rows)
        """Shared by all batches; the task that has waited longest is next, so each batch gets as much as the others."""
        self._gateway_incarnation = gateway_incarnation
        self.faults: Counter[str] = Counter()
        """The number of faults of this program, by batch."""

    async def _claim(self, *, busy_tenants: list[str], full_tenants: list[str]) -> "BatchRun | None":
        batch = await self.store.claim(
            self._gateway_incarnation, busy_tenants=busy_tenants, full_tenants=full_tenants, region=self.region
        )
        if batch is None:
            return None
        logger.info("a batch was claimed", extra={"batch": batch.id, "epoch": batch.epoch, "status": batch.status})
        return BatchRun(self, batch)


class BatchRun(ClaimedRun):
    """One batch while it is ours."""

    def __init__(self, batches: Batches, batch: Batch) -> None:
        super().__init__(
            name=batch.id,
            tenant=batch.order.tenant,
            kind="a batch",
            identity={"batch": batch.id, "epoch": batch.epoch},
        )
        self.batch = batch
        self._batches = batches
        self._store = batches.store
        self._files = batches.files
        self._app = batches.app_of(batch.order.key_digest)
        self._total = batch.total
        self._has_claim = asyncio.Event()
        """An event that is set while the claim is recent enough that no other gateway can have the batch."""
        self._has_claim.set()
        self._is_full = False
        self._end: Status | None = None
        """Why the rows end before all are answered: the batch is cancelled, or its time is over."""
        self._rows: asyncio.Task[None] | None = None
        self._pending: PendingRows | None = None

    def leave(self) -> None:
        """Begins no further row; the batch is let go when those that run have ended."""
        super().leave()
        if self._pending is not None:
            self._pending.close()

    async def _complete(self) -> None:
        """Takes the batch from where it stands to its end. Raises Left."""
        status = self.batch.status
        outcome: str | None = self.batch.outcome
        try:
            if status is Status.VALIDATING:
                self._total, longest_id = await self._count_rows()
                has_begun = await self._advance(
                    Status.IN_PROGRESS, total=self._total, row_bytes=len(self._unanswered_line(0, longest_id, EXPIRED))
                )
                status = Status.IN_PROGRESS if has_begun else Status.CANCELLING
            if status is Status.IN_PROGRESS:
                outcome = await self._answer_rows()
                is_final = outcome is not None and await self._advance(Status.FINALIZING, outcome=outcome)
                status = Status.FINALIZING if is_final else Status.CANCELLING
            if status is Status.CANCELLING:
                await self._advance(Status.CANCELLED)
                return
            if outcome == Status.EXPIRED:
                await self._expire_rows()
            assert outcome
            await self._advance(Status(outcome))
        except FileWrong as wrong:
            await self._advance(Status.FAILED, errors=_json(wrong.errors))
        except StoreRefused as refused:
            logger.error("batch refused by redis", extra={**self._identity, "reason": str(refused)})
            error = LineError("storage_refused", "The results could not be stored: Redis refused the command.")
            await self._advance(Status.FAILED, errors=_json((error,)))

    async def _count_rows(self) -> tuple[int, str]:
        """Checks the whole file. Returns its number of rows and its longest custom_id. Raises FileWrong.

        Both are empty (0 and "") where the batch is cancelled or its time is over meanwhile.
        """
        digest = self.batch.order.key_digest
        checker = Checker(self.batch.order.endpoint, lambda model: self._batches.check_model(digest, model))
        try:
            async with contextlib.aclosing(self._input()) as chunks, contextlib.aclosing(lines_of(chunks)) as lines:
                async for line in lines:
                    if self._end is not None:
                        return 0, ""
                    checker.check(line.number, line.data)
        except Unauthenticated as error:
            raise FileWrong(LineError("invalid_api_key", error.message)) from error
        return checker.finish(), checker.longest_custom_id

    async def _answer_rows(self) -> Status | None:
        """Answers what has no result yet. Returns the batch's new status; None: it was cancelled. Raises FileWrong."""
        if self._end is None:
            rows = self._rows = asyncio.create_task(self._ask_rows(), name=f"rows of {self.batch.id}")
            try:
                await asyncio.wait((rows,))
            finally:
                rows.cancel()
                await asyncio.wait((rows,))
        if self._end is not None:
            return Status.EXPIRED if self._end is Status.EXPIRED else None
        rows.result()
        if self._leaving.is_set():
            raise Left
        return Status.COMPLETED

    async def _ask_rows(self) -> None:
        bits = await self._done_rows()
        num_rows = self._total - int.from_bytes(bits).bit_count()
        async with contextlib.aclosing(self._unanswered(bits)) as unanswered:
            self._pending = PendingRows(unanswered, num_rows, self._line_of)
            if self._leaving.is_set():
                self._pending.close()
            await all_of([self._answer(self._pending) for _ in range(self._batches.num_rows)])

    async def _answer(self, pending: PendingRows) -> None:
        """Answers rows, beside other tasks that do, until none is left."""
        while (answered := await self._ask_next(pending)) is not None:
            row, custom_id, answer = answered
            wait_s = later_s(answer, row)
            if wait_s is not None:
                pending.put_off(row, wait_s)
                self._batches.on_rows("later", 1)
                await self._pause(min(wait_s, MAX_PAUSE_S))
                continue
            line = result_line(
                self.batch.id,
                row.number,
                custom_id,
                status=answer.status,
                request_id=answer.headers.get("x-request-id", ""),
                body=answer.body,
            )
            has_failed = answer.status != 200
            if len(line) > min(self._files.room.tenant_bytes, self._files.room.all_bytes):
                line, has_failed = self._unanswered_line(row.number, custom_id, TOO_LARGE), True
            await self._record([Result(row.number, line, has_failed)])
            self._batches.on_rows("failed" if has_failed else "completed", 1)

    async def _ask_next(self, pending: PendingRows) -> tuple[PendingRow, str, RowAnswer] | None:
        """Returns the next row, its custom_id and the API's answer; None: no row is left, or none is to be begun.

        The lines of rows that wait for a slot are not in memory.
        """
        async with contextlib.AsyncExitStack() as held:
            async with pending.turn:
                if not await pending.is_due():
                    return None
                await held.enter_async_context(self._batches.slots)
                await self._has_claim.wait()
                if self._leaving.is_set():
                    return None
                row, line = await pending.take()
            asked, order = row_of(line), self.batch.order
            headers = ROW_HEADERS
            if order.regions:
                headers = (*headers, (RESIDENCY.lower().encode(), order.regions.encode()))
            return row, asked.custom_id, await ask(self._app, order.endpoint, bytes(asked.body), headers=headers)

    async def _record(self, results: list[Result], *, beyond_room: bool = False) -> None:
        """Waits for Redis and for room, as long as it takes. Raises FileWrong or Left where it would be in vain."""
        while True:
            reply = await until_answered(lambda: self._store.record(self.batch, results, beyond_room=beyond_room))
            if reply is Reply.FULL:
                if not self._is_full:
                    logger.warning("no room for the results of a batch", extra={"batch": self.batch.id})
                self._is_full = True
                await self._pause(FULL_RETRY_S)
                if self._leaving.is_set():
                    raise Left
            elif reply is Reply.LOST:
                raise _forgotten()
            elif reply is Reply.DONE:
                return
            else:
                raise Left

    async def _expire_rows(self) -> None:
        """Gives each row without a result one that says why."""
        results: list[Result] = []
        async with contextlib.aclosing(self._unanswered(await self._done_rows())) as unanswered:
            async for number, line in unanswered:
                said = self._unanswered_line(number, row_of(line.data).custom_id, EXPIRED)
                results.append(Result(number, said, has_failed=True))
                if len(results) == MAX_UNANSWERED_AT_ONCE:
                    await self._record(results, beyond_room=True)
                    self._batches.on_rows("expired", len(results))
                    results.clear()
        await self._record(results, beyond_room=True)
        self._batches.on_rows("expired", len(results))

    def _unanswered_line(self, row: int, custom_id: str, reason: tuple[str, str]) -> bytes:
        """Returns the result of a row without an answer; for one that has expired, room exists from the beginning."""
        code, message = reason
        return unanswered_line(self.batch.id, row, custom_id, code=code, message=message)

    async def _done_rows(self) -> bytes:
        """Returns which rows have a result now. Raises FileWrong."""
        bits = await until_answered(lambda: self._store.done_rows(self.batch))
        if len(bits) != (self._total + 7) // 8:
            raise _forgotten()
        return bits

    async def _unanswered(self, bits: bytes) -> AsyncGenerator[tuple[int, Line], None]:
        """Yields (number, line) of the rows without a result. Raises FileWrong."""
        number = 0
        async with contextlib.aclosing(self._input()) as chunks, contextlib.aclosing(lines_of(chunks)) as lines:
            async for line in lines:
                if not has_result(bits, number):
                    yield number, line
                number += 1

    async def _line_of(self, row: PendingRow) -> bytes:
        """Reads a row's line again. Raises FileWrong where the file is gone."""
        order = self.batch.order
        line = await until_answered(lambda: self._files.read(order.input_file_id, row.start, row.num_bytes))
        if len(line) != row.num_bytes:
            raise _input_gone()
        return line

    async def _input(self) -> AsyncGenerator[bytes, None]:
        """Yields the file of rows. Raises FileWrong where it is gone."""
        order = self.batch.order
        file = await until_answered(lambda: self._files.find(order.input_file_id))
        if file is None or file.tenant != order.tenant:
            raise _input_gone()
        for index in range(file.num_chunks):
            data = await until_answered(functools.partial(self._files.chunk, file.id, index))
            if data is None:
                raise _input_gone()
            yield data
            if self._leaving.is_set() and self._rows is None:
                raise Left

    async def _advance(self, status: Status, **more: Any) -> bool:
        """Moves the batch to a status. Returns False if it was cancelled. Raises Left, or FileWrong without room."""
        reply = await until_answered(lambda: self._store.advance(self.batch, status, **more))
        if reply is Reply.FULL:
            raise FileWrong(LineError("storage_full", "There is no room for one line for each row: delete some files."))
        if reply not in (Reply.DONE, Reply.REFUSED):
            raise Left
        return reply is Reply.DONE

    async def _pause(self, seconds: float) -> None:
        """Waits, but ends early if the batch is to be let go."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()

    async def _keep(self) -> None:
        """Renews the claim, and ends the rows where the batch was cancelled or its time is over."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            await self._until_next_look(self._store.lease_s)
            asked_s = loop.time()
            try:
                claim = await self._store.renew(self.batch)
            except StoreUnavailable:
                # Another gateway may have the batch soon: what runs continues, and may be recorded first.
                if loop.time() - renewed_s > self._store.lease_s / 2:
                    self._has_claim.clear()
                continue
            if claim.reply is not Reply.DONE:
                self.stop()
                return
            renewed_s = asked_s
            self._has_claim.set()
            if claim.status is Status.CANCELLING:
                self._end_rows(Status.CANCELLING)
            elif claim.status is Status.IN_PROGRESS and claim.is_expired:
                self._end_rows(Status.EXPIRED)

    async def _give_back(self) -> None:
        await self._store.release(self.batch)

    async def _on_fault(self) -> None:
        faults = self._batches.faults
        faults[self.batch.id] += 1
        if faults[self.batch.id] >= MAX_FAULTS:
            wrong = LineError("internal_error", "The server has failed to work on this batch, again and again.")
            await self._store.advance(self.batch, Status.FAILED, errors=_json((wrong,)))

    def _end_rows(self, end: Status) -> None:
        if self._end is None:
            self._end = end
            if self._rows is not None:
                self._rows.cancel()


def _input_gone() -> FileWrong:
    return FileWrong(LineError("input_file_gone", "The input file was deleted or has expired."))


def _forgotten() -> FileWrong:
    return FileWrong(LineError("results_lost", "Results of this batch were lost; what is left is in its files."))


def _json(errors: Sequence[LineError]) -> str:
    return msgspec.json.encode(errors).decode()
