import random

import pytest

from services.scheduling.turns import MIN_LIMIT_S, UNMEASURED_S, Switch, SwitchTimes, WorkerGroup, next_switch

TURN_S, SWITCH_S = 10.0, 2.0


def group(name: str, model: str, *, awake_s: float | None = 100.0, idle_s: float = 0.0) -> WorkerGroup:
    return WorkerGroup(name, model, awake_s, idle_s)


def due(groups: list[WorkerGroup], waiting_s: dict[str, float], resting: tuple[str, ...] = ()) -> Switch | None:
    return next_switch(groups, waiting_s, turn_s=TURN_S, switch_s=SWITCH_S, resting=resting)


def test_nothing_changes_for_a_model_that_is_awake_or_on_its_way() -> None:
    assert due([group("s", "a", idle_s=50.0)], {}) is None
    assert due([group("s", "a")], {"a": 90.0}) is None
    assert due([group("s", "b", awake_s=None), group("t", "a", idle_s=50.0)], {"b": 90.0}) is None


def test_an_idle_group_changes_at_once_the_least_recently_used_first() -> None:
    groups = [group("s", "a", idle_s=3.0), group("t", "b", idle_s=7.0), group("u", "c")]
    assert due(groups, {"d": 0.0}) == Switch("t", "d")


def test_a_model_that_is_awake_twice_spares_one_even_when_busy() -> None:
    groups = [group("s", "a"), group("t", "a", idle_s=1.0), group("u", "b", idle_s=50.0)]
    assert due(groups, {"c": 0.0}) == Switch("t", "c")
    assert due([group("s", "a"), group("t", "a"), group("u", "b")], {"c": 0.0}) == Switch("s", "c")


def test_a_busy_model_keeps_its_workers_for_a_turn_and_no_longer() -> None:
    assert due([group("s", "a", awake_s=TURN_S - 0.1)], {"b": 90.0, "a": 1.0}) is None
    assert due([group("s", "a", awake_s=TURN_S)], {"b": 0.1, "a": 90.0}) == Switch("s", "b")
    assert due([group("s", "a", awake_s=11.0), group("t", "c", awake_s=20.0)], {"b": 1.0}) == Switch("t", "b")


def test_an_idle_model_is_awake_for_as_long_as_a_switch_takes() -> None:
    assert due([group("s", "a", awake_s=SWITCH_S - 0.1, idle_s=1.0)], {"b": 90.0}) is None
    assert due([group("s", "a", awake_s=SWITCH_S, idle_s=1.0)], {"b": 0.0}) == Switch("s", "b")


def test_who_waits_longest_is_next_and_what_has_failed_rests() -> None:
    idle = [group("s", "a", idle_s=9.0)]
    assert due(idle, {"b": 1.0, "c": 2.0}) == Switch("s", "c")
    assert due(idle, {"b": 1.0, "c": 2.0}, resting=("c",)) == Switch("s", "b")
    assert due(idle, {"c": 2.0}, resting=("c",)) is None


def test_times_are_kept_apart_by_where_the_weights_were() -> None:
    times = SwitchTimes()
    assert (times.usual_s(is_asleep=True), times.measured_s) == (UNMEASURED_S, {})
    times.note(8.0, was_asleep=False)
    assert times.usual_s(is_asleep=True) == 8.0, "better than nothing"
    assert times.measured_s == {"disk": 8.0}
    times.note(1.0, was_asleep=True)
    assert (times.usual_s(is_asleep=True), times.usual_s(is_asleep=False)) == (1.0, 8.0)
    times.note(2.0, was_asleep=True)
    assert 1.0 < times.usual_s(is_asleep=True) < 2.0
    assert times.limit_s == MIN_LIMIT_S
    times.note(100.0, was_asleep=False)
    assert times.limit_s > MIN_LIMIT_S


@pytest.mark.parametrize("seed", range(20))
def test_every_waiting_model_has_its_turn_and_half_of_the_time_serves(seed: int) -> None:
    """Models that always have requests, or now and then: nobody waits longer than all others' turns, none thrash."""
    chance = random.Random(seed)
    models = "abcd"
    switch_s, step_s = chance.uniform(0.2, 3.0), 0.1
    model, awake_at, switching_until, switches, serving = "a", 0.0, 0.0, 0, 0
    waits_since: dict[str, float] = {}
    longest = 0.0
    for step in range(6000):
        now = step * step_s
        for one in models:
            if chance.random() < 0.02:
                waits_since.setdefault(one, now)
        is_awake = now >= switching_until
        if is_awake:
            serving += 1
            if model in waits_since and chance.random() < 0.1:
                longest = max(longest, now - waits_since.pop(model))
        here = WorkerGroup("s", model, now - awake_at if is_awake else None, 0.0 if model in waits_since else step_s)
        waiting = {one: now - since for one, since in waits_since.items()}
        order = next_switch([here], waiting, turn_s=TURN_S, switch_s=switch_s)
        if order is not None:
            assert is_awake
            model, switching_until = order.model, now + switch_s
            awake_at, switches = switching_until, switches + 1
    assert switches > 10
    assert serving >= 0.45 * 6000
    assert longest < (len(models) + 1) * (TURN_S + switch_s) + 10
