"""Refusals: each reason for one, and a small cluster under ten times the load that it can bear."""

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.overload import Admit, ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.queue import QueueFull, RequestQueue

CRITICAL, INTERACTIVE, NORMAL, LOW, BATCH = ServiceClass
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)
NONE = Targets()


def entry(key="new", service_class=NORMAL, **fields):
    return QueueEntry(key, service_class, **({"tenant": "", "cost_tokens": 100, "arrived_s": 0.0} | fields))


def busy_policy(*, tokens_per_s=1000.0, until_s=20.0):
    """A policy that has seen a queue drain at this rate, ten starts a second."""
    policy = OverloadPolicy()
    for number in range(int(10 * until_s) + 1):
        now_s = number / 10
        one = entry(number, cost_tokens=int(tokens_per_s / 10), service_s=2.0)
        policy.note_start(one, now_s, is_backlogged=True)
        if number >= 20:
            policy.note_end(number - 20, now_s)
    return policy


def test_the_wait_is_the_work_ahead_over_the_measured_rate():
    policy = busy_policy(tokens_per_s=1000.0)
    assert policy.drain_tokens_per_s(20.0) == pytest.approx(1000.0, rel=0.05)
    assert policy.queue_delay_s(NORMAL, 3000, 20.0) == pytest.approx(3.0, rel=0.05)
    assert policy.queue_delay_s(NORMAL, 0, 20.0) == 0.0


def test_what_higher_classes_keep_bringing_is_taken_off():
    policy = OverloadPolicy()
    for number in range(601):
        service_class = INTERACTIVE if number % 4 else BATCH
        policy.note_start(entry(number, service_class), number / 10, is_backlogged=True)
    assert policy.queue_delay_s(INTERACTIVE, 1000, 60.0) == pytest.approx(1.0, rel=0.1)
    assert policy.queue_delay_s(NORMAL, 1000, 60.0) == pytest.approx(4.0, rel=0.15)


def test_classes_that_filled_the_cluster_for_a_while_do_not_make_lower_ones_wait_for_ever():
    """What they bring is a mean over ten seconds: it counts for ten seconds."""
    policy = OverloadPolicy()
    for number in range(601):
        policy.note_start(entry(number, INTERACTIVE), number / 10, is_backlogged=True)
    assert policy.queue_delay_s(INTERACTIVE, 1000, 60.0) == pytest.approx(1.0, rel=0.1)
    for service_class in (NORMAL, LOW, BATCH):
        assert policy.queue_delay_s(service_class, 1000, 60.0) <= 10.0 + 1.1
    patient = entry(service_class=LOW, arrived_s=60.0, deadline_s=80.0)
    assert isinstance(policy.judge(patient, ClusterLoad(tokens_ahead=500), NONE, 60.0), Admit)


@given(
    brought=st.lists(st.tuples(st.sampled_from(ServiceClass), st.integers(0, 5000), st.floats(0.001, 2)), min_size=5),
    ahead=st.integers(1, 10**6),
)
def test_no_prediction_is_longer_than_the_horizon_and_the_queue(brought, ahead):
    policy, now_s = OverloadPolicy(), 0.0
    for number, (service_class, tokens, passed_s) in enumerate(brought):
        now_s += passed_s
        policy.note_start(entry(number, service_class, cost_tokens=1 + tokens), now_s, is_backlogged=True)
    waits = [policy.queue_delay_s(one, ahead, now_s) for one in ServiceClass]
    assert waits == sorted(waits), "a lower class never waits less"
    assert waits[-1] <= 10.0 + ahead / policy.drain_tokens_per_s(now_s) + 1e-6


def test_before_there_was_a_backlog_littles_law_says_how_fast_it_would_drain():
    policy = OverloadPolicy()
    for number in range(20):
        policy.note_start(entry(number, service_s=4.0), 0.0, is_backlogged=False)
    assert policy.drain_tokens_per_s(0.0) == pytest.approx(20 * 100 / 4.0)
    for number in range(10):
        policy.note_end(number, 1.0)
    assert policy.drain_tokens_per_s(1.0) == pytest.approx(10 * 100 / 1.0), (
        "what was seen counts, not what was predicted"
    )


def test_a_cluster_of_which_little_is_used_serves_more_than_it_does():
    """A few short requests ran, then long ones come together: there is room for them all in the next moment."""
    policy = OverloadPolicy()
    for number in range(10):
        policy.note_start(entry(number, cost_tokens=30, service_s=0.2), number / 2, is_backlogged=False)
        policy.note_end(number - 1, number / 2)
    burst = ClusterLoad(tokens_ahead=6000, free_page_share=0.998)
    assert isinstance(policy.judge(entry(cost_tokens=1500), burst, TARGETS, 5.0), Admit)
    assert isinstance(policy.judge(entry(cost_tokens=1500), replace(burst, free_page_share=0.1), TARGETS, 5.0), Refuse)


def test_when_nothing_moves_any_more_the_wait_grows():
    policy = busy_policy()
    assert policy.queue_delay_s(NORMAL, 1000, 20.2) == pytest.approx(1.0, rel=0.1)
    assert policy.queue_delay_s(NORMAL, 1000, 80.0) > 4.0


def test_without_anything_known_everybody_is_let_in():
    verdict = OverloadPolicy().judge(entry(), ClusterLoad(num_ahead=9, tokens_ahead=10**6), TARGETS, 0.0)
    assert verdict == Admit(0.0)


def test_refused_when_the_first_token_would_come_too_late():
    policy = busy_policy()
    full = ClusterLoad(free_page_share=0.0, prefill_s=0.4)
    assert isinstance(policy.judge(entry(), replace(full, tokens_ahead=800), TARGETS, 20.0), Admit)
    verdict = policy.judge(entry(), replace(full, tokens_ahead=6000), TARGETS, 20.0)
    assert isinstance(verdict, Refuse)
    assert verdict.kind == "ttft"
    assert verdict.reason.startswith("the first token might take 9.")
    assert verdict.retry_after_s == pytest.approx(1.5 * 6.0 + 0.4 - 0.9 * 2.0, rel=0.1)


def test_a_prompt_that_is_too_long_for_the_target_at_any_time_is_no_overload():
    assert isinstance(busy_policy().judge(entry(), ClusterLoad(prefill_s=10.0), TARGETS, 20.0), Admit)


def test_prompts_that_wait_for_computation_are_part_of_the_wait():
    policy, short, long = OverloadPolicy(), ClusterLoad(prefill_s=0.2), ClusterLoad(prefill_s=10.0)
    for load, max_wait_s in ((short, 1.8 - 0.2), (long, 0.25 * 1.8)):
        waits = replace(load, prefill_queue_s=max_wait_s - 0.01), replace(load, prefill_queue_s=max_wait_s + 0.01)
        verdicts = [type(policy.judge(entry(), one, TARGETS, 0.0)) for one in waits]
        assert verdicts == [Admit, Refuse]


def test_prompts_wait_where_classes_count():
    policy = OverloadPolicy()
    for queue_s, expected in ((0.0, 5), (0.1, 4), (0.3, 3), (1.0, 2)):
        load = ClusterLoad(prefill_queue_s=queue_s)
        assert sum(policy.may_start(entry(service_class=one), load) for one in ServiceClass) == expected
        assert policy.may_start(entry(service_class=INTERACTIVE), load)


def test_refused_when_tokens_would_come_too_slowly():
    verdict = busy_policy().judge(entry(), ClusterLoad(step_s=0.2), TARGETS, 20.0)
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "a token would take 200 ms, the limit is 100 ms"
    assert verdict.retry_after_s == pytest.approx(1.0, abs=0.1)


def test_refused_at_once_when_the_deadline_cannot_be_met():
    policy = busy_policy()
    late = entry(deadline_s=24.0, service_s=2.0)
    assert isinstance(policy.judge(late, ClusterLoad(tokens_ahead=100), NONE, 20.0), Admit)
    verdict = policy.judge(late, ClusterLoad(tokens_ahead=3000), NONE, 20.0)
    assert isinstance(verdict, Refuse)
    assert (verdict.kind, verdict.is_final) == ("deadline", False), "an emptier cluster would meet it"
    verdict = policy.judge(late, ClusterLoad(), NONE, 22.5)
    assert isinstance(verdict, Refuse)
    assert verdict.is_final


def test_batch_waits_for_as_long_as_it_takes_and_critical_is_let_in():
    crowded = ClusterLoad(num_ahead=10**4, tokens_ahead=10**7, free_page_share=0.0, step_s=9.0, prefill_s=9.0)
    policy = busy_policy()
    assert isinstance(policy.judge(entry(service_class=BATCH), crowded, TARGETS, 20.0), Admit)
    soon = entry(service_class=BATCH, deadline_s=21.0, service_s=9.0)
    assert isinstance(policy.judge(soon, crowded, TARGETS, 20.0), Admit), "a prediction may be wrong"
    assert isinstance(policy.judge(entry(service_class=CRITICAL), crowded, TARGETS, 20.0), Admit)
    assert isinstance(policy.judge(entry(service_class=INTERACTIVE), crowded, TARGETS, 20.0), Refuse)


@given(st.integers(0, 10_000), st.floats(0, 3), st.floats(0, 0.3), st.floats(0, 1))
def test_a_higher_class_is_never_refused_where_a_lower_one_is_let_in(tokens_ahead, prefill_s, step_s, free):
    load = ClusterLoad(tokens_ahead=tokens_ahead, prefill_s=prefill_s, step_s=step_s, free_page_share=free)
    policy = busy_policy(until_s=2.0)
    let_in = [
        isinstance(policy.judge(entry(service_class=one), load, TARGETS, 2.0), Admit)
        for one in (CRITICAL, INTERACTIVE, NORMAL, LOW)
    ]
    assert let_in == sorted(let_in, reverse=True)


def test_pages_run_short_and_come_back_with_hysteresis():
    policy = busy_policy()
    seen = []
    for free in (0.2, 0.1, 0.05, 0.1, 0.14, 0.15, 0.1):
        load = ClusterLoad(free_page_share=free)
        refused = isinstance(policy.judge(entry(service_class=LOW), load, TARGETS, 20.0), Refuse)
        assert isinstance(policy.judge(entry(service_class=NORMAL), load, TARGETS, 20.0), Admit)
        assert policy.may_start(entry(service_class=NORMAL), load)
        assert policy.may_start(entry(service_class=BATCH), load) == (not refused)
        seen.append(refused)
    assert seen == [False, False, True, True, True, False, False]


def test_batch_work_leaves_its_reserve_free():
    policy = OverloadPolicy()
    assert policy.may_start(entry(service_class=BATCH), ClusterLoad(free_page_share=0.10))
    assert not policy.may_start(entry(service_class=BATCH), ClusterLoad(free_page_share=0.09))
    assert policy.may_start(entry(service_class=INTERACTIVE), ClusterLoad(free_page_share=0.0))


@given(st.integers(1, 10**9), st.floats(0, 1), st.floats(0, 1e4))
def test_who_is_refused_is_told_a_time_within_bounds(tokens_ahead, jitter, now_s):
    policy, load = busy_policy(until_s=2.0), ClusterLoad(num_ahead=1, tokens_ahead=tokens_ahead)
    refusals = [policy.when_full(entry(), load, now_s, jitter=jitter)]
    verdict = policy.judge(entry(deadline_s=now_s + 30), load, TARGETS, now_s, jitter=jitter)
    refusals += [verdict] if isinstance(verdict, Refuse) else []
    assert all(1.0 <= refusal.retry_after_s <= 60.0 for refusal in refusals)


def test_those_who_are_refused_together_do_not_come_back_together():
    policy, load = busy_policy(), ClusterLoad(tokens_ahead=10_000)
    times = {policy.judge(entry(), load, TARGETS, 20.0, jitter=step / 10).retry_after_s for step in range(10)}
    assert len(times) == 10
    assert max(times) == pytest.approx(1.9 * min(times))


def test_ends_of_requests_that_never_started_say_nothing():
    policy = busy_policy()
    before = policy.drain_tokens_per_s(20.0)
    policy.note_end("unknown", 20.0)
    assert policy.drain_tokens_per_s(20.0) == before


def most_tokens_ahead(policy):
    """Behind how many tokens one is let in at most."""
    loads = (ClusterLoad(tokens_ahead=tokens) for tokens in range(100, 3000, 10))
    let_in = (one for one in loads if isinstance(policy.judge(entry("probe"), one, TARGETS, 20.0), Admit))
    return max(one.tokens_ahead for one in let_in)


def test_one_that_has_missed_its_target_teaches_caution_at_once_and_only_once():
    policy = busy_policy()
    before = most_tokens_ahead(policy)
    late = entry("late", arrived_s=20.0)
    assert isinstance(policy.judge(late, ClusterLoad(tokens_ahead=before), TARGETS, 20.0), Admit)
    policy.note_late(late, 22.0)
    after = most_tokens_ahead(policy)
    assert after < before
    policy.note_late(late, 60.0)
    assert most_tokens_ahead(policy) == after


def test_a_request_that_has_ended_teaches_nothing_more():
    policy = busy_policy()
    before = most_tokens_ahead(policy)
    assert isinstance(policy.judge(entry("gone"), ClusterLoad(tokens_ahead=before), TARGETS, 20.0), Admit)
    policy.note_end("gone", 21.0)
    policy.note_late(entry("gone"), 60.0)
    assert most_tokens_ahead(policy) == before


steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "end", "backlog", "no backlog"]),
        st.integers(0, 8),
        st.sampled_from(ServiceClass),
        st.integers(0, 5000),
        st.sampled_from([0.0, 1e-6, 0.1, 3.0, 1e5]),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps)
def test_whatever_happens_the_verdict_has_a_sane_time(seen):
    policy, now_s = OverloadPolicy(), 0.0
    for kind, key, service_class, tokens, passed_s, flag in seen:
        now_s += passed_s
        one = entry(key, service_class, cost_tokens=tokens, service_s=passed_s, arrived_s=now_s - passed_s)
        load = ClusterLoad(tokens_ahead=tokens, prefill_s=0.1, step_s=0.05, free_page_share=key / 8)
        verdict = policy.judge(one, load, TARGETS, now_s)
        if isinstance(verdict, Admit):
            assert verdict.queue_delay_s >= 0
        else:
            assert 1.0 <= verdict.retry_after_s <= 60.0
        if kind == "start":
            policy.note_start(one, now_s, is_backlogged=flag)
        elif kind == "end":
            policy.note_end(key, now_s)
        else:
            policy.note_backlog(now_s, is_backlogged=kind == "backlog")
        assert policy.drain_tokens_per_s(now_s) >= 0


# A cluster of NUM_PLACES sequences that all run at once, each as fast as ever: what limits it is the number of places.

NUM_PLACES = 64
TOKENS_PER_S = 400.0
"""Speed of one sequence."""
MEAN_TOKENS = 800
CAPACITY_PER_S = NUM_PLACES * TOKENS_PER_S / MEAN_TOKENS
PREFILL_S = 0.15
DURATION_S = 120.0
CLASS_TARGETS = dict.fromkeys((CRITICAL, INTERACTIVE, NORMAL, LOW), Targets(ttft_s=1.0)) | {BATCH: NONE}


@dataclass
class Outcome:
    good_tokens: Counter = field(default_factory=Counter)
    """Tokens of requests whose first token came within the target, by class; for batch, of those that ended."""
    refused: Counter = field(default_factory=Counter)
    late: Counter = field(default_factory=Counter)
    ttfts_s: dict = field(default_factory=lambda: {one: [] for one in ServiceClass})
    longest_retry_s: float = 0.0

    @property
    def goodput(self):
        """Tokens per second over what all places together can do."""
        return self.good_tokens.total() / DURATION_S / (NUM_PLACES * TOKENS_PER_S)


def run_cluster(loads, *, estimate=1.0, seed=0, speed_at=lambda now_s: 1.0, is_judged=True):
    """`loads`: arrivals per second over capacity, by class. `estimate`: predicted over true service time."""
    rng, outcome = random.Random(seed), Outcome()
    queue, policy = RequestQueue(max_waiting=2000), OverloadPolicy()
    events, num_running, count = [], 0, 0  # (time, number, class of an arrival or entry that ends, was in time)
    prefill_s = PREFILL_S * estimate
    targets = CLASS_TARGETS

    def arrive(now_s, service_class):
        gap_s = rng.expovariate(loads[service_class] * CAPACITY_PER_S)
        heapq.heappush(events, (now_s + gap_s, rng.random(), service_class, None))

    def load_for(service_class):
        return ClusterLoad(
            num_ahead=queue.num_ahead(service_class),
            tokens_ahead=queue.waiting_tokens(service_class),
            num_waiting=len(queue),
            free_page_share=(NUM_PLACES - num_running) / NUM_PLACES,
            prefill_s=prefill_s,
        )

    def start_those_who_can(now_s):
        nonlocal num_running, prefill_s
        while (first := queue.peek()) is not None:
            gated = not policy.may_start(first, load_for(first.service_class))
            if gated or num_running == NUM_PLACES:
                policy.note_backlog(now_s, is_backlogged=not gated)
                return
            queue.pop()
            num_running += 1
            following = queue.peek()
            waits = following is not None and policy.may_start(following, load_for(following.service_class))
            policy.note_start(first, now_s, is_backlogged=waits)
            prefill_s = PREFILL_S  # a worker's meter knows it after its first prompt
            ttft_s = now_s - first.arrived_s + PREFILL_S * rng.uniform(0.9, 1.1)
            outcome.ttfts_s[first.service_class].append(ttft_s)
            target_s = targets[first.service_class].ttft_s or math.inf
            is_good = ttft_s <= target_s
            outcome.late[first.service_class] += not is_good
            end_s = now_s + first.cost_tokens / TOKENS_PER_S / speed_at(now_s)
            heapq.heappush(events, (end_s, rng.random(), first, is_good))
        policy.note_backlog(now_s, is_backlogged=False)

    for service_class in loads:
        arrive(0.0, service_class)
    while events:
        now_s, _, what, is_good = heapq.heappop(events)
        if now_s > DURATION_S:
            break
        if is_good is not None:
            num_running -= 1
            policy.note_end(what.key, now_s)
            outcome.good_tokens[what.service_class] += what.cost_tokens * is_good
        else:
            arrive(now_s, what)
            count += 1
            tokens = max(50, min(4000, int(rng.lognormvariate(math.log(MEAN_TOKENS) - 0.32, 0.8))))
            service_s = tokens / TOKENS_PER_S * estimate
            new = QueueEntry(count, what, "", tokens, now_s, math.inf, service_s)
            verdict = policy.judge(
                new, load_for(what), targets[what] if is_judged else NONE, now_s, jitter=rng.random()
            )
            if isinstance(verdict, Admit):
                try:
                    pushed_out = queue.push(new)
                    outcome.refused[what if pushed_out is None else pushed_out.service_class] += pushed_out is not None
                except QueueFull:
                    verdict = policy.when_full(new, load_for(what), now_s)
            if isinstance(verdict, Refuse):
                outcome.refused[what] += 1
                outcome.longest_retry_s = max(outcome.longest_retry_s, verdict.retry_after_s)
        start_those_who_can(now_s)
    return outcome


def p99(values):
    return sorted(values)[int(0.99 * len(values))]


def mixed(times):
    return {INTERACTIVE: 0.3 * times, NORMAL: 0.5 * times, LOW: 0.2 * times}


@pytest.fixture(scope="module")
def peak():
    """The best that this cluster does at any load that it can bear, with estimates that are right."""
    return max(run_cluster(mixed(times)).goodput for times in (0.8, 1.0, 1.2, 1.5))


@pytest.mark.parametrize("estimate", [0.1, 1.0, 10.0])
def test_goodput_at_ten_times_the_load_is_nine_tenths_of_its_peak(peak, estimate):
    """However wrong what was predicted before anything was measured."""
    assert peak > 0.9, "of what all places together can do"
    outcome = run_cluster(mixed(10.0), estimate=estimate, seed=1)
    assert outcome.goodput >= 0.9 * peak
    assert outcome.late.total() <= 0.04 * sum(map(len, outcome.ttfts_s.values()))
    assert 1.0 <= outcome.longest_retry_s <= 60.0


def test_without_refusals_there_would_be_no_goodput(peak):
    outcome = run_cluster(mixed(10.0), seed=1, is_judged=False)
    assert outcome.goodput < 0.1 * peak


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_cluster_that_changes_its_speed_is_followed(factor):
    outcome = run_cluster(mixed(10.0), speed_at=lambda now_s: factor if now_s > DURATION_S / 2 else 1.0)
    assert outcome.goodput >= 0.9 * (1 + factor) / 2
    assert outcome.late.total() <= 0.05 * sum(map(len, outcome.ttfts_s.values()))


def test_batch_work_fills_the_rest_and_interactive_work_does_not_notice():
    alone = run_cluster({INTERACTIVE: 0.3})
    beside = run_cluster({INTERACTIVE: 0.3, BATCH: 10.0})
    assert alone.refused.total() == beside.refused[INTERACTIVE] == 0
    assert p99(beside.ttfts_s[INTERACTIVE]) <= 1.5 * p99(alone.ttfts_s[INTERACTIVE])
    assert beside.goodput >= 0.85
    assert beside.good_tokens[BATCH] >= beside.good_tokens[INTERACTIVE]


def test_a_load_that_it_can_bear_is_let_in():
    outcome = run_cluster(mixed(0.8))
    assert outcome.refused[INTERACTIVE] == outcome.refused[NORMAL] == 0
    assert outcome.refused[LOW] <= 0.03 * sum(map(len, outcome.ttfts_s.values())), "where pages run short for a moment"
    assert outcome.late.total() == 0
