"""The faults. Each case is a coroutine that gets `Options`, runs its own cluster and returns a `Row`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio

from benchmarks.cluster import running_cluster
from protos import inference_pb2
from tests.faults import faulty_worker
from tests.faults.client import (
    Answer,
    Broken,
    Refused,
    grpc_generate,
    grpc_resume,
    http_generate,
    http_request,
)
from tests.faults.harness import FaultCluster
from tests.faults.load import Clients, Load, Reference, Run, Spec, gap_around, make_specs, undisturbed
from tests.faults.neighbour import FAIR_FACTOR, beside_busy_program
from tests.faults.proxy import Proxy
from tests.faults.report import Row, percentile, share
from tests.free_ports import free_port

RESUME_TIMEOUT_S = 20.0
PLACEMENT_TIMEOUT_S = 5.0
FIRST_TOKEN_TIMEOUT_S = 10.0
DETECTION_S = 3.0
"""Longest silence until a peer that says nothing is given up."""
WATCHED_S = 5.0
"""Gaps that begin this long after a fault are seen; what is started in place of the dead takes from the same cores."""
LONGEST_GAP_S = 5.0
"""On top of the detection; a stream that stands still for longer makes the case fail, on a busy machine too."""
EVERY_PROMPT_IS_HANDED_OVER = "--local-prefill-tokens=0"
NUM_SPECS = 32
BUSY_S = 600.0
MOST_HELD = 24
"""File descriptors or threads more than before, under load: a leak would be one with each change of a role."""
MOST_KIB = 80 * 1024
"""Resident memory more than before without the page pool's: malloc keeps what busy threads have had once, and a leak
would be an engine with each change of a role."""
REMOTE = {"x-tandem-prefill": "remote"}
MAX_WARM_UPS = 6
"""Rounds in which Links may be made that nothing has needed before: each pair has one, and prefixes go other ways than
handoffs. What still grows after them is a leak.
"""
SPARE = {"fds": 8, "rings": 1, "tasks": 8, "threads": 16}


@dataclass
class Options:
    """What the command line says."""

    trials: int | None = None
    seed: int = 1
    seconds: float | None = None
    pause_s: float = 0.0
    is_quiet: bool = False

    def num_trials(self, default: int) -> int:
        return default if self.trials is None else self.trials

    def say(self, text: str) -> None:
        if not self.is_quiet:
            sys.stderr.write(text + "\n")


@dataclass(frozen=True)
class Mark:
    """The moment of a fault."""

    at: float
    running: list[Run]
    log_sizes: dict[str, int]


@dataclass
class Session:
    """A cluster under load, and what the trials found."""

    cluster: FaultCluster
    clients: Clients
    load: Load
    reference: Reference
    row: Row
    options: Options
    chance: random.Random
    hits: list[tuple[Run, float, float]] = field(default_factory=list)
    """(a stream that was hit, when, when all such streams had a token again)."""
    reasons: Counter[str] = field(default_factory=Counter)
    detection_s: float = 0.0
    """What the fault itself adds to the limit of a gap: a death is felt at once, silence is not."""
    has_lost_gateway: bool = False

    def mark(self) -> Mark:
        """What runs now, just before a fault."""
        sizes = {name: self.cluster[name].log.stat().st_size for name in self.cluster.names("gateway")}
        return Mark(time.monotonic(), list(self.load.running), sizes)

    def _failed_attempts(self, since: Mark) -> dict[str, str]:
        """Requests one of whose attempts failed, with the reason that the gateways say."""
        found = {}
        for name, start in since.log_sizes.items():
            for line in self.cluster.lines(name, start):
                if '"attempt failed"' in line:
                    record = json.loads(line)
                    found[record["request_id"].rsplit(".", 2)[0]] = str(record.get("reason"))
        return found

    async def after_fault(self, since: Mark, *, least_s: float = 0.25) -> int:
        """Waits until every stream that was hit continues or is over; how many were hit."""
        await asyncio.sleep(least_s)
        # A gateway that has much to do may not have said yet which streams it hit.
        resumed_at = await self.until_resumed(since.running, since.at)
        failed = self._failed_attempts(since)
        hit = [run for run in since.running if run.answer.request_id in failed]
        self.reasons.update(failed[run.answer.request_id] for run in hit)
        self.hits += [(run, since.at, resumed_at) for run in hit]
        return len(hit)

    async def until_resumed(self, runs: Sequence[Run], at: float) -> float:
        """Waits until each has had a token since, or is over. Returns the moment."""
        end = time.monotonic() + RESUME_TIMEOUT_S
        while any(run.last_token_at <= at and not run.is_over for run in runs):
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.01)
        return time.monotonic()

    def finish(self) -> None:
        """Books what became of all answers."""
        row, reference = self.row, self.reference
        row.answers = len(self.load.done)
        row.lost = len(self.load.lost())
        row.different = len(self.load.different())
        row.problems += [f"lost: {text}" for text in Counter(run.error for run in self.load.lost())]
        row.problems += [f"different: {_difference(run, reference)}" for run in self.load.different()[:3]]
        # A stream that waits for its first token is hit too, and its wait is measured from the fault on.
        kinds: dict[str, list[tuple[float, bool]]] = {"streaming": [], "waiting": []}
        laters_s: list[float] = []
        for run, at, resumed_at in self.hits:
            gap, later = (gap_around(run.answer, at, until) for until in (resumed_at, at + WATCHED_S))
            if run.error or gap is None or later is None:
                continue
            number = run.spec.number
            row.gaps_s.append(gap)
            laters_s.append(later)
            if later > self.detection_s + LONGEST_GAP_S:
                row.problems.append(f"answer {number} stood still for {later:.1f} s")
            rest, prefill_s = self.detection_s + 0.150 + 2 * reference.step_s, reference.prefill_s[number]
            row.within.append(gap <= rest + 1.5 * (prefill_s + reference.loaded_wait_s))
            row.within_alone.append(gap <= rest + 1.5 * prefill_s)
            kinds["streaming" if run.answer.arrivals[0][0] <= at else "waiting"].append((gap, row.within[-1]))
        for kind, gaps in kinds.items():
            if gaps:
                p50_ms, p99_ms = (round(percentile([gap for gap, _ in gaps], p) * 1000) for p in (50, 99))
                within = share([is_within for _, is_within in gaps])
                row.figures[f"hit_while_{kind}"] = f"{len(gaps)}, p50 {p50_ms} ms, p99 {p99_ms} ms, within {within} %"
        if laters_s:
            p50_ms, p99_ms = (round(percentile(laters_s, p) * 1000) for p in (50, 99))
            row.figures["with_the_replacements_start"] = f"p50 {p50_ms} ms, p99 {p99_ms} ms"
        if self.reasons:
            row.figures["reasons"] = dict(self.reasons)
        row.figures["step_ms"] = round(reference.step_s * 1000, 1)
        row.figures["prefill_alone_ms"] = round(statistics.median(reference.prefill_s.values()) * 1000, 1)
        row.figures["loaded_wait_ms"] = round(reference.loaded_wait_s * 1000, 1)


@contextlib.asynccontextmanager
async def session(
    fault: str,
    options: Options,
    *,
    tokens: tuple[int, int] = (64, 256),
    runner: Callable[[Clients, Run], Awaitable[None]] | None = None,
    judge: Callable[[Session], None] | None = None,
    **cluster_arguments: Any,
) -> AsyncIterator[Session]:
    """A cluster whose streams run while the block does; at the end all is compared and counted, and `judge` adds."""
    options.say(f"{fault}: seed {options.seed}")
    with FaultCluster(**({"kv_pages": 1024} | cluster_arguments)) as cluster:
        chance = random.Random(f"{options.seed} {fault}")
        async with under_load(cluster, fault, options, make_specs(chance, NUM_SPECS, tokens=tokens), runner) as opened:
            yield opened
        if judge is not None:
            judge(opened)
        cluster.keep_logs = not opened.row.is_good


@contextlib.asynccontextmanager
async def under_load(
    cluster: FaultCluster,
    fault: str,
    options: Options,
    specs: Sequence[Spec],
    runner: Callable[[Clients, Run], Awaitable[None]] | None = None,
    reference: Reference | None = None,
) -> AsyncIterator[Session]:
    """Streams on a cluster that runs; at the end all is compared and counted. Makes a missing reference."""
    chance = random.Random(f"{options.seed} {fault}")
    await cluster.ready()
    clients = Clients(cluster, chance)
    try:
        if reference is None:
            reference = await undisturbed(clients, specs)
        load = Load(clients, specs, reference, runner=runner)
        opened = Session(cluster, clients, load, reference, Row(fault), options, chance)
        async with load.running_streams():
            await asyncio.sleep(0.5)
            yield opened
        opened.row.leaks += await cluster.leaks()
        stale = await _stale_placements(opened)
        if opened.has_lost_gateway:
            # Redis holds hints: what a gateway could not write before it left expires.
            opened.row.figures["stale_placements"] = len(stale)
        else:
            opened.row.leaks += stale
        opened.finish()
    finally:
        await clients.close()


async def _stale_placements(opened: Session) -> list[str]:
    """Placements of requests that are over. They are written behind, so they are given a little."""
    end = time.monotonic() + PLACEMENT_TIMEOUT_S * (not opened.has_lost_gateway)
    while True:
        found = await opened.cluster.active_placements()
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


async def trials(opened: Session, number: int, one: Callable[[], Awaitable[int]]) -> None:
    """Runs `one` at random moments."""
    row, options = opened.row, opened.options
    num_hit = 0
    for _ in range(number):
        await asyncio.sleep(options.pause_s + opened.chance.uniform(0.05, 0.4))
        num_hit += await one()
        row.trials += 1
        if row.trials % 10 == 0:
            options.say(
                f"{row.fault}: {row.trials}/{number} trials, {num_hit} streams hit, {len(opened.load.done)} answers, "
                f"{len(opened.load.lost())} lost, {len(opened.load.different())} different"
            )
    row.figures["streams_hit"] = num_hit


async def kill(options: Options, fault: str, roles: Sequence[str]) -> Row:
    """kill -9 of a random worker of each of the roles, all at once; replacements are started when streams continue."""
    async with session(fault, options, flags=flags_for(roles)) as opened:
        await kill_some(opened, roles, options.num_trials(20))
    return opened.row


async def kill_some(opened: Session, roles: Sequence[str], number: int) -> None:
    """The trials of `kill`."""
    cluster = opened.cluster

    async def one() -> int:
        names = [opened.chance.choice(cluster.names(role)) for role in roles]
        since = opened.mark()
        for name in names:
            cluster.kill(name)
        num_hit = await opened.after_fault(since)
        for name in names:
            await cluster.replace(name)
        await cluster.ready()
        return num_hit

    await trials(opened, number, one)


def flags_for(roles: Sequence[str]) -> dict[str, Sequence[str]]:
    """Where prefill workers are hit they have something to do: short prompts are cheaper where they are decoded."""
    return {"gateway": [EVERY_PROMPT_IS_HANDED_OVER]} if "prefill" in roles else {}


async def kill_decode(options: Options) -> Row:
    """kill -9 of a random decode worker."""
    return await kill(options, "kill_decode", ["decode"])


async def kill_prefill(options: Options) -> Row:
    """kill -9 of a random prefill worker."""
    return await kill(options, "kill_prefill", ["prefill"])


async def kill_both(options: Options) -> Row:
    """kill -9 of a prefill and a decode worker at once."""
    return await kill(options, "kill_both", ["prefill", "decode"])


async def stop(options: Options, fault: str, role: str, stopped_s: float) -> Row:
    """SIGSTOP of a random worker, SIGCONT after a while. What it does when it wakes must have no effect."""
    async with session(fault, options, flags=flags_for([role])) as opened:
        cluster = opened.cluster
        opened.detection_s = DETECTION_S

        async def one() -> int:
            name = opened.chance.choice(cluster.names(role))
            since = opened.mark()
            cluster.kill(name, signal.SIGSTOP)
            try:
                await asyncio.sleep(stopped_s)
            finally:
                cluster.kill(name, signal.SIGCONT)
            num_hit = await opened.after_fault(since)
            await asyncio.sleep(1.0)
            if not cluster[name].is_alive:
                # It may leave when it finds that it was declared dead.
                await cluster.replace(name)
            await cluster.ready()
            return num_hit

        await trials(opened, options.num_trials(3), one)
    return opened.row


async def stop_decode_short(options: Options) -> Row:
    """A pause that is no death: shorter than any detector."""
    return await stop(options, "stop_decode_short", "decode", 1.5)


async def stop_prefill_short(options: Options) -> Row:
    """A pause that is no death: shorter than any detector."""
    return await stop(options, "stop_prefill_short", "prefill", 1.5)


async def stop_decode_long(options: Options) -> Row:
    """Declared dead, and then it wakes."""
    return await stop(options, "stop_decode_long", "decode", 6.0)


async def stop_prefill_long(options: Options) -> Row:
    """Declared dead, and then it wakes."""
    return await stop(options, "stop_prefill_long", "prefill", 6.0)


async def role_changes(options: Options) -> Row:
    """A random worker takes the other role; one in five of those that may be killed is, and is started again."""
    async with session("role_changes", options, gateways=2, flags=flags_for(["prefill"]), changes_roles=True) as opened:
        await change_some_roles(opened, options.num_trials(200), mortal=("prefill-1", "decode-1"))
    return opened.row


async def change_some_roles(opened: Session, number: int, *, mortal: Sequence[str]) -> None:
    """The trials of `role_changes`. Each role keeps a worker; those that are not killed hold no more than before."""
    cluster, chance = opened.cluster, opened.chance
    seconds: list[float] = []
    before = {name: cluster.resources(name) for name in cluster.workers if name not in mortal}

    async def one() -> int:
        crowded = [role for role in ("prefill", "decode") if len(cluster.names(role)) > 1]
        role = chance.choice(crowded)
        name = chance.choice(cluster.names(role))
        since = opened.mark()
        num_hit = len(since.running)
        cluster.set_role(name, "decode" if role == "prefill" else "prefill")
        if name in mortal and chance.random() < 0.2:
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            await cluster.replace(name)
        await cluster.ready()
        seconds.append(time.monotonic() - since.at)
        return num_hit

    await trials(opened, number, one)
    opened.row.figures["change_s"] = f"p50 {percentile(seconds, 50):.2f}, most {max(seconds):.2f}"
    for name, held in before.items():
        now = cluster.resources(name)
        opened.row.figures[name] = f"{held} became {now}"
        more_kib = now.rss_kib - now.pool_kib - held.rss_kib + held.pool_kib
        is_more = now.fds > held.fds + MOST_HELD or now.threads > held.threads + MOST_HELD or now.rings > held.rings + 4
        if is_more or more_kib > MOST_KIB:
            opened.row.leaks.append(f"{name} held {held} and holds {now}")


async def crash_loop(options: Options) -> Row:
    """One decode worker dies again each time that it has come up, now and then before it is ready."""
    async with session("crash_loop", options) as opened:
        cluster = opened.cluster

        async def one() -> int:
            since = opened.mark()
            cluster.kill("decode-1")
            num_hit = await opened.after_fault(since, least_s=0.1)
            await cluster.replace("decode-1")
            if opened.chance.random() < 0.5:
                await asyncio.sleep(opened.chance.uniform(0.0, 0.5))
            else:
                await cluster.ready()
            return num_hit

        await trials(opened, options.num_trials(8), one)
        if not cluster["decode-1"].is_alive:
            cluster.start("decode-1")
        await cluster.ready()
    return opened.row


# Network


async def through_proxy(
    options: Options,
    fault: str,
    disturb: Callable[[Proxy, random.Random], Awaitable[None]],
    *,
    detection_s: float = 0.0,
) -> Row:
    """One decode worker is reached through a proxy, by gateways and prefill workers, and its connections suffer."""
    port = free_port()
    flags = {"decode-0": [f"--port={port}", "--advertise-host=127.0.0.2"]}
    async with Proxy("127.0.0.2", port, "127.0.0.1", port) as proxy:
        async with session(fault, options, worker_flags=flags) as opened:
            cluster = opened.cluster
            opened.detection_s = detection_s

            async def one() -> int:
                since = opened.mark()
                await disturb(proxy, opened.chance)
                num_hit = await opened.after_fault(since)
                await cluster.ready()
                return num_hit

            await trials(opened, options.num_trials(5), one)
            opened.row.figures["connections"] = proxy.num_accepted
    return opened.row


async def reset(options: Options) -> Row:
    """Connections of a decode worker are reset, one or all."""

    async def disturb(proxy: Proxy, chance: random.Random) -> None:
        proxy.reset(None if chance.random() < 0.5 else chance)

    return await through_proxy(options, "reset", disturb)


async def blackhole(options: Options) -> Row:
    """Nothing passes to or from a decode worker for 5 s, and no connection breaks."""

    async def disturb(proxy: Proxy, chance: random.Random) -> None:
        proxy.is_open.clear()
        try:
            await asyncio.sleep(5.0)
        finally:
            proxy.is_open.set()

    return await through_proxy(options, "blackhole", disturb, detection_s=DETECTION_S)


async def slow_network(options: Options) -> Row:
    """Bytes of a decode worker come late and in small pieces."""

    async def disturb(proxy: Proxy, chance: random.Random) -> None:
        proxy.latency_s, proxy.slice_bytes = 0.02, 700
        try:
            await asyncio.sleep(2.0)
        finally:
            proxy.latency_s, proxy.slice_bytes = 0.0, 0

    return await through_proxy(options, "slow_network", disturb)


async def partition(options: Options) -> Row:
    """A decode worker in a network namespace is cut off for 6 s, though its lease in Redis is renewed all the time."""
    name, subnet = f"tf{os.getpid() % 100000}", f"10.213.{os.getpid() % 250}"
    try:
        _ip(f"netns add {name}")
    except (OSError, subprocess.CalledProcessError) as error:
        return Row("partition", skipped=f"no network namespace can be made: {error}")
    try:
        try:
            _ip(f"link add {name}h type veth peer name {name}n netns {name}")
            _ip(f"addr add {subnet}.1/24 dev {name}h")
            _ip(f"link set {name}h up")
            for command in (f"addr add {subnet}.2/24 dev {name}n", f"link set {name}n up", "link set lo up"):
                _ip(f"-n {name} {command}")
        except (OSError, subprocess.CalledProcessError) as error:
            return Row("partition", skipped=f"no pair of network devices can be made: {error}")
        flags = {"decode-0": [f"--host={subnet}.2", "--insecure"]}
        async with session("partition", options, worker_flags=flags, netns={"decode-0": name}) as opened:
            opened.detection_s = DETECTION_S

            async def one() -> int:
                since = opened.mark()
                # The other end loses its carrier; packets are dropped without a word.
                _ip(f"-n {name} link set {name}n down")
                try:
                    await asyncio.sleep(6.0)
                finally:
                    _ip(f"-n {name} link set {name}n up")
                num_hit = await opened.after_fault(since)
                await opened.cluster.ready()
                return num_hit

            await trials(opened, options.num_trials(2), one)
        return opened.row
    finally:
        _ip(f"netns del {name}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, timeout=10)


# Corruption


async def corruption(options: Options) -> Row:
    """Handoffs with flipped bits, short, lost and repeated frames, wrong headers, seals and hellos."""
    async with session(
        "corruption",
        options,
        plans=corrupting_plans(options.seed),
        tokens=(4, 24),
        flags={"gateway": ["--max-attempts=20", EVERY_PROMPT_IS_HANDED_OVER]},
        judge=judge_corruption,
    ) as opened:
        await corrupt_some(opened, options.num_trials(100), timeout_s=options.seconds or 540.0)
        for kind in faulty_worker.HELLO_KINDS:
            opened.cluster["prefill-0"].plan = {"hello": kind}
            await opened.cluster.replace("prefill-0")
            await opened.cluster.ready()
            await asyncio.sleep(1.0)
        # Without the plan the pair is tried again.
        opened.cluster["prefill-0"].plan = None
        await opened.cluster.replace("prefill-0")
        await opened.cluster.ready()
        await asyncio.sleep(0.5)
    return opened.row


def corrupting_plans(seed: int) -> dict[str, dict[str, Any]]:
    """Workers that may be told to lie, prefill workers where they hand over, all where they give a prefix."""
    # Two kinds stop a Link for some seconds when nothing follows them, so they are rarer.
    kinds = [
        kind for kind in faulty_worker.TRANSFER_KINDS for _ in range(1 if kind in ("lost_frame", "skipped_seq") else 4)
    ]
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    return {name: {"corrupt": kinds, "probability": 0.4, "seed": seed * 100 + n} for n, name in enumerate(names)}


async def corrupt_some(opened: Session, number: int, *, timeout_s: float) -> None:
    """Lets the workers lie until they have done it `number` times in all."""
    cluster = opened.cluster
    for name in cluster.workers:
        cluster.kill(name, signal.SIGUSR2)
    end, last = time.monotonic() + timeout_s, 0
    while (count := len(_injections(cluster))) < number and time.monotonic() < end:
        await asyncio.sleep(0.2)
        if count // 100 != last // 100:
            opened.options.say(f"corruption: {count}/{number} injections, {len(opened.load.lost())} lost")
        last = count
    for name in cluster.workers:
        cluster.kill(name, signal.SIGUSR2)


def _injections(cluster: FaultCluster) -> list[tuple[str, tuple[str, str]]]:
    """(kind, transfer) of all that was injected, where a transfer is an attempt's id and "pull" or "handoff"."""
    return [
        (words[2], (words[3], words[4]))
        for name in cluster.workers
        for line in cluster.lines(name)
        if (words := line.split())[:2] == ["faults:", "injected"]
    ]


def judge_corruption(opened: Session) -> None:
    """Compares what was injected with what the receiving workers counted and committed."""
    cluster, row = opened.cluster, opened.row
    injected = _injections(cluster)
    lines = [line.split() for name in cluster.workers for line in cluster.lines(name) if line.startswith("faults: ")]
    committed = {(words[2], words[3]) for words in lines if words[1] == "committed"}
    counted = Counter(words[2] for words in lines if words[1] == "counted")
    by_kind = Counter(kind for kind, _ in injected)
    row.figures["injected_pulls"] = sum(what == faulty_worker.PULL for _, (_, what) in injected)
    undetected = [
        (kind, transfer) for kind, transfer in injected if kind not in faulty_worker.HARMLESS and transfer in committed
    ]
    row.trials = len(injected)
    row.figures["injected"] = dict(sorted(by_kind.items()))
    row.figures["counted"] = dict(sorted(counted.items()))
    row.figures["undetected"] = len(undetected)
    row.problems += [f"a {what} with {kind} was committed: {key}" for kind, (key, what) in undetected[:5]]
    spare = sum(counted[reason] for reason in faulty_worker.LINK_ENDS)
    for reasons in {reasons for kind, reasons in faulty_worker.DETECTED_AS.items() if by_kind[kind]}:
        wanted = sum(count for kind, count in by_kind.items() if faulty_worker.DETECTED_AS[kind] <= reasons)
        seen = sum(counted[reason] for reason in reasons)
        if seen + spare < wanted:
            row.problems.append(f"{wanted} injections should count as {sorted(reasons)}, which counted {seen}")


# Redis


async def redis_fault(
    options: Options, fault: str, begin: Callable[[FaultCluster], Awaitable[None]], end: Callable[[FaultCluster], None]
) -> Row:
    """Redis goes away for `seconds`; streams run and begin all the time."""
    seconds = options.seconds or 6.0
    async with session(fault, options, tokens=(32, 96)) as opened:
        load = opened.load
        await asyncio.sleep(3.0)
        started = time.monotonic()
        await begin(opened.cluster)
        try:
            await asyncio.sleep(seconds)
        finally:
            end(opened.cluster)
        ended = time.monotonic()
        await asyncio.sleep(4.0)
        await opened.cluster.ready()
        opened.row.trials = 1
    before = [run.answer.ttft_s for run in load.done if run.answer.arrivals and run.answer.sent_at < started]
    during = [run.answer.ttft_s for run in load.done if run.answer.arrivals and started <= run.answer.sent_at < ended]
    row = opened.row
    row.figures["away_s"] = round(ended - started, 1)
    row.figures["served_meanwhile"] = len(during)
    for percent in (50, 99, 100):
        added = percentile(during, percent) - percentile(before, percent)
        row.figures[f"added_ttft_p{percent}_ms"] = round(added * 1000, 1)
    if not during:
        row.problems.append("no request was served meanwhile")
    return row


async def redis_kill(options: Options) -> Row:
    """Redis is killed, and comes back empty."""

    async def begin(cluster: FaultCluster) -> None:
        cluster.redis.kill()

    return await redis_fault(options, "redis_kill", begin, lambda cluster: cluster.redis.start())


async def redis_flush(options: Options) -> Row:
    """Redis loses everything, again and again."""
    flushing: list[asyncio.Task[None]] = []

    async def begin(cluster: FaultCluster) -> None:
        async def flush() -> None:
            async with redis.asyncio.Redis.from_url(cluster.redis.url) as client:
                while True:
                    await client.flushall()
                    await asyncio.sleep(1.0)

        flushing.append(asyncio.create_task(flush()))

    def end(cluster: FaultCluster) -> None:
        flushing[0].cancel()

    return await redis_fault(options, "redis_flush", begin, end)


async def redis_freeze(options: Options) -> Row:
    """Redis keeps its connections and says nothing."""

    async def begin(cluster: FaultCluster) -> None:
        os.kill(cluster.redis.pid, signal.SIGSTOP)

    return await redis_fault(options, "redis_freeze", begin, lambda cluster: os.kill(cluster.redis.pid, signal.SIGCONT))


# Gateways


async def resuming(clients: Clients, run: Run) -> None:
    """A client that continues elsewhere when its gateway dies.

    Half of them name their request and ask for the rest, half send an idempotency key and take the answer again.
    """
    name = f"r-{id(run):x}-{time.monotonic_ns():x}"
    has_key = run.spec.number % 4 >= 2
    run.gateway = clients.gateway()
    run.answer.request_id = "" if has_key else name
    key = {"idempotency-key": name} if has_key else {}
    end = time.monotonic() + 30.0
    while True:
        try:
            await _send_or_go_on(clients, run, key)
            return
        except Broken:
            if time.monotonic() > end:
                raise
            clients.refused(run.gateway)
            run.num_resumed += bool(run.answer.arrivals)
            run.gateway = clients.gateway(other_than=run.gateway)
            await asyncio.sleep(0.01)


async def _send_or_go_on(clients: Clients, run: Run, key: dict[str, str]) -> None:
    spec, answer = run.spec, run.answer
    if key:
        answer.forget()
    if spec.is_http:
        headers = dict(key)
        if not key:
            headers["x-request-id"] = answer.request_id
            if answer.last_event_id:
                headers["last-event-id"] = answer.last_event_id
        await http_generate(clients.cluster[run.gateway].http, spec.body(), answer, headers=headers)
    elif answer.arrivals and not key:
        await _resume_or_begin_anew(clients, run)
    else:
        message = spec.message("" if key else answer.request_id)
        await grpc_generate(clients.channel(run.gateway), message, answer, metadata=tuple(key.items()))


async def _resume_or_begin_anew(clients: Clients, run: Run) -> None:
    """The first tokens may have left before it was noted what the answer is; then the client asks as before."""
    channel = clients.channel(run.gateway)
    try:
        await grpc_resume(channel, run.answer, tenant=run.spec.tenant)
    except Refused as error:
        if error.status != "NOT_FOUND":
            raise
        run.has_begun_anew = True
        run.answer.forget()
        await grpc_generate(channel, run.spec.message(run.answer.request_id), run.answer)


async def gateway_kill(options: Options) -> Row:
    """kill -9 of one of two gateways; clients continue at the other one."""
    async with session("gateway_kill", options, gateways=2, runner=resuming) as opened:
        cluster = opened.cluster
        opened.has_lost_gateway = True

        async def one() -> int:
            name = opened.chance.choice(cluster.names("gateway"))
            since = opened.mark()
            hit = [run for run in since.running if run.gateway == name]
            cluster.kill(name)
            resumed_at = await opened.until_resumed(hit, since.at)
            opened.hits += [(run, since.at, resumed_at) for run in hit]
            await cluster.replace(name)
            await cluster.ready()
            return len(hit)

        await trials(opened, options.num_trials(3), one)
    opened.row.figures["resumed"] = sum(run.num_resumed for run in opened.load.done)
    opened.row.figures["begun_anew"] = sum(run.has_begun_anew for run in opened.load.done)
    return opened.row


async def rolling_restart(options: Options) -> Row:
    """SIGTERM to every worker and every gateway, one after the other, each replaced when it has left."""
    # The balancer asks ten times a second; until it has noticed, a gateway that leaves still takes requests.
    flags = {"gateway": ["--linger-s=1"]}
    async with session("rolling_restart", options, gateways=2, flags=flags) as opened:
        cluster = opened.cluster
        opened.has_lost_gateway = True
        slowest: dict[str, float] = {}

        async def one() -> int:
            for name in list(cluster.programs):
                started = time.monotonic()
                cluster.kill(name, signal.SIGTERM)
                try:
                    await cluster.ended(name, timeout_s=60.0)
                except TimeoutError:
                    opened.row.problems.append(f"{name} did not leave within 60 s of SIGTERM")
                slowest[name] = round(max(slowest.get(name, 0.0), time.monotonic() - started), 2)
                await cluster.replace(name)
                await cluster.ready()
                await asyncio.sleep(0.3)
            return 0

        await trials(opened, options.num_trials(1), one)
        opened.row.figures["seconds_to_leave"] = slowest
    return opened.row


# Clients


async def cancels(options: Options) -> Row:
    """Clients leave at any moment, over both APIs. Nothing stays behind."""
    options.say(f"cancels: seed {options.seed}")
    with FaultCluster(kv_pages=4096) as cluster:
        await cluster.ready()
        row = await cancel_some(cluster, options, options.num_trials(500))
        cluster.keep_logs = not row.is_good
    return row


async def cancel_some(cluster: FaultCluster, options: Options, number: int) -> Row:
    """Cancels, and what the cluster holds before and after."""
    row = Row("cancels", trials=number, answers=number)
    chance = random.Random(f"{options.seed} cancels")
    clients = Clients(cluster, chance)
    try:
        specs = [
            dataclasses.replace(spec, max_tokens=1500, stop=(), n=1, prompt=spec.prompt[:1000])
            for spec in make_specs(chance, NUM_SPECS)
        ]
        phases: Counter[str] = Counter()
        # Connections, pools and caches grow to their size first; a worker that replaced another has no Links yet.
        short = [dataclasses.replace(spec, is_http=True, max_tokens=1) for spec in specs]
        before = await _held(cluster)
        for _ in range(MAX_WARM_UPS):
            had = before
            handed_over = (clients.send(Run(spec, Answer(), gateway=clients.gateway()), REMOTE) for spec in short)
            await asyncio.gather(*handed_over)
            await _cancel_many(clients, specs, min(200, max(40, number // 2)), phases, options, "warm up")
            row.leaks += await cluster.leaks()
            before = await _held(cluster)
            has_grown = any(before[name]["rings"] > had[name]["rings"] for name in before)
            if not has_grown and _are_all_linked(await _workers(cluster)):
                break
        phases.clear()
        for _ in range(MAX_WARM_UPS):
            links, before = _links(await _workers(cluster)), await _held(cluster)
            await _cancel_many(clients, specs, number, phases, options, "cancels")
            at = time.monotonic()
            row.leaks += await cluster.leaks()
            row.figures["free_after_last_ms"] = round((time.monotonic() - at) * 1000)
            # Where a prefix went a way that none had gone before, what that Link holds is no leak: once more.
            if _links(await _workers(cluster)) <= links:
                break
        row.figures["phases"] = dict(phases)
        failed = {phase: count for phase, count in phases.items() if phase.startswith("failed")}
        row.lost = sum(failed.values())
        row.problems += [f"{count} {phase}" for phase, count in failed.items()]
        after = await _settled(cluster, before)
    finally:
        await clients.close()
    row.figures["held"] = {name: f"{before[name]} -> {after[name]}" for name in before}
    row.problems += [
        f"{name} holds more than before: {before[name]} -> {after[name]}"
        for name in before
        if not _is_as_before(before[name], after[name])
    ]
    return row


async def _workers(cluster: FaultCluster) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = (await cluster.topology())["workers"]
    return workers


def _are_all_linked(workers: list[dict[str, Any]]) -> bool:
    """Whether every prefill worker has handed prompts over to every decode worker."""
    receivers = {one["id"] for one in workers if one["role"] == "decode"}
    return all(receivers <= one["channels"].keys() for one in workers if one["role"] == "prefill")


def _links(workers: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Returns the pairs of workers, by their ids, of which the first has sent pages to the second."""
    return {(one["id"], receiver) for one in workers for receiver in one["channels"]}


def _is_as_before(before: dict[str, int], after: dict[str, int]) -> bool:
    # A few come and go with connections that are being closed or probed; a leak would be one per cancel.
    return all(after[what] <= before[what] + SPARE[what] for what in SPARE)


async def _cancel_many(
    clients: Clients, specs: Sequence[Spec], number: int, phases: Counter[str], options: Options, what: str
) -> None:
    gate = asyncio.Semaphore(48)
    num_done = 0

    async def one() -> None:
        nonlocal num_done
        async with gate:
            phases[await _cancel_one(clients, clients.chance.choice(specs))] += 1
            num_done += 1
            if num_done % 1000 == 0:
                options.say(f"{what}: {num_done}/{number}, {dict(phases)}")

    await asyncio.gather(*(one() for _ in range(number)))


async def _cancel_one(clients: Clients, spec: Spec) -> str:
    """Leaves before the first token, just after it (while pages are handed over), or later; what it had by then."""
    run = Run(spec, Answer())
    run.gateway = clients.gateway()
    task = asyncio.create_task(clients.send(run))
    moment = clients.chance.randrange(3)
    if moment:
        end = time.monotonic() + FIRST_TOKEN_TIMEOUT_S
        while not run.answer.arrivals and not task.done():
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.002)
    longest_s = (0.15, 0.02, 0.4)[moment]
    await asyncio.wait([task], timeout=clients.chance.uniform(0.0, longest_s))
    was_over = task.done()
    task.cancel()
    await asyncio.wait([task])
    if was_over:
        error = task.exception()
        return "finished" if error is None else f"failed: {error!r}"
    if not run.answer.arrivals:
        return "before the first token"
    return ("", "just after it", "decoding")[moment] or "decoding"


async def _held(cluster: FaultCluster) -> dict[str, dict[str, int]]:
    return {
        name: {**dataclasses.asdict(cluster.resources(name)), "tasks": await cluster.num_tasks(name)}
        for name in cluster.programs
    }


async def _settled(cluster: FaultCluster, before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """What is held when it has gone down to what it was, or after some seconds."""
    end = time.monotonic() + 10.0
    while True:
        held = await _held(cluster)
        is_settled = all(
            held[name][what] <= before[name][what] for name in before for what in ("fds", "rings", "tasks")
        )
        if is_settled or time.monotonic() > end:
            return held
        await asyncio.sleep(0.2)


async def slow_clients(options: Options) -> Row:
    """200 clients that read one byte a second, compared with 200 that read at once: others' gaps, gateway's memory."""
    number = options.num_trials(200)
    seconds = options.seconds or 8.0
    async with session("slow_clients", options, kv_pages=6144, flags={"decode": ["--max-batch=128"]}) as opened:
        load, cluster = opened.load, opened.cluster
        gateway = cluster.names("gateway")[0]
        for kind in ("fast", "slow"):
            rss = cluster.resources(gateway).rss_kib
            started, first = time.monotonic(), len(load.done)
            readers = [
                asyncio.create_task(_read_slowly(cluster[gateway].http, n, is_slow=kind == "slow"))
                for n in range(number)
            ]
            await asyncio.sleep(seconds)
            now = time.monotonic()
            gaps = [
                gap
                for run in [*load.done[first:], *load.running]
                for gap in _gaps_between(run.answer, started + 1.0, now)
            ]
            opened.row.figures[f"{kind}_itl_p50_ms"] = round(percentile(gaps, 50) * 1000, 1)
            opened.row.figures[f"{kind}_itl_p99_ms"] = round(percentile(gaps, 99) * 1000, 1)
            opened.row.figures[f"{kind}_gateway_rss_added_mib"] = round(
                (cluster.resources(gateway).rss_kib - rss) / 1024, 1
            )
            for reader in readers:
                reader.cancel()
            results = await asyncio.gather(*readers, return_exceptions=True)
            failures = [result for result in results if isinstance(result, Exception)]
            opened.row.problems += [f"{kind} reader: {error!r}" for error in failures[:3]]
            await asyncio.sleep(1.0)
        opened.row.trials = number
    return opened.row


async def _read_slowly(address: str, number: int, *, is_slow: bool) -> None:
    body = {
        "prompt": f"def f{number}(",
        "max_tokens": 350,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "logprobs": 3,
    }
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, http_request("POST", "/v1/completions", msgspec.json.encode(body)))
        while await loop.sock_recv(sock, 1 if is_slow else 65536):
            if is_slow:
                await asyncio.sleep(1.0)


def _gaps_between(answer: Answer, start: float, end: float) -> list[float]:
    gaps = []
    for index in answer.choices:
        times = [time_s for time_s, choice, _ in answer.arrivals if choice == index and start <= time_s <= end]
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    return gaps


POISON_TOKEN = 2047
QUARANTINED = ("request_quarantined", "workers have died of this request")
"""The code over HTTP, the message over gRPC."""
MAX_DEATHS = 4
"""Three, and one more where it could not be kept apart from another suspect."""


async def poison(options: Options) -> Row:
    """A request that ends every worker which computes it is given up after three of them; its neighbours are not."""
    plan = {"poison": POISON_TOKEN}
    plans = {f"{role}-{n}": plan for role in ("prefill", "decode") for n in range(3)}
    async with session("poison", options, prefill=3, decode=3, plans=plans) as opened:
        cluster, row = opened.cluster, opened.row

        async def one() -> int:
            since = {name: cluster[name].log.stat().st_size for name in cluster.workers}
            error = await _poisoned(opened.clients, row.trials, is_http=row.trials % 2 == 0)
            died = [
                name
                for name in cluster.workers
                if any(line.startswith("faults: poisoned") for line in cluster.lines(name, since[name]))
            ]
            if not any(words in error for words in QUARANTINED):
                row.problems.append(f"the poisoned request ended with: {error}")
            if len(died) > MAX_DEATHS:
                row.problems.append(f"it took {len(died)} workers down: {died}")
            for name in died:
                await cluster.replace(name)
            await cluster.ready()
            return len(died)

        await trials(opened, options.num_trials(2), one)
    return opened.row


async def _poisoned(clients: Clients, number: int, *, is_http: bool) -> str:
    """Sends a poisoned prompt that was not seen before; how it ended."""
    gateway = clients.gateway()
    prompt = [POISON_TOKEN, *range(300 + number, 340 + number)]
    try:
        async with asyncio.timeout(60):
            if is_http:
                body = {"prompt": prompt, "max_tokens": 20, "stream": True}
                await http_generate(clients.cluster[gateway].http, body, Answer())
            else:
                message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(max_tokens=20))
                message.token_ids.ids.extend(prompt)
                await grpc_generate(clients.channel(gateway), message, Answer())
    except (Refused, Broken, TimeoutError) as error:
        return str(error) or repr(error)
    return "an answer"


async def busy_neighbour(options: Options) -> Row:
    """`tandem up` beside a program that computes on every core: nothing is lost, tokens get their share of the time."""
    options.say(f"busy_neighbour: seed {options.seed}")
    row = Row("busy_neighbour", trials=1)
    with tempfile.TemporaryDirectory(prefix="tandem-faults-") as folder, running_cluster(f"--log-dir={folder}") as up:
        found = await beside_busy_program(
            up,
            Path(folder, "gateway.log"),
            seconds=options.seconds or BUSY_S,
            chance=random.Random(f"{options.seed} busy_neighbour"),
        )
    row.answers, row.lost, row.different = found.num_answers, found.failures.total(), len(found.different)
    row.problems += [f"lost: {number} x {status}" for status, number in found.failures.items()]
    row.problems += [f"different: {what}" for what in found.different[:3]]
    row.problems += [f"worker lost: {what}" for what in found.lost_workers[:3]]
    row.figures |= {
        "tpot_alone_ms": round(found.alone_s * 1e3, 2),
        "tpot_beside_ms": round(found.beside_s * 1e3, 2),
        "factor": round(found.factor, 1),
        "worst_ttft_ms": round(found.worst_ttft_s * 1e3),
        "workers_lost": len(found.lost_workers),
    }
    if found.factor > 2 * FAIR_FACTOR:
        row.problems.append(
            f"a token took {found.factor:.1f} times as long; a fair share of the cores is {FAIR_FACTOR:g}"
        )
    return row


def _difference(run: Run, reference: Reference) -> str:
    """Where an answer differs from the undisturbed one."""
    expected, got = reference.outcomes[run.spec.number], run.answer.outcome()
    names = ("index", "token ids", "text", "finish reason", "logprobs")
    for wanted, found in zip(expected[0], got[0], strict=False):
        for name, left, right in zip(names, wanted, found, strict=True):
            if left != right:
                one, other = str(left), str(right)
                at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
                return f"{run.answer.request_id} {name} at {at}: {one[at:][:60]!r} became {other[at:][:60]!r}"
    return f"{run.answer.request_id}: {expected[1:]} became {got[1:]} ({len(expected[0])}, {len(got[0])} choices)"


Case = Callable[[Options], Awaitable[Row]]

CASES: dict[str, Case] = {
    "kill_decode": kill_decode,
    "kill_prefill": kill_prefill,
    "kill_both": kill_both,
    "crash_loop": crash_loop,
    "role_changes": role_changes,
    "stop_decode_short": stop_decode_short,
    "stop_prefill_short": stop_prefill_short,
    "stop_decode_long": stop_decode_long,
    "stop_prefill_long": stop_prefill_long,
    "reset": reset,
    "blackhole": blackhole,
    "slow_network": slow_network,
    "partition": partition,
    "corruption": corruption,
    "redis_kill": redis_kill,
    "redis_flush": redis_flush,
    "redis_freeze": redis_freeze,
    "gateway_kill": gateway_kill,
    "rolling_restart": rolling_restart,
    "cancels": cancels,
    "slow_clients": slow_clients,
    "poison": poison,
    "busy_neighbour": busy_neighbour,
}
