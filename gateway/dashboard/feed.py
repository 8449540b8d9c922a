"""What a cluster looks like now: a snapshot for each caller, and an update each second for callers that stay.

The updates are made once for all watchers, and only while there are some; a watcher that takes them too slowly misses
some. Knows no HTTP.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.dashboard.series import SECONDS, WINDOW_S, Series, TrafficTotals
from gateway.observability.history import MAX_REQUESTS
from gateway.observability.metrics import Metrics
from gateway.requests.lifecycle import Requests
from gateway.topology.member import Member
from gateway.topology.members import Topology
from gateway.topology.troubles import Troubles
from gateway.topology.watch import CircuitReport
from services.cluster.connections import end_task
from services.cluster.decision_board import DecisionBoard, ShownDecision
from services.runtime.background_tasks import supervise
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import StoreUnavailable
from services.runtime.identity import identity_fields

TICK_S = 1.0
BOARD_S = 5.0
"""The time between two looks at the autoscaler's decisions."""
MAX_WATCHERS = 16
MAX_OPEN = 50
"""The answers that wait or run which an update names, those that came first."""
SPEED_TOKENS = 512
"""The length of the prompt that tells how fast prompts are computed."""


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """What does not change while a gateway runs. `cluster` is the cluster's name, `routing` that of its policy."""

    id: str
    cluster: str
    routing: str
    started_unix_s: float


class Feed:
    """What one gateway knows, ready to be shown."""

    def __init__(
        self,
        requests: Requests,
        *,
        topology: Topology,
        metrics: Metrics,
        facts: GatewayFacts,
        troubles: Troubles | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._requests = requests
        self._topology = topology
        self._metrics = metrics
        self._facts = facts
        self._decisions: list[ShownDecision] = []
        self._troubles = troubles or Troubles()
        self._clock = clock
        self._series = Series(metrics.ttft_s.bounds, metrics.itl_s.bounds)
        self._watchers: dict[_Watcher, None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, board: DecisionBoard) -> None:
        """Begins to take the figures of every second, and to follow the autoscaler's decisions."""
        self._tasks = [
            supervise(self._tick_for_ever, name="dashboard"),
            supervise(partial(self._follow_decisions, board), name="decisions"),
        ]

    async def close(self) -> None:
        """Ends taking figures, and all watching."""
        for task in self._tasks:
            await end_task(task)
        for watcher in self._watchers:
            watcher.put(None)

    def tick(self) -> None:
        """Records the figures of this second, and sends them to the watchers."""
        ttft, itl, generated, prompt, cached = self._metrics.totals()
        ended = dict(self._requests.log.history.num_ended)
        queued, running = self._requests.num_queued, self._requests.num_running
        totals = TrafficTotals(ttft, itl, generated, prompt, cached, ended, queued, running)
        self._series.add(self._clock.unix_ns() / 1e9, self._clock.monotonic(), totals)
        if self._watchers:
            update = msgspec.json.encode({**self._now(), **self._figures(1)})
            for watcher in self._watchers:
                watcher.put(update)

    def snapshot(self, seconds: int) -> dict[str, Any]:
        """Returns everything, with the figures of the last `seconds` seconds. Times without a unit are in seconds."""
        facts, history = self._facts, self._requests.log.history
        targets = history.targets
        return {
            "gateway": {
                "id": facts.id,
                "cluster": facts.cluster,
                "routing": facts.routing,
                "started_unix_s": facts.started_unix_s,
                "targets": {"ttft_s": targets.ttft_s, "itl_s": targets.itl_s},
                "kept": {
                    "requests": len(history),
                    "max_requests": MAX_REQUESTS,
                    "bytes": history.num_bytes,
                    "seconds": SECONDS,
                    "window_s": WINDOW_S,
                },
            },
            "models": [model.name for model in self._requests.catalog],
            **self._now(),
            **self._figures(seconds),
        }

    def latest(self) -> dict[str, float | None]:
        """Returns the figures of the last second; empty before the first."""
        return self._series.latest()

    async def updates(self, client: str = "") -> AsyncGenerator[bytes, None]:
        """Yields a JSON document each second, as in `snapshot` without what does not change.

        Where all places are taken, the oldest of the client that has the most of them ends for the new one.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            self._end_one_for(client)
        watcher = _Watcher(client)
        self._watchers[watcher] = None
        try:
            while (update := await watcher.next()) is not None:
                yield update
        finally:
            self._watchers.pop(watcher, None)

    def _end_one_for(self, client: str) -> None:
        places = Counter(watcher.client for watcher in self._watchers)
        places[client] += 1
        most = max(places.values())
        oldest = next(watcher for watcher in self._watchers if places[watcher.client] == most)
        del self._watchers[oldest]
        oldest.put(None)

    @property
    def num_watchers(self) -> int:
        """How many are watching now."""
        return len(self._watchers)

    def _now(self) -> dict[str, Any]:
        circuits = self._requests.circuits()
        return {
            "now_unix_s": self._clock.unix_ns() / 1e9,
            "last_number": self._requests.log.history.last_number,
            "requests": {"queued": self._requests.num_queued, "running": self._requests.num_running},
            "open": {
                "answers": self._requests.open_answers(MAX_OPEN),
                "total": self._requests.num_open_answers,
            },
            "workers": [self._worker(member, circuits.get(member.record.id)) for member in self._topology.members()],
            "troubles": [asdict(trouble) for trouble in self._troubles.all()],
            "decisions": self._decisions,
            "bottlenecks": self._requests.bottlenecks.told(),
            "turns": self._requests.turns.state,
        }

    def _figures(self, seconds: int) -> dict[str, Any]:
        times, columns = self._series.last(seconds)
        return {"series": {"unix_s": times, **columns}}

    def _worker(self, member: Member, circuit: CircuitReport | None) -> dict[str, Any]:
        record, load = member.record, member.load
        prefill, decode, link = load.prefill_speed, load.decode_speed, load.link_speed
        return {
            "id": record.id,
            "role": record.role,
            "model": record.model,
            "pool": record.pool,
            "region": record.region,
            "host": record.host,
            "address": record.address,
            "engine": identity_fields(record.identity).get("engine", ""),
            "state": member.state,
            "left_out": member.left_out,
            "circuit": "closed" if circuit is None else circuit.state,
            "circuit_found": "" if circuit is None else circuit.said(),
            "pages": {
                "total": load.pages_total,
                "free": load.pages_free,
                "cached": load.pages_cached,
                "reserved": load.pages_reserved,
                "used": load.pages_used,
            },
            "page_tokens": record.page_size,
            "running": load.running,
            "waiting": load.waiting,
            "waiting_tokens": load.waiting_tokens,
            "context_tokens": load.context_tokens,
            "preempted": load.num_preempted,
            "counts": None if member.session.counts is None else member.session.counts.as_json(),
            "prefill_tokens_per_s": None if prefill is None else SPEED_TOKENS / prefill.time_s(SPEED_TOKENS),
            "step_s": None if decode is None else decode.step_s(max(1, load.running), load.context_tokens),
            "link_bytes_per_s": None if link is None else link.bytes_per_s,
            "links": {
                peer: {"bytes_per_s": way.bytes_per_s, "latency_s": way.latency_s, "underway_bytes": way.underway_bytes}
                for peer, way in member.session.links.items()
            },
            "gpu": None
            if member.gpu_facts is None
            else {
                "state": member.gpu.state.value,
                "reasons": member.gpu.reasons,
                "temperature_c": member.gpu_facts.temperature_c,
            },
        }

    async def _follow_decisions(self, board: DecisionBoard) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):  # What was read last stays.
                self._decisions = await board.read()
            await asyncio.sleep(BOARD_S)

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            for _ in self._requests.bottlenecks.pieces():
                await asyncio.sleep(0)
            self.tick()
            # By the clock, so that seconds are not lost one delay at a time; after a long one it begins anew.
            next_s = max(next_s + TICK_S, loop.time())
            await asyncio.sleep(next_s - loop.time())


class _Watcher:
    """Has the latest update, until somebody takes it."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._latest: bytes | None = None
        self._has_some = asyncio.Event()

    def put(self, update: bytes | None) -> None:
        """The next one; None: there are no more."""
        self._latest = update
        self._has_some.set()

    async def next(self) -> bytes | None:
        """Waits for an update that was not taken yet."""
        await self._has_some.wait()
        self._has_some.clear()
        return self._latest
