"""Measures how long each Lua script of the product occupies Redis in a large cluster. The bound is 5 ms.

    python -m benchmarks.redis_scripts [--tenants 10000] [--workers 4000] [--batches 32000]

It fills a real Redis with stored responses up to their quota, journals, batches, and workers that publish pages. Then
it runs each operation with the largest arguments that it accepts. The figures are execution times inside Redis
(SLOWLOG), without the network. Redis runs with real-time priority if that is permitted, so that other programs do not
delay it. A hypervisor can still interrupt Redis. Each script therefore runs in several rounds, and the report uses the
round whose slowest execution was fastest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import pkgutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

import redis

import services.cluster
from benchmarks.prefix_index import page_keys, record
from services.cluster.answers import AnswerRoom, AnswerStore, BackgroundOrder
from services.cluster.batch_scripts import Status
from services.cluster.batches import BatchStore, Order, Result
from services.cluster.change_log import LogReader
from services.cluster.decision_board import DecisionBoard, ShownDecision
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.files import CHUNK_BYTES, FileStore, Room, new_id
from services.cluster.journal_room import JournalRoom, swept_bytes
from services.cluster.journal_scripts import MAX_JOURNAL_BYTES
from services.cluster.journals import JournalStore, JournalWriter, Mode, Record
from services.cluster.leadership import Leadership
from services.cluster.placements import MAX_BATCH, Placement, PlacementStore, State
from services.cluster.prefix_index import MAX_BATCH_KEYS, PrefixIndex, PrefixPublisher
from services.cluster.quarantine import MAX_FINGERPRINTS, Quarantine
from services.cluster.rate_limits import Limiter
from services.cluster.redis_store import Script, Store
from services.cluster.registry import WorkerLease, list_workers
from services.cluster.secret import share_through
from services.cluster.tenant_usage import TenantLimits
from services.runtime.cluster_secret import Secrets

BOUND_MS = 5.0
CLUSTER = "bench"
PARALLEL = 8
LARGE_BYTES = 7 * 2**20


def scripts() -> dict[str, Script]:
    """Returns all scripts of the product by digest and name."""
    found = {}
    for module in pkgutil.iter_modules(services.cluster.__path__):
        for name, value in vars(importlib.import_module(f"services.cluster.{module.name}")).items():
            if isinstance(value, Script):
                place = module.name.removesuffix("_scripts")
                found.setdefault(value.digest, (f"{place}.{name.strip('_')}", value))
    return dict(found.values())


async def in_parallel(actions: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Runs actions, PARALLEL at a time."""
    iterator = iter(actions)

    async def work() -> None:
        for action in iterator:
            await action()

    await asyncio.gather(*(work() for _ in range(PARALLEL)))


class Cluster:
    """The content of the filled Redis. The product's own stores write it."""

    def __init__(self, url: str, settings: argparse.Namespace) -> None:
        self.url = url
        self.settings = settings
        self.store = Store(url, cluster=CLUSTER, timeout_s=30.0)
        self.owner = "owner-0"
        """Tenant that owns the large values of this round."""
        self.tenants = [f"tenant-{number}" for number in range(settings.tenants)]
        self.answers = AnswerStore(self.store, room=AnswerRoom(16 * 2**20, 64 * 2**20), life_s=3600.0)
        self.files = FileStore(self.store, room=Room(96 * 2**20, 192 * 2**20))
        self.batches = BatchStore(self.store, self.files)
        self.journals = JournalStore(self.store, room=JournalRoom())
        self.placements = PlacementStore(self.store)

    async def fill(self) -> None:
        """Fills the quota of responses. Creates batches, journals, waiting responses, and workers."""
        answer_bytes = 60 * 2**20 // len(self.tenants) - 1024
        await in_parallel(lambda tenant=tenant: self.put(tenant, answer_bytes) for tenant in self.tenants)
        await in_parallel(lambda tenant=tenant: self.create(tenant) for tenant in self.tenants[:1000])
        owners = [self.tenants[n // 32 % len(self.tenants)] for n in range(self.settings.batches)]
        await in_parallel(lambda tenant=tenant: self.batch(tenant) for tenant in owners)
        await in_parallel(
            lambda tenant=tenant: self.journals.claim(Mode.JOIN, journal(tenant, b"c" * 1000))
            for tenant in self.tenants
        )
        for number in range(self.settings.workers):
            lease = WorkerLease(self.url, cluster=CLUSTER, record=record(f"w{number}"), ttl_s=3600.0)
            lease._renew()
            lease._client.close()
            publisher = PrefixPublisher(self.url, cluster=CLUSTER, record=record(f"w{number}"), ttl_s=3600.0)
            publisher.note(page_keys(4, seed=number))
            publisher._publish()
            publisher._client.close()

    async def put(self, tenant: str, num_bytes: int) -> None:
        """Stores a complete response."""
        await self.answers.put(tenant, "resp_a", document=b"d" * num_bytes, input_items=b"[]")

    async def create(self, tenant: str, *, regions: str = "eu", body: bytes = b"{}") -> None:
        """Stores a response that waits for a gateway."""
        order = BackgroundOrder("digest", "key", body, b"[]", True, regions=regions)
        await self.answers.create(tenant, "resp_w", order=order, document=b"{}", input_items=b"[]")

    async def batch(self, tenant: str) -> None:
        """Creates a batch that waits for a gateway."""
        order = Order(tenant, "d" * 64, "/v1/completions", "file-input", 86_400, "24h")
        await self.batches.create(new_id("batch_"), order, output_id=new_id("file-"), error_id=new_id("file-"))


def journal(tenant: str, call: bytes, num_choices: int = 1, num_tokens: int = 0) -> Record:
    """Returns a record with random names."""
    name = os.urandom(16).hex()
    tokens = [[7] * num_tokens for _ in range(num_choices)]
    return Record(name, "d" * 64, f"req-{name}", "gateway", call, tokens, [b""] * num_choices, tenant=tenant)


async def use_answers(cluster: Cluster) -> None:
    """Stores, reads and changes the largest responses while the quota is full."""
    answers, large = cluster.answers, b"[" + b"1," * (LARGE_BYTES // 2) + b"1]"
    await answers.put(cluster.owner, "conv_a", document=b"{}", input_items=large)
    found = await answers.find(cluster.owner, "conv_a")
    assert found is not None
    for number in range(20):
        await answers.append(cluster.owner, "conv_a", items=[b'{"n":%d,"text":"%b"}' % (number, b"x" * 20_000)])
    await answers.append(cluster.owner, "conv_a", items=[b'"%b"' % (b"y" * 200_000)])
    found = await answers.find(cluster.owner, "conv_a")
    assert found is not None
    await answers.change(cluster.owner, "conv_a", read=found, document=b'{"metadata":{}}')
    await answers.page(cluster.owner, "conv_", limit=100, accepts=lambda document: True)
    await cluster.create(cluster.owner, body=b"b" * 2**20, regions="us")
    claimed = await answers.claim("gateway", region="us", busy_tenants=cluster.tenants[:64])
    assert claimed is not None
    assert claimed.tenant == cluster.owner
    await answers.renew(claimed)
    events = [b"data: %d\n\n" % number for number in range(9000)]
    await answers.write(claimed, events)
    await answers.write(claimed, [b"e" * 2**20], document=b"d" * 2**20)
    for first in range(0, 9001, 64):
        await answers.events(cluster.owner, "resp_w", first=first, most=256)
    claimed = await answers.claim("gateway", region="eu")
    assert claimed is not None
    await answers.cancel(claimed.tenant, claimed.id, document=b"c" * 2**20)
    await answers.delete(cluster.owner, "conv_a")
    short = AnswerStore(cluster.store, room=answers.room, life_s=1.0)
    await in_parallel(
        lambda n=n: short.put(f"short-{cluster.owner}", f"resp_{n}", document=b"d", input_items=b"[]")
        for n in range(3000)
    )
    await asyncio.sleep(1.5)
    await answers.put(cluster.owner, "resp_b", document=b"{}", input_items=large)
    await answers.swept_bytes()


async def use_batches(cluster: Cluster) -> None:
    """Processes a batch of 50,000 rows among all others, and a file of 64 MiB."""
    files, batches = cluster.files, cluster.batches
    await cluster.batch(cluster.owner)
    for number in range(200):
        batch = await batches.claim("gateway", full_tenants=cluster.tenants[: number % 64])
        assert batch is not None
        await batches.renew(batch)
        await batches.release(batch)
    batch = await batches.claim("gateway", full_tenants=cluster.tenants)
    assert batch is not None
    assert batch.order.tenant == cluster.owner
    await batches.advance(batch, Status.IN_PROGRESS, total=50_000, row_bytes=100)
    for start in range(0, 5000, 500):
        rows = range(start, start + 500)
        await batches.record(batch, [Result(row, b"r" * 500, row % 2 == 0) for row in rows])
    await batches.done_rows(batch)
    await batches.find(batch.id)
    await batches.cancel(batch.id, cluster.owner)
    await batches.advance(batch, Status.CANCELLED)
    await batches.page(cluster.tenants[0], after="", limit=100)
    for number in range(256):
        await files.put_chunk(f"file-{cluster.owner}", cluster.owner, number, b"f" * CHUNK_BYTES)
    await files.commit(
        f"file-{cluster.owner}",
        cluster.owner,
        filename="f",
        purpose="batch",
        num_chunks=256,
        num_bytes=2**26,
        ttl_s=3600,
    )
    await files.read(f"file-{cluster.owner}", 1000, 2**20)
    await files.chunk(f"file-{cluster.owner}", 7)
    await files.delete(f"file-{cluster.owner}", cluster.owner)
    for number in range(500):
        await files.put_chunk(f"file-{number}-{cluster.owner}", cluster.owner, 0, b"f")
        await files.commit(
            f"file-{number}-{cluster.owner}",
            cluster.owner,
            filename="f",
            purpose="batch",
            num_chunks=1,
            num_bytes=1,
            ttl_s=1,
        )
    await files.page(cluster.owner, limit=1000)
    await asyncio.sleep(2)
    await files.num_bytes()
    await files.put_chunk(f"file-last-{cluster.owner}", cluster.owner, 0, b"f")
    await files.swept_bytes()


async def use_journals(cluster: Cluster) -> None:
    """Creates and writes the largest journals."""
    large = journal(cluster.owner, b"c" * (MAX_JOURNAL_BYTES - 400_000), num_choices=128)
    await cluster.journals.claim(Mode.JOIN, large)
    writer = JournalWriter(cluster.journals, on_taken_over=lambda record: None)
    records = [large, *(journal(tenant, b"c" * 1000, 128, 100) for tenant in cluster.tenants[:200])]
    for each in records:
        for tokens in each.token_ids:
            assert isinstance(tokens, list)
            tokens.extend([5] * 100)
        writer.post(each)
    await writer.flush()
    await cluster.journals.claim(Mode.FIND, large)
    await swept_bytes(cluster.store)


async def use_the_rest(cluster: Cluster) -> None:
    """Runs the operations of gateways and workers that belong to no request."""
    store = cluster.store
    placements = [Placement(f"req-{n}", 1, State.QUEUED, "gateway", began_unix_ns=10**18) for n in range(MAX_BATCH)]
    for _ in range(20):
        await cluster.placements.move_many(placements)
    await cluster.placements.get("req-1")
    quarantine = Quarantine(store)
    for _ in range(MAX_FINGERPRINTS):
        quarantine.add(os.urandom(32).hex())
    for _ in range(5):
        await quarantine.exchange()
    limiter, limits = Limiter(store, gateway="gateway"), TenantLimits(1000, 10**6, 100)
    for number, tenant in enumerate(cluster.tenants):
        limiter.hold(tenant, limits, f"req-{number}")
        limiter.settle(tenant, limits, num_tokens=10)
    await limiter.take("tenant-1", limits, num_requests=1, num_tokens=10, hold="req")
    for number in range(3000):
        limiter.hold(cluster.owner, limits, f"req-{number}")
    await limiter.close()
    for _ in range(5):
        await list_workers(store)
    lease = WorkerLease(cluster.url, cluster=CLUSTER, record=record("w-last"))
    lease._renew()
    lease._delete()
    publisher = PrefixPublisher(cluster.url, cluster=CLUSTER, record=record("w-pages"))
    publisher.note(page_keys(100_000, seed=1))
    publisher._publish()
    index = PrefixIndex(store)
    chunk = await index.read("w-pages", 0)
    assert chunk is not None
    for seed in range(7, 39):
        publisher.note(page_keys(MAX_BATCH_KEYS, seed=seed))
        publisher._publish()
    await index.look({"w-pages": chunk.position})
    log, left = LogReader(), None
    while left is None:
        changed, left = await index.changed(log)
        await index.look(dict.fromkeys(changed))
    publisher._delete()
    leadership = Leadership(store, store.keys.autoscaler, holder="copy")
    await leadership.renew()
    await leadership.close()
    await DecisionBoard(store).put(ShownDecision(1.0, "x" * 1000, "y" * 1000))
    await share_through(store, Secrets())


async def measure(server: EmbeddedRedis, client: redis.Redis, settings: argparse.Namespace) -> int:
    """Prints a table. Returns the number of scripts beyond the bound."""
    cluster = Cluster(server.url, settings)
    names = {}
    for name, script in scripts().items():
        names[client.script_load(script.body).encode()] = name
    await cluster.fill()
    print(
        f"{settings.tenants:,} tenants, {settings.workers:,} workers, {settings.batches:,} batches; Redis "
        f"{client.info('server')['redis_version']}, {client.info('memory')['used_memory_human']}"
    )
    client.config_set("slowlog-max-len", 10**6)
    client.config_set("slowlog-log-slower-than", 0)
    rounds: dict[str, list[list[float]]] = defaultdict(list)
    for number in range(settings.rounds):
        cluster.owner = f"owner-{number}"
        client.slowlog_reset()
        for use in (use_answers, use_batches, use_journals, use_the_rest):
            await use(cluster)
        taken_ms: dict[str, list[float]] = defaultdict(list)
        for entry in client.slowlog_get(10**6):
            command = entry["command"].split(b" ")
            if command[0] in (b"EVALSHA", b"EVAL"):
                taken_ms[names.get(command[1], "EVAL")].append(entry["duration"] / 1000)
        for name, each in taken_ms.items():
            rounds[name].append(each)
    await cluster.store.close()
    slowest_ms = {name: min(map(max, each)) for name, each in rounds.items()}
    print(f"{'script':28}{'calls':>7}{'median, ms':>12}{'slowest, ms':>13}  slowest of each round")
    for name, slowest in sorted(slowest_ms.items(), key=lambda item: -item[1]):
        taken = [ms for each in rounds[name] for ms in each]
        mark = "  beyond the bound" if slowest > BOUND_MS else ""
        each_round = " ".join(f"{max(each):.2f}" for each in rounds[name])
        print(f"{name:28}{len(taken):7}{statistics.median(taken):12.3f}{slowest:13.3f}  {each_round}{mark}")
    print("not run:", ", ".join(sorted(set(names.values()) - set(rounds))) or "none")
    return sum(slowest > BOUND_MS for slowest in slowest_ms.values())


def main() -> None:
    """Fills a Redis and prints how long each script holds it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis_scripts", description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4_000)
    parser.add_argument("--batches", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 0)
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(server.pid, os.SCHED_FIFO, os.sched_param(1))
        num_beyond = asyncio.run(measure(server, client, settings))
    print(f"bound: {BOUND_MS:g} ms; {num_beyond} scripts are slower")
    sys.exit(min(num_beyond, 1))


if __name__ == "__main__":
    main()
