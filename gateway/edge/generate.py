"""The answers to one request, for both APIs: one source of parts, whether the request has a name or not.

An API makes a `Call` of its message, or an `Ask` where the request has a name, and gets `Answers`: parts as they come,
or whole answers. Knows neither HTTP nor protobuf.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import NamedTuple, TypeVar

from gateway.access.door import FrontDoor
from gateway.access.keys import ApiKey
from gateway.models.answer_text import AnswerText
from gateway.models.turns import Steps, at_once
from gateway.named.ask import Ask
from gateway.named.journal import event_id
from gateway.named.reader import Part, Reader
from gateway.named.requests import Journals
from gateway.openai.writer import Whole
from gateway.requests.call import AcceptedCall, AnswerSpec, Call
from gateway.requests.delivery import FastPath
from gateway.requests.fallback import Stream, begun, streams_of
from gateway.requests.fan_out import all_of, merged
from gateway.requests.lifecycle import Requests
from gateway.types import Delta, PromptLogprobs, TokenLogprobs, Usage

MANY_LOGPROBS = 256
"""Tokens with log-probabilities that take at most some milliseconds to write."""
T = TypeVar("T")

OnTaken = Callable[[str, str], None]
"""Is told a request's id, and its traceparent or an empty text."""
TakeNow = Callable[[Delta], bool]
"""Delivers a delta at once and returns True, or returns False; see `FastPath`."""


class Known(NamedTuple):
    """The part of an answer that its client has already."""

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] | None


class Answers(ABC):
    """The answers to one request. To be read once, either by `parts` or by `wholes`."""

    request_id: str
    created_unix_s: int
    model: str
    """The name of the model that answers."""
    fallback: str
    """The model in whose place it answers and why, or empty; see `AcceptedCall`."""
    tier: str = ""
    """The tier that was asked for, the model that answers, and why, or empty."""
    traceparent: str
    """The name of the request's span, or empty."""
    specs: Sequence[AnswerSpec]
    start_id: str = ""
    """The id of the event after which the client reads, for a request whose parts have ids."""

    @property
    def named_model(self) -> str:
        """The name under which the model that answers is told: that of its adapter, where one changes it."""
        return self.specs[0].facts.adapter or self.model

    @abstractmethod
    def parts(self, take_now: TakeNow | None = None) -> AsyncGenerator[Part, None]:
        """Yields the parts of all answers as they come; use with `contextlib.aclosing`.

        The deltas of a single answer may go to `take_now` instead. Raises what ended an answer.
        """

    @abstractmethod
    async def wholes(self) -> list[Whole]:
        """Returns all answers, complete. Raises what ended one of them."""

    def record(self) -> None:  # noqa: B027 - answers that can be read again need not be
        """Has `recorded` return what `parts` yields from now on."""

    @abstractmethod
    def recorded(self) -> list[Whole]:
        """Returns all answers, whose parts were read to their ends; also what a client had before."""

    @abstractmethod
    def usages(self) -> list[tuple[Usage, Sequence[int]]]:
        """Returns (usage, token ids of the prompt) of each answer, once all are complete."""

    @abstractmethod
    def known(self, choice: int, num_tokens: int | None, *, has_all: bool) -> Known:
        """Returns the first tokens of an answer (None: all), which its client has, and their text.

        `has_all`: with the text that was held back until the end.
        """


class Generator:
    """Begins, continues or joins the generation of answers."""

    def __init__(self, requests: Requests, journals: Journals, door: FrontDoor) -> None:
        self._requests = requests
        self._journals = journals
        self._door = door

    def answers(
        self, asked: Call | Ask, key: ApiKey, *, on_taken: OnTaken
    ) -> contextlib.AbstractAsyncContextManager[Answers]:
        """The answers that a caller with this key asks for. Leaving the block ends what is generated for it alone.

        `on_taken` is told the request's id and its traceparent (or an empty text) before anything is generated. Raises
        what `Requests.accept`, `Requests.run` or `Journals.attach` raises.
        """
        if isinstance(asked, Ask):
            return self._attached(asked, key, on_taken)
        return _Generation(self._requests, asked, on_taken)

    @contextlib.asynccontextmanager
    async def _attached(self, asked: Ask, key: ApiKey, on_taken: OnTaken) -> AsyncIterator[Answers]:
        async with self._journals.attach(asked) as reader:
            on_taken(reader.request_id, reader.traceparent)
            # Another key of the tenant may have begun it, and may be allowed more.
            self._door.check_model(key, reader.model)
            yield _NamedAnswers(reader, self._requests.new_text)

    async def written(self, answers: Answers, num_logprobs: int, writing: Steps[T]) -> T:
        """Returns what `writing` returns, which runs on a thread where it writes many log-probabilities.

        Between its steps the event loop has the interpreter: in one piece, at the bounds, other requests' tokens would
        wait for tenths of a second.
        """
        if num_logprobs < MANY_LOGPROBS:
            return at_once(writing)
        turns = self._requests.catalog[answers.model].tokenizer.turns
        return await turns.run(writing, tenant=answers.specs[0].facts.tenant)


class _Generation:
    """The block in which the answers to a request without a name are generated.

    A class, because every request enters it, and an asynchronous generator costs several times as much.
    """

    def __init__(self, requests: Requests, call: Call, on_taken: OnTaken) -> None:
        self._requests = requests
        self._call = call
        self._on_taken = on_taken
        self._accepted: AcceptedCall | None = None
        self._begun: contextlib.AbstractAsyncContextManager[list[Stream]] | None = None

    async def __aenter__(self) -> Answers:
        self._accepted = accepted = await self._requests.accept(self._call)
        try:
            self._on_taken(accepted.request_id, accepted.span.told_traceparent)
            paths = [FastPath() for _ in accepted.specs]
            if accepted.fallbacks:
                self._begun = begun(self._requests, accepted, accepted.specs, fast_paths=paths)
                streams = await self._begun.__aenter__()
            else:
                streams = streams_of(self._requests, accepted.specs, paths)
        except BaseException as error:
            accepted.__exit__(type(error), error, error.__traceback__)
            raise
        return _PlainAnswers(accepted, streams, paths)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._accepted is not None, "the block was entered"
        try:
            if self._begun is not None:
                await self._begun.__aexit__(kind, error, at)
        except BaseException as other:
            self._accepted.__exit__(type(other), other, other.__traceback__)
            raise
        self._accepted.__exit__(kind, error, at)


class _PlainAnswers(Answers):
    """The answers to a request without a name: what runs is this client's alone."""

    def __init__(self, accepted: AcceptedCall, streams: list[Stream], paths: list[FastPath]) -> None:
        self.request_id = accepted.request_id
        self.created_unix_s = int(time.time())
        self.model = accepted.model
        self.fallback = accepted.fallback
        self.traceparent = accepted.span.told_traceparent
        self.specs = accepted.specs
        self._streams = streams
        self._paths = paths
        self._usages: dict[int, Usage] = {}
        self._growing: list[_Growing] = []
        """The answers so far, where they are recorded."""

    def record(self) -> None:
        self._growing = [_Growing() for _ in self.specs]

    def recorded(self) -> list[Whole]:
        return [answer.whole(spec) for answer, spec in zip(self._growing, self.specs, strict=True)]

    async def parts(self, take_now: TakeNow | None = None) -> AsyncGenerator[Part, None]:
        if len(self._streams) == 1:
            self._paths[0].take = take_now if take_now is None or not self._growing else self._recording(take_now)
            async with contextlib.aclosing(self._streams[0]) as deltas:
                is_first = True
                async for delta in deltas:
                    if self._growing:
                        self._growing[0].take(delta)
                    if delta.usage is not None:
                        self._usages[0] = delta.usage
                    yield Part(0, delta, is_first)
                    is_first = False
            return
        seen: set[int] = set()
        async with contextlib.aclosing(merged(self._streams)) as parts:
            async for choice, delta in parts:
                if self._growing:
                    self._growing[choice].take(delta)
                if delta.usage is not None:
                    self._usages[choice] = delta.usage
                yield Part(choice, delta, choice not in seen)
                seen.add(choice)

    def _recording(self, take_now: TakeNow) -> TakeNow:
        return lambda delta: take_now(delta) and self._growing[0].take(delta)

    async def wholes(self) -> list[Whole]:
        if len(self._streams) == 1:
            return [await self._whole(0, self._streams[0])]
        return await all_of([self._whole(choice, stream) for choice, stream in enumerate(self._streams)])

    async def _whole(self, choice: int, stream: Stream) -> Whole:
        answer = _Growing()
        self._paths[choice].take = answer.take
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                answer.take(delta)
        return answer.whole(self.specs[choice])

    def usages(self) -> list[tuple[Usage, Sequence[int]]]:
        return [(usage, self.specs[choice].prompt_token_ids) for choice, usage in self._usages.items()]

    def known(self, choice: int, num_tokens: int | None, *, has_all: bool) -> Known:
        return Known((), "", None)


class _NamedAnswers(Answers):
    """The answers to a request with a name, which others may read too, from the position of this client on."""

    def __init__(self, reader: Reader, new_text: Callable[[AnswerSpec], AnswerText]) -> None:
        self.request_id = reader.request_id
        self.created_unix_s = reader.created_unix_s
        self.model = reader.model
        self.fallback = reader.fallback
        self.traceparent = reader.traceparent
        self.specs = reader.specs
        self.start_id = event_id(reader.request_id, reader.positions)
        self._reader = reader
        self._new_text = new_text

    def parts(self, take_now: TakeNow | None = None) -> AsyncGenerator[Part, None]:
        return self._reader.parts()

    async def wholes(self) -> list[Whole]:
        answers = [_Growing() for _ in self.specs]
        async with contextlib.aclosing(self._reader.parts()) as parts:
            async for part in parts:
                answers[part.choice].take(part.delta)
        return [answer.whole(spec) for answer, spec in zip(answers, self.specs, strict=True)]

    def recorded(self) -> list[Whole]:
        wholes = []
        for spec, answer in zip(self.specs, self._reader.answers, strict=True):
            known = self.known(spec.choice, None, has_all=True)
            logprobs = None if known.logprobs is None else list(known.logprobs)
            growing = _Growing()
            growing.take(Delta(0, list(known.token_ids), known.text, logprobs, answer.finish_reason, answer.usage))
            wholes.append(growing.whole(spec))
        return wholes

    def usages(self) -> list[tuple[Usage, Sequence[int]]]:
        return self._reader.usages()

    def known(self, choice: int, num_tokens: int | None, *, has_all: bool) -> Known:
        answer = self._reader.answers[choice]
        token_ids = answer.token_ids[:num_tokens]
        text = self._new_text(self.specs[choice])
        taken = [text.push((token_id,)) for token_id in token_ids]
        is_stopped = any(each.is_stopped for each in taken)
        held_back = "" if is_stopped or not has_all else text.finish()
        shown = "".join(each.text for each in taken) + held_back
        return Known(token_ids, shown, answer.logprobs and answer.logprobs[:num_tokens])


class _Growing:
    """One answer while its deltas are put together."""

    __slots__ = ("_last", "_logprobs", "_prompt_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._last: Delta | None = None

    def take(self, delta: Delta) -> bool:
        """Adds the next delta; never leaves it to the task."""
        self._token_ids.extend(delta.token_ids)
        self._texts.append(delta.text)
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._last = delta
        return True

    def whole(self, spec: AnswerSpec) -> Whole:
        """Returns the answer, whose last delta has come."""
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        assert last.usage is not None
        return Whole(
            index=spec.choice,
            token_ids=self._token_ids,
            text="".join(self._texts),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=last.finish_reason,
            usage=last.usage,
            prompt_token_ids=spec.prompt_token_ids,
        )
