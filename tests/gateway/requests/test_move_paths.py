"""A path between decode workers that fails is not used again for a while."""

from gateway.requests.move_paths import MovePaths
from gateway.topology.session import Peer
from services.runtime.breaker import FIRST_OPEN_S
from services.runtime.clock import ManualClock
from services.runtime.errors import ChannelUnreachable, TransferFailed

GIVER, TAKER, OTHER = (Peer(f"decode-{number}", str(number) * 32, "nowhere") for number in range(3))


def is_blocked(paths: MovePaths, taker: Peer = TAKER) -> bool:
    return paths.is_blocked(GIVER.incarnation, taker.incarnation)


def test_an_unreachable_taker_blocks_its_path_alone() -> None:
    paths = MovePaths(ManualClock())
    paths.failed((GIVER, TAKER), ChannelUnreachable("port 9 is closed"))
    assert is_blocked(paths)
    assert not is_blocked(paths, OTHER)
    assert not paths.is_blocked(TAKER.incarnation, GIVER.incarnation)


def test_other_failures_block_it_at_the_second_time_in_a_row() -> None:
    paths = MovePaths(ManualClock())
    paths.failed((GIVER, TAKER), TransferFailed("stuck"))
    paths.succeeded((GIVER, TAKER))
    paths.failed((GIVER, TAKER), TransferFailed("stuck"))
    assert not is_blocked(paths)
    paths.failed((GIVER, TAKER), TransferFailed("stuck"))
    assert is_blocked(paths)


def test_it_is_used_again_after_a_while_and_later_each_time_it_fails() -> None:
    clock = ManualClock()
    paths = MovePaths(clock)
    paths.failed((GIVER, TAKER), ChannelUnreachable("port 9 is closed"))
    for block_s in (FIRST_OPEN_S, 2 * FIRST_OPEN_S):
        clock.advance(0.9 * block_s)
        assert is_blocked(paths)
        clock.advance(0.2 * block_s)
        assert not is_blocked(paths)
        paths.failed((GIVER, TAKER), ChannelUnreachable("port 9 is closed"))
    paths.succeeded((GIVER, TAKER))
    assert not is_blocked(paths)
