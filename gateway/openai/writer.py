"""Answers as OpenAI's clients read them: what all writers share, and what writers of choices share.

Knows the spelling of the HTTP API and nothing of serving it.
"""

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.turns import Steps, at_once
from gateway.openai.answers import ChatTokenLogprob, PromptTokensDetails, TokenUsage, TopLogprob
from gateway.openai.requests import ChoicesRequest
from gateway.types import Delta, FinishReason, PromptLogprobs, TokenLogprobs, Usage

SSE_DONE = b"data: [DONE]\n\n"

_GAP = "text goes here: \N{WHITE SQUARE}"


class Whole(msgspec.Struct):
    """One complete answer."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    usage: Usage
    prompt_token_ids: Sequence[int]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_candidates: bytes | None = None
    """What JSON says of them; None: not written yet."""


class Head(msgspec.Struct, frozen=True):
    """The facts that all parts of an answer begin with."""

    request_id: str
    created_unix_s: int
    model: str
    system_fingerprint: str


def system_fingerprint(model: ServedModel) -> str:
    """Returns a digest of all facts about a model, which are alike on every gateway."""
    limits = model.limits
    facts = [model.name, model.tokenizer_fingerprint, limits.vocab_size, limits.context_length_tokens]
    return "fp_" + hashlib.sha256(encode([*facts, model.eos_token_ids])).hexdigest()[:12]


class Writer(ABC):
    """Writes one call's answers in the words of one API. `prompts` holds the token ids of each answer's prompt."""

    object_name = ""
    end = SSE_DONE
    """The end of a stream that was not broken off."""
    has_usage = False
    """Whether `usage_chunk` comes before the end."""
    is_usage_continuous = False
    """Whether each event tells the usage so far."""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """The headers that tell the request's id."""
    waits_at_end = False
    """Whether the last event waits until the answer is kept."""
    keep_alive = b": keep-alive\n\n"
    """What keeps a stream alive in which nothing happens; clients pass over it."""

    @abstractmethod
    def __init__(
        self, tokenizer: ModelTokenizer, request: Any, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None: ...

    @staticmethod
    def journal_event_id(event_id: str) -> str:
        """Returns the journal's id within one that `with_ids` wrote. Raises InvalidRequest."""
        return event_id

    def go_on_after(self, event_id: str) -> None:  # noqa: B027 - for most the journal's part of the id says it all
        """Continues after the event with this id, which the client has."""

    @abstractmethod
    def whole(self, answers: Sequence[Whole]) -> bytes:
        """Returns the body of an answer that is not streamed."""

    def whole_in_steps(self, answers: Sequence[Whole]) -> Steps[bytes]:
        """Does what `whole` does, and yields wherever others may have the interpreter."""
        yield from ()
        return self.whole(answers)

    @abstractmethod
    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Takes tokens of a choice that the client has already, with their text."""

    def opening(self, index: int) -> bytes:
        """Returns what a stream sends before the first token of a choice."""
        return b""

    @abstractmethod
    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """Returns the event for a delta; empty if the client would learn nothing from it.

        `usage` is that so far; not given before the last delta unless `is_usage_continuous`.
        """

    def with_ids(self, event: bytes, *, before: str, after: str) -> bytes:
        """Returns what `opening` or `chunk` has just written, with ids that move a client from `before` to `after`."""
        return with_event_id(event, after)

    def usage_chunk(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> bytes:
        """Returns the last event before the end, where the client asked for usage."""
        return b""

    def error(self, error_object: Mapping[str, Any]) -> bytes:
        """Returns the end of a stream that has begun and cannot continue."""
        return b"data: " + encode(error_object) + b"\n\n"


class PartsWriter(Writer):
    """Writes one answer as parts that are found in its text; what is written waits for `_written`."""

    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Reads the text, as what is found next depends on all of it."""
        self._read(token_ids, text, logprobs)

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """Returns all events that follow from a delta."""
        self._read(delta.token_ids, delta.text, delta.logprobs)
        if delta.finish_reason is not None:
            assert usage is not None
            self._end(delta.finish_reason, usage)
        return self._written()

    @abstractmethod
    def _read(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None: ...

    @abstractmethod
    def _end(self, finish_reason: FinishReason, usage: Usage) -> None: ...

    @abstractmethod
    def _written(self) -> bytes: ...


class ChoicesWriter(Writer):
    """Writes answers as a list of choices. What all chunks of a stream share is encoded once."""

    chunk_type: ClassVar[type[msgspec.Struct]]
    chunk_object_name = ""
    id_prefix = ""

    def __init__(
        self, tokenizer: ModelTokenizer, request: ChoicesRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        stream_options = request.stream_options
        self.id = f"{self.id_prefix}-{head.request_id}"
        self.has_usage = bool(stream_options and stream_options.include_usage)
        self.is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._has_token_ids = bool(request.return_token_ids)
        self._shows_ids = bool(request.return_tokens_as_token_ids)
        self._num_prompt_logprobs = request.prompt_logprobs
        self._head: dict[str, Any] = {
            "id": self.id,
            "created": head.created_unix_s,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "service_tier": UNSET if request.service_tier is None else "default",
        }
        self._is_plain = not self._has_token_ids and not self.is_usage_continuous
        """Whether the events of two deltas of a choice differ in nothing but their text."""
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    @functools.cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """What is before and after the choice in every event of a stream."""
        # With include_usage every chunk but the last has a null there, as OpenAI's clients were told.
        usage = None if self.has_usage else UNSET
        event = encode(self.chunk_type(**self._head, object=self.chunk_object_name, choices=[], usage=usage))
        start, around, end = event.rpartition(b'"choices":[]')
        return b"data: " + start + around[:-1], b"]" + end + b"\n\n"

    def whole_in_steps(self, answers: Sequence[Whole]) -> Steps[bytes]:
        """Does what `whole` does; what prompts' log-probabilities are is written in steps."""
        if self._num_prompt_logprobs is not None:
            for answer in answers:
                if answer.prompt_logprobs is not None:
                    answer.prompt_candidates = yield from self._candidates(answer)
        return self.whole(answers)

    def _candidates(self, answer: Whole) -> Steps[bytes]:
        columns = answer.prompt_logprobs or PromptLogprobs([], 0, [], [])
        return _prompt_logprobs(self._tokenizer, answer.prompt_token_ids[1:], columns, self._num_prompt_logprobs or 0)

    def _prompt_logprobs(self, answer: Whole) -> Any:
        """Returns PromptCandidates as JSON, or UNSET where they were not asked for."""
        if self._num_prompt_logprobs is None:
            return UNSET
        return msgspec.Raw(answer.prompt_candidates or at_once(self._candidates(answer)))

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """Returns the event for a delta, or b"" for one that tells nothing new. `usage` where it is continuous."""
        if self._is_plain and delta.logprobs is None and delta.finish_reason is None:
            if not delta.text:
                return b""
            before, after = self._around_text.get(index) or self._find_around_text(index)
            return before + encode(delta.text) + after
        parts = []
        if delta.text or delta.logprobs or (self._has_token_ids and delta.token_ids):
            parts.append(self._event(self._text_choice(index, delta), usage))
        if delta.finish_reason is not None:
            parts.append(self._event(self._last_choice(index, delta.finish_reason), usage))
        return b"".join(parts)

    def usage_chunk(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> bytes:
        """Returns the last event before the end, where the client asked for usage."""
        return self._frame[0] + b'],"usage":' + encode(self._usage(usages)) + b"}\n\n"

    def _usage(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> TokenUsage:
        return usage_sum(usages)

    def _whole_usage(self, answers: Sequence[Whole]) -> TokenUsage:
        return self._usage([(answer.usage, answer.prompt_token_ids) for answer in answers])

    def _event(self, choice: msgspec.Struct, usage: Usage | None) -> bytes:
        before, after = self._frame
        if self.is_usage_continuous and usage is not None:
            return before + encode(choice) + b'],"usage":' + encode(usage_sum([(usage, ())])) + b"}\n\n"
        return before + encode(choice) + after

    def _no_usage_yet(self, index: int) -> Usage | None:
        """Returns the usage before the first token; None where not every event tells the usage."""
        return Usage(len(self._prompts[index]), 0, 0, 0.0, 0.0, 0.0, 0.0) if self.is_usage_continuous else None

    def _find_around_text(self, index: int) -> tuple[bytes, bytes]:
        """Returns what is around the text in the event of a delta that has only text, as nearly all have."""
        event = self._event(self._text_choice(index, Delta(0, [], _GAP)), None)
        before, _, after = event.rpartition(_GAP.encode())
        around = self._around_text[index] = before.removesuffix(b'"'), after.removeprefix(b'"')
        return around

    def _shown_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self._has_token_ids else UNSET

    def _shown_prompt(self, index: int) -> Sequence[int] | UnsetType:
        return self._prompts[index] if self._has_token_ids else UNSET

    def _shown_token(self, token_id: int) -> str:
        """Returns a token as log-probabilities name it."""
        return token_as_id(token_id) if self._shows_ids else self._tokenizer.token_text(token_id)

    @abstractmethod
    def _text_choice(self, index: int, delta: Delta) -> msgspec.Struct: ...

    @abstractmethod
    def _last_choice(self, index: int, finish_reason: FinishReason) -> msgspec.Struct: ...


def _prompt_logprobs(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], columns: PromptLogprobs, num_shown: int
) -> Steps[bytes]:
    """Returns the JSON list of a prompt's log-probabilities: null, then an object for each of `token_ids`.

    It may have megabytes. Objects for its entries and the encoder's one call would take four times as long as joining
    pieces, most of which are those of tokens and are made once.
    """
    before = _Made(lambda token_id: b',"%d":{"logprob":' % token_id)
    after = _Made(lambda token_id: b',"decoded_token":%b}' % encode(tokenizer.token_text(token_id)))
    num_top, num_shown = columns.num_top, min(num_shown, columns.num_top)
    objects = [b"[null"]
    for start, part in columns.slices():
        top_ids, own = part.top_token_ids, _numbers(part.logprobs)
        pieces = [b""] * (3 * len(top_ids))
        pieces[0::3] = map(before.__getitem__, top_ids)
        pieces[1::3] = _numbers(part.top_logprobs)
        pieces[2::3] = map(after.__getitem__, top_ids)
        for place, token_id in enumerate(token_ids[start : start + len(own)]):
            first = place * num_top
            shown = b"".join(pieces[3 * first : 3 * (first + num_shown)])
            if token_id not in top_ids[first : first + num_shown]:
                shown += before[token_id] + own[place] + after[token_id]
            objects.append(b",{%b}" % shown[1:])
        yield
    objects.append(b"]")
    return b"".join(objects)


class _Made(dict[int, bytes]):
    """What `make` makes of a token, made when it is first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        made = self[token_id] = self._make(token_id)
        return made


def _numbers(values: Sequence[float]) -> list[bytes]:
    """Returns each number in JSON's spelling."""
    if not math.isfinite(sum(values)):
        values = list(map(finite, values))
    return encode(values)[1:-1].split(b",") if values else []


def token_as_id(token_id: int) -> str:
    """Returns a token's name for clients that take texts for too little, as vLLM spells it."""
    return f"token_id:{token_id}"


def shown_logprobs(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, shows_ids: bool = False
) -> list[ChatTokenLogprob]:
    """Returns tokens with their log-probabilities, as the chat and the Responses API show them.

    `shows_ids`: tokens are named by their ids.
    """

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        shown_bytes = tokenizer.token_bytes(token_id) or text.encode()
        return {
            "token": token_as_id(token_id) if shows_ids else text,
            "logprob": finite(logprob),
            "bytes": list(shown_bytes),
        }

    return [
        ChatTokenLogprob(
            **shown(token_id, entry.logprob), top_logprobs=[TopLogprob(**shown(*top)) for top in entry.top]
        )
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def usage_sum(usages: Sequence[tuple[Usage, Sequence[int]]]) -> TokenUsage:
    """Returns the usage of several answers; a prompt that several of them share (the same object) counts once."""
    prompts = [usages[0][0]] if len(usages) == 1 else {id(prompt): usage for usage, prompt in usages}.values()
    num_prompt = sum(usage.prompt_tokens for usage in prompts)
    num_completion = sum(usage.completion_tokens for usage, _ in usages)
    return TokenUsage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.cached_tokens for usage in prompts)),
    )


def with_event_id(event: bytes, event_id: str) -> bytes:
    """Returns one event with an id, after which a client can resume."""
    return b"%bid: %b\n\n" % (event.removesuffix(b"\n"), event_id.encode())


def finite(logprob: float) -> float:
    """Returns a number for JSON, which has no -inf; OpenAI's API shows -9999 for an impossible token."""
    return logprob if math.isfinite(logprob) else -9999.0


encode = msgspec.json.Encoder().encode
