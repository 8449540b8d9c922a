"""What this gateway has decided to send to a worker and the worker does not report yet.

Between the decision and the worker's next report of its load there is a round trip; without these books everybody who
is let go in that time would see the same free place. Plain counts; a request's are taken back by whoever ends it.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Books:
    """Of one session: prompt tokens to be computed there, requests to be admitted, and pages to be promised to them."""

    tokens: int = 0
    requests: int = 0
    pages: int = 0


class Bookings:
    """Of one request: at its decode worker until that has admitted it, and where its prompt is computed until it is."""

    def __init__(self) -> None:
        self._decode: Books | None = None
        self._computes: Books | None = None
        self._num_pages = 0
        self._num_tokens = 0

    def enter(self, decode: Books, computes: Books, *, num_pages: int, num_tokens: int) -> None:
        """Books a place, and gives up the one that was booked before."""
        self.leave()
        self._decode, self._computes = decode, computes
        self._num_pages, self._num_tokens = num_pages, num_tokens
        decode.requests += 1
        decode.pages += num_pages
        computes.tokens += num_tokens

    def note_admitted(self) -> None:
        """The decode worker's own reports count the request now."""
        if self._decode is not None:
            self._decode.requests -= 1
            self._decode.pages -= self._num_pages
            self._decode = None

    def note_prompt_done(self) -> None:
        """Nothing of the prompt waits to be computed."""
        if self._computes is not None:
            self._computes.tokens -= self._num_tokens
            self._computes = None

    def leave(self) -> None:
        """Gives back whatever is still booked."""
        self.note_admitted()
        self.note_prompt_done()
