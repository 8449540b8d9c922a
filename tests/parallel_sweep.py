"""Compares responses of clusters whose workers have several ranks with those of one process, degree by degree.

`python -m tests.parallel_sweep` starts a cluster for each combination of degrees, side and chunk size, and prints one
row for each. Exits with 1 if a response differs, or if a cluster handed over no prompt.
"""

import argparse
import asyncio
import itertools
import random
import re
import sys
import time
from typing import Any

from benchmarks.cluster import NO_TARGETS, Cluster, collect, request, running_cluster
from demo import DEMO_MODEL
from services.engine.engine import Engine, load_engine
from services.engine.steps.sequence import Sampling

DEGREES = {"pipeline 2": (1, 2), "pipeline 4": (1, 4), "tensor 2": (2, 1), "tensor 4": (4, 1), "2 x 2": (2, 2)}
"""(tensor, pipeline) by name."""
PATIENT = {**NO_TARGETS, "TANDEM_MAX_QUEUE_WAIT_S": "600"}
"""Settings of a cluster that refuses no request, however slow the machine is."""
SIDES = {"prefill": ("prefill",), "decode": ("decode",), "both": ("prefill", "decode")}
CHUNKS_TOKENS = (16, 64, 256)
NUM_RESPONSES = 12
NUM_NEW_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}
SEEDED: dict[str, Any] = {"temperature": 0.875, "top_p": 0.9375, "seed": 3}


def prompts(chunk_tokens: int) -> list[list[int]]:
    """Returns prompts of 3.1 to 5 chunks; none ends with a chunk."""
    lengths = [chunk_tokens * 3 + 2 + number * 2 * chunk_tokens // NUM_RESPONSES for number in range(NUM_RESPONSES)]
    return [[random.Random(f"{length} {n}").randrange(3, 2048) for n in range(length)] for length in lengths]


def samplings() -> list[dict[str, Any]]:
    """Returns the sampling of each response: three of four are greedy."""
    return [SEEDED if number % 4 == 3 else GREEDY for number in range(NUM_RESPONSES)]


def of_one_process(chunk_tokens: int) -> list[list[int]]:
    """Returns the responses of one process."""
    parts = load_engine(DEMO_MODEL, num_pages=1024)
    each = [Sampling(max_tokens=NUM_NEW_TOKENS, **sampling) for sampling in samplings()]
    return Engine(parts).generate(prompts(chunk_tokens), each)


async def of_cluster(cluster: Cluster, chunk_tokens: int) -> list[list[int]]:
    """Returns the responses of a cluster to all prompts at once."""
    async with cluster.inference() as stub:
        calls = [
            collect(stub, request(prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **sampling), timeout_s=900)
            for prompt, sampling in zip(prompts(chunk_tokens), samplings(), strict=True)
        ]
        return [response.token_ids for response in await asyncio.gather(*calls)]


def num_handoffs(cluster: Cluster) -> int:
    """Returns how many prompts were handed over."""
    found = re.findall(r"^tandem_handoff_exposed_seconds_count\S* (\S+)$", cluster.get_text("/metrics"), re.MULTILINE)
    return sum(int(float(number)) for number in found)


def try_cluster(degree: str, side: str, chunk_tokens: int, expected: list[list[int]]) -> tuple[int, int, int]:
    """Returns the numbers of responses, of different ones, and of handoffs."""
    tensor, pipeline = DEGREES[degree]
    flags = ["--local-prefill-tokens=0", f"--chunk-tokens={chunk_tokens}", "--kv-memory=64MiB", "--threads=1"]
    for role in SIDES[side]:
        flags += [f"--{role}-tensor-parallel={tensor}", f"--{role}-pipeline-parallel={pipeline}"]
    with running_cluster(*flags, settings=PATIENT) as cluster:
        given = asyncio.run(of_cluster(cluster, chunk_tokens))
        num_different = sum(mine != theirs for mine, theirs in zip(expected, given, strict=True))
        return len(given), num_different, num_handoffs(cluster)


def main() -> int:
    """Runs the sweep. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degrees", nargs="*", choices=list(DEGREES), default=list(DEGREES))
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--chunks", nargs="*", type=int, default=list(CHUNKS_TOKENS))
    given = parser.parse_args()
    sums = [0, 0, 0]
    has_failed = False
    _show("degrees     side     chunk  responses  different  handoffs  seconds")
    for chunk_tokens in given.chunks:
        expected = of_one_process(chunk_tokens)
        for degree, side in itertools.product(given.degrees, given.sides):
            began_s = time.monotonic()
            numbers = try_cluster(degree, side, chunk_tokens, expected)
            columns = f"{degree:<10}  {side:<7}  {chunk_tokens:5}  {numbers[0]:9}  {numbers[1]:9}  {numbers[2]:8}"
            _show(f"{columns}  {time.monotonic() - began_s:7.1f}")
            sums = [total + number for total, number in zip(sums, numbers, strict=True)]
            has_failed = has_failed or numbers[1] > 0 or numbers[2] == 0
    _show(f"{sums[0]} responses, {sums[1]} different, {sums[2]} handoffs")
    return int(has_failed)


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
