"""The tokens of one named request as they are kept, and how any reader continues from any position of them.

Pure: tokens in, parts out. Text is a function of the tokens, so every reader makes its own from the first token on and
shows what comes after its position; how the tokens were grouped on their way, and on which gateway, makes no
difference.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

from gateway.limits import MAX_NAME_CHARS, MAX_SEQUENCES
from gateway.models.answer_text import AnswerText
from gateway.requests.call import RequestFacts, StoredCall, StoredChoice
from gateway.types import Delta, FinishReason, Sampling, TokenLogprobs, Usage
from services.runtime.errors import InternalError, InvalidRequest

MAX_DELTA_TOKENS = 32
"""A reader that has much to catch up with gets it in parts of at most this many, which bounds what waits for it."""

TOKEN_COST_BYTES = 40
LOGPROB_COST_BYTES = 160
"""What a token, and each log-probability of it, takes in memory, about."""
SAMPLING_COST_BYTES = 1024
ANSWER_COST_BYTES = 4096
"""What a sampling takes beside its texts, and what an answer takes beside its tokens: objects of the interpreter."""

MAX_FALLBACK_CHARS = 1024
"""The most for what is said of a fallback: two names of models and a reason are fewer."""
MAX_TRACEPARENT_CHARS = 55


class Shown(IntEnum):
    """How far a client has come with one answer beside its tokens."""

    NOTHING = 0
    TOKENS = 1
    """It knows that the answer has begun, and has the text of its tokens."""
    TEXT = 2
    """It also has the text that was held back until the end."""
    END = 3
    """It also knows why the answer ended."""


class Position(NamedTuple):
    """What a client has of one answer: its first `num_tokens` tokens with their text, and more as `shown` says."""

    num_tokens: int
    shown: Shown


START = Position(0, Shown.NOTHING)

_LETTERS = {Shown.TOKENS: "", Shown.TEXT: "t", Shown.END: "f"}
_SHOWN = {letter: shown for shown, letter in _LETTERS.items()}
_POSITION = re.compile(r"(0|[1-9][0-9]{0,9})([tf]?)")
_MAX_EVENT_ID_CHARS = 64 + 1 + MAX_SEQUENCES * 12


def event_id(request_id: str, positions: Sequence[Position]) -> str:
    """Returns the id of an event: after it the client has each answer up to these positions, such as `abc/12,7f,-`."""
    return f"{request_id}/{','.join(map(_position_text, positions))}"


def parse_event_id(text: str) -> tuple[str, list[Position]]:
    """Returns request id and positions. Raises InvalidRequest for what `event_id` cannot have written."""
    request_id, slash, positions = text.partition("/")
    if not slash or len(text) > _MAX_EVENT_ID_CHARS:
        raise event_id_error("it is no id of an event of this server")
    return request_id, [_parse_position(part) for part in positions.split(",")]


def event_id_error(reason: str) -> InvalidRequest:
    """Returns the error for a Last-Event-ID after which nothing can be continued."""
    return InvalidRequest(f"Last-Event-ID cannot be used: {reason}", field="Last-Event-ID", code="invalid_event_id")


def _position_text(position: Position) -> str:
    if position.shown is Shown.NOTHING:
        return "-"
    return f"{position.num_tokens}{_LETTERS[position.shown]}"


def _parse_position(text: str) -> Position:
    if text == "-":
        return START
    found = _POSITION.fullmatch(text)
    if found is None:
        raise event_id_error("it is no id of an event of this server")
    return Position(int(found[1]), _SHOWN[found[2]])


class Answer:
    """The tokens of one answer so far, in order and without a gap; the last one to add has the finish reason."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self._num_logprobs = 0

    @property
    def is_finished(self) -> bool:
        """Whether it is complete."""
        return self.finish_reason is not None

    @property
    def cost_bytes(self) -> int:
        """What it takes in memory, about."""
        num_bytes = len(self.token_ids) * TOKEN_COST_BYTES + self._num_logprobs * LOGPROB_COST_BYTES
        return num_bytes + ANSWER_COST_BYTES

    def add(self, delta: Delta) -> None:
        """Takes the next part; its text is not kept. Raises InternalError where it does not follow."""
        if delta.first_index != len(self.token_ids) or self.is_finished:
            raise InternalError("a part of an answer does not follow the one before")
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
            self._num_logprobs += sum(1 + len(entry.top) for entry in delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.usage = delta.finish_reason, delta.usage


class AnswerReader:
    """One reader's way through one answer, from `position` on. `text` is fresh: it has seen no token."""

    def __init__(self, answer: Answer, text: AnswerText, position: Position = START) -> None:
        self.position = position
        self._answer = answer
        self._text = text
        self._skips_to = position
        self._num_read = 0
        self._is_stopped = False

    @property
    def is_done(self) -> bool:
        """Whether the client has all of it. A position that the answer does not have is not its end."""
        answer = self._answer
        return answer.is_finished and self.position == (len(answer.token_ids), Shown.END)

    def read(self) -> Iterator[Delta]:
        """Yields what is known and the client does not have; `position` is always the one after the latest delta.

        Raises InvalidRequest if the answer has ended before the position from which the reader began.
        """
        answer = self._answer
        self._skip()
        while self._num_read < len(answer.token_ids):
            yield self._next_tokens()
        if answer.is_finished and self._num_read == len(answer.token_ids):
            yield from self._end()

    def _skip(self) -> None:
        """Skips what the client has."""
        token_ids = self._answer.token_ids
        target = self._skips_to.num_tokens
        if self._num_read < target:
            self._push(token_ids[self._num_read : target])
        if self._answer.is_finished:
            is_beyond = self._num_read < target
            is_early_end = self._skips_to.shown > Shown.TOKENS and target < len(token_ids)
            if is_beyond or is_early_end:
                raise InvalidRequest("the answer does not have the position to continue from", code="invalid_event_id")

    def _next_tokens(self) -> Delta:
        answer, first = self._answer, self._num_read
        token_ids = answer.token_ids[first : first + MAX_DELTA_TOKENS]
        logprobs = None if answer.logprobs is None else answer.logprobs[first : first + len(token_ids)]
        text = self._push(token_ids)
        self.position = Position(self._num_read, Shown.TOKENS)
        return Delta(first, token_ids, text, logprobs)

    def _end(self) -> Iterator[Delta]:
        num_tokens = len(self._answer.token_ids)
        if self.position.shown < Shown.TEXT:
            text = "" if self._is_stopped else self._text.finish()
            self.position = Position(num_tokens, Shown.TEXT)
            if text:
                yield Delta(num_tokens, [], text)
        if self.position.shown < Shown.END:
            self.position = Position(num_tokens, Shown.END)
            yield Delta(num_tokens, [], "", None, self._answer.finish_reason, self._answer.usage)

    def _push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens one by one: what a token shows at once may depend on which tokens come together with it."""
        pieces = []
        for token_id in token_ids:
            taken = self._text.push((token_id,))
            pieces.append(taken.text)
            self._is_stopped = self._is_stopped or taken.is_stopped
        self._num_read += len(token_ids)
        return "".join(pieces)


class _ChoiceDocument(msgspec.Struct, frozen=True, array_like=True):
    """`sampling` is a place in the call's `samplings`, with a seed of its own, or stands here itself.

    It stands here where a call has one answer: gateways that know no `samplings` read such a call too.
    """

    prompt: int
    sampling: Sampling | int
    layout: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    seed: int = 0


class _CallDocument(RequestFacts, frozen=True, kw_only=True):
    """A call as it is kept; a prompt or a sampling that several answers share is kept once."""

    tenant: str
    priority: int
    created_unix_s: int
    prompts: list[list[int]]
    choices: list[_ChoiceDocument]
    model: str = ""
    """Empty in what a gateway wrote that served only one: this one's, if it serves only one."""
    fallback: Annotated[str, msgspec.Meta(max_length=MAX_FALLBACK_CHARS)] = ""
    is_settled: bool = True
    traceparent: Annotated[str, msgspec.Meta(max_length=MAX_TRACEPARENT_CHARS)] = ""
    samplings: list[Sampling] = msgspec.field(default_factory=list)
    """The samplings of several answers, each that differs in more than its seed; their own seeds mean nothing."""


class _EndDocument(msgspec.Struct, frozen=True, array_like=True):
    num_tokens: int
    finish_reason: FinishReason
    usage: Usage


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no such document: also for texts that are no UTF-8, and for deep nesting."""


def encode_call(call: StoredCall, *, created_unix_s: int) -> bytes:
    """Returns the call without its tokens, for `services.cluster.journals`."""
    places: dict[int, int] = {}
    prompts: list[list[int]] = []
    samplings: list[Sampling] = []
    choices = []
    for choice in call.choices:
        prompt = choice.prompt_token_ids
        if id(prompt) not in places:
            places[id(prompt)] = len(prompts)
            prompts.append(list(prompt))
        sampling: Sampling | int = choice.sampling
        if len(call.choices) > 1:
            sampling = _place_of(choice.sampling, samplings)
        choices.append(_ChoiceDocument(places[id(prompt)], sampling, choice.layout, choice.sampling.seed))
    document = _CallDocument(
        **msgspec.structs.asdict(call.facts),
        created_unix_s=created_unix_s,
        prompts=prompts,
        choices=choices,
        model=call.model,
        fallback=call.fallback,
        is_settled=call.is_settled,
        traceparent=call.traceparent,
        samplings=samplings,
    )
    return msgspec.msgpack.encode(document)


def _place_of(sampling: Sampling, samplings: list[Sampling]) -> int:
    """Returns the index of this sampling, apart from its seed, among those; it is added if it is new."""
    unseeded = msgspec.structs.replace(sampling, seed=0)
    # Answers of one call have the same sampling, except that prompts leave them room of different sizes.
    for place in range(len(samplings) - 1, -1, -1):
        if samplings[place] == unseeded:
            return place
    samplings.append(unseeded)
    return len(samplings) - 1


def _sampling_of(choice: _ChoiceDocument, samplings: Sequence[Sampling]) -> Sampling:
    """Returns the sampling of one answer. Raises IndexError for an index that does not exist."""
    if isinstance(choice.sampling, Sampling):
        return choice.sampling
    if choice.sampling < 0:
        raise IndexError
    return msgspec.structs.replace(samplings[choice.sampling], seed=choice.seed)


def decode_call(packed: bytes, *, request_id: str) -> tuple[StoredCall, int] | None:
    """Returns the call without remaining time, and when it was created (unix s); None for what is not a call."""
    try:
        document = msgspec.msgpack.decode(packed, type=_CallDocument)
        choices = [
            StoredChoice(
                document.prompts[choice.prompt], _sampling_of(choice, document.samplings), layout=choice.layout
            )
            for choice in document.choices
        ]
    except (*_UNREADABLE, IndexError):
        return None
    call = StoredCall(
        request_id=request_id,
        choices=choices,
        facts=RequestFacts.of(document),
        model=document.model,
        fallback=document.fallback,
        is_settled=document.is_settled,
        traceparent=document.traceparent,
        remaining_s=0.0,
    )
    return call, document.created_unix_s


def cost_of_call(call: StoredCall) -> int:
    """Returns what a call's prompts and samplings take in memory, in bytes, about; what answers share counts once."""
    prompts = {id(choice.prompt_token_ids): len(choice.prompt_token_ids) for choice in call.choices}
    forms = {id(choice.sampling.form): choice.sampling.form for choice in call.choices}
    biases = {id(choice.sampling.logit_bias): len(choice.sampling.logit_bias) for choice in call.choices}
    num_form_bytes = sum(2 * form.num_bytes for form in forms.values() if form is not None)
    num_tokens = sum(prompts.values()) + 2 * sum(biases.values())
    return num_tokens * TOKEN_COST_BYTES + num_form_bytes + len(call.choices) * SAMPLING_COST_BYTES


def encode_end(answer: Answer) -> bytes:
    """Returns how a finished answer ended."""
    assert answer.finish_reason is not None
    assert answer.usage is not None
    return msgspec.msgpack.encode(_EndDocument(len(answer.token_ids), answer.finish_reason, answer.usage))


def restore(token_ids: list[int], end: bytes) -> Answer:
    """Returns an answer as it was kept; what does not fit together counts as not ended."""
    answer = Answer()
    answer.token_ids = token_ids
    if end:
        try:
            document = msgspec.msgpack.decode(end, type=_EndDocument)
        except _UNREADABLE:
            return answer
        if document.num_tokens == len(token_ids):
            answer.finish_reason, answer.usage = document.finish_reason, document.usage
    return answer


def name_of(kind: str, *parts: str) -> str:
    """Returns 32 hex digits that name these parts, whatever characters they have."""
    return digest_of(kind, *parts)[:32]


def digest_of(kind: str, *parts: str | bytes) -> str:
    """Returns 64 hex digits; different parts have different ones."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(b"\0%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()
