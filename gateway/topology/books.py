"""What this gateway has decided to send to a worker and the worker does not report yet.

Between the decision and the worker's next report of its load there is a round trip; without these books everybody who
is let go in that time would see the same free place. Plain counts; a request's are taken back by whoever ends it.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Books:
    """Of one session: prompts to be computed there, requests to be admitted, and pages to be promised to them.

    A prompt is (service class, tokens), which is the order in which workers compute prompts. `sending` are bytes
    of handoffs that will go from there when those prompts are computed, by the id of the worker that they go to.
    """

    prompts: "dict[Bookings, tuple[int, int]]" = field(default_factory=dict)
    sending: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    pages: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the worker's own report says everything."""
        return not self.prompts and not self.requests and not self.pages and not self.sending

    def tokens_ahead(self, prompt: tuple[int, int], waiting_tokens: int) -> int:
        """Tokens that are computed before a prompt, where the worker says that so many wait.

        Of what is not from here nobody knows the order: all of it is.
        """
        num_own = num_ahead = 0
        for other in self.prompts.values():
            num_own += other[1]
            if other <= prompt:
                num_ahead += other[1]
        return num_ahead + max(0, waiting_tokens - num_own)

    def num_less_urgent(self, service_class: int) -> int:
        """Prompts of lower classes: they wait for those of this one, which need not mind them."""
        return sum(1 for other_class, _ in self.prompts.values() if other_class > service_class)


class Bookings:
    """Of one request: at its decode worker until that has admitted it, and where its prompt is computed until it is."""

    def __init__(self) -> None:
        self._decode: Books | None = None
        self._computes: Books | None = None
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

        `handoff`: which worker the prompt's pages go to, and their bytes; None: to none.
        """
        self.leave()
        self._decode, self._computes = decode, computes
        self._num_pages = num_pages
        decode.requests += 1
        decode.pages += num_pages
        computes.prompts[self] = prompt
        if handoff is not None and handoff[1] > 0:
            self._sends = (computes, *handoff)
            computes.sending[handoff[0]] = computes.sending.get(handoff[0], 0) + handoff[1]

    def note_admitted(self) -> None:
        """The decode worker's own reports count the request now."""
        if self._decode is not None:
            self._decode.requests -= 1
            self._decode.pages -= self._num_pages
            self._decode = None

    def note_prompt_done(self) -> None:
        """Nothing of the prompt waits to be computed, and its worker says itself what is on its way from there."""
        if self._computes is not None:
            del self._computes.prompts[self]
            self._computes = None
        if self._sends is not None:
            books, worker_id, num_bytes = self._sends
            self._sends = None
            books.sending[worker_id] -= num_bytes
            if not books.sending[worker_id]:
                del books.sending[worker_id]

    def leave(self) -> None:
        """Gives back whatever is still booked."""
        self.note_admitted()
        self.note_prompt_done()
