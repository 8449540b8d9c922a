"""A primary, its replica and three sentinels, as processes of the embedded server's program."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from services.cluster.embedded_redis import _LAUNCHER, _binary
from tests.free_ports import free_port
from tests.limited_redis import GUIDE, PASSWORD, USER, documented_rules
from tests.waiting import HANG_LIMIT_S

SERVICE = "tandem"
ADMIN = "admin"
"""May do everything, and needs no password."""
START_TIMEOUT_S = HANG_LIMIT_S
PERIODS_MS = {"info-period": 500, "publish-period": 100, "ask-period": 100}
"""A tenth or less of what the sentinels wait by default, so that a failover and the return of a server take little."""


class SentinelSet:
    """`url` is what programs are given; the sentinels want a password of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.servers = [free_port(), free_port()]
        self.sentinels = [free_port() for _ in range(3)]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{USER}:{PASSWORD}@{hosts}/{SERVICE}?sentinel_password={PASSWORD}s"

    @property
    def primary(self) -> int:
        """Port of the primary, as the sentinels see it. Raises RedisError."""
        with redis.Redis(port=self.sentinels[0], password=f"{PASSWORD}s", socket_timeout=1.0) as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def start(self) -> None:
        for port in self.servers:
            self.start_server(port, is_replica=port != self.servers[0])
        for port in self.sentinels:
            file = self._folder / f"{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\nrequirepass {PASSWORD}s\nsentinel sentinel-pass {PASSWORD}s\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0]} 2\n"
                f"sentinel auth-user {SERVICE} sentinel\nsentinel auth-pass {SERVICE} {PASSWORD}\n"
                f"sentinel down-after-milliseconds {SERVICE} 1000\n"
                f"sentinel failover-timeout {SERVICE} 4000\n"
            )
            self._run(port, str(file), "--sentinel")
        end = time.monotonic() + START_TIMEOUT_S
        while not all(self._knows_all(port) for port in self.sentinels):
            assert time.monotonic() < end, "the sentinels do not find each other"
            time.sleep(0.1)
        for port in self.sentinels:
            with redis.Redis(port=port, password=f"{PASSWORD}s") as client:
                client.execute_command("SENTINEL", "DEBUG", *itertools.chain(*PERIODS_MS.items()))

    def start_server(self, port: int, *, is_replica: bool) -> None:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--masteruser", "replica"]
        users = {USER: documented_rules()} | {name: _documented(name) for name in ("replica", "sentinel")}
        arguments += ["--user", "default", "off", "--user", ADMIN, "on", "nopass", "~*", "&*", "+@all"]
        for name, rules in users.items():
            arguments += ["--user", name, "on", f">{PASSWORD}", *rules]
        of = ["--replicaof", "127.0.0.1", str(self.servers[0])] if is_replica else []
        self._run(port, *arguments, "--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0", *of)

    def kill(self, port: int, number: signal.Signals = signal.SIGKILL) -> None:
        self._processes[port].send_signal(number)

    def failed_over(self, from_port: int) -> None:
        """Waits until the sentinels name another primary. Raises AssertionError."""
        end = time.monotonic() + HANG_LIMIT_S
        while self.primary == from_port:
            assert time.monotonic() < end, "there is no other primary"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _run(self, port: int, *arguments: str) -> None:
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), _binary()]
        with open(self._folder / f"{port}.log", "wb") as log:
            self._processes[port] = subprocess.Popen([*launcher, *arguments], cwd=self._folder, stdout=log, stderr=log)

    def _knows_all(self, port: int) -> bool:
        try:
            with redis.Redis(port=port, password=f"{PASSWORD}s", socket_timeout=1.0) as client:
                state = client.sentinel_masters()[SERVICE]
        except redis.RedisError:
            return False
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1 and state["is_master"])


def _documented(name: str) -> list[str]:
    found = re.search(rf"^user {name} on >PASSWORD (.+)$", GUIDE.read_text(), re.MULTILINE)
    assert found, f"the guide has no user {name}"
    return found[1].split()


@contextlib.contextmanager
def sentinel_set() -> Iterator[SentinelSet]:
    """Three sentinels that watch a primary and a replica."""
    with tempfile.TemporaryDirectory(prefix="tandem-sentinels-") as folder:
        found = SentinelSet(Path(folder))
        try:
            found.start()
            yield found
        finally:
            found.close()
