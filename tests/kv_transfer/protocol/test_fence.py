"""Only the newest attempt of a request counts, and none counts twice."""

from __future__ import annotations

from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.messages import TransferId


def test_an_attempt_enters_once() -> None:
    fence = Fence()
    assert fence.enter(TransferId("r", 1)).is_current
    assert not fence.enter(TransferId("r", 1)).is_current
    fence.leave(TransferId("r", 1), is_committed=False)
    assert not fence.enter(TransferId("r", 1)).is_current


def test_a_newer_attempt_supersedes_one_that_runs() -> None:
    fence = Fence()
    fence.enter(TransferId("r", 1))
    assert fence.enter(TransferId("r", 3)).superseded == TransferId("r", 1)
    assert not fence.enter(TransferId("r", 2)).is_current
    fence.leave(TransferId("r", 1), is_committed=True)  # late news of the older one
    assert not fence.is_committed(TransferId("r", 3))
    fence.leave(TransferId("r", 3), is_committed=True)
    assert fence.is_committed(TransferId("r", 3))
    assert fence.enter(TransferId("r", 4)).superseded is None


def test_a_cancelled_attempt_is_kept_out_before_it_began() -> None:
    fence = Fence()
    fence.close(TransferId("r", 2))
    assert not fence.enter(TransferId("r", 2)).is_current
    assert fence.enter(TransferId("r", 3)).is_current


def test_memory_is_bounded_and_what_runs_is_never_forgotten() -> None:
    fence = Fence(capacity=10)
    fence.enter(TransferId("runs", 1))
    for number in range(1000):
        fence.enter(TransferId(str(number), 1))
        fence.leave(TransferId(str(number), 1), is_committed=True)
    assert not fence.enter(TransferId("runs", 1)).is_current
    assert not fence.enter(TransferId("999", 1)).is_current
    assert fence.enter(TransferId("0", 1)).is_current
    assert len(fence._entries) <= 11


def test_closing_an_attempt_that_entered_changes_nothing() -> None:
    fence = Fence()
    fence.enter(TransferId("r", 2))
    fence.close(TransferId("r", 2))
    fence.close(TransferId("r", 1))
    assert fence.enter(TransferId("r", 3)).superseded == TransferId("r", 2)
    fence.leave(TransferId("r", 3), is_committed=True)
    fence.close(TransferId("r", 3))
    assert fence.is_committed(TransferId("r", 3))


def test_a_cancelled_attempt_is_kept_out_while_an_older_one_runs() -> None:
    fence = Fence()
    fence.enter(TransferId("r", 1))
    fence.close(TransferId("r", 2))
    assert not fence.enter(TransferId("r", 2)).is_current


def test_only_the_attempt_that_was_committed_is() -> None:
    fence = Fence()
    fence.enter(TransferId("r", 2))
    fence.leave(TransferId("r", 2), is_committed=True)
    assert not fence.is_committed(TransferId("r", 1))
    assert not fence.is_committed(TransferId("r", 3))


def test_what_was_closed_does_not_run() -> None:
    fence = Fence()
    fence.close(TransferId("r", 1))
    assert fence.enter(TransferId("r", 2)).superseded is None
    assert not fence.is_committed(TransferId("r", 2))


def test_an_attempt_that_is_not_known_is_neither_ended_nor_committed() -> None:
    fence = Fence()
    fence.leave(TransferId("r", 1), is_committed=True)
    assert not fence.is_committed(TransferId("r", 1))
    assert fence.enter(TransferId("r", 1)).is_current


def test_it_remembers_as_many_as_it_says() -> None:
    fence = Fence(capacity=2)
    for name in ("a", "b"):
        fence.enter(TransferId(name, 1))
        fence.leave(TransferId(name, 1), is_committed=True)
    assert fence.is_committed(TransferId("a", 1))
    fence.enter(TransferId("c", 1))
    assert not fence.is_committed(TransferId("a", 1))
    assert fence.is_committed(TransferId("b", 1))
