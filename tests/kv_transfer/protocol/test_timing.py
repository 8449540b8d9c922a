"""When a peer is dead, and when it must be told that we are not."""

from kv_transfer.protocol.timing import Liveness, Timeouts

LIMITS = Timeouts(heartbeat_s=1.0, silence_s=3.0)


def test_beats_are_due_once_a_second():
    life = Liveness(LIMITS, 10.0)
    assert [life.beat_due(now) for now in (10.9, 11.0, 11.5, 12.0)] == [False, True, False, True]


def test_a_peer_is_dead_after_its_silence_and_any_word_is_a_sign_of_life():
    life = Liveness(LIMITS, 0.0)
    assert not any(life.is_silent(tenths / 10) for tenths in range(0, 30, 5))
    life.heard(2.9)
    assert not any(life.is_silent(tenths / 10) for tenths in range(30, 59, 5))
    assert life.is_silent(5.9)


def test_a_process_that_was_stopped_first_reads_what_waits():
    life = Liveness(LIMITS, 0.0)
    assert not life.is_silent(60.0)  # nobody looked for a minute: the peer has one more heartbeat
    assert not life.is_silent(60.9)
    assert life.is_silent(61.0)


def test_a_stop_takes_nothing_from_a_peer_that_has_just_spoken():
    life = Liveness(LIMITS, 0.0)
    life.heard(59.5)
    assert not life.is_silent(60.0)
    assert not any(life.is_silent(60.0 + tenths / 10) for tenths in range(0, 25, 5))
    assert life.is_silent(62.5)


def test_the_worker_is_asked_for_less_long_than_the_sender_waits():
    limits = Timeouts()
    assert limits.worker_s < min(limits.reserve_s, limits.commit_s)
