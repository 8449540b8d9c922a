"""The first burst of a cold gateway, which has seen nothing drain, is judged by speeds that workers measured before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduling.entry import QueueEntry, ServiceClass
from services.scheduling.overload import ClusterLoad, OverloadPolicy, Refuse, Targets
from services.scheduling.queue import RequestQueue
from tests.examples import examples

LIMIT_S = 5.0


def burst(num: int, *, prompt_s: float, num_workers: int, is_measured: bool = True) -> tuple[int, float]:
    """How many of `num` requests that come at once are let in, and the longest time to a first token among them.

    Each worker computes one prompt after the other, and answers take nothing.
    """
    queue, policy = RequestQueue(max_waiting=10_000), OverloadPolicy()
    free_s = [0.0] * num_workers
    longest_s, num_let_in = 0.0, 0

    def start(entry: QueueEntry, at: int, now_s: float) -> None:
        nonlocal longest_s
        policy.note_start(entry, now_s, is_backlogged=len(queue) > 0)
        free_s[at] = now_s + prompt_s
        longest_s = max(longest_s, free_s[at] - entry.arrived_s)

    for number in range(num):
        now_s = number * 1e-3
        while len(queue) and min(free_s) <= now_s:
            start(queue.pop(), free_s.index(min(free_s)), now_s)
        entry = QueueEntry(number, ServiceClass.NORMAL, "", 500, now_s, prompt_s=prompt_s if is_measured else 0.0)
        load = ClusterLoad(
            queue.num_ahead(ServiceClass.NORMAL),
            queue.waiting_tokens(ServiceClass.NORMAL),
            len(queue),
            prefill_s=prompt_s,
            prefill_queue_s=max(0.0, min(free_s) - now_s),
            prompts_ahead_s=queue.waiting_prompts_s(ServiceClass.NORMAL) / num_workers,
        )
        if isinstance(policy.judge(entry, load, Targets(LIMIT_S), now_s), Refuse):
            continue
        num_let_in += 1
        idle = min(range(num_workers), key=free_s.__getitem__)
        if free_s[idle] <= now_s:
            start(entry, idle, now_s)
        else:
            queue.push(entry)
            policy.note_backlog(now_s, is_backlogged=True)
    while len(queue):
        idle = min(range(num_workers), key=free_s.__getitem__)
        start(queue.pop(), idle, max(free_s[idle], num * 1e-3))
    return num_let_in, longest_s


@given(num=st.integers(1, 300), prompt_s=st.floats(0.02, 1.0), num_workers=st.integers(1, 8))
@settings(max_examples=examples(100), deadline=None)
def test_who_is_let_in_has_its_first_token_in_time_and_few_others_would_have(
    num: int, prompt_s: float, num_workers: int
) -> None:
    num_let_in, longest_s = burst(num, prompt_s=prompt_s, num_workers=num_workers)
    assert longest_s <= LIMIT_S
    num_that_fit = min(num, int(LIMIT_S / prompt_s) * num_workers)
    assert num_let_in >= num_that_fit * 0.5 - num_workers


def test_without_those_speeds_all_are_let_in_and_late() -> None:
    num_let_in, longest_s = burst(60, prompt_s=0.3, num_workers=2, is_measured=False)
    assert (num_let_in, longest_s) == (60, pytest.approx(9.0, abs=0.2))


def test_what_was_seen_to_drain_counts_more_than_what_prompts_might_take() -> None:
    """Cached prompts take nothing, which nobody knows beforehand."""
    policy = OverloadPolicy()
    for number in range(20):
        entry = QueueEntry(number, ServiceClass.NORMAL, "", 500, number / 100, prompt_s=1.0)
        policy.note_start(entry, number / 100, is_backlogged=True)
    load = ClusterLoad(10, 5000, 10, prompts_ahead_s=10.0)
    entry = QueueEntry("new", ServiceClass.NORMAL, "", 500, 0.2, prompt_s=1.0)
    assert not isinstance(policy.judge(entry, load, Targets(LIMIT_S), 0.2), Refuse)
