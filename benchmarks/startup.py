"""What a start takes, part by part: `python -m benchmarks.startup [--rounds 5] [--starts 3] [--json FILE]`.

Each part runs in a fresh interpreter, again and again in turn; the least of its rounds is what it takes on a machine
that has nothing else to do. Then whole clusters are started. The first one finds no compiled kernels, the second one
all that the first has left; from then on they are alike. A cluster's processes import and load side by side, so the
floor of its start is what has to be done before they begin, and then all their processor time over the cores.

Bytecode is what makes the most of it: an interpreter that finds none compiles torch anew, each time where
PYTHONDONTWRITEBYTECODE is set. `--without-bytecode` shows that.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from demo import DEMO_MODEL

LIMIT_S = 10.0
"""What a second start may take."""

# The engine's own parts are timed inside, after the imports that they need.
_ENGINE = """
import json, resource, sys, time
def used():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
def measured(what):
    begin, cpu = time.perf_counter(), used()
    result = what()
    parts.append([time.perf_counter() - begin, used() - cpu])
    return result
parts = []
import torch
torch.set_num_threads(1)
from services.engine.engine import load_engine, load_warm_engine
from services.engine.kernels.library import load_kernels
measured(load_kernels)
measured(lambda: load_engine(sys.argv[1]))
measured(lambda: load_warm_engine(sys.argv[1]))
print(json.dumps(parts))
"""
_REDIS = """
import json, time
from services.cluster.embedded_redis import EmbeddedRedis
begin, cpu = time.perf_counter(), time.process_time()
server = EmbeddedRedis()
server.start()
print(json.dumps([[time.perf_counter() - begin, time.process_time() - cpu]]))
server.stop()
"""
IMPORTS = {
    "interpreter": "pass",
    "import torch": "import torch",
    "import tandem up": "import cli.main, cli.up",
    "import gateway": "import gateway.__main__",
    "import prefill worker": "import prefill_worker.__main__",
    "import decode worker": "import decode_worker.__main__",
}


@dataclass(frozen=True)
class Part:
    """The least that a part took."""

    name: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Start:
    """One start of a cluster: until its line `ready`, and the processor time of its processes until then."""

    ready_s: float
    cpu_s: Mapping[str, float]


def run(code: str, *arguments: str) -> tuple[float, float, str]:
    """Wall and processor seconds of a fresh interpreter, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin_s = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    wall_s = time.perf_counter() - begin_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result.stdout


def measure_parts(rounds: int) -> list[Part]:
    """Every part, in turn."""
    least: dict[str, tuple[float, float]] = {}

    def note(name: str, wall_s: float, cpu_s: float) -> None:
        known = least.get(name, (float("inf"), float("inf")))
        least[name] = (min(known[0], wall_s), min(known[1], cpu_s))

    for _ in range(rounds):
        for name, code in IMPORTS.items():
            note(name, *run(code)[:2])
        names = ("find kernels", "load model", "load model, warm up")
        for name, (wall_s, cpu_s) in zip(names, json.loads(run(_ENGINE, str(DEMO_MODEL))[2]), strict=True):
            note(name, wall_s, cpu_s)
        note("embedded redis", *json.loads(run(_REDIS)[2])[0])
    return [Part(name, *figures) for name, figures in least.items()]


def measure_start(cache: str) -> Start:
    """A cluster with the demo model, ended as soon as it is ready. `cache` is where compiled kernels are kept."""
    command = [sys.executable, "-m", "cli.main", "up", "--http-port", "0", "--grpc-port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    begin_s = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None, "it is a pipe"
    with process.stdout:
        try:
            line = process.stdout.readline()
            ready_s = time.perf_counter() - begin_s
            if not line.startswith("ready "):
                raise SystemExit("the cluster did not become ready")
            return Start(ready_s, {_name(pid): _cpu_s(pid) for pid in _processes(process.pid)})
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _processes(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in _processes(int(child)))]


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "-m" not in words:
        return Path(words[0].split()[0]).name
    module = words[words.index("-m") + 1]
    return "tandem up" if module == "cli.main" else module


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of the parts")
    parser.add_argument("--starts", type=int, default=3, help="of whole clusters, after a first one")
    parser.add_argument("--without-bytecode", action="store_true", help="as where none was ever written")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as folder:
        if arguments.without_bytecode:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        parts = measure_parts(arguments.rounds)
        print(f"{'part':24}{'wall s':>8}{'cpu s':>8}  (least of {arguments.rounds})")
        for part in parts:
            print(f"{part.name:24}{part.wall_s:8.2f}{part.cpu_s:8.2f}")
        starts = []
        for number in range(1 + arguments.starts):
            start = measure_start(folder)
            starts.append(start)
            cpu = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.cpu_s.items())
            print(f"start {number + 1}: ready after {start.ready_s:.2f} s; cpu s: {cpu}")
    best_s = min(start.ready_s for start in starts[1:])
    floor_s = min(sum(start.cpu_s.values()) for start in starts[1:]) / len(os.sched_getaffinity(0))
    print(f"least of the starts after the first: {best_s:.2f} s, {best_s / LIMIT_S:.2f} of the limit of {LIMIT_S:g} s")
    print(f"all processor time over {len(os.sched_getaffinity(0))} cores: {floor_s:.2f} s")
    if arguments.json:
        figures = {"parts": [asdict(part) for part in parts], "starts": [asdict(start) for start in starts]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
