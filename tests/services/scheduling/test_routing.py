"""Order of workers under each policy."""

from services.scheduling.routing import POLICIES, WorkerView, least_loaded, round_robin


def worker(worker_id, *, requests=0, tokens=0, available=100):
    return WorkerView(worker_id, "0" * 32, 100, available, requests, tokens, 1000)


def ids(workers):
    return [view.worker_id for view in workers]


def test_round_robin_takes_turns_in_order_of_id():
    workers = [worker("b"), worker("a"), worker("c")]
    assert [ids(round_robin(workers, turn))[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert ids(round_robin(workers, 1)) == ["b", "c", "a"]


def test_policies_give_back_every_worker_and_leave_the_input_alone():
    workers = [worker("b", requests=3), worker("a", tokens=9), worker("c", available=0)]
    before = list(workers)
    for policy in POLICIES.values():
        for turn in range(5):
            assert sorted(ids(policy(workers, turn))) == ["a", "b", "c"]
        assert policy([], 3) == []
    assert workers == before


def test_least_loaded_looks_at_tokens_then_requests_then_pages():
    light = worker("light", requests=5, tokens=0, available=10)
    fewer = worker("fewer", requests=1, tokens=10, available=10)
    roomy = worker("roomy", requests=1, tokens=10, available=50)
    busy = worker("busy", requests=0, tokens=99, available=100)
    for turn in range(4):
        assert ids(least_loaded([busy, roomy, fewer, light], turn)) == ["light", "roomy", "fewer", "busy"]


def test_least_loaded_shares_ties():
    workers = [worker("a"), worker("b"), worker("c", requests=1)]
    assert {ids(least_loaded(workers, turn))[0] for turn in range(6)} == {"a", "b"}


def test_a_pool_without_pages_is_no_division_by_zero():
    assert ids(least_loaded([WorkerView("a", "0", 0, 0, 0, 0, 0)], 0)) == ["a"]
