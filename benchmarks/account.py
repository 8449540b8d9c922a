"""Where the time of a phase went: what each program of a cluster computed, and what the load generator took itself.

Everything is read from the programs' own counters (`tandem up --metrics-port 0` has workers serve theirs), before and
after.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster import Cluster

CLIENT, GATEWAY = "client", "gateway"
CPU, STEPS, TOKENS = "process_cpu_seconds_total", "tandem_step_seconds_sum", "tandem_computed_tokens_total"
BATCHES = ("tandem_step_seconds_count", "tandem_step_sequences_sum")
COUNTERS = (CPU, STEPS, TOKENS, *BATCHES, "tandem_preemptions_total")
Counts = dict[tuple[str, str], float]
"""Counters by program (a role, or the client) and name; those of workers of one role are added up."""


@dataclass(frozen=True, slots=True)
class Account:
    """What was counted from one moment of `time.monotonic()` to another."""

    from_s: float
    until_s: float
    counts: Counts

    @property
    def seconds(self) -> float:
        """The length of the phase."""
        return self.until_s - self.from_s

    @property
    def computed_tokens(self) -> float:
        """Tokens that went through the model, of prompts and of answers, at all workers."""
        return sum(value for (_, name), value in self.counts.items() if name == TOKENS)

    def figures(self) -> dict[str, Any]:
        """Per second of the phase: cores of each program, steps' time and tokens of each role, preemptions."""
        told: dict[str, dict[str, float]] = {}
        for (program, name), value in sorted(self.counts.items()):
            told.setdefault(program, {})[name] = round(value / self.seconds, 3)
        return told


def read_counts(cluster: Cluster) -> Counts:
    """Reads all counters of the cluster's programs and the CPU time of this one. Blocks."""
    pages = [(GATEWAY, cluster.http + "/metrics")]
    for group in cluster.get("/metrics/targets"):
        pages += [(group["labels"]["role"], f"http://{target}/metrics") for target in group["targets"]]
    counts: Counts = {(CLIENT, CPU): time.process_time()}
    for program, url in pages:
        with urlopen(url, timeout=10) as response:
            add_counts(counts, program, response.read().decode())
    return counts


def add_counts(counts: Counts, program: str, text: str) -> None:
    """Adds the counters of one page of metrics to those of its program."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in COUNTERS:
                key = program, sample.name
                counts[key] = counts.get(key, 0.0) + sample.value


async def keep_account(cluster: Cluster, *, after_s: float, for_s: float) -> Account:
    """Returns what is counted for a while that begins later."""
    await asyncio.sleep(after_s)
    from_s, before = time.monotonic(), await asyncio.to_thread(read_counts, cluster)
    await asyncio.sleep(max(0.0, from_s + for_s - time.monotonic()))
    until_s, after = time.monotonic(), await asyncio.to_thread(read_counts, cluster)
    return Account(from_s, until_s, {key: value - before.get(key, 0.0) for key, value in after.items()})


def within(account: Account, moments_s: Iterable[float]) -> int:
    """Returns how many of these moments lie in the phase."""
    return sum(account.from_s <= at_s < account.until_s for at_s in moments_s)
