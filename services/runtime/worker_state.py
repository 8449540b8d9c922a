"""What a worker does: said by itself in its lease, and judged by gateways, which know more."""

from enum import StrEnum


class WorkerState(StrEnum):
    """The states of a worker, as registry, APIs and pages spell them."""

    STARTING = "starting"
    """It loads its model."""
    READY = "ready"
    DRAINING = "draining"
    """It finishes what it has and gets nothing new."""
    LOST = "lost"
    """A gateway has no session with it. Workers never say this."""
    LEFT_OUT = "left_out"
    """A gateway gives it no work, because something about it does not fit. Workers never say this."""


SAID_BY_WORKERS = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING)

FOUND = "a gateway has connected"
UNFOUND = "no gateway has connected"
"""Messages of a worker's log: it is of use from the first on, and looked for in vain until then."""
UNLISTED = "Redis does not answer, so no gateway can find this worker"
"""Another one, which has the cause as `error`."""
