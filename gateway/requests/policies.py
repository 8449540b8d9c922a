"""What an operator decides about how requests are placed and tried again."""

from dataclasses import dataclass, field

from gateway.requests.dispatch import RoomLimits
from services.scheduling.routing.router import Router


@dataclass(frozen=True, slots=True)
class Policies:
    """The choices that an operator makes. Times in seconds.

    `max_attempts` counts those without a new token. A new answer waits for workers for `max_queue_wait_s`, one that was
    begun for `failover_wait_s`.
    """

    router: Router
    room: RoomLimits = field(default_factory=RoomLimits)
    region: str = ""
    max_attempts: int = 3
    max_request_s: float = 600.0
    failover_wait_s: float = 30.0
    max_queue_wait_s: float = 60.0
