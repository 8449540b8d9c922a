"""Which running answer moves to which decode worker, and when: answers leave full workers for those with less to do.

A move is worth it by what its sequences wait, in seconds, over the tokens that the answer is still expected to have:

    gain = tokens · ((step(G) − step'(T)) + (others at G) · (step(G) − step'(G)) − (others at T) · (step'(T) − step(T)))
    cost = latency + bytes / rate of the link from G to T  +  step(G) + step'(T), which it waits to leave and to join

where step' is a worker's step after the move. A worker's own law is right about the steps that it does now; what one
more or one less sequence costs is taken from the giver's for both, since that has done the fuller steps: an idle worker
knows small ones only, and its law says nothing of longer contexts. The gain must be `margin` times the
cost, and step'(T) shorter than step(G) by `factor`. A worker whose pages run out before its answers end gives some away
before it has to preempt them, whatever their steps then take, within `slower`.

What keeps this calm: each move lowers the sum of what all sequences wait, so unchanged load comes to rest. An answer
that has moved rests (the caller sees to that); no answer goes from T to G for a while after one went from G to T; and a
giver pauses after each move for as long as keeps moves at `link_share` of its link. A gateway moves its own answers
only, and pauses longer in proportion to those of the others, so all gateways together keep the bound.

Pure: time is an argument. Knows neither sessions nor requests.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from services.scheduling.medians import median_without
from services.scheduling.prediction import DecodeSpeed, LinkSpeed

Reason = Literal["faster", "pages"]
REASONS: tuple[Reason, ...] = ("faster", "pages")
Obstacle = Literal["off", "full", "closed", "held", "dear", "pausing"]
"""Why a loaded worker gives nothing away: moves are switched off, the others are full, they have refused or have just
given something to it, none of its answers may move, a move costs more than it gains, or a pause is not over."""

MOST_ASKED = 8
"""The pairs of answer and taker that one look checks against what the cluster allows, which costs the most."""
MOST_REFUSED = 7
"""After this many refusals in a row of a pair, its pause becomes no longer: about five minutes."""
HOT_FACTOR = 2.0
"""A worker whose steps take this many times the median of the others' is a hot spot."""


@dataclass(frozen=True, slots=True)
class RebalancingSettings:
    """The constants of the policy (see the module).

    `horizon_s`: pages that last longer than this are no reason to move. `spare_share`: the part of a taker's pages that
    stays free. `least_pause_s`: from one move of a giver to the next; `near_pause_s`, where steps differ
    by less than `near_factor`: the last moves wait for reports of what the others, of other gateways too, have done.
    """

    factor: float = 1.05
    margin: float = 3.0
    slower: float = 1.5
    expected_tokens: int = 256
    horizon_s: float = 10.0
    spare_share: float = 0.1
    link_share: float = 0.5
    least_pause_s: float = 0.1
    near_pause_s: float = 0.5
    near_factor: float = 1.5
    pair_pause_s: float = 30.0
    refusal_pause_s: float = 5.0
    most_underway: int = 4


class DecodeLoad(msgspec.Struct, frozen=True):
    """A decode worker as the policy sees it; answers on their way count where they go.

    `free_tokens` fit into pages that nothing uses, `spare_tokens` into those that its requests are not expected to need
    either (negative: they need more than exists). `places` is how many more requests it takes. `num_leaving` of this
    gateway's answers are on their way from it.
    """

    worker_id: str
    speed: DecodeSpeed
    num_sequences: int
    context_tokens: int
    total_tokens: int
    free_tokens: int
    spare_tokens: int
    places: int
    num_leaving: int = 0

    def step_s(self) -> float:
        """Returns the seconds of its step; 0: it has none."""
        return self.speed.step_s(self.num_sequences, self.context_tokens) if self.num_sequences else 0.0

    def share_s(self, num_tokens: int) -> float:
        """Returns the part of its step that is for one sequence of `num_tokens` tokens."""
        return self.speed.s_per_sequence + self.speed.s_per_context_token * num_tokens

    def joined_s(self, giver: "DecodeLoad", num_tokens: int) -> float:
        """Returns the seconds of its step with one sequence more, which comes from `giver`."""
        alone_s = max(self.speed.overhead_s, giver.speed.overhead_s)
        return (self.step_s() or alone_s) + giver.share_s(num_tokens)


class Movable(msgspec.Struct, frozen=True):
    """A running answer of this gateway that may be moved now. A higher `service_class` is less urgent."""

    key: Hashable
    service_class: int
    context_tokens: int
    tokens_left: int
    num_bytes: int


class Surroundings(NamedTuple):
    """What a decision asks for, as far as it needs it."""

    answers: Callable[[str], Sequence[Movable]]
    """Worker id → the answers there that may be moved now."""
    link: Callable[[str, str], LinkSpeed]
    """(giver, taker) → the link between them."""
    may_take: Callable[[Hashable, str], bool]
    """(answer, taker) → whether the cluster allows it: weights, tenants, health, a way for the pages."""


class Move(msgspec.Struct, frozen=True):
    """A decision: this answer goes from giver to taker. Seconds that sequences wait less, and that the move takes."""

    key: Hashable
    giver: str
    taker: str
    reason: Reason
    gain_s: float
    cost_s: float
    num_bytes: int


class HotSpot(NamedTuple):
    """A worker with far longer steps than the others, in seconds, and why none of its answers moves."""

    step_s: float
    usual_s: float
    obstacle: Obstacle


class Rebalancing:
    """The moves that one gateway decides on, one at a time, for the workers of one model."""

    def __init__(self, settings: RebalancingSettings | None = None) -> None:
        self._settings = settings or RebalancingSettings()
        self._next_at_s: dict[str, float] = {}
        """When each giver's pause after a move is over."""
        self._closed_until_s: dict[tuple[str, str], float] = {}
        """Until when nothing goes from one worker to another."""
        self._num_refused: Counter[tuple[str, str]] = Counter()
        """Refusals in a row of each pair."""
        self._num_asked = 0
        self.obstacles: dict[str, Obstacle] = {}
        """Why workers that should give something away do not, as of the last look."""

    def choose(self, workers: Sequence[DecodeLoad], around: Surroundings, *, now_s: float) -> Move | None:
        """Returns the next move, which counts as begun, or None."""
        self._forget(now_s)
        self.obstacles = {}
        self._num_asked = 0
        seen = [(worker, worker.step_s() or worker.speed.overhead_s) for worker in workers]
        least_s = min((least_s for _, least_s in seen), default=0.0)
        givers = sorted(workers, key=lambda worker: (not self._is_short(worker), -worker.step_s()))
        for giver in givers:
            reason: Reason = "pages" if self._is_short(giver) else "faster"
            if least_s + giver.share_s(_mean_tokens(giver)) > self._most_s(giver, reason):
                continue  # No worker is fast enough, which is so for most givers of a large cluster.
            takers = self._takers(giver, seen, reason, now_s)
            move = self._best(giver, takers, around, reason) if takers else None
            if move is not None:
                taker = next(worker for worker in takers if worker.worker_id == move.taker)
                link_s = around.link(move.giver, move.taker).time_s(move.num_bytes)
                own = len(around.answers(giver.worker_id))
                pause_s = self._pause_s(giver, taker, link_s) * max(1.0, giver.num_sequences / own)
                self._next_at_s[move.giver] = now_s + pause_s
                self._closed_until_s[move.taker, move.giver] = now_s + self._settings.pair_pause_s
                return move
        return None

    def note_moved(self, move: Move) -> None:
        """Notes that the answer is generated at its taker."""
        self._num_refused.pop((move.giver, move.taker), None)

    def note_refused(self, move: Move, now_s: float) -> None:
        """Notes that nothing came of a move: the pair is left alone, for longer with each refusal in a row."""
        pair = move.giver, move.taker
        if now_s < self._closed_until_s.get(pair, now_s):
            return  # It was under way when another one was refused.
        self._num_refused[pair] = num = min(self._num_refused[pair] + 1, MOST_REFUSED)
        self._closed_until_s[pair] = now_s + self._settings.refusal_pause_s * 2 ** (num - 1)

    def _is_short(self, worker: DecodeLoad) -> bool:
        """Returns whether it will have to preempt a sequence before long."""
        if worker.spare_tokens >= 0 or worker.num_sequences < 2:
            return False
        lasts_s = worker.free_tokens / worker.num_sequences * worker.step_s()
        return lasts_s < self._settings.horizon_s

    def _takers(
        self, giver: DecodeLoad, seen: Sequence[tuple[DecodeLoad, float]], reason: Reason, now_s: float
    ) -> list[DecodeLoad]:
        """Returns the workers that could take an answer of mean length, best first.

        `seen` holds each worker and the time of its step, or its overhead if it is idle: no step with one sequence more
        is shorter than that and the sequence's share.
        """
        if giver.num_sequences < 1 or len(seen) < 2:
            return []
        is_pausing = now_s < self._next_at_s.get(giver.worker_id, now_s)
        if is_pausing or giver.num_leaving >= self._settings.most_underway:
            self.obstacles[giver.worker_id] = "pausing"
            return []
        mean_tokens = _mean_tokens(giver)
        most_s = self._most_s(giver, reason)
        share_s = giver.share_s(mean_tokens)
        able = [w for w, alone_s in seen if alone_s + share_s <= most_s and w is not giver]
        wanted = [w for w in able if w.joined_s(giver, mean_tokens) <= most_s]
        roomy = [w for w in wanted if self._has_room(w, mean_tokens)]
        open_to = [w for w in roomy if (giver.worker_id, w.worker_id) not in self._closed_until_s]
        if wanted and not open_to:
            self.obstacles[giver.worker_id] = "closed" if roomy else "full"
        return sorted(open_to, key=lambda worker: worker.joined_s(giver, mean_tokens))

    def _best(
        self, giver: DecodeLoad, takers: Sequence[DecodeLoad], around: Surroundings, reason: Reason
    ) -> Move | None:
        """Returns the best move that the cluster allows: the least urgent answers first, then by gain less cost."""
        own = around.answers(giver.worker_id)
        self.obstacles[giver.worker_id] = "dear" if own else "held"
        for taker in takers:
            link = around.link(giver.worker_id, taker.worker_id)
            moves = [(one, move) for one in own if (move := self._judged(giver, taker, one, link, reason)) is not None]
            margin = self._settings.margin
            moves.sort(key=lambda pair: (-pair[0].service_class, margin * pair[1].cost_s - pair[1].gain_s))
            for one, move in moves:
                if self._num_asked >= MOST_ASKED:
                    return None
                self._num_asked += 1
                if around.may_take(one.key, taker.worker_id):
                    del self.obstacles[giver.worker_id]
                    return move
                self.obstacles[giver.worker_id] = "held"
        return None

    def _judged(
        self, giver: DecodeLoad, taker: DecodeLoad, one: Movable, link: LinkSpeed, reason: Reason
    ) -> Move | None:
        """Returns the move of this answer, if it is worth it and fits."""
        settings, tokens = self._settings, one.context_tokens
        here_s, there_s = giver.step_s(), taker.joined_s(giver, tokens)
        left = min(one.tokens_left, settings.expected_tokens)
        if there_s > self._most_s(giver, reason) or not self._has_room(taker, tokens + left):
            return None
        num_freed = giver.num_sequences - 1 - taker.num_sequences  # less those that wait for it there
        gain_s = left * (here_s - there_s + num_freed * giver.share_s(tokens))
        cost_s = link.time_s(one.num_bytes) + here_s + there_s
        if reason == "faster" and gain_s <= settings.margin * cost_s:
            return None
        return Move(one.key, giver.worker_id, taker.worker_id, reason, gain_s, cost_s, one.num_bytes)

    def _most_s(self, giver: DecodeLoad, reason: Reason) -> float:
        """Returns the longest step of a taker with which a move is worth looking at."""
        settings = self._settings
        return giver.step_s() / settings.factor if reason == "faster" else giver.step_s() * settings.slower

    def _has_room(self, worker: DecodeLoad, num_tokens: int) -> bool:
        reserve = self._settings.spare_share * worker.total_tokens
        return worker.places > 0 and worker.spare_tokens - num_tokens >= reserve

    def _pause_s(self, giver: DecodeLoad, taker: DecodeLoad, link_s: float) -> float:
        """Returns the pause after a move that takes `link_s` of the link, for a gateway that has all of the answers."""
        settings = self._settings
        is_near = giver.step_s() < settings.near_factor * taker.joined_s(giver, 0)
        return max(settings.near_pause_s if is_near else settings.least_pause_s, link_s / settings.link_share)

    def _forget(self, now_s: float) -> None:
        """Drops pauses that are over."""
        self._next_at_s = {one: until_s for one, until_s in self._next_at_s.items() if until_s > now_s}
        self._closed_until_s = {pair: until_s for pair, until_s in self._closed_until_s.items() if until_s > now_s}


def _mean_tokens(giver: DecodeLoad) -> int:
    return giver.context_tokens // max(1, giver.num_sequences)


def hot_spots(workers: Sequence[DecodeLoad], obstacles: Mapping[str, Obstacle]) -> dict[str, HotSpot]:
    """Returns by id the workers whose steps take far longer than the others', and whose answers do not move.

    One that merely waits for its turn to move the next answer is not among them.
    """
    found = {}
    least_s = sorted(worker.step_s() or worker.speed.overhead_s for worker in workers)
    for worker in workers:
        obstacle = obstacles.get(worker.worker_id)
        step_s = worker.step_s()
        least_usual_s = median_without(least_s, step_s)
        if obstacle is None or obstacle == "pausing" or least_usual_s is None or step_s < HOT_FACTOR * least_usual_s:
            continue
        usual_s = median([other.step_s() or other.joined_s(worker, 0) for other in workers if other is not worker])
        if step_s >= HOT_FACTOR * usual_s:
            found[worker.worker_id] = HotSpot(step_s, usual_s, obstacle)
    return found
