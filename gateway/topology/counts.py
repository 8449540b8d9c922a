"""What workers have counted since they started, as they tell the gateway: for readers only, no decision uses it."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import worker_pb2

MAX_NAMES = 8
"""The most names kept from one map of a worker: names become labels, and what a worker says is not trusted."""


@dataclass(frozen=True, slots=True)
class HostTierPages:
    """Pages in the host's memory: `total`, `free` and `held` now, and how many have moved since the start."""

    total: int
    free: int
    held: int
    num_stored: int
    num_loaded: int
    num_dropped: int


@dataclass(frozen=True, slots=True)
class Counts:
    """A worker's counts: `proposed` and `accepted` are tokens by source, `preemptions` are sequences by kind.

    `step_s`: seconds for which its engine has computed; None: it does not count them.
    """

    proposed: Mapping[str, int]
    accepted: Mapping[str, int]
    preemptions: Mapping[str, int]
    host_tier: HostTierPages | None
    step_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the counts as `/cluster` and the dashboard show them."""
        tier = self.host_tier
        speculation = {
            source: {"proposed": number, "accepted": self.accepted.get(source, 0)}
            for source, number in self.proposed.items()
        }
        return {
            "speculation": speculation,
            "preemptions": dict(self.preemptions),
            "host_tier": None
            if tier is None
            else {
                "total": tier.total,
                "free": tier.free,
                "held": tier.held,
                "stored": tier.num_stored,
                "loaded": tier.num_loaded,
                "dropped": tier.num_dropped,
            },
        }


def read_counts(message: worker_pb2.WorkerCounts) -> Counts:
    """Returns the counts in a worker's message."""
    tier = message.host_tier
    return Counts(
        _named(message.proposed_tokens),
        _named(message.accepted_tokens),
        _named(message.preemptions),
        HostTierPages(
            tier.total_pages, tier.free_pages, tier.held_pages, tier.num_stored, tier.num_loaded, tier.num_dropped
        )
        if message.HasField("host_tier")
        else None,
        message.step_s if message.HasField("step_s") and math.isfinite(message.step_s) else None,
    )


def _named(counts: Mapping[str, int]) -> dict[str, int]:
    names = sorted(name for name in counts if re.fullmatch("[a-z_]{1,32}", name))
    return {name: counts[name] for name in names[:MAX_NAMES]}


class CountsCollector(Collector):
    """The counts of the workers in `shown`, by (role, worker id), as the gateway's metrics."""

    def __init__(self) -> None:
        self.shown: dict[tuple[str, str], Counts] = {}

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics for a scrape."""
        proposed, accepted, preemptions, pages, moved = families = self.describe()
        for whose, counts in self.shown.items():
            for family, by_name in (
                (proposed, counts.proposed),
                (accepted, counts.accepted),
                (preemptions, counts.preemptions),
            ):
                for name, number in by_name.items():
                    family.add_metric((*whose, name), number)
            tier = counts.host_tier
            if tier is None:
                continue
            for name, number in (("total", tier.total), ("free", tier.free), ("held", tier.held)):
                pages.add_metric((*whose, name), number)
            for name, number in (("out", tier.num_stored), ("back", tier.num_loaded), ("dropped", tier.num_dropped)):
                moved.add_metric((*whose, name), number)
        return families

    def describe(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Returns the metrics without values, for the registry."""
        whose = ("role", "worker")
        return [
            CounterMetricFamily(
                "tandem_worker_speculative_proposed_tokens",
                "Tokens that were proposed at a worker and computed along with others, by where they are from.",
                labels=(*whose, "source"),
            ),
            CounterMetricFamily(
                "tandem_worker_speculative_accepted_tokens",
                "Proposed tokens that were what the model chose.",
                labels=(*whose, "source"),
            ),
            CounterMetricFamily(
                "tandem_worker_preemptions",
                "Sequences of a worker that were preempted by others, by how: place, no_page, swapped, recomputed.",
                labels=(*whose, "reason"),
            ),
            GaugeMetricFamily(
                "tandem_worker_host_tier_pages",
                "Room for cached KV pages in the memory of a worker's host: total, free, held.",
                labels=(*whose, "state"),
            ),
            CounterMetricFamily(
                "tandem_worker_host_tier_moved_pages",
                "Cached KV pages of a worker that went to its host's memory (out), came back, or were dropped there.",
                labels=(*whose, "way"),
            ),
        ]
