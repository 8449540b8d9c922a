"""What this gateway has decided to send to a worker and the worker does not report yet.

Between the decision and the worker's next report of its load there is a round trip; without these books every request
sent in that time would see the same free place. Plain counts; the code that ends a request takes its counts back.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True)
class Books:
    """The books of one session: prompts to be computed, requests to be admitted, and pages to be promised to them.

    A prompt is (service class, tokens), which is the order in which workers compute prompts, and that of `prompts`.
    `prompt_tokens` are the tokens of each, in the same order. `sending` are bytes of handoffs that will go from there
    when those prompts are computed, by the id of the worker that they go to.
    """

    prompts: list[tuple[int, int]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    sending: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    pages: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the worker's own report says everything."""
        return not self.prompts and not self.requests and not self.pages and not self.sending

    def around(self, prompt: tuple[int, int], waiting_tokens: int) -> tuple[int, int]:
        """Returns the tokens that are computed before a prompt, and the number of prompts of lower classes.

        The worker says that `waiting_tokens` wait. The order of prompts from other gateways is unknown: all of them
        count as computed before it. Prompts of lower classes wait for it.
        """
        prompts, tokens = self.prompts, self.prompt_tokens
        if not prompts:
            return waiting_tokens, 0
        num_ahead = sum(tokens[: bisect_right(prompts, prompt)])
        num_less_urgent = len(prompts) - bisect_left(prompts, (prompt[0] + 1,))
        return num_ahead + max(0, waiting_tokens - sum(tokens)), num_less_urgent

    def add_prompt(self, prompt: tuple[int, int]) -> None:
        """Books a prompt that is to be computed here."""
        place = bisect_right(self.prompts, prompt)
        self.prompts.insert(place, prompt)
        self.prompt_tokens.insert(place, prompt[1])

    def remove_prompt(self, prompt: tuple[int, int]) -> None:
        """Removes one that was added."""
        place = bisect_left(self.prompts, prompt)
        del self.prompts[place], self.prompt_tokens[place]


class Bookings:
    """The bookings of one request.

    One stands at the decode worker until that has admitted the request, the other where the prompt is computed until it
    is done.
    """

    def __init__(self) -> None:
        self.route: object = None
        """The route whose places are booked, until workers have admitted the request."""
        self._decode: Books | None = None
        self._computes: Books | None = None
        self._prompt = (0, 0)
        self._num_pages = 0
        self._sends: tuple[Books, str, int] | None = None

    def enter(
        self,
        decode: Books,
        computes: Books,
        *,
        num_pages: int,
        prompt: tuple[int, int],
        handoff: tuple[str, int] | None = None,
    ) -> None:
        """Books a place, and gives up the one that was booked before.

        `handoff`: the worker that the prompt's pages go to, and their bytes; None: they stay.
        """
        self.leave()
        self._decode, self._computes, self._prompt = decode, computes, prompt
        self._num_pages = num_pages
        decode.requests += 1
        decode.pages += num_pages
        computes.add_prompt(prompt)
        if handoff is not None and handoff[1] > 0:
            self._sends = (computes, *handoff)
            computes.sending[handoff[0]] = computes.sending.get(handoff[0], 0) + handoff[1]

    def note_admitted(self) -> None:
        """Notes that the decode worker's own reports count the request now."""
        self.route = None
        if self._decode is not None:
            self._decode.requests -= 1
            self._decode.pages -= self._num_pages
            self._decode = None

    def note_prompt_done(self) -> None:
        """Notes that nothing of the prompt waits to be computed; its worker reports what is on its way from there."""
        if self._computes is not None:
            self._computes.remove_prompt(self._prompt)
            self._computes = None
        if self._sends is not None:
            books, worker_id, num_bytes = self._sends
            self._sends = None
            books.sending[worker_id] -= num_bytes
            if not books.sending[worker_id]:
                del books.sending[worker_id]

    def leave(self) -> None:
        """Gives back whatever is still booked."""
        if self._decode is not None or self.route is not None:
            self.note_admitted()
        if self._computes is not None or self._sends is not None:
            self.note_prompt_done()
