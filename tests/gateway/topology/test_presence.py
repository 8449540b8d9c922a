"""Workers that are missed: those that vanished, until they are back, replaced or forgotten; and too few workers."""

import pytest

from gateway.topology.presence import GONE_FOR_S, MAX_GONE, MISSING_AFTER_S, STARTING_FOR_S, Presence, Seen, Shortage


def worker(id_: str = "decode-0", state: str = "ready", *, role: str = "decode", model: str = "m") -> Seen:
    return Seen(id_, role, model, "host", "host:1", state, has_worked=state == "ready")


def missed(presence: Presence) -> list[str]:
    return [gone.worker.id for gone in presence.gone]


def test_a_worker_that_vanished_is_gone_until_it_is_back() -> None:
    presence = Presence()
    presence.look([worker()], 0.0)
    presence.left(worker(), 5.0, unix_s=1e9, in_order=False)
    presence.look([], 6.0)
    assert (missed(presence), presence.num_vanished["decode"]) == (["decode-0"], 1)
    presence.look([worker(state="starting")], 7.0)
    assert missed(presence) == []
    # It was ready in an earlier life, and is missed again.
    presence.left(worker(state="starting"), 8.0, unix_s=1e9, in_order=False)
    assert (missed(presence), presence.num_vanished["decode"]) == (["decode-0"], 2)


def test_a_worker_that_vanished_is_forgotten_after_a_while() -> None:
    presence = Presence()
    presence.left(worker(), 5.0, unix_s=1e9, in_order=False)
    presence.look([], 5.0 + GONE_FOR_S - 0.1)
    assert missed(presence) == ["decode-0"]
    presence.look([], 5.0 + GONE_FOR_S)
    assert missed(presence) == []
    presence.left(worker(state="starting"), 700.0, unix_s=1e9, in_order=False)
    assert missed(presence) == []


@pytest.mark.parametrize("state", ["ready", "draining", "lost"])
def test_a_worker_that_left_in_order_is_not_missed(state: str) -> None:
    presence = Presence()
    presence.look([worker()], 0.0)
    presence.left(worker(state=state), 1.0, unix_s=1e9, in_order=True)
    presence.look([], 2.0)
    assert (missed(presence), presence.num_vanished["decode"]) == ([], 0)


def test_a_worker_that_was_ready_between_two_looks_is_missed() -> None:
    presence = Presence()
    presence.left(Seen("d", "decode", "m", "host", "host:1", "lost", has_worked=True), 1.0, unix_s=1e9, in_order=False)
    assert missed(presence) == ["d"]


def test_a_worker_that_never_worked_is_not_missed() -> None:
    presence = Presence()
    presence.look([worker(state="starting")], 0.0)
    presence.left(worker(state="lost"), 1.0, unix_s=1e9, in_order=False)
    assert missed(presence) == []


def test_one_that_came_later_takes_the_place_of_one_that_vanished() -> None:
    presence = Presence()
    presence.look([worker("a"), worker("b"), worker("c", "starting")], 0.0)
    for at_s, id_ in ((1.0, "b"), (2.0, "a")):
        presence.left(worker(id_), at_s, unix_s=1e9, in_order=False)
    presence.look([worker("c")], 3.0)
    assert missed(presence) == ["a", "b"], "it was present before they vanished"
    presence.look([worker("c"), worker("d", "starting"), worker("e", role="prefill"), worker("f", model="n")], 4.0)
    assert missed(presence) == ["a", "b"], "one loads its model, the others do other work"
    presence.look([worker("c"), worker("d")], 5.0)
    assert missed(presence) == ["a"], "the first that vanished is replaced first"
    presence.look([worker("c"), worker("d")], 6.0)
    assert missed(presence) == ["a"], "each replaces one"


def test_no_more_than_so_many_are_missed() -> None:
    presence = Presence()
    for number in range(MAX_GONE + 5):
        presence.left(worker(f"d-{number:05}"), float(number), unix_s=1e9, in_order=False)
    assert len(missed(presence)) == MAX_GONE
    assert missed(presence)[0] == "d-00005"


def test_fewer_than_expected_are_a_shortage_after_a_while() -> None:
    presence = Presence(lambda: {"decode": 2})
    presence.look([worker("a"), worker("b")], 0.0)
    presence.look([worker("a"), worker("b", "lost")], 1.0)
    presence.look([worker("a"), worker("b", "draining")], 1.0 + MISSING_AFTER_S - 0.1)
    assert presence.shortages == {}
    presence.look([worker("a")], 1.0 + MISSING_AFTER_S)
    assert presence.shortages == {"decode": Shortage(2, 1, 0)}
    presence.look([worker("a"), worker("c", "starting")], 12.0)
    assert presence.shortages == {}
    presence.look([worker("a"), worker("c", "starting")], 12.0 + STARTING_FOR_S)
    presence.look([worker("a"), worker("c", "starting")], 12.0 + STARTING_FOR_S + MISSING_AFTER_S)
    assert presence.shortages == {"decode": Shortage(2, 1, 0)}, "it loads for too long to be counted on"
    presence.look([worker("a"), worker("c")], 900.0)
    assert presence.shortages == {}
