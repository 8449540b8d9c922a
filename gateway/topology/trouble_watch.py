"""Looks every second for what is wrong with workers, Redis and certificates, and reports it to the register.

Each judgement is a function of plain data; what they need of the past is kept in `_Lasting`. Knows no request.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from gateway.topology.flapping import FLAP_WINDOW_S, FlapCounter, SeenWorker
from gateway.topology.member import Member
from gateway.topology.members import Topology
from gateway.topology.presence import Gone, Shortage
from gateway.topology.troubles import Found, Kind, Troubles
from gateway.topology.watch import CircuitReport, CutPairReport
from services.cluster.advice import redis_remedy
from services.cluster.connections import end_task
from services.cluster.redis_store import Store
from services.cluster.registry import LEASE_TTL_S
from services.runtime import logs, rpc
from services.runtime.background_tasks import FailingTask, supervise
from services.runtime.breaker import CircuitState
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import TransferFailed, TransferStalled
from services.runtime.reach import SILENT
from services.runtime.worker_state import WorkerState
from services.scheduling.handoff_times import SlowPair
from services.scheduling.medians import median_without
from services.scheduling.rebalancing import HotSpot, Obstacle

LOOK_S = 1.0
UNREACHABLE_AFTER_S = LEASE_TTL_S + 1.0
"""After this time, a worker that has died is no longer registered."""
CLOCK_OFF_S = 2.0
CLOCK_OFF_FOR_S = 3.0
"""A clock is compared when a message comes, and messages are late while this process is busy."""
SLOW_REDIS_S = 0.05
"""The mean round trip that is too long. Limits of tenants and named requests each wait for one."""
SLOW_REDIS_FOR_S = 10.0
CERTIFICATE_DAYS = 7
DAY_S = 86_400.0
LINK_FOR_S = 600.0
"""A pair of workers whose pages got stuck is not called sound before pages have passed or this time is over."""
LARGE_BYTES = 65_536
"""A handoff of this size has large packets."""

CLOCK_REMEDY = "run a time service on all machines: times of logs and traces, and ends of certificates, depend on it"
LEFT_OUT_REMEDY = "give gateway and workers the same files, or the worker a --model-name of its own"
KERNELS_REMEDY = (
    "install g++ or clang++ on its machine, or name a compiler in CXX, and restart the worker; until then it is slow, "
    "and no other kind of worker continues its responses"
)
GONE_REMEDY = "look at its machine and its log; a worker that leaves on purpose is ended with SIGTERM or tandem drain"
FLAPPING_REMEDY = "see why it ended or was ejected: its log, its termination message, its machine's memory and network"
LOG_REMEDY = "free space on the disk of the logs, or start the process with another --log-dir"
MISSING_REMEDY = "start workers, look at those that are gone or cannot be reached, or change --expect"
SLOW_REDIS_REMEDY = "move Redis nearer to the gateways, or look at what else uses it or its machine"
HOT_FOR_S = 10.0
HOT_QUEUE_S, HOT_QUEUE_FACTOR = 2.0, 3.0
"""The seconds of prompts that make a prefill worker a hot spot, where they are this many times the others' median."""

LINK_CAUSE = "pages got stuck on their way while small messages passed: large packets are lost"
LINK_REMEDY = (
    "lower the MTU of both machines' interfaces to what the path carries (VPN, VXLAN), or let ICMP through so that "
    "they find it out"
)
SLOW_LINK_FOR_S = 2.0
SLOW_LINK_REMEDY = "look at the network between the two machines: loss, bandwidth, other traffic"
CIRCUIT_WORDS: Mapping[CircuitState, str] = {
    "closed": "gets work",
    "open": "is kept from work",
    "half_open": "is kept from work, and tried",
    "suspected": "should get no work, and does, since no more of its role can be spared",
}
CIRCUIT_REMEDIES = {
    "slow": "see what else uses its machine or its GPU; it gets work again when the gateway's trials come in time",
    "silent": "see whether its process and the network to it stand still; it gets work again when it answers",
    "erring": "see the errors in its log; it gets work again when the gateway's trials go well",
    "gpu": "look after its GPU: what it says is in tandem status",
}
PAIR_REMEDY = (
    "look at the network and the firewalls between the two: the decode worker's port and transfer port must be open; "
    "the pair is used again when the gateway's trials succeed"
)
HOT_OBSTACLES: Mapping[Obstacle, tuple[str, str]] = {
    "off": ("running answers are not moved (--rebalance)", "let this gateway rebalance"),
    "full": ("the others have no room for its answers", "add a decode worker, or pages to the others"),
    "closed": (
        "the others have refused its answers, or have just given it some",
        "see the gateways' logs for `not moved`; it ends by itself where answers were just exchanged",
    ),
    "held": (
        "none of its answers may move",
        "see whether it has other weights or tenants than the others; answers of other gateways are theirs to move",
    ),
    "dear": ("its answers would lose more by moving than they gain", "see the links between decode workers"),
    "pausing": ("its answers move", ""),
}
HOT_PROMPTS_REMEDY = (
    "prompts stay where they were sent: see whether it is slower than the others, or alone in holding a common prefix"
)
TASK_REMEDY = (
    "see `background task failed` in the gateway's log and report it; the gateway restarts the task, and restarting "
    "the gateway may help"
)
KEYS_REMEDY = "repair the file: it is read again within a second, and until then the keys before it hold"
QUARANTINE_REMEDY = (
    "see the gateways' logs for what was quarantined, and the last words of the workers that died; it ends by itself "
    "after 10 minutes"
)
CERTIFICATE_REMEDY = "renew it and replace the files: they are read again without a restart"


class TroubleWatch:
    """Keeps `troubles` up to date from `start` to `close`."""

    def __init__(
        self,
        troubles: Troubles,
        topology: Topology,
        store: Store,
        *,
        told: Callable[[], Mapping[Kind, Mapping[str, Found]]],
        reports: Callable[[], Mapping[str, CircuitReport]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`told` returns the troubles that other parts of the gateway find, for all kinds that they look for. `reports`
        returns the workers whose circuits are not closed.
        """
        self.troubles = troubles
        self._topology = topology
        self._store = store
        self._told = told
        self._reports = reports
        self._clock = clock
        self._clocks = _Lasting(CLOCK_OFF_FOR_S)
        self._redis = _Lasting(SLOW_REDIS_FOR_S)
        self._hot = _Lasting(HOT_FOR_S)
        self._flaps = FlapCounter()
        self._slow_links = _Lasting(SLOW_LINK_FOR_S)
        self._links: dict[str, tuple[float, Found]] = {}
        """When and why pages last got stuck between a pair of workers, by the names of the pair."""
        self._task: asyncio.Task[None] | None = None
        topology.watch_handoffs(self.note_handoff)

    def start(self) -> None:
        """Begins to look, on the running loop."""
        self._task = supervise(self._follow, name="troubles")

    async def close(self) -> None:
        """Stops looking."""
        if self._task is not None:
            await end_task(self._task)

    def pieces(self) -> Iterator[None]:
        """Looks once. Yields after each piece, so that thousands of workers do not hold up the event loop."""
        now_s, unix_s = self._clock.monotonic(), self._clock.unix_ns() / 1e9
        topology, troubles = self._topology, self.troubles
        topology.look_for_missing()
        members, presence = topology.members(), topology.presence
        troubles.settle("gone", gone(presence.gone))
        troubles.settle("missing", missing(presence.shortages))
        troubles.settle("unreachable", unreachable(members, topology.now_s()))
        yield
        troubles.settle("left_out", left_out(members))
        troubles.settle("kernels", without_kernels(members))
        yield
        told = dict(self._told())
        troubles.settle("flapping", flapping(self._flaps.check(seen_workers(members, self._reports()), now_s)))
        troubles.settle("log", lost_lines(logs.lost))
        yield
        told["hot_spot"] = self._hot.of({**told.get("hot_spot", {}), **hot_prefills(members)}, now_s)
        told["link"] = {**self._slow_links.of(told.get("link", {}), now_s), **self._stuck_links(members, now_s)}
        for kind, found in told.items():
            troubles.settle(kind, found)
        yield
        troubles.settle("clock", self._clocks.of(wrong_clocks(members), now_s))
        yield
        troubles.settle("certificate", certificates(members, unix_s))
        is_up = self._store.is_up
        troubles.settle("redis", {} if is_up else redis_away(self._store.last_failure))
        slow = slow_redis(self._store.round_trip.waited_s) if is_up else {}
        troubles.settle("redis_slow", self._redis.of(slow, now_s))

    def note_handoff(self, prefill_id: str, decode_id: str, outcome: int | TransferFailed) -> None:
        """Notes how many bytes of pages went from one worker to another, or why they could not.

        Where pages get stuck while both workers can still report it, large packets are lost.
        """
        if not self._links and isinstance(outcome, int):
            return  # Nearly every handoff: nothing is wrong with any link.
        link = _link(prefill_id, decode_id)
        if isinstance(outcome, TransferStalled):
            found = Found(f"{LINK_CAUSE} ({outcome.message})", LINK_REMEDY)
            self._links[link] = self._clock.monotonic(), found
            self.troubles.begin("link", link, *found)
        elif isinstance(outcome, int) and outcome >= LARGE_BYTES and self._links.pop(link, None) is not None:
            self.troubles.end("link", link)

    def _stuck_links(self, members: Iterable[Member], now_s: float) -> Mapping[str, Found]:
        ids = {member.record.id for member in members}
        self._links = {
            link: (at_s, found)
            for link, (at_s, found) in self._links.items()
            if now_s - at_s < LINK_FOR_S and ids.issuperset(link.split(" to "))
        }
        return {link: found for link, (_, found) in self._links.items()}

    async def _follow(self) -> None:
        while True:
            for _ in self.pieces():
                await asyncio.sleep(0)
            await asyncio.sleep(LOOK_S)


class _Lasting:
    """A filter that lets through what every look for a time has found."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._since_s: dict[str, float] = {}

    def of(self, found: Mapping[str, Found], now_s: float) -> Mapping[str, Found]:
        """Returns the part of `found` that has lasted."""
        self._since_s = {subject: self._since_s.get(subject, now_s) for subject in found}
        return {subject: one for subject, one in found.items() if now_s - self._since_s[subject] >= self._for_s}


def gone(missed: Iterable[Gone]) -> Mapping[str, Found]:
    """Returns the workers that vanished."""
    found = {}
    for one in missed:
        worker = one.worker
        cause = f"the {worker.role} worker at {worker.address} ({worker.host}) vanished without a word"
        found[worker.id] = Found(cause, GONE_REMEDY)
    return found


def missing(shortages: Mapping[str, Shortage]) -> Mapping[str, Found]:
    """Returns the roles with fewer workers than an operator expects."""
    return {
        role: Found(
            f"{one.ready} of {one.expected} {role} workers are ready"
            + (f", {one.starting} are starting" if one.starting else ""),
            MISSING_REMEDY,
        )
        for role, one in shortages.items()
    }


def unreachable(members: Iterable[Member], now_s: float) -> Mapping[str, Found]:
    """Returns the registered workers that have had no session for a while."""
    found = {}
    for member in members:
        if member.state == WorkerState.LOST and now_s - member.changed_at_s >= UNREACHABLE_AFTER_S:
            obstacle = member.obstacle or SILENT
            found[member.record.id] = Found(f"at {member.record.address}: {obstacle.cause}", obstacle.remedy)
    return found


def seen_workers(members: Iterable[Member], reports: Mapping[str, CircuitReport]) -> list[SeenWorker]:
    """Returns the registered workers with their circuits. `reports` holds the circuits that are not closed."""
    seen = [SeenWorker(member.record.id, member.record.incarnation, member.state) for member in members]
    return [one._replace(circuit=reports[one.id].state) if one.id in reports else one for one in seen]


def flapping(num_failures: Mapping[str, int]) -> Mapping[str, Found]:
    """Returns the workers that failed and recovered several times."""
    minutes = round(FLAP_WINDOW_S / 60)
    return {
        worker_id: Found(f"it failed {count} times within {minutes} minutes", FLAPPING_REMEDY)
        for worker_id, count in num_failures.items()
    }


def lost_lines(lost: logs.LostLines) -> Mapping[str, Found]:
    """Returns this process if its last line could not be written."""
    if not lost.error:
        return {}
    return {"gateway": Found(f"{lost.count} lines of the log could not be written: {lost.error}", LOG_REMEDY)}


def left_out(members: Iterable[Member]) -> Mapping[str, Found]:
    """Returns the workers that get no work because their model differs."""
    return {member.record.id: Found(member.left_out, LEFT_OUT_REMEDY) for member in members if member.left_out}


def without_kernels(members: Iterable[Member]) -> Mapping[str, Found]:
    """Returns the workers that compute with torch because their kernels could not be compiled or loaded."""
    return {
        member.record.id: Found(
            f"it computes with torch, without compiled kernels: {member.record.kernels_error}", KERNELS_REMEDY
        )
        for member in members
        if member.record.kernels_error
    }


def circuits(reports: Iterable[CircuitReport], pairs: Iterable[CutPairReport]) -> Mapping[str, Found]:
    """Returns workers that are kept from work or should be, and pairs between which transfers keep failing."""
    found = {}
    for report in reports:
        cause = f"it {CIRCUIT_WORDS[report.state]}: {report.said()}"
        found[report.worker_id] = Found(cause, CIRCUIT_REMEDIES.get(report.cause, "see its log"))
    for pair in pairs:
        cause = f"the pair is blocked: {pair.words} (since {pair.for_s:.0f} s)"
        found[_link(pair.prefill_id, pair.decode_id)] = Found(cause, PAIR_REMEDY)
    return found


def slow_links(pairs: Iterable[SlowPair]) -> Mapping[str, Found]:
    """Returns the pairs of workers whose handoffs are far slower than expected."""
    return {
        _link(*one.pair): Found(
            f"handoffs take {one.took_s:.2g} s, {one.ratio:.3g} times as long as expected, "
            f"between other workers {one.others:.3g} times",
            SLOW_LINK_REMEDY,
        )
        for one in pairs
    }


def hot_decodes(spots: Mapping[str, HotSpot]) -> Mapping[str, Found]:
    """Returns the decode workers with far longer steps than the others, whose answers stay where they are."""
    found = {}
    for worker_id, spot in spots.items():
        why, remedy = HOT_OBSTACLES[spot.obstacle]
        times = f"its steps take {1e3 * spot.step_s:.0f} ms, those of the others {1e3 * spot.usual_s:.0f}"
        found[worker_id] = Found(f"{times}: {why}", remedy)
    return found


def hot_prefills(members: Iterable[Member]) -> Mapping[str, Found]:
    """Returns the prefill workers where far more waits to be computed than at the others of their model."""
    queues_s: dict[str, dict[str, float]] = {}
    for member in members:
        if member.record.role != "prefill" or member.state != WorkerState.READY:
            continue
        speed, waiting_tokens = member.load.prefill_speed, member.load.waiting_tokens
        if speed is not None:
            queue_s = speed.time_s(waiting_tokens) if waiting_tokens else 0.0
            queues_s.setdefault(member.record.model, {})[member.record.id] = queue_s
    found = {}
    for by_worker in queues_s.values():
        in_order = sorted(by_worker.values())
        for worker_id, queue_s in by_worker.items():
            others_s = median_without(in_order, queue_s)
            if others_s is not None and queue_s >= max(HOT_QUEUE_S, HOT_QUEUE_FACTOR * others_s):
                cause = f"prompts of {queue_s:.1f} s wait there, at the others of {others_s:.1f} s"
                found[worker_id] = Found(cause, HOT_PROMPTS_REMEDY)
    return found


def failing_tasks(tasks: Iterable[FailingTask]) -> Mapping[str, Found]:
    """Returns the background tasks of this gateway that keep failing."""
    return {
        f"{task.name} {task.subject}".rstrip(): Found(
            f"it failed {task.failures} times in a row, most recently with: {task.error}", TASK_REMEDY
        )
        for task in tasks
    }


def unreadable_keys(error: str) -> Mapping[str, Found]:
    """Returns what is wrong with the file of keys as it is now; nothing for an empty `error`."""
    return {"gateway": Found(error, KEYS_REMEDY)} if error else {}


def quarantined(num_requests: int) -> Mapping[str, Found]:
    """Returns that some requests are not computed."""
    if not num_requests:
        return {}
    which = "1 request is" if num_requests == 1 else f"{num_requests} requests are"
    return {"requests": Found(f"{which} refused, since workers have died of computing such a one", QUARANTINE_REMEDY)}


def wrong_clocks(members: Iterable[Member]) -> Mapping[str, Found]:
    """Returns the workers whose clock is far from this machine's."""
    found = {}
    for member in members:
        ahead_s = member.session.load.clock_ahead_s if member.session.is_up else None
        if ahead_s is not None and abs(ahead_s) >= CLOCK_OFF_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            found[member.record.id] = Found(f"it is {abs(ahead_s):.0f} s {side} the gateway's", CLOCK_REMEDY)
    return found


def certificates(members: Iterable[Member], unix_s: float) -> Mapping[str, Found]:
    """Returns the certificates of this process and of workers that have expired or soon will."""
    ends_s: dict[str, float] = {
        member.record.id: member.record.certificate_end_unix_s
        for member in members
        if member.record.certificate_end_unix_s
    }
    identity = rpc.identity()
    if identity is not None:
        ends_s["gateway"] = identity.end_unix_s()
    found = {}
    for subject, end_s in ends_s.items():
        left_days = (end_s - unix_s) / DAY_S
        if left_days < CERTIFICATE_DAYS:
            cause = "it has expired" if left_days <= 0 else f"it expires in {left_days:.1f} days"
            found[subject] = Found(cause, CERTIFICATE_REMEDY)
    return found


def slow_redis(round_trip_s: float) -> Mapping[str, Found]:
    """Returns Redis where its calls take too long."""
    if round_trip_s < SLOW_REDIS_S:
        return {}
    return {"redis": Found(f"a call takes {1e3 * round_trip_s:.0f} ms on average", SLOW_REDIS_REMEDY)}


def redis_away(cause: str) -> Mapping[str, Found]:
    """Returns a Redis that does not answer; `cause` is its last failure."""
    return {"redis": Found(cause or "no cause is known", redis_remedy(cause))}


def _link(prefill_id: str, decode_id: str) -> str:
    return f"{prefill_id} to {decode_id}"
