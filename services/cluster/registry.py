"""The members of the cluster: workers keep a lease on their record, gateways watch all records. Knows no request.

Where two processes claim one worker id the one that started later wins, by (start time, incarnation): the older
one's renewals are refused and its release deletes nothing. A process whose clock was set back waits until the record
of its predecessor has expired.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from redis.exceptions import RedisError

from services.cluster.advice import redis_remedy
from services.cluster.change_log import MAX_CHANGES, LogReader
from services.cluster.keys import Keys
from services.cluster.redis_store import Store, run_script, thread_client
from services.cluster.registry_scripts import LIST, RELEASE, RENEW
from services.cluster.secret import share, share_through
from services.cluster.wakeups import Wakeups
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.cluster_secret import Secrets
from services.runtime.config import redacted
from services.runtime.errors import LeaseLost, StoreUnavailable
from services.runtime.identity import identity_key
from services.runtime.membership import is_signed, sign_record
from services.runtime.model_facts import ModelFacts
from services.runtime.worker_state import SAID_BY_WORKERS, UNLISTED, WorkerState

LEASE_TTL_S = 3.0
LEASE_BEAT_S = 1.0
WATCH_POLL_S = 1.0
MAX_RECORD_BYTES = 16 * 1024
MAX_PROOF_BYTES = 1024
MAX_NOTED = 256
"""Records that are not believed are named in the log, each life of a worker once, but no more than this."""
MAX_CHANNELS = 64
MAX_WORKERS = 16_384
"""Most workers of a cluster. The registration of a further one is refused."""
MAX_SUSPECTS = 1024
"""Most workers of whose leases one look asks."""
COUNTS = ("pages_total", "pages_free", "pages_cached", "pages_reserved", "pages_used", "running", "waiting")
"""Fields whose change is not a change of the record. Gateways learn them from the worker's session."""

WORKER_ID_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
GROUP_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$"
INCARNATION_PATTERN = r"^[0-9a-f]{32}$"

logger = logging.getLogger(__name__)

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
MAX_TEXT_CHARS = 512
ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as it describes itself."""

    id: Annotated[str, msgspec.Meta(pattern=WORKER_ID_PATTERN)]
    role: Literal["prefill", "decode"]
    pid: Count
    host: ShortText
    address: ShortText
    """host:port of its gRPC server."""
    incarnation: Annotated[str, msgspec.Meta(pattern=INCARNATION_PATTERN)]
    """32 hex digits, new at each start."""
    started_unix_ns: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    version: ShortText = ""
    """Version of this project that the worker runs; empty: unknown."""
    state: WorkerState
    model: ShortText
    exact: bool
    identity: ShortText = ""
    """All that decides its tokens, as text of an `AnswerIdentity`; empty: unknown, and equal to no other."""
    facts: ModelFacts | None = None
    """What it must agree on with its gateway; None: unknown."""
    arithmetic: ShortText = ""
    """Names how it computes, for people; empty: unknown."""
    kernels_error: ShortText = ""
    """Why it computes without the compiled kernels of its engine. Empty if it uses them."""
    page_size: Count
    """Tokens per page."""
    layout_fingerprint: ShortText
    max_sequence_tokens: Count
    kv_bytes_per_token: Count = 0
    """What a token takes on the way to another worker; 0: unknown."""
    max_running: Count = 0
    """Sequences that it decodes at a time; 0: unknown."""
    pulls: bool = False
    """Whether it gives pages of its cache to other workers and, as a prefill worker, takes some."""
    embeds: bool = False
    """Whether it embeds texts, as a prefill worker."""
    tensor_parallel: Count = 0
    """Processes that share each layer of its model; 0: unknown."""
    pipeline_parallel: Count = 0
    """Stages that share the layers; 0: unknown."""
    certificate_end_unix_s: Count = 0
    """When its TLS certificate expires, in seconds since 1970; 0: it has none, or does not say."""
    metrics_address: ShortText = ""
    """host:port of its /metrics; empty: it serves none."""
    transfer_address: ShortText = ""
    """host:port where other hosts open the payload channels to it. Empty if unknown."""
    region: ShortText = ""
    """Where it runs; moving pages between regions is dear. Empty: everywhere the same."""
    tenants: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=64)] = ()
    """Tenants that it works for. Empty: all."""
    pool: ShortText = ""
    """Label of the pool of workers that it belongs to. Empty: of the one without a name."""
    group: Annotated[str, msgspec.Meta(pattern=GROUP_PATTERN)] = ""
    """Workers with one name here have the same model, and change it together. Empty: it keeps its model."""
    asleep: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=64)] = ()
    """Models whose weights it keeps in memory without pages."""
    channels: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=MAX_CHANNELS)] = {}
    """The channel on which it sends pages to each worker, by that one's id."""
    pages_total: Count = 0
    pages_free: Count = 0
    pages_cached: Count = 0
    pages_reserved: Count = 0
    pages_used: Count = 0
    running: Count = 0
    waiting: Count = 0

    @property
    def identity_key(self) -> str:
        """What an answer that it began is bound to; empty: it has no model yet."""
        return identity_key(self.identity, layout=self.layout_fingerprint, incarnation=self.incarnation)

    @property
    def order(self) -> str:
        """Compares as text like the worker's lives in time."""
        return f"{self.started_unix_ns:020d}:{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Membership:
    """All workers at one moment, in order of role and id."""

    workers: tuple[WorkerRecord, ...]
    is_stale: bool
    """Redis does not answer; this is the last view."""


def new_incarnation() -> str:
    """A name for one life of a process. Random, because a counter in Redis would not survive FLUSHALL."""
    return secrets.token_hex(16)


def named_channels(channels: Mapping[str, str]) -> dict[str, str]:
    """As many channels as a record takes; a worker with more peers shows the first."""
    return dict(islice(channels.items(), MAX_CHANNELS))


class WorkerLease:
    """Keeps a worker's record in Redis from a thread of its own, which neither engine nor event loop can delay.

    Redis may be away, frozen, flushed or restarted: the record is back within a beat of its return. If a newer
    process has taken the id, `on_lost` is called from the lease's thread and nothing more is written. With
    `secrets` the record is signed, and the secret itself is shared through Redis where it is not configured.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str,
        record: WorkerRecord,
        on_lost: Callable[[LeaseLost], None] | None = None,
        secrets: Secrets | None = None,
        ttl_s: float = LEASE_TTL_S,
        beat_s: float = LEASE_BEAT_S,
    ) -> None:
        self._keys = Keys(cluster)
        self._client = thread_client(url)
        self._record = record
        self._on_lost = on_lost
        self._secrets = secrets
        self._ttl_ms = round(ttl_s * 1000)
        self._ttl_s = ttl_s
        self._beat_s = beat_s
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopping = False
        self._is_lost = False
        self._renewed_at_s: float | None = None
        self._confirmed_state: WorkerState | None = None
        self._has_told = False
        self._refused_at = 0
        self._versioned: tuple[WorkerRecord, tuple[bytes, ...]] | None = None
        self._version = b""
        self._thread = threading.Thread(target=self._keep, name=f"lease-{record.id}", daemon=True)

    @property
    def record(self) -> WorkerRecord:
        """What is or will be published."""
        return self._record

    @property
    def is_held(self) -> bool:
        """Whether Redis has confirmed the record within the TTL."""
        renewed_at_s = self._renewed_at_s
        return not self._is_lost and renewed_at_s is not None and time.monotonic() - renewed_at_s < self._ttl_s

    @property
    def confirmed_state(self) -> WorkerState | None:
        """The state in the last record that Redis has taken, however long ago; None before the first."""
        return self._confirmed_state

    def start(self) -> None:
        """Begins to publish; returns at once, whether Redis answers or not."""
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Replaces fields of the record, from any thread. A new state is published now, all else at the next beat."""
        with self._lock:
            before, self._record = self._record, msgspec.structs.replace(self._record, **changes)
        if before.state != self._record.state:
            self._wake.set()

    def release(self, *, timeout_s: float = 2.0) -> None:
        """Stops, and deletes the record if it is this incarnation's. Without Redis it expires by itself."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        try:
            while not self._is_stopping and not self._is_lost:
                self._wake.clear()
                started_at_s = time.monotonic()
                self._try(self._renew)
                self._wake.wait(max(0.0, self._beat_s - (time.monotonic() - started_at_s)))
            if not self._is_lost:
                self._try(self._delete)
        finally:
            self._client.close()

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (RedisError, OSError) as error:
            if self._confirmed_state is None and not self._has_told:
                self._has_told = True
                why = redacted(str(error)) or type(error).__name__
                logger.warning(UNLISTED, extra={"error": why, "remedy": redis_remedy(why)})
            self._client.connection_pool.disconnect()
            logger.debug("the lease could not be renewed", extra={"error": type(error).__name__})

    def _renew(self) -> None:
        record = self._record
        held: tuple[bytes, ...] = ()
        raw, proof = msgspec.json.encode(record), b""
        if self._secrets is not None:
            share(self._client, self._keys, self._secrets)
            held = self._secrets()
            proof = sign_record(held, self._keys.cluster, raw)
        args = (record.order, raw, self._ttl_ms, record.id, record.state, proof, self._version_of(record, held))
        keys = (self._keys.worker(record.id), self._keys.workers_changed, *self._keys.workers)
        answer = run_script(self._client, RENEW, keys, (*args, MAX_WORKERS))
        if answer < 0:
            self._note_refusal(-answer)
        elif answer:
            self._renewed_at_s = time.monotonic()
            self._confirmed_state, self._refused_at = record.state, 0
        else:
            self._is_lost = True
            if self._on_lost is not None:
                self._on_lost(LeaseLost(f"a newer process serves as {record.id}"))

    def _version_of(self, record: WorkerRecord, held: tuple[bytes, ...]) -> bytes:
        """Returns a digest of the record without its counts, and of the secrets that sign it."""
        lasting = msgspec.structs.replace(record, **dict.fromkeys(COUNTS, 0))
        if self._versioned != (lasting, held):
            raw = msgspec.json.encode(lasting)
            signed = sign_record(held, self._keys.cluster, raw) if held else b""
            self._versioned, self._version = (lasting, held), blake2b(raw + signed, digest_size=16).hexdigest().encode()
        return self._version

    def _note_refusal(self, num_workers: int) -> None:
        if not self._refused_at:
            logger.error(
                "worker not registered: the cluster has too many workers",
                extra={
                    "worker": self._record.id,
                    "workers": num_workers,
                    "limit": MAX_WORKERS,
                    "remedy": "stop workers that are not needed, or give some workers and gateways another --cluster; "
                    "the registration is tried again every second",
                },
            )
        self._refused_at = num_workers

    def _delete(self) -> None:
        record = self._record
        keys = (self._keys.worker(record.id), self._keys.workers_changed, *self._keys.workers)
        run_script(self._client, RELEASE, keys, (record.order, record.id))


async def watch_workers(
    store: Store,
    *,
    secrets: Secrets | None = None,
    poll_s: float = WATCH_POLL_S,
    clock: Clock = SYSTEM_CLOCK,
    suspects: Callable[[], Iterable[str]] = lambda: (),
    on_renewals: Callable[[Mapping[str, float]], None] = lambda ages_s: None,
) -> AsyncGenerator[Membership, None]:
    """Yields the membership now, and again after each change of a record or of `is_stale`.

    Changes of a record's counts alone are not reported. After each look at Redis, `on_renewals` receives the seconds
    since the leases of the `suspects` were renewed, by worker id. While Redis is unavailable, the last view stays.
    After Redis has lost its memory, known workers have LEASE_TTL_S to return before they are removed. With `secrets`,
    only signed records are used. Use it inside `contextlib.aclosing`.
    """
    view = MembershipView()
    reader = RegistryReader(store, secrets, on_unsigned=_Doubts().note)
    last: Membership | None = None
    async with contextlib.aclosing(Wakeups(store)) as wakeups:
        while True:
            is_complete = True
            try:
                is_complete = await reader.look(suspects)
                on_renewals(reader.ages_s)
                if is_complete:
                    view.observe(reader.epoch, reader.records, now_s=clock.monotonic(), is_same=not reader.has_changed)
            except StoreUnavailable:
                view.lose_sight()
            if is_complete and view.membership is not last and view.membership != last:
                last = view.membership
                yield last
            await wakeups.wait(poll_s if is_complete else 0.0, is_store_available=store.is_available)


async def list_workers(
    store: Store, secrets: Secrets | None = None, *, on_unsigned: Callable[[WorkerRecord], None] = lambda _: None
) -> tuple[str, dict[str, WorkerRecord]]:
    """Returns the epoch of Redis' memory and the records in it. Counts values that are not records, and skips them.

    With `secrets`, records that no holder of a secret has signed are skipped too, and passed to `on_unsigned`.

    Raises StoreUnavailable.
    """
    reader = RegistryReader(store, secrets, on_unsigned=on_unsigned)
    while not await reader.look():
        pass
    return reader.epoch, dict(reader.records)


class RegistryReader:
    """The records of all workers, as far as one reader has read them. A look without changes costs Redis O(log n)."""

    def __init__(
        self, store: Store, secrets: Secrets | None, *, on_unsigned: Callable[[WorkerRecord], None] = lambda _: None
    ) -> None:
        self.epoch = ""
        """Name of Redis' memory. A new one means that Redis has lost it."""
        self.records: Mapping[str, WorkerRecord] = {}
        """Records at the last complete look, by worker id."""
        self.has_changed = False
        """Whether the last complete look changed `records`."""
        self.ages_s: Mapping[str, float] = {}
        """Seconds since the leases of the suspects were renewed, by worker id."""
        self._store = store
        self._secrets = secrets
        self._on_unsigned = on_unsigned
        self._log = LogReader()
        self._held: tuple[bytes, ...] = ()
        self._reading: dict[str, WorkerRecord | None] = {}
        """Records read since the last complete look. None: the record cannot be used."""

    async def look(self, suspects: Callable[[], Iterable[str]] = lambda: ()) -> bool:
        """Reads the next changes. Returns whether nothing is left to read. Raises StoreUnavailable."""
        store, keys = self._store, self._store.keys
        if self._secrets is not None:
            await share_through(store, self._secrets)
            if self._secrets() != self._held:  # records that could not be believed before may be genuine
                self._held = self._secrets()
                self._log.restart()
        asked = tuple(islice(suspects(), MAX_SUSPECTS))
        args = (new_incarnation(), keys.worker_prefix, self._log.number, MAX_CHANGES, MAX_RECORD_BYTES, MAX_PROOF_BYTES)
        epoch, num_rejected, left_ms, log, *found = await store.run(LIST, (keys.epoch, *keys.workers), (*args, *asked))
        store.stats.num_rejected_values += num_rejected
        self.epoch = epoch.decode()
        self.ages_s = {
            worker_id: max(0.0, LEASE_TTL_S - int(ms) / 1000)
            for worker_id, ms in zip(asked, left_ms, strict=True)
            if ms
        }
        self._reading.update((worker_id.decode(errors="replace"), None) for worker_id in log[4])
        self._reading.update((record.id, record) for record in self._believed(found))
        gone = self._log.read(log)
        if gone is None:
            return False
        self._reading.update((worker_id.decode(errors="replace"), None) for worker_id in gone)
        self.has_changed = bool(self._reading)
        if self._reading:
            kept = {**self.records, **self._reading}
            self.records, self._reading = {key: record for key, record in kept.items() if record is not None}, {}
        return True

    def _believed(self, found: Iterable[Sequence[bytes]]) -> Iterator[WorkerRecord]:
        stats = self._store.stats
        for worker_id, order, raw, proof in found:
            record = _decode(worker_id, order, raw)
            if record is None:
                stats.num_rejected_values += 1
            elif self._secrets is not None and not is_signed(self._held, self._store.keys.cluster, raw, proof):
                stats.num_rejected_values += 1
                self._on_unsigned(record)
            else:
                yield record


class _Doubts:
    """The records that are not believed, each of which is named in the log once."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def note(self, record: WorkerRecord) -> None:
        """Warns once of a record that no holder of the cluster's secret has signed."""
        if record.incarnation in self._noted or len(self._noted) >= MAX_NOTED:
            return
        self._noted.add(record.incarnation)
        logger.warning(
            "a worker's record in Redis is not used: no holder of this cluster's secret has signed it; it is of an "
            "earlier version, or its --cluster-secret-file (or --redis) is another one",
            extra={"worker": record.id, "address": record.address},
        )


class MembershipView:
    """What a watcher believes; a pure state machine over what it sees, with the time passed in."""

    def __init__(self, *, grace_s: float = LEASE_TTL_S) -> None:
        self._grace_s = grace_s
        self._epoch: str | None = None
        self._workers: dict[str, WorkerRecord] = {}
        self._awaited: dict[str, WorkerRecord] = {}
        self._awaited_until_s = 0.0
        self._is_stale = True
        self._membership: Membership | None = None

    @property
    def membership(self) -> Membership:
        """The view, as a value. It is the same object until the view changes."""
        if self._membership is None:
            ordered = sorted(self._workers.values(), key=lambda record: (record.role, record.id))
            self._membership = Membership(tuple(ordered), self._is_stale)
        return self._membership

    def observe(self, epoch: str, records: Mapping[str, WorkerRecord], *, now_s: float, is_same: bool = False) -> None:
        """Takes the records in Redis. A missing worker is gone, unless Redis has just lost its memory.

        With `is_same`, the records have not changed since they were last passed.
        """
        if is_same and epoch == self._epoch and not self._awaited:
            if self._is_stale:
                self._is_stale, self._membership = False, None
            return
        if self._epoch is not None and epoch != self._epoch:
            self._awaited, self._awaited_until_s = self._workers, now_s + self._grace_s
        self._epoch = epoch
        self._is_stale = False
        is_over = now_s >= self._awaited_until_s
        self._awaited = {} if is_over else {id_: old for id_, old in self._awaited.items() if id_ not in records}
        self._workers = {**self._awaited, **records}
        self._membership = None

    def lose_sight(self) -> None:
        """Notes that Redis did not answer."""
        if not self._is_stale:
            self._is_stale, self._membership = True, None


def _decode(worker_id: bytes, order: bytes, raw: bytes) -> WorkerRecord | None:
    try:
        record = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_own = record.id.encode() == worker_id and record.order.encode() == order
    return record if is_own and record.state in SAID_BY_WORKERS else None


_DECODER = msgspec.json.Decoder(WorkerRecord)
