"""One engine in a process of its own, driven by lines of JSON: what `benchmarks.engine` compares.

    python -P benchmarks/engine_peers.py {ours,transformers,openvino} MODEL --dtype bfloat16 --threads 2

It prints `{"ready": ...}`, then answers each line `{"batch": 8, "prompt": 256, "new": 64}` with the seconds from the
prompts to the last token of all answers. Answers are greedy and never end early. The file imports nothing of this
project unless asked for `ours`, so that a peer may live in an environment of its own.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and how many new tokens to make for each; returns the answers."""

POOL_BYTES = 1 << 30


def main() -> None:
    """Load one engine and serve standard input until it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model", type=Path, help="checkpoint folder; for openvino the exported one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    run, version = ENGINES[arguments.engine](arguments.model, arguments.dtype, arguments.threads)
    print(json.dumps({"ready": version}), flush=True)
    draw = random.Random(0)
    for line in sys.stdin:
        asked = json.loads(line)
        # Never the same prompt twice: an engine with a prefix cache would not compute it.
        prompts = [[draw.randrange(3, vocab_size) for _ in range(asked["prompt"])] for _ in range(asked["batch"])]
        began_s = time.perf_counter()
        answers = run(prompts, asked["new"])
        seconds = time.perf_counter() - began_s
        lengths = {len(answer) for answer in answers}
        if lengths != {asked["new"]} or len(answers) != asked["batch"]:
            raise SystemExit(f"{arguments.engine} answered {len(answers)} prompts with {lengths} tokens, not {asked}")
        print(json.dumps({"seconds": seconds}), flush=True)


def load_ours(model: Path, dtype: str, threads: int) -> tuple[Run, str]:
    """This project's engine loop in one process."""
    from services.engine.engine import Engine, load_engine
    from services.engine.steps.sequence import Sampling

    parts = load_engine(model, dtype=dtype, device="cpu", threads=threads, kv_memory_bytes=POOL_BYTES)
    engine = Engine(parts, chunk_tokens=1024)

    def run(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        return engine.generate(prompts, Sampling(max_tokens=num_new, temperature=0.0))

    return run, f"{parts.model.arithmetic}, exact {parts.model.exact}"


def load_transformers(model: Path, dtype: str, threads: int) -> tuple[Run, str]:
    """`generate` of transformers."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    causal: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def run(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        inputs = torch.tensor(prompts)
        lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new}
        with torch.inference_mode():
            made = causal.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, **lengths)
        answers: list[list[int]] = made[:, inputs.shape[1] :].tolist()
        return answers

    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


def load_openvino(model: Path, dtype: str, threads: int) -> tuple[Run, str]:
    """Continuous batching of OpenVINO GenAI."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = POOL_BYTES >> 30
    hints = {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(model), scheduler, "CPU", {**hints, "INFERENCE_NUM_THREADS": threads}
    )

    def run(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        made = pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in made]

    return run, f"openvino-genai {openvino_genai.__version__}"


ENGINES: dict[str, Callable[[Path, str, int], tuple[Run, str]]] = {
    "ours": load_ours,
    "transformers": load_transformers,
    "openvino": load_openvino,
}

if __name__ == "__main__":
    main()
