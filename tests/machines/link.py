"""What a link does to packets: delay, rate, loss, reordering, freezes, cuts, firewalls. Pure: time is passed in.

A direction of a pair of machines is one `Link`, a queue of packets that leave at known moments.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

MAX_QUEUED_BYTES = 4 * 2**20
"""More than that at a slow link is dropped, as a router's buffer does."""


@dataclass
class Conditions:
    """How a link is. Times in seconds, `loss` and `reordered` as shares of packets."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: as fast as it goes."""
    loss: float = 0.0
    reordered: float = 0.0
    """Packets that overtake those before them: they skip the delay."""
    max_packet_bytes: int = 0
    """Larger packets vanish without a word, as behind a tunnel that answers nothing; 0: all pass."""
    is_cut: bool = False
    """Packets are dropped."""
    is_frozen: bool = False
    """Packets are kept, and leave when it is over."""
    forgets_after_s: float = 0.0
    """A firewall on the way that drops packets of connections that were silent for longer; 0: there is no firewall."""

    @property
    def is_plain(self) -> bool:
        """Whether packets can be handed on at once."""
        return self == _PLAIN


_PLAIN = Conditions()


@dataclass
class Link:
    """One direction between two machines."""

    chance: random.Random
    conditions: Conditions = field(default_factory=Conditions)
    num_dropped: int = 0
    num_passed: int = 0
    _queue: list[tuple[float, int, bytes]] = field(default_factory=list)
    _kept: list[bytes] = field(default_factory=list)
    _queued_bytes: int = 0
    _free_at_s: float = 0.0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def change(self, conditions: Conditions, now_s: float) -> None:
        """From now on. What a frozen link kept leaves now."""
        self.conditions = conditions
        if not conditions.is_frozen:
            kept, self._kept = self._kept, []
            self._queued_bytes -= sum(map(len, kept))
            for packet in kept:
                self.put(packet, now_s)

    def put(self, packet: bytes, now_s: float) -> None:
        """Takes a packet at the near end."""
        link = self.conditions
        too_large = bool(link.max_packet_bytes) and len(packet) > link.max_packet_bytes
        full = self._queued_bytes + len(packet) > MAX_QUEUED_BYTES
        if link.is_cut or too_large or full or (link.loss and self.chance.random() < link.loss):
            self.num_dropped += 1
            return
        self._queued_bytes += len(packet)
        if link.is_frozen:
            self._kept.append(packet)
            return
        self._free_at_s = max(self._free_at_s, now_s)
        if link.bytes_per_s:
            self._free_at_s += len(packet) / link.bytes_per_s
        leaves_s = self._free_at_s
        if not (link.reordered and self.chance.random() < link.reordered):
            leaves_s += link.delay_s + link.jitter_s * self.chance.random()
        heapq.heappush(self._queue, (leaves_s, next(self._numbers), packet))

    def due(self, now_s: float) -> list[bytes]:
        """Packets that have reached the far end."""
        packets: list[bytes] = []
        if self.conditions.is_frozen:
            return packets
        while self._queue and self._queue[0][0] <= now_s:
            packets.append(heapq.heappop(self._queue)[2])
        self._queued_bytes -= sum(map(len, packets))
        self.num_passed += len(packets)
        return packets

    @property
    def next_s(self) -> float | None:
        """When the next packet reaches the far end; None: nothing is on its way."""
        return self._queue[0][0] if self._queue and not self.conditions.is_frozen else None


class Firewall:
    """Remembers connections, and forgets those that were silent; a packet that opens one is always let through."""

    def __init__(self) -> None:
        self._seen: dict[bytes, float] = {}

    def lets_through(self, packet: bytes, forgets_after_s: float, now_s: float) -> bool:
        """Whether this IPv4 packet passes. Both directions of a connection are one entry; only TCP is remembered."""
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != 6:
            return True
        head = (packet[0] & 15) * 4
        source, target = packet[12:16] + packet[head : head + 2], packet[16:20] + packet[head + 2 : head + 4]
        key = min(source, target) + max(source, target)
        opens = packet[head + 13] & 0x12 == 0x02
        last_s = self._seen.get(key)
        if not opens and (last_s is None or now_s - last_s > forgets_after_s):
            return False
        self._seen[key] = now_s
        return True
