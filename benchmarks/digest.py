"""What the digest of the handoff costs: time to first and second token with it and without it, in one run.

Two clusters of one prefill and one decode worker run side by side and get the same prompts in turn, so that what else
happens on the machine happens to both. In one of them xxh3 is replaced by a constant on both sides, by this launcher
only: the product has no switch for it.

    python -m benchmarks.digest [--pairs 60]
"""

import argparse
import asyncio
import contextlib
import importlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec

from benchmarks.cluster import Answer, collect, request
from protos import inference_pb2_grpc
from services.cluster.embedded_redis import EmbeddedRedis
from services.runtime import process

MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
PROMPT_TOKENS = (256, 768)
WARM_UP_PAIRS = 5
READY_TIMEOUT_S = 60.0
MAX_RATIO = 1.03


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digest", description=__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="requests to each cluster for each length of prompt")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    settings = parser.parse_args()
    with _cluster("digest", ()) as with_digest, _cluster("no-digest", (__spec__.name, "--worker")) as without:
        results = asyncio.run(_measure(with_digest, without, settings.pairs, random.Random(settings.seed)))
    report(results)


def report(results: dict[int, list[tuple[Answer, Answer]]]) -> None:
    """Prints medians with and without, their ratio, and what hashing alone must cost."""
    bytes_per_s = hash_bytes_per_s()
    print(f"xxh3-128 of one core here: {bytes_per_s / 1e9:.1f} GB/s")
    columns = ("time to", "with", "without", "ratio", "paired")
    print(f"{'prompt':>8} {'KV':>9} {'2 hashes':>9}  {{:<13}}{{:>9}} {{:>9}} {{:>6}} {{:>8}}".format(*columns))
    for num_tokens, pairs in results.items():
        num_bytes = num_tokens * _kv_bytes_per_token()
        hashes_ms = 2 * num_bytes / bytes_per_s * 1e3
        for name, index in (("first token", 0), ("second token", 1)):
            times = [(_arrival_s(one, index), _arrival_s(other, index)) for one, other in pairs]
            with_ms, without_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            paired_ms = 1e3 * statistics.median(one - other for one, other in times)
            ratio = with_ms / without_ms
            verdict = "" if index else f"  at most {MAX_RATIO}: {'yes' if ratio <= MAX_RATIO else 'NO'}"
            print(
                f"{num_tokens:>8} {num_bytes / 2**20:>5.2f} MiB {hashes_ms:>6.2f} ms  {name:<13}{with_ms:>6.2f} ms "
                f"{without_ms:>6.2f} ms {ratio:>6.3f} {paired_ms:>5.2f} ms{verdict}"
            )


def hash_bytes_per_s() -> float:
    """Best of several runs of the digest over a frame's worth of memory."""
    import xxhash

    frame = random.Random(0).randbytes(2**20)
    best_s = min(_timed(lambda: xxhash.xxh3_128_digest(frame)) for _ in range(200))
    return len(frame) / best_s


async def _measure(
    with_digest: str, without: str, num_pairs: int, chance: random.Random
) -> dict[int, list[tuple[Answer, Answer]]]:
    results: dict[int, list[tuple[Answer, Answer]]] = {num_tokens: [] for num_tokens in PROMPT_TOKENS}
    async with grpc.aio.insecure_channel(with_digest) as one, grpc.aio.insecure_channel(without) as other:
        stubs = (inference_pb2_grpc.InferenceStub(one), inference_pb2_grpc.InferenceStub(other))
        for number in range(WARM_UP_PAIRS + num_pairs):
            for num_tokens in PROMPT_TOKENS:
                prompt = [chance.randrange(300, 2000) for _ in range(num_tokens)]
                message = request(prompt, max_tokens=3, temperature=0.0, ignore_eos=True)
                order = (0, 1) if number % 2 else (1, 0)
                answers = {which: await collect(stubs[which], message) for which in order}
                if answers[0].token_ids != answers[1].token_ids:
                    raise AssertionError("the digest changes the answer")
                if number >= WARM_UP_PAIRS:
                    results[num_tokens].append((answers[0], answers[1]))
    return results


def _arrival_s(answer: Answer, index: int) -> float:
    """When the token with this index came, in seconds since the request was sent."""
    num_tokens = 0
    for time_s, count in answer.arrivals_s:
        num_tokens += count
        if num_tokens > index:
            return time_s
    raise AssertionError("the answer is shorter than asked for")


@contextlib.contextmanager
def _cluster(name: str, launcher: tuple[str, ...]) -> Iterator[str]:
    """The gRPC address of a cluster whose workers are started by `launcher`, or as they are."""
    environment = dict(os.environ, TANDEM_DIE_WITH_PARENT=str(os.getpid()))
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-digest-") as folder, EmbeddedRedis() as redis:
        log = Path(folder) / "log"

        def start(*arguments: str) -> None:
            common = (f"--model={MODEL}", f"--redis={redis.url}", f"--cluster={name}")
            with log.open("ab") as output:
                command = [sys.executable, "-m", *arguments, *common]
                children.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))

        http_port, grpc_port = free_port(), free_port()
        try:
            for role in ("prefill", "decode"):
                worker = ("--threads=1", "--kv-pages=512", f"--id={role}-0")
                start(*launcher, f"{role}_worker", *worker)
            start("gateway", f"--http-port={http_port}", f"--grpc-port={grpc_port}", "--min-prefill=1")
            _wait_until_ready(f"http://127.0.0.1:{http_port}/ready", children, log)
            yield f"127.0.0.1:{grpc_port}"
        finally:
            for child in children:
                child.kill()
                child.wait()


def free_port() -> int:
    """A port that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, children: list[subprocess.Popen[bytes]], log: Path) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and all(child.poll() is None for child in children):
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return
        time.sleep(0.1)
    raise RuntimeError(f"a cluster did not become ready:\n{log.read_text()[-3000:]}")


def run_worker_without_digest(program: str, arguments: list[str]) -> None:
    """Runs a worker's own main in this process, with a digest that looks at nothing."""
    from kv_transfer import receive_thread as placing
    from kv_transfer import send_thread as posting
    from kv_transfer.protocol import messages

    class Nothing:
        def __init__(self, data: Any = b"") -> None:
            pass

        def update(self, data: Any) -> None:
            pass

        def digest(self) -> bytes:
            return bytes(messages.DIGEST_BYTES)

    blind = types.SimpleNamespace(xxh3_128=Nothing, xxh3_128_digest=lambda data: bytes(messages.DIGEST_BYTES))
    for module in (messages, placing, posting):
        # Only there: the fingerprint of the checkpoint is made with the same library.
        if not hasattr(module, "xxhash"):
            raise RuntimeError(f"{module.__name__} no longer hashes with xxhash")
        vars(module)["xxhash"] = blind
    sys.argv = [program, *arguments]
    process.run(importlib.import_module(f"{program}.__main__").main)


def _kv_bytes_per_token() -> int:
    config = msgspec.json.decode((MODEL / "config.json").read_bytes())
    num_bytes = {"bfloat16": 2, "float16": 2, "float32": 4}[config["torch_dtype"]]
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * num_bytes)


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker_without_digest(sys.argv[2], sys.argv[3:])
    main()
