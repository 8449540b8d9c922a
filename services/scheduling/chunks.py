"""Which chunks of prompts make up the next step: pure bookkeeping, for whatever computes prompts.

The better service class comes first (the lower number), and within a class the prompt with the least left to compute:
shortest remaining first, which gives the least mean wait (Schrage, 1968). What that rule does to long prompts is
bounded by their age: the oldest of its class is never left out for long. Prompts whose tokens are reported come behind
all others, in a share of the time.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.scheduling.background import BackgroundPrompts, Chunk

DEFAULT_CLASS = 2
"""The service class of a prompt that names none: the middle one of five, 0 to 4."""
OLDEST_EVERY = 8
"""In one of this many steps the oldest prompt of the best class comes first, whatever shorter ones wait."""
BUSY_SHARE = 0.5
"""Prompts may stretch a step in which sequences decode by this share of what it takes without prompts."""
STEP_OVERHEADS = 3.0
"""A step may take at least this many times what an empty one takes, so that chunking never costs most of the time."""
LONE_STEP_OVERHEADS = 10.0
"""And up to this many times where hardly any prompts arrive: on a small machine an empty step may take 0.5 s."""
LEAST_TOKENS = 8
"""A step of prompts alone may take at least what this many tokens cost at the beginning of a prompt. A measured speed
by which empty steps are free would ask for steps of one token, and only longer ones show that it is wrong."""


class Speed(Protocol):
    """What is known of the engine's speed; services.scheduling.prediction.PrefillSpeed has this form."""

    def time_s(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Returns the seconds of a step over tokens behind `num_cached_tokens` computed ones; 0: of an empty step."""
        ...


@dataclass(slots=True)
class Place:
    """What a prompt has left to compute, `cost` in the unit of its line; a lower `age` is older."""

    service_class: int
    num_tokens: int
    cost: float
    age: int


class Line:
    """Prompts by class and then cost, and by class and then age. Everything is O(log n), `discard` O(1)."""

    def __init__(self) -> None:
        self._places: dict[Hashable, Place] = {}
        self._heap: list[tuple[int, float, int, Hashable]] = []
        """(class, cost, age, key); also entries of prompts that have left or changed, until they come to the top."""
        self._by_age: dict[int, OrderedDict[Hashable, None]] = {}
        self._ages = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._places)

    def add(self, key: Hashable, *, service_class: int, num_tokens: int, cost: float) -> None:
        """Adds a prompt, which is then the youngest of its class."""
        self._places[key] = Place(service_class, num_tokens, cost, next(self._ages))
        self._by_age.setdefault(service_class, OrderedDict())[key] = None
        self._push(key)

    def resize(self, key: Hashable, *, num_tokens: int, cost: float) -> None:
        """Changes what a prompt has left; its age stays."""
        place = self._places[key]
        place.num_tokens, place.cost = num_tokens, cost
        self._push(key)

    def discard(self, key: Hashable) -> Place | None:
        """Takes a prompt out and returns its place; None: it is not in the line."""
        place = self._places.pop(key, None)
        if place is not None:
            keys = self._by_age[place.service_class]
            del keys[key]
            if not keys:
                del self._by_age[place.service_class]
        return place

    def __getitem__(self, key: Hashable) -> Place:
        return self._places[key]

    @property
    def best_class(self) -> int:
        """The most urgent class in the line, which must not be empty."""
        return min(self._by_age)

    def num_of(self, service_class: int) -> int:
        """Returns how many prompts of a class are in the line."""
        return len(self._by_age.get(service_class, ()))

    def oldest(self) -> Hashable:
        """Returns the oldest prompt of the best class; the line must not be empty."""
        return next(iter(self._by_age[self.best_class]))

    def shortest(self) -> Hashable:
        """Returns the prompt of the best class with the least cost, then the oldest; the line must not be empty."""
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def _push(self, key: Hashable) -> None:
        if len(self._heap) > 2 * len(self._places) + 16:
            # Many have left without having come to the top: cancelled ones must not pile up.
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        place = self._places[key]
        heapq.heappush(self._heap, (place.service_class, place.cost, place.age, key))

    def _is_current(self, entry: tuple[int, float, int, Hashable]) -> bool:
        _, cost, age, key = entry
        place = self._places.get(key)
        return place is not None and (place.age, place.cost) == (age, cost)


@dataclass(frozen=True, slots=True)
class StepTargets:
    """How long a step may take, in seconds by prediction.

    A prompt that arrives waits for the rest of the running step, so short steps are good for prompts that arrive; each
    step costs what an empty one takes, so longer ones are good for the prompt that is computed. Where `rate` prompts
    arrive in a second, steps of `sqrt(empty_s / rate)` lose least for both together, a second of an arriving prompt
    counting twice: the rule for the time between two checkpoints (Young, 1974). Steps take at least `shared_s` or
    `STEP_OVERHEADS` empty steps, and at most `alone_s` or `LONE_STEP_OVERHEADS` empty steps, whichever is longer.
    `memory_s`: an arrival this long ago counts 1/e in the rate.

    Others would wait anyway for prompts that all end in the step: together these may take `whole_s`.
    """

    shared_s: float = 0.003
    alone_s: float = 0.020
    whole_s: float = 0.008
    memory_s: float = 1.0

    def part_s(self, empty_s: float, rate: float) -> float:
        """Returns the limit for a step whose prompts do not all end in it."""
        least_s = max(self.shared_s, STEP_OVERHEADS * empty_s)
        most_s = max(self.alone_s, LONE_STEP_OVERHEADS * empty_s)
        best_s = math.sqrt(empty_s / rate) if rate > 0 else math.inf
        return min(max(best_s, least_s), most_s)


DEFAULT_TARGETS = StepTargets()


def stretch_s(busy_s: float, targets: StepTargets = DEFAULT_TARGETS) -> float:
    """Returns by how much prompts may stretch a step in which sequences decode, `busy_s` long without prompts."""
    return max(targets.shared_s, BUSY_SHARE * busy_s)


def more_steps_s(
    empty_s: float, work_s: float, num_tokens: int, *, chunk_tokens: int, targets: StepTargets = DEFAULT_TARGETS
) -> float:
    """Returns what the steps of a prompt computed alone cost beyond the first; each costs what an empty step takes.

    `work_s`: what its `num_tokens` tokens take without that. A step has at most `chunk_tokens` tokens.
    """
    num_steps = max(work_s / (targets.part_s(empty_s, 0.0) - empty_s), num_tokens / chunk_tokens)
    return empty_s * max(0.0, num_steps - 1.0)


@dataclass(slots=True)
class _Arrivals:
    """How many prompts of a class have come lately, an older one counting less, and which was the newest."""

    newest: Hashable
    at_s: float
    count: float
    """The prompts as of the arrival of the newest, which counts 1."""

    def rate(self, now_s: float, memory_s: float, *, but_newest: bool) -> float:
        """Returns the prompts that arrive in a second."""
        count = self.count - 1.0 if but_newest else self.count
        return count * math.exp((self.at_s - now_s) / memory_s) / memory_s


class ChunkScheduler:
    """Packs chunks of several prompts into one step: best class first, then least remaining work.

    A step has at most `chunk_tokens` tokens. Where the engine's speed is given, the step also ends in time by
    prediction: within the targets. And a prompt that will not end does not share a step with those that do, because
    they would wait for its tokens. Without a speed, a step is as full as the work allows.

    Bound: the oldest prompt of the best class is the first of a step at least every `OLDEST_EVERY` steps, and gets as
    many tokens as the budget and the targets let a step have. So it and those of its class that came before it are done
    after `OLDEST_EVERY` times the steps that they would take alone, whatever else arrives. Only better classes can keep
    a prompt waiting. Prompts that are reported are in none of this: they have their share of the time, whatever waits.
    """

    def __init__(
        self, *, chunk_tokens: int, reported_tokens: int | None = None, targets: StepTargets = DEFAULT_TARGETS
    ) -> None:
        """`reported_tokens`: the most tokens in a step of prompts that are reported, since those cost far more."""
        assert chunk_tokens > 0, "a step computes something"
        assert reported_tokens is None or reported_tokens > 0, "a prompt gets on"
        self._chunk_tokens = chunk_tokens
        self._background = BackgroundPrompts(chunk_tokens if reported_tokens is None else reported_tokens)
        self._targets = targets
        self._line = Line()
        self._ends: dict[Hashable, int] = {}
        self._speed: Speed | None = None
        """The engine's speed as of the last step."""
        self._passed_over: tuple[Hashable, int] = (None, 0)
        """The oldest prompt as of the last step, and how many steps have begun with others."""
        self._arrivals: dict[int, _Arrivals] = {}
        """Arrivals by class."""

    def __len__(self) -> int:
        """Returns how many prompts have uncomputed tokens."""
        return len(self._line) + len(self._background)

    def add(
        self,
        key: Hashable,
        *,
        num_tokens: int,
        start: int = 0,
        service_class: int = DEFAULT_CLASS,
        now_s: float = 0.0,
        is_reported: bool = False,
    ) -> None:
        """Adds a prompt of `num_tokens` tokens; those before `start` are computed already."""
        assert key not in self._line, "a prompt is added once"
        assert key not in self._background, "a prompt is added once"
        assert 0 <= start < num_tokens, "something of a prompt is left to compute"
        if is_reported:
            self._background.add(key, start=start, end=num_tokens, service_class=service_class)
            return
        self._ends[key] = num_tokens
        cost = self._cost(start, num_tokens)
        self._line.add(key, service_class=service_class, num_tokens=num_tokens - start, cost=cost)
        before, memory_s = self._arrivals.get(service_class), self._targets.memory_s
        count = before.rate(now_s, memory_s, but_newest=False) * memory_s if before is not None else 0.0
        self._arrivals[service_class] = _Arrivals(key, now_s, count + 1.0)

    def remove(self, key: Hashable) -> None:
        """Forgets a prompt. O(1); unknown keys are ignored."""
        self._line.discard(key)
        self._ends.pop(key, None)
        self._background.remove(key)

    def note_reported_step(self, time_s: float, *, now_s: float) -> None:
        """Notes that a step with tokens of reported prompts took `time_s`: others come first for a while.

        `now_s` is read on the clock of `next_step`.
        """
        self._background.note_step(time_s, now_s=now_s)

    def next_step(
        self,
        *,
        speed: Speed | None = None,
        now_s: float = 0.0,
        max_tokens: int | None = None,
        busy_s: float | None = None,
    ) -> list[Chunk]:
        """Returns the chunks of the next step; they count as computed from here on. O(chunks · log prompts).

        `now_s` is read on the clock of `add`. `max_tokens`: the most tokens, where they are fewer than in other steps.
        `busy_s`: what the step takes without prompts, where sequences decode in it; prompts may then stretch it by
        `BUSY_SHARE` of that or by `shared_s`, and `busy_s` has what every step costs in it already.
        """
        if not self._line and not self._background:
            return []
        most = self._chunk_tokens if max_tokens is None else min(max_tokens, self._chunk_tokens)
        assert most > 0, "a step computes something"
        is_busy = busy_s is not None or bool(self._line)
        reported = self._background.next_chunks(most, now_s=now_s, is_busy=is_busy)
        most -= sum(chunk.num_tokens for chunk in reported)
        chunks = self._usual_chunks(most, speed=speed, now_s=now_s, busy_s=busy_s) if self._line and most else []
        return chunks + reported

    def _usual_chunks(self, most: int, *, speed: Speed | None, now_s: float, busy_s: float | None) -> list[Chunk]:
        self._learn(speed)
        part_s = self._step_s(speed, now_s) if busy_s is None else stretch_s(busy_s, self._targets)
        room = _Room(most, speed, part_s, self._targets.whole_s, has_overhead=busy_s is None)
        oldest = self._line.oldest()
        chunks: list[Chunk] = []
        while self._line:
            is_owed = not chunks and self._is_owed(oldest)
            key = oldest if is_owed else self._line.shortest()
            start, end = self._span(key)
            num_tokens = room.fitting(start, end, is_first=not chunks)
            is_last = start + num_tokens == end
            # Those that end in this step would wait for one that does not.
            if num_tokens == 0 or (chunks and not is_last and speed is not None):
                break
            room.take(start, num_tokens)
            chunks.append(self._advance(key, num_tokens))
            if not is_last:
                break
        self._note_first(chunks[0], oldest)
        return chunks

    def _is_owed(self, oldest: Hashable) -> bool:
        return self._passed_over == (oldest, OLDEST_EVERY - 1)

    def _note_first(self, first: Chunk, oldest: Hashable) -> None:
        # Being first counts, not having got something: what others leave it may be one token a step.
        key, num_steps = self._passed_over
        if first.key == oldest:
            self._passed_over = (None, 0)
        else:
            self._passed_over = (oldest, num_steps + 1 if key == oldest else 1)

    def _learn(self, speed: Speed | None) -> None:
        is_other_unit = (speed is None) != (self._speed is None)
        self._speed = speed
        if is_other_unit:
            for key in list(self._line):
                start, end = self._span(key)
                self._line.resize(key, num_tokens=end - start, cost=self._cost(start, end))

    def _cost(self, start: int, end: int) -> float:
        """Returns what is left of a prompt: in seconds where the speed is known, and in tokens otherwise."""
        # The last tokens of a long prompt look back on all the others, so they cost more than a short prompt does.
        return end - start if self._speed is None else _seconds_of(self._speed, start, end - start)

    def _span(self, key: Hashable) -> tuple[int, int]:
        """Returns the positions of a prompt that are uncomputed: the first one, and the end."""
        end = self._ends[key]
        return end - self._line[key].num_tokens, end

    def _step_s(self, speed: Speed | None, now_s: float) -> float:
        """Returns how long a step may take whose prompts do not all end in it."""
        if speed is None:
            return math.inf
        best = self._line.best_class
        is_alone = self._line.num_of(best) == 1
        # Less urgent prompts wait for it anyway, and a prompt that is alone does not wait for itself.
        rate = sum(
            arrivals.rate(now_s, self._targets.memory_s, but_newest=is_alone and arrivals.newest in self._line)
            for service_class, arrivals in self._arrivals.items()
            if service_class <= best
        )
        empty_s = speed.time_s(0)
        return max(self._targets.part_s(empty_s, rate), empty_s + LEAST_TOKENS * _seconds_of(speed, 0, 1))

    def _advance(self, key: Hashable, num_tokens: int) -> Chunk:
        start, end = self._span(key)
        is_last = start + num_tokens == end
        if is_last:
            self.remove(key)
        else:
            start_of_rest = start + num_tokens
            cost = self._cost(start_of_rest, end)
            self._line.resize(key, num_tokens=end - start_of_rest, cost=cost)
        return Chunk(key, start, num_tokens, is_last)


class _Room:
    """What a step has left, in tokens and in seconds; prompts that are in it to their end may take it to `whole_s`."""

    def __init__(
        self, num_tokens: int, speed: Speed | None, part_s: float, whole_s: float, *, has_overhead: bool
    ) -> None:
        self._num_tokens = num_tokens
        self._speed = speed
        self._part_s = part_s
        self._whole_s = max(part_s, whole_s)
        self._used_s = speed.time_s(0) if speed is not None and has_overhead else 0.0

    def fitting(self, start: int, end: int, *, is_first: bool) -> int:
        """Returns how many of the positions from `start` to `end` fit in; at least one if the chunk `is_first`."""
        most = min(self._num_tokens, end - start)
        if most == end - start and self._cost_s(start, most) <= self._whole_s - self._used_s:
            return most
        num_tokens = self._affordable(start, most, self._part_s - self._used_s)
        return max(num_tokens, 1) if is_first else num_tokens

    def take(self, start: int, num_tokens: int) -> None:
        """Uses room up."""
        self._num_tokens -= num_tokens
        self._used_s += self._cost_s(start, num_tokens)

    def _affordable(self, start: int, most: int, seconds: float) -> int:
        """Returns the most tokens, up to `most`, that cost at most `seconds`: by bisection, whatever the law is."""
        if self._cost_s(start, most) <= seconds:
            return most
        least = 0
        while least < most - 1:
            middle = (least + most) // 2
            if self._cost_s(start, middle) <= seconds:
                least = middle
            else:
                most = middle
        return least

    def _cost_s(self, start: int, num_tokens: int) -> float:
        return 0.0 if self._speed is None else _seconds_of(self._speed, start, num_tokens)


def _seconds_of(speed: Speed, start: int, num_tokens: int) -> float:
    """Returns what tokens from a position on add to a step."""
    return speed.time_s(num_tokens, start) - speed.time_s(0, start)
