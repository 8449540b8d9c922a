"""How fast pages get from one worker to each of the others: a meter for each pair, taught by all that is sent.

A pair's link is taken for a queue that carries bytes in order at one rate. The sender of a handoff knows when it gave
each chunk away and when all of them were verified at the other side. With B_i bytes from chunk i to the end, and
chunk i given away at t_i, the last byte arrives at

    T = latency + max over i of (t_i + B_i / rate)    and so    rate = max over i of B_i / (T - latency - t_i)

which holds whether or not the computation of later chunks hid the transfer of earlier ones: the i of the maximum tells
since when the link has never been idle. Chunks of other handoffs on the same link count as well. The same formula with
T = now bounds the rate while a handoff is late, so that a link that has become slow is not priced as a fast one until
the first handoff ends.

Observations count less as time passes. A slow link without one for `DOUBT_S` seconds is due for a probe of little
traffic, a fast one after `TRUST_S`; where no probe gets through, the opinion fades to the default.
Bytes and seconds; the caller says what time it is.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from services.scheduling.prediction import DEFAULT_LINK, TIME_CONSTANT_S, LinkSpeed

DOUBT_S = 10.0
"""The age at which the opinion of a slow link makes the link due for a probe."""
TRUST_S = 60.0
"""That age for a link that is not slow: requests that are routed there find out soon enough."""
FIRST_S = 2.0
"""That age for a link on which only handoffs were seen, since they do not tell latency from rate."""
AGAIN_S = 4.0
"""The time from one probe to the next one, should it fail."""
FADE_AFTER_S, FADE_S = 20.0, 4.0
"""An opinion that was not refreshed for `FADE_AFTER_S` is doubted more and more: its rate doubles every `FADE_S`."""
SLOW_S = 0.02
"""A link is slow where `SAMPLE_BYTES` take longer."""
SAMPLE_BYTES = 2**20
SMALL_BYTES = 8192
"""A transfer of no more than this tells the latency, and little of the rate."""
SURPRISE = 2.0
"""A time off by more than this factor is a surprise, and believed only if the one before was off on the same side, or
if none came for `DOUBT_S`."""
MAX_SEEN, MAX_SMALL_SEEN = 16, 3
MAX_POINTS = 256
"""Moments at which something was given to a busy link: more are merged with those before them."""
MAX_PEERS = 1024
PRIOR_OBSERVATIONS = 0.1
"""How many observations the default's latency counts for; it decides only what observations leave open."""
MAX_BYTES_PER_S = 1e13


@dataclass(frozen=True, slots=True)
class Carried:
    """The bytes and seconds that one handoff, or a probe, is evidence of."""

    num_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A pair's link as a router sees it: its speed, and the bytes on their way there, for which others wait."""

    latency_s: float
    bytes_per_s: float
    underway_bytes: float = 0.0

    def time_s(self, num_bytes: float) -> float:
        """Returns the seconds until `num_bytes` more bytes have arrived, if all were given to the link now."""
        return self.latency_s + (self.underway_bytes + num_bytes) / self.bytes_per_s

    def exposed_s(
        self,
        num_bytes: float,
        *,
        at_once_bytes: float = 0.0,
        last_bytes: float,
        queue_s: float = 0.0,
        first_s: float,
        work_s: float,
    ) -> float:
        """Returns the seconds from the end of a prompt's computation until its pages have arrived.

        Pages go as they are computed. The computation begins in `queue_s` and takes `work_s`. `at_once_bytes` of the
        pages exist when it begins, further ones after `first_s`, and the `last_bytes` (at most all) at the end.
        """
        # Times count from the beginning of the computation; what is under way goes first.
        free_s = max(0.0, self.underway_bytes / self.bytes_per_s - queue_s)
        begins_s = max(free_s, 0.0 if at_once_bytes else first_s, first_s - at_once_bytes / self.bytes_per_s)
        whole_s = begins_s + num_bytes / self.bytes_per_s - work_s
        return self.latency_s + max(whole_s, min(num_bytes, last_bytes) / self.bytes_per_s)


class PeerLinks(dict[str, PeerLink]):
    """The links from one worker, by the id of the worker at the other end, and the best figures among them."""

    __slots__ = ("least_latency_s", "most_bytes_per_s")

    def __init__(self, links: Mapping[str, PeerLink]) -> None:
        super().__init__(links)
        self.least_latency_s = min((link.latency_s for link in links.values()), default=math.inf)
        self.most_bytes_per_s = max((link.bytes_per_s for link in links.values()), default=0.0)


NO_LINKS = PeerLinks({})


@dataclass(frozen=True, slots=True)
class _Seen:
    num_bytes: int
    time_s: float
    at_s: float


@dataclass(slots=True)
class _Open:
    """A handoff: where its bytes begin and end in the order of all bytes, and whether all of it was given away."""

    first: int
    end: int
    is_sealed: bool = False


class LinkOpinion:
    """A fit of latency and rate to what was seen of one link; it believes changes soon, and forgets."""

    def __init__(self, default: LinkSpeed = DEFAULT_LINK) -> None:
        self._default = default
        self._large: deque[_Seen] = deque(maxlen=MAX_SEEN)
        self._small: deque[_Seen] = deque(maxlen=MAX_SMALL_SEEN)
        self._side = 0
        """On which side the last observation was a surprise: 1 too slow, -1 too fast, 0 no surprise."""
        self._surprise: _Seen | None = None
        """That observation."""
        self.speed = default

    @property
    def has_latency(self) -> bool:
        """Whether something small was seen, which tells the latency from the rate."""
        return bool(self._small)

    @property
    def seen_s(self) -> float:
        """When the rate was seen last; minus infinity: never."""
        return self._large[-1].at_s if self._large else -math.inf

    def observe(self, num_bytes: int, time_s: float, now_s: float) -> None:
        """Takes a transfer of `num_bytes` bytes that took `time_s` seconds and ended at `now_s`.

        A time that is not positive and finite, or of no bytes, says nothing and is left out.
        """
        if num_bytes <= 0 or not math.isfinite(time_s) or time_s <= 0:
            return
        seen = _Seen(num_bytes, time_s, now_s)
        if num_bytes <= SMALL_BYTES:
            self._small.append(seen)
        else:
            self._take(seen)
        self._solve(now_s)

    def observe_at_least(self, num_bytes: int, time_s: float, now_s: float) -> None:
        """Takes a transfer that did not use the link up: the link is at least that fast, and may be faster."""
        if time_s <= self.speed.time_s(num_bytes):
            self.observe(num_bytes, time_s, now_s)

    def _take(self, seen: _Seen) -> None:
        expected_s = max(self.speed.time_s(seen.num_bytes), 1e-9)
        ratio = seen.time_s / expected_s
        side = 1 if ratio > SURPRISE else -1 if ratio < 1 / SURPRISE else 0
        taken = seen
        if self._large and side:
            is_old = seen.at_s - self.seen_s >= DOUBT_S
            if is_old or side == self._side:
                self._large.clear()
                if self._surprise is not None and not is_old:
                    self._large.append(self._surprise)
                # Fewer bytes do not take longer: a latency above this time is that of the link before it changed.
                likely = [small for small in self._small if small.time_s <= seen.time_s]
                self._small.clear()
                self._small.extend(likely)
            else:
                taken = _Seen(seen.num_bytes, expected_s * SURPRISE**side, seen.at_s)
        self._side, self._surprise = side, seen
        self._large.append(taken)

    def _solve(self, now_s: float) -> None:
        """Least squares of relative errors over two unknowns, neither of which is negative."""
        default = self._default
        seen = [*self._small, *self._large]
        least_s = min(one.time_s for one in seen)
        # In the sums u = 1/time and v = bytes/time; latency · u + seconds per byte · v should be 1.
        uu, u = PRIOR_OBSERVATIONS / least_s**2, PRIOR_OBSERVATIONS * min(default.latency_s, least_s) / least_s**2
        uv = vv = v = 0.0
        for one in seen:
            weight = math.exp(min(0.0, one.at_s - now_s) / TIME_CONSTANT_S)
            by_time, by_byte = 1 / one.time_s, one.num_bytes / one.time_s
            uu += weight * by_time * by_time
            uv += weight * by_time * by_byte
            vv += weight * by_byte * by_byte
            u += weight * by_time
            v += weight * by_byte
        if not self._large:
            self.speed = LinkSpeed(u / uu, default.bytes_per_s)
            return
        determinant = uu * vv - uv * uv
        latency_s = (u * vv - v * uv) / determinant if determinant > 0 else 0.0
        s_per_byte = (v * uu - u * uv) / determinant if determinant > 0 else v / vv
        if latency_s < 0:
            latency_s, s_per_byte = 0.0, v / vv
        if s_per_byte <= 0:
            latency_s, s_per_byte = u / uu, 0.0
        self.speed = LinkSpeed(latency_s, 1 / max(s_per_byte, 1 / MAX_BYTES_PER_S))


class LinkMeter:
    """One pair's link: what is on its way there, and what is believed of its speed."""

    def __init__(self, default: LinkSpeed = DEFAULT_LINK) -> None:
        self.opinion = LinkOpinion(default)
        self._default = default
        self._given = 0
        """Bytes that were given to the link since it was made."""
        self._points: deque[tuple[float, int]] = deque()
        """When bytes were given to the link since it was idle last, and how many had been given before."""
        self._open: dict[Hashable, _Open] = {}
        self._tainted_until = 0
        """Handoffs that began before this byte teach nothing: some of their bytes may never have been sent."""
        self._next_try_s = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether its rate was ever seen, or is being seen now."""
        return self.opinion.seen_s > -math.inf or any(one.is_sealed for one in self._open.values())

    def sent(self, key: Hashable, num_bytes: int, now_s: float) -> None:
        """Notes that a chunk of the handoff `key` was given to the link."""
        if num_bytes <= 0:
            return
        one = self._open.get(key)
        if one is None:
            one = self._open[key] = _Open(self._given, self._given)
        if len(self._points) < MAX_POINTS:
            self._points.append((now_s, self._given))
        self._given += num_bytes
        one.end = self._given

    def sealed(self, key: Hashable) -> None:
        """Notes that all of the handoff was given to the link: from now on it may be late."""
        if key in self._open:
            self._open[key].is_sealed = True

    def arrived(self, key: Hashable, now_s: float) -> Carried | None:
        """Notes that the handoff is verified at the other side. Returns what that says of the link; None: nothing."""
        one = self._open.pop(key, None)
        carried = None
        if one is not None and one.first >= self._tainted_until:
            carried = self._carried(one.end, now_s)
            if carried is not None:
                self.opinion.observe(carried.num_bytes, carried.time_s, now_s)
        if one is not None:
            self._drop_points(one.end, now_s)
        return carried

    def lost(self, key: Hashable, now_s: float, *, is_cut: bool = False) -> None:
        """Notes that the handoff has failed or was given up; some of its bytes may never have been sent.

        `is_cut`: the link or the worker at its other end broke, so that its silence says nothing of its rate.
        """
        one = self._open.get(key)
        if one is None:
            return
        if one.is_sealed and one.first >= self._tainted_until and not is_cut:
            carried = self._carried(one.end, now_s)
            # It would have taken longer still: that the link is slow must not be forgotten with the handoff.
            if carried is not None and carried.time_s > self.opinion.speed.time_s(carried.num_bytes):
                self.opinion.observe(carried.num_bytes, carried.time_s, now_s)
        del self._open[key]
        self._points.clear()
        self._tainted_until = self._given

    def speed(self, now_s: float) -> LinkSpeed:
        """Returns the best guess now."""
        speed = self.opinion.speed
        sealed = [one.end for one in self._open.values() if one.is_sealed and one.first >= self._tainted_until]
        if sealed:
            carried = self._carried(min(sealed), now_s)
            if carried is not None and carried.time_s > speed.time_s(carried.num_bytes):
                rate = carried.num_bytes / max(carried.time_s - speed.latency_s, 1e-9)
                return LinkSpeed(speed.latency_s, min(speed.bytes_per_s, rate))
        age_s = now_s - self.opinion.seen_s - FADE_AFTER_S
        if 0 < age_s < math.inf and speed.bytes_per_s < self._default.bytes_per_s and not self._open:
            rate = speed.bytes_per_s * 2 ** min(age_s / FADE_S, 60.0)
            return LinkSpeed(speed.latency_s, min(rate, self._default.bytes_per_s))
        return speed

    def underway_bytes(self, now_s: float) -> float:
        """Returns the bytes that were given to the link and have probably not arrived yet."""
        if not self._open:
            return 0.0
        most = float(sum(one.end - one.first for one in self._open.values()))
        if not self._points:
            return most
        rate = self.speed(now_s).bytes_per_s
        left = max(self._given - before - rate * (now_s - at_s) for at_s, before in self._points)
        return min(max(left, 0.0), most)

    def is_due(self, now_s: float) -> bool:
        """Whether a probe is due: the opinion is old, and nothing is under way to renew it."""
        if self._open or now_s < self._next_try_s:
            return False
        age_s = now_s - self.opinion.seen_s
        if not self.opinion.has_latency:
            return age_s >= FIRST_S
        is_slow = self.opinion.speed.time_s(SAMPLE_BYTES) > SLOW_S
        return age_s >= (DOUBT_S if is_slow else TRUST_S)

    def tried(self, now_s: float) -> None:
        """Notes that a probe begins: the next one is due no sooner than in `AGAIN_S`."""
        self._next_try_s = now_s + AGAIN_S

    def _carried(self, end: int, now_s: float) -> Carried | None:
        """Returns the bytes and seconds for which the link was never idle until byte `end` arrived, as of now."""
        latency_s = self.opinion.speed.latency_s
        best, rate = None, 0.0
        for at_s, before in self._points:
            if before >= end:
                break
            time_s = now_s - at_s
            if time_s <= 0:
                continue
            candidate = (end - before) / max(time_s - latency_s, time_s / 10)
            if candidate > rate:
                best, rate = Carried(end - before, time_s), candidate
        return best

    def _drop_points(self, end: int, now_s: float) -> None:
        """Forgets what has arrived; bytes given away after it were not under way before it had arrived."""
        while self._points and self._points[0][1] < end:
            self._points.popleft()
        if not self._open:
            self._points.clear()
        elif end < self._given:
            self._points.appendleft((now_s - self.opinion.speed.latency_s, end))


class LinkMeters:
    """The meters of one sending worker, by the id of the worker at the other end."""

    def __init__(self, default: LinkSpeed = DEFAULT_LINK) -> None:
        self._default = default
        self._meters: dict[str, LinkMeter] = {}

    def __iter__(self) -> Iterator[tuple[str, LinkMeter]]:
        return iter(tuple(self._meters.items()))

    def to(self, worker_id: str) -> LinkMeter:
        """Returns the meter of the link to a worker."""
        meter = self._meters.get(worker_id)
        if meter is None:
            if len(self._meters) >= MAX_PEERS:  # workers come and go
                self._meters.pop(min(self._meters, key=lambda peer: self._meters[peer].opinion.seen_s))
            meter = self._meters[worker_id] = LinkMeter(self._default)
        return meter

    def usual(self) -> LinkSpeed | None:
        """Returns the speed of the median link; None: nothing was seen yet. May be called in any thread."""
        opinions = [meter.opinion for meter in tuple(self._meters.values())]
        speeds = sorted(
            (opinion.speed for opinion in opinions if opinion.seen_s > -math.inf),
            key=lambda speed: speed.time_s(SAMPLE_BYTES),
        )
        return speeds[(len(speeds) - 1) // 2] if speeds else None
