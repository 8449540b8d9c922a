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
