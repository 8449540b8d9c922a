"""A whole cluster over HTTP beside other servers on the same cores: `python -m benchmarks.end_to_end [--json FILE]`.

The random Llama of `benchmarks.engine` in float32. Four clients send prompts of 1,024 tokens, no two alike, and read
64 tokens each. Ours is 1P1D, one core each; the others are one process with as many threads:

- `--llama-server FILE`: llama.cpp's server. Its sources are also in the sdist of llama-cpp-python, under vendor/:
  `cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-server`.
- `--openvino PYTHON`: OpenVINO GenAI's continuous batching behind the least of an HTTP server, by the Python of an
  environment with `pip install openvino-genai "optimum-intel[openvino]"`.

All are loaded at first and asked in turn, round by round; ratios are within a round. A system that is not
asked computes nothing.
"""

import argparse
import contextlib
import random
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import running_cluster
from benchmarks.engine import VOCABULARY
from benchmarks.load import Endpoint, Timing, ask_in_turn, ours, percentile
from benchmarks.random_model import FIRST_TOKEN_ID, make_openvino_model, make_served_model, write_gguf
from benchmarks.report import Ratio, add_arguments, leave

OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
PROMPT_TOKENS, NEW_TOKENS, NUM_AT_ONCE, NUM_REQUESTS = 1024, 64, 4, 32
NUM_WARM_UP = 4
AIMS = {"llama-server": 1.45}
"""Requests/s, ours over theirs."""
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Round:
    """What one server did with all requests."""

    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    num_failed: int

    @classmethod
    def of(cls, answers: Sequence[Timing], elapsed_s: float) -> "Round":
        """From the answers and the time that all of them took. Raises SystemExit where none is whole."""
        whole = [answer for answer in answers if not answer.failure]
        if not whole:
            raise SystemExit(f"every request failed; the last one: {answers[-1].failure}")
        ttfts_s = [answer.ttft_s for answer in whole]
        itls_s = [itl_s for answer in whole for itl_s in answer.itls_s]
        return cls(
            len(whole) / elapsed_s,
            percentile(ttfts_s, 50),
            percentile(ttfts_s, 95),
            percentile(itls_s, 50),
            len(answers) - len(whole),
        )


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of everything; medians are printed")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="requests of a round")
    parser.add_argument("--threads", type=int, default=2, help="threads of the other servers")
    parser.add_argument("--llama-server", type=Path, metavar="FILE", help="llama.cpp's server")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="Python of an environment with openvino-genai")
    parser.add_argument("--up", default="", metavar="FLAGS", help='more flags of tandem up, as "--no-pin"')
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        servers = start_servers(arguments, stack)
        rng = random.Random(arguments.seed)
        for name, server in servers.items():
            uvloop.run(run_round(server, rng, NUM_WARM_UP))
            print(f"{name} is warm", flush=True)
        rounds: dict[str, list[Round]] = {name: [] for name in servers}
        for number in range(arguments.rounds):
            for name, server in servers.items():
                rounds[name].append(uvloop.run(run_round(server, rng, arguments.requests)))
                print(f"round {number + 1}: {name:12s} {_shown(rounds[name][-1])}", flush=True)
    ratios = compare(rounds)
    report(rounds, ratios)
    figures = {name: [vars(one) for one in of_server] for name, of_server in rounds.items()}
    leave(arguments, "end_to_end", figures, ratios)


def start_servers(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Endpoint]:
    """All of them, ready; they end with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-")))
    model = make_served_model(folder / "random-llama", "float32")
    cluster = stack.enter_context(running_cluster("--threads", "1", *arguments.up.split(), model=model))
    servers = {"ours": ours(cluster.http)}
    print(f"ours is ready: 1P1D {arguments.up}".rstrip(), flush=True)
    if arguments.llama_server is not None:
        gguf = write_gguf(model, folder / "random-llama.gguf")
        servers["llama-server"] = stack.enter_context(
            llama_server(arguments.llama_server, gguf, folder / "llama-server.log", threads=arguments.threads)
        )
        print("llama-server is ready", flush=True)
    if arguments.openvino is not None:
        exported = make_openvino_model(folder / "for-openvino", arguments.openvino)
        servers["openvino"] = stack.enter_context(
            openvino_server(arguments.openvino, exported, threads=arguments.threads)
        )
        print("openvino is ready", flush=True)
    return servers


@contextlib.contextmanager
def llama_server(program: Path, model: Path, log: Path, *, threads: int) -> Iterator[Endpoint]:
    """llama.cpp's server with a slot for each client. Raises RuntimeError with its log when it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(NUM_AT_ONCE)]
    command += ["--ctx-size", str(NUM_AT_ONCE * (PROMPT_TOKENS + 2 * NEW_TOKENS))]
    url = f"http://127.0.0.1:{port}"

    def body(prompt: Sequence[int], num_tokens: int) -> Mapping[str, Any]:
        wanted = {"prompt": list(prompt), "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
        return wanted | {"stream": True, "return_tokens": True, "cache_prompt": False}

    with log.open("w") as output, _process(command, stdout=output, stderr=subprocess.STDOUT) as process:
        _await(lambda: _is_healthy(url), process, log)
        yield Endpoint(f"{url}/completion", body)


@contextlib.contextmanager
def openvino_server(python: Path, model: Path, *, threads: int) -> Iterator[Endpoint]:
    """`benchmarks/openvino_server.py` in the other environment."""
    # -P: the folder of benchmarks has modules with the names of the standard library's.
    command = [str(python), "-P", str(OPENVINO_SERVER), str(model), "--threads", str(threads)]
    with _process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise RuntimeError(f"the server of OpenVINO ended with {process.wait()}")
        yield Endpoint(f"http://127.0.0.1:{ready[1]}/", lambda prompt, n: {"prompt": list(prompt), "max_tokens": n})


@contextlib.contextmanager
def _process(command: list[str], *, stdout: Any, stderr: Any) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
    try:
        yield process
    finally:
        process.kill()  # it owes nobody anything
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _await(is_ready: Callable[[], bool], process: "subprocess.Popen[str]", log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"llama-server did not become ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def run_round(server: Endpoint, rng: random.Random, num_requests: int) -> Round:
    """All requests of one round. Raises SystemExit where all fail."""

    async def ask() -> Timing:
        prompt = [rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        answer = await server.ask(prompt, NEW_TOKENS)
        if not answer.failure and answer.num_tokens != NEW_TOKENS:
            answer.failure = f"{answer.num_tokens} tokens, not {NEW_TOKENS}"
        return answer

    return Round.of(*await ask_in_turn(ask, num_requests=num_requests, num_at_once=NUM_AT_ONCE))


def compare(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Ratio]:
    """Ours over each other server's, medians of what was taken within a round."""
    ratios = {}
    for name, theirs in rounds.items():
        if name == "ours":
            continue
        pairs = list(zip(rounds["ours"], theirs, strict=True))
        rates = [mine.requests_per_s / other.requests_per_s for mine, other in pairs]
        ratios[f"requests/s over {name}"] = Ratio(statistics.median(rates), AIMS.get(name))
        for field in ("ttft_p50_s", "ttft_p95_s", "itl_p50_s"):
            times = [getattr(mine, field) / getattr(other, field) for mine, other in pairs]
            ratios[f"{field.removesuffix('_s')} over {name}"] = Ratio(statistics.median(times), lower_is_better=True)
    return ratios


def report(rounds: Mapping[str, Sequence[Round]], ratios: Mapping[str, Ratio]) -> None:
    """Medians, then ratios."""
    print(f"\n{PROMPT_TOKENS} tokens in, {NEW_TOKENS} out, {NUM_AT_ONCE} at a time, medians of rounds")
    for name, of_server in rounds.items():
        median = Round(
            *(statistics.median(values) for values in zip(*(vars(o).values() for o in of_server), strict=True))
        )
        print(f"{name:12s} {_shown(median)}")
    for name, ratio in ratios.items():
        aim = "" if ratio.aim is None else f" (aim {ratio.aim:g})"
        print(f"{name:32s} {ratio.value:.2f}{aim}")


def _shown(one: Round) -> str:
    ttfts = f"TTFT p50 {one.ttft_p50_s * 1e3:5.0f} ms, p95 {one.ttft_p95_s * 1e3:5.0f} ms"
    failed = f", {one.num_failed:g} failed" if one.num_failed else ""
    return f"{one.requests_per_s:5.2f} req/s, {ttfts}, ITL p50 {one.itl_p50_s * 1e3:5.1f} ms{failed}"


if __name__ == "__main__":
    main()
