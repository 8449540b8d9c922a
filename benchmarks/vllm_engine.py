"""This project with vLLM in its workers, beside vLLM's own prefill and decode apart, and beside one vLLM server.

    .venv-vllm/bin/python -m benchmarks.vllm_engine --peers FOLDER [--json FILE]

The same requests go to each of the three in turn, round after round. Each worker has a core of its own; the single
server has both. Whether answers agree is not asked here: `make test-vllm` does.

Then, one prompt of 2,000 tokens after the other is handed over on each channel: computed in one step, of which nothing
is sent before its end, for what a handoff takes; and in steps of the usual size, for the part that computing does not
hide. NIXL's figures are those that vLLM's decode server tells; it begins when the prompt has been computed.

FOLDER has what vLLM's own way needs beside vLLM (`pip install --no-deps --target FOLDER nixl==1.5.1 nixl-cu12==1.5.1
mooncake-transfer-engine-non-cuda==0.3.13.post1`); the proxy of the last one is vLLM's example. With vLLM's build for
CPUs, whose distribution is not called vllm, it also needs a folder `vllm-0.32.0+cpu.dist-info` with a METADATA of that
name and version, without which `vllm serve` does not start. Without --peers, only ours and the single server run.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import running_cluster
from benchmarks.load import Endpoint, Timing, ask_in_turn, ours, percentile
from benchmarks.random_model import FIRST_TOKEN_ID, make_served_model
from benchmarks.report import Ratio, add_arguments, leave

PROMPT_TOKENS, NEW_TOKENS = 1024, 64
AT_ONCE = 4
AIM = 1.5
START_TIMEOUT_S = 180.0
KV_BYTES = 1 << 30
HANDOFF_TOKENS, HANDOFF_ANSWER_TOKENS = 2000, 16
ONE_STEP, NO_TARGET = "--chunk-tokens=2048", "--ttft-target-s=0"
CHANNELS = ("shm", "tcp")
EXPOSED, NIXL = "tandem_handoff_exposed_seconds", "vllm:nixl_xfer_time_seconds"
TASKSET = shutil.which("taskset") or "taskset"
PROXY = "mooncake/vllm_v1_proxy_server.py"
System = tuple[Endpoint, str]
"""Where prompts go, and the address of the metrics that tell of handoffs."""


def main() -> None:
    """Measures, prints, and writes the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the packages of vLLM's own prefill and decode")
    parser.add_argument("--requests", type=int, default=16, help="requests of a round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, of which medians are printed; 0: handoffs only")
    parser.add_argument("--handoffs", type=int, default=10, help="long prompts on each channel; 0: rounds only")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="the two cores")
    add_arguments(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        model = make_served_model(Path(folder), "float32")
        figures = {name: [] for name in ("ours", "pair", "single")}  # type: dict[str, list[dict[str, float]]]
        for number in range(arguments.rounds):
            for name, found in figures.items():
                if name != "pair" or arguments.peers is not None:
                    found.append(measure(name, model, arguments, number))
                    print(name, json.dumps(found[-1]), flush=True)
        costs = handoffs(model, arguments) if arguments.handoffs else {}
    medians = {name: _medians(found) for name, found in figures.items() if found}
    rates = {name: found["requests_per_s"] for name, found in medians.items()}
    ratios = {"over one server": Ratio(rates["ours"] / rates["single"])} if rates else {}
    if "pair" in rates:
        ratios["over its own pair"] = Ratio(rates["ours"] / rates["pair"], AIM)
    for name, ratio in ratios.items():
        print(f"requests/s {name}: {ratio.value:.2f}" + ("" if ratio.aim is None else f" (aim {ratio.aim})"))
    leave(arguments, "vllm_engine", {"rounds": figures, "medians": medians, "handoffs": costs}, ratios)


def measure(name: str, model: Path, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Starts one of the three, asks it the requests of a round, and ends it."""
    systems = {"ours": _ours, "pair": _pair, "single": _single}
    began_s = time.monotonic()
    with systems[name](model, arguments) as (endpoint, _):
        start_s = time.monotonic() - began_s
        uvloop.run(_ask(endpoint, AT_ONCE, seed=1000 + seed))  # what is compiled with the first requests
        answers, seconds = uvloop.run(_ask(endpoint, arguments.requests, seed=seed))
    failures = [answer.failure for answer in answers if answer.failure or answer.num_tokens != NEW_TOKENS]
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed, the first one: {failures[0] or 'it is too short'}")
    gaps = [gap for answer in answers for gap in answer.itls_s]
    return {
        "requests_per_s": len(answers) / seconds,
        "ttft_p50_s": percentile([answer.ttft_s for answer in answers], 50),
        "ttft_p99_s": percentile([answer.ttft_s for answer in answers], 99),
        "gap_p50_ms": 1e3 * percentile(gaps, 50),
        "gap_p99_ms": 1e3 * percentile(gaps, 99),
        "start_s": start_s,
    }


def handoffs(model: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns and prints what the handoff of a long prompt takes on each channel, in ms, medians."""
    found = {}

    def note(channel: str, whole_ms: float, exposed_ms: float) -> None:
        figures = {"whole_ms": whole_ms, "not_hidden_ms": exposed_ms, "share_not_hidden": exposed_ms / whole_ms}
        found[channel] = figures
        print(f"{HANDOFF_TOKENS} tokens by {channel}:", json.dumps(figures), flush=True)

    for channel in CHANNELS:
        with _ours(model, arguments, f"--transport={channel}", ONE_STEP) as system:
            whole_ms = _handoff_ms(*system, EXPOSED, arguments.handoffs)
        with _ours(model, arguments, f"--transport={channel}") as system:
            note(channel, whole_ms, _handoff_ms(*system, EXPOSED, arguments.handoffs))
    if arguments.peers is not None:
        with _pair(model, arguments) as system:
            whole_ms = _handoff_ms(*system, NIXL, arguments.handoffs)
        note("nixl", whole_ms, whole_ms)
    return found


def _handoff_ms(endpoint: Endpoint, metrics: str, name: str, number: int) -> float:
    """Returns the median of a histogram's increases from one prompt to the next; the first prompt is not counted."""
    taken_ms, chance = [], random.Random(number)
    before_s = 0.0
    for index in range(number + 1):
        prompt = [chance.randrange(FIRST_TOKEN_ID, 4000) for _ in range(HANDOFF_TOKENS)]
        answer = uvloop.run(endpoint.ask(prompt, HANDOFF_ANSWER_TOKENS))
        if answer.failure:
            raise RuntimeError(f"a request failed: {answer.failure}")
        _wait_until(lambda count=index: _sum_of(metrics, f"{name}_count") > count)  # type: ignore[misc]  # a default binds the count of this turn
        after_s = _sum_of(metrics, f"{name}_sum")
        taken_ms.append(1e3 * (after_s - before_s))
        before_s = after_s
    return statistics.median(taken_ms[1:])


def _sum_of(metrics: str, name: str) -> float:
    with urllib.request.urlopen(metrics, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[{{ ]", line))


async def _ask(endpoint: Endpoint, num_requests: int, *, seed: int) -> tuple[list[Timing], float]:
    chance = random.Random(seed)

    async def ask() -> Timing:
        prompt = [chance.randrange(FIRST_TOKEN_ID, 4000) for _ in range(PROMPT_TOKENS)]
        return await endpoint.ask(prompt, NEW_TOKENS)

    return await ask_in_turn(ask, num_requests=num_requests, num_at_once=AT_ONCE)


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


@contextlib.contextmanager
def _ours(model: Path, arguments: argparse.Namespace, *more: str) -> Iterator[System]:
    # The others refuse nothing either, however slow the machine is.
    flags = ("--engine=vllm", "--dtype=float32", f"--kv-memory={KV_BYTES}", "--local-prefill-tokens=0", NO_TARGET)
    with running_cluster(*flags, *more, model=model) as cluster:  # it gives each worker a core
        yield ours(cluster.http), f"{cluster.http}/metrics"


@contextlib.contextmanager
def _single(model: Path, arguments: argparse.Namespace) -> Iterator[System]:
    port = _free_port()
    with _server(model, arguments, arguments.cores, port):
        yield _endpoint(model, port), f"http://127.0.0.1:{port}/metrics"


@contextlib.contextmanager
def _pair(model: Path, arguments: argparse.Namespace) -> Iterator[System]:
    first, second = arguments.cores
    ports, port = (_free_port(), _free_port()), _free_port()
    proxy = [sys.executable, str(arguments.peers / PROXY), "--host", "127.0.0.1", "--port", str(port)]
    for option, number in zip(("--prefiller", "--decoder"), ports, strict=True):
        proxy += [f"{option}-hosts", "127.0.0.1", f"{option}-ports", str(number)]
    with (
        _server(model, arguments, (first,), ports[0], is_one_of_two=True),
        _server(model, arguments, (second,), ports[1], is_one_of_two=True),
        _program(proxy, {}, arguments.cores),
    ):
        _wait_until(lambda: _answers(port, "/healthcheck"))
        yield _endpoint(model, port), f"http://127.0.0.1:{ports[1]}/metrics"


def _endpoint(model: Path, port: int) -> Endpoint:
    def body(prompt: Sequence[int], num_tokens: int) -> Mapping[str, Any]:
        wanted = {"model": str(model), "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0}
        return wanted | {"ignore_eos": True, "stream": True, "return_token_ids": True}

    return Endpoint(f"http://127.0.0.1:{port}/v1/completions", body)


@contextlib.contextmanager
def _server(
    model: Path, arguments: argparse.Namespace, cores: Sequence[int], port: int, *, is_one_of_two: bool = False
) -> Iterator[None]:
    """Runs `vllm serve` on these cores, and returns when it answers."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64"]
    command += ["--no-enable-prefix-caching", "--enforce-eager"]
    bound = ",".join(map(str, cores))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": bound.replace(",", "-") if len(cores) > 1 else bound,
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if is_one_of_two:
        settings = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        command += ["--kv-transfer-config", json.dumps(settings)]
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())}
        environment |= {"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": "lo"}
    if arguments.peers is not None:
        paths = filter(None, (str(arguments.peers), os.environ.get("PYTHONPATH")))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    with _program(command, environment, cores) as process:
        _wait_until(lambda: _answers(port, "/health"), process)
        yield


@contextlib.contextmanager
def _program(
    command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program on these cores, and ends it with all that it has started."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [TASKSET, "-c", ",".join(map(str, cores)), *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until(has_come: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while not has_come():
        if time.monotonic() > end_s or (process is not None and process.poll() is not None):
            raise RuntimeError("a server did not start")
        time.sleep(0.25)


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
