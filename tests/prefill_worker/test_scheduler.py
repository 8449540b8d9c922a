import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_worker.scheduler import PromptQueue, PromptSize
from services.runtime.errors import Overloaded
from services.scheduling.background import Chunk
from services.scheduling.chunks import (
    BUSY_SHARE,
    LEAST_TOKENS,
    LONE_STEP_OVERHEADS,
    OLDEST_EVERY,
    STEP_OVERHEADS,
    ChunkScheduler,
    StepTargets,
    more_steps_s,
)
from services.scheduling.prediction import PrefillSpeed

BATCH, NORMAL, INTERACTIVE = 4, 2, 1


def queue(*, max_waiting: int = 8, num_pages: int = 100, ahead_tokens: int = 32) -> PromptQueue:
    return PromptQueue(max_waiting=max_waiting, num_pages=num_pages, ahead_tokens=ahead_tokens)


def test_turns_are_given_in_order_until_enough_work_lies_ahead() -> None:
    q = queue(ahead_tokens=32)
    for key in "abcd":
        q.enter(key, PromptSize(num_tokens=16, num_pages=1))
    assert q.next_turns() == ["a", "b"]
    assert q.next_turns() == []
    q.computed("a", 16)
    assert q.next_turns() == ["c"]
    assert (q.num_inside, q.num_waiting, q.waiting_tokens) == (3, 1, 48)


def test_a_short_prompt_begins_beside_a_long_one_and_another_long_one_waits() -> None:
    q = queue(ahead_tokens=32)
    q.enter("long", PromptSize(num_tokens=100, num_pages=7))
    assert q.next_turns() == ["long"]
    q.enter("longer", PromptSize(num_tokens=110, num_pages=7))
    q.enter("short", PromptSize(num_tokens=10, num_pages=1))
    assert q.next_turns() == ["short"], "what is left of the long one does not go before it"
    q.computed("short", 10)
    q.computed("long", 68)
    assert q.next_turns() == []
    q.computed("long", 1)
    assert q.next_turns() == ["longer"]


def test_prompts_that_are_reported_delay_no_others_and_are_delayed_by_none() -> None:
    q = queue(ahead_tokens=32, num_pages=30)
    q.enter("reported", PromptSize(40, 3, is_reported=True))
    q.enter("reported too", PromptSize(50, 4, is_reported=True))
    assert q.next_turns() == ["reported"], "the second one waits for the first"
    q.enter("usual", PromptSize(60, 4))
    q.enter("usual too", PromptSize(70, 5))
    assert q.next_turns() == ["usual"]
    q.computed("reported", 9)
    assert q.next_turns() == ["reported too"]
    q.leave("usual")
    assert q.next_turns() == ["usual too"]
    q.enter("large", PromptSize(10, 30))
    q.enter("reported at last", PromptSize(5, 1, is_reported=True))
    assert q.next_turns() == [], "none overtakes what waits for pages"
    for key in ("reported", "reported too", "usual too"):
        q.leave(key)
    assert q.next_turns() == ["large"]
    q.leave("large")
    assert q.next_turns() == ["reported at last"]
    q.leave("reported at last")
    assert (q.num_inside, q.num_waiting, q.waiting_tokens, q.promised_pages) == (0, 0, 0, 0)


def test_the_better_class_is_first_however_long_its_prompts_are() -> None:
    q = queue(ahead_tokens=32)
    q.enter("batch", PromptSize(8, 1), service_class=BATCH)
    q.enter("normal", PromptSize(16, 1), service_class=NORMAL)
    q.enter("interactive", PromptSize(40, 3), service_class=INTERACTIVE)
    assert q.next_turns() == ["interactive"]
    q.computed("interactive", 40)
    assert q.next_turns() == ["normal", "batch"]


def test_work_of_a_worse_class_inside_keeps_nobody_out() -> None:
    q = queue(ahead_tokens=32)
    q.enter("batch", PromptSize(64, 4), service_class=BATCH)
    assert q.next_turns() == ["batch"]
    q.enter("interactive", PromptSize(90, 6), service_class=INTERACTIVE)
    assert q.next_turns() == ["interactive"]


def test_nobody_overtakes_one_that_waits_for_pages() -> None:
    q = queue(num_pages=10, ahead_tokens=10_000)
    q.enter("a", PromptSize(96, 6))
    assert q.next_turns() == ["a"]
    q.enter("big", PromptSize(80, 6))
    q.enter("longer", PromptSize(96, 1))
    q.computed("a", 96)
    assert q.next_turns() == [], "pages are held until the prompt leaves, not until it is computed"
    q.leave("a")
    assert q.next_turns() == ["big", "longer"]


def test_the_oldest_is_due_when_enough_has_passed_it_and_then_waits_only_for_pages() -> None:
    q = PromptQueue(max_waiting=8, num_pages=10, ahead_tokens=32, patience_tokens=40)
    q.enter("first", PromptSize(16, 8))
    assert q.next_turns() == ["first"]
    q.computed("first", 16)
    q.enter("long", PromptSize(200, 9))
    for n in range(3):
        q.enter(n, PromptSize(16, 1))
        assert q.next_turns() == [n], "a short one passes"
        q.computed(n, 16)
        q.leave(n)
    q.enter("late", PromptSize(16, 1))
    assert q.next_turns() == [], "48 tokens have passed: the long one is due, and it waits for pages"
    q.leave("first")
    assert q.next_turns() == ["long", "late"]


def test_the_queue_is_bounded_and_says_so() -> None:
    q = queue(max_waiting=2)
    q.enter("a", PromptSize(1, 1))
    q.enter("b", PromptSize(1, 1))
    with pytest.raises(Overloaded):
        q.enter("c", PromptSize(1, 1))
    assert q.num_waiting == 2


def test_leaving_twice_or_unknown_changes_nothing() -> None:
    q = queue(num_pages=10)
    q.enter("a", PromptSize(20, 2))
    q.next_turns()
    q.leave("a")
    q.leave("a")
    q.leave("nobody")
    q.computed("a", 20)
    assert (q.num_inside, q.num_waiting, q.waiting_tokens, q.promised_pages) == (0, 0, 0, 0)


AHEAD, PATIENCE, PAGES = 40, 60, 12


@dataclass
class Prompt:
    """The naive model's: everything about it in one place."""

    key: int
    service_class: int
    num_tokens: int
    num_pages: int
    passed: int = 0
    """Tokens of its class that had their turn while it was the oldest waiting one."""


class PromptQueueMachine(RuleBasedStateMachine):
    """The queue against a naive model that sorts everything anew: the next one, conservation, bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PromptQueue(max_waiting=6, num_pages=PAGES, ahead_tokens=AHEAD, patience_tokens=PATIENCE)
        self.waiting: list[Prompt] = []
        self.inside: list[Prompt] = []  # num_tokens: what is uncomputed
        self.next_key = 0

    @rule(num_tokens=st.integers(1, 90), num_pages=st.integers(1, PAGES), service_class=st.integers(0, 2))
    def enter(self, num_tokens: int, num_pages: int, service_class: int) -> None:
        prompt = Prompt(self.next_key, service_class, num_tokens, num_pages)
        self.next_key += 1
        size = PromptSize(num_tokens, num_pages)
        if len(self.waiting) == 6:
            with pytest.raises(Overloaded):
                self.queue.enter(prompt.key, size, service_class=service_class)
        else:
            self.queue.enter(prompt.key, size, service_class=service_class)
            self.waiting.append(prompt)

    @rule()
    def turns(self) -> None:
        expected = []
        while (prompt := self.expected_next()) is not None:
            self.waiting.remove(prompt)
            self.inside.append(prompt)
            expected.append(prompt.key)
            assert sum(p.num_pages for p in self.inside) <= PAGES
            older = [p for p in self.waiting if p.service_class == prompt.service_class and p.key < prompt.key]
            if older:
                older[0].passed += prompt.num_tokens
                # The bound, but for the time that older ones inside need.
                still_ahead = sum(
                    p.num_tokens
                    for p in self.inside
                    if p.key < older[0].key and p.service_class <= prompt.service_class
                )
                assert older[0].passed < PATIENCE + 90 or still_ahead >= AHEAD
        assert self.queue.next_turns() == expected

    def expected_next(self) -> Prompt | None:
        if not self.waiting:
            return None
        best = min(p.service_class for p in self.waiting)
        ours = [p for p in self.waiting if p.service_class == best]
        oldest = min(ours, key=lambda p: p.key)
        shortest = min(ours, key=lambda p: (p.num_tokens, p.key))
        older = [p.num_tokens for p in self.inside if p.service_class <= best and p.key < oldest.key]
        before = [
            p.num_tokens
            for p in self.inside
            if p.service_class < best or (p.service_class == best and p.num_tokens <= shortest.num_tokens)
        ]
        if oldest.passed >= PATIENCE and sum(older) < AHEAD:
            chosen = oldest
        elif sum(before) < AHEAD:
            chosen = shortest
        else:
            return None
        fits = chosen.num_pages + sum(p.num_pages for p in self.inside) <= PAGES
        return chosen if fits else None

    @precondition(lambda self: any(p.num_tokens for p in self.inside))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from([p for p in self.inside if p.num_tokens]))
        num_tokens = data.draw(st.integers(1, prompt.num_tokens))
        self.queue.computed(prompt.key, num_tokens)
        prompt.num_tokens -= num_tokens

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from([*self.inside, *self.waiting]))
        self.queue.leave(prompt.key)
        self.inside = [p for p in self.inside if p is not prompt]
        self.waiting = [p for p in self.waiting if p is not prompt]

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.num_waiting == len(self.waiting)
        assert self.queue.num_inside == len(self.inside)
        assert self.queue.promised_pages == sum(p.num_pages for p in self.inside)
        assert self.queue.waiting_tokens == sum(p.num_tokens for p in [*self.inside, *self.waiting])


TestPromptQueueMachine = PromptQueueMachine.TestCase


@given(shorts=st.lists(st.integers(1, 30), min_size=1, max_size=30), num_tokens=st.integers(31, 500))
def test_a_long_prompt_has_its_turn_after_the_patience_and_one_prompt(shorts: list[int], num_tokens: int) -> None:
    """Short prompts come without end, each as soon as there is room, and would pass it for ever."""
    q = PromptQueue(max_waiting=100, num_pages=100, ahead_tokens=AHEAD, patience_tokens=PATIENCE)
    q.enter("ahead", PromptSize(AHEAD, 1))
    q.next_turns()
    q.enter("long", PromptSize(num_tokens, 1))
    q.enter(0, PromptSize(shorts[0], 1))
    q.computed("ahead", AHEAD)
    passed = 0
    for n in range(PATIENCE + 2):
        turns = q.next_turns()
        if "long" in turns:
            assert passed < PATIENCE + 30
            return
        for key in turns:
            assert isinstance(key, int)
            passed += shorts[key % len(shorts)]
            q.enter(n + 1, PromptSize(shorts[(n + 1) % len(shorts)], 1))
            q.computed(key, shorts[key % len(shorts)])
            q.leave(key)
            break
    raise AssertionError("the long prompt starved")


def test_a_computed_prompt_overtakes_the_queue_where_its_pages_fit() -> None:
    queue = PromptQueue(max_waiting=4, num_pages=10, ahead_tokens=8)
    for key in ("a", "b"):
        queue.enter(key, PromptSize(num_tokens=16, num_pages=4))
    assert queue.next_turns() == ["a"]
    assert not queue.enter_computed("large", PromptSize(num_tokens=28, num_pages=7))
    assert queue.enter_computed("small", PromptSize(num_tokens=24, num_pages=6))
    assert (queue.num_inside, queue.num_waiting, queue.promised_pages, queue.waiting_tokens) == (2, 1, 10, 32)
    queue.computed("a", 16)
    assert queue.next_turns() == [], "its pages are in the books"
    queue.leave("small")
    assert queue.next_turns() == ["b"]
    assert queue.promised_pages == 8


def test_what_is_not_ready_counts_and_holds_nobody_up() -> None:
    queue = PromptQueue(max_waiting=2, num_pages=8, ahead_tokens=1)
    queue.enter("a", PromptSize(16, 8), is_ready=False)
    queue.enter("b", PromptSize(100, 8))
    with pytest.raises(Overloaded):
        queue.enter("c", PromptSize(1, 1), is_ready=False)
    assert (queue.num_waiting, queue.waiting_tokens) == (2, 116)
    assert queue.next_turns() == ["b"]
    queue.leave("b")
    assert queue.next_turns() == []
    queue.make_ready("a")
    queue.make_ready("a")
    assert queue.next_turns() == ["a"]
    queue.leave("a")
    queue.enter("d", PromptSize(1, 1), is_ready=False)
    queue.leave("d")
    queue.make_ready("d")
    assert (queue.next_turns(), queue.waiting_tokens, queue.promised_pages) == ([], 0, 0)


def test_short_prompts_go_before_what_is_left_of_a_long_one_but_not_for_ever() -> None:
    s = ChunkScheduler(chunk_tokens=16)
    s.add("long", num_tokens=40)
    assert s.next_step() == [Chunk("long", 0, 16, False)]
    s.add("middle", num_tokens=20)
    s.add("short", num_tokens=3)
    assert s.next_step() == [Chunk("short", 0, 3, True), Chunk("middle", 0, 13, False)]
    assert s.next_step() == [Chunk("middle", 13, 7, True), Chunk("long", 16, 9, False)]
    for n in range(OLDEST_EVERY + 1):
        s.add(n, num_tokens=8)
        s.add(-n - 1, num_tokens=8)
    for _ in range(OLDEST_EVERY - 3):  # two have been without it
        assert [chunk.num_tokens for chunk in s.next_step()] == [8, 8]
    assert s.next_step() == [Chunk("long", 25, 15, True), Chunk(OLDEST_EVERY - 3, 0, 1, False)]


def test_of_prompts_that_are_reported_a_step_has_few_tokens() -> None:
    s = ChunkScheduler(chunk_tokens=100, reported_tokens=8)
    s.add("a", num_tokens=5, is_reported=True)
    s.add("plain", num_tokens=6)
    s.add("b", num_tokens=7, is_reported=True)
    s.add("c", num_tokens=20, is_reported=True)
    assert s.next_step() == [Chunk("plain", 0, 6, True), Chunk("a", 0, 5, True), Chunk("b", 0, 3, False)]
    assert s.next_step() == [Chunk("b", 3, 4, True), Chunk("c", 0, 4, False)]
    s.remove("c")
    s.add("c", num_tokens=20)
    assert s.next_step() == [Chunk("c", 0, 20, True)]


def test_a_removed_prompt_is_in_no_later_step() -> None:
    s = ChunkScheduler(chunk_tokens=8)
    s.add("a", num_tokens=20)
    s.add("b", num_tokens=20)
    s.next_step()
    s.remove("a")
    s.remove("a")
    assert s.next_step() == [Chunk("b", 0, 8, False)]


def test_a_prompt_begins_behind_what_is_cached_and_counts_only_what_is_left() -> None:
    s = ChunkScheduler(chunk_tokens=8)
    s.add("short", num_tokens=7)
    s.add("cached", num_tokens=100, start=96)
    assert s.next_step() == [Chunk("cached", 96, 4, True), Chunk("short", 0, 4, False)]


def test_the_last_tokens_of_a_long_prompt_are_no_short_prompt() -> None:
    speed = PrefillSpeed(0.0, 0.00001, 0.0000001)
    s = ChunkScheduler(chunk_tokens=512)
    s.add("short", num_tokens=64)
    s.add("long", num_tokens=4000, start=3960)
    assert s.next_step(speed=speed)[0] == Chunk("short", 0, 64, True), "its 40 tokens take ten times as long"
    s.add("another", num_tokens=64)
    assert s.next_step(speed=speed)[0] == Chunk("another", 0, 64, True)


def test_cancelled_prompts_leave_nothing_behind() -> None:
    s = ChunkScheduler(chunk_tokens=8)
    for n in range(10_000):
        s.add(n, num_tokens=20 + n % 5)
        s.remove(n - 10)
    assert len(s) == 10
    assert len(s._line._heap) < 100
    assert len(s._ends) == 10


prompts_with_arrivals = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 300), st.integers(0, 2)), min_size=1, max_size=16
)
"""For each prompt, the step before which it comes, its tokens and its class."""


@given(
    chunk_tokens=st.integers(1, 64),
    prompts=prompts_with_arrivals,
    removals=st.dictionaries(st.integers(0, 15), st.integers(0, 30), max_size=4),
    is_timed=st.booleans(),
)
def test_every_token_is_computed_once_and_the_best_go_first(
    chunk_tokens: int, prompts: list[tuple[int, int, int]], removals: dict[int, int], is_timed: bool
) -> None:
    """Against a naive view: budgets, order, work conservation, and that everything ends."""
    speed = PrefillSpeed(0.001, 0.0001, 0.000001) if is_timed else None
    s = ChunkScheduler(chunk_tokens=chunk_tokens)
    left: dict[int, int] = {}
    position: dict[int, int] = {}
    for step in range(sum(n for _, n, _ in prompts) + 40):
        for key, (arrival, num_tokens, service_class) in enumerate(prompts):
            if arrival == step:
                s.add(key, num_tokens=num_tokens, service_class=service_class)
                left[key], position[key] = num_tokens, 0
        for key in [k for k, when in removals.items() if when == step]:
            s.remove(key)
            left.pop(key, None)
        before = dict(left)
        chunks = s.next_step(speed=speed)
        total = sum(chunk.num_tokens for chunk in chunks)
        assert total <= chunk_tokens
        assert bool(total) == bool(before), "there is work and nobody does it"
        if speed is None:
            assert total == min(chunk_tokens, sum(before.values())), "the step is as full as the work allows"
        for chunk in chunks:
            assert isinstance(chunk.key, int)
            assert chunk.start == position[chunk.key]
            position[chunk.key] += chunk.num_tokens
            left[chunk.key] -= chunk.num_tokens
            assert chunk.is_last == (left[chunk.key] == 0)
        costs = {key: cost_of(speed, prompts[key][1] - n, n) for key, n in before.items()}
        check_order(prompts, costs, {c.key: c for c in chunks})
        left = {key: n for key, n in left.items() if n}
        assert len(s) == len(left)
    assert not left


def cost_of(speed: PrefillSpeed | None, start: int, num_tokens: int) -> float:
    return num_tokens if speed is None else speed.time_s(num_tokens, start) - speed.time_s(0, start)


def check_order(prompts: list[tuple[int, int, int]], before: dict[int, float], chunks: dict[object, Chunk]) -> None:
    """A prompt that gets tokens has none before it that stays unfinished; the oldest may be first out of turn."""
    if not before:
        return
    oldest = min(before, key=lambda key: (prompts[key][2], prompts[key][0], key))
    order = sorted(before, key=lambda key: (prompts[key][2], before[key], prompts[key][0], key))
    unfinished = [key for key in order if key not in chunks or not chunks[key].is_last]
    for key in set(order) & set(chunks) - {oldest}:
        assert not [k for k in unfinished if order.index(k) < order.index(key) and k != oldest]


@given(chunk_tokens=st.integers(1, 64), prompts=prompts_with_arrivals)
@settings(deadline=None)
def test_a_prompt_ends_within_its_bound_whoever_else_comes(
    chunk_tokens: int, prompts: list[tuple[int, int, int]]
) -> None:
    """Beside the prompts there are one-token prompts without end, as many as fill every step."""
    s = ChunkScheduler(chunk_tokens=chunk_tokens)
    ordered = sorted((arrival, key, num_tokens) for key, (arrival, num_tokens, _) in enumerate(prompts))
    ends_by: dict[object, int] = {}
    num_steps = 0
    for arrival, key, num_tokens in ordered:
        num_steps += OLDEST_EVERY * math.ceil(num_tokens / chunk_tokens)
        ends_by[key] = arrival + num_steps
    waiting = set(ends_by)
    crowd = itertools.count()
    for step in range(max(ends_by.values()) + 1):
        for arrival, key, num_tokens in ordered:
            if arrival == step:
                s.add(key, num_tokens=num_tokens)
        for _ in range(chunk_tokens if step >= ordered[-1][0] else 0):
            s.add(("crowd", next(crowd)), num_tokens=1)
        for chunk in s.next_step():
            if chunk.is_last and chunk.key in waiting:
                waiting.remove(chunk.key)
                assert step < ends_by[chunk.key]
        if not waiting:
            return
    raise AssertionError(f"{waiting} starved")


@given(
    chunk_tokens=st.integers(1, 600),
    prompts=prompts_with_arrivals,
    overhead_s=st.sampled_from([0.0, 0.0005, 0.01]),
    s_per_token=st.sampled_from([1e-6, 2e-5, 1e-3]),
    s_per_token_squared=st.sampled_from([0.0, 5e-8, 1e-5]),
)
def test_a_step_takes_no_longer_than_the_targets_say(
    chunk_tokens: int,
    prompts: list[tuple[int, int, int]],
    overhead_s: float,
    s_per_token: float,
    s_per_token_squared: float,
) -> None:
    """By prediction, and but for a single token, which is always computed."""
    speed = PrefillSpeed(overhead_s, s_per_token, s_per_token_squared)
    s = ChunkScheduler(chunk_tokens=chunk_tokens, targets=StepTargets(shared_s=0.004, alone_s=0.004, whole_s=0.008))
    for key in range(50):  # enough have come that steps are as short as they may be
        s.add(("gone", key), num_tokens=1, service_class=0)
        s.remove(("gone", key))
    for key, (_, num_tokens, service_class) in enumerate(prompts):
        s.add(key, num_tokens=num_tokens, service_class=service_class)
    least_s = speed.time_s(0) + LEAST_TOKENS * (speed.time_s(1) - speed.time_s(0))
    whole_s = max(0.008, STEP_OVERHEADS * overhead_s, least_s)
    part_s = max(0.004, STEP_OVERHEADS * overhead_s, least_s)
    while chunks := s.next_step(speed=speed):
        step_s = overhead_s + sum(speed.time_s(c.num_tokens, c.start) - overhead_s for c in chunks)
        is_single = len(chunks) == 1 and chunks[0].num_tokens == 1
        limit_s = whole_s if chunks[0].is_last else part_s
        assert step_s <= limit_s + 1e-9 or is_single
        assert all(c.is_last for c in chunks[1:]), "those that end do not wait for one that continues"


TARGETS = StepTargets(shared_s=0.004, alone_s=0.020, memory_s=1.0)
TEN_A_MS = PrefillSpeed(0.001, 0.0001)
"""An empty step takes 1 ms, so one of 20 ms has 190 tokens, one of 4 ms 30."""


def test_steps_are_as_long_as_prompts_come_seldom() -> None:
    s = ChunkScheduler(chunk_tokens=512, targets=TARGETS)
    s.add("long", num_tokens=1000, now_s=100.0)
    assert s.next_step(speed=TEN_A_MS, now_s=100.0) == [Chunk("long", 0, 190, False)], "nobody else has ever come"
    for n in range(400):
        s.add(n, num_tokens=1, now_s=100 + n / 400)
        s.remove(n)
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=101.0)
    assert chunk.num_tokens == 30, "254 in the last second, as older ones count less"
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=103.0)
    assert chunk.num_tokens == pytest.approx(44, abs=1), "34: steps of the root of 1 ms / 34, which is 5.4"
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=104.0)
    assert chunk.num_tokens == pytest.approx(79, abs=2)
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=110.0)
    assert chunk.num_tokens == 190


def test_who_is_alone_is_not_its_own_company() -> None:
    s = ChunkScheduler(chunk_tokens=512, targets=StepTargets(shared_s=0.004, alone_s=0.1, memory_s=1.0))
    s.add("long", num_tokens=1000, now_s=100.0)
    assert s.next_step(speed=TEN_A_MS, now_s=100.0) == [Chunk("long", 0, 512, False)]
    s.add("other", num_tokens=900, now_s=100.0)
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=100.0)
    assert chunk.num_tokens == pytest.approx(10_000 * math.sqrt(0.001 / 2) - 10, abs=1), "two have come"
    s.remove("other")
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=100.0)
    assert chunk.num_tokens == pytest.approx(10_000 * math.sqrt(0.001 / 2) - 10, abs=1), "it is alone now"
    s.remove("long")
    s.add("newest", num_tokens=900, now_s=100.0)
    (chunk,) = s.next_step(speed=TEN_A_MS, now_s=100.0)
    assert chunk.num_tokens == pytest.approx(10_000 * math.sqrt(0.001 / 2) - 10, abs=1), "the third, after two others"


def test_those_who_would_wait_anyway_make_no_step_short() -> None:
    s = ChunkScheduler(chunk_tokens=512, targets=TARGETS)
    s.add("batch", num_tokens=1000, service_class=4, now_s=100.0)
    s.add("urgent", num_tokens=500, service_class=1, now_s=100.0)
    for n in range(100):
        s.add(n, num_tokens=500, service_class=2, now_s=100.0)
    assert s.next_step(speed=TEN_A_MS, now_s=100.0) == [Chunk("urgent", 0, 190, False)]
    for n in range(100, 200):
        s.add(n, num_tokens=1, service_class=1, now_s=100.1)
        s.remove(n)
    assert s.next_step(speed=TEN_A_MS, now_s=100.1) == [Chunk("urgent", 190, 30, False)], "some as urgent came"
    s.remove("urgent")
    for n in range(100):
        s.remove(n)
    assert s.next_step(speed=TEN_A_MS, now_s=100.1) == [Chunk("batch", 0, 30, False)]
    assert s.next_step(speed=TEN_A_MS, now_s=106.0) == [Chunk("batch", 30, 190, False)]


@given(
    empty_s=st.floats(1e-5, 0.1),
    rate=st.floats(0, 1e4),
    more=st.floats(1.0, 100.0),
)
def test_a_target_keeps_within_its_bounds_and_falls_with_the_rate(empty_s: float, rate: float, more: float) -> None:
    target_s = TARGETS.part_s(empty_s, rate)
    assert target_s >= STEP_OVERHEADS * empty_s
    assert TARGETS.shared_s <= target_s <= max(TARGETS.alone_s, LONE_STEP_OVERHEADS * empty_s)
    assert TARGETS.part_s(empty_s, rate * more) <= target_s


def test_a_slow_engine_that_has_one_prompt_computes_most_of_the_time() -> None:
    s = ChunkScheduler(chunk_tokens=512)
    s.add("long", num_tokens=1000, now_s=0.0)
    (chunk,) = s.next_step(speed=PrefillSpeed(0.5, 0.1), now_s=0.0)
    assert chunk.num_tokens == pytest.approx(45, abs=1), "5 s, of which an empty step takes 0.5"


def test_a_target_loses_least_to_steps_and_to_those_who_come() -> None:
    """Against every other length: what empty steps take, and, twice, the half step that each new one waits."""
    empty_s, rate = 0.001, 25.0

    def lost(step_s: float) -> float:
        return empty_s / step_s + 2 * rate * step_s / 2

    best_s = TARGETS.part_s(empty_s, rate)
    assert all(lost(best_s) <= lost(0.0001 * n) for n in range(40, 200))


DEMO_SPEED = PrefillSpeed(overhead_s=0.001, s_per_token=2e-5, s_per_token_squared=5e-8)
"""About what the demo model's steps take on one core."""


class FirstComeFirstServed:
    """What the scheduler is compared with: full steps, in order of arrival."""

    def __init__(self) -> None:
        self.prompts: dict[object, list[int]] = {}

    def add(self, key: object, num_tokens: int, now_s: float) -> None:
        self.prompts[key] = [0, num_tokens]

    def step(self, now_s: float) -> list[Chunk]:
        budget, chunks = 512, []
        for key, (start, end) in list(self.prompts.items()):
            num_tokens = min(budget, end - start)
            budget -= num_tokens
            if num_tokens:
                chunks.append(Chunk(key, start, num_tokens, start + num_tokens == end))
                self.prompts[key][0] += num_tokens
            if start + num_tokens == end:
                del self.prompts[key]
        return chunks


class ShortestFirst:
    """The scheduler with the engine's speed."""

    def __init__(self) -> None:
        self.scheduler = ChunkScheduler(chunk_tokens=512)

    def add(self, key: object, num_tokens: int, now_s: float) -> None:
        self.scheduler.add(key, num_tokens=num_tokens, now_s=now_s)

    def step(self, now_s: float) -> list[Chunk]:
        return self.scheduler.next_step(speed=DEMO_SPEED, now_s=now_s)


def p99_of_short_prompts(
    make: Callable[[], FirstComeFirstServed | ShortestFirst], *, is_long: bool
) -> tuple[float, int]:
    """Seconds to the end of short prompts that load an engine to 40 %, by events; and long prompts that ended."""
    rng = random.Random(5)
    rate = 0.4 / DEMO_SPEED.time_s(96)
    scheduler, now_s, num_long, next_s = make(), 0.0, 0, 0.0
    arrived: dict[object, float] = {}
    times: list[float] = []
    if is_long:
        scheduler.add(("long", 0), 4000, 0.0)
    while len(times) < 5000:
        while next_s <= now_s:
            arrived[key := len(arrived)] = next_s
            scheduler.add(key, rng.randint(64, 128), next_s)
            next_s += rng.expovariate(rate)
        chunks = scheduler.step(now_s)
        if not chunks:
            now_s = next_s
            continue
        overhead_s = DEMO_SPEED.overhead_s
        now_s += overhead_s + sum(DEMO_SPEED.time_s(c.num_tokens, c.start) - overhead_s for c in chunks)
        for chunk in chunks:
            if chunk.is_last and chunk.key in arrived:
                times.append(now_s - arrived[chunk.key])
            elif chunk.is_last:
                num_long += 1
                scheduler.add(("long", num_long), 4000, now_s)
    return sorted(times)[len(times) * 99 // 100], num_long


def test_a_long_prompt_costs_short_ones_a_step_and_not_its_length() -> None:
    without, _ = p99_of_short_prompts(ShortestFirst, is_long=False)
    beside, num_long = p99_of_short_prompts(ShortestFirst, is_long=True)
    in_order, num_long_in_order = p99_of_short_prompts(FirstComeFirstServed, is_long=True)
    assert beside < 1.3 * without
    assert in_order > 20 * beside
    assert num_long > num_long_in_order / 2


@pytest.mark.parametrize(("busy_s", "room_s"), [(0.001, 0.003), (0.020, BUSY_SHARE * 0.020)])
def test_where_others_decode_prompts_stretch_the_step_by_little(busy_s: float, room_s: float) -> None:
    scheduler = ChunkScheduler(chunk_tokens=512)
    speed = PrefillSpeed(overhead_s=0.002, s_per_token=1e-4)
    scheduler.add("long", num_tokens=4000, now_s=0.0)
    (chunk,) = scheduler.next_step(speed=speed, now_s=100.0, busy_s=busy_s)
    assert chunk.num_tokens == pytest.approx(room_s / 1e-4, abs=1), "it is alone, but not in the step"
    (chunk,) = scheduler.next_step(speed=speed, now_s=100.0, busy_s=busy_s, max_tokens=7)
    assert chunk.num_tokens == 7
    (chunk,) = scheduler.next_step(speed=speed, now_s=200.0)
    assert chunk.num_tokens == pytest.approx(180, abs=1), "20 ms less an empty step"


@pytest.mark.parametrize("empty_s", [0.0, 0.0002, 0.0017, 0.02])
@pytest.mark.parametrize("num_tokens", [100, 1200, 2500])
@pytest.mark.parametrize("chunk_tokens", [128, 512])
def test_what_the_steps_of_a_lone_prompt_cost_is_foreseen(empty_s: float, num_tokens: int, chunk_tokens: int) -> None:
    speed = PrefillSpeed(empty_s, 5e-5, 7e-8)
    scheduler = ChunkScheduler(chunk_tokens=chunk_tokens)
    scheduler.add("prompt", num_tokens=num_tokens)
    took_s = 0.0
    while chunks := scheduler.next_step(speed=speed):
        took_s += sum(speed.time_s(chunk.num_tokens, chunk.start) for chunk in chunks)
    work_s = speed.time_s(num_tokens) - empty_s
    more_s = more_steps_s(empty_s, work_s, num_tokens, chunk_tokens=chunk_tokens)
    assert speed.time_s(num_tokens) + more_s == pytest.approx(took_s, rel=0.08)
