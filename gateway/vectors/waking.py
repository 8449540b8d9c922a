"""Calls for vectors whose model shares its workers by turns and sleeps: they wake it, and wait beside the queue.

In the queue they would count as a cluster that drains nothing, for which others are refused. Knows no worker.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterator

from gateway.requests.call import AnswerSpec
from gateway.requests.turns import ModelTurns
from gateway.topology.members import Topology
from services.runtime.clock import Deadline
from services.runtime.errors import TandemError


class Waking:
    """The calls of one gateway. `turns` is told of those that are `wanted`."""

    def __init__(self, turns: ModelTurns, topology: Topology) -> None:
        self._turns = turns
        self._topology = topology
        self._wanted: dict[str, AnswerSpec] = {}
        self._waiting: Counter[str] = Counter()
        """By model, how many wait for it to wake."""
        self._nudges: set[asyncio.Event] = set()
        self._end: TandemError | None = None
        turns.add_source(self._wanted.values)

    @contextlib.contextmanager
    def wanted(self, spec: AnswerSpec) -> Iterator[None]:
        """Has the model of a call wake, and have its turns, while the block runs."""
        self._wanted[spec.request_id] = spec
        try:
            yield
        finally:
            del self._wanted[spec.request_id]

    def is_asleep(self, model: str) -> bool:
        """Returns whether the model shares workers, and none of them serves it now."""
        return self._turns.is_asleep(model)

    async def until_awake(self, spec: AnswerSpec, patience: Deadline, *, max_waiting: float = math.inf) -> None:
        """Waits until the model is awake. Raises DeadlineExceeded, and WorkerUnavailable with the time of a switch.

        That is also the error where `max_waiting` wait already.
        """
        model = spec.model
        if not self.is_asleep(model):
            return
        if self._waiting[model] >= max_waiting:
            raise self._turns.not_awake(model)
        nudge = asyncio.Event()
        self._waiting[model] += 1
        self._nudges.add(nudge)
        try:
            with self._topology.watched(nudge.set):
                async with asyncio.timeout(patience.remaining_s()):
                    while self.is_asleep(model):
                        if self._end is not None:
                            raise self._end.again()
                        await nudge.wait()
                        nudge.clear()
        except TimeoutError:
            spec.deadline.check()
            raise self._turns.not_awake(model) from None
        finally:
            self._waiting[model] -= 1
            self._nudges.discard(nudge)

    def end_all(self, error: TandemError) -> None:
        """Ends every wait, now and from here on, with `error`."""
        self._end = error
        for nudge in self._nudges:
            nudge.set()
