"""One client's way through a named request: the parts of its answers from the client's own position on."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from gateway.named.ask import Ask
from gateway.named.journal import AnswerReader, Position, Shown, event_id
from gateway.named.live_journal import Journal
from gateway.requests.lifecycle import Requests
from gateway.types import Delta, Usage
from services.runtime.errors import DeadlineExceeded, RequestCancelled, TandemError


class Part(msgspec.Struct):
    """The next part of one answer. `is_first`: its reader knew nothing of this answer.

    The parts of a named request have ids, which name positions in all of its answers.
    """

    choice: int
    delta: Delta
    is_first: bool
    opening_id: str = ""
    """The id of what comes before the first part: after it the client knows that this answer has begun. Else empty."""
    event_id: str = ""
    """The id of this part, which names the client's position after it."""


class Reader:
    """One client's view of a named request, from its own position on."""

    def __init__(self, requests: Requests, journal: Journal, ask: Ask, traceparent: str = "") -> None:
        positions = ask.positions_in(len(journal.answers))
        self.traceparent = traceparent
        """Names the span of this client's asking, if it has one."""
        self.request_id = journal.request_id
        self.created_unix_s = journal.created_unix_s
        assert journal.call is not None
        self.model = journal.specs[0].model
        self.fallback = journal.call.fallback
        self.specs = journal.specs
        self.answers = journal.answers
        self.positions = positions
        self._journal = journal
        self._deadline = ask.deadline
        self._answer_readers = [
            AnswerReader(answer, requests.new_text(spec), position)
            for answer, spec, position in zip(journal.answers, journal.specs, positions, strict=True)
        ]

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yields what comes after the reader's position until all answers are complete; use with `contextlib.aclosing`.

        Raises what ended the generation, DeadlineExceeded when this reader's own deadline has passed, and
        InvalidRequest for a position that the answers do not have.
        """
        journal = self._journal
        news = asyncio.Event()
        journal.readers.add(news)
        timer: asyncio.TimerHandle | None = None
        has_expired = False

        def expire() -> None:
            nonlocal has_expired
            has_expired = True
            news.set()

        if self._deadline is not None:
            timer = asyncio.get_running_loop().call_later(self._deadline.remaining_s(), expire)
        try:
            while not all(reader.is_done for reader in self._answer_readers):
                if has_expired:
                    raise deadline_passed()
                news.clear()
                has_read = False
                for choice, reader in enumerate(self._answer_readers):
                    for delta in reader.read():
                        has_read = True
                        yield self._part(choice, reader, delta)
                if has_read:
                    continue
                if not journal.is_running and not journal.is_finished:
                    raise (journal.error or RequestCancelled("the request was cancelled")).again()
                await news.wait()
        finally:
            journal.readers.discard(news)
            if timer is not None:
                timer.cancel()

    def usages(self) -> list[tuple[Usage, Sequence[int]]]:
        """Returns (usage, prompt) of each answer, once all are complete."""
        prompts = [spec.prompt_token_ids for spec in self.specs]
        return [
            (answer.usage, prompt)
            for answer, prompt in zip(self.answers, prompts, strict=True)
            if answer.usage is not None
        ]

    def _part(self, choice: int, reader: AnswerReader, delta: Delta) -> Part:
        is_first = self.positions[choice].shown is Shown.NOTHING
        opening_id = ""
        if is_first:
            self.positions[choice] = Position(0, Shown.TOKENS)
            opening_id = event_id(self.request_id, self.positions)
        self.positions[choice] = reader.position
        return Part(choice, delta, is_first, opening_id, event_id(self.request_id, self.positions))


def deadline_passed() -> TandemError:
    """Returns the error for a client whose own deadline has passed; the generation may continue for others."""
    return DeadlineExceeded("the request's deadline passed")
