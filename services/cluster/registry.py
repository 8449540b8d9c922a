"""The members of the cluster: workers keep a lease on their record, gateways watch all records. Knows no request.

Where two processes claim one worker id the one that started later wins, by (start time, incarnation): the older
one's renewals are refused and its release deletes nothing. A process whose clock was set back waits until the record
of its predecessor has expired.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from services.cluster.connections import end_task
from services.cluster.keys import Keys
from services.cluster.redis_store import Store, run_script, thread_client
from services.cluster.registry_scripts import LIST, RELEASE, RENEW
from services.cluster.secret import share, share_through
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
MIN_POLL_INTERVAL_S = 0.02
MAX_RECORD_BYTES = 16 * 1024
MAX_PROOF_BYTES = 1024
MAX_NOTED = 256
"""Records that are not believed are named in the log, each life of a worker once, but no more than this."""
MAX_CHANNELS = 64
MAX_WORKERS = 4096

WORKER_ID_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
GROUP_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$"
INCARNATION_PATTERN = r"^[0-9a-f]{32}$"

logger = logging.getLogger(__name__)

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


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
                logger.warning(UNLISTED, extra={"error": redacted(str(error)) or type(error).__name__})
            self._client.connection_pool.disconnect()
            logger.debug("the lease could not be renewed", extra={"error": type(error).__name__})

    def _renew(self) -> None:
        record, proof = self._record, b""
        raw = msgspec.json.encode(record)
        if self._secrets is not None:
            share(self._client, self._keys, self._secrets)
            proof = sign_record(self._secrets(), self._keys.cluster, raw)
        args = (record.order, raw, self._ttl_ms, record.id, record.state, proof)
        keys = (self._keys.worker(record.id), self._keys.workers, self._keys.workers_changed)
        if run_script(self._client, RENEW, keys, args) == 1:
            self._renewed_at_s = time.monotonic()
            self._confirmed_state = record.state
            return
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost(LeaseLost(f"a newer process serves as {record.id}"))

    def _delete(self) -> None:
        record = self._record
        keys = (self._keys.worker(record.id), self._keys.workers, self._keys.workers_changed)
        run_script(self._client, RELEASE, keys, (record.order, record.id))


async def watch_workers(
    store: Store,
    *,
    secrets: Secrets | None = None,
    poll_s: float = WATCH_POLL_S,
    clock: Clock = SYSTEM_CLOCK,
    on_renewals: Callable[[Mapping[str, float]], None] = lambda ages_s: None,
) -> AsyncIterator[Membership]:
    """Yields the membership now, and again after each change of a record or of `is_stale`.

    `on_renewals` is called after each look at Redis with the seconds since each worker's lease was renewed, by its id.
    While Redis is away the last view stays. After it has lost its memory, workers that were known have LEASE_TTL_S
    to come back before they are taken out. With `secrets` only signed records are believed. Use it inside
    `contextlib.aclosing`.
    """
    view = MembershipView()
    doubts = _Doubts()
    last: Membership | None = None
    async with contextlib.aclosing(_Wakeups(store)) as wakeups:
        while True:
            try:
                epoch, records, ages_s = await list_leases(store, secrets, on_unsigned=doubts.note)
                view.observe(epoch, records, now_s=clock.monotonic())
                on_renewals(ages_s)
            except StoreUnavailable:
                view.lose_sight()
            if view.membership != last:
                last = view.membership
                yield last
            await wakeups.wait(poll_s, is_store_available=store.is_available)


async def list_workers(
    store: Store, secrets: Secrets | None = None, *, on_unsigned: Callable[[WorkerRecord], None] = lambda _: None
) -> tuple[str, dict[str, WorkerRecord]]:
    """The epoch of Redis' memory and the records in it. What is not a record is left out and counted.

    With `secrets`, a record that no holder of one of them has signed is left out too; `on_unsigned` is told of it.

    Raises StoreUnavailable.
    """
    epoch, records, _ = await list_leases(store, secrets, on_unsigned=on_unsigned)
    return epoch, records


async def list_leases(
    store: Store, secrets: Secrets | None = None, *, on_unsigned: Callable[[WorkerRecord], None] = lambda _: None
) -> tuple[str, dict[str, WorkerRecord], dict[str, float]]:
    """What `list_workers` returns, and each record's seconds since its lease was renewed. Raises StoreUnavailable."""
    keys = store.keys
    if secrets is not None:
        await share_through(store, secrets)
    held = () if secrets is None else secrets()
    args = (new_incarnation(), keys.worker_prefix, MAX_WORKERS, MAX_RECORD_BYTES, MAX_PROOF_BYTES)
    epoch, num_rejected, *found = await store.run(LIST, (keys.workers, keys.epoch), args)
    store.stats.num_rejected_values += num_rejected
    records, ages_s = {}, {}
    for worker_id, order, raw, left_ms, proof in zip(*(found[n::5] for n in range(5)), strict=True):
        record = _decode(worker_id, order, raw)
        if record is None:
            store.stats.num_rejected_values += 1
        elif secrets is not None and not is_signed(held, keys.cluster, raw, proof):
            store.stats.num_rejected_values += 1
            on_unsigned(record)
        else:
            records[record.id] = record
            ages_s[record.id] = max(0.0, LEASE_TTL_S - left_ms / 1000)
    return epoch.decode(), records, ages_s


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

    @property
    def membership(self) -> Membership:
        """The view, as a value."""
        ordered = sorted(self._workers.values(), key=lambda record: (record.role, record.id))
        return Membership(tuple(ordered), self._is_stale)

    def observe(self, epoch: str, records: Mapping[str, WorkerRecord], *, now_s: float) -> None:
        """Takes what Redis holds. A missing worker is gone, unless Redis has just lost its memory."""
        if self._epoch is not None and epoch != self._epoch:
            self._awaited, self._awaited_until_s = self._workers, now_s + self._grace_s
        self._epoch = epoch
        self._is_stale = False
        is_over = now_s >= self._awaited_until_s
        self._awaited = {} if is_over else {id_: old for id_, old in self._awaited.items() if id_ not in records}
        self._workers = {**self._awaited, **records}

    def lose_sight(self) -> None:
        """Notes that Redis did not answer."""
        self._is_stale = True


class _Wakeups:
    """Ends a watcher's wait when a change is published; without it the next poll finds the change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._event = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    async def wait(self, timeout_s: float, *, is_store_available: bool) -> None:
        """Waits for a published change, at least MIN_POLL_INTERVAL_S and at most `timeout_s`."""
        if is_store_available and (self._listener is None or self._listener.done()):
            self._listener = asyncio.create_task(self._listen(), name="workers-changed")
        elif not is_store_available:
            await self._stop()
        await asyncio.sleep(MIN_POLL_INTERVAL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()

    async def aclose(self) -> None:
        """Ends the subscription."""
        await self._stop()

    async def _stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await end_task(listener)

    async def _listen(self) -> None:
        async with _Subscription(self._store.subscriber(), self._store.keys.workers_changed) as subscription:
            # What changed before the subscription stood was not heard.
            self._event.set()
            while await subscription.is_alive_after_message():
                self._event.set()


class _Subscription:
    """One subscribed channel."""

    def __init__(self, pubsub: PubSub, channel: str) -> None:
        self._pubsub = pubsub
        self._channel = channel

    async def __aenter__(self) -> Self:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.subscribe(self._channel)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.aclose()  # type: ignore[no-untyped-call]

    async def is_alive_after_message(self) -> bool:
        """Waits for a message. False: the connection is broken."""
        try:
            while True:
                message = await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=None)
                if message is not None:
                    return True
        except (RedisError, OSError, RuntimeError):
            return False


def _decode(worker_id: bytes, order: bytes, raw: bytes) -> WorkerRecord | None:
    try:
        record = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_own = record.id.encode() == worker_id and record.order.encode() == order
    return record if is_own and record.state in SAID_BY_WORKERS else None


_DECODER = msgspec.json.Decoder(WorkerRecord)
