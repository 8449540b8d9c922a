"""Decides which prompts may start. Pure bookkeeping.

`PromptQueue` belongs to the event loop. It decides when a prompt allocates pages here and requests pages from the
decode worker. services.scheduling.chunks composes the engine's steps by the same rule: the better service class first
(the lower number), then the prompt with the fewest uncomputed tokens, bounded by the age of the others. Prompts that
report log-probabilities have a separate queue, because they are computed in the background.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from services.runtime.errors import Overloaded
from services.scheduling.chunks import DEFAULT_CLASS, Line


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Cost of a prompt: tokens to compute and pages to hold them. `is_reported` if it reports log-probabilities."""

    num_tokens: int
    num_pages: int
    is_reported: bool = False


@dataclass(slots=True)
class _Inside:
    """An admitted prompt. `age` is its queue entry number, so a lower number is older."""

    num_pages: int
    service_class: int
    num_uncomputed: int
    age: int


class _Lane:
    """Waiting and admitted prompts of one kind. Prompts in different lanes neither overtake nor delay each other."""

    def __init__(self, *, ahead_tokens: int, patience_tokens: int) -> None:
        self._ahead_tokens = ahead_tokens
        self._patience_tokens = patience_tokens
        self.line = Line()
        """Prompts that are ready to be admitted."""
        self.uncomputed: dict[Hashable, _Inside] = {}
        """Admitted prompts that are not fully computed."""
        self._passed: dict[int, tuple[Hashable, int]] = {}
        """By class: its oldest waiting prompt, and the tokens admitted since that prompt became the oldest."""

    def next(self) -> Hashable | None:
        """Returns the prompt to admit once its pages are free. Returns None if enough work is already ahead."""
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
        """Moves a prompt from the queue to the admitted prompts."""
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
        """Returns the number of tokens admitted since `oldest` became the oldest waiting prompt of its class."""
        key, passed = self._passed.get(service_class, (None, 0))
        return passed if key == oldest else 0


class PromptQueue:
    """A bounded queue of prompts: best class first, then fewest tokens, with a bound on waiting.

    An admitted prompt holds all its pages until it leaves, so it never waits for a page halfway, and prompts cannot
    deadlock each other. A prompt is admitted when its pages are free and fewer than `ahead_tokens` uncomputed tokens of
    admitted prompts are scheduled before it. That is early enough to hide the round trip of a reservation behind the
    running step, and late enough not to hold pages of a decode worker while waiting. A short prompt can therefore start
    while a long one runs. No prompt overtakes another that waits only for pages.

    Prompts that report log-probabilities wait only for each other and for pages. Other prompts never wait for them.

    Bound: a prompt is *due* when it is the oldest waiting prompt of its class and `patience_tokens` tokens of its class
    have been admitted since it became the oldest. It is then admitted next, and only older prompts count as scheduled
    before it. While it is the oldest, fewer than `patience_tokens` tokens plus one prompt of its class overtake it, in
    addition to prompts admitted while older prompts are still being computed. Only better classes can delay it longer.
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
        """Sizes of waiting prompts."""
        self._unready: dict[Hashable, int] = {}
        """Service classes of waiting prompts that are not ready."""
        self._inside: dict[Hashable, _Inside] = {}
        self._waiting_tokens = 0
        self._uncomputed_tokens = 0
        self._free_pages = num_pages

    @property
    def num_waiting(self) -> int:
        """Returns the number of waiting prompts."""
        return len(self._sizes)

    @property
    def num_inside(self) -> int:
        """Returns the number of admitted prompts."""
        return len(self._inside)

    @property
    def waiting_tokens(self) -> int:
        """Returns the number of uncomputed tokens of all prompts."""
        return self._waiting_tokens + self._uncomputed_tokens

    @property
    def promised_pages(self) -> int:
        """Returns the number of pages of all admitted prompts."""
        return self._num_pages - self._free_pages

    def enter(
        self, key: Hashable, size: PromptSize, *, service_class: int = DEFAULT_CLASS, is_ready: bool = True
    ) -> None:
        """Queues a prompt that fits into an empty pool. Raises Overloaded if the queue is full.

        A prompt that is not ready counts toward the limit. Other prompts do not wait for it until `make_ready`.
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
        """Makes a waiting prompt eligible for admission. Ignores other keys."""
        service_class = self._unready.pop(key, None)
        if service_class is not None:
            size = self._sizes[key]
            line = self._lane(size).line
            line.add(key, service_class=service_class, num_tokens=size.num_tokens, cost=size.num_tokens)

    def enter_computed(self, key: Hashable, size: PromptSize) -> bool:
        """Admits a prompt whose pages are already computed. No other prompt waits longer for a step because of it.

        Returns False if its pages are not available. The caller may then queue it with `enter`.
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
        """Admits all prompts that can be admitted now, and returns their keys."""
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
        """Records computed tokens of a prompt. Ignores prompts that left while their step was running."""
        inside = self._inside.get(key)
        if inside is not None:
            inside.num_uncomputed -= num_tokens
            self._uncomputed_tokens -= num_tokens
            assert inside.num_uncomputed >= 0, "more tokens computed than the prompt has"
            if inside.num_uncomputed == 0:
                self._forget_uncomputed(key)

    def leave(self, key: Hashable) -> None:
        """Removes a waiting or admitted prompt and frees its pages. O(1). Ignores unknown keys."""
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
