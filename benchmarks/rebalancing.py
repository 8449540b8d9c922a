"""What a second decode worker does for answers that run already: `python -m benchmarks.rebalancing [--answers 30]`.

Long answers run on one decode worker; then `tandem scale` brings a second one. Printed is the 99th percentile of the
gaps between tokens, by time, in a window before, and in one that begins `SETTLE_S` after the second worker is ready,
while all of them still run. Two clusters in turn, without rebalancing and with it: the first one's answers, which
never moved, are what those of the second are compared with, token for token. Aim: half the gap, which is the least
that is possible where a step costs nothing but its sequences.

On few cores that takes two flags: `--long`, a model whose steps cost what its contexts cost, and `--share 0.45`, which
gives each decode worker that part of a core (root only), so that the second one takes nothing from the first, as on
machines of their own: `--long --share 0.45 --prompt-tokens 1500 --kv-pages 6000 --new-tokens 800 --window 5`.
"""

import argparse
import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import NO_TARGETS, Cluster, request, running_cluster, stream
from benchmarks.engine import VOCABULARY
from benchmarks.random_model import FIRST_TOKEN_ID, make_served_model
from benchmarks.report import Ratio, add_arguments, leave

SETTLE_S = 5.0
"""After the second worker is ready: the time that rebalancing has."""
WARM_UP_TOKENS = 16
"""The answers are measured from the moment at which each has this many tokens."""
TIMEOUT_S = 300.0
LONG_CONTEXTS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
"""Small weights, beside which attention to long contexts is nearly all of a step, as it is on a GPU. All heads read the
same keys, so that cores compute instead of waiting for the memory that they share."""
CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 5_000


@contextmanager
def share_of_a_core(share: float | None) -> Iterator[Callable[[int], None]]:
    """Yields what holds a process to a part of a core, or, without a part, leaves it alone.

    Periods are short beside a step, so that none stands still in its middle. Raises OSError where this user may not.
    """
    groups: list[Path] = []

    def hold(pid: int) -> None:
        if share is None:
            return
        quota_us = str(int(share * PERIOD_US))
        if (CGROUPS / "cgroup.controllers").exists():
            group, limits = CGROUPS / f"tandem-{pid}", {"cpu.max": f"{quota_us} {PERIOD_US}"}
        else:
            group = CGROUPS / "cpu" / f"tandem-{pid}"
            limits = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota_us}
        group.mkdir()
        groups.append(group)
        for name, limit in (limits | {"cgroup.procs": str(pid)}).items():
            (group / name).write_text(limit)

    try:
        yield hold
    finally:
        for group in groups:
            group.rmdir()


@dataclass
class Watched:
    """An answer, and when each of its tokens came (time.monotonic)."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    async def run(self, stub: Any, message: Any) -> None:
        """Runs to the end. Raises AssertionError where a token is missing or repeated."""
        async for response in stream(stub, message, timeout_s=TIMEOUT_S):
            if response.token_ids:
                assert response.first_index == len(self.token_ids), "an index is missing or repeated"
                self.token_ids += response.token_ids
                self.times_s.append(time.monotonic())

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Returns the gaps that end in a window."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s) if start_s <= later < end_s]


def gap_ms(answers: Sequence[Watched], start_s: float, end_s: float, part: float = 0.99) -> float:
    """Returns the gap, in milliseconds, that `part` of the time in a window is spent in gaps no longer than.

    Each gap counts for its length: where tokens come in bursts, nearly all gaps are short, and readers wait in the
    few others.
    """
    assert all(answer.times_s[-1] >= end_s for answer in answers), "an answer ended before the window: ask for more"
    gaps_s = sorted(gap for answer in answers for gap in answer.gaps_s(start_s, end_s))
    sums_s = itertools.accumulate(gaps_s)
    return 1e3 * next(gap for gap, sum_s in zip(gaps_s, sums_s, strict=True) if sum_s >= part * sum(gaps_s))


async def ready_pids(cluster: Cluster, num: int) -> list[int]:
    """Returns the decode workers' processes when the gateway has this many in rotation."""
    async with asyncio.timeout(60):
        while True:
            workers = (await asyncio.to_thread(cluster.get, "/cluster"))["workers"]
            ready = [worker for worker in workers if worker["role"] == "decode" and worker["state"] == "ready"]
            if len(ready) >= num:
                return [int(worker["pid"]) for worker in ready]
            await asyncio.sleep(0.05)


async def measure(
    cluster: Cluster, hold: Callable[[int], None], arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """Returns the figures of one cluster, and the answers' tokens. `hold` is given each decode worker's process."""
    chance = random.Random(arguments.seed)
    answers = [Watched() for _ in range(arguments.answers)]
    prompts = [[chance.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(arguments.prompt_tokens)] for _ in answers]
    async with cluster.inference() as stub, asyncio.TaskGroup() as running:
        for prompt in prompts:  # computed beforehand, so that all answers begin together
            await Watched().run(stub, request(prompt, max_tokens=1))
        for answer, prompt in zip(answers, prompts, strict=True):
            message = request(prompt, max_tokens=arguments.new_tokens, temperature=0.0, ignore_eos=True)
            running.create_task(answer.run(stub, message))
        while min(len(answer.token_ids) for answer in answers) < WARM_UP_TOKENS:  # noqa: ASYNC110 - other tasks' work
            await asyncio.sleep(0.05)
        [first_pid] = await ready_pids(cluster, 1)
        hold(first_pid)
        before_s = time.monotonic()
        await asyncio.sleep(arguments.window)
        between_s = time.monotonic()
        command = [sys.executable, "-m", "cli.main", "scale", "--url", cluster.http, "--decode", "2"]
        await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        pids = await ready_pids(cluster, 2)
        hold(next(pid for pid in pids if pid != first_pid))
        ready_s = time.monotonic()
        await asyncio.sleep(SETTLE_S + arguments.window)
        workers = (page := await asyncio.to_thread(cluster.get, "/cluster"))["workers"]
    after_s = ready_s + SETTLE_S
    figures = {
        "before_ms": gap_ms(answers, before_s, between_s),
        "meanwhile_ms": gap_ms(answers, ready_s, after_s),
        "after_ms": gap_ms(answers, after_s, after_s + arguments.window),
        "median_before_ms": gap_ms(answers, before_s, between_s, 0.5),
        "median_after_ms": gap_ms(answers, after_s, after_s + arguments.window, 0.5),
        "running": {worker["id"]: worker["running"] for worker in workers if worker["role"] == "decode"},
        "rebalancing": page["rebalancing"],
    }
    return figures, [answer.token_ids for answer in answers]


def main() -> None:
    """Measure, print, and write the figures as JSON where asked. Exit code 1: an answer was another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=30)
    parser.add_argument("--share", type=float, metavar="PART", help="of a core, for each decode worker; needs root")
    parser.add_argument("--long", action="store_true", help="a small model, whose steps cost what its contexts cost")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=600)
    parser.add_argument("--window", type=float, default=6.0, metavar="SECONDS")
    parser.add_argument("--kv-pages", type=int, default=2200)
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    arguments = parser.parse_args()
    figures, tokens = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_served_model(Path(folder), "float32", **(LONG_CONTEXTS if arguments.long else {}))
        for name, is_on in (("without", "false"), ("with", "true")):
            # Pinned, the second decode worker would have the core of the first, and the prefill worker one that idles.
            flags = ("--threads", "1", "--no-pin", "--kv-pages", str(arguments.kv_pages))
            settings = {**NO_TARGETS, "TANDEM_REBALANCE": is_on}
            with (
                share_of_a_core(arguments.share) as hold,
                running_cluster(*flags, model=model, settings=settings) as up,
            ):
                figures[name], tokens[name] = uvloop.run(measure(up, hold, arguments))
            print(name, figures[name], flush=True)
    different = sum(one != other for one, other in zip(tokens["without"], tokens["with"], strict=True))
    lost = sum(len(one) < arguments.new_tokens for one in tokens["with"])
    ratios = {
        f"P99 gap with a second worker, {name} rebalancing": Ratio(
            each["after_ms"] / each["before_ms"], 0.5 if name == "with" else None, lower_is_better=True
        )
        for name, each in figures.items()
    }
    ratios |= {
        f"median gap with a second worker, {name} rebalancing": Ratio(
            each["median_after_ms"] / each["median_before_ms"], lower_is_better=True
        )
        for name, each in figures.items()
    }
    for what, ratio in ratios.items():
        print(f"{what}: {ratio.value:.2f}")
    print(f"{different} of {arguments.answers} answers differ, {lost} were lost")
    leave(arguments, "rebalancing", {**figures, "different": different, "lost": lost}, ratios)
    sys.exit(1 if different or lost else 0)


if __name__ == "__main__":
    main()
