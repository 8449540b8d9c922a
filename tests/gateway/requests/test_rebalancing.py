"""Answers that a decode worker with less to do takes over, and workers from which none may go."""

import asyncio
import itertools
import json
import time
from statistics import median

import pytest

from protos import cluster_pb2, worker_pb2
from services.runtime.errors import Overloaded

SPEED = worker_pb2.DecodeSpeed(overhead_s=0.001, s_per_sequence=0.01)
NUM = 6


@pytest.fixture
def answer(tokenizer):
    return [*tokenizer.encode("hello world, naïve café 🙂 日本語 end" * 3, add_special_tokens=False).ids, 1]


@pytest.fixture
def pair(pair_type, answer):
    return pair_type(answer, step_s=0.03)


def decode_of(pair, worker_type, number, *, speed=SPEED, **changes):
    worker = worker_type("decode", f"decode-{number}", pair.decode, on_hand_over=pair.hand_over, **changes)
    worker.load.decode_speed.CopyFrom(speed)
    return worker


@pytest.fixture
async def make_full(make_system, worker_type, pair):
    """Makes a gateway and a decode worker that generates `NUM` answers, and returns them with the requests."""
    tasks = []

    async def make(**settings):
        system = await make_system(**{"rebalance": True} | settings)
        await system.add(worker_type("prefill", "prefill-0", pair.prefill))
        full = await system.add(decode_of(pair, worker_type, 0))
        requests = [
            asyncio.create_task(system.complete(max_tokens=400, return_token_ids=True, seed=seed))
            for seed in range(NUM)
        ]
        tasks.extend(requests)
        await system.until(lambda: sum(pair.event(attempt).is_set() for attempt in full.attempts) == NUM)
        return system, full, requests

    yield make
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def tokens_of(requests):
    return [(await request).json()["choices"][0]["token_ids"] for request in requests]


async def state_of(system):
    return (await system.http.get("/cluster")).json()["rebalancing"]


def figure(system, *labels):
    text = system.gateway.metrics.render([]).decode()
    lines = [line for line in text.splitlines() if all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_a_new_worker_takes_over_its_share_and_no_answer_is_another_one(make_full, worker_type, pair, answer):
    system, full, requests = await make_full()
    new = await system.add(decode_of(pair, worker_type, 1))
    assert await tokens_of(requests) == [answer] * NUM
    num_moved = len(new.attempts)
    assert abs(num_moved - NUM // 2) <= 1, "answers end while others move"
    assert all(attempt.request.from_decode for attempt in new.attempts)
    assert len({attempt.key[0] for attempt in new.attempts}) == num_moved
    assert len(system.workers["prefill-0"].attempts) == NUM, "no prompt was computed again"
    assert not {attempt.key[0] for attempt in new.attempts} & {name for name, _ in full.cancelled}
    state = await state_of(system)
    last = state.pop("last")
    assert state == {"on": True, "under_way": 0, "moved": num_moved, "refused": 0, "ended": 0}
    assert last.startswith("decode-0 to decode-1, faster: gains ")
    assert figure(system, "tandem_rebalanced_answers_total", 'reason="faster"', 'outcome="moved"') == num_moved
    assert figure(system, "tandem_moves_total", 'outcome="begun"') == num_moved
    rows = (await system.http.get("/dashboard/requests")).json()["requests"]
    number = next(row["number"] for row in rows if row["moves"])
    (story,) = (await system.http.get(f"/dashboard/requests/@{number}")).json()["answers"]
    moved = story["attempts"][-1]
    assert (moved["decode"], moved["reason"]) == ("decode-1", "rebalance")
    assert "shorter steps" in moved["why"][0]


async def test_a_busy_workers_own_law_says_how_long_its_steps_are(make_full, worker_type, pair):
    """A new worker has measured small steps only, and for routing the two are alike: a step of one takes as long."""
    flat = worker_pb2.DecodeSpeed(overhead_s=0.01, s_per_sequence=1e-6)
    system, full, _ = await make_full()
    full.load.running = NUM
    new = await system.add(decode_of(pair, worker_type, 1, speed=flat))
    await system.until(lambda: new.attempts)


async def test_an_answer_that_has_moved_goes_the_short_way_again(make_full, worker_type, pair):
    system, _, _ = await make_full()
    await system.add(decode_of(pair, worker_type, 1))
    there = lambda: [one.attempt for one in system.gateway.requests._open if one.attempt and one.attempt.is_move]  # noqa: E731
    await system.until(lambda: any(attempt.is_decoding and not attempt.is_arriving for attempt in there()))
    attempt = next(attempt for attempt in there() if attempt.is_decoding and not attempt.is_arriving)
    assert not attempt.is_moving


async def test_with_rebalancing_off_nothing_moves_and_the_hot_spot_is_told(make_full, worker_type, pair):
    system, full, _ = await make_full(rebalance=False)
    new = await system.add(decode_of(pair, worker_type, 1))
    await system.until(lambda: system.gateway.requests.rebalancer.hot_spots())
    (spot,) = system.gateway.requests.rebalancer.hot_spots().items()
    assert (spot[0], spot[1].obstacle) == ("decode-0", "off")
    assert spot[1].step_s > 2 * spot[1].usual_s
    assert new.attempts == []
    assert (await state_of(system))["on"] is False
    assert len(full.attempts) == NUM


async def test_a_taker_that_refuses_is_left_alone_for_a_while(make_full, worker_type, pair, answer):
    async def refuses(attempt):
        attempt.refuse(Overloaded("full"))

    system, full, requests = await make_full()
    refusing = worker_type("decode", "decode-1", refuses)
    refusing.load.decode_speed.CopyFrom(SPEED)
    await system.add(refusing)
    assert await tokens_of(requests) == [answer] * NUM
    assert 1 <= len(refusing.attempts) <= 2, "one is asked for, and not the next one until some seconds have passed"
    state = await state_of(system)
    assert (state["moved"], state["refused"]) == (0, len(refusing.attempts))
    assert len(full.attempts) == NUM


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": "another"}, {"tenants": ("somebody",)}, {"max_sequence_tokens": 64}],
    ids=["weights", "tenants", "small"],
)
async def test_workers_that_may_not_continue_an_answer_are_not_asked(make_full, worker_type, pair, changes):
    system, _, _ = await make_full()
    other = await system.add(decode_of(pair, worker_type, 1, **changes))
    await system.until(lambda: system.gateway.requests.rebalancer.hot_spots())
    assert system.gateway.requests.rebalancer.hot_spots()["decode-0"].obstacle == "held"
    assert other.attempts == []


async def test_a_worker_that_leaves_or_is_broken_or_has_no_room_is_not_asked(make_full, worker_type, pair, answer):
    system, _, requests = await make_full()
    leaving, small, broken = (decode_of(pair, worker_type, number) for number in (1, 2, 3))
    leaving.load.state = cluster_pb2.WORKER_STATE_DRAINING
    small.load.promised_pages = 95
    broken.gpu = worker_pb2.GpuFacts(is_lost=True)
    for worker in (leaving, small, broken):
        await system.add(worker)
    assert await tokens_of(requests) == [answer] * NUM
    assert leaving.attempts == small.attempts == broken.attempts == []


@pytest.mark.slow
async def test_a_worker_that_is_kept_from_work_gives_its_answers_away(make_full, worker_type, pair, answer):
    system, full, requests = await make_full()
    full.gpu = worker_pb2.GpuFacts(is_lost=True)
    full.sessions.load_changed()
    await system.until(lambda: system.gateway.topology.members()[0].gpu_facts is not None)
    new = await system.add(decode_of(pair, worker_type, 1))
    assert await tokens_of(requests) == [answer] * NUM
    assert new.attempts


@pytest.mark.slow
@pytest.mark.parametrize("when", ["asked", "handing over", "arrived"])
async def test_a_taker_that_dies_costs_no_token(make_full, worker_type, pair, answer, when):
    async def dies(attempt):
        if when != "asked":
            attempt.emit(worker_pb2.Admitted())
            await pair.event(attempt).wait()
        if when == "arrived":
            attempt.emit(worker_pb2.DecodeStarted())
            await pair.generate(attempt, len(attempt.spec.emitted_token_ids), len(attempt.spec.emitted_token_ids) + 3)
        await attempt.worker.die()

    system, _, requests = await make_full()
    taker = worker_type("decode", "decode-1", dies)
    taker.load.decode_speed.CopyFrom(SPEED)
    await system.add(taker)
    assert await tokens_of(requests) == [answer] * NUM
    assert taker.attempts
    assert system.gateway.requests.rebalancer.state.under_way == 0


@pytest.mark.slow
async def test_a_giver_that_dies_costs_no_token(make_full, worker_type, pair, answer):
    system, full, requests = await make_full()

    async def dies(attempt):
        await full.die()

    full.on_hand_over = dies
    new = await system.add(decode_of(pair, worker_type, 1))
    assert await tokens_of(requests) == [answer] * NUM
    assert len(new.attempts) >= NUM
    await system.until(lambda: system.gateway.requests.rebalancer.state.under_way == 0)


@pytest.mark.slow
async def test_a_client_that_leaves_during_a_move_frees_both(make_full, worker_type, pair):
    async def never(attempt):
        pass

    system, full, requests = await make_full()
    full.on_hand_over = never
    new = await system.add(decode_of(pair, worker_type, 1))
    await system.until(lambda: any(attempt.hand_overs for attempt in full.attempts))
    for request in requests:
        request.cancel()
    await system.until(lambda: {attempt.key for attempt in new.attempts} <= set(new.cancelled))
    await system.until(lambda: {attempt.key for attempt in full.attempts} <= set(full.cancelled))
    await system.until(lambda: system.gateway.requests.rebalancer.state.under_way == 0)


@pytest.mark.slow
async def test_an_engine_that_cannot_pause_keeps_its_answers(make_full, worker_type, pair, answer, monkeypatch):
    monkeypatch.setattr("gateway.requests.migration.PAUSE_LIMIT_S", 0.2)

    async def no_pause(session, message):
        pass

    monkeypatch.setattr(worker_type, "_pause", lambda self, session, message: no_pause(session, message))
    system, full, requests = await make_full()
    new = await system.add(decode_of(pair, worker_type, 1))
    rebalancer = system.gateway.requests.rebalancer
    await system.until(lambda: rebalancer.counts["refused"] and not rebalancer.state.under_way)
    num_refused = rebalancer.counts["refused"]
    assert all(not one.attempt.is_moving for one in system.gateway.requests._open if one.attempt)
    assert await tokens_of(requests) == [answer] * NUM
    assert rebalancer.counts["refused"] == num_refused, "the pair is left alone for seconds"
    assert len(full.attempts) == NUM
    assert new.attempts == []


class Watched:
    """An answer that is streamed, with the time at which each token came."""

    def __init__(self):
        self.token_ids, self.times_s = [], []

    async def run(self, system, seed):
        body = {"prompt": [5, 6, 7], "max_tokens": 200, "stream": True, "return_token_ids": True, "seed": seed}
        async with system.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    token_ids = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    self.token_ids += token_ids
                    self.times_s += [time.monotonic()] * len(token_ids)

    def gaps_s(self, start_s, end_s):
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s) if start_s <= later < end_s]


@pytest.mark.slow
async def test_the_gaps_of_thirty_answers_halve_within_five_seconds(make_system, worker_type, pair_type):
    """Workers whose steps take 5 ms for each sequence. The second one comes while all thirty run on the first."""

    class Lawful(pair_type):
        def __init__(self, answer):
            super().__init__(answer)
            self.running = {}

        def step_s_of(self, attempt):
            return 0.001 + 0.005 * len(self.running[attempt.worker.worker_id])

        async def generate(self, attempt, first, last=None):
            self.running.setdefault(attempt.worker.worker_id, set()).add(attempt.key)
            await super().generate(attempt, first, last)
            self.running[attempt.worker.worker_id].discard(attempt.key)

        async def hand_over(self, attempt):
            self.running[attempt.worker.worker_id].discard(attempt.key)
            await super().hand_over(attempt)

    answer = [5 + number % 50 for number in range(300)]
    law, speed = Lawful(answer), worker_pb2.DecodeSpeed(overhead_s=0.001, s_per_sequence=0.005)
    system = await make_system(rebalance=True, ttft_target_s=0.0, itl_target_s=0.0)
    await system.add(worker_type("prefill", "prefill-0", law.prefill))
    await system.add(decode_of(law, worker_type, 0, speed=speed))
    answers = [Watched() for _ in range(30)]
    tasks = [asyncio.create_task(one.run(system, seed)) for seed, one in enumerate(answers)]
    await system.until(lambda: min(len(one.token_ids) for one in answers) >= 2)
    before_s = time.monotonic()
    await asyncio.sleep(3.0)
    new = decode_of(law, worker_type, 1, speed=speed)
    await system.add(new)
    came_s = time.monotonic()
    await asyncio.sleep(5.0 + 3.0)
    for task in tasks:
        assert not task.done(), "all of them are to run all the time"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    windows_s = ((start_s, start_s + 3.0) for start_s in (before_s, came_s + 5.0))
    before, after = (median([gap for one in answers for gap in one.gaps_s(*window_s)]) for window_s in windows_s)
    num_moved = sum(attempt.request.from_decode for attempt in new.attempts)
    assert 13 <= num_moved <= 17
    assert after < 0.6 * before, "half, and what a step costs without sequences"
    assert all(one.token_ids == answer[: len(one.token_ids)] for one in answers)
