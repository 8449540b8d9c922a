"""Bursts of requests before and after a standstill: those that would be served in time are let in."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.overload import Admit, ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.queue import RequestQueue
from tests.examples import examples

ANSWER_TOKENS, PROMPT_TOKENS = 64, 200
PREFILL_S = 0.02
GAP_S = 9.0
STILL_BURST = 3
"""The burst in which everything stands still."""
NUM_BURSTS = 7


@dataclass
class Bursts:
    """A cluster of `num_places` sequences that gets `burst` requests at once every GAP_S seconds."""

    num_places: int
    burst: int
    tokens_per_s: float
    still_s: float
    seed: int
    limit_s: float
    is_judged: bool = True
    refused: Counter[int] = field(default_factory=Counter)
    """By burst."""
    longest_s: Counter[int] = field(default_factory=Counter)
    """Until the first token, by burst."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue, self.policy = RequestQueue(max_waiting=10_000), OverloadPolicy()
        self.num_running = 0
        self.still_from_s = STILL_BURST * GAP_S + 0.3
        self.still_until_s = self.still_from_s + self.still_s

    def run(self) -> "Bursts":
        events: list[tuple[float, float, int | QueueEntry | None]] = [(self.still_until_s, 0.0, None)]
        for number in range(NUM_BURSTS):
            for _ in range(self.burst):
                events.append((number * GAP_S + self.random.uniform(0, 0.05), self.random.random(), number))
        heapq.heapify(events)
        while events:
            now_s, _, what = heapq.heappop(events)
            if isinstance(what, QueueEntry):
                self.num_running -= 1
                self.policy.note_end(what.key, now_s)
            elif what is not None:
                self.arrive(what, now_s)
            for started in self.start_all(now_s):
                end_s = self.done_s(now_s, started.service_s * self.random.uniform(0.7, 1.3))
                heapq.heappush(events, (end_s, self.random.random(), started))
        return self

    def arrive(self, burst: int, now_s: float) -> None:
        service_s = ANSWER_TOKENS / self.tokens_per_s
        key = (burst, self.random.random())
        tokens = PROMPT_TOKENS + ANSWER_TOKENS
        entry = QueueEntry(key, ServiceClass.NORMAL, "", tokens, now_s, service_s=service_s)
        load = ClusterLoad(
            self.queue.num_ahead(entry.service_class),
            self.queue.waiting_tokens(entry.service_class),
            len(self.queue),
            1 - self.num_running / self.num_places,
            prefill_s=PREFILL_S,
        )
        verdict = self.policy.judge(entry, load, Targets(self.limit_s), now_s)
        if self.is_judged and isinstance(verdict, Refuse):
            self.refused[burst] += 1
            return
        self.queue.push(entry)

    def start_all(self, now_s: float) -> list[QueueEntry]:
        started = []
        while self.queue.peek() is not None and self.num_running < self.num_places and not self.is_still(now_s):
            entry = self.queue.pop()
            self.num_running += 1
            self.policy.note_start(entry, now_s, is_backlogged=len(self.queue) > 0)
            started.append(entry)
            burst = entry.key[0]  # type: ignore[index]
            ttft_s = self.done_s(now_s, PREFILL_S) - entry.arrived_s
            self.longest_s[burst] = max(self.longest_s[burst], ttft_s)  # type: ignore[assignment]
        self.policy.note_backlog(now_s, is_backlogged=len(self.queue) > 0)
        return started

    def is_still(self, now_s: float) -> bool:
        return self.still_from_s <= now_s < self.still_until_s

    def done_s(self, now_s: float, work_s: float) -> float:
        is_through = now_s < self.still_until_s and now_s + work_s > self.still_from_s
        return now_s + work_s + (self.still_until_s - max(now_s, self.still_from_s) if is_through else 0.0)


@given(
    num_places=st.sampled_from([8, 16, 64]),
    fullness=st.floats(1.0, 3.5),
    stay_s=st.floats(0.2, 1.2),
    still_s=st.floats(1.0, 6.0),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(60), deadline=None)
def test_what_came_after_a_standstill_and_would_be_served_in_time_is_let_in(
    num_places: int, fullness: float, stay_s: float, still_s: float, seed: int
) -> None:
    shape = (num_places, int(num_places * fullness), ANSWER_TOKENS / stay_s, still_s, seed)
    limit_s = 2.5 * max(1.0, fullness) * stay_s  # which bursts without a standstill keep with room to spare
    judged = Bursts(*shape, limit_s).run()
    all_let_in = Bursts(*shape, limit_s, is_judged=False).run()
    for burst in range(STILL_BURST + 1, NUM_BURSTS):
        if all_let_in.longest_s[burst] <= limit_s / 2 and judged.refused[burst - 1] == 0:
            assert judged.refused[burst] == 0, f"burst {burst}"


@pytest.mark.parametrize("still_s", [2.0, 5.0, 8.0])
def test_a_burst_after_a_standstill_is_judged_as_those_before_it(still_s: float) -> None:
    for seed in range(5):
        bursts = Bursts(16, 48, 150.0, still_s, seed, limit_s=3.0).run()
        assert bursts.longest_s[STILL_BURST] > still_s, "it was felt"
        assert not bursts.refused


def test_while_it_lasts_who_comes_is_told_of_it() -> None:
    policy = OverloadPolicy()
    for number in range(100):
        now_s = number / 10
        policy.note_start(entry_at(number, now_s), now_s, is_backlogged=True)
        policy.note_end(number - 10, now_s)
    load = ClusterLoad(tokens_ahead=1000, free_page_share=0.0)
    assert isinstance(policy.judge(entry_at("new", 10.0), load, Targets(5.0), 10.0), Admit)
    verdicts = [policy.judge(entry_at("new", now_s), load, Targets(5.0), now_s) for now_s in (30.0, 60.0)]
    assert all(isinstance(verdict, Refuse) for verdict in verdicts)


def test_standstills_again_and_again_are_the_usual_pace() -> None:
    policy, now_s = OverloadPolicy(), 0.0
    for number in range(400):
        now_s += 0.1 if number < 200 else 3.0
        policy.note_start(entry_at(number, now_s), now_s, is_backlogged=True)
        policy.note_end(number - 10, now_s)
    assert policy.queue_delay_s(ServiceClass.NORMAL, 1000, now_s) == pytest.approx(30.0, rel=0.2)


def entry_at(key: object, arrived_s: float) -> QueueEntry:
    return QueueEntry(key, ServiceClass.NORMAL, "", 100, arrived_s, service_s=1.0)
