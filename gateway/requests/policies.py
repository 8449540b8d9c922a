"""What an operator decides about how requests are placed and tried again."""

from dataclasses import dataclass, field
from pathlib import Path

from services.scheduling.overload import NO_TARGETS, Targets
from services.scheduling.routing.router import Router


@dataclass(frozen=True, slots=True)
class RoomLimits:
    """When a request waits here rather than at a worker, where no other could overtake it.

    `ahead_s`: prompts that a worker still has to compute, in seconds of its work: enough to keep it busy while the next
    one is on its way. `itl_s`: no step of a decode worker is made longer than this by requests that can wait
    (`normal` and below); None: no such limit.
    """

    ahead_s: float = 0.1
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Policies:
    """The choices that an operator makes. Times in seconds.

    `max_attempts` counts those without a new token. A new answer waits for workers for `max_queue_wait_s`, one that was
    begun for `failover_wait_s`.
    """

    router: Router
    room: RoomLimits = field(default_factory=RoomLimits)
    region: str = ""
    """Where the gateway runs: workers there come first until they would miss the `targets`."""
    targets: Targets = NO_TARGETS
    max_attempts: int = 3
    max_request_s: float = 600.0
    failover_wait_s: float = 30.0
    max_queue_wait_s: float = 60.0
    pulls_prefixes: bool = True
    """Whether prefill workers fetch what other workers hold of a prompt, where that is quicker than computing it."""
    rebalances: bool = False
    """Whether running answers move from full decode workers to others."""
    model_files: Path | None = None
    """Folder of the files that say which model the workers of a slot are to have; None: not decided here."""
    turn_s: float = 10.0
    """How long a model that shares workers keeps them, at least, while it has requests and another one waits."""
