"""When a child process is started, ended, killed or given up: a pure state machine. No processes, no clock of its own.

WAITING ──time──▶ RUNNING ──exit──▶ WAITING (backoff)
   │                 │  └──exit, hopeless──▶ ENDED (given up)
   └──stop──▶ ENDED  └──stop──▶ STOPPING ──exit──▶ ENDED
                                   └──grace over──▶ killed
"""

import enum
from dataclasses import dataclass, replace

EXIT_BAD_INPUT = 2


class Phase(enum.Enum):
    """Where a child is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


ALIVE = frozenset({Phase.RUNNING, Phase.STOPPING})


class Action(enum.Enum):
    """The supervisor's next action."""

    SPAWN = "spawn"
    TERMINATE = "terminate"
    KILL = "kill"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patient the supervisor is. All times in seconds."""

    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    healthy_after_s: float = 20.0
    """A child that ran this long starts with the first backoff again."""
    max_start_failures: int = 5
    """A child that was never ready is given up after this many failures in a row."""

    def backoff_s(self, num_failures: int) -> float:
        """Wait before the next start: doubles with every failure in a row."""
        doublings = min(max(num_failures - 1, 0), 32)
        return min(self.first_backoff_s * 2.0**doublings, self.max_backoff_s)


@dataclass(frozen=True, slots=True)
class ChildState:
    """A child at one moment. Times are of the caller's monotonic clock.

    `wake_at_s` is when `on_time` has something to do, or None. `exit_code` is the last one, None before the first.
    """

    phase: Phase
    wake_at_s: float | None
    started_at_s: float = 0.0
    num_failures: int = 0
    has_been_ready: bool = False
    exit_code: int | None = None


def begin(now_s: float) -> ChildState:
    """A child that is to be started at once."""
    return ChildState(Phase.WAITING, wake_at_s=now_s)


def on_time(state: ChildState, now_s: float) -> tuple[ChildState, Action | None]:
    """Time has passed: a backoff or a grace may be over."""
    if state.wake_at_s is None or now_s < state.wake_at_s:
        return state, None
    if state.phase is Phase.WAITING:
        return replace(state, phase=Phase.RUNNING, wake_at_s=None, started_at_s=now_s), Action.SPAWN
    if state.phase is Phase.STOPPING:
        return replace(state, wake_at_s=None), Action.KILL
    return replace(state, wake_at_s=None), None


def on_ready(state: ChildState) -> ChildState:
    """The child does its work; from now on it is always restarted."""
    return replace(state, has_been_ready=True) if state.phase is Phase.RUNNING else state


def on_exit(state: ChildState, now_s: float, exit_code: int, policy: RestartPolicy) -> tuple[ChildState, Action | None]:
    """The process has ended. Gives it up where starting it again cannot help."""
    if state.phase is Phase.STOPPING:
        return replace(state, phase=Phase.ENDED, wake_at_s=None, exit_code=exit_code), None
    was_healthy = exit_code == 0 or now_s - state.started_at_s >= policy.healthy_after_s
    num_failures = 1 if was_healthy else state.num_failures + 1
    state = replace(state, num_failures=num_failures, exit_code=exit_code)
    is_hopeless = exit_code == EXIT_BAD_INPUT or num_failures >= policy.max_start_failures
    if is_hopeless and not state.has_been_ready:
        return replace(state, phase=Phase.ENDED, wake_at_s=None), Action.GIVE_UP
    return replace(state, phase=Phase.WAITING, wake_at_s=now_s + policy.backoff_s(num_failures)), None


def on_stop(state: ChildState, now_s: float, grace_s: float) -> tuple[ChildState, Action | None]:
    """The child is no longer wanted; it gets `grace_s` seconds to end by itself."""
    if state.phase is Phase.WAITING:
        return replace(state, phase=Phase.ENDED, wake_at_s=None), None
    if state.phase is Phase.RUNNING:
        return replace(state, phase=Phase.STOPPING, wake_at_s=now_s + grace_s), Action.TERMINATE
    return state, None
