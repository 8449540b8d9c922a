"""One worker process as the gateway knows it: its record in the registry, the session to it, what it reports."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.topology.presence import Seen
from gateway.topology.reports import WorkerLoad
from gateway.topology.session import WorkerSession
from services.cluster.registry import WorkerRecord
from services.runtime.gpu_facts import GpuFacts
from services.runtime.reach import Obstacle
from services.runtime.worker_state import WorkerState
from services.scheduling.gpu_judgement import GPU_OK, GpuJudgement
from services.scheduling.routing.views import WorkerView

ROLES: tuple["Role", ...] = ("prefill", "decode")
Role = Literal["prefill", "decode"]


@dataclass(slots=True)
class Member:
    """One worker process and the session to it. `is_listed`: the registry has it.

    `is_exact`: an answer does not depend on whether this worker computes it, as of the last call of `members`. `gpu` is
    the judgement of `gpu_facts`, which are None where the process has said nothing of a GPU. `left_out` is why it gets
    no work: its model is not the one that this gateway serves under that name. Empty: it may have work.
    """

    record: WorkerRecord
    session: WorkerSession
    keeper: asyncio.Task[None] | None = None
    is_listed: bool = True
    is_drain_asked: bool = False
    is_exact: bool = False
    left_out: str = ""
    gpu: GpuJudgement = GPU_OK
    gpu_facts: GpuFacts | None = None
    changed_at_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When its session last came up, broke or said something, on the event loop's clock; at first, when it appeared."""
    last_state: WorkerState | None = None
    """Its state when its session last came up, broke or said something."""
    obstacle: Obstacle | None = None
    """Why its last session ended, while it has none."""
    has_worked: bool = False
    """Whether it was ever ready."""
    is_leaving: bool = False
    """Whether it has said that it leaves: once gone, it is not reported as missing."""
    seen: tuple[object, WorkerView] | None = None
    """All that its last view without bookings there depended on, and that view."""

    @property
    def arithmetic(self) -> str:
        """What its results depend on besides the inputs: workers of one arithmetic compute equal results."""
        return self.record.arithmetic

    @property
    def state(self) -> WorkerState:
        """What the worker does, by the freshest evidence."""
        if not self.session.is_up:
            return WorkerState.STARTING if self.record.state == WorkerState.STARTING else WorkerState.LOST
        if self.left_out:
            return WorkerState.LEFT_OUT
        is_draining = self.is_drain_asked or self.session.load.is_draining or self.record.state == WorkerState.DRAINING
        return WorkerState.DRAINING if is_draining else WorkerState.READY

    @property
    def load(self) -> WorkerLoad:
        """The session's load while it is up, else what the registry says."""
        if self.session.is_up:
            return self.session.load
        record = self.record
        return WorkerLoad(
            pages_total=record.pages_total,
            pages_free=record.pages_free,
            pages_cached=record.pages_cached,
            pages_reserved=record.pages_reserved,
            pages_used=record.pages_used,
            running=record.running,
            waiting=record.waiting,
        )

    @property
    def pages_available(self) -> int:
        """Pages that are free or only cached, less those that are promised there or booked here."""
        load = self.load
        return load.pages_free + load.pages_cached - load.pages_promised - self.session.books.pages


def seen_of(member: Member) -> Seen:
    """Returns what `presence` compares of a worker."""
    record = member.record
    return Seen(record.id, record.role, record.model, record.host, record.address, member.state, member.has_worked)


def mark_exact(members: Sequence[Member], *, allows_inexact: bool) -> None:
    """Marks a worker as exact if the ready workers of its model all have its identity."""
    identities: dict[str, set[str]] = {}
    for member in members:
        if member.state == WorkerState.READY:
            identities.setdefault(member.record.model, set()).add(member.record.identity_key)
    for member in members:
        record = member.record
        is_known = bool(record.identity) and not allows_inexact
        is_alike = identities.get(record.model, set()) <= {record.identity_key}
        member.is_exact = record.exact and is_known and is_alike
