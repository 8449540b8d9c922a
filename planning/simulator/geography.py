"""Regions of a simulated cluster: where workers are, where requests come from, and what is held where."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planning.simulator.traces import Trace, TraceRequest
from services.runtime.errors import ConfigError

if TYPE_CHECKING:  # `tandem up` reads settings that name a geography, and starts no simulator
    from planning.simulator.cluster import ClusterSpec


@dataclass(frozen=True, slots=True)
class Geography:
    """The workers of each role are in `regions` in turn, and requests that name no region come from each equally often.

    `distances_s` are seconds from one region to another, both ways round. `held_share` is the part of the requests that
    name no region whose data is held to theirs.
    """

    regions: tuple[str, ...] = ()
    distances_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    held_share: float = 0.0

    def check(self) -> None:
        """Raises ConfigError where a rule is about regions that have no workers."""
        unknown = sorted({name for pair in self.distances_s for name in pair} - set(self.regions))
        if unknown:
            raise ConfigError(f"no worker is in the region {unknown[0]} of --region-distance: name it in --regions")
        if self.held_share and not self.regions:
            raise ConfigError("--residency-share needs --regions")

    def placed(self, trace: Trace, *, seed: int) -> Trace:
        """Returns a trace whose requests all come from a region; the same seed gives the same one."""
        if not self.regions:
            return trace
        draw = random.Random(f"regions {seed}")  # noqa: S311 - made-up load

        def in_a_region(request: TraceRequest) -> TraceRequest:
            region, is_held = draw.choice(self.regions), draw.random() < self.held_share
            if request.region:
                return request
            return replace(request, region=region, residency=(region,) if is_held else request.residency)

        return replace(trace, requests=tuple(map(in_a_region, trace.requests)))

    def cluster(self, spec: "ClusterSpec") -> "ClusterSpec":
        """Returns a cluster with its workers in these regions."""
        return replace(spec, regions=self.regions, routing=replace(spec.routing, distances_s=self.distances_s))
