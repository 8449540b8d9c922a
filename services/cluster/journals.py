"""What another gateway needs to continue a named request: in Redis for a bounded time, fenced by an epoch.

A journal has one owner. A gateway that continues the request claims it and adds 1 to its epoch; what an earlier
owner writes is then refused. Redis may forget any part of it at any time: tokens are a function of the call, so every
prefix of them is a right one, and an empty one costs only time. Knows neither a call's meaning nor its tokens'.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from services.cluster.journal_room import AGAIN, MAX_ROUNDS, JournalRoom, cost_bytes, room_keys
from services.cluster.journal_scripts import CLAIM, MAX_CHOICES, MAX_JOURNAL_BYTES, TOKEN_BYTES, WRITE, Written
from services.cluster.redis_store import Store
from services.runtime.background_tasks import supervise
from services.runtime.errors import StoreRefused, StoreUnavailable

VERSION = 1
TTL_S = 600.0

FLUSH_INTERVAL_S = 0.05
RETRY_INTERVAL_S = 0.2
MAX_BATCH_JOURNALS = 64
MAX_BATCH_BYTES = 2**18
MAX_BATCH_CHOICES = 64
"""A script takes at most this many answers, apart from those of the last journal."""
MAX_PENDING = 4096
"""Most journals that wait to be written. One that finds no place is written after its next tokens."""

logger = logging.getLogger(__name__)


class Mode(StrEnum):
    """What a claim does where nothing is held, and where something is."""

    JOIN = "join"
    """Makes a journal, or takes over the one that is held."""
    REPLACE = "replace"
    """Makes a journal in any case."""
    FIND = "find"
    """Takes over the one that is held, or makes none."""


class Outcome(StrEnum):
    """What a claim did."""

    MADE = "made"
    HELD = "held"
    OTHER = "other"
    """A journal is held, and its digest is another one. Nothing was changed."""
    MISFIT = "misfit"
    """A journal is held, and it has another request id or number of answers than asked for. Nothing was changed."""
    NONE = "none"
    TENANT_FULL = "tenant"
    """The tenant's journals take their share. Nothing was changed, but what nobody used for a while may be gone."""
    ALL_FULL = "all"
    """All tenants' journals take their share. Nothing was changed, but what nobody used for a while may be gone."""


@dataclass(slots=True)
class Record:
    """One journal as its owner writes it. `token_ids` and `ends` are the owner's own lists and only grow.

    An end is empty until the answer has ended.
    """

    name: str
    digest: str
    request_id: str
    owner: str
    call: bytes
    token_ids: Sequence[Sequence[int]]
    ends: list[bytes]
    alias: str = ""
    """Another name under which the journal can be found, or empty."""
    tenant: str = ""
    """The tenant in whose share it is counted."""
    life: str = field(default_factory=lambda: secrets.token_hex(16))
    epoch: int = 1
    is_in_redis: bool = False
    """Whether its head was written, as far as is known."""
    is_over: bool = False
    """Whether it must no longer be written, since another one has its name or it has grown too large."""
    num_written: list[int] = field(default_factory=list)
    written_ends: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget_written()

    @property
    def num_bytes(self) -> int:
        """What it counts in Redis when all is written."""
        return cost_bytes(len(self.call), len(self.ends), sum(map(len, self.token_ids)))

    def forget_written(self) -> None:
        """Notes that everything has to be written again."""
        self.is_in_redis = False
        self.num_written = [0] * len(self.token_ids)
        self.written_ends = [False] * len(self.ends)


@dataclass(frozen=True, slots=True)
class Held:
    """A journal as it was read, with the reader's epoch; `ends` are empty where an answer has not ended.

    `name` is its own, where it was found by an alias.
    """

    name: str
    digest: str
    life: str
    epoch: int
    request_id: str
    call: bytes
    token_ids: list[list[int]]
    ends: list[bytes]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim; `held` is given exactly with Outcome.HELD.

    `retry_after_s`: the wait after which there may be room, where there was not.
    """

    outcome: Outcome
    held: Held | None = None
    retry_after_s: float = 0.0


class JournalStore:
    """Journals in Redis; every method may wait for one round trip and raises StoreUnavailable."""

    def __init__(self, store: Store, *, room: JournalRoom | None = None) -> None:
        self._store = store
        self.room = room or JournalRoom()

    async def claim(
        self, mode: Mode, record: Record, *, checks_digest: bool = True, checks_request: bool = False
    ) -> Claimed:
        """Makes `record`'s journal or takes over the one that its name leads to, as `mode` says.

        What was made is marked in the record as written. A journal that cannot be read is treated as absent. A caller
        without the digest has it not checked; what is taken over then has as many answers as the record.
        `checks_request`: it also has the record's request id.
        """
        answer = await self._claim(mode, record, checks_digest, checks_request)
        if answer[0] == b"held":
            held = _parse(answer)
            if held is not None:
                return Claimed(Outcome.HELD, held)
            self._store.stats.num_rejected_values += 1
            if mode is Mode.FIND:
                return Claimed(Outcome.NONE)
            answer = await self._claim(Mode.REPLACE, record, checks_digest, checks_request)
        outcome = Outcome(answer[0].decode())
        if outcome in (Outcome.TENANT_FULL, Outcome.ALL_FULL):
            return Claimed(outcome, retry_after_s=answer[1] / 1000)
        if outcome is Outcome.MADE:
            record.forget_written()
            record.is_in_redis, record.is_over = True, False
        return Claimed(outcome)

    async def write(self, rows: Sequence[Sequence[Any]]) -> list[Written]:
        """Appends to many journals at once; the rows are those of `row_of`."""
        # Lua's msgpack knows no binary, so bytes go beside the rows, which hold their numbers from 1.
        blobs: list[bytes] = []

        def number_of(blob: bytes) -> int:
            if blob:
                blobs.append(blob)
            return len(blobs) if blob else 0

        plain = [
            [
                *fixed,
                [*head[:3], number_of(head[3]), head[4]] if head else [],
                [
                    [choice, first_index, number_of(tokens), number_of(end)]
                    for choice, first_index, tokens, end in parts
                ],
            ]
            for *fixed, head, parts in rows
        ]
        bounds = self.room.tenant_bytes, self.room.all_bytes
        args: tuple[str | bytes | int, ...] = (_ENCODER.encode(plain), round(TTL_S * 1000), VERSION, *bounds, *blobs)
        answer = await self._store.run(WRITE, room_keys(self._store), args)
        return [Written(status) for status in answer]

    async def _claim(self, mode: Mode, record: Record, checks_digest: bool, checks_request: bool) -> list[Any]:
        args: tuple[str | bytes | int, ...] = (
            mode.value,
            record.name,
            record.digest,
            int(checks_digest),
            int(checks_request),
            record.life,
            record.owner,
            record.request_id,
            record.call,
            len(record.ends),
            record.alias,
            round(TTL_S * 1000),
            VERSION,
            record.tenant,
            self.room.tenant_bytes,
            self.room.all_bytes,
        )
        # A client that looks for a journal has a part of its answer, and nowhere else to go.
        run = self._store.run_patiently if mode is Mode.FIND else self._store.run
        for _ in range(MAX_ROUNDS):
            reply: list[Any] = await run(CLAIM, room_keys(self._store), args)
            if reply[0] != AGAIN.encode():
                return reply
        return [Outcome.ALL_FULL.encode(), 0]


class JournalWriter:
    """Writes journals behind the answers' back: `post` costs about a microsecond and never waits.

    `on_taken_over` is called on the loop with the record of a request that another gateway continues.
    """

    def __init__(
        self,
        store: JournalStore,
        *,
        on_taken_over: Callable[[Record], None],
        flush_interval_s: float = FLUSH_INTERVAL_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._store = store
        self._on_taken_over = on_taken_over
        self._flush_interval_s = flush_interval_s
        self._max_pending = max_pending
        self._pending: dict[str, Record] = {}
        self._has_work = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0
        """Number of posts that found no place, here or in Redis."""

    def start(self) -> None:
        """Begins to write, on the running loop."""
        self._task = supervise(self._write_behind, name="journal-writer")

    def post(self, record: Record) -> None:
        """Notes that the record has something new, or should not expire."""
        if record.is_over:
            return
        if record.life not in self._pending and len(self._pending) >= self._max_pending:
            self.num_dropped += 1
            return
        self._pending[record.life] = record
        self._has_work.set()

    async def flush(self) -> None:
        """Writes all that waits now. Raises StoreUnavailable; what was not written keeps waiting."""
        async with self._writing:
            while self._pending:
                await self._write_batch()

    async def close(self, *, timeout_s: float = 2.0) -> None:
        """Writes what waits, trying for at most `timeout_s`, and stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pending:
                    try:
                        await self.flush()
                    except StoreUnavailable:
                        await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write_behind(self) -> None:
        if self._pending:  # An unexpected error ended this loop before.
            self._has_work.set()
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self._flush_interval_s)
            self._has_work.clear()
            try:
                await self.flush()
            except StoreUnavailable:
                self._has_work.set()
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write_batch(self) -> None:
        taken: list[Record] = []
        rows: list[list[Any]] = []
        num_bytes = num_choices = 0
        while (
            self._pending
            and len(taken) < MAX_BATCH_JOURNALS
            and num_bytes < MAX_BATCH_BYTES
            and num_choices < MAX_BATCH_CHOICES
        ):
            life = next(iter(self._pending))
            record = self._pending.pop(life)
            if record.num_bytes > MAX_JOURNAL_BYTES:
                record.is_over = True
                continue
            try:
                row, row_bytes = row_of(record)
            except Exception:  # one record must not end the writing of all; it is given up
                logger.exception("a journal cannot be written", extra={"request_id": record.request_id})
                record.is_over = True
                continue
            taken.append(record)
            rows.append(row)
            num_bytes += row_bytes
            num_choices += len(record.ends)
        if not taken:
            return
        try:
            statuses = await self._write_rows(taken, rows)
        except BaseException:
            self._pending = {record.life: record for record in taken} | self._pending
            raise
        for record, row, status in zip(taken, rows, statuses, strict=True):
            self._note(record, row, status)

    async def _write_rows(self, records: Sequence[Record], rows: Sequence[list[Any]]) -> list[Written]:
        """Writes rows together, or each by itself if Redis refuses them. A record that it refuses is given up."""
        try:
            return await self._store.write(rows)
        except StoreRefused as error:
            if len(rows) == 1:
                logger.error("journal refused", extra={"request_id": records[0].request_id, "reason": str(error)})
                return [Written.SUPERSEDED]
        return [(await self._write_rows([record], [row]))[0] for record, row in zip(records, rows, strict=True)]

    def _note(self, record: Record, row: Sequence[Any], status: Written) -> None:
        if status is Written.DONE:
            record.is_in_redis = True
            for choice, first_index, packed, end in row[6]:
                record.num_written[choice] = first_index + len(packed) // TOKEN_BYTES
                record.written_ends[choice] = record.written_ends[choice] or bool(end)
        elif status is Written.LOST:
            record.forget_written()
            self.post(record)
        elif status is Written.NO_ROOM:
            # It comes again with the next tokens, or with its owner's next beat.
            record.forget_written()
            self.num_dropped += 1
        else:
            record.is_over = True
            if status is Written.TAKEN_OVER:
                self._on_taken_over(record)


def row_of(record: Record) -> tuple[list[Any], int]:
    """The part of the record that is not written yet, as `JournalStore.write` takes it, and about its size in bytes."""
    parts: list[list[Any]] = []
    num_bytes = 0
    for choice, token_ids in enumerate(record.token_ids):
        first_index = record.num_written[choice]
        packed = pack(token_ids[first_index:])
        end = b"" if record.written_ends[choice] else record.ends[choice]
        if packed or end:
            parts.append([choice, first_index, packed, end])
            num_bytes += len(packed) + len(end)
    head: list[Any] = []
    if not record.is_in_redis:
        head = [record.digest, record.request_id, len(record.ends), record.call, record.alias]
        num_bytes += len(record.call)
    return [record.name, record.life, record.epoch, record.owner, record.tenant, head, parts], num_bytes


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are stored."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack(packed: bytes) -> list[int]:
    """The token ids; a part of one at the end is left out."""
    values = array("I")
    values.frombytes(packed[: len(packed) // TOKEN_BYTES * TOKEN_BYTES])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _parse(answer: Sequence[Any]) -> Held | None:
    try:
        _, name, digest, life, epoch, request_id, call, tokens, ends = answer
        if _HEX_DIGITS.fullmatch(name) is None or _HEX_DIGITS.fullmatch(life) is None:
            return None
        if not 1 <= len(tokens) == len(ends) <= MAX_CHOICES:
            return None
        return Held(
            name.decode(),
            digest.decode(),
            life.decode(),
            int(epoch),
            request_id.decode(),
            call,
            [unpack(packed) for packed in tokens],
            list(ends),
        )
    except (ValueError, TypeError):
        return None


_HEX_DIGITS = re.compile(rb"[0-9a-f]{32}")
_ENCODER = msgspec.msgpack.Encoder()
