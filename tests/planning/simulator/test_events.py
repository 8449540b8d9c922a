"""The virtual clock."""

import pytest

from planning.simulator.events import EventLoop


def test_actions_run_in_order_of_time_and_then_of_asking():
    loop, done = EventLoop(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        loop.at(time_s, lambda time_s=time_s, name=name: done.append((loop.now_s == time_s, name)))
    loop.run()
    assert done == [(True, name) for name in "abcd"]


def test_an_action_may_ask_for_others_but_not_in_the_past():
    loop, done = EventLoop(), []

    def act():
        loop.at(loop.now_s, lambda: done.append(loop.now_s))
        loop.at(loop.now_s + 1, lambda: done.append(loop.now_s))
        with pytest.raises(AssertionError):
            loop.at(loop.now_s - 1, act)

    loop.at(5.0, act)
    loop.run()
    assert done == [5.0, 6.0]
