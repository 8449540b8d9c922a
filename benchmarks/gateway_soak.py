"""Runs one gateway beside thousands of simulated workers and tenants, and measures whether it keeps its bounds.

    python -m benchmarks.gateway_soak [--workers 4000] [--tenants 1000] [--minutes 10] [--explain]

These parts are real: Redis, the gateway's process with its background tasks, the workers' records, leases, and
published pages, the session server of each worker, the tenants' keys and limits in Redis, and the requests. Two parts
are simulated. The engines respond at once with made-up tokens. One Unix socket replaces gRPC between the gateway and
the workers, because thousands of gRPC servers need more than two cores.

The run checks three bounds. Redis' slowest command takes at most 5 ms of elapsed time (SLOWLOG). The longest pause of
the gateway's event loop is at most 50 ms of its thread's CPU time. The gateway's resident memory grows by less than
1 MiB per minute after the second minute. Redis runs with real-time priority if that is permitted. The report lists the
start separately, which ends when all workers are ready.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from benchmarks.gateway import _free_port
from benchmarks.redis_scripts import scripts
from benchmarks.soak_load import key_of, offer
from benchmarks.soak_workers import NUM_MODELS, serve
from services.cluster.embedded_redis import EmbeddedRedis

MODEL = Path(__file__).parent.parent / "demo" / "model"
ITSELF = "benchmarks.gateway_soak"
CLUSTER = "soak"
MAX_COMMAND_MS, MAX_PAUSE_MS, MAX_GROWTH_MIB = 5.0, 50.0, 1.0
SETTLING_MINUTES = 2
READY_TIMEOUT_S = 900.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Runs the command line. Its hidden roles are the processes of one run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_soak", description=__doc__)
    parser.add_argument("--workers", type=int, default=4000, help="number of workers, half of them prefill workers")
    parser.add_argument("--tenants", type=int, default=1000, help="number of tenants, each with a key and limits")
    parser.add_argument("--minutes", type=int, default=10, help="length of the measurement")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second of all tenants together")
    parser.add_argument("--explain", action="store_true", help="sample the stack of the event loop in long pauses")
    parser.add_argument("--role", choices=("run", "workers", "load"), default="run", help=argparse.SUPPRESS)
    parser.add_argument("--redis", default="", help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "workers":
        serve(arguments.redis, CLUSTER, arguments.socket, num_workers=arguments.workers)
    elif arguments.role == "load":
        offer(arguments.port, num_tenants=arguments.tenants, num_models=NUM_MODELS, per_s=arguments.rate)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all processes are ended
        with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
            return run(arguments, Path(folder))
    return 0


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Starts all processes, measures, and prints the figures. Returns 1 if a bound is exceeded, and 0 otherwise."""
    (folder / "keys.toml").write_text("".join(map(_key, range(arguments.tenants))))
    (folder / "models.toml").write_text("".join(map(_model, range(NUM_MODELS))))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(server.pid, os.SCHED_FIFO, os.sched_param(1))
        client = stack.enter_context(redis.Redis.from_url(server.url))
        client.config_set("slowlog-log-slower-than", 500)
        client.config_set("slowlog-max-len", 4096)
        workers = (f"--redis={server.url}", f"--workers={arguments.workers}", f"--socket={folder / 'sessions'}")
        stack.enter_context(_process(ITSELF, "--role=workers", *workers))
        port = _free_port()
        probe = ("benchmarks.soak_probe", str(folder / "pauses.jsonl"), "explain" if arguments.explain else "measure")
        gateway = stack.enter_context(_process(*probe, *_flags(folder, server.url, port)))
        began_s = time.monotonic()
        _await_ready(port, arguments.workers)
        print(f"{arguments.workers} workers were ready after {time.monotonic() - began_s:.0f} s", flush=True)
        stack.enter_context(
            _process(
                ITSELF,
                "--role=load",
                "--port",
                str(port),
                "--tenants",
                str(arguments.tenants),
                "--rate",
                str(arguments.rate),
            )
        )
        start = _Pauses(folder).read()
        print(
            f"longest pause of the start {start.max_ms:.0f} ms, {start.cpu_s:.0f} s of the loop's CPU time", flush=True
        )
        rows = list(_minutes(arguments.minutes, client, server.pid, gateway.pid, _Pauses(folder)))
        print(_state(port), flush=True)
        print(f"requests: {_requests(port)}", flush=True)
    return _judge(rows)


def _flags(folder: Path, redis_url: str, port: int) -> list[str]:
    flags = ["--models", str(folder / "models.toml"), "--api-keys", str(folder / "keys.toml"), "--cluster", CLUSTER]
    flags += ["--redis", redis_url, "--grpc-port", "0", "--http-port", str(port), "--log-level", "info"]
    return [*flags, "--drain-s", "1", "--rebalance", "--queue-strategy", "fair"]


def _key(tenant: int) -> str:
    digest = hashlib.sha256(key_of(tenant).encode()).hexdigest()
    limits = "requests_per_minute = 600\ntokens_per_minute = 1000000\nconcurrency = 8\n"
    admin = "admin = true\n" if tenant == 0 else ""
    return f'[[key]]\nsha256 = "{digest}"\ntenant = "t{tenant}"\n{admin}\n[tenant.t{tenant}]\n{limits}\n'


def _model(number: int) -> str:
    return f'[[model]]\nname = "bench-{number}"\npath = "{MODEL}"\n\n'


@contextlib.contextmanager
def _process(module: str, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-m", module, *flags])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _get(port: int, path: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    request.add_header("authorization", f"Bearer {key_of(0)}")
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())


def _await_ready(port: int, num_workers: int) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    states: Counter[str] = Counter()
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            states = Counter(worker["state"] for worker in json.loads(_get(port, "/cluster"))["workers"])
            if states["ready"] + states["draining"] >= num_workers:
                return
        time.sleep(5.0)
    raise TimeoutError(f"only {dict(states)} of {num_workers} workers were ready after {READY_TIMEOUT_S:g} s")


class _Pauses:
    """Reads the rows that the gateway's probe has added since the last read."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "pauses.jsonl"
        self._offset = 0
        self.max_ms = self.cpu_s = 0.0
        self.stacks: list[str] = []

    def read(self) -> "_Pauses":
        """Reads the rows up to the end of the file. Returns this object."""
        with self._file.open() as opened:
            opened.seek(self._offset)
            rows = [json.loads(line) for line in opened.read().splitlines()]
            self._offset = opened.tell()
        self.max_ms = max((row["max_ms"] for row in rows), default=0.0)
        self.cpu_s = sum(row["cpu_s"] for row in rows)
        self.stacks = [stack for row in rows for stack in row["stacks"]]
        return self


def _minutes(
    minutes: int, client: "redis.Redis", redis_pid: int, gateway_pid: int, pauses: _Pauses
) -> Iterator[dict[str, float]]:
    """Prints and yields the figures of each minute."""
    names = {script.digest: name for name, script in scripts().items()}
    print("minute  slowest command  longest pause  loop CPU  Redis CPU  resident")
    pauses.read()
    for minute in range(1, minutes + 1):
        client.slowlog_reset()
        redis_s, began_s = _cpu_s(redis_pid), time.monotonic()
        time.sleep(60.0)
        elapsed_s = time.monotonic() - began_s
        slow = max(client.slowlog_get(4096), key=lambda entry: entry["duration"], default=None)
        pauses.read()
        row = {
            "command_ms": slow["duration"] / 1000 if slow else 0.0,
            "pause_ms": pauses.max_ms,
            "resident_mib": _resident_bytes(gateway_pid) / 2**20,
        }
        print(
            f"{minute:>6}{row['command_ms']:>14.2f} ms{row['pause_ms']:>12.1f} ms{pauses.cpu_s / elapsed_s:>10.1%}"
            f"{(_cpu_s(redis_pid) - redis_s) / elapsed_s:>11.1%}{row['resident_mib']:>8.1f} MiB"
            f"  {_name(slow, names)}",
            flush=True,
        )
        for stack, count in Counter(pauses.stacks).most_common(5):
            print(f"        {count} x {stack}", flush=True)
        yield row


def _name(slow: dict[str, Any] | None, names: dict[str, str]) -> str:
    if slow is None:
        return ""
    words = [word.decode(errors="replace") for word in slow["command"].split()[:2]]
    return names.get(words[-1], " ".join(words)[:60])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def _state(port: int) -> str:
    cluster = json.loads(_get(port, "/cluster"))
    states = Counter(worker["state"] for worker in cluster["workers"])
    troubles = Counter(trouble["kind"] for trouble in cluster["troubles"])
    return f"workers: {dict(states)}; troubles: {dict(troubles)}; redis: {cluster['redis']}"


def _requests(port: int) -> dict[str, float]:
    """Returns the gateway's own counts of responses by outcome."""
    found: Counter[str] = Counter()
    for line in _get(port, "/metrics").decode().splitlines():
        if line.startswith(("tandem_requests_total{", "tandem_refused_requests_total{")):
            found[line.rpartition(" ")[0].replace('model="', "").partition(",le=")[0]] += float(line.rpartition(" ")[2])
    return dict(found)


def _judge(rows: list[dict[str, float]]) -> int:
    """Prints each bound with its figure. Returns 1 if a bound is exceeded, and 0 otherwise."""
    settled = [row["resident_mib"] for row in rows[SETTLING_MINUTES - 1 :]]
    growth = statistics.linear_regression(range(len(settled)), settled).slope if len(settled) > 1 else 0.0
    figures = [
        ("slowest command of Redis", max(row["command_ms"] for row in rows), MAX_COMMAND_MS, "ms"),
        ("longest pause of the event loop", max(row["pause_ms"] for row in rows), MAX_PAUSE_MS, "ms of CPU time"),
        ("growth of resident memory", growth, MAX_GROWTH_MIB, "MiB a minute"),
    ]
    for name, figure, bound, unit in figures:
        print(f"{name}: {figure:.2f} {unit} (at most {bound:g}): {'kept' if figure <= bound else 'BROKEN'}")
    return int(any(figure > bound for _, figure, bound, _ in figures))


if __name__ == "__main__":
    sys.exit(main())
