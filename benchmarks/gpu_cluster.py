"""A whole cluster over HTTP on one CUDA device beside its engine: `python -m benchmarks.gpu_cluster [--json FILE]`.

The workload of `benchmarks.gpu_batching`: requests that come all at once, each with a prompt of its own and a greedy
answer of a fixed length, to a model of the shape of Qwen3-0.6B with random weights in bfloat16. The cluster is
`tandem up` with one prefill and one decode worker on the same device, which take turns on it, and hands every prompt
over; the engine is one process without a server. Ratios are the cluster's to the engine's. What separates the two is
the gateway, HTTP, the handoff, and two processes on one device: on two devices the last falls away.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import uvloop

from benchmarks.cluster import NO_TARGETS, Cluster, running_cluster
from benchmarks.gpu import SHAPES
from benchmarks.gpu_batching import Figures, Workload, figures_of_another_process, write_checkpoint
from benchmarks.load import Timing, ours, percentile
from benchmarks.random_model import write_tokenizer

START_TIMEOUT_S = 300
"""A model is compiled by vLLM before it is served."""


def main() -> int:
    """Measure, print, and write the figures as JSON where asked. Without a CUDA device it says so and gives 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHAPES[0].name, choices=[shape.name for shape in SHAPES], help="which shape")
    parser.add_argument("--requests", type=int, default=Workload.requests)
    parser.add_argument("--prompt-tokens", type=int, default=Workload.prompt_tokens)
    parser.add_argument("--new-tokens", type=int, default=Workload.new_tokens)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, of which medians are taken")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native", help="what computes, in both")
    parser.add_argument("--up", default="", metavar="FLAGS", help="more flags of tandem up")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 1
    workload = Workload(arguments.requests, arguments.prompt_tokens, arguments.new_tokens)
    shape = next(shape for shape in SHAPES if shape.name == arguments.model)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        folder = Path(name) / "model"
        write_checkpoint(shape, folder, "cuda")
        write_tokenizer(folder, shape.vocabulary)
        alone = "ours" if arguments.engine == "native" else arguments.engine
        engine = figures_of_another_process(alone, folder, "cuda", workload, arguments.rounds)
        print(f"{shape.name:14s} {'engine':14s} {engine}", flush=True)
        settings = {**NO_TARGETS, "TANDEM_DEVICE": "cuda", "TANDEM_LOCAL_PREFILL_TOKENS": "0"}
        flags = (f"--engine={arguments.engine}", f"--start-timeout={START_TIMEOUT_S}", *arguments.up.split())
        with running_cluster(*flags, model=folder, settings=settings) as cluster:
            rounds = [run(cluster, workload, shape.vocabulary, seed) for seed in range(arguments.rounds + 1)][1:]
    whole = Figures(
        *(statistics.median(column) for column in zip(*(asdict(one).values() for one in rounds), strict=True))
    )
    print(f"{shape.name:14s} {'cluster':14s} {whole}", flush=True)
    ratios = {name: value / asdict(engine)[name] for name, value in asdict(whole).items()}
    print(
        f"{shape.name:14s} {'to the engine':14s} " + "  ".join(f"{name} {value:.2f}" for name, value in ratios.items())
    )
    if arguments.json:
        found = {"workload": asdict(workload), "engine": asdict(engine), "cluster": asdict(whole), "ratios": ratios}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def run(cluster: Cluster, workload: Workload, vocabulary: int, seed: int) -> Figures:
    """Sends all requests at once. Raises RuntimeError where an answer is not whole."""
    prompts = workload.prompts(vocabulary, seed)
    began_s, answers = uvloop.run(_ask_all(cluster, prompts, workload.new_tokens))
    for answer in answers:
        if answer.failure or answer.num_tokens != workload.new_tokens:
            raise RuntimeError(f"an answer of {answer.num_tokens} tokens, not {workload}: {answer.failure}")
    gaps_s = [gap_s for answer in answers for gap_s in answer.itls_s]
    ended_s = max(answer.arrivals_s[-1][0] for answer in answers)
    return Figures(
        tokens_per_s=workload.requests * workload.new_tokens / (ended_s - began_s),
        ttft_p50_s=percentile([answer.ttft_s for answer in answers], 50),
        itl_p50_s=percentile(gaps_s, 50),
        itl_p99_s=percentile(gaps_s, 99),
    )


async def _ask_all(cluster: Cluster, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[Timing]]:
    endpoint = ours(cluster.http)
    began_s = asyncio.get_running_loop().time()
    return began_s, await asyncio.gather(*(endpoint.ask(prompt, num_tokens) for prompt in prompts))


if __name__ == "__main__":
    sys.exit(main())
