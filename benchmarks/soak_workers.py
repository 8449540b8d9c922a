"""Simulated workers in one process, for `gateway_soak`.

Their records, leases, published pages, and session servers are real.
"""

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import redis
import uvloop

from benchmarks.registry import worker_record
from benchmarks.soak_sessions import SIMULATED, WorkersEnd
from services.cluster.prefix_index import KEY_BYTES, PrefixPublisher
from services.cluster.registry import LEASE_BEAT_S, WorkerLease
from services.cluster.secret import _SHARE
from services.runtime import process
from services.runtime.cluster_secret import Secrets

NUM_MODELS = 4
CHANGE_S = 2.0
"""Time between changes of a random worker's state."""
PAGES_PER_WORKER = 64
BATCH = 25
"""Number of workers whose beats are sent together."""
SHARE_DIGEST = _SHARE.digest


def serve(url: str, cluster: str, socket: Path, *, num_workers: int) -> None:
    """Runs the workers until SIGTERM."""
    process.die_with_parent()
    uvloop.run(_serve(url, cluster, socket, num_workers))


async def _serve(url: str, cluster: str, socket: Path, num_workers: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    leases = _Leases(url, cluster, Secrets())
    for number in range(num_workers):
        record = worker_record(number)
        model, address = f"bench-{number // 2 % NUM_MODELS}", f"{record.incarnation}{SIMULATED}"
        leases.add(msgspec.structs.replace(record, model=model, address=address, max_running=256))
    sessions = WorkersEnd()
    await sessions.listen(socket)
    leases.start()
    await stop.wait()


class _Leases:
    """Renews the leases and pages of all workers once a second, as the workers' threads do.

    The product's own objects generate the commands. If a worker's record has not changed, its commands are sent again
    unchanged. Commands of BATCH workers are sent together, because thousands of threads in one process are too slow.
    """

    def __init__(self, url: str, cluster: str, secrets: Secrets) -> None:
        self._url, self._cluster, self._secrets = url, cluster, secrets
        self._client = redis.Redis.from_url(url)
        self._recorder = _Recorder(self._client)
        self._workers: list[tuple[Any, Any]] = []
        self._commands: list[list[tuple[Any, ...]]] = []
        self._random = random.Random(1)

    def add(self, record: Any) -> None:
        """Adds a worker."""
        lease: Any = WorkerLease(self._url, cluster=self._cluster, record=record, secrets=self._secrets)
        publisher: Any = PrefixPublisher(self._url, cluster=self._cluster, record=record)
        lease._client = publisher._client = self._recorder
        publisher.note([self._random.randbytes(KEY_BYTES) for _ in range(PAGES_PER_WORKER)])
        self._workers.append((lease, publisher))
        self._commands.append([])

    def start(self) -> None:
        """Starts to renew, on a thread."""
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        with contextlib.suppress(redis.RedisError):  # Redis ends at the end of the run
            for index in range(len(self._workers)):
                self._record(index)
                if index % (4 * BATCH) == 0:
                    self._send(range(index))
            self._renew_all()

    def _record(self, index: int) -> None:
        """Sends a worker's record and pages. Stores the commands for the next beats."""
        lease, publisher = self._workers[index]
        publisher._publish()
        self._recorder.sent.clear()
        lease._renew()
        publisher._publish()  # without news: a beat
        self._commands[index] = [command for command in self._recorder.sent if command[0] != SHARE_DIGEST]

    def _send(self, indexes: Iterable[int]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for index in indexes:
            for command in self._commands[index]:
                pipeline.evalsha(*command)
        pipeline.execute()

    def _renew_all(self) -> None:
        changed_at_s, drained = time.monotonic(), 0
        starts = range(0, len(self._workers), BATCH)
        while True:
            began_s = time.monotonic()
            for start in starts:
                self._send(range(start, min(start + BATCH, len(self._workers))))
                due_s = began_s + LEASE_BEAT_S * (start + BATCH) / len(self._workers)
                time.sleep(max(0.0, due_s - time.monotonic()))
            if time.monotonic() - changed_at_s >= CHANGE_S:
                changed_at_s = time.monotonic()
                self._change(drained, "ready")
                drained = self._random.randrange(len(self._workers))
                self._change(drained, "draining")

    def _change(self, index: int, state: str) -> None:
        lease, publisher = self._workers[index]
        lease.update(state=state, running=self._random.randrange(64), pages_free=self._random.randrange(10_000))
        publisher.note([self._random.randbytes(KEY_BYTES)], list(publisher._held)[:1])
        self._record(index)


class _Recorder:
    """A Redis client that records the scripts that it runs."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client
        self.sent: list[tuple[Any, ...]] = []

    def evalsha(self, *command: Any) -> Any:
        """Runs a script that Redis has loaded, and records the command."""
        self.sent.append(command)
        return self._client.evalsha(*command)

    def eval(self, *command: Any) -> Any:
        """Runs a script that Redis has not loaded."""
        return self._client.eval(*command)
