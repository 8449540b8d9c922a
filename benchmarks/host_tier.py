"""What a prompt costs whose pages were evicted from the pool: computed again, or brought back from the host's memory.

`python -m benchmarks.host_tier [--model DIR] [--tokens 64 256 1024] [--rounds 9] [--json FILE]`

The prefill loop alone, with pages of 16 tokens. For each length three kinds of prompts take turns: what it begins with
is in the pool, in the host tier, or nowhere. In each case the last token is new. Processor time of the loop's thread,
which is wall time where nothing else runs; the least of all rounds, and the ratio within a round. Beside it what
copying as many bytes with memcpy takes, once: what a tier costs at the least.
"""

import argparse
import json
import statistics
import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from demo import DEMO_MODEL
from prefill_worker.engine_loop import prefill_loop
from services.engine.cache.pool import num_pages_for
from services.engine.engine import EngineParts, load_warm_engine
from services.engine.steps.sequence import Sampling, Sequence
from services.runtime.clock import Clock

SALT = bytes(32)
CASES = ("pool", "host", "computed")


class ThreadClock(Clock):
    """Processor time of the calling thread."""

    def monotonic(self) -> float:
        """Seconds."""
        return time.thread_time()

    def unix_ns(self) -> int:
        """Nanoseconds."""
        return time.thread_time_ns()


@dataclass(frozen=True)
class Result:
    """The least that each case took for one length, and by how much the host tier is faster than computing."""

    num_tokens: int
    pool_s: float
    host_s: float
    computed_s: float
    ratio: float
    """Median over rounds of computed over host."""
    num_bytes: int
    memcpy_s: float


class Prompts:
    """A prefill loop, and prompts that are brought into the state that is measured."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._loop = prefill_loop(parts, chunk_tokens=512, clock=ThreadClock(), on_report=lambda report: None)
        self._number = 0

    def seconds(self, case: str, num_tokens: int) -> float:
        """Processor time until the first token of a prompt of `num_tokens` tokens and one."""
        self._number += 1
        first = self._number % self._parts.model_config.vocab_size
        prompt = [first] * num_tokens
        if case != "computed":
            self._run(prompt)
        if case == "host":
            self._empty_pool()
        start_s = time.thread_time()
        num_cached_tokens = self._run([*prompt, 1])
        seconds = time.thread_time() - start_s
        expected = 0 if case == "computed" else num_tokens
        assert num_cached_tokens == expected, f"{case}: {num_cached_tokens} tokens were cached, not {expected}"
        return seconds

    def _empty_pool(self) -> None:
        """Evicts everything from the pool."""
        allocator = self._parts.allocator
        allocator.release(allocator.allocate(allocator.num_available_pages, state="used"))

    def _run(self, prompt: list[int]) -> int:
        key: Hashable = object()
        sequence = Sequence(key, prompt, sampling=Sampling(max_tokens=1))
        num_cached_tokens = self._loop.begin(sequence, salt=SALT).num_tokens
        while self._loop.step():
            pass
        self._loop.release(key)
        return num_cached_tokens


def measure(prompts: Prompts, parts: EngineParts, num_tokens: int, rounds: int) -> Result:
    """One length."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            times[case].append(prompts.seconds(case, num_tokens))
    ratios = [computed / host for computed, host in zip(times["computed"], times["host"], strict=True)]
    layout = parts.pool.layout
    num_bytes = num_pages_for(num_tokens, layout.page_size) * layout.page_bytes
    return Result(
        num_tokens,
        *(min(times[case]) for case in CASES),
        statistics.median(ratios),
        num_bytes,
        memcpy_s(num_bytes),
    )


def memcpy_s(num_bytes: int) -> float:
    """The least of some copies of memory of that size."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    least_s = float("inf")
    for _ in range(20):
        start_s = time.thread_time()
        target.copy_(source)
        least_s = min(least_s, time.thread_time() - start_s)
    return least_s


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 1024], help="multiples of 16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    longest = max(arguments.tokens)
    parts = load_warm_engine(
        arguments.model, threads=1, num_pages=2 * num_pages_for(longest + 1, 16), host_tier_bytes=1 << 29
    )
    prompts = Prompts(parts)
    prompts.seconds("host", longest)  # memory is touched, and speeds are known
    results = [measure(prompts, parts, num_tokens, arguments.rounds) for num_tokens in arguments.tokens]
    print("tokens  in the pool ms  in the host ms  computed ms  computed/host  memcpy ms")
    for result in results:
        print(
            f"{result.num_tokens:6}  {result.pool_s * 1e3:14.2f}  {result.host_s * 1e3:14.2f}  "
            f"{result.computed_s * 1e3:11.2f}  {result.ratio:13.1f}  {result.memcpy_s * 1e3:9.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
