"""Server-sent events of a request's answers, each of which a writer spells.

With its id where the request has a name: the connection may break between any two events.
"""

import contextlib
from collections.abc import AsyncGenerator, Container, Sequence

from gateway.edge.generate import Answers
from gateway.http.exchange import Exchange
from gateway.openai.writer import Writer
from gateway.requests.call import AnswerSpec
from gateway.types import Delta, Usage


async def events(
    exchange: Exchange, answers: Answers, writer: Writer, *, opened: Container[int] = ()
) -> AsyncGenerator[bytes, None]:
    """Yields the events that the client does not have, but for those that could be sent at once; some are empty.

    `opened` are the answers whose openings are sent already.
    """
    tally = _UsageTally(answers.specs, is_continuous=writer.is_usage_continuous)
    begun: set[int] = set()
    before = answers.start_id

    def catch_up(choice: int, num_tokens: int | None, *, has_all: bool) -> None:
        """Shows the writer what the client has of this answer."""
        known = answers.known(choice, num_tokens, has_all=has_all)
        writer.skip(choice, known.token_ids, known.text, known.logprobs)
        tally.skip(choice, len(known.token_ids))

    def send_now(delta: Delta) -> bool:
        if not exchange.can_send_event_now() or (writer.waits_at_end and delta.finish_reason is not None):
            return False
        event = writer.chunk(0, delta, tally.take(0, delta))
        if event:
            exchange.send_event_now(event)
        return True

    async with contextlib.aclosing(answers.parts(send_now)) as parts:
        async for part in parts:
            choice, delta = part.choice, part.delta
            if choice not in begun:
                begun.add(choice)
                if not part.is_first:
                    # A last part comes alone where the client has all of the text, or none was held back.
                    catch_up(choice, delta.first_index, has_all=delta.finish_reason is not None)
            opening = writer.opening(choice) if part.is_first and choice not in opened else b""
            if opening and part.event_id:
                opening = writer.with_ids(opening, before=before, after=part.opening_id)
            event = writer.chunk(choice, delta, tally.take(choice, delta))
            if event and part.event_id:
                event = writer.with_ids(event, before=part.opening_id or before, after=part.event_id)
            before = part.event_id
            yield opening + event
    if writer.has_usage:
        # The writer's own counts cover all answers, also those that the client has to their ends.
        for choice in {*range(len(answers.specs))} - begun:
            catch_up(choice, None, has_all=True)
        yield writer.usage_chunk(answers.usages())


class _UsageTally:
    """Usage of the answers of a stream: at an end, and so far for clients that want it with every chunk."""

    def __init__(self, specs: Sequence[AnswerSpec], *, is_continuous: bool) -> None:
        self._is_continuous = is_continuous
        self._num_prompt_tokens = [len(spec.prompt_token_ids) for spec in specs]
        self._num_tokens = [0] * len(specs)

    def skip(self, choice: int, num_tokens: int) -> None:
        """Counts tokens of an answer that the client has already."""
        self._num_tokens[choice] += num_tokens

    def take(self, choice: int, delta: Delta) -> Usage | None:
        """Returns the usage of one answer up to this delta, if it is the last one or each is to have it."""
        if delta.usage is not None or not self._is_continuous:
            return delta.usage
        self._num_tokens[choice] += len(delta.token_ids)
        return Usage(self._num_prompt_tokens[choice], 0, self._num_tokens[choice], 0.0, 0.0, 0.0, 0.0)
