"""Batches in Redis: each has one owner at a time, and each of its rows one result, whichever gateway dies when.

A gateway claims a batch for a few seconds, which adds 1 to its epoch, and renews the claim while it works. All it
writes carries the epoch: what an earlier owner writes late is refused. A result is appended to the batch's file and its
row's bit set in one step, and a row whose bit is set takes no other result. Redis may be away for a while; one that
forgets a part of a batch is noticed, and the batch fails rather than answer a row twice. Knows no HTTP and no rows'
content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.cluster.batch_scripts import (
    ADVANCE,
    CANCEL,
    CLAIM,
    CREATE,
    DONE_ROWS,
    FIND,
    FIND_WAITING,
    OVER,
    RECORD,
    RENEW,
    Reply,
    Status,
)
from services.cluster.files import (
    CHUNK_BYTES,
    FILE_TTL_S,
    FilesFull,
    FileStore,
    fields_of,
)
from services.cluster.pending_work import claim_oldest
from services.cluster.redis_store import Store

LEASE_S = 6.0
"""Seconds that a dead owner's batch waits before another gateway continues it."""
MAX_RECORDED = 40
"""Most results that one script records."""
BATCH_TTL_S = 31 * 86_400.0


_BEFORE: Mapping[Status, Sequence[Status]] = {
    Status.IN_PROGRESS: (Status.VALIDATING,),
    Status.FINALIZING: (Status.IN_PROGRESS,),
    Status.CANCELLING: (Status.VALIDATING, Status.IN_PROGRESS),
    Status.COMPLETED: (Status.FINALIZING,),
    Status.EXPIRED: (Status.FINALIZING,),
    Status.CANCELLED: (Status.CANCELLING,),
    Status.FAILED: (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING),
}
"""The states from which a batch may come to each state."""


class BatchRefused(Exception):
    """A batch is not made. `reason` is `active`: the tenant has too many that are not over."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks of a batch.

    `key_digest` is that of the API key with which it was sent and under which its rows are answered. `metadata` is
    JSON. `output_ttl_s`: how long the files that it writes are kept once it is complete.
    """

    tenant: str
    key_digest: str
    endpoint: str
    input_file_id: str
    window_s: int
    window: str
    metadata: str = ""
    output_ttl_s: int = round(FILE_TTL_S)
    regions: str = ""
    """The only regions whose gateways may claim it, with commas between them; empty: all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in its present state. Times in unix seconds by status; `created` and `expires` are among them.

    `errors` is JSON, empty without errors. `outcome` is what it will be once it is finalized. The files' ids are empty
    until the batch is over, or if nothing was written to them.
    """

    id: str
    order: Order
    status: Status
    outcome: str
    epoch: int
    owner: str
    errors: str
    total: int
    completed: int
    failed: int
    times_s: Mapping[str, int]
    output_file_id: str
    error_file_id: str

    @property
    def claim(self) -> str:
        """Names this ownership; what is written under an earlier one is refused."""
        return f"{self.epoch}:{self.owner}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a row: a whole line of the file of answers or, if it failed, of the other one."""

    row: int
    line: bytes
    has_failed: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """What an owner learns when it renews its claim."""

    reply: Reply
    status: Status | None = None
    is_expired: bool = False
    """Whether the window in which the batch was to be completed is over."""


class BatchStore:
    """Batches in Redis; every method may wait for one round trip and raises StoreUnavailable."""

    def __init__(self, store: Store, files: FileStore, *, lease_s: float = LEASE_S) -> None:
        self._keys = store.keys
        self.files = files
        self.lease_s = lease_s

    async def create(self, batch_id: str, order: Order, *, output_id: str, error_id: str) -> Batch:
        """Makes a batch, which will write files with two of these ids. Raises BatchRefused or FilesFull.

        A second call with the same id changes nothing.
        """
        args = (
            batch_id,
            order.tenant,
            order.key_digest,
            order.endpoint,
            order.input_file_id,
            order.window_s,
            order.window,
            order.metadata,
            order.output_ttl_s,
            output_id,
            error_id,
            round(BATCH_TTL_S),
            *self.files.bounds,
            order.regions,
        )
        refusal, flat = await self.files.run_counting(CREATE, args)
        if refusal == b"active":
            raise BatchRefused("active")
        if refusal:
            raise FilesFull(refusal.decode())
        return _batch(batch_id, fields_of(flat))

    async def find(self, batch_id: str) -> Batch | None:
        """The batch, of whatever tenant."""
        flat = await self.files.run(FIND, (batch_id,))
        return _batch(batch_id, fields_of(flat)) if flat else None

    async def page(self, tenant: str, *, after: str, limit: int) -> tuple[list[Batch], bool]:
        """Batches of a tenant, the newest first, after the one with the id `after`, and whether there are more."""
        page = await self.files.read_page(
            self._keys.batches_prefix + tenant, self._keys.batch_prefix, after=after, limit=limit, newest_first=True
        )
        return [_batch(batch_id, fields) for batch_id, fields in page.entries], page.has_more

    async def cancel(self, batch_id: str, tenant: str) -> Reply:
        """Asks its owner to end it. REFUSED: it is nearly over, or over."""
        return Reply((await self.files.run(CANCEL, (batch_id, tenant, *_BEFORE[Status.CANCELLING]))).decode())

    async def claim(
        self, owner: str, *, busy_tenants: Sequence[str] = (), full_tenants: Sequence[str] = (), region: str = ""
    ) -> Batch | None:
        """Claims the batch that has waited longest, those of `busy_tenants` last. Returns None if none waits.

        Batches of `full_tenants`, and those that are pinned to other regions than `region`, are not claimed.
        """
        return await claim_oldest(
            lambda num_skipped: self.files.run(FIND_WAITING, (region, num_skipped)),
            lambda queue, tenant: self._claim(owner, queue, tenant),
            region=region,
            busy_tenants=busy_tenants,
            full_tenants=full_tenants,
        )

    async def _claim(self, owner: str, queue: str, tenant: str) -> Batch | None:
        reply = await self.files.run(CLAIM, (owner, round(self.lease_s * 1000), queue, tenant))
        if not reply:
            return None
        batch_id, flat = reply
        return _batch(batch_id.decode(), fields_of(flat))

    async def renew(self, batch: Batch) -> Claim:
        """Keeps the claim for another `lease_s`."""
        reply, status, is_expired = await self.files.run(RENEW, (batch.id, batch.claim, round(self.lease_s * 1000)))
        return Claim(Reply(reply.decode()), Status(status.decode()) if status else None, bool(is_expired))

    async def release(self, batch: Batch) -> None:
        """Gives the batch up, for the next gateway that claims one."""
        await self.files.run(RENEW, (batch.id, batch.claim, 0))

    async def advance(
        self,
        batch: Batch,
        status: Status,
        *,
        outcome: str = "",
        total: int | None = None,
        row_bytes: int = 0,
        errors: str = "",
    ) -> Reply:
        """Moves the batch to `status`; `total`: its rows, once they are counted. DONE also if it stands there already.

        With `total`, room for that number of lines of `row_bytes` is kept for it until each row has its result: FULL
        where the room does not suffice. Once the batch is over, its tenant can read its files.
        """
        total_said = -1 if total is None else total
        args = (batch.id, batch.claim, status, outcome, total_said, errors, row_bytes, *self.files.bounds)
        return Reply((await self.files.run_counting(ADVANCE, (*args, *_BEFORE[status]))).decode())

    async def done_rows(self, batch: Batch) -> bytes:
        """Bit N (the highest of a byte first) says whether row N has a result. Empty before rows are counted."""
        bits: bytes = await self.files.run(DONE_ROWS, (batch.id,))
        return bits

    async def record(self, batch: Batch, results: Sequence[Result], *, beyond_room: bool = False) -> Reply:
        """Keeps the results of rows that have none.

        `beyond_room`: room is not asked for; this is for lines of at most the `row_bytes` that are kept for each row.
        """
        head = (batch.id, batch.claim, int(beyond_room), CHUNK_BYTES, *self.files.bounds)
        reply = Reply.DONE
        for start in range(0, max(1, len(results)), MAX_RECORDED):
            rows: list[str | bytes | int] = []
            for result in results[start : start + MAX_RECORDED]:
                rows += [result.row, "error" if result.has_failed else "output", result.line]
            reply = Reply((await self.files.run_counting(RECORD, (*head, *rows))).decode())
            if reply is not Reply.DONE:
                break
        return reply


def has_result(bits: bytes, row: int) -> bool:
    """Whether the row's bit is set in what `BatchStore.done_rows` has answered."""
    return row // 8 < len(bits) and bool(bits[row // 8] & 0x80 >> row % 8)


def _batch(batch_id: str, fields: Mapping[str, str]) -> Batch:
    status = Status(fields["status"])
    written = {name for name in ("output", "error") if status in OVER and f"{name}_chunks" in fields}
    return Batch(
        id=batch_id,
        order=Order(
            fields["tenant"],
            fields["key"],
            fields["endpoint"],
            fields["input"],
            int(fields["window_s"]),
            fields["window"],
            fields["metadata"],
            int(fields["output_ttl"]),
            fields.get("regions", ""),
        ),
        status=status,
        outcome=fields.get("outcome", ""),
        epoch=int(fields["epoch"]),
        owner=fields.get("owner", ""),
        errors=fields.get("errors", ""),
        total=int(fields.get("total", 0)),
        completed=int(fields.get("completed", 0)),
        failed=int(fields.get("failed", 0)),
        times_s={name.removeprefix("at:"): int(value) for name, value in fields.items() if name.startswith("at:")},
        output_file_id=fields["output"] if "output" in written else "",
        error_file_id=fields["error"] if "error" in written else "",
    )
