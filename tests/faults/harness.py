"""A cluster whose every process can be killed, stopped, cut off and started again. Nothing of it outlives this process.

Not through `tandem up`, whose supervisor waits before it starts a program again.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis.asyncio

from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.keys import Keys
from services.cluster.placements import ACTIVE
from services.runtime.process import DIE_WITH_PARENT_ENV
from tests.faults.client import Broken, Refused, http_json
from tests.free_ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "demo" / "model"
CLUSTER = "default"
START_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 20.0


class Nursery:
    """A process of `tests.faults.nursery`."""

    def __init__(self) -> None:
        environment = dict(os.environ, **{DIE_WITH_PARENT_ENV: str(os.getpid())})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
        )
        self._buffer = b""
        self._answer(START_TIMEOUT_S)

    def start(self, **order: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._answer(10.0)["pid"])

    def close(self) -> None:
        """Ends it and, because they end with their parent, everything that it started."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise RuntimeError("the nursery does not answer")
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise RuntimeError("the nursery ended")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Program:
    """One program of the cluster; its process may be another one each time it is started."""

    name: str
    role: str
    arguments: list[str]
    log: Path
    plan: dict[str, Any] | None = None
    netns: str = ""
    pid: int = 0
    http: str = ""
    grpc: str = ""

    @property
    def is_alive(self) -> bool:
        return self.pid != 0 and _state_of(self.pid) not in ("", "Z", "X")


@dataclass
class Resources:
    """What a process holds of the system."""

    fds: int
    threads: int
    rings: int
    """Mappings of shared-memory rings."""
    rss_kib: int
    pool_kib: int
    """The part of it that is the page pool's, whose memory is taken as its pages are used for the first time."""


@dataclass
class FaultCluster:
    """G gateways, P prefill and D decode workers and a Redis, as processes of this machine.

    `flags` are further arguments by role; `plans` are faults by program name (see `faulty_worker`).
    """

    gateways: int = 1
    prefill: int = 2
    decode: int = 2
    kv_pages: int = 640
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    plans: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    worker_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further arguments by program name."""
    netns: Mapping[str, str] = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    """By how many seconds the wall clocks of programs are ahead."""
    model: Path = DEMO_MODEL
    changes_roles: bool = False
    """Whether workers are programs that can change their role."""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-faults-"))
        self.redis = self._make_redis()
        self.programs: dict[str, Program] = {}
        self.keep_logs = False
        try:
            self.nursery = Nursery()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        try:
            self.redis.start()
            self._define()
            for name in self.programs:
                self.start(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pids = [program.pid for program in self.programs.values() if program.is_alive]
        self.nursery.close()
        self.redis.stop()
        end = time.monotonic() + 5.0
        while any(_state_of(pid) not in ("", "Z", "X") for pid in pids) and time.monotonic() < end:
            time.sleep(0.01)
        if error is None and not self.keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            sys.stderr.write(f"logs are kept in {self.folder}\n")

    def names(self, role: str) -> list[str]:
        """Programs of a role: gateway, prefill or decode."""
        return [name for name, program in self.programs.items() if program.role == role]

    @property
    def workers(self) -> list[str]:
        return self.names("prefill") + self.names("decode")

    def __getitem__(self, name: str) -> Program:
        return self.programs[name]

    def start(self, name: str) -> int:
        """Starts a program that does not run."""
        program = self.programs[name]
        package = program.role if program.role == "gateway" else f"{program.role}_worker"
        if self.changes_roles and program.role != "gateway":
            package = "dual_worker"
        program.pid = self.nursery.start(
            program=package,
            arguments=program.arguments,
            log=str(program.log),
            plan=program.plan,
            netns=program.netns,
            clock_ahead_s=self.clocks.get(name, 0.0),
        )
        return program.pid

    def set_role(self, name: str, role: str) -> None:
        """Tells a worker which role it is to have; `ready` waits until it has it."""
        (self.folder / f"{name}.role").write_text(role)
        self.programs[name].role = role

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a program's process."""
        os.kill(self.programs[name].pid, number)

    async def ended(self, name: str, *, timeout_s: float = 30.0) -> None:
        """Waits until a program's process is gone. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.programs[name].is_alive:  # noqa: ASYNC110 - the process is not ours to wait for
                await asyncio.sleep(0.01)

    async def replace(self, name: str) -> None:
        """Kills what is left of a program and starts it again."""
        if self.programs[name].is_alive:
            self.kill(name)
        await self.ended(name)
        self.start(name)

    async def ready(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until every gateway sees every worker as it was started last. Raises RuntimeError."""
        end = time.monotonic() + timeout_s
        seen: Any = None
        while True:
            seen = [await self._missing(name) for name in self.names("gateway")]
            if not any(seen):
                return
            dead = [name for name, program in self.programs.items() if not program.is_alive]
            if dead or time.monotonic() > end:
                tails = {name: self.programs[name].log.read_text()[-1500:] for name in dead}
                raise RuntimeError(f"not ready: {seen}; ended: {tails}")
            await asyncio.sleep(0.05)

    async def _missing(self, gateway: str) -> list[str]:
        try:
            topology = await self.topology(gateway)
        except (Broken, Refused, TimeoutError) as error:
            return [f"{gateway}: {error!r}"]
        found = {worker["id"]: worker for worker in topology["workers"]}
        return [
            f"{gateway}: {name}"
            for name in self.workers
            if name not in found or found[name]["state"] != "ready" or not self._is_current(found[name])
        ]

    def _is_current(self, worker: Mapping[str, Any]) -> bool:
        """Whether a worker that a gateway sees is the process that was started last, in the role that it is to have."""
        program = self.programs[worker["id"]]
        return bool((worker["pid"], worker["role"]) == (program.pid, program.role))

    async def topology(self, gateway: str | None = None) -> Any:
        """`/cluster` of a gateway."""
        return await http_json(self.programs[gateway or self.names("gateway")[0]].http, "/cluster")

    async def leaks(self, *, timeout_s: float = SETTLE_TIMEOUT_S) -> list[str]:
        """Waits until nothing runs, and says which pages are then not free."""
        end = time.monotonic() + timeout_s
        while True:
            found = []
            for gateway in self.names("gateway"):
                topology = await self.topology(gateway)
                if topology["requests"] != {"queued": 0, "running": 0}:
                    found.append(f"{gateway} has {topology['requests']}")
                found += [
                    f"{worker['id']} {worker['pages']} running {worker['running']} waiting {worker['waiting']}"
                    for worker in topology["workers"]
                    if not _is_free(worker)
                ]
            if not found or time.monotonic() > end:
                return found
            await asyncio.sleep(0.05)

    async def active_placements(self) -> list[str]:
        """Requests that Redis holds for running ones. Those of a killed gateway stay until they expire."""
        keys = Keys(CLUSTER)
        async with redis.asyncio.Redis.from_url(self._admin_url(), decode_responses=True) as client:
            found = []
            async for key in client.scan_iter(match=glob.escape(keys.request_prefix) + "*", count=1000):
                state = str(await client.hget(key, "state") or "")
                if state in ACTIVE:
                    found.append(f"{key.removeprefix(keys.request_prefix)} is {state}")
            return found

    def resources(self, name: str) -> Resources:
        """What a program's process holds now."""
        pid = self.programs[name].pid
        status = Path(f"/proc/{pid}/status").read_text()
        rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        maps = Path(f"/proc/{pid}/maps").read_text()
        return Resources(
            fds=len(os.listdir(f"/proc/{pid}/fd")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            rings=maps.count("memfd:tandem-ring"),
            rss_kib=rss,
            pool_kib=_largest_kib(Path(f"/proc/{pid}/smaps").read_text()),
        )

    async def num_tasks(self, name: str) -> int:
        """asyncio tasks of a program, told by the nursery's signal handler."""
        program = self.programs[name]
        start = program.log.stat().st_size
        self.kill(name, signal.SIGUSR1)
        async with asyncio.timeout(60):
            while True:
                for line in self.lines(name, start):
                    if line.startswith("faults: tasks "):
                        return int(line.split()[2])
                await asyncio.sleep(0.02)

    def lines(self, name: str, start: int = 0) -> list[str]:
        """Whole lines of a program's log from a byte position on."""
        with self.programs[name].log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace").split("\n")[:-1]

    def _admin_url(self) -> str:
        """Returns the address with a user of Redis that may look at all keys."""
        return self.redis.url

    def _make_redis(self) -> EmbeddedRedis:
        return EmbeddedRedis()

    def _define(self) -> None:
        common = [f"--redis={self.redis.url}", f"--model={self.model}"]
        for index in range(self.gateways):
            http, grpc = free_port(), free_port()
            # How busy the machine is must not look like a lost answer.
            own = [f"--http-port={http}", f"--grpc-port={grpc}", "--ttft-target-s=0"]
            program = self._add("gateway", index, [*common, *own])
            program.http, program.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        for role, count in (("prefill", self.prefill), ("decode", self.decode)):
            for index in range(count):
                own = [f"--id={role}-{index}", "--threads=1", f"--kv-pages={self.kv_pages}"]
                if self.changes_roles:
                    own += [f"--role={role}", f"--role-file={self.folder / f'{role}-{index}.role'}"]
                self._add(role, index, [*common, *own, "--metrics-port=0"])

    def _add(self, role: str, index: int, arguments: list[str]) -> Program:
        name = f"{role}-{index}"
        log = self.folder / f"{name}.log"
        log.touch()
        extra = [*self.flags.get(role, ()), *self.worker_flags.get(name, ())]
        program = Program(name, role, [*arguments, *extra], log, self.plans.get(name), self.netns.get(name, ""))
        self.programs[name] = program
        return program


def _is_free(worker: Mapping[str, Any]) -> bool:
    pages = worker["pages"]
    is_whole = pages["free"] + pages["cached"] == pages["total"] and pages["reserved"] == pages["used"] == 0
    return bool(is_whole and worker["running"] == worker["waiting"] == 0)


def _largest_kib(smaps: str) -> int:
    """Returns what is resident of a process's largest mapping that has neither file nor name: of a worker, its pool."""
    found = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ 00:00 0 *\nSize: +(\d+) kB\n(?:.*\n)*?Rss: +(\d+) kB$", smaps, re.M
    )
    return int(max(found, key=lambda pair: int(pair[0]))[1]) if found else 0


def _state_of(pid: int) -> str:
    """Returns the letter of a process's state; empty: it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
