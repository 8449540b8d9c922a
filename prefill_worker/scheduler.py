"""Which prompts may begin, and which chunks of them make the next step: pure bookkeeping.

Two small policies, one for each side of the worker. `PromptQueue` belongs to the event loop: it decides when a prompt
takes pages here and asks for pages there. `ChunkScheduler` belongs to the engine thread: it packs a step's chunks.
Neither knows a tensor, a clock, a thread or a message.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from services.runtime.errors import Overloaded


@dataclass(frozen=True, slots=True)
class PromptSize:
    """What a prompt costs: tokens to compute, and pages that hold them."""

    num_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of the prompt `key`, from position `start`; `is_last` when they end it."""

    key: Hashable
    start: int
    num_tokens: int
    is_last: bool


class PromptQueue:
    """A bounded queue, first come first served, in front of a bounded workshop.

    A prompt that has its *turn* holds all its pages until it leaves, so that it can never wait for a page halfway, and
    prompts cannot block each other. A turn is given when the pages are there and when fewer than `ahead_tokens` tokens
    of earlier turns are uncomputed: early enough to hide the round trip of a reservation behind the running step, late
    enough not to hold pages of a decode worker while waiting.
    """

    def __init__(self, *, max_waiting: int, num_pages: int, ahead_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._num_pages = num_pages
        self._ahead_tokens = ahead_tokens
        self._waiting: dict[Hashable, PromptSize] = {}  # in order of arrival
        self._inside: dict[Hashable, PromptSize] = {}
        self._uncomputed: dict[Hashable, int] = {}
        self._waiting_tokens = 0
        self._uncomputed_tokens = 0
        self._free_pages = num_pages

    @property
    def num_waiting(self) -> int:
        """Prompts without a turn."""
        return len(self._waiting)

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

    def enter(self, key: Hashable, size: PromptSize) -> None:
        """Queues a prompt that fits into the pool when it is alone. Raises Overloaded when the queue is full."""
        assert key not in self._waiting, "a prompt enters once"
        assert key not in self._inside, "a prompt enters once"
        assert 0 < size.num_pages <= self._num_pages, "who lets it in has checked that it fits"
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"the prefill queue is full ({self._max_waiting} prompts)")
        self._waiting[key] = size
        self._waiting_tokens += size.num_tokens

    def enter_computed(self, key: Hashable, size: PromptSize) -> bool:
        """Gives a prompt whose pages are computed its turn at once: nobody waits longer for a step because of it.

        False: its pages are not there. It may enter as others do then.
        """
        assert key not in self._waiting, "a prompt enters once"
        assert key not in self._inside, "a prompt enters once"
        if size.num_pages > self._free_pages:
            return False
        self._inside[key] = size
        self._uncomputed[key] = 0
        self._free_pages -= size.num_pages
        return True

    def next_turns(self) -> list[Hashable]:
        """Gives every turn that can be given now; nobody overtakes the head of the queue."""
        turns = []
        while self._waiting and self._uncomputed_tokens < self._ahead_tokens:
            key, size = next(iter(self._waiting.items()))
            if size.num_pages > self._free_pages:
                break
            self._begin(key, size)
            turns.append(key)
        return turns

    def _begin(self, key: Hashable, size: PromptSize) -> None:
        del self._waiting[key]
        self._waiting_tokens -= size.num_tokens
        self._inside[key] = size
        self._uncomputed[key] = size.num_tokens
        self._uncomputed_tokens += size.num_tokens
        self._free_pages -= size.num_pages

    def computed(self, key: Hashable, num_tokens: int) -> None:
        """Notes that a step computed tokens of a prompt. One that has left is ignored: its step was on the way."""
        if key in self._uncomputed:
            self._uncomputed[key] -= num_tokens
            self._uncomputed_tokens -= num_tokens
            assert self._uncomputed[key] >= 0, "more tokens computed than the prompt has"

    def leave(self, key: Hashable) -> None:
        """Takes a prompt out, waiting or not, and gives its pages back. O(1); unknown keys are ignored."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._waiting_tokens -= waiting.num_tokens
        inside = self._inside.pop(key, None)
        if inside is not None:
            self._free_pages += inside.num_pages
            self._uncomputed_tokens -= self._uncomputed.pop(key)


class ChunkScheduler:
    """Packs chunks of several prompts into one step, in the order in which they became ready.

    The first prompt takes as much of the budget as it needs, the next takes what is left: a short prompt behind a long
    one rides in the long one's last step, and the step is never smaller than the work allows.
    """

    def __init__(self, *, chunk_tokens: int) -> None:
        assert chunk_tokens > 0, "a step computes something"
        self._chunk_tokens = chunk_tokens
        self._prompts: dict[Hashable, tuple[int, int]] = {}  # key -> (next position, end), in order of readiness

    def __len__(self) -> int:
        """Prompts that have uncomputed tokens."""
        return len(self._prompts)

    def add(self, key: Hashable, *, num_tokens: int) -> None:
        """Makes a prompt ready."""
        assert key not in self._prompts, "a prompt is added once"
        assert num_tokens > 0, "a prompt is not empty"
        self._prompts[key] = (0, num_tokens)

    def remove(self, key: Hashable) -> None:
        """Forgets a prompt. O(1); unknown keys are ignored."""
        self._prompts.pop(key, None)

    def next_step(self) -> list[Chunk]:
        """The chunks of the next step, at most the budget's tokens in all; they count as computed from here on."""
        budget = self._chunk_tokens
        chunks = []
        for key, (start, end) in self._prompts.items():
            if budget == 0:
                break
            num_tokens = min(budget, end - start)
            budget -= num_tokens
            chunks.append(Chunk(key, start, num_tokens, is_last=start + num_tokens == end))
        for chunk in chunks:
            self._advance(chunk)
        return chunks

    def _advance(self, chunk: Chunk) -> None:
        if chunk.is_last:
            del self._prompts[chunk.key]
        else:
            self._prompts[chunk.key] = (chunk.start + chunk.num_tokens, self._prompts[chunk.key][1])
