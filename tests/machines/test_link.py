"""Links by table: what leaves when, and what never does."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from tests.machines.link import MAX_QUEUED_BYTES, Conditions, Firewall, Link


def link(**conditions: float) -> Link:
    made = Link(random.Random(1))
    made.change(Conditions(**conditions), 0.0)  # type: ignore[arg-type]
    return made


def test_a_packet_arrives_after_the_delay_and_not_before() -> None:
    far = link(delay_s=0.2)
    far.put(b"x", 1.0)
    assert far.next_s == pytest.approx(1.2)
    assert far.due(1.19) == []
    assert far.due(1.2) == [b"x"]
    assert far.next_s is None


def test_packets_queue_for_a_slow_link_and_the_queue_has_an_end() -> None:
    slow = link(bytes_per_s=1000.0)
    for _ in range(3):
        slow.put(bytes(500), 0.0)
    assert [len(slow.due(now_s)) for now_s in (0.49, 0.5, 1.0, 1.5)] == [0, 1, 1, 1]
    for _ in range(MAX_QUEUED_BYTES // 1000 + 5):
        slow.put(bytes(1000), 2.0)
    assert slow.num_dropped == 5


def test_a_frozen_link_keeps_packets_and_a_cut_one_drops_them() -> None:
    frozen = link(is_frozen=1)
    frozen.put(b"a", 0.0)
    assert (frozen.due(100.0), frozen.next_s) == ([], None)
    frozen.change(Conditions(), 5.0)
    assert frozen.due(5.0) == [b"a"]
    cut = link(is_cut=1)
    cut.put(b"a", 0.0)
    cut.change(Conditions(), 1.0)
    assert (cut.due(9.0), cut.num_dropped) == ([], 1)


def test_loss_reordering_and_large_packets_are_what_was_asked_for() -> None:
    lossy = link(loss=0.25)
    for _ in range(4000):
        lossy.put(b"x", 0.0)
    assert 900 < lossy.num_dropped < 1100
    mixed = link(reordered=0.1, delay_s=1.0)
    for number in range(1000):
        mixed.put(b"%d" % number, number / 1e6)
    order = [int(packet) for packet in mixed.due(10.0)]
    assert sorted(order) == list(range(1000))
    assert order != sorted(order)
    tunnel = link(max_packet_bytes=1300)
    for size in (1300, 1301):
        tunnel.put(bytes(size), 0.0)
    assert [len(packet) for packet in tunnel.due(0.0)] == [1300]


def packet(source: str, target: str, *, ports: tuple[int, int] = (1000, 80), flags: int = 0x10) -> bytes:
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0, 64, 6, 0, socket.inet_aton(source), socket.inet_aton(target))
    return head + struct.pack("!HHIIBBHHH", *ports, 0, 0, 0x50, flags, 0, 0, 0)


def test_a_firewall_forgets_silent_connections_and_lets_new_ones_in() -> None:
    wall = Firewall()
    there, back = packet("10.0.0.1", "10.0.0.2"), packet("10.0.0.2", "10.0.0.1", ports=(80, 1000))
    assert not wall.lets_through(there, 2.0, 0.0), "it never saw the beginning"
    assert wall.lets_through(packet("10.0.0.1", "10.0.0.2", flags=0x02), 2.0, 0.0)
    assert wall.lets_through(back, 2.0, 1.9)
    assert wall.lets_through(there, 2.0, 3.8)
    assert not wall.lets_through(back, 2.0, 5.9)
    assert not wall.lets_through(there, 2.0, 6.0), "what it dropped does not open it again"
