"""Which answers move: by table, and on a virtual clock under random load with late reports and several gateways."""

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.prediction import DecodeSpeed, LinkSpeed
from services.scheduling.rebalancing import (
    DecodeLoad,
    HotSpot,
    Movable,
    Move,
    Rebalancing,
    RebalancingSettings,
    Surroundings,
    hot_spots,
)
from tests.examples import examples

SPEED = DecodeSpeed(overhead_s=0.005, s_per_sequence=0.005, s_per_context_token=1e-6)
LINK = LinkSpeed(latency_s=0.002, bytes_per_s=1e8)
TOTAL_TOKENS = 100_000
SETTINGS = RebalancingSettings()


def load(worker_id, num, *, tokens=500, **changes):
    used = num * tokens
    given = {
        "worker_id": worker_id,
        "speed": SPEED,
        "num_sequences": num,
        "context_tokens": used,
        "total_tokens": TOTAL_TOKENS,
        "free_tokens": TOTAL_TOKENS - used,
        "spare_tokens": TOTAL_TOKENS - 2 * used,
        "places": 1000,
    }
    return DecodeLoad(**given | changes)


def movable(key, *, service_class=2, tokens=500, left=400, num_bytes=100_000):
    return Movable(key, service_class, tokens, left, num_bytes)


def around(answers, *, link=LINK, may_take=lambda key, taker: True):
    return Surroundings(lambda worker_id: answers.get(worker_id, []), lambda giver, taker: link, may_take)


def chosen(workers, answers=None, *, policy=None, now_s=0.0, **ways):
    """The decision about these workers, each of which has only answers of this gateway unless `answers` says else."""
    policy = policy or Rebalancing()
    if answers is None:
        answers = {w.worker_id: [movable((w.worker_id, i)) for i in range(w.num_sequences)] for w in workers}
    return policy.choose(workers, around(answers, **ways), now_s=now_s), policy


def test_an_idle_worker_takes_an_answer_of_a_full_one():
    move, policy = chosen([load("full", 30), load("new", 0)])
    assert (move.giver, move.taker, move.reason) == ("full", "new", "faster")
    # A step of 30 becomes one of a single sequence for it, and 29 others have one sequence less in theirs.
    own_s = SPEED.step_s(30, 15_000) - SPEED.step_s(1, 500)
    others_s = 29 * (SPEED.step_s(30, 15_000) - SPEED.step_s(29, 14_500))
    assert move.gain_s == pytest.approx(256 * (own_s + others_s))
    assert move.cost_s == pytest.approx(LINK.time_s(100_000) + SPEED.step_s(30, 15_000) + SPEED.step_s(1, 500))
    assert policy.obstacles == {}


@pytest.mark.parametrize(
    ("here", "there", "moves"), [(30, 30, False), (16, 14, True), (15, 15, False), (16, 15, False), (2, 0, True)]
)
def test_only_a_step_that_is_clearly_shorter_is_worth_it(here, there, moves):
    move, _ = chosen([load("here", here), load("there", there)])
    assert (move is not None) is moves


def test_steps_that_cost_the_same_whoever_is_in_them_move_nothing():
    flat = DecodeSpeed(overhead_s=0.02, s_per_sequence=1e-6)
    assert chosen([load("here", 30, speed=flat), load("there", 0, speed=flat)])[0] is None


def test_a_law_that_knows_small_steps_only_does_not_keep_a_worker_idle():
    """Measured on a busy machine with trials of a few tokens: by it, a context of 500 tokens takes three seconds."""
    odd = DecodeSpeed(overhead_s=0.0, s_per_sequence=0.0, s_per_context_token=0.0066)
    assert chosen([load("full", 30), load("new", 0, speed=odd)])[0] is not None
    # What it does now is known: with such steps it takes no more.
    assert chosen([load("full", 30), load("slow", 2, speed=odd)])[0] is None
    slow = DecodeSpeed(overhead_s=0.3, s_per_sequence=0.0)
    assert chosen([load("full", 30), load("slow", 0, speed=slow)])[0] is None


def test_a_move_that_costs_more_than_it_gains_is_not_made():
    slow = LinkSpeed(latency_s=0.002, bytes_per_s=1e3)
    move, policy = chosen([load("here", 30), load("there", 0)], link=slow)
    assert move is None
    assert policy.obstacles == {"here": "dear"}
    answers = {"here": [movable(1, left=1)]}
    assert chosen([load("here", 30), load("there", 0)], answers)[0] is None


def test_batch_goes_first_then_what_gains_most():
    answers = {"here": [movable("normal"), movable("batch", service_class=4), movable("big", num_bytes=10**7)]}
    workers = [load("here", 30), load("there", 0)]
    assert chosen(workers, answers)[0].key == "batch"
    del answers["here"][1]
    assert chosen(workers, answers)[0].key == "normal"


def test_what_the_cluster_does_not_allow_is_left_alone():
    workers = [load("here", 30), load("there", 0)]
    move, policy = chosen(workers, may_take=lambda key, taker: False)
    assert move is None
    assert policy.obstacles == {"here": "held"}
    assert chosen(workers, may_take=lambda key, taker: key == ("here", 3))[0].key == ("here", 3)
    asked = []
    chosen(workers, may_take=lambda key, taker: asked.append(key))
    assert len(asked) == 8, "one look asks a few times only, however many answers there are"


def test_answers_of_other_gateways_are_not_moved():
    move, policy = chosen([load("here", 30), load("there", 0)], {"here": []})
    assert move is None
    assert policy.obstacles == {"here": "held"}


def test_a_worker_without_room_takes_nothing():
    for full in ({"places": 0}, {"spare_tokens": 10_400}, {"spare_tokens": -1}):
        move, policy = chosen([load("here", 30), load("there", 0, **full)])
        assert move is None
        assert policy.obstacles == {"here": "full"}


def test_pages_that_run_out_are_a_reason_of_their_own():
    short = load("short", 10, free_tokens=200, spare_tokens=-3000)
    answers = {"short": [movable("normal", left=900), movable("batch", service_class=4), movable("little", left=1)]}
    # The other one has as many: no step becomes shorter.
    move, _ = chosen([short, load("roomy", 10)], answers)
    assert (move.key, move.reason) == ("batch", "pages")
    for calm in ({"free_tokens": 10_000}, {"spare_tokens": 0}):
        worker = load("short", 10, **{"free_tokens": 200, "spare_tokens": -3000} | calm)
        assert chosen([worker, load("roomy", 10)], answers)[0] is None
    assert chosen([short, load("slow", 20)], answers)[0] is None, "steps of twice the time are too high a price"
    assert chosen([short, load("slow", 13)], answers)[0] is not None


def test_a_giver_pauses_and_the_way_back_is_closed():
    workers = [load("here", 30), load("there", 0)]
    _, policy = chosen(workers)
    assert chosen(workers, policy=policy, now_s=0.05)[0] is None
    assert policy.obstacles == {"here": "pausing"}
    assert chosen(workers, policy=policy, now_s=0.11)[0] is not None
    back = [load("here", 0), load("there", 30)]
    assert chosen(back, policy=policy, now_s=20.0)[0] is None
    assert policy.obstacles == {"there": "closed"}
    assert chosen(back, policy=policy, now_s=30.2)[0] is not None


def test_the_pause_keeps_the_links_share_over_all_gateways():
    own = {"here": [movable(i, num_bytes=10**7) for i in range(15)]}  # half of what runs there, 0.102 s each
    workers = [load("here", 30), load("there", 0)]
    move, policy = chosen(workers, own)
    assert move is not None
    pause_s = LINK.time_s(10**7) / SETTINGS.link_share * 2
    assert chosen(workers, own, policy=policy, now_s=pause_s - 0.01)[0] is None
    assert chosen(workers, own, policy=policy, now_s=pause_s + 0.01)[0] is not None


def test_a_taker_that_refused_is_not_asked_again_at_once():
    workers = [load("here", 30), load("first", 0), load("second", 1)]
    move, policy = chosen(workers)
    assert move.taker == "first"
    policy.note_refused(move, 0.2)
    assert chosen(workers, policy=policy, now_s=0.3)[0].taker == "second"
    again = chosen(workers, policy=policy, now_s=5.3)[0]
    assert again.taker == "first"
    policy.note_refused(again, 5.4)
    assert chosen(workers, policy=policy, now_s=15.3)[0].taker == "second", "twice as long after the second one"
    again = chosen(workers, policy=policy, now_s=15.5)[0]
    policy.note_moved(again)
    policy.note_refused(again, 15.6)
    assert chosen(workers, policy=policy, now_s=20.7)[0].taker == "first"


def test_only_some_are_under_way_at_a_time():
    move, policy = chosen([load("here", 30, num_leaving=4), load("there", 0)])
    assert move is None
    assert policy.obstacles == {"here": "pausing"}


def test_a_hot_spot_is_named_with_its_obstacle():
    workers = [load("hot", 30), load("cool", 2), load("idle", 0)]
    usual_s = (workers[1].step_s() + SPEED.step_s(1)) / 2
    assert hot_spots(workers, {"hot": "held"}) == {"hot": HotSpot(workers[0].step_s(), usual_s, "held")}
    assert hot_spots(workers, {"hot": "pausing"}) == {}
    assert hot_spots(workers, {}) == {}
    assert hot_spots([load("warm", 3), load("cool", 2)], {"warm": "dear"}) == {}
    assert hot_spots([load("only", 30)], {"only": "full"}) == {}


# --- on a virtual clock ---

TICK_S = 0.05
BYTES_PER_TOKEN = 1000


@dataclass
class Running:
    gateway: int
    worker: str
    tokens: int
    left: float
    service_class: int
    rests_until_s: float = 0.0
    paused_until_s: float = 0.0
    visits: list[tuple[float, str]] = field(default_factory=list)


class World:
    """Decode workers under a law, and gateways that see them late: each moves its own answers by its own policy."""

    def __init__(self, seed: int, *, num_workers: int, num_gateways: int, lag_s: float, pages: int) -> None:
        self.chance = random.Random(seed)
        self.workers = [f"w{i}" for i in range(num_workers)]
        self.out: set[str] = set()
        """Workers that draining, a breaker or another fingerprint keeps answers from."""
        self.running: list[Running] = []
        self.policies = [Rebalancing() for _ in range(num_gateways)]
        self.moves: list[tuple[float, Move, int]] = []
        self.now_s, self.pages = 0.0, pages
        self._reports = deque(maxlen=1 + round(lag_s / TICK_S))

    def at(self, worker: str) -> list[Running]:
        return [one for one in self.running if one.worker == worker]

    def load(self, worker: str) -> DecodeLoad:
        there = self.at(worker)
        used = sum(one.tokens for one in there)
        expected = sum(min(one.left, 128) for one in there)
        free = self.pages - used
        return load(
            worker,
            len(there),
            context_tokens=used,
            total_tokens=self.pages,
            free_tokens=max(0, free),
            spare_tokens=int(free - expected),
        )

    def arrive(self, worker: str, **changes) -> None:
        chance = self.chance
        given = {
            "gateway": chance.randrange(len(self.policies)),
            "worker": worker,
            "tokens": chance.randrange(50, 1500),
            "left": chance.expovariate(1 / 300) + 1,
            "service_class": chance.choice((1, 2, 2, 2, 4)),
        }
        one = Running(**given | changes)
        one.visits.append((self.now_s, worker))
        self.running.append(one)

    def tick(self) -> None:
        self.now_s += TICK_S
        for worker in self.workers:
            there = [one for one in self.at(worker) if one.paused_until_s <= self.now_s]
            step_s = SPEED.step_s(len(there), sum(one.tokens for one in there))
            for one in there:
                one.left -= TICK_S / step_s
                one.tokens += round(TICK_S / step_s)
        self.running = [one for one in self.running if one.left > 0]
        self._reports.append([self.load(worker) for worker in self.workers if worker not in self.out])
        for number, policy in enumerate(self.policies):
            if self.chance.random() < 0.5:
                self.look(number, policy)

    def look(self, number: int, policy: Rebalancing) -> None:
        now_s, reports = self.now_s, self._reports[0]
        known = {worker.worker_id for worker in reports} - self.out
        mine = [one for one in self.running if one.gateway == number]

        def answers(worker: str) -> list[Movable]:
            return [
                Movable(id(one), one.service_class, one.tokens, round(one.left * 2), one.tokens * BYTES_PER_TOKEN)
                for one in mine
                if one.worker == worker and one.rests_until_s <= now_s and one.paused_until_s <= now_s
            ]

        seen = [worker for worker in reports if worker.worker_id in known]
        move = policy.choose(
            seen,
            Surroundings(answers, lambda giver, taker: LINK, lambda key, taker: taker not in self.out),
            now_s=now_s,
        )
        if move is None:
            return
        (one,) = [one for one in mine if id(one) == move.key]
        assert one.worker == move.giver
        assert move.taker in known
        assert one.rests_until_s <= now_s
        self.moves.append((now_s, move, number))
        one.worker, one.rests_until_s = move.taker, now_s + 20.0
        one.paused_until_s = now_s + move.cost_s
        one.visits.append((now_s, move.taker))


def worlds():
    return st.builds(
        World,
        st.integers(0, 10**6),
        num_workers=st.integers(2, 5),
        num_gateways=st.integers(1, 3),
        lag_s=st.sampled_from((0.0, 0.1, 0.5)),
        pages=st.sampled_from((8_000, 40_000)),
    )


@settings(max_examples=examples(9), deadline=None)
@given(world=worlds(), rate=st.sampled_from((0.5, 2.0, 6.0)))
def test_ten_minutes_of_random_load(world, rate):
    """No answer comes back to where it was within its rest, no pair exchanges answers, and traffic keeps its bound."""
    all_answers: dict[int, Running] = {}
    while world.now_s < 600:
        if world.chance.random() < rate * TICK_S and len(world.running) < 120:
            # As badly placed as can be: bursts to one worker.
            favourite = world.workers[int(world.now_s / 40) % len(world.workers)]
            world.arrive(favourite if favourite not in world.out else next(iter(set(world.workers) - world.out)))
        if world.chance.random() < 0.002:
            world.out = set(world.chance.sample(world.workers, world.chance.randrange(len(world.workers))))
        world.tick()
        all_answers |= {id(one): one for one in world.running}
    for one in all_answers.values():
        moved_at_s = [at_s for at_s, _ in one.visits[1:]]
        assert all(later - earlier >= 20.0 for earlier, later in itertools.pairwise(moved_at_s))
    for number in range(len(world.policies)):
        last: dict[tuple[str, str], float] = {}
        for at_s, move, gateway in world.moves:
            if gateway == number:
                assert at_s - last.get((move.taker, move.giver), -30.0) >= 30.0, "what came from there does not go back"
                last[move.giver, move.taker] = at_s
    for worker in world.workers:
        sent = [(at_s, LINK.time_s(move.num_bytes)) for at_s, move, _ in world.moves if move.giver == worker]
        for at_s, _ in sent:
            window = [busy_s for when_s, busy_s in sent if at_s <= when_s < at_s + 10.0]
            assert sum(window) <= 10.0 * SETTINGS.link_share * 1.5 + len(world.policies) * max(window)


@pytest.mark.parametrize("num_gateways", [1, 3])
@pytest.mark.parametrize("lag_s", [0.0, 0.3])
def test_a_new_worker_has_its_share_soon_and_then_nothing_moves(num_gateways, lag_s):
    world = World(1, num_workers=2, num_gateways=num_gateways, lag_s=lag_s, pages=TOTAL_TOKENS)
    for number in range(30):
        world.arrive("w0", gateway=number % num_gateways, tokens=500, left=1e9)
    while world.now_s < 5.0:
        world.tick()
    first = Counter(one.worker for one in world.running)
    assert 13 <= first["w1"] <= 17
    settled = len(world.moves)
    while world.now_s < 120.0:
        world.tick()
    assert len(world.moves) - settled <= num_gateways
    assert all(len(one.visits) <= 2 for one in world.running)
