"""Which workers are in the cluster, as this gateway sees it: registered ones, with a session to each.

A live session is better evidence than the registry: a worker stays in rotation while its stream is up, whatever
happens to Redis. This module knows no request and does not choose among workers.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from gateway.topology.keeper import break_silent, keep_connected
from gateway.topology.member import Member, Role, mark_exact, seen_of
from gateway.topology.pacing import Pace
from gateway.topology.presence import Presence
from gateway.topology.session import DecodeSession, Peer, PrefillSession, WorkerSession
from gateway.topology.views import USUAL_S, ModelWorkers, Rotation, UsualSpeeds, find_usual
from services.cluster.registry import LEASE_TTL_S, WorkerRecord
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import NotFound, TransferFailed, WorkerUnavailable
from services.runtime.gpu_facts import GpuFacts
from services.runtime.identity import has_weights_of
from services.runtime.worker_state import WorkerState
from services.scheduling.gpu_judgement import GPU_OK, GpuJudgement, GpuState, judge_gpu
from services.scheduling.pools import NO_POOLS, Audience, Pools

QUIET_S = 1.0  # a worker that has not spoken for this long has its lease looked up
SETTLING_S = 6.0  # after a gateway's start: the registry is read, and a slow machine connects to all workers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Role:
    """The members of one role by worker id, and how a session to one is made."""

    make_session: type[WorkerSession]
    members: dict[str, Member] = field(default_factory=dict)


class Topology:
    """Keeps a session to every registered worker; `on_change` is called whenever anything has changed."""

    def __init__(
        self,
        *,
        gateway_incarnation: str,
        on_change: Callable[[], None],
        judge: Callable[[WorkerRecord], str] = lambda record: "",
        allows_inexact: bool = False,
        presence: Presence | None = None,
        pools: Pools = NO_POOLS,
    ) -> None:
        """`judge` returns why a worker must get no work, or an empty string. With `allows_inexact`, a response may
        continue wherever its weights are, and no worker counts as exact. `presence` is notified of leaving workers.
        """
        self.presence = presence or Presence()
        self.pools = pools
        self._gateway_incarnation = gateway_incarnation
        self._on_change = on_change
        self._judge = judge
        self._allows_inexact = allows_inexact
        self._roles = {"prefill": _Role(PrefillSession), "decode": _Role(DecodeSession)}
        self._mismatched: set[tuple[str, str]] = set()
        self._in_order: list[Member] | None = None  # all workers by role and id, until one changes
        self._models: dict[str | None, ModelWorkers] = {}
        """Workers in rotation by model, and of all models under None. Cleared when a worker joins or leaves."""
        self._named_tenants: dict[str, set[str]] = {}
        """Tenants with dedicated workers, by model. Cleared when a worker joins or leaves."""
        self._watchers: set[Callable[[], None]] = set()
        self._load_watchers: set[Callable[[], None]] = set()  # for reports of load, too
        self.stale_since_s: float | None = None  # since when it is unknown which workers are registered
        self.settled_at_s = -math.inf  # until then, each registered worker may still be connected for the first time
        self._renewed_at_s: dict[str, float] = {}  # when the lease of each quiet worker was renewed, by its id
        self._note_gpu: Callable[[str, GpuJudgement], None] = lambda worker_id, judgement: None
        self._note_leaving: Callable[[str], None] = lambda worker_id: None
        self._note_handoff: Callable[[str, str, int | TransferFailed], None] = lambda prefill, decode, outcome: None
        self._watching: list[asyncio.Task[None]] = []
        self.pace = Pace()
        """The pace of the tokens of all sessions."""

    def start(self) -> None:
        """Begins to watch for silent workers, and whether there is time for every token."""
        self.stale_since_s = self.now_s()  # until the registry has been read
        self.settled_at_s = self.stale_since_s + SETTLING_S
        self._watching = [
            supervise(partial(break_silent, self.members, self._last_renewal_s), name="silence-check"),
            supervise(self.pace.keep, name="pace"),
        ]

    async def close(self) -> None:
        """Ends all sessions."""
        tasks = [member.keeper for member in self.members() if member.keeper is not None] + self._watching
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch_gpus(self, note: Callable[[str, GpuJudgement], None]) -> None:
        """Calls `note(worker_id, judgement)` when a worker's GPU is judged anew; ok when its process has left."""
        self._note_gpu = note

    def watch_leaving(self, note: Callable[[str], None]) -> None:
        """Calls `note(worker_id)` when a worker is no longer registered or connected."""
        self._note_leaving = note

    def watch_handoffs(self, note: Callable[[str, str, int | TransferFailed], None]) -> None:
        """Calls `note(prefill worker's id, decode worker's id, outcome)`, perhaps twice; see `note_handoff`."""
        self._note_handoff = note

    def note_handoff(self, prefill_id: str, decode_id: str, outcome: int | TransferFailed) -> None:
        """Notes how many bytes of pages went from one worker to another, or why they could not."""
        self._note_handoff(prefill_id, decode_id, outcome)

    def take_membership(self, records: Iterable[WorkerRecord], *, is_stale: bool = False) -> None:
        """Follows the registry: sessions to new processes begin, workers that left and cannot be reached go."""
        if not is_stale or self.stale_since_s is None:
            self.stale_since_s = self.now_s() if is_stale else None
        listed = {(record.role, record.id): record for record in records}
        for (listed_role, worker_id), record in listed.items():
            self._take_record(self._roles[listed_role], worker_id, record)
        for role_name, role in self._roles.items():
            for worker_id, member in list(role.members.items()):
                member.is_listed = (role_name, worker_id) in listed
                if not member.is_listed and not member.session.is_up:
                    self._forget(role, worker_id)
        self._changed()

    def quiet_workers(self) -> list[str]:
        """Returns the ids of connected workers that have been silent for QUIET_S. Their leases show if they live."""
        sessions, since_s = [member.session for member in self._all()], self.now_s() - QUIET_S
        return [one.peer.worker_id for one in sessions if one.is_up and not one.has_spoken_since(since_s)]

    def take_renewals(self, ages_s: Mapping[str, float]) -> None:
        """Records how long ago the leases of quiet workers were renewed, by worker id, as of now."""
        self._renewed_at_s = {worker_id: self.now_s() - age_s for worker_id, age_s in ages_s.items()}

    def look_for_missing(self) -> None:
        """Has `presence` compare the workers that are present with those expected; to be called about every second."""
        self.presence.look(map(seen_of, self._all()), self.now_s())

    def now_s(self) -> float:
        """Returns the time by which members are measured."""
        return asyncio.get_running_loop().time()

    def members(self) -> list[Member]:
        """Returns all known workers in order of role and id."""
        if self._in_order is None:
            self._in_order = sorted(self._all(), key=lambda member: (member.record.role, member.record.id))
            mark_exact(self._in_order, allows_inexact=self._allows_inexact)
        return list(self._in_order)

    def workers(self, model: str | None) -> ModelWorkers:
        """Returns the workers of a model in rotation, or of all; to be asked anew when one may have come or gone."""
        workers = self._models.get(model)
        if workers is None:
            workers = ModelWorkers(self._find_rotation("prefill", model), self._find_rotation("decode", model))
            self._models[model] = workers
        return workers

    def prefill_ids(self, model: str, *, decode: Peer | None = None) -> list[str]:
        """Returns the prefill workers of a model in rotation; with `decode`, those whose pages fit it."""
        workers = self.workers(model)
        if decode is None:
            return workers.prefill.ids
        member = self._roles["decode"].members.get(decode.worker_id)
        if member is None or member.record.model != model:
            return []
        fitting = workers.fitting(member.record.identity_key, self.may_go_on)
        mismatched = {prefill for prefill, other in self._mismatched if other == decode.incarnation}
        return [one.record.id for one in fitting if one.record.incarnation not in mismatched]

    def open_ids(self, role_name: Role, model: str, audience: Audience) -> set[str]:
        """Returns the ready workers that meet the placement constraints, which may pin them to an `identity_key`."""
        records = [member.record for member in self._in_rotation(role_name, model).members]
        if bound_to := audience.bound_to:
            records = [record for record in records if self.may_go_on(bound_to, record.identity_key)]
        return {record.id for record in records if self._works_for(record, audience)}

    def rotation_ids(self, role_name: Role, model: str) -> list[str]:
        """Returns all workers of a role and a model in rotation, whatever tenants they work for."""
        return self._in_rotation(role_name, model).ids

    def decode_identity(self, worker_id: str) -> str:
        """Returns the `identity_key` to which answers that a decode worker begins are bound; empty: unknown."""
        member = self._roles["decode"].members.get(worker_id)
        return "" if member is None else member.record.identity_key

    def identities(self, model: str) -> set[str]:
        """Returns the identities to which answers of a model's workers in rotation are bound."""
        return self.workers(model).identities

    def may_go_on(self, began: str, here: str) -> bool:
        """Whether an answer that began with one identity may continue with another, or be handed over to it."""
        return began == here or (self._allows_inexact and has_weights_of(began, here))

    def free_share(self, model: str, audience: Audience) -> float:
        """Returns the largest share of its pages that a decode worker has free for these; 1 without any worker."""
        members = self.workers(model).decode.members
        shares = (
            member.pages_available / max(1, member.load.pages_total)
            for member in members
            if self._works_for(member.record, audience)
        )
        return max(shares, default=1.0)

    def usual_speeds(self, model: str) -> UsualSpeeds:
        """Returns the usual speeds of a model's workers, at most `USUAL_S` old."""
        workers, now_s = self.workers(model), asyncio.get_running_loop().time()
        if now_s - workers.usual_at_s > USUAL_S:
            workers.usual = find_usual(workers.prefill.members, workers.decode.members, now_s)
            workers.usual_at_s = now_s
        return workers.usual

    def prefill_session(self, worker_id: str) -> PrefillSession:
        """Returns the session to a prefill worker. Raises WorkerUnavailable if it is not connected."""
        session = self._session("prefill", worker_id)
        assert isinstance(session, PrefillSession)
        return session

    def decode_session(self, worker_id: str) -> DecodeSession:
        """Returns the session to a decode worker. Raises WorkerUnavailable if it is not connected."""
        session = self._session("decode", worker_id)
        assert isinstance(session, DecodeSession)
        return session

    def num_ready(self, role_name: Role, model: str | None = None) -> int:
        """Returns how many workers of the role are in rotation, of one model or of all."""
        return len(self._in_rotation(role_name, model).members)

    def is_away(self, role_name: Role, model: str, *, audience: Audience) -> bool:
        """Returns whether a registered worker for these requests lost its session less than one lease time ago.

        Such a worker may reconnect soon, and so may each lost one right after this gateway's start. A starting worker
        does not count, because its loading time is unknown.
        """
        now_s = self.now_s()
        since_s = now_s - LEASE_TTL_S if now_s >= self.settled_at_s else -math.inf
        if self.stale_since_s is not None and (self.stale_since_s < since_s or not self.members()):
            return self.stale_since_s >= since_s  # where none is known yet, there may be one
        return any(
            member.is_listed and not member.is_drain_asked and not member.left_out and member.changed_at_s >= since_s
            for member in self._roles[role_name].members.values()
            if (member.state, member.record.state, member.record.model) == (WorkerState.LOST, WorkerState.READY, model)
            and self._works_for(member.record, audience)
        )

    def is_alive(self, incarnation: str) -> bool:
        """Whether this very process has a session now."""
        return any(member.session.is_up for member in self._all() if member.record.incarnation == incarnation)

    def is_silent_since(self, incarnation: str, time_s: float) -> bool:
        """Whether the process has a session and has said nothing since a time of the event loop."""
        sessions = [member.session for member in self._all() if member.record.incarnation == incarnation]
        return any(session.is_up and not session.has_spoken_since(time_s) for session in sessions)

    def can_take_over(self, worker_id: str, giver: Peer) -> bool:
        """Whether one decode worker can take another one's pages."""
        members = self._roles["decode"].members
        source = members.get(giver.worker_id)
        is_other = source is not None and worker_id != giver.worker_id
        return source is not None and is_other and self._fits(source, members[worker_id].session.peer)

    def member(self, worker_id: str) -> Member | None:
        """Returns a worker of either role; None: no such one is known."""
        return next((role.members[worker_id] for role in self._roles.values() if worker_id in role.members), None)

    def max_sequence_tokens(self, model: str) -> int | None:
        """Returns the longest sequence that a decode worker of a model in rotation can hold; None without one."""
        return self.workers(model).decode.max_sequence_tokens

    def lane_of(self, model: str, audience: Audience) -> Audience:
        """Returns the audience as far as it matters: with a tenant only if some worker is kept for it.

        It is bound only while some decode worker in rotation may not continue an answer with that identity, and held to
        regions only while some worker in rotation is in another one.
        """
        named = self._named_tenants.get(model)
        if named is None:
            members = [member for member in self._all() if member.record.model == model]
            named = self._named_tenants[model] = {tenant for member in members for tenant in member.record.tenants}
        tenant, pool, bound_to, regions = audience
        is_free = not bound_to or all(
            self.may_go_on(bound_to, other) for other in self.workers(model).decode.identities
        )
        held = None if regions is None else self.workers(model).held_to(regions)
        return Audience(tenant if tenant in named else "", pool, "" if is_free else bound_to, held)

    def _works_for(self, record: WorkerRecord, audience: Audience) -> bool:
        is_open = not record.tenants or audience.tenant in record.tenants
        is_inside = audience.regions is None or record.region in audience.regions
        return is_open and is_inside and self.pools.may_use(audience.pool, record.pool)

    def kv_bytes_per_token(self, model: str) -> int:
        """Returns the bytes of a token's KV on its way to another worker; 0: not known yet."""
        return self.workers(model).prefill.kv_bytes_per_token

    def cache_layouts(self, model: str) -> set[tuple[str, int]]:
        """Returns (layout fingerprint, tokens of a page) of workers in rotation: what names of pages depend on."""
        return self.workers(model).layouts

    def is_uniform(self, model: str) -> bool:
        """Whether the pages of every worker of a model in rotation fit every other one."""
        return len(self.workers(model).identities) <= 1 and not self._mismatched

    def decode_room(self, worker_id: str, service_class: int) -> tuple[int, int]:
        """Returns the (pages, places) that a decode worker has for requests of a class.

        Includes the pages and slots of lower classes. Slots are unlimited if the worker does not report their number.
        """
        member = self._roles["decode"].members.get(worker_id)
        if member is None:
            return 0, 0
        load, books = member.load, member.session.books
        pages = load.pages_free + load.pages_cached - load.pages_promised
        running = max(load.running + load.waiting, member.session.num_open_attempts)
        if load.pages_promised_by_class:
            pages = load.pages_total - sum(load.pages_promised_by_class[: service_class + 1])
        if load.running_by_class:
            running = sum(load.running_by_class[: service_class + 1])
        places = member.record.max_running or 1 << 30
        return pages - books.pages, places - running - books.requests

    def exclude_pair(self, prefill: Peer, decode: Peer) -> None:
        """Takes a pair whose pages do not fit together out of rotation, for the life of both processes."""
        logger.error("workers do not fit", extra={"prefill": prefill.worker_id, "decode": decode.worker_id})
        self._mismatched.add((prefill.incarnation, decode.incarnation))

    def drain(self, worker_id: str) -> Member:
        """Takes a worker out of rotation and tells it to leave. Raises NotFound or WorkerUnavailable."""
        for member in self.members():
            if member.record.id == worker_id:
                member.session.drain()
                member.is_drain_asked = True
                self._changed()
                return member
        raise NotFound(f"there is no worker {worker_id[:64]!r}", field="worker_id")

    async def changes(self, *, with_loads: bool = True) -> AsyncGenerator[None, None]:
        """Yields at once, and again after each change; `with_loads`: also after each report of load."""
        changed = asyncio.Event()
        with self.watched(changed.set, with_loads=with_loads):
            while True:
                yield
                await changed.wait()
                changed.clear()

    def tell_watchers(self) -> None:
        """Calls the watchers' notes: something that they show beside the workers has changed."""
        for note in (*self._watchers, *self._load_watchers):
            note()

    @contextlib.contextmanager
    def watched(self, note: Callable[[], None], *, with_loads: bool = True) -> Iterator[None]:
        """Calls `note` after each change, until the block is left; `with_loads`: also after each report of load."""
        watchers = self._load_watchers if with_loads else self._watchers
        watchers.add(note)
        try:
            yield
        finally:
            watchers.discard(note)

    def _take_record(self, role: _Role, worker_id: str, record: WorkerRecord) -> None:
        member = role.members.get(worker_id)
        if member is not None and member.record.incarnation == record.incarnation:
            if (member.record.state, record.state) == (WorkerState.DRAINING, WorkerState.READY):
                member.is_leaving = False  # it was to change its role, and stays what it is
            member.record = record
            member.is_leaving |= record.state == WorkerState.DRAINING
            self._judge_model(member)
            if member.keeper is None:
                # While it was starting it had no address.
                member.changed_at_s = asyncio.get_running_loop().time()
                member.session = self._new_session(role, record)
        else:
            self._forget(role, worker_id)
            member = role.members[worker_id] = Member(record, self._new_session(role, record))
            self._judge_model(member)
        if member.keeper is None and record.state != WorkerState.STARTING:
            member.keeper = supervise(partial(self._keep, role, member), name="session", subject=worker_id)

    def _judge_model(self, member: Member) -> None:
        """Logs once for each worker process that it gets no work, and why: its model never changes in its life."""
        before, member.left_out = member.left_out, self._judge(member.record)
        if member.left_out != before:
            found = {"worker": member.record.id, "model": member.record.model, "reason": member.left_out}
            logger.warning("a worker is left out: it does not serve this gateway's model of that name", extra=found)

    def _new_session(self, role: _Role, record: WorkerRecord) -> WorkerSession:
        peer = Peer(worker_id=record.id, incarnation=record.incarnation, address=record.address)
        return role.make_session(
            peer,
            gateway_incarnation=self._gateway_incarnation,
            on_change=lambda session: self._session_changed(role, session),
            pace=self.pace,
        )

    def _session_changed(self, role: _Role, session: WorkerSession) -> None:
        member = role.members.get(session.peer.worker_id)
        if member is not None and member.session is session:
            state = member.state
            member.changed_at_s = asyncio.get_running_loop().time()
            member.is_leaving |= session.load.is_draining
            if session.is_up:
                member.obstacle = None
                member.has_worked |= state == WorkerState.READY
            if member.left_out:
                session.tell_left_out(member.left_out)
            if session.gpu is not None and session.gpu is not member.gpu_facts:
                self._judge_gpu(member, session.gpu)
            if state == member.last_state:  # It has said how busy it is, as it does with every step.
                self._on_change()
                for note in self._load_watchers:
                    note()
                return
            member.last_state = state
        self._changed()

    def _judge_gpu(self, member: Member, facts: GpuFacts) -> None:
        """Judges a GPU: once for each report that has new facts, not for each request."""
        member.gpu_facts = facts
        before, member.gpu = member.gpu, judge_gpu(facts)
        if member.gpu == before:
            return
        self._note_gpu(member.record.id, member.gpu)
        if member.gpu.state is not before.state:
            found = {"worker": member.record.id, "state": member.gpu.state.value, "reasons": member.gpu.reasons}
            level = logging.INFO if member.gpu.state is GpuState.OK else logging.WARNING
            logger.log(level, "the state of a worker's GPU has changed", extra=found)

    def _forget(self, role: _Role, worker_id: str) -> None:
        member = role.members.pop(worker_id, None)
        if member is None:
            return
        in_order = member.is_leaving or member.is_drain_asked or member.record.state == WorkerState.DRAINING
        self.presence.left(seen_of(member), self.now_s(), unix_s=SYSTEM_CLOCK.unix_ns() / 1e9, in_order=in_order)
        if member.keeper is not None:
            member.keeper.cancel()
        if member.gpu != GPU_OK:
            self._note_gpu(worker_id, GPU_OK)
        self._note_leaving(worker_id)
        if member.left_out:
            logger.info("a worker that was left out has gone", extra={"worker": worker_id, "reason": member.left_out})
        incarnation = member.record.incarnation
        self._mismatched = {pair for pair in self._mismatched if incarnation not in pair}

    def _all(self) -> Iterator[Member]:
        return itertools.chain.from_iterable(role.members.values() for role in self._roles.values())

    async def _keep(self, role: _Role, member: Member) -> None:
        await keep_connected(member, lambda: self._new_session(role, member.record))
        # This is the member's own keeper, which must not be cancelled.
        if role.members.get(member.record.id) is member:
            member.keeper = None
            self._forget(role, member.record.id)
            self._changed()

    def _last_renewal_s(self, worker_id: str) -> float:
        return self._renewed_at_s.get(worker_id, -math.inf)

    def _in_rotation(self, role_name: Role, model: str | None) -> Rotation:
        workers = self.workers(model)
        return workers.prefill if role_name == "prefill" else workers.decode

    def _find_rotation(self, role_name: Role, model: str | None) -> Rotation:
        """Returns the members in rotation. A worker of another model than the request's must never be among them."""
        return Rotation(
            [
                member
                for member in self._roles[role_name].members.values()
                if member.state == WorkerState.READY and (model is None or member.record.model == model)
            ]
        )

    def _session(self, role_name: str, worker_id: str) -> WorkerSession:
        member = self._roles[role_name].members.get(worker_id)
        if member is None or not member.session.is_up:
            raise WorkerUnavailable(f"{worker_id} is not connected")
        return member.session

    def _fits(self, prefill: Member, decode: Peer) -> bool:
        member = self._roles["decode"].members.get(decode.worker_id)
        if member is None or not self.may_go_on(prefill.record.identity_key, member.record.identity_key):
            return False
        if member.record.model != prefill.record.model:
            return False
        return (prefill.record.incarnation, decode.incarnation) not in self._mismatched

    def _changed(self) -> None:
        """Drops what depends on the set of workers: one may have come, gone or been replaced."""
        self._in_order = None
        self._models.clear()
        self._named_tenants.clear()
        self._on_change()
        self.tell_watchers()
