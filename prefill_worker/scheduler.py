"""Which prompts may begin: pure bookkeeping.

`PromptQueue` belongs to the event loop: it decides when a prompt takes pages here and asks for pages there. What the
engine thread's steps are made of is services.scheduling.chunks, and the rule is the same: the better service class
first (the lower number), and within a class the prompt with the least left to compute, bounded by the age of others.
Prompts whose tokens are reported stand in a line of their own, since they are computed in the background.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from services.runtime.errors import Overloaded
from services.scheduling.chunks import DEFAULT_CLASS, Line


@dataclass(frozen=True, slots=True)
class PromptSize:
    """What a prompt costs: tokens to compute, and pages that hold them. `is_reported`: its tokens are reported."""

    num_tokens: int
    num_pages: int
    is_reported: bool = False


@dataclass(slots=True)
class _Inside:
    """A prompt with a turn; `age` counts entries into the queue, so that the lower is the older."""

    num_pages: int
    service_class: int
    num_uncomputed: int
    age: int


class _Lane:
    """The prompts of one kind, with a turn and without; those of another kind neither pass nor delay them."""

    def __init__(self, *, ahead_tokens: int, patience_tokens: int) -> None:
        self._ahead_tokens = ahead_tokens
        self._patience_tokens = patience_tokens
        self.line = Line()
        """Those without a turn that may have one."""
        self.uncomputed: dict[Hashable, _Inside] = {}
        """Those inside that are not all computed."""
        self._passed: dict[int, tuple[Hashable, int]] = {}
        """By class, its oldest waiting prompt and the tokens that had their turn since it is that."""

    def next(self) -> Hashable | None:
        """Returns the next one, as soon as its pages are free. None: enough work lies ahead of everybody."""
        if not self.line:
            return None
        oldest = self.line.oldest()
        place = self.line[oldest]
        if self._tokens_passed(place.service_class, oldest) >= self._patience_tokens:
            older = (p for p in self.uncomputed.values() if p.age < place.age)
            if self._has_room(p for p in older if p.service_class <= place.service_class):
                return oldest
        shortest = self.line.shortest()
        place = self.line[shortest]
        order = (place.service_class, place.num_tokens)
        before = (p for p in self.uncomputed.values() if (p.service_class, p.num_uncomputed) <= order)
        return shortest if self._has_room(before) else None

    def begin(self, key: Hashable, size: PromptSize) -> _Inside:
        """Takes a prompt out of the line and into the workshop."""
        oldest = self.line.oldest()
        place = self.line.discard(key)
        assert place is not None, "a prompt with a size has a place"
        if key != oldest:
            passed = self._tokens_passed(place.service_class, oldest) + size.num_tokens
            self._passed[place.service_class] = (oldest, passed)
        inside = self.uncomputed[key] = _Inside(size.num_pages, place.service_class, size.num_tokens, place.age)
        return inside

    def _has_room(self, ahead: Iterable[_Inside]) -> bool:
        return sum(prompt.num_uncomputed for prompt in ahead) < self._ahead_tokens

    def _tokens_passed(self, service_class: int, oldest: Hashable) -> int:
        """Tokens that had their turn since `oldest` is the oldest of its class that waits."""
        key, passed = self._passed.get(service_class, (None, 0))
        return passed if key == oldest else 0


class PromptQueue:
    """A bounded queue in front of a bounded workshop: best class first, then fewest tokens, with a bound on waiting.

    A prompt that has its *turn* holds all its pages until it leaves, so that it can never wait for a page halfway, and
    prompts cannot block each other. A turn is given when the pages are free and when fewer than `ahead_tokens`
    uncomputed tokens inside go before its own: early enough to hide the round trip of a reservation behind the running
    step, late enough not to hold pages of a decode worker while waiting. A short prompt therefore begins beside a long
    one. Nobody overtakes a prompt that only waits for pages.

    Prompts that are reported only wait for each other and for pages, and others never wait for their tokens.

    Bound: a prompt is *due* when it is the oldest waiting one of its class and `patience_tokens` tokens of its class
    had their turn since it is that. Then it is next, and only what is older counts as going before it. So while it is
    the oldest, fewer than `patience_tokens` tokens and one prompt of its class have their turn before it, beside those
    that have theirs while older prompts inside are still being computed. Only better classes can keep it waiting.
    """

    def __init__(
        self, *, max_waiting: int, num_pages: int, ahead_tokens: int, patience_tokens: int | None = None
    ) -> None:
        self._max_waiting = max_waiting
        self._num_pages = num_pages
        patience_tokens = 8 * ahead_tokens if patience_tokens is None else patience_tokens
        self._usual, self._reported = (
            _Lane(ahead_tokens=ahead_tokens, patience_tokens=patience_tokens) for _ in range(2)
        )
        self._sizes: dict[Hashable, PromptSize] = {}
        """Sizes of those without a turn."""
        self._unready: dict[Hashable, int] = {}
        """Service classes of those that cannot have a turn yet."""
        self._inside: dict[Hashable, _Inside] = {}
        self._waiting_tokens = 0
        self._uncomputed_tokens = 0
        self._free_pages = num_pages

    @property
    def num_waiting(self) -> int:
        """Prompts without a turn."""
        return len(self._sizes)

    @property
    def num_inside(self) -> int:
        """Prompts with a turn."""
        return len(self._inside)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are still to be computed, of all prompts."""
        return self._waiting_tokens + self._uncomputed_tokens

    @property
    def promised_pages(self) -> int:
        """Pages of all prompts that have a turn."""
        return self._num_pages - self._free_pages

    def enter(
        self, key: Hashable, size: PromptSize, *, service_class: int = DEFAULT_CLASS, is_ready: bool = True
    ) -> None:
        """Queues a prompt that fits into the pool when it is alone. Raises Overloaded when the queue is full.

        One that is not ready counts, and stands in line from `make_ready` on: nobody waits for what it waits for.
        """
        self._check_new(key)
        assert 0 < size.num_pages <= self._num_pages, "the caller has checked that it fits"
        if len(self._sizes) >= self._max_waiting:
            raise Overloaded(f"the prefill queue is full ({self._max_waiting} prompts)")
        self._sizes[key] = size
        self._unready[key] = service_class
        self._waiting_tokens += size.num_tokens
        if is_ready:
            self.make_ready(key)

    def make_ready(self, key: Hashable) -> None:
        """From now on it may have its turn. Others than those that wait for this are ignored."""
        service_class = self._unready.pop(key, None)
        if service_class is not None:
            size = self._sizes[key]
            line = self._lane(size).line
            line.add(key, service_class=service_class, num_tokens=size.num_tokens, cost=size.num_tokens)

    def enter_computed(self, key: Hashable, size: PromptSize) -> bool:
        """Gives a prompt whose pages are computed its turn at once: nobody waits longer for a step because of it.

        False: its pages are not there. It may enter as others do then.
        """
        self._check_new(key)
        if size.num_pages > self._free_pages:
            return False
        self._inside[key] = _Inside(size.num_pages, DEFAULT_CLASS, 0, 0)
        self._free_pages -= size.num_pages
        return True

    def _check_new(self, key: Hashable) -> None:
        assert key not in self._sizes, "a prompt enters once"
        assert key not in self._inside, "a prompt enters once"

    def next_turns(self) -> list[Hashable]:
        """Gives every turn that can be given now."""
        turns: list[Hashable] = []
        for lane in (self._usual, self._reported):
            while (key := lane.next()) is not None:
                if self._sizes[key].num_pages > self._free_pages:
                    return turns
                self._begin(key)
                turns.append(key)
        return turns

    def _begin(self, key: Hashable) -> None:
        size = self._sizes.pop(key)
        self._inside[key] = self._lane(size).begin(key, size)
        self._waiting_tokens -= size.num_tokens
        self._uncomputed_tokens += size.num_tokens
        self._free_pages -= size.num_pages

    def _lane(self, size: PromptSize) -> _Lane:
        return self._reported if size.is_reported else self._usual

    def computed(self, key: Hashable, num_tokens: int) -> None:
        """Notes that a step computed tokens of a prompt. One that has left is ignored: its step was on the way."""
        inside = self._inside.get(key)
        if inside is not None:
            inside.num_uncomputed -= num_tokens
            self._uncomputed_tokens -= num_tokens
            assert inside.num_uncomputed >= 0, "more tokens computed than the prompt has"
            if inside.num_uncomputed == 0:
                self._forget_uncomputed(key)

    def leave(self, key: Hashable) -> None:
        """Takes a prompt out, waiting or not, and gives its pages back. O(1); unknown keys are ignored."""
        waiting = self._sizes.pop(key, None)
        if waiting is not None:
            self._unready.pop(key, None)
            self._lane(waiting).line.discard(key)
            self._waiting_tokens -= waiting.num_tokens
        inside = self._inside.pop(key, None)
        if inside is not None:
            self._free_pages += inside.num_pages
            self._uncomputed_tokens -= inside.num_uncomputed
            self._forget_uncomputed(key)

    def _forget_uncomputed(self, key: Hashable) -> None:
        for lane in (self._usual, self._reported):
            lane.uncomputed.pop(key, None)
