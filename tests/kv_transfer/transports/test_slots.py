"""The control side of channels on a GPU: which slot holds what, and what a peer that lies is told."""

import socket
import struct

import pytest

from kv_transfer.transports.base import ChannelBroken, ChannelEnded, ChannelTimeout, RingSpec
from kv_transfer.transports.slots import Posted, ReceiverSlots, SenderSlots

RING = RingSpec(2, 100)
DIGEST = b"d" * 16


@pytest.fixture
def sockets():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def sides(sockets):
    return SenderSlots(sockets[0], RING), ReceiverSlots(sockets[1], RING)


def test_slots_go_round(sides):
    sender, receiver = sides
    for seq in range(5):
        slot = sender.take(100, 1.0)
        sender.post(Posted(seq, slot, 10 + seq, DIGEST))
        assert receiver.next(1.0) == Posted(seq, slot, 10 + seq, DIGEST)
        receiver.release(slot)
    assert receiver.next(0.0) is None


def test_a_full_ring_is_waited_for(sides):
    sender, receiver = sides
    slots = [sender.take(1, 0.0) for _ in range(2)]
    assert sorted(slots) == [0, 1]
    for seq, slot in enumerate(slots):
        sender.post(Posted(seq, slot, 1, DIGEST))
    with pytest.raises(ChannelTimeout):
        sender.take(1, 0.01)
    held = receiver.next(1.0)
    receiver.release(held.slot)
    assert sender.take(1, 1.0) == held.slot


def test_a_frame_fits_into_one_slot(sides):
    with pytest.raises(ValueError, match="do not fit"):
        sides[0].take(101, 0.0)


@pytest.mark.parametrize("posted", [Posted(0, 2, 1, DIGEST), Posted(0, 0, 101, DIGEST)])
def test_a_slot_beyond_the_ring_or_too_full_is_refused(sides, sockets, posted):
    sockets[0].send(struct.pack("<QIQ16s", posted.seq, posted.slot, posted.num_bytes, posted.digest))
    with pytest.raises(ChannelBroken, match="not its own"):
        sides[1].next(1.0)


def test_a_slot_that_is_held_cannot_be_filled_again(sides):
    sender, receiver = sides
    sender.post(Posted(0, 1, 1, DIGEST))
    sender.post(Posted(1, 1, 1, DIGEST))
    receiver.next(1.0)
    with pytest.raises(ChannelBroken, match="not its own"):
        receiver.next(1.0)


def test_a_slot_that_was_not_posted_cannot_be_released(sides, sockets):
    sockets[1].send(struct.pack("<I", 1))
    with pytest.raises(ChannelBroken, match="does not hold"):
        sides[0].collect()
    with pytest.raises(ValueError, match="twice"):
        sides[1].release(0)


def test_the_end_of_one_side_is_the_end_of_the_other(sides, sockets):
    sender, receiver = sides
    sender.post(Posted(0, 0, 1, DIGEST))
    sender.shutdown()
    sender.shutdown()
    assert receiver.next(1.0) is not None  # what was sent before is still read
    with pytest.raises(ChannelEnded):
        receiver.next(1.0)
    receiver.release(0)
    sender.close()
    receiver.close()


def test_an_end_within_a_message_is_no_orderly_one(sides, sockets):
    sockets[0].send(b"half")
    sockets[0].close()
    with pytest.raises(ChannelBroken, match="within a message") as torn:
        sides[1].next(1.0)
    assert not isinstance(torn.value, ChannelEnded)


def test_a_peer_that_reads_nothing_is_given_up(sides, sockets):
    def post_without_end():
        for seq in range(1_000_000):
            sides[0].post(Posted(seq, 0, 1, DIGEST))

    with pytest.raises(ChannelBroken):
        post_without_end()
