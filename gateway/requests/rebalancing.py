"""Moves running answers from full decode workers to others, as `services.scheduling.rebalancing` decides.

Looks several times a second at the decode workers of each model. A decision names the worker that is wanted; the task
that runs the answer does the rest (`gateway.requests.migration`), at the answer's next token. A worker that should give
answers away, and cannot, is a hot spot.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from gateway.observability.metrics import Metrics
from gateway.requests.answer import RunningAnswer
from gateway.requests.attempt import Attempt
from gateway.requests.dispatch import Dispatcher
from gateway.topology.members import Topology
from services.runtime.background_tasks import supervise
from services.runtime.errors import WorkerUnavailable
from services.scheduling.entry import ServiceClass
from services.scheduling.prediction import LinkSpeed
from services.scheduling.rebalancing import (
    DecodeLoad,
    HotSpot,
    Movable,
    Move,
    Obstacle,
    Rebalancing,
    Surroundings,
    hot_spots,
)
from services.scheduling.routing.views import Views, WorkerView

LOOK_EVERY_S = 0.1
"""The mean time between two looks. Each is drawn anew, so that gateways do not look at the same moment."""
WORKERS_PER_LOOK = 32
"""With more workers than this, looks are as much rarer: each takes as long as there are workers."""
BEGIN_S = 10.0
"""A move that has not begun after this time is given up: the answer's client takes no tokens."""
MOST_MOVES = 4
"""The most moves of a model that one look begins; a worker gives away one."""
REST_S = 20.0
"""An answer that was to move is left alone for this long, whatever came of it."""

Outcome = Literal["moved", "refused", "ended"]
OUTCOMES: tuple[Outcome, ...] = ("moved", "refused", "ended")
"""What came of a move: done; its taker refused, or could no longer be asked; the answer or its attempt ended first."""


class UnderWay(NamedTuple):
    """A move that was decided, the attempt that is to leave its worker, and until when its task may begin with it."""

    move: Move
    attempt: Attempt
    until_s: float


class RebalancingState(Struct, forbid_unknown_fields=True):
    """Running answers that this gateway moves to decode workers with less to do, and the last decision in words."""

    on: bool
    under_way: int
    moved: int
    refused: int
    ended: int
    last: str


class Rebalancer:
    """The rebalancing of one gateway's answers. With `is_on` False it moves nothing, and still finds hot spots."""

    def __init__(
        self,
        topology: Topology,
        dispatcher: Dispatcher,
        *,
        models: Iterable[str],
        answers: Callable[[], Iterable[RunningAnswer]],
        metrics: Metrics,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self.counts: Counter[Outcome] = Counter()
        """What came of the moves so far."""
        self.last: Move | None = None
        """The move that was decided last."""
        self._topology = topology
        self._dispatcher = dispatcher
        self._policies = {model: Rebalancing() for model in models}
        self._answers = answers
        self._metrics = metrics
        self._under_way: dict[RunningAnswer, UnderWay] = {}
        self._hot: dict[str, Mapping[str, HotSpot]] = {}
        self._num_seen = 0
        """The workers that the last look has seen."""
        self._looking: asyncio.Task[None] | None = None

    @property
    def state(self) -> RebalancingState:
        """What /cluster shows of it."""
        last, said, counts = self.last, "", self.counts
        if last is not None:
            said = f"{last.giver} to {last.taker}, {last.reason}: gains {last.gain_s:.3g} s, costs {last.cost_s:.3g} s"
        return RebalancingState(
            self.is_on, len(self._under_way), counts["moved"], counts["refused"], counts["ended"], said
        )

    def hot_spots(self) -> dict[str, HotSpot]:
        """Returns the decode workers, by id, whose steps take far longer than the others' while nothing moves."""
        return {worker_id: spot for found in self._hot.values() for worker_id, spot in found.items()}

    def start(self) -> None:
        """Begins to look."""
        self._looking = supervise(self._look_for_ever, name="rebalancing")

    async def close(self) -> None:
        """Stops looking; moves that were decided take their course."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    def pieces(self) -> Iterator[None]:
        """Decides which answers begin to move now, at most `MOST_MOVES` of each model. Yields after each decision.

        The decision about one move takes some milliseconds in a cluster of thousands of workers, and other tasks run
        between two decisions.
        """
        self._settle()
        self._num_seen = 0
        for model, policy in self._policies.items():
            self._hot.pop(model, None)
            for _ in range(MOST_MOVES):
                views, usable = self._dispatcher.decode_views(model)
                if len(views) < 2 or all(request.spec.model != model for request in self._answers()):
                    break
                has_move = self._look_at(model, policy, views, usable)
                yield
                if not has_move:
                    break
            self._num_seen += len(views)

    async def _look_for_ever(self) -> None:
        while True:
            for _ in self.pieces():
                await asyncio.sleep(0)
            pause_s = LOOK_EVERY_S * max(1.0, self._num_seen / WORKERS_PER_LOOK)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - it is no secret

    def _look_at(self, model: str, policy: Rebalancing, views: Views, usable: Sequence[str]) -> bool:
        """Returns whether a move was decided on."""
        now_s = self._topology.now_s()
        by_id = {view.worker_id: view for view in views}
        loads = [load for view in views if (load := self._load(view, usable)) is not None]
        movable: dict[str, list[Movable]] | None = None

        def answers(worker_id: str) -> list[Movable]:
            nonlocal movable
            if movable is None:
                movable = self._movable(model, now_s)
            return movable.get(worker_id, [])

        def link(giver: str, taker: str) -> LinkSpeed:
            known = by_id[giver].links.get(taker)
            return by_id[giver].link_speed if known is None else LinkSpeed(known.latency_s, known.bytes_per_s)

        def may_take(request: object, taker: str) -> bool:
            assert isinstance(request, RunningAnswer)
            assert request.attempt is not None
            if self._dispatcher.may_move(request, giver=request.attempt.decode, taker=by_id[taker]):
                return True
            request.rest(REST_S)  # the next look asks for others
            return False

        move = policy.choose(loads, Surroundings(answers, link, may_take), now_s=now_s) if self.is_on else None
        obstacles: Mapping[str, Obstacle] = policy.obstacles if self.is_on else dict.fromkeys(by_id, "off")
        self._hot[model] = hot_spots(loads, obstacles)
        if move is not None:
            self._begin(move)
        return move is not None

    def _load(self, view: WorkerView, usable: Sequence[str]) -> DecodeLoad | None:
        """Returns what the policy sees of a worker, moves under way as if they were done; None: it has just gone.

        One that is kept from new work gives answers away, and takes none.
        """
        worker_id = view.worker_id
        try:
            load = self._topology.decode_session(worker_id).load
        except WorkerUnavailable:
            return None
        spare_pages, places = self._topology.decode_room(worker_id, ServiceClass.BATCH)
        num, tokens, num_leaving = max(view.num_requests, view.num_running), view.context_tokens, 0
        asked_tokens = 0
        for request, (move, attempt, _) in self._under_way.items():
            current, num_tokens = request.attempt, request.num_known_tokens
            is_here = current is attempt
            if move.giver == worker_id:
                num_leaving += 1
                num -= is_here or (current is not None and current.is_at_giver)
                tokens -= num_tokens * is_here
            elif move.taker == worker_id:
                num += is_here
                tokens += num_tokens
                asked_tokens += request.expected_num_tokens * is_here
        return DecodeLoad(
            worker_id=worker_id,
            # A busy worker's own law is right about the steps that it does; routing takes those of equals for the same.
            speed=(load.decode_speed if load.running else None) or view.decode_speed,
            num_sequences=max(0, num),
            context_tokens=max(0, tokens),
            total_tokens=view.pages_total * view.page_size,
            free_tokens=(load.pages_free + load.pages_cached) * view.page_size,
            spare_tokens=spare_pages * view.page_size - asked_tokens,
            places=places if worker_id in usable else 0,
            num_leaving=num_leaving,
        )

    def _movable(self, model: str, now_s: float) -> dict[str, list[Movable]]:
        """Returns this gateway's answers that may be moved now, by the decode worker that generates them."""
        token_bytes = self._topology.workers(model).decode.kv_bytes_per_token
        found: dict[str, list[Movable]] = {}
        for request in self._answers():
            attempt = request.attempt
            if request.spec.model != model or attempt is None or not attempt.can_pause or request.is_resting(now_s):
                continue
            num_tokens = request.num_known_tokens
            movable = Movable(
                request,
                request.queue_entry.service_class,
                num_tokens,
                request.max_num_tokens - num_tokens,
                num_tokens * token_bytes,
            )
            found.setdefault(attempt.decode.peer.worker_id, []).append(movable)
        return found

    def _begin(self, move: Move) -> None:
        request = move.key
        assert isinstance(request, RunningAnswer)
        assert request.attempt is not None
        request.rest(REST_S)
        request.attempt.wanted = move.taker
        self._under_way[request] = UnderWay(move, request.attempt, self._topology.now_s() + BEGIN_S)
        self.last = move

    def _settle(self) -> None:
        """Notes what has come of the moves that were decided."""
        if not self._under_way:
            return
        open_answers, now_s = set(self._answers()), self._topology.now_s()
        for request, (move, attempt, until_s) in list(self._under_way.items()):
            current, policy = request.attempt, self._policies[request.spec.model]
            outcome: Outcome = "ended"
            if request in open_answers and current is not None:
                if current is attempt and not attempt.wanted:
                    outcome = "refused"
                    policy.note_refused(move, now_s)
                elif current is attempt and now_s >= until_s and attempt.can_pause:
                    attempt.wanted = ""
                elif current is attempt or current.is_arriving:
                    continue
                elif current.is_move and current.decode.peer.worker_id == move.taker:
                    outcome = "moved"
                    policy.note_moved(move)
            del self._under_way[request]
            self.counts[outcome] += 1
            self._metrics.rebalanced.labels(move.reason, outcome).inc()
