"""A cluster of which every program has a machine of its own, Redis and the clients too.

The process that opens a bed is the clients' machine from then on: it moves into that machine's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import redis

from services.cluster.embedded_redis import EmbeddedRedis, _binary
from tests.certificates import Authority
from tests.faults.client import speak_tls
from tests.faults.harness import START_TIMEOUT_S, FaultCluster
from tests.machines.network import Machine, Network, NotPermitted, enter

CLIENTS, REDIS = "clients", "redis"
HTTP_PORT, GRPC_PORT, REDIS_PORT = 8000, 50051, 6379
ENTER = ("nsenter", "setpriv", "mount")
"""Programs of util-linux that the bed calls, beside `ip` of iproute2."""
HOSTS = Path("/etc/hosts")
_CLONE_NEWNS = 0x00020000


class MachineRedis(EmbeddedRedis):
    """A Redis on a machine of its own, over TCP, with a password."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(port=REDIS_PORT)
        self._machine = machine
        self._password = secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{self._machine.address}:{REDIS_PORT}"

    @contextlib.contextmanager
    def another_password(self) -> Iterator[None]:
        """Refuses the password that everybody has, and ends the connections that were made with it."""
        other = secrets.token_urlsafe(16)
        with redis.Redis.from_url(self.url, socket_timeout=START_TIMEOUT_S) as ours:
            ours.config_set("requirepass", other)
            ours.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            try:
                yield
            finally:
                ours.config_set("requirepass", self._password)

    def flush(self) -> None:
        """Forgets everything."""
        with redis.Redis.from_url(self.url, socket_timeout=START_TIMEOUT_S) as client:
            client.flushall()

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        assert self._process is None
        arguments = ["--save", "", "--bind", self._machine.address, "--port", str(REDIS_PORT)]
        enter_and_die = ["nsenter", f"--net={self._machine.path}", "setpriv", "--pdeathsig", "KILL", _binary()]
        self._process = subprocess.Popen(
            [*enter_and_die, *arguments, "--requirepass", self._password],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + timeout_s
        with redis.Redis.from_url(self.url, socket_connect_timeout=1.0, retry=None) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.RedisError:
                    if time.monotonic() > end or not self.is_running():
                        self.kill()
                        raise
                time.sleep(0.05)


@dataclass
class Bed(FaultCluster):
    """G gateways, P prefill and D decode workers, a Redis and the clients, each on a machine of its own."""

    gateways: int = 2
    network: Network = field(kw_only=True)
    stale: frozenset[str] = frozenset()
    """Placements of gateways that were killed before; they expire."""
    has_tls: bool = False
    """Mutual TLS between all, with certificates for the names of the machines, by which all are dialled then."""

    def __enter__(self) -> Self:
        self.netns = {name: machine.path for name, machine in self.network.machines.items()}
        self._certificates = tempfile.TemporaryDirectory(prefix="tandem-certificates-")
        self._authority = Authority(Path(self._certificates.name))
        try:
            super().__enter__()
        except BaseException:
            self._certificates.cleanup()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._certificates.cleanup()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        if name == REDIS:
            os.kill(self.redis.pid, number)
        else:
            super().kill(name, number)

    async def active_placements(self) -> list[str]:
        return [placement for placement in await super().active_placements() if placement not in self.stale]

    async def replace(self, name: str) -> None:
        if name == REDIS:
            self.redis.kill()
            self.redis.start()
        else:
            await super().replace(name)

    def _make_redis(self) -> EmbeddedRedis:
        return MachineRedis(self.network.machines[REDIS])

    def _define(self) -> None:
        common = [f"--redis={self.redis.url}", f"--model={self.model}"]
        for index in range(self.gateways):
            name, host = self._host("gateway", index)
            own = [f"--http-host={host}", f"--http-port={HTTP_PORT}", f"--grpc-host={host}", f"--grpc-port={GRPC_PORT}"]
            program = self._add("gateway", index, [*common, *own, "--ttft-target-s=0", *self._tls("gateway", name)])
            program.http, program.grpc = f"{name}:{HTTP_PORT}", f"{name}:{GRPC_PORT}"
            if self.has_tls:
                speak_tls(program.http, self._authority.path)
                speak_tls(program.grpc, self._authority.path)
        for role, count in (("prefill", self.prefill), ("decode", self.decode)):
            for index in range(count):
                name, host = self._host(role, index)
                own = [f"--id={role}-{index}", f"--host={host}", f"--kv-pages={self.kv_pages}", "--threads=1"]
                own += [f"--advertise-host={name}", *self._tls(role, name)] if self.has_tls else ["--insecure"]
                self._add(role, index, [*common, *own, "--transport=tcp"])

    def _host(self, role: str, index: int) -> tuple[str, str]:
        """How others dial a machine, and where it listens."""
        machine = self.network.machines[f"{role}-{index}"]
        return (machine.name if self.has_tls else machine.address), machine.address

    def _tls(self, role: str, name: str) -> list[str]:
        if not self.has_tls:
            return []
        files = self._authority.issue(name, roles=(role,), hosts=(name,))
        return [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]


def machine_names(*, gateways: int = 2, prefill: int = 2, decode: int = 2) -> list[str]:
    """Returns the machines of a bed with these numbers of programs."""
    counted = {"gateway": gateways, "prefill": prefill, "decode": decode}
    return [CLIENTS, REDIS, *(f"{role}-{n}" for role, count in counted.items() for n in range(count))]


def become_clients(network: Network) -> None:
    """Moves this process, which must not have any other thread yet, to the clients' machine.

    It and what it starts know the machines by name. Raises NotPermitted.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("other threads of this process would stay on the machine on which they began")
    enter(network.machines[CLIENTS].path)
    know_names(network)


def know_names(network: Network) -> None:
    """This process and what it starts see another /etc/hosts from now on. Raises NotPermitted."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise NotPermitted(f"unshare(CLONE_NEWNS) failed: {os.strerror(ctypes.get_errno())}")
    with tempfile.NamedTemporaryFile("w") as file:  # mounted, it stays until the last of these processes has ended
        os.chmod(file.name, 0o644)
        for arguments in (["--make-rprivate", "/"], ["--bind", file.name, str(HOSTS)]):
            done = subprocess.run(["mount", *arguments], capture_output=True, text=True, timeout=10, check=False)
            if done.returncode != 0:
                raise NotPermitted(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    write_names(network)


def write_names(network: Network, *, silent: Collection[str] = ()) -> None:
    """Writes the mounted /etc/hosts. Names in `silent` have a second address, which comes first and never answers."""
    lines = ["127.0.0.1 localhost"]
    for machine in network.machines.values():
        addresses = [*([machine.silent_address] if machine.name in silent else []), machine.address]
        lines += [f"{address} {machine.name}" for address in addresses]
    HOSTS.write_text("\n".join([*lines, ""]))
