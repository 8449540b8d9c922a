"""Who is in the cluster, as this gateway sees it: registered workers, a session to each, and their live load.

A live session is better evidence than the registry: a worker stays in rotation while its stream is up, whatever
happens to Redis. Knows no request; does not choose among workers.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from gateway.topology.pacing import Pace
from gateway.topology.presence import Presence, Seen
from gateway.topology.reports import WorkerLoad
from gateway.topology.session import DecodeSession, Peer, PrefillSession, Unreachable, WorkerSession
from services.cluster.registry import LEASE_TTL_S, WorkerRecord
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import NotFound, NotProven, TransferFailed, WorkerUnavailable
from services.runtime.gpu_health import GpuFacts
from services.runtime.identity import has_weights_of
from services.runtime.reach import NETWORK, OTHER_CLUSTER, Obstacle
from services.runtime.worker_state import WorkerState
from services.scheduling.health import GPU_OK, GpuJudgement, GpuState, judge_gpu
from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DEFAULT_PREFILL,
    DecodeSpeed,
    LinkSpeed,
    PrefillSpeed,
)
from services.scheduling.routing.views import Views, WorkerView

FIRST_RECONNECT_S = 0.1
MAX_RECONNECT_S = 2.0
SILENCE_CHECK_S = 0.25
ALIKE = 1.5
"""Speeds of workers that differ by less than this factor differ by chance."""
SHORT_WAY_S = 0.02
"""Of a MiB: where it takes longer, a link has its own figure, however little that differs from what is usual."""
USUAL_S = 0.25
"""So long it is not asked anew what is usual."""
FRESH_S = 3.0
"""A worker that has had nothing to do for longer may have become another one."""
RENEWED_S = 2.5
"""A lease that was renewed within this time shows that its worker lives: workers renew every second, and the gateway
looks as often. Less than `sessions.SILENCE_LIMIT_S`: a process that stopped renewed nothing since its last word."""
OWN_PAUSE_S = 1.0
"""If our own check comes this late, it was us who slept, and nobody is blamed for silence."""

ROLES: tuple["Role", ...] = ("prefill", "decode")
Role = Literal["prefill", "decode"]
S = TypeVar("S", PrefillSpeed, DecodeSpeed, LinkSpeed)

logger = logging.getLogger(__name__)


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
    """When its session last came up, broke or said something, on the event loop's clock; at first, when it came."""
    last_state: WorkerState | None = None
    """Its state when its session last came up, broke or said something."""
    obstacle: Obstacle | None = None
    """Why its last session ended, while it has none."""
    has_worked: bool = False
    """It was ready once."""
    is_leaving: bool = False
    """It has said that it leaves: when it is gone nobody misses it."""
    seen: tuple[object, WorkerView] | None = None
    """How it was last seen while nothing was booked there, and all that this depends on."""

    @property
    def arithmetic(self) -> str:
        """What its results depend on beside the inputs; workers of one arithmetic compute the same."""
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
    ) -> None:
        """`judge` says why a worker must get no work; empty: it may. With `allows_inexact` an answer may go on wherever
        its weights are, however these are computed with, and no worker counts as exact. `presence` is told who leaves.
        """
        self.presence = presence or Presence()
        self._gateway_incarnation = gateway_incarnation
        self._on_change = on_change
        self._judge = judge
        self._allows_inexact = allows_inexact
        self._roles = {"prefill": _Role(PrefillSession), "decode": _Role(DecodeSession)}
        self._mismatched: set[tuple[str, str]] = set()
        self._usual: dict[str, tuple[float, UsualSpeeds]] = {}
        """By model, with the time at which it was found."""
        self._rotations: dict[tuple[Role, str | None], _Rotation] = {}
        """By role and model, until a worker comes or goes."""
        self._named_tenants: dict[str, set[str]] = {}
        """By model, those for whom workers are kept, until a worker comes or goes."""
        self._watchers: set[Callable[[], None]] = set()
        self._stale_since_s: float | None = None
        """Since when nobody can say who is registered, on the event loop's clock."""
        self._renewed_at_s: dict[str, float] = {}
        """By worker id, when its lease was renewed, as far as that is known, on the event loop's clock."""
        self._note_gpu: Callable[[str, GpuJudgement], None] = lambda worker_id, judgement: None
        self._note_leaving: Callable[[str], None] = lambda worker_id: None
        self._note_handoff: Callable[[str, str, int | TransferFailed], None] = lambda prefill, decode, outcome: None
        self._watching: list[asyncio.Task[None]] = []
        self.pace = Pace()
        """Of the tokens of all sessions."""

    def start(self) -> None:
        """Begins to watch for silent workers, and whether there is time for every token."""
        self._watching = [
            asyncio.create_task(self._check_silence(), name="silence-check"),
            asyncio.create_task(self.pace.keep(), name="pace"),
        ]

    async def close(self) -> None:
        """Ends all sessions."""
        tasks = [member.keeper for member in self.members() if member.keeper is not None] + self._watching
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch_gpus(self, note: Callable[[str, GpuJudgement], None]) -> None:
        """Calls `note(worker_id, judgement)` when a worker's GPU is judged otherwise; ok when the process has left."""
        self._note_gpu = note

    def watch_leaving(self, note: Callable[[str], None]) -> None:
        """Calls `note(worker_id)` when a worker is no longer registered or connected."""
        self._note_leaving = note

    def watch_handoffs(self, note: Callable[[str, str, int | TransferFailed], None]) -> None:
        """Calls `note(prefill worker's id, decode worker's id, outcome)`, perhaps twice; see `note_handoff`."""
        self._note_handoff = note

    def note_handoff(self, prefill_id: str, decode_id: str, outcome: int | TransferFailed) -> None:
        """So many bytes of pages went from one worker to another, or could not."""
        self._note_handoff(prefill_id, decode_id, outcome)

    def take_membership(self, records: Iterable[WorkerRecord], *, is_stale: bool = False) -> None:
        """Follows the registry: sessions to new processes begin, workers that left and cannot be reached go."""
        if not is_stale or self._stale_since_s is None:
            self._stale_since_s = self.now_s() if is_stale else None
        listed = {(record.role, record.id): record for record in records}
        for (listed_role, worker_id), record in listed.items():
            self._take_record(self._roles[listed_role], worker_id, record)
        for role_name, role in self._roles.items():
            for worker_id, member in list(role.members.items()):
                member.is_listed = (role_name, worker_id) in listed
                if not member.is_listed and not member.session.is_up:
                    self._forget(role, worker_id)
        self._changed()

    def take_renewals(self, ages_s: Mapping[str, float]) -> None:
        """How long ago each worker's lease was renewed, by its id, as of now."""
        now_s = asyncio.get_running_loop().time()
        self._renewed_at_s = {worker_id: now_s - age_s for worker_id, age_s in ages_s.items()}

    def look_for_missing(self) -> None:
        """Has `presence` compare who is there with who should be; to be called every second or so."""
        self.presence.look(map(_seen, self._all()), self.now_s())

    def now_s(self) -> float:
        """What times of members are measured by."""
        return asyncio.get_running_loop().time()

    def members(self) -> list[Member]:
        """All known workers in order of role and id."""
        members = [role.members[key] for _, role in sorted(self._roles.items()) for key in sorted(role.members)]
        ways: dict[str, set[str]] = {}
        for member in members:
            if member.state == WorkerState.READY:
                ways.setdefault(member.record.model, set()).add(member.record.identity_key)
        for member in members:
            record = member.record
            is_known = bool(record.identity) and not self._allows_inexact
            is_alike = ways.get(record.model, set()) <= {record.identity_key}
            member.is_exact = record.exact and is_known and is_alike
        return members

    def prefill_views(self, model: str, *, prompt: tuple[int, int]) -> Views:
        """Prefill workers of a model in rotation.

        Of a `prompt` of (service class, tokens), only what is computed before it counts as waiting.
        """
        usual = self.usual_speeds(model)
        return self._views(self._rotation("prefill", model), usual, usual.prefill, prompt)

    def decode_views(self, model: str, *, prompt: tuple[int, int]) -> Views:
        """Decode workers of a model in rotation; `prompt` as in `prefill_views`."""
        usual = self.usual_speeds(model)
        return self._views(self._rotation("decode", model), usual, usual.local, prompt)

    def prefill_ids(self, model: str, *, decode: Peer | None = None) -> list[str]:
        """Prefill workers of a model in rotation; with `decode`, those whose pages fit it."""
        rotation = self._rotation("prefill", model)
        if decode is None:
            return rotation.ids
        return [member.record.id for member in rotation.members if self._fits(member, decode)]

    def decode_ids(self, model: str, *, tenant: str, bound_to: str = "") -> set[str]:
        """Decode workers of a model in rotation that work for a tenant.

        With `bound_to`, an `identity_key`, only those that an answer may go on at which began with it.
        """
        records = [member.record for member in self._rotation("decode", model).members]
        if bound_to:
            records = [record for record in records if self._may_go_on(bound_to, record.identity_key)]
        return {record.id for record in records if not record.tenants or tenant in record.tenants}

    def rotation_ids(self, role_name: Role, model: str) -> list[str]:
        """All workers of a role and a model in rotation, whoever they work for."""
        return self._rotation(role_name, model).ids

    def decode_identity(self, worker_id: str) -> str:
        """What an answer is bound to that a decode worker begins, as an `identity_key`; empty: unknown."""
        member = self._roles["decode"].members.get(worker_id)
        return "" if member is None else member.record.identity_key

    def identities(self, model: str) -> set[str]:
        """What answers of a model's workers in rotation are bound to."""
        return self._rotation("prefill", model).identities | self._rotation("decode", model).identities

    def _may_go_on(self, began: str, here: str) -> bool:
        """Whether an answer that began with one identity may go on, or be handed over, to another."""
        return began == here or (self._allows_inexact and has_weights_of(began, here))

    def free_share(self, model: str, tenant: str) -> float:
        """Of its pages, the largest share that a decode worker in rotation has free for a tenant; 1 without any."""
        members = self._rotation("decode", model).members
        shares = (
            _pages_available(member.load, member.session) / max(1, member.load.pages_total)
            for member in members
            if not member.record.tenants or tenant in member.record.tenants
        )
        return max(shares, default=1.0)

    def usual_speeds(self, model: str) -> "UsualSpeeds":
        """What is normal for a model's workers, at most `USUAL_S` old."""
        at_s, usual = self._usual.get(model, (-math.inf, _NOTHING_MEASURED))
        now_s = asyncio.get_running_loop().time()
        if now_s - at_s > USUAL_S:
            prefills = [member.load for member in self._rotation("prefill", model).members]
            decoders = self._rotation("decode", model).members
            decodes = [member.load for member in decoders]
            prefill = _usual((load.prefill_speed for load in prefills), _prefill_s)
            local = _usual((load.prefill_speed for load in decodes), _prefill_s)
            decode = _usual((load.decode_speed for load in decodes), _step_s) or DEFAULT_DECODE
            usual = UsualSpeeds(
                prefill=prefill or local or DEFAULT_PREFILL,
                local=local or prefill or DEFAULT_PREFILL,
                decode=decode,
                decodes=frozenset(_decode_speed(member, decode, _fresh_since_s()) for member in decoders),
                link=_usual((load.link_speed for load in itertools.chain(prefills, decodes)), _transfer_s)
                or DEFAULT_LINK,
            )
            self._usual[model] = now_s, usual
        return usual

    def prefill_session(self, worker_id: str) -> PrefillSession:
        """The session to a prefill worker. Raises WorkerUnavailable where there is none."""
        session = self._session("prefill", worker_id)
        assert isinstance(session, PrefillSession)
        return session

    def decode_session(self, worker_id: str) -> DecodeSession:
        """The session to a decode worker. Raises WorkerUnavailable where there is none."""
        session = self._session("decode", worker_id)
        assert isinstance(session, DecodeSession)
        return session

    def num_ready(self, role_name: Role, model: str | None = None) -> int:
        """Workers of the role in rotation, of one model or of all."""
        return len(self._rotation(role_name, model).members)

    def is_away(self, role_name: Role, model: str) -> bool:
        """Whether a worker of a model has just lost its session and is still registered: it may be back in a moment.

        One that is starting is not: nobody knows how long that takes. Nor is one that cannot be reached for longer than
        a lease lasts, whether it goes on to renew its own or Redis is away and cannot say that it is over.
        """
        since_s = asyncio.get_running_loop().time() - LEASE_TTL_S
        if self._stale_since_s is not None and self._stale_since_s < since_s:
            return False
        return any(
            member.is_listed and not member.is_drain_asked and not member.left_out and member.changed_at_s >= since_s
            for member in self._roles[role_name].members.values()
            if (member.state, member.record.state, member.record.model) == (WorkerState.LOST, WorkerState.READY, model)
        )

    def is_alive(self, incarnation: str) -> bool:
        """Whether there is a session to this very process now."""
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

    def max_sequence_tokens(self, model: str) -> int | None:
        """The longest sequence that any decode worker of a model in rotation can hold; None while there is none."""
        return self._rotation("decode", model).max_sequence_tokens

    def lane_of(self, model: str, tenant: str, bound_to: str = "") -> str:
        """The same name for requests that may use the same workers: empty, or its tenant's if a worker is kept for it.

        With `bound_to`, the name is another one while an answer with that identity may not go on at some decode worker
        in rotation.
        """
        named = self._named_tenants.get(model)
        if named is None:
            members = [member for member in self._all() if member.record.model == model]
            named = self._named_tenants[model] = {tenant for member in members for tenant in member.record.tenants}
        lane = tenant if tenant in named else ""
        if bound_to and not all(
            self._may_go_on(bound_to, other) for other in self._rotation("decode", model).identities
        ):
            lane = f"{lane} {bound_to}"
        return lane

    def kv_bytes_per_token(self, model: str) -> int:
        """What the KV of a token weighs on its way to another worker; 0: nobody knows yet."""
        return self._rotation("prefill", model).kv_bytes_per_token

    def cache_layouts(self, model: str) -> set[tuple[str, int]]:
        """(layout fingerprint, tokens of a page) of a model's workers in rotation: what names of pages depend on."""
        return self._rotation("prefill", model).layouts | self._rotation("decode", model).layouts

    def is_uniform(self, model: str) -> bool:
        """Whether the pages of every worker of a model in rotation fit every other one."""
        return len(self.identities(model)) <= 1 and not self._mismatched

    def decode_room(self, worker_id: str, service_class: int) -> tuple[int, int]:
        """(pages, places) that a decode worker has for a request of a class: what worse classes have gives way.

        So many places that they never run out, where the worker does not say how many it has.
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

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields at once, and again after each change."""
        changed = asyncio.Event()
        with self.watched(changed.set):
            while True:
                yield
                await changed.wait()
                changed.clear()

    def tell_watchers(self) -> None:
        """What they show with the workers has changed."""
        for note in self._watchers:
            note()

    @contextlib.contextmanager
    def watched(self, note: Callable[[], None]) -> Iterator[None]:
        """Calls `note` after each change, until the block is left."""
        self._watchers.add(note)
        try:
            yield
        finally:
            self._watchers.discard(note)

    def _take_record(self, role: _Role, worker_id: str, record: WorkerRecord) -> None:
        member = role.members.get(worker_id)
        if member is not None and member.record.incarnation == record.incarnation:
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
            member.keeper = asyncio.create_task(self._keep_connected(role, member), name=f"session-{worker_id}")

    def _judge_model(self, member: Member) -> None:
        """Says once of each worker process that it gets no work, and why: its model never changes in its life."""
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
            member.changed_at_s = asyncio.get_running_loop().time()
            member.is_leaving |= session.load.is_draining
            if session.is_up:
                member.obstacle = None
                member.has_worked |= member.state == WorkerState.READY
            if member.left_out:
                session.tell_left_out(member.left_out)
            if session.gpu is not None and session.gpu is not member.gpu_facts:
                self._judge_gpu(member, session.gpu)
            if member.state == member.last_state:  # It has said how busy it is, as it does with every step.
                self._note_change()
                return
            member.last_state = member.state
        self._changed()

    def _judge_gpu(self, member: Member, facts: GpuFacts) -> None:
        """Once for each report that has new facts, not for each request."""
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
        self.presence.left(_seen(member), self.now_s(), unix_s=SYSTEM_CLOCK.unix_ns() / 1e9, in_order=in_order)
        if member.keeper is not None:
            member.keeper.cancel()
        if member.gpu != GPU_OK:
            self._note_gpu(worker_id, GPU_OK)
        self._note_leaving(worker_id)
        if member.left_out:
            logger.info("a worker that was left out has gone", extra={"worker": worker_id, "reason": member.left_out})
        incarnation = member.record.incarnation
        self._mismatched = {pair for pair in self._mismatched if incarnation not in pair}

    async def _keep_connected(self, role: _Role, member: Member) -> None:
        """Makes a new session each time one breaks, until the worker is no longer listed."""
        delay_s, last_reason = FIRST_RECONNECT_S, ""
        while True:
            started_at_s = asyncio.get_running_loop().time()
            try:
                await member.session.run()
            except WorkerUnavailable as error:
                is_news = member.obstacle is None or error.message != last_reason
                member.obstacle, last_reason = _obstacle(error), error.message
                facts = {"worker": member.record.id, "address": member.record.address, "reason": error.message}
                if not is_news:
                    pass  # it is the same with each try until somebody helps
                elif isinstance(error, NotProven):
                    logger.warning("a worker is not used: it and this gateway are not of one cluster", extra=facts)
                else:
                    logger.info("session ended", extra=facts)
            if not member.is_listed:
                self._forget_self(role, member)
                return
            if asyncio.get_running_loop().time() - started_at_s > MAX_RECONNECT_S:
                delay_s = FIRST_RECONNECT_S
            await asyncio.sleep(delay_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            delay_s = min(delay_s * 2, MAX_RECONNECT_S)
            member.session = self._new_session(role, member.record)

    def _all(self) -> Iterator[Member]:
        return itertools.chain.from_iterable(role.members.values() for role in self._roles.values())

    def _forget_self(self, role: _Role, member: Member) -> None:
        """Called on the member's own keeper, which therefore must not be cancelled."""
        if role.members.get(member.record.id) is member:
            member.keeper = None
            self._forget(role, member.record.id)
            self._changed()

    async def _check_silence(self) -> None:
        loop = asyncio.get_running_loop()
        checked_at_s = loop.time()
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            slept_s = loop.time() - checked_at_s - SILENCE_CHECK_S
            checked_at_s = loop.time()
            for member in self.members():
                if slept_s > OWN_PAUSE_S:
                    member.session.forgive_silence(slept_s)
                renewed_at_s = self._renewed_at_s.get(member.record.id, -math.inf)
                is_renewed = checked_at_s - renewed_at_s < RENEWED_S
                member.session.check_silence(checked_at_s, is_lease_renewed=is_renewed)

    def _rotation(self, role_name: Role, model: str | None) -> "_Rotation":
        """Members in rotation. A worker of another model than the request's must never be among them."""
        rotation = self._rotations.get((role_name, model))
        if rotation is None:
            rotation = self._rotations[role_name, model] = _Rotation(
                [
                    member
                    for member in self._roles[role_name].members.values()
                    if member.state == WorkerState.READY and (model is None or member.record.model == model)
                ]
            )
        return rotation

    @staticmethod
    def _views(rotation: "_Rotation", usual: "UsualSpeeds", prefill: PrefillSpeed, prompt: tuple[int, int]) -> Views:
        members, fresh_since_s = rotation.members, _fresh_since_s()
        return Views(rotation.ids, lambda index: _view(members[index], usual, prefill, prompt, fresh_since_s))

    def _session(self, role_name: str, worker_id: str) -> WorkerSession:
        member = self._roles[role_name].members.get(worker_id)
        if member is None or not member.session.is_up:
            raise WorkerUnavailable(f"{worker_id} is not connected")
        return member.session

    def _fits(self, prefill: Member, decode: Peer) -> bool:
        member = self._roles["decode"].members.get(decode.worker_id)
        if member is None or not self._may_go_on(prefill.record.identity_key, member.record.identity_key):
            return False
        if member.record.model != prefill.record.model:
            return False
        return (prefill.record.incarnation, decode.incarnation) not in self._mismatched

    def _changed(self) -> None:
        """A worker may have come or gone, or be another one."""
        self._rotations.clear()
        self._named_tenants.clear()
        self._note_change()

    def _note_change(self) -> None:
        self._on_change()
        self.tell_watchers()


def _seen(member: Member) -> Seen:
    record = member.record
    return Seen(record.id, record.role, record.model, record.host, record.address, member.state, member.has_worked)


def _obstacle(error: WorkerUnavailable) -> Obstacle:
    if isinstance(error, Unreachable):
        return error.obstacle
    return Obstacle(error.message, OTHER_CLUSTER if isinstance(error, NotProven) else NETWORK)


class _Rotation:
    """Workers in rotation, and what is true of all of them together."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        records = [member.record for member in members]
        self.ids = [record.id for record in records]
        self.max_sequence_tokens = max((record.max_sequence_tokens for record in records), default=None)
        self.kv_bytes_per_token = max((record.kv_bytes_per_token for record in records), default=0)
        self.layouts = {(record.layout_fingerprint, record.page_size) for record in records}
        self.identities = {record.identity_key for record in records}


@dataclass(frozen=True, slots=True)
class UsualSpeeds:
    """Speeds of the median worker. Those of a worker that are not far from them count as the same.

    Of two workers that are alike one always measures a little less, and would get everything. One that has measured
    nothing yet, or nothing for a while, is taken for a usual one, or nobody would ever ask it. `local` is of decode
    workers that compute a prompt. `decodes` are the speeds that there are among decode workers, each once.
    """

    prefill: PrefillSpeed
    local: PrefillSpeed
    decode: DecodeSpeed
    link: LinkSpeed
    decodes: frozenset[DecodeSpeed] = frozenset()


_NOTHING_MEASURED = UsualSpeeds(DEFAULT_PREFILL, DEFAULT_PREFILL, DEFAULT_DECODE, DEFAULT_LINK)


def _prefill_s(speed: PrefillSpeed) -> float:
    return speed.time_s(512)


def _step_s(speed: DecodeSpeed) -> float:
    return speed.step_s(1)


def _transfer_s(speed: LinkSpeed) -> float:
    return speed.time_s(1 << 20)


def _usual(speeds: Iterable[S | None], time_s: Callable[[S], float]) -> S | None:
    measured = sorted((speed for speed in speeds if speed is not None), key=time_s)
    return measured[(len(measured) - 1) // 2] if measured else None


def _own(speed: S | None, usual: S, time_s: Callable[[S], float]) -> S:
    """A worker's own speed where it is another one than usual."""
    if speed is None or time_s(usual) / ALIKE < time_s(speed) < time_s(usual) * ALIKE:
        return usual
    return speed


def _fresh_since_s() -> float:
    """What a worker that has had something to do after this time measures of itself is of now."""
    return asyncio.get_running_loop().time() - FRESH_S


def _decode_speed(member: Member, usual: DecodeSpeed, fresh_since_s: float) -> DecodeSpeed:
    is_fresh = member.session.has_worked_since(fresh_since_s)
    return _own(member.load.decode_speed, usual, _step_s) if is_fresh else usual


def _pages_available(load: WorkerLoad, session: WorkerSession) -> int:
    """Pages that are free or only cached, less those that are promised there or kept here."""
    return load.pages_free + load.pages_cached - load.pages_promised - session.books.pages


def _view(
    member: Member, usual: UsualSpeeds, prefill: PrefillSpeed, prompt: tuple[int, int], fresh_since_s: float
) -> WorkerView:
    load, session = member.load, member.session
    books, is_fresh = session.books, session.has_worked_since(fresh_since_s)
    if books.is_empty:
        # As with nearly all of many workers at any moment. Then it looks the same to every request.
        steps_left, links = session.steps_left(), session.links
        state = (load, usual, prefill, is_fresh, session.num_open_attempts, member.record, links, steps_left)
        if member.seen is None or member.seen[0] != state:
            member.seen = state, _new_view(member, usual, prefill, prompt, is_fresh=is_fresh)
        return member.seen[1]
    return _new_view(member, usual, prefill, prompt, is_fresh=is_fresh)


def _new_view(
    member: Member, usual: UsualSpeeds, prefill: PrefillSpeed, prompt: tuple[int, int], *, is_fresh: bool
) -> WorkerView:
    load, record, session = member.load, member.record, member.session
    books = session.books
    return WorkerView(
        worker_id=record.id,
        incarnation=record.incarnation,
        pages_total=load.pages_total,
        pages_available=_pages_available(load, session),
        num_requests=max(load.running + load.waiting, session.num_open_attempts + books.requests),
        num_less_urgent=books.num_less_urgent(prompt[0]),
        waiting_tokens=books.tokens_ahead(prompt, load.waiting_tokens),
        max_sequence_tokens=record.max_sequence_tokens,
        num_running=load.running,
        steps_left=session.steps_left(),
        context_tokens=load.context_tokens,
        region=record.region,
        tenants=frozenset(record.tenants),
        page_size=record.page_size,
        prefill_speed=_own(load.prefill_speed, prefill, _prefill_s) if is_fresh else prefill,
        decode_speed=_own(load.decode_speed, usual.decode, _step_s) if is_fresh else usual.decode,
        link_speed=_own(load.link_speed, usual.link, _transfer_s) if is_fresh else usual.link,
        links=_links(session, usual.link) if session.links or books.sending else session.links,
        measured=load.prefill_speed if is_fresh else None,
    )


def _links(session: WorkerSession, usual: LinkSpeed) -> PeerLinks:
    """As its worker has measured them, with what is on its way there and what of ours will be before long."""
    links = {worker_id: _own_link(link, usual) for worker_id, link in session.links.items()}
    for worker_id, num_bytes in session.books.sending.items():
        link = links.get(worker_id) or PeerLink(usual.latency_s, usual.bytes_per_s)
        links[worker_id] = PeerLink(link.latency_s, link.bytes_per_s, link.underway_bytes + num_bytes)
    return PeerLinks(links)


def _own_link(link: PeerLink, usual: LinkSpeed) -> PeerLink:
    own_s = _transfer_s(LinkSpeed(link.latency_s, link.bytes_per_s))
    if own_s > SHORT_WAY_S or not _transfer_s(usual) / ALIKE < own_s < _transfer_s(usual) * ALIKE:
        return link
    return PeerLink(usual.latency_s, usual.bytes_per_s, link.underway_bytes)
