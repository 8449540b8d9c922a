"""The stages of an attempt, and what leads from one to another.

`TRANSITIONS` says which sign leads from which stage to which other. Any other sign leaves the stage as it is, since the
streams of the two workers are not in step: the prefill worker's last word may come when the decode worker has begun
long ago. Pure: knows neither workers nor their messages.
"""

import enum
from collections.abc import Mapping

from services.cluster.placements import State


class AttemptStage(enum.IntEnum):
    """How far an attempt has come. Nothing leads out of the terminal ones, but from FAILED to EXPLAINED."""

    NEW = 0
    """Nothing was asked."""
    ASKED = 1
    """The decode worker was asked for capacity."""
    ADMITTED = 2
    """It has promised capacity, and nothing is computed yet, as far as is known."""
    PREFILLING = 3
    TRANSFERRING = 4
    """The prompt is computed, or was elsewhere: its pages are on their way."""
    DECODING = 5
    PAUSING = 6
    """The decode worker is to stop after the current step."""
    PAUSED = 7
    FINISHED = 8
    CLOSED = 9
    """It was left before its end."""
    FAILED = 10
    EXPLAINED = 11
    """It has failed, and it is known of what, as far as anybody can tell."""


class Sign(enum.IntEnum):
    """What may lead an attempt to another stage: what is done to it, and what its workers say."""

    ASK = enum.auto()
    ADMIT = enum.auto()
    BEGIN = enum.auto()
    PROMPT_DONE = enum.auto()
    TAKE_OVER = enum.auto()
    DECODE = enum.auto()
    PAUSE = enum.auto()
    PAUSED = enum.auto()
    RESUME = enum.auto()
    FINISH = enum.auto()
    CLOSE = enum.auto()
    FAIL = enum.auto()
    EXPLAIN = enum.auto()


LIVE = tuple(stage for stage in AttemptStage if stage < AttemptStage.FINISHED)
TERMINAL = tuple(stage for stage in AttemptStage if stage not in LIVE)

_FORWARD: dict[AttemptStage, dict[Sign, AttemptStage]] = {
    AttemptStage.NEW: {Sign.ASK: AttemptStage.ASKED},
    AttemptStage.ASKED: {Sign.ADMIT: AttemptStage.ADMITTED},
    AttemptStage.ADMITTED: {
        Sign.BEGIN: AttemptStage.PREFILLING,
        Sign.PROMPT_DONE: AttemptStage.TRANSFERRING,
        Sign.TAKE_OVER: AttemptStage.TRANSFERRING,
        Sign.DECODE: AttemptStage.DECODING,
    },
    AttemptStage.PREFILLING: {Sign.PROMPT_DONE: AttemptStage.TRANSFERRING, Sign.DECODE: AttemptStage.DECODING},
    AttemptStage.TRANSFERRING: {Sign.DECODE: AttemptStage.DECODING},
    AttemptStage.DECODING: {Sign.PAUSE: AttemptStage.PAUSING},
    AttemptStage.PAUSING: {Sign.PAUSED: AttemptStage.PAUSED, Sign.RESUME: AttemptStage.DECODING},
    AttemptStage.PAUSED: {Sign.RESUME: AttemptStage.DECODING},
}
_ENDS = {Sign.FINISH: AttemptStage.FINISHED, Sign.CLOSE: AttemptStage.CLOSED, Sign.FAIL: AttemptStage.FAILED}
TRANSITIONS: Mapping[AttemptStage, Mapping[Sign, AttemptStage]] = {
    **{stage: _FORWARD[stage] | _ENDS for stage in LIVE},
    AttemptStage.FINISHED: {},
    AttemptStage.CLOSED: {},
    AttemptStage.FAILED: {Sign.EXPLAIN: AttemptStage.EXPLAINED},
    AttemptStage.EXPLAINED: {},
}
"""Where each sign leads from each stage; any other sign changes nothing."""

STATES: Mapping[AttemptStage, State] = {
    AttemptStage.NEW: State.QUEUED,
    AttemptStage.ASKED: State.QUEUED,
    AttemptStage.ADMITTED: State.ADMITTED,
    AttemptStage.PREFILLING: State.PREFILLING,
    AttemptStage.TRANSFERRING: State.TRANSFERRING,
    AttemptStage.DECODING: State.DECODING,
    AttemptStage.PAUSING: State.DECODING,
    AttemptStage.PAUSED: State.DECODING,
}
"""Where an answer stands whose attempt has come so far."""
