"""Has workers that several models share change their model, as `services.scheduling.turns` decides.

What a group's workers are to have is a file, which they read too: a worker that is killed comes back with that model,
and gateways that share the folder agree without a word. One gateway at a time looks and decides, by a lock on the
folder. Nothing changes while Redis is away, through which workers would have to be found anew. Knows no request's life.
"""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gateway.models.catalog import ModelCatalog
from gateway.observability.metrics import Metrics
from gateway.requests.answer import RunningAnswer
from gateway.requests.call import AnswerSpec
from gateway.requests.policies import Policies
from gateway.topology.member import Member
from gateway.topology.members import Topology
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import WorkerUnavailable
from services.runtime.worker_state import WorkerState
from services.scheduling.turns import REST_S, Switch, SwitchTimes, WorkerGroup, next_switch

LOOK_S = 0.1
MAX_NAME_BYTES = 512
MIN_RETRY_S = 1.0

ModelState = Literal["awake", "switching", "asleep", "on_disk"]

logger = logging.getLogger(__name__)


class GroupState(Struct, forbid_unknown_fields=True):
    """Workers that change their model together: the model that they have or are to have, and for how long."""

    group: str
    model: str
    state: Literal["awake", "switching"]
    for_s: float


class TurnsState(Struct, forbid_unknown_fields=True):
    """Models that share workers. `switch_s`: what switches took, in seconds; empty: none was measured."""

    models: dict[str, ModelState]
    groups: list[GroupState]
    switch_s: dict[Literal["asleep", "disk"], float]


@dataclass(slots=True)
class _Seen:
    """What is known of a group since the look before. Times are the clock's."""

    model: str
    """The model that its workers are to have."""
    since_s: float
    """When that was first seen."""
    before: str = ""
    """The model that it had before; empty: none is known."""
    was_asleep: bool = False
    """Whether the weights of `model` were in memory when it was chosen."""
    awake_at_s: float | None = None
    busy_at_s: float = 0.0
    """When the model had a request last."""


class ModelTurns:
    """The turns of the models that share workers, as one gateway sees and decides them.

    Without a folder of files nothing is decided here, and requests wait all the same.
    """

    def __init__(
        self,
        topology: Topology,
        catalog: ModelCatalog,
        *,
        policies: Policies,
        answers: Callable[[], Iterable[RunningAnswer]],
        metrics: Metrics,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._topology = topology
        self._shares = {model.name: model.share for model in catalog if model.share}
        self._folder = policies.model_files
        self._turn_s = policies.turn_s
        self._sources: list[Callable[[], Iterable[AnswerSpec]]] = [lambda: (answer.spec for answer in answers())]
        self._metrics = metrics
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._resting: dict[str, float] = {}
        """When each model whose waking has failed may be tried again."""
        self._times = SwitchTimes()
        self._looking: asyncio.Task[None] | None = None

    def add_source(self, open_specs: Callable[[], Iterable[AnswerSpec]]) -> None:
        """Has models wake, and have their turns, for what else is open, which `open_specs` gives."""
        self._sources.append(open_specs)

    def start(self) -> None:
        """Begins to look, if any models share workers."""
        if self._shares:
            self._looking = supervise(self._look_for_ever, name="turns")

    async def close(self) -> None:
        """Stops looking; a switch that was decided takes its course."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    def takes_turns(self, model: str) -> bool:
        """Returns whether the model shares workers, one of which is known: it may wake."""
        share = self._shares.get(model)
        return share is not None and any(self._share_of(member) == share for member in self._topology.members())

    def can_wake(self, model: str) -> bool:
        """Returns whether the model shares workers that have served one of their models."""
        share = self._shares.get(model)
        return share is not None and any(
            self._shares[seen.model] == share and (seen.before or seen.awake_at_s is not None)
            for seen in self._seen.values()
        )

    def is_asleep(self, model: str) -> bool:
        """Returns whether the model shares workers, and none of them serves it now."""
        return model in self._shares and not self._topology.num_ready("decode", model)

    def not_awake(self, model: str) -> WorkerUnavailable:
        """Returns the error of a request that did not get a worker, with the time that a switch takes."""
        retry_s = max(MIN_RETRY_S, self._times.usual_s(is_asleep=self._is_kept(model)))
        return WorkerUnavailable(
            "the model is not awake: its workers serve another one of those that share them", retry_after_s=retry_s
        )

    def state_of(self, model: str) -> ModelState | None:
        """Returns how near the model is to being served; None: it shares no workers."""
        if model not in self._shares:
            return None
        if self._topology.num_ready("decode", model):
            return "awake"
        if any(seen.model == model for seen in self._seen.values()):
            return "switching"
        return "asleep" if self._is_kept(model) else "on_disk"

    @property
    def state(self) -> TurnsState:
        """What /cluster shows of it."""
        now_s = self._clock.monotonic()
        groups = [
            GroupState(
                name,
                seen.model,
                "switching" if seen.awake_at_s is None else "awake",
                round(now_s - (seen.awake_at_s or seen.since_s), 1),
            )
            for name, seen in sorted(self._seen.items())
        ]
        states = {model: state for model in self._shares if (state := self.state_of(model)) is not None}
        return TurnsState(states, groups, self._times.measured_s)

    def look(self) -> None:
        """Notes what groups have become, and decides which one changes its model now, of each share at most one."""
        with self._only_one() as may_decide:
            groups = self._groups()
            if not may_decide or self._topology.stale_since_s is not None:
                return
            now_s = self._clock.monotonic()
            for share, members in groups.items():
                for name, seen in [(name, self._seen[name]) for name in members]:
                    if seen.awake_at_s is None and seen.before and now_s - seen.since_s > self._times.limit_s:
                        self._give_up(name, seen)
                waiting_s = self._waiting_s(share)
                if not waiting_s:
                    continue
                resting = [model for model, until_s in self._resting.items() if until_s > now_s]
                due = next_switch(
                    [self._group(name, waiting_s, now_s) for name in members],
                    waiting_s,
                    turn_s=self._turn_s,
                    switch_s=self._times.usual_s(is_asleep=any(map(self._is_kept, waiting_s))),
                    resting=resting,
                )
                if due is not None:
                    self._switch(due)

    async def _look_for_ever(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[bool]:
        """Keeps other gateways with the same folder from deciding meanwhile; False: one of them does."""
        if self._folder is None:
            yield False
            return
        lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def _groups(self) -> dict[str, list[str]]:
        """Returns the names of the groups of each share that can decode, after a look at each."""
        found: dict[str, list[Member]] = {}
        for member in self._topology.members():
            if self._share_of(member):
                found.setdefault(member.record.group, []).append(member)
        found = {name: workers for name, workers in found.items() if any(map(_decodes, workers))}
        self._seen = {name: seen for name, seen in self._seen.items() if name in found}
        shares: dict[str, list[str]] = {}
        for name, members in found.items():
            self._look_at(name, members)
            shares.setdefault(self._share_of(members[0]), []).append(name)
        return shares

    def _look_at(self, name: str, members: list[Member]) -> None:
        now_s, share = self._clock.monotonic(), self._share_of(members[0])
        told = self._told(name)
        model = told if self._shares.get(told) == share else members[0].record.model
        seen = self._seen.get(name)
        if seen is None or seen.model != model:
            before = "" if seen is None else seen.model
            seen = self._seen[name] = _Seen(model, now_s, before, self._is_kept(model), busy_at_s=now_s)
        if any(member.load.running + member.load.waiting + member.session.num_open_attempts for member in members):
            seen.busy_at_s = now_s
        is_awake = all(member.state == WorkerState.READY and member.record.model == model for member in members)
        if not is_awake or seen.awake_at_s is not None:
            return
        seen.awake_at_s = seen.busy_at_s = now_s
        if seen.before:
            seconds, origin = now_s - seen.since_s, "asleep" if seen.was_asleep else "disk"
            self._times.note(seconds, was_asleep=seen.was_asleep)
            self._metrics.model_switches.labels(model, origin).observe(seconds)
            facts = {"group": name, "model": model, "before": seen.before, "from": origin, "seconds": round(seconds, 3)}
            logger.info("another model is awake", extra=facts)

    def _group(self, name: str, waiting_s: Mapping[str, float], now_s: float) -> WorkerGroup:
        seen = self._seen[name]
        return WorkerGroup(
            name,
            seen.model,
            awake_s=None if seen.awake_at_s is None else now_s - seen.awake_at_s,
            idle_s=0.0 if seen.model in waiting_s else now_s - seen.busy_at_s,
        )

    def _waiting_s(self, share: str) -> dict[str, float]:
        """Returns how long the oldest of what is open of each model of a share is here, in seconds."""
        now_s = self._clock.monotonic()
        found: dict[str, float] = {}
        for spec in itertools.chain.from_iterable(source() for source in self._sources):
            if self._shares.get(spec.model) == share:
                found[spec.model] = max(found.get(spec.model, 0.0), now_s - spec.arrived_s)
        return found

    def _switch(self, due: Switch) -> None:
        seen = self._seen[due.group]
        logger.info("workers are to have another model", extra={"group": due.group, "model": due.model})
        self._tell(due.group, due.model)
        now_s = self._clock.monotonic()
        self._seen[due.group] = _Seen(due.model, now_s, seen.model, self._is_kept(due.model), busy_at_s=now_s)

    def _give_up(self, name: str, seen: _Seen) -> None:
        """Has a group return to the model that it had; the one that did not come is left alone for a while."""
        logger.error("a model does not wake; its workers' logs say why", extra={"group": name, "model": seen.model})
        self._resting[seen.model] = self._clock.monotonic() + REST_S
        self._switch(Switch(name, seen.before))
        self._seen[name].before = ""  # that is no switch to measure

    def _is_kept(self, model: str) -> bool:
        """Returns whether the weights of a model are in memory at one of its workers."""
        return any(model in member.record.asleep for member in self._topology.members())

    def _share_of(self, member: Member) -> str:
        return self._shares.get(member.record.model, "") if member.record.group else ""

    def _file(self, group: str) -> Path:
        assert self._folder is not None, "without a folder nothing is decided"
        return self._folder / f"{group}.model"

    def _told(self, group: str) -> str:
        """Returns the model that a group's workers are to have; empty: nobody has said."""
        if self._folder is None:
            return ""
        try:
            with self._file(group).open("rb") as file:
                return file.read(MAX_NAME_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _tell(self, group: str, model: str) -> None:
        written = self._file(group).with_suffix(".new")
        written.write_text(model)
        written.replace(self._file(group))


def _decodes(member: Member) -> bool:
    return member.record.role == "decode"
