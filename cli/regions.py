"""The flags by which `tandem replay` and `tandem plan` simulate a cluster of several regions."""

from collections.abc import Mapping
from dataclasses import dataclass

from planning.simulator.geography import Geography
from services.runtime.config import option
from services.runtime.kinds import comma_separated, distances, number, text
from services.scheduling.regions import REGION

REGION_KIND = text(pattern=REGION, rule="1 to 64 of A-Z, a-z, 0-9, _ . and -")


@dataclass(frozen=True, kw_only=True)
class RegionSettings:
    """Where simulated workers are and requests come from."""

    regions: tuple[str, ...] | None = option(
        comma_separated(REGION_KIND),
        default=None,
        help="Regions of the workers of each role, in turn. Requests that name none come from each equally often.",
    )
    region_distance: Mapping[tuple[str, str], float] | None = option(
        distances(),
        default=None,
        help="Seconds from one region to another and back, such as eu:us=0.08. Not given for a pair: 0.1 for a "
        "request, and 0.05 for pages.",
    )
    residency_share: float = option(
        number(0, 1), default=0.0, help="Part of the requests that name no region whose data is held to theirs."
    )

    @property
    def geography(self) -> Geography:
        """The regions. Raises ConfigError."""
        found = Geography(self.regions or (), self.region_distance or {}, self.residency_share)
        found.check()
        return found
