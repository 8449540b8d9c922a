"""What carries decisions out: the one interface, and the two that need no cluster manager.

An actor is told how many workers there are to be, and may be told the same twice: a decision that was carried out in
part, by an autoscaler that died, is carried out by the next one.

Where several copies of an autoscaler run, an order carries the lease that it is given under: a copy that was frozen
between its decision and its order must no longer act.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Protocol

from services.cluster.leadership import Lease
from services.runtime.errors import TandemError
from services.runtime.orders import order

TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers of each role."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


class ActorFailed(TandemError):
    """The order was not taken, or how many workers there are to be cannot be found out."""


class Actor(Protocol):
    """Changes the number of workers. Both methods block for TIMEOUT_S at most, and raise ActorFailed."""

    def sizes(self, ready: Sizes) -> Sizes:
        """Returns how many workers there are to be, by the last order of anybody. `ready`: those that take requests."""
        ...

    def resize(self, sizes: Sizes, lease: Lease | None = None) -> None:
        """Orders this many workers; does not wait for them. Surplus ones finish what they run.

        `lease`: what the order is given under; None: no other copy acts.
        """
        ...


class PrintOnly:
    """Carries nothing out: decisions are in the log. Takes the workers that are ready to be those that are to be."""

    def sizes(self, ready: Sizes) -> Sizes:
        """Returns what is ready."""
        return ready

    def resize(self, sizes: Sizes, lease: Lease | None = None) -> None:
        """Writes a line to the log."""
        del lease  # nothing happens that could happen twice
        logger.info("would change the number of workers", extra={"prefill": sizes.prefill, "decode": sizes.decode})


@dataclass(frozen=True, slots=True)
class LocalActor:
    """The processes of the `tandem up` of this user whose HTTP API is at `url`."""

    url: str
    model: str | None
    drain_s: float

    def sizes(self, ready: Sizes) -> Sizes:
        """Returns what `tandem up` is to run."""
        del ready  # it knows better
        told = self._order("sizes", model=self.model)
        return Sizes(told["prefill"], told["decode"])

    def resize(self, sizes: Sizes, lease: Lease | None = None) -> None:
        """Has new workers started and surplus ones drained or given the other role, in `drain_s` seconds each.

        `tandem up` refuses an order that comes after its lease, or after one under a later lease.
        """
        wanted = {"prefill": sizes.prefill, "decode": sizes.decode}
        under = None if lease is None else asdict(lease)
        self._order("scale", model=self.model, grace_s=self.drain_s, waits=False, lease=under, **wanted)

    def _order(self, name: str, **arguments: object) -> dict[str, int]:
        try:
            done: dict[str, int] = order(self.url, name, timeout_s=TIMEOUT_S, **arguments)
        except TandemError as error:
            raise ActorFailed(error.message) from error
        return done
