"""What an attack is given, and what it says: a cluster with two tenants, and rows of what was expected and happened.

Attacks are in modules of this package whose names begin with `on_`. They send bounded traffic, to this machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gateway.access.keys import digest_of_key, new_key

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
MIB = 2**20
MOST_GROWTH_MIB = 64
"""Above stated bounds, while something is sent."""
LEFT_MIB = 16
"""What may be left of it after BACK_S."""
BACK_S = 5.0
ADMIN, VICTIM, ATTACKER = "admin", "victim", "attacker"
"""Names in `Target.keys`; the latter two are tenants too."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `held`: whether Tandem kept its promise; None: not tried, and `happened` says why."""

    what: str
    expected: str
    happened: str
    held: bool | None


@dataclass
class Target:
    """A running cluster. `keys` are API keys by ADMIN, VICTIM and ATTACKER; empty: it asks for none."""

    http: str
    grpc: str
    keys: dict[str, str] = field(default_factory=dict)
    gateway_pid: int = 0
    """0: not a process of this machine that we may look at."""
    up_pid: int = 0
    """The `tandem up` that was started for the attacks; 0: the cluster is somebody else's."""

    def client(self, who: str = "", *, timeout_s: float = 60.0) -> httpx.AsyncClient:
        """An HTTP client that shows the key of `who`; without one, none."""
        headers = {"authorization": f"Bearer {self.keys[who]}"} if who and self.keys else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.http, headers=headers, timeout=timeout_s, limits=limits, trust_env=False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the HTTP API, for raw sockets."""
        url = httpx.URL(self.http)
        assert url.port is not None
        return url.host, url.port

    def rss_mib(self) -> float:
        """Resident memory of the gateway."""
        return rss_mib(self.gateway_pid)


@dataclass(frozen=True, slots=True)
class Attack:
    """`run` says what it saw. `findings`: numbers of the table in docs/security.md.

    `flags` are those of `tandem up` that it wants beyond the keys. `alone`: it starts what it needs itself, or leaves a
    cluster in a state in which nothing else should be tried on it.
    """

    name: str
    findings: tuple[int, ...]
    run: Callable[[Target], Awaitable[Sequence[Row]]]
    flags: tuple[str, ...] = ()
    has_keys: bool = True
    alone: bool = False


ATTACKS: dict[str, Attack] = {}


def attack(
    *findings: int, flags: Sequence[str] = (), has_keys: bool = True, alone: bool = False
) -> Callable[[Callable[[Target], Awaitable[Sequence[Row]]]], Callable[[Target], Awaitable[Sequence[Row]]]]:
    """Makes a function an attack of the same name."""

    def register(run: Callable[[Target], Awaitable[Sequence[Row]]]) -> Callable[[Target], Awaitable[Sequence[Row]]]:
        name = run.__name__
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, findings, run, tuple(flags), has_keys, alone)
        return run

    return register


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def memory_row(
    target: Target, what: str, flood: Callable[[], Awaitable[int]], *, bound_mib: int = 0, kept_mib: int = 0
) -> Row:
    """What the gateway's memory grows by while `flood` sends bytes, whose number it returns, and BACK_S after it.

    `bound_mib`: what it may hold of them, as the documents say; `kept_mib`: what it may keep for a while after it.
    """
    before = most = target.rss_mib()
    task = asyncio.ensure_future(flood())
    while not task.done():
        most = max(most, target.rss_mib())
        await asyncio.wait((task,), timeout=0.02)
    sent_mib = await task / MIB
    until_s = time.monotonic() + BACK_S
    most_left_mib = kept_mib + LEFT_MIB
    while (after := target.rss_mib()) > before + most_left_mib and time.monotonic() < until_s:  # noqa: ASYNC110 - memory tells no event
        await asyncio.sleep(0.1)
    held = most - before < bound_mib + MOST_GROWTH_MIB and after - before <= most_left_mib
    expected = f"at most +{bound_mib + MOST_GROWTH_MIB} MiB, +{most_left_mib} after {BACK_S:g} s"
    happened = f"took {sent_mib:.0f} MiB, +{most - before:.0f} MiB at most, {after - before:+.0f} MiB after it"
    return Row(what, expected, happened, held)


@contextlib.asynccontextmanager
async def cluster(
    *flags: str, has_keys: bool = True, environment: dict[str, str] | None = None
) -> AsyncIterator[Target]:
    """A `tandem up` of the demo model with these flags. With keys: tenants VICTIM and ATTACKER, and an ADMIN key."""
    with tempfile.TemporaryDirectory(prefix="tandem-attack-") as folder:
        keys = {who: new_key() for who in (ADMIN, VICTIM, ATTACKER)} if has_keys else {}
        given = ["--http-port=0", "--grpc-port=0", *flags]
        if has_keys:
            file = Path(folder, "keys.toml")
            file.write_text("".join(_key_entry(who, key) for who, key in keys.items()))
            file.chmod(0o600)
            given.append(f"--api-keys={file}")
        log = Path(folder, "up.log")
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "cli.main", "up", *given,
                stdout=asyncio.subprocess.PIPE, stderr=errors, cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            )  # fmt: skip
        try:
            http, grpc = await _ready(process, log)
            pid = next(pid for pid in _children_of(process.pid) if _module_of(pid) == "gateway")
            yield Target(http, grpc, keys, gateway_pid=pid, up_pid=process.pid)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def worker_pids(target: Target) -> dict[str, int]:
    """Processes of the workers of a cluster of our own, by their names."""
    found = {}
    for pid in _children_of(target.up_pid):
        if (_module_of(pid) or "").endswith("_worker"):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            found[next(a.removeprefix("--id=") for a in arguments if a.startswith("--id="))] = pid
    return found


async def _ready(process: asyncio.subprocess.Process, log: Path) -> tuple[str, str]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            async for line in process.stdout:
                words = line.decode().split()
                if words and words[0] == "ready":
                    found = dict(word.split("=", 1) for word in words[1:])
                    return found["http"], found["grpc"]
    except TimeoutError:
        pass
    raise RuntimeError(f"the cluster did not start: {log.read_text(errors='replace')[-2000:]}")


def _key_entry(who: str, key: str) -> str:
    tenant = who if who != ADMIN else "operator"
    admin = "admin = true\n" if who == ADMIN else ""
    return f"[[key]]\nsha256 = {json.dumps(digest_of_key(key))}\ntenant = {json.dumps(tenant)}\n{admin}"


def _children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _module_of(pid: int) -> str | None:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return arguments[arguments.index("-m") + 1] if "-m" in arguments else None
