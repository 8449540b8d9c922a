"""A cluster of which every program has a machine of its own, Redis and the clients too.

The process that opens a bed is the clients' machine from then on: it moves into that machine's namespace.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from dataclasses import dataclass, field
from typing import Self

import redis

from services.cluster.embedded import EmbeddedRedis, _binary
from tests.faults.harness import START_TIMEOUT_S, FaultCluster
from tests.machines.network import Machine, Network, enter

CLIENTS, REDIS = "clients", "redis"
HTTP_PORT, GRPC_PORT, REDIS_PORT = 8000, 50051, 6379
ENTER = ("nsenter", "setpriv")
"""Programs of util-linux that the bed calls, beside `ip` of iproute2."""


class MachineRedis(EmbeddedRedis):
    """A Redis on a machine of its own, over TCP, with a password."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(port=REDIS_PORT)
        self._machine = machine
        self._password = secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{self._machine.address}:{REDIS_PORT}"

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

    network: Network = field(kw_only=True)

    def __enter__(self) -> Self:
        self.netns = {name: machine.path for name, machine in self.network.machines.items()}
        super().__enter__()
        return self

    def _make_redis(self) -> EmbeddedRedis:
        return MachineRedis(self.network.machines[REDIS])

    def _define(self) -> None:
        common = [f"--redis={self.redis.url}", f"--model={self.model}"]
        for index in range(self.gateways):
            host = self._address("gateway", index)
            own = [f"--http-host={host}", f"--http-port={HTTP_PORT}", f"--grpc-host={host}", f"--grpc-port={GRPC_PORT}"]
            program = self._add("gateway", index, [*common, *own, "--ttft-target-s=0"])
            program.http, program.grpc = f"{host}:{HTTP_PORT}", f"{host}:{GRPC_PORT}"
        for role, count in (("prefill", self.prefill), ("decode", self.decode)):
            for index in range(count):
                own = [f"--id={role}-{index}", f"--host={self._address(role, index)}", "--transport=tcp", "--insecure"]
                self._add(role, index, [*common, *own, "--threads=1", f"--kv-pages={self.kv_pages}"])

    def _address(self, role: str, index: int) -> str:
        return self.network.machines[f"{role}-{index}"].address


def machine_names(*, gateways: int = 2, prefill: int = 2, decode: int = 2) -> list[str]:
    """The machines of a bed with so many programs."""
    counted = {"gateway": gateways, "prefill": prefill, "decode": decode}
    return [CLIENTS, REDIS, *(f"{role}-{n}" for role, count in counted.items() for n in range(count))]


def become_clients(network: Network) -> None:
    """Moves this process, which must not have any other thread yet, to the clients' machine."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("other threads of this process would stay on the machine on which they began")
    enter(network.machines[CLIENTS].path)
