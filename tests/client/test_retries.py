"""The policy alone: what is tried again, when, where, and what it costs."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_client.errors import (
    AlreadyExists,
    Failure,
    InvalidRequest,
    NotFound,
    RateLimited,
    ServerError,
    TandemError,
    Unavailable,
)
from tandem_client.retries import Course, Naming, RetryBudget, RetryPolicy

LONG_S = 1000.0
DOWN = Failure(Unavailable("down"))


def course(naming: Naming = Naming.NONE, *, budget: RetryBudget | None = None, **options: int) -> Course:
    attempts = options.pop("max_attempts", 4)
    return Course(
        RetryPolicy(max_attempts=attempts), budget or RetryBudget(ratio=0.1, reserve=10), naming=naming, **options
    )


def fail(way: Course, failure: Failure = DOWN, *, draw: float = 0.5, remaining_s: float = LONG_S) -> float:
    return way.failed(failure, draw=draw, remaining_s=remaining_s)


@given(
    ratio=st.floats(0, 1),
    reserve=st.integers(0, 20),
    is_call=st.lists(st.booleans(), max_size=300),
)
def test_retries_never_exceed_the_share_and_the_reserve(ratio: float, reserve: int, is_call: list[bool]) -> None:
    budget = RetryBudget(ratio=ratio, reserve=reserve)
    calls = retries = 0
    for happens in is_call:
        if happens:
            budget.deposit()
            calls += 1
        else:
            retries += budget.withdraw()
        assert retries <= reserve + ratio * calls


def test_ten_calls_pay_for_one_retry() -> None:
    budget = RetryBudget(ratio=0.1, reserve=0)
    for _ in range(9):
        budget.deposit()
    assert not budget.withdraw()
    budget.deposit()
    assert budget.withdraw()
    assert not budget.withdraw()


def test_an_empty_budget_raises_the_first_error() -> None:
    budget = RetryBudget(ratio=0.0, reserve=1)
    fail(course(budget=budget))
    with pytest.raises(Unavailable, match="down"):
        fail(course(budget=budget))


def test_backoff_doubles_up_to_its_limit() -> None:
    way = course(max_attempts=9)
    waits = [fail(way, draw=1.0) for _ in range(8)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_the_servers_pushback_is_kept_to_whatever_is_drawn() -> None:
    assert fail(course(), Failure(Unavailable("full"), pushback_s=7.5), draw=0.0) == 7.5


@pytest.mark.parametrize(
    "failure",
    [
        Failure(Unavailable("full"), pushback_s=30.5),
        Failure(Unavailable("full"), is_final=True),
        Failure(RateLimited("too large")),
        Failure(InvalidRequest("bad")),
        Failure(ServerError("broken")),
        Failure(AlreadyExists("taken")),
        Failure(NotFound("what?")),
    ],
    ids=["long-pushback", "forbidden", "too-large", "invalid", "internal", "exists", "not-found"],
)
@pytest.mark.parametrize("naming", Naming)
def test_what_is_not_tried_again(failure: Failure, naming: Naming) -> None:
    with pytest.raises(type(failure.error)):
        fail(course(naming), failure)


def test_a_wait_beyond_the_deadline_raises_the_error_at_once() -> None:
    full = Failure(Unavailable("full"), pushback_s=3.0)
    assert fail(course(), full, remaining_s=3.01) == 3.0
    with pytest.raises(Unavailable, match="full"):
        fail(course(), full, remaining_s=3.0)


def test_attempts_end() -> None:
    way = course(max_attempts=3)
    fail(way)
    fail(way)
    with pytest.raises(Unavailable):
        fail(way)


def test_every_gateway_is_asked_without_a_wait_and_then_all_again() -> None:
    way = course(num_addresses=3, address=1, max_attempts=9)
    waits, asked = [], [way.address]
    for _ in range(5):
        waits.append(fail(way, draw=1.0))
        asked.append(way.address)
    assert asked == [1, 2, 0, 1, 2, 0]
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.4])


def test_a_limit_of_the_tenant_is_the_same_at_every_gateway() -> None:
    way = course(num_addresses=2)
    fail(way, Failure(RateLimited("slowly"), pushback_s=1.0))
    assert way.address == 0


def test_an_unnamed_answer_that_was_shown_is_not_begun_again() -> None:
    way = course()
    way.received(first_index=0, num_tokens=0)
    with pytest.raises(Unavailable):
        fail(way)


@pytest.mark.parametrize("naming", [Naming.ID, Naming.KEY])
def test_a_named_answer_goes_on_at_the_next_token(naming: Naming) -> None:
    way = course(naming)
    fail(way)
    assert not way.resumes
    way.received(first_index=0, num_tokens=3)
    way.received(first_index=3, num_tokens=2)
    fail(way)
    assert (way.resumes, way.next_index) == (True, 5)


def test_going_on_after_news_is_free_and_without_news_is_not() -> None:
    way = course(Naming.KEY, budget=RetryBudget(ratio=0.0, reserve=0), max_attempts=9)
    for index in range(20):
        way.received(first_index=index, num_tokens=1)
        fail(way)
    with pytest.raises(Unavailable):
        fail(way)


@pytest.mark.parametrize(("next_index", "first_index"), [(3, 2), (3, 4)], ids=["repeat", "gap"])
def test_a_missing_or_repeated_index_is_an_error(next_index: int, first_index: int) -> None:
    way = course(Naming.KEY)
    way.received(first_index=0, num_tokens=next_index)
    with pytest.raises(ServerError, match=f"token {first_index} where token {next_index} was due"):
        way.received(first_index=first_index, num_tokens=1)


def test_an_id_that_an_earlier_attempt_has_taken_is_resumed() -> None:
    way = course(Naming.ID, max_attempts=9)
    fail(way)
    assert fail(way, Failure(AlreadyExists("running"))) == 0.0
    assert (way.resumes, way.next_index) == (True, 0)
    assert fail(way, Failure(NotFound("gone"))) == 0.0
    assert not way.resumes


def test_an_answer_that_is_not_known_any_more_is_not_begun_again_once_a_part_was_shown() -> None:
    way = course(Naming.ID, max_attempts=9)
    way.received(first_index=0, num_tokens=1)
    fail(way)
    with pytest.raises(NotFound):
        fail(way, Failure(NotFound("gone")))


def test_resuming_from_the_start_stays_resuming() -> None:
    way = Course(RetryPolicy(), RetryBudget(ratio=0.1, reserve=10), naming=Naming.ID, resume_at=0)
    fail(way)
    assert way.resumes
    with pytest.raises(NotFound):
        fail(way, Failure(NotFound("gone")))


FAILURES = st.sampled_from(
    [
        DOWN,
        Failure(Unavailable("full"), pushback_s=0.5),
        Failure(RateLimited("slowly"), pushback_s=0.1),
        Failure(AlreadyExists("running")),
        Failure(NotFound("gone")),
        Failure(ServerError("broken")),
    ]
)


@given(
    naming=st.sampled_from([Naming.NONE, Naming.ID, Naming.KEY]),
    events=st.lists(st.one_of(st.integers(0, 3), FAILURES), max_size=60),
    reserve=st.integers(0, 5),
    num_addresses=st.integers(1, 3),
)
def test_whatever_happens_no_token_is_asked_for_twice_and_it_ends(
    naming: Naming, events: list[int | Failure], reserve: int, num_addresses: int
) -> None:
    way = course(naming, budget=RetryBudget(ratio=0.0, reserve=reserve), num_addresses=num_addresses)
    shown = idle = paid = 0
    has_shown = has_news = False
    for event in events:
        if isinstance(event, int):
            way.received(first_index=shown, num_tokens=event)
            shown += event
            has_shown = has_news = True
            idle = 0
            continue
        idle += 1
        kind = way.resumes
        try:
            delay_s = fail(way, event)
        except TandemError:
            return
        assert delay_s >= 0
        assert idle < 4
        assert not has_shown or naming is not Naming.NONE
        assert not has_shown or (way.resumes and way.next_index == shown)
        assert 0 <= way.address < num_addresses
        assert event.error.code is not grpc.StatusCode.INTERNAL
        paid += not has_news and kind == way.resumes
        has_news = False
    assert paid <= reserve


@pytest.mark.parametrize(
    "values",
    [
        {"max_attempts": 0},
        {"budget_ratio": 1.5},
        {"budget_ratio": float("nan")},
        {"budget_reserve": -1},
        {"initial_backoff_s": -1.0},
        {"max_backoff_s": float("inf")},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        RetryPolicy(**values)
