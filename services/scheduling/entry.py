"""A request that waits: its class, what it costs, and when its turn should come. Knows no queue."""

from collections.abc import Hashable
from enum import IntEnum
from math import inf

import msgspec

PASSED_TIMES = 4.0
"""Shorter prompts go before one that takes a second if they come within this many seconds after it ..."""
MAX_PASSED_S = 5.0
"""... but no prompt goes before those that came this long before it."""
UNSAID_S = 5.0
"""In strategy `sla`, a turn for which no time was named is due this long after its place."""


class ServiceClass(IntEnum):
    """The classes of requests: one with a lower number always goes first."""

    CRITICAL = 0
    INTERACTIVE = 1
    NORMAL = 2
    LOW = 3
    BATCH = 4

    @classmethod
    def from_name(cls, name: str) -> "ServiceClass":
        """Returns the class with this name, in lower case. Raises ValueError."""
        one = _CLASSES_BY_NAME.get(name)
        if one is None:
            raise ValueError(f"there is no class {name!r}; there are {', '.join(_CLASSES_BY_NAME)}")
        return one


_CLASSES_BY_NAME = {one.name.lower(): one for one in ServiceClass}


class QueueEntry(msgspec.Struct, frozen=True, eq=False):
    """A request that waits. Times in seconds of one monotonic clock.

    `cost_tokens` is what it is charged for: tokens of its prompt and of its answer. `service_s` is the predicted time
    from its turn to its last token, `prompt_s` that of its prompt alone. `level` is its priority within its class,
    higher first. `deadline_s` is `math.inf` without a deadline. `due_s` is when its turn should come by what its client
    said; `math.inf`: the client said nothing; None: it named the deadline. `promised_s` is when its turn must have come
    to keep what its class is promised; `math.inf`: no promise.
    """

    key: Hashable
    service_class: ServiceClass
    tenant: str
    cost_tokens: int
    arrived_s: float
    deadline_s: float = inf
    service_s: float = 0.0
    level: int = 0
    prompt_s: float = 0.0
    due_s: float | None = None
    promised_s: float = inf

    @property
    def place_s(self) -> float:
        """Where it stands among others of its class and level: the longer its prompt, the more go before it."""
        return self.arrived_s + min(PASSED_TIMES * self.prompt_s, MAX_PASSED_S) if self.prompt_s else self.arrived_s

    @property
    def turn_due_s(self) -> float:
        """When its turn should come."""
        due_s = self.deadline_s - self.service_s if self.due_s is None else self.due_s
        return due_s if due_s < inf else self.place_s + UNSAID_S

    @property
    def latest_start_s(self) -> float:
        """When its turn must have come, or it ends after its deadline; batch work may try until the deadline itself.

        How long it will take is a prediction, and batch work is never turned away because of a prediction.
        """
        return self.deadline_s if self.service_class == ServiceClass.BATCH else self.deadline_s - self.service_s
