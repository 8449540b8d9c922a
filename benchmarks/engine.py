"""The engine beside its peers on this machine's CPU: `python -m benchmarks.engine [--json FILE]`.

A random Llama (hidden 512, intermediate 1408, 8 layers, 8 heads, 4 KV heads, vocabulary 8192), each engine with the
same weights in a process of its own, all asked in turn. Prefill is a prompt of 1,024 tokens; decode is 64 tokens after
256, for 1, 8 and 32 prompts at once, without the time of the prompts. Ratios are to `generate` of transformers, taken
within a round.

For OpenVINO, make an environment with `pip install openvino-genai "optimum-intel[openvino]"` and name its interpreter:
`--openvino .../bin/python`. The limit at batch 1 is how fast two threads read as many bytes as a step has to.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report import Ratio, add_arguments, leave

PEERS = Path(__file__).with_name("engine_peers.py")
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 512, 1408, 8, 8, 4, 8192
PREFILL_TOKENS, DECODE_CONTEXT, NEW_TOKENS = 1024, 256, 64
BATCHES = (1, 8, 32)
DTYPES = ("float32", "bfloat16")
VLLM_RATIOS = {
    "float32": {"prefill": 2.7, "decode 1": 2.1, "decode 8": 2.8, "decode 32": 2.3},
    "bfloat16": {"prefill": 2.0, "decode 1": 2.3, "decode 8": 3.5, "decode 32": 3.7},
}
"""What vLLM 0.31 on CPU, compiled, reached over transformers 5.23 on another 2-core machine: the least to aim at."""


class Peer:
    """One engine's process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        self.version: str = self._read()["ready"]

    def seconds(self, *, batch: int, prompt: int, new: int) -> float:
        """Returns the seconds in which `batch` prompts of `prompt` tokens are answered with `new` tokens each."""
        assert self._process.stdin is not None
        print(json.dumps({"batch": batch, "prompt": prompt, "new": new}), file=self._process.stdin, flush=True)
        return float(self._read()["seconds"])

    def tokens_per_s(self, what: str) -> float:
        """Returns the tokens/s of "prefill" or "decode N", measured once."""
        kind, _, batch = what.partition(" ")
        if kind == "prefill":
            return PREFILL_TOKENS / self.seconds(batch=1, prompt=PREFILL_TOKENS, new=1)
        prompts_s = self.seconds(batch=int(batch), prompt=DECODE_CONTEXT, new=1)
        all_s = self.seconds(batch=int(batch), prompt=DECODE_CONTEXT, new=NEW_TOKENS)
        return int(batch) * (NEW_TOKENS - 1) / (all_s - prompts_s)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} ended with {self._process.wait()}")


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; `ratio` is to transformers, within each round."""

    dtype: str
    what: str
    engine: str
    tokens_per_s: float
    ratio: float


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of everything; medians are printed")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="which number formats")
    parser.add_argument("--openvino", type=Path, help="the Python of an environment with openvino-genai")
    add_arguments(parser)
    arguments = parser.parse_args()
    results: list[Result] = []
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in arguments.dtypes.split(","):
            model = make_model(Path(folder) / dtype, dtype)
            with running_peers(model, dtype, threads=arguments.threads, openvino=arguments.openvino) as peers:
                results += measure(peers, dtype, arguments.rounds)
            limits[dtype] = measure_limit(dtype, arguments.threads)
            report_limit(dtype, limits[dtype], results)
    figures = {"threads": arguments.threads, "limit_steps_per_s": limits, "results": [*map(asdict, results)]}
    leave(arguments, "engine", figures, ratios(results, limits))


def ratios(results: list[Result], limits: dict[str, float]) -> dict[str, Ratio]:
    """Ours to transformers, and at batch 1 to what the memory allows."""
    found = {}
    for result in results:
        if result.engine == "ours":
            aim = VLLM_RATIOS[result.dtype][result.what]
            found[f"{result.dtype} {result.what} over transformers"] = Ratio(result.ratio, aim)
            if result.what == "decode 1":
                share = result.tokens_per_s / limits[result.dtype]
                found[f"{result.dtype} decode 1 of reading"] = Ratio(share)
    return found


def make_model(folder: Path, dtype: str, **shape: int) -> Path:
    """A checkpoint with random weights; `shape` are fields of `LlamaConfig` that are to differ from the usual ones."""
    usual = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
    }
    config = transformers.LlamaConfig(**usual | shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@contextmanager
def running_peers(model: Path, dtype: str, *, threads: int, openvino: Path | None) -> Iterator[list[Peer]]:
    """A process for each engine, ended with the block."""
    commands = {name: (Path(sys.executable), name, model) for name in ("transformers", "ours")}
    if openvino is not None:
        commands["openvino"] = (openvino, "openvino", export_for_openvino(openvino, model))
    with ExitStack() as stack:
        peers = []
        for name, (python, engine, folder) in commands.items():
            # -P: the folder of benchmarks has modules with the names of the standard library's.
            command = [str(python), "-P", str(PEERS), engine, str(folder), "--dtype", dtype, "--threads", str(threads)]
            environment = os.environ | {"PYTHONPATH": str(PEERS.parents[1])} if name == "ours" else None
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            peers.append(Peer(name, process))
            print(f"{dtype}: {name} is {peers[-1].version}", flush=True)
        yield peers


def export_for_openvino(python: Path, model: Path) -> Path:
    """The checkpoint in OpenVINO's form, with its numbers unchanged. Exits with the exporter's words if it fails."""
    folder = model.with_name(f"{model.name}-openvino")
    command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    options = ["--weight-format", "fp32", "--task", "text-generation-with-past"]
    exported = subprocess.run([*command, *options, str(folder)], capture_output=True, text=True, check=False)
    if exported.returncode:
        raise SystemExit(f"{' '.join(exported.args)} ended with {exported.returncode}:\n{exported.stderr[-4000:]}")
    return folder


def measure(peers: list[Peer], dtype: str, num_rounds: int) -> list[Result]:
    """Everything of one number format, printed as it comes."""
    results = []
    for what in ("prefill", *(f"decode {batch}" for batch in BATCHES)):
        for peer in peers:
            peer.tokens_per_s(what)  # warms up: kernels are chosen, memory is touched
        rounds = [{peer.name: peer.tokens_per_s(what) for peer in peers} for _ in range(num_rounds)]
        for peer in peers:
            rate = statistics.median(each[peer.name] for each in rounds)
            ratio = statistics.median(each[peer.name] / each["transformers"] for each in rounds)
            results.append(Result(dtype, what, peer.name, rate, ratio))
            aim = f" (aim {VLLM_RATIOS[dtype][what]:.1f})" if peer.name == "ours" else ""
            print(
                f"{dtype:8s} {what:9s} {peer.name:12s} {rate:8.0f} tok/s  {ratio:5.2f} of transformers{aim}", flush=True
            )
    return results


def measure_limit(dtype: str, threads: int) -> float:
    """Steps/s at batch 1 if a step did nothing but read its weights and its cache, as fast as it ever reads."""
    per_layer = HIDDEN * (HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS) + HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    cached = 2 * LAYERS * (DECODE_CONTEXT + NEW_TOKENS // 2) * HIDDEN * KV_HEADS // HEADS
    num_bytes = (LAYERS * per_layer + HIDDEN * VOCABULARY + cached) * getattr(torch, dtype).itemsize
    torch.set_num_threads(threads)
    memory = torch.ones(num_bytes // 4, dtype=torch.float32)
    times_s = []
    for _ in range(100):
        began_s = time.perf_counter()
        memory.sum()
        times_s.append(time.perf_counter() - began_s)
    return 1 / min(times_s)


def report_limit(dtype: str, steps_per_s: float, results: list[Result]) -> None:
    """How far each engine is from the limit at batch 1."""
    for result in results:
        if (result.dtype, result.what) == (dtype, "decode 1"):
            share = result.tokens_per_s / steps_per_s
            print(f"{dtype:8s} decode 1  {result.engine:12s} {share:.2f} of reading ({steps_per_s:.0f} steps/s)")


if __name__ == "__main__":
    main()
