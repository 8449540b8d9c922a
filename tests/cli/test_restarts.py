"""The life of a child process, without any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.restarts import (
    ALIVE,
    Action,
    ChildState,
    Phase,
    RestartPolicy,
    begin,
    on_exit,
    on_ready,
    on_stop,
    on_time,
)

POLICY = RestartPolicy()


def running(now_s: float = 0.0, *, is_ready: bool = True) -> ChildState:
    state, action = on_time(begin(now_s), now_s)
    assert action is Action.SPAWN
    return on_ready(state) if is_ready else state


def test_a_new_child_is_started_at_once_and_only_once() -> None:
    state, action = on_time(begin(5.0), 5.0)
    assert (state.phase, action) == (Phase.RUNNING, Action.SPAWN)
    assert on_time(state, 100.0) == (state, None)


def test_a_dead_child_waits_half_a_second_then_starts() -> None:
    state, action = on_exit(running(), 3.0, -9, POLICY)
    assert (state.phase, action, state.exit_code) == (Phase.WAITING, None, -9)
    assert on_time(state, 3.49)[1] is None
    assert on_time(state, 3.5)[1] is Action.SPAWN


def test_the_wait_doubles_up_to_its_limit() -> None:
    state, now_s, waits = running(), 0.0, []
    for _ in range(9):
        state, _ = on_exit(state, now_s, 1, POLICY)
        assert state.wake_at_s is not None
        waits.append(state.wake_at_s - now_s)
        now_s = state.wake_at_s
        state, _ = on_time(state, now_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_child_that_ran_long_enough_begins_again_with_the_first_wait() -> None:
    state = running()
    for now_s in (0.0, 0.0, 0.0):
        state, _ = on_exit(state, now_s, 1, POLICY)
        assert state.wake_at_s is not None
        state, _ = on_time(state, state.wake_at_s)
    state, _ = on_exit(state, state.started_at_s + POLICY.healthy_after_s, 1, POLICY)
    assert state.num_failures == 1


def test_a_clean_exit_that_nobody_asked_for_is_not_a_failure() -> None:
    state = running()
    for _ in range(20):
        state, action = on_exit(state, state.started_at_s, 0, POLICY)
        assert action is None
        assert state.wake_at_s == pytest.approx(state.started_at_s + POLICY.first_backoff_s)
        state, _ = on_time(state, state.wake_at_s or 0.0)


def test_a_child_that_refuses_its_settings_is_given_up() -> None:
    state, action = on_exit(running(is_ready=False), 0.1, 2, POLICY)
    assert (state.phase, action, state.exit_code) == (Phase.ENDED, Action.GIVE_UP, 2)


def test_a_child_that_never_gets_ready_is_given_up_after_some_tries() -> None:
    state, now_s = running(is_ready=False), 0.0
    for _ in range(POLICY.max_start_failures - 1):
        state, action = on_exit(state, now_s, 1, POLICY)
        assert action is None
        now_s = state.wake_at_s or 0.0
        state, _ = on_time(state, now_s)
    assert on_exit(state, now_s, 1, POLICY)[1] is Action.GIVE_UP


def test_a_child_that_was_ready_once_is_never_given_up() -> None:
    state, now_s = running(), 0.0
    for exit_code in [1, 2] * 20:
        state, action = on_exit(state, now_s, exit_code, POLICY)
        assert action is None
        now_s = state.wake_at_s or 0.0
        state, _ = on_time(state, now_s)


def test_stopping_asks_first_and_kills_after_the_grace() -> None:
    state, action = on_stop(running(), 10.0, 2.0)
    assert (state.phase, action) == (Phase.STOPPING, Action.TERMINATE)
    assert on_time(state, 11.9)[1] is None
    state, action = on_time(state, 12.0)
    assert action is Action.KILL
    assert on_time(state, 99.0)[1] is None
    state, action = on_exit(state, 99.0, -9, POLICY)
    assert (state.phase, action) == (Phase.ENDED, None)


def test_stopping_a_waiting_child_starts_nothing_more() -> None:
    waiting, _ = on_exit(running(), 0.0, 1, POLICY)
    state, action = on_stop(waiting, 0.1, 5.0)
    assert (state.phase, action) == (Phase.ENDED, None)
    assert on_time(state, 99.0) == (state, None)


def test_stopping_twice_changes_nothing() -> None:
    state, _ = on_stop(running(), 10.0, 2.0)
    assert on_stop(state, 11.0, 60.0) == (state, None)


@given(
    st.lists(
        st.tuples(st.sampled_from(["time", "ready", "exit", "stop"]), st.floats(0, 40), st.sampled_from([0, 1, 2, -9]))
    )
)
def test_in_any_order_of_events_a_child_is_started_only_when_none_lives(events: list[tuple[str, float, int]]) -> None:
    state, now_s, is_stopping = begin(0.0), 0.0, False
    for name, passed_s, exit_code in events:
        now_s += passed_s
        before = state
        action: Action | None = None
        if name == "time":
            state, action = on_time(state, now_s)
        elif name == "ready":
            state = on_ready(state)
        elif name == "exit" and state.phase in ALIVE:
            state, action = on_exit(state, now_s, exit_code, POLICY)
        elif name == "stop":
            is_stopping = True
            state, action = on_stop(state, now_s, 1.0)
        if action is Action.SPAWN:
            assert before.phase is Phase.WAITING
            assert not is_stopping
        if state.phase is Phase.WAITING:
            assert state.wake_at_s is not None
            assert state.wake_at_s - now_s <= POLICY.max_backoff_s
        if state.phase is Phase.STOPPING and action is not Action.KILL and before.phase is not Phase.STOPPING:
            assert state.wake_at_s is not None
        assert not (is_stopping and state.phase is Phase.RUNNING)
