"""The rate of retries: bounded, in order, never refused."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduling.retry_budget import RetryBudget, RetryLimits


def test_a_full_bucket_lets_a_burst_through_and_then_gives_turns():
    budget = RetryBudget(now_s=0.0)
    assert [budget.take(0.0, max_wait_s=60).wait_s for _ in range(100)] == [0.0] * 100
    waits = [budget.take(0.0, max_wait_s=60).wait_s for _ in range(3)]
    assert [round(wait_s, 6) for wait_s in waits] == [0.1, 0.2, 0.3]


def test_time_and_requests_fill_it_up_to_its_capacity():
    budget = RetryBudget(RetryLimits(per_request=0.5, per_second=1.0, capacity=2.0), now_s=0.0)
    assert [budget.take(0.0, max_wait_s=60).wait_s for _ in range(3)] == [0.0, 0.0, 1.0]
    budget.note_request(0.0)
    budget.note_request(0.0)
    assert budget.take(1.0, max_wait_s=60).wait_s == 0.0
    assert [budget.take(1000.0, max_wait_s=60).wait_s for _ in range(3)] == [0.0, 0.0, 1.0]


def test_who_would_wait_too_long_goes_late_and_takes_nothing_from_the_others():
    budget = RetryBudget(RetryLimits(per_request=0.0, per_second=1.0, capacity=1.0), now_s=0.0)
    assert budget.take(0.0, max_wait_s=5).wait_s == 0.0
    assert [budget.take(0.0, max_wait_s=0.5).wait_s for _ in range(10)] == [0.5] * 10
    assert budget.take(0.0, max_wait_s=5).wait_s == 1.0


def test_what_is_given_back_is_there_for_the_next():
    budget = RetryBudget(RetryLimits(per_request=0.0, per_second=1.0, capacity=1.0), now_s=0.0)
    assert budget.take(0.0, max_wait_s=5).wait_s == 0.0
    turn = budget.take(0.0, max_wait_s=5)
    assert turn.wait_s == 1.0
    budget.give_back(turn)
    assert budget.take(0.0, max_wait_s=5).wait_s == 1.0


def test_who_took_nothing_gives_nothing_back():
    budget = RetryBudget(RetryLimits(per_request=0.0, per_second=1.0, capacity=10.0), now_s=0.0)
    for _ in range(10):
        budget.take(0.0, max_wait_s=0.5)
    for _ in range(100):
        budget.give_back(budget.take(0.0, max_wait_s=0.5))
    assert budget.take(0.0, max_wait_s=5).wait_s == 1.0


@given(st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=200))
def test_retries_never_outrun_the_bucket(events):
    limits = RetryLimits(per_request=0.1, per_second=3.0, capacity=5.0)
    budget, now_s, num_requests, starts = RetryBudget(limits, now_s=0.0), 0.0, 0, []
    for passed_s, is_retry in events:
        now_s += passed_s
        if is_retry:
            starts.append(now_s + budget.take(now_s, max_wait_s=1e9).wait_s)
        else:
            num_requests += 1
            budget.note_request(now_s)
    for count, start_s in enumerate(sorted(starts), 1):
        assert count <= limits.capacity + start_s * limits.per_second + num_requests * limits.per_request + 1e-6
