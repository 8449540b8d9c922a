"""OpenAI's requests and answers as they travel: strict parsing of the former, writing of the latter.

Knows the spelling of the HTTP API and nothing of serving it.
"""

import hashlib
import itertools
import json
import math
import operator
import re
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.limits import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_TOKENS_EVER,
    check_affinity_key,
    check_cache_salt,
    check_integer,
    check_positive_number,
    prompt_form_error,
)
from gateway.models.answer_parts import AnswerParts, ReasoningTokens
from gateway.models.catalog import ServedModel
from gateway.models.response_format import form_in
from gateway.models.template_words import template_words_in
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_calls import AnswerParser, CallStart, Content, Piece, Reasoning
from gateway.models.tools import forced_names, is_named, offered_tools, strict_names
from gateway.openai.vocabulary import ignored_members
from gateway.requests.call import Call
from gateway.types import AskedSampling, Delta, TokenLogprobs, Usage
from services.runtime.errors import InvalidRequest

DEFAULT_COMPLETION_TOKENS = 16
"""What the completions API generates when max_tokens is absent, as OpenAI's does."""

LEAST_TOP_P = 1e-6
"""What 0 stands for: the likeliest token alone is kept."""

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
"""What may be asked for; what is served is always `default`."""

SSE_DONE = b"data: [DONE]\n\n"

_GAP = "text goes here: \N{WHITE SQUARE}"


class StreamOptions(msgspec.Struct):
    """`stream_options` of both request types."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class EffortOption(msgspec.Struct, kw_only=True):
    """`reasoning` of a chat request."""

    effort: str | None = None


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """Makes types of bodies that are parts of others."""


class RequestBody(msgspec.Struct, kw_only=True, metaclass=_AbstractStruct):
    """What all requests for answers have. None means absent, as OpenAI's clients send null for it."""

    model: str | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: Any = None
    priority: int | None = None
    service_class: str | None = None
    tenant: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    allow_fallback: bool | None = None
    request_timeout_ms: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    num_predict: int | None = None
    max_tokens_to_sample: int | None = None
    min_new_tokens: int | None = None
    repeat_penalty: float | None = None
    stop_sequences: list[str] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None

    @abstractmethod
    def call(self) -> Call:
        """The call it asks for. Raises InvalidRequest."""


class _ChoicesRequest(RequestBody, kw_only=True):
    """What the APIs share whose answers are a list of choices."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    prompt_logprobs: int | None = None


class CompletionRequest(_ChoicesRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def call(self) -> Call:
        """The call it asks for. Raises InvalidRequest."""
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequest(
                "best_of is only supported with the value of n", field="best_of", code="unsupported_parameter"
            )
        max_tokens = _agreed_max_tokens(self, "max_tokens")
        sampling = _sampling(self, max_tokens=max_tokens, logprobs=self.logprobs)
        prompt_logprobs_field = "prompt_logprobs"
        if self.echo and self.logprobs is not None:
            _check_whole(self, "echo with logprobs", field="echo")
            if self.prompt_logprobs is None or self.logprobs > self.prompt_logprobs:
                sampling.prompt_logprobs, prompt_logprobs_field = self.logprobs, "logprobs"
        if sampling.max_tokens is None and not _is_unbounded(self):
            sampling.max_tokens = min(max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens), MAX_TOKENS_EVER)
        return Call(
            operation="text_completion",
            model=self.model,
            prompts=_prompts(self.prompt),
            sampling=sampling,
            num_choices=n,
            priority=0 if self.priority is None else self.priority,
            service_class=self.service_class or "",
            tenant=self.tenant or "",
            affinity_key=self.prompt_cache_key or self.user or "",
            cache_salt=self.cache_salt or "",
            prompt_logprobs_field=prompt_logprobs_field,
            allow_fallback=self.allow_fallback,
        )


class ChatRequest(_ChoicesRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: EffortOption | None = None
    verbosity: str | None = None

    def call(self) -> Call:
        """The call it asks for. Raises InvalidRequest."""
        if self.messages is None:
            raise InvalidRequest("messages is missing", field="messages", code="missing_required_parameter")
        max_tokens = _agreed_max_tokens(self, "max_tokens", "max_completion_tokens")
        tools = offered_tools(self.tools, self.tool_choice)
        words, fields = self._template_words()
        sampling = _sampling(self, max_tokens=max_tokens, logprobs=self._num_logprobs())
        return Call(
            operation="chat",
            model=self.model,
            messages=self.messages,
            tools=tools,
            template_words=words,
            template_fields=fields,
            must_call=forced_names(tools, self.tool_choice),
            strict_tools=strict_names(self.tools) if tools else frozenset(),
            parallel_tool_calls=self.parallel_tool_calls is not False and not is_named(self.tool_choice),
            sampling=sampling,
            num_choices=1 if self.n is None else self.n,
            priority=0 if self.priority is None else self.priority,
            service_class=self.service_class or "",
            tenant=self.tenant or "",
            affinity_key=self.prompt_cache_key or self.user or "",
            cache_salt=self.cache_salt or "",
            allow_fallback=self.allow_fallback,
            prompt_field="messages",
        )

    def _template_words(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What the chat template is told, where it knows the name, and which member says it. Raises InvalidRequest."""
        if _told_to_template(self) == _NOTHING_TOLD:
            return {}, {}
        words = template_words_in(self.chat_template_kwargs or {}, "chat_template_kwargs")
        fields = {name: f"chat_template_kwargs.{name}" for name in words}
        for name, field, value, asks_nothing in (
            ("enable_thinking", "enable_thinking", self.enable_thinking, None),
            ("reasoning_effort", "reasoning_effort", self.reasoning_effort, "none"),
            ("reasoning_effort", "reasoning.effort", self.reasoning and self.reasoning.effort, "none"),
            ("verbosity", "verbosity", self.verbosity, "medium"),
        ):
            if value is not None and value != asks_nothing:
                checked = template_words_in({name: value}, field)
                if words.setdefault(name, value) != checked[name]:
                    raise InvalidRequest(f"{field} is said twice, and differs", field=field, code="invalid_value")
                fields.setdefault(name, field)
        return words, fields

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        check_integer(self.top_logprobs, "top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
        if not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        return self.top_logprobs


_TOLD = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "reasoning", "verbosity")
_told_to_template = operator.attrgetter(*_TOLD)
_NOTHING_TOLD = (None,) * len(_TOLD)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: either `prompt` or `messages`, which become the tokens of a chat's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Any] | None = None


Body = TypeVar("Body", bound=RequestBody)
Value = TypeVar("Value")
Members = TypeVar("Members", bound=msgspec.Struct)


def parse_members(body: bytes, body_type: type[Members]) -> tuple[Members, list[str]]:
    """The body by its type alone, and the names of members that are ignored. Raises InvalidRequest as `parse` does."""
    return _converted(_decode_strictly(body), body_type)


def parse(body: bytes, body_type: type[Body]) -> tuple[Body, list[str]]:
    """The request, and the names of members that are ignored. Raises InvalidRequest that names the member."""
    return _parsed(_decode_strictly(body), body_type)


def parse_named(body: bytes, body_type: type[Body]) -> tuple[Body, list[str], bytes]:
    """As `parse`, and the body without what makes no difference: white space and the order of members."""
    members = _decode_strictly(body)
    return *_parsed(members, body_type), json.dumps(members, sort_keys=True, separators=(",", ":")).encode()


def _converted(members: dict[str, Any], body_type: type[Members]) -> tuple[Members, list[str]]:
    try:
        request = msgspec.convert(members, body_type)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("a text of the body has half a surrogate pair", code="invalid_encoding") from error
    if getattr(request, "model", None) == "":
        raise InvalidRequest(
            "model must be a name or alias from /v1/models; leave it out for the only model of a server",
            field="model",
            code="invalid_value",
        )
    return request, ignored_members(members, body_type.__struct_fields__)


def _parsed(members: dict[str, Any], body_type: type[Body]) -> tuple[Body, list[str]]:
    request, ignored = _converted(members, body_type)
    if request.user:
        check_affinity_key(request.user, field_name="user")
    if request.prompt_cache_key:
        check_affinity_key(request.prompt_cache_key, field_name="prompt_cache_key")
    if request.service_tier is not None and request.service_tier not in SERVICE_TIERS:
        raise InvalidRequest(
            f"service_tier must be one of {', '.join(SERVICE_TIERS)}", field="service_tier", code="invalid_value"
        )
    if request.cache_salt is not None:
        check_cache_salt(request.cache_salt)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported: nothing is added to events",
            field="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    return request, ignored


class Whole(msgspec.Struct):
    """One complete answer."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: str
    usage: Usage
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[TokenLogprobs] | None = None


class Head(msgspec.Struct, frozen=True):
    """What all parts of an answer begin with."""

    request_id: str
    created_unix_s: int
    model: str
    system_fingerprint: str


def system_fingerprint(model: ServedModel) -> str:
    """Changes when the model behind a name does: all that a gateway knows of it, which every gateway knows alike."""
    limits = model.limits
    facts = [model.name, model.tokenizer_fingerprint, limits.vocab_size, limits.context_length_tokens]
    return "fp_" + hashlib.sha256(_encode([*facts, model.eos_token_ids])).hexdigest()[:12]


class Writer(ABC):
    """Writes one call's answers in the words of one API. `prompts` holds the token ids of each answer's prompt."""

    object_name = ""
    end = SSE_DONE
    """What ends a stream that was not broken off."""
    has_usage = False
    """Whether `usage_chunk` comes before the end."""
    is_usage_continuous = False
    """Whether each event tells the usage so far."""

    @abstractmethod
    def __init__(
        self, tokenizer: ModelTokenizer, request: Any, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None: ...

    @staticmethod
    def journal_event_id(event_id: str) -> str:
        """The id that `gateway.named.journal` knows, of one that `with_ids` wrote. Raises InvalidRequest."""
        return event_id

    def go_on_after(self, event_id: str) -> None:  # noqa: B027 - for most the journal's part of the id says it all
        """The client has the stream up to the event with this id."""

    @abstractmethod
    def whole(self, answers: Sequence[Whole]) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """The client has these tokens of a choice already, this text of them, and all that belongs to them."""

    def opening(self, index: int) -> bytes:
        """What a stream sends before the first token of a choice."""
        return b""

    @abstractmethod
    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """The event for a delta; empty if the client would learn nothing from it.

        `usage` is that so far; not given before the last delta unless `is_usage_continuous`.
        """

    def with_ids(self, event: bytes, *, before: str, after: str) -> bytes:
        """What `opening` or `chunk` has just written, with ids: the client was at `before`, and is then at `after`."""
        return with_event_id(event, after)

    def usage_chunk(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> bytes:
        """The last event before the end, where the client asked for usage."""
        return b""

    def error(self, error_object: Mapping[str, Any]) -> bytes:
        """What ends a stream which has begun and cannot go on."""
        return b"data: " + _encode(error_object) + b"\n\n"


class ChoicesWriter(Writer):
    """Writes answers as a list of choices. What all chunks of a stream share is encoded once."""

    chunk_object_name = ""
    id_prefix = ""

    def __init__(
        self, tokenizer: ModelTokenizer, request: _ChoicesRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        stream_options = request.stream_options
        self.id = f"{self.id_prefix}-{head.request_id}"
        self.has_usage = bool(stream_options and stream_options.include_usage)
        self.is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._has_token_ids = bool(request.return_token_ids)
        self._num_prompt_logprobs = request.prompt_logprobs
        self._head = {
            "id": self.id,
            "created": head.created_unix_s,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        if request.service_tier is not None:
            self._head["service_tier"] = "default"
        start = _encode({**self._head, "object": self.chunk_object_name})
        self._prefix = b"data: " + start[:-1] + b',"choices":['
        # With include_usage every chunk but the last has a null there, as OpenAI's clients were told.
        self._suffix = b'],"usage":null}\n\n' if self.has_usage else b"]}\n\n"
        self._is_plain = not self._has_token_ids and not self.is_usage_continuous
        """Whether a delta's event has nothing but its text that is not the same in all of them."""
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, answers: Sequence[Whole]) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(answer) for answer in answers]
        usages = [(answer.usage, answer.prompt_token_ids) for answer in answers]
        document = {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage(usages)}
        return _encode(document | self._document(answers))

    def _document(self, answers: Sequence[Whole]) -> dict[str, Any]:
        """More members of the body of an answer that is not streamed."""
        return {}

    def _prompt_logprobs(self, answer: Whole) -> list[dict[str, Any] | None] | None:
        """As vLLM's users know them: of each token, by id, the likeliest ones and itself; null for the first."""
        if self._num_prompt_logprobs is None:
            return None
        following = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs or (), strict=True)
        return [None, *(self._candidates(token_id, entry) for token_id, entry in following)]

    def _candidates(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        logprobs = dict([*entry.top[: self._num_prompt_logprobs], (token_id, entry.logprob)])
        return {
            str(one): {"logprob": _finite(logprob), "decoded_token": self._tokenizer.token_text(one)}
            for one, logprob in logprobs.items()
        }

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """The event for a delta; empty if the client would learn nothing from it. `usage` where it is continuous."""
        if self._is_plain and delta.logprobs is None and delta.finish_reason is None:
            if not delta.text:
                return b""
            before, after = self._around_text.get(index) or self._find_around_text(index)
            return before + _encode(delta.text) + after
        parts = []
        if delta.text or delta.logprobs or (self._has_token_ids and delta.token_ids):
            parts.append(self._event(self._text_choice(index, delta), usage))
        if delta.finish_reason is not None:
            parts.append(self._event(self._last_choice(index, delta.finish_reason), usage))
        return b"".join(parts)

    def usage_chunk(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> bytes:
        """The last event before the end, where the client asked for usage."""
        return self._prefix + b'],"usage":' + _encode(self._usage(usages)) + b"}\n\n"

    def _usage(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> dict[str, Any]:
        return usage_sum(usages)

    def _event(self, choice: bytes, usage: Usage | None) -> bytes:
        if self.is_usage_continuous and usage is not None:
            return self._prefix + choice + b'],"usage":' + _encode(usage_sum([(usage, ())])) + b"}\n\n"
        return self._prefix + choice + self._suffix

    def _no_usage_yet(self, index: int) -> Usage | None:
        """Before the first token; None where not every event tells the usage."""
        return Usage(len(self._prompts[index]), 0, 0, 0.0, 0.0, 0.0, 0.0) if self.is_usage_continuous else None

    def _find_around_text(self, index: int) -> tuple[bytes, bytes]:
        """What comes before and after the text in the event for a text alone, which nearly all are."""
        event = self._event(self._text_choice(index, Delta(0, [], _GAP)), None)
        before, _, after = event.rpartition(_GAP.encode())
        around = self._around_text[index] = before.removesuffix(b'"'), after.removeprefix(b'"')
        return around

    def _token_ids_member(self, token_ids: Sequence[int]) -> bytes:
        return b',"token_ids":' + _encode(token_ids) if self._has_token_ids else b""

    @abstractmethod
    def _whole_choice(self, answer: Whole) -> dict[str, Any]: ...

    @abstractmethod
    def _text_choice(self, index: int, delta: Delta) -> bytes: ...

    @abstractmethod
    def _last_choice(self, index: int, finish_reason: str) -> bytes: ...


class ChatWriter(ChoicesWriter):
    """Writes /v1/chat/completions, with the calls and the reasoning that are found in the answers' text."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self, tokenizer: ModelTokenizer, request: ChatRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(tokenizer, request, head=head, prompts=prompts)
        tools = offered_tools(request.tools, request.tool_choice)
        is_strict = bool(strict_names(request.tools))
        self._parts = AnswerParts(
            tokenizer,
            tools,
            request_id=head.request_id,
            prompts=prompts,
            is_strict=is_strict,
            is_forced=bool(forced_names(tools, request.tool_choice)),
        )
        self._is_parallel = request.parallel_tool_calls is not False
        self._parsers: dict[int, AnswerParser] = {}
        self._reasoning: dict[int, ReasoningTokens] = {}

    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """What is found next depends on all of the text before it."""
        if self._parts.are_looked_for:
            self._count_reasoning(index, token_ids)
            self._parser(index).push(text, token_ids)

    def opening(self, index: int) -> bytes:
        """The event that names the role."""
        delta = b'{"role":"assistant","content":""}'
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta)
        return self._event(choice, self._no_usage_yet(index))

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """What the parser has held back until the end comes with the reason of the end."""
        if not self._parts.are_looked_for:
            return super().chunk(index, delta, usage)
        self._count_reasoning(index, delta.token_ids)
        parser = self._parser(index)
        members = self._members(index, parser.push(delta.text, delta.token_ids))
        parts = []
        if members or delta.logprobs or (self._has_token_ids and delta.token_ids):
            parts.append(self._event(self._delta_choice(index, delta, _encode(members)), usage))
        if delta.finish_reason is not None:
            shown = _encode(self._members(index, parser.finish()))
            reason = _finish_reason(delta.finish_reason, parser)
            parts.append(self._event(self._last_choice(index, reason, shown), usage))
        return b"".join(parts)

    def _document(self, answers: Sequence[Whole]) -> dict[str, Any]:
        """All answers have the same prompt."""
        prompt_logprobs = self._prompt_logprobs(answers[0])
        return {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}

    def _whole_choice(self, answer: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        finish_reason = answer.finish_reason
        if self._parts.are_looked_for:
            self._count_reasoning(answer.index, answer.token_ids)
            parser = self._parts.parser(answer.index)
            pieces = [*parser.push(answer.text, answer.token_ids), *parser.finish()]
            message |= self._message(answer.index, pieces)
            finish_reason = _finish_reason(finish_reason, parser)
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.token_ids, answer.logprobs),
            "finish_reason": finish_reason,
        }
        if self._has_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _text_choice(self, index: int, delta: Delta) -> bytes:
        return self._delta_choice(index, delta, b'{"content":%b}' % _encode(delta.text))

    def _delta_choice(self, index: int, delta: Delta, shown: bytes) -> bytes:
        logprobs = b"null" if delta.logprobs is None else _encode(self._logprobs(delta.token_ids, delta.logprobs))
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (
            index,
            shown,
            logprobs,
            self._token_ids_member(delta.token_ids),
        )

    def _last_choice(self, index: int, finish_reason: str, shown: bytes = b"{}") -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":"%b"}' % (index, shown, finish_reason.encode())

    def _parser(self, index: int) -> AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = self._parts.parser(index)
        return self._parsers[index]

    def _count_reasoning(self, index: int, token_ids: Sequence[int]) -> None:
        if self._tokenizer.has_reasoning:
            if index not in self._reasoning:
                self._reasoning[index] = ReasoningTokens(self._tokenizer, self._parts.parser(index))
            self._reasoning[index].push(token_ids)

    def _usage(self, usages: Sequence[tuple[Usage, Sequence[int]]]) -> dict[str, Any]:
        shown = super()._usage(usages)
        if self._tokenizer.has_reasoning:
            num_tokens = sum(counter.num_tokens for counter in self._reasoning.values())
            shown["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return shown

    def _message(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All pieces of an answer as members of its message."""
        members = self._members(index, pieces)
        for call in members.get("tool_calls", ()):
            del call["index"]
        return {"content": None if "tool_calls" in members else "", **members}

    def _members(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The pieces as members of a delta: of each call what is new."""
        members: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                members["content"] = members.get("content", "") + piece.text
            elif isinstance(piece, Reasoning):
                members["reasoning_content"] = members.get("reasoning_content", "") + piece.text
            elif piece.index and not self._is_parallel:
                # Whoever asked for one call at a time gets the first; the model was not told of the wish.
                continue
            elif isinstance(piece, CallStart):
                function = {"name": piece.name, "arguments": ""}
                call_id = self._parts.call_id(index, piece.index)
                calls[piece.index] = {"index": piece.index, "id": call_id, "type": "function", "function": function}
            else:
                call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        if calls:
            members["tool_calls"] = list(calls.values())
        return members

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        return {"content": shown_logprobs(self._tokenizer, token_ids, entries), "refusal": None}


class CompletionWriter(ChoicesWriter):
    """Writes /v1/completions; `text_offset` of log-probabilities counts characters of the answer.

    With `echo` a prompt's text comes before its answers: as the client wrote it, or what its token ids stand for.
    """

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, tokenizer: ModelTokenizer, request: CompletionRequest, *, head: Head, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(tokenizer, request, head=head, prompts=prompts)
        self._num_chars: dict[int, int] = {}
        self._echoed = _prompts(request.prompt) if request.echo else []
        self._num_logprobs = request.logprobs or 0
        self._num_choices = request.n or 1

    def whole(self, answers: Sequence[Whole]) -> bytes:
        """The body; what the first answer to a prompt has of it is in the others too."""
        for answer in answers:
            first = answers[answer.index - answer.index % self._num_choices]
            answer.prompt_logprobs = first.prompt_logprobs
        return super().whole(answers)

    def skip(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Offsets go on after these tokens."""
        self._num_chars[index] = sum(len(self._tokenizer.token_text(token_id)) for token_id in token_ids)

    def opening(self, index: int) -> bytes:
        """The event with the prompt, where it is echoed."""
        text = _encode(self._echo(index))
        if text == b'""':
            return b""
        choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, text)
        return self._event(choice, self._no_usage_yet(index))

    def _echo(self, index: int) -> str:
        if not self._echoed:
            return ""
        prompt = self._echoed[index // self._num_choices]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _whole_choice(self, answer: Whole) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "text": self._echo(answer.index) + answer.text,
            "logprobs": self._whole_logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        prompt_logprobs = self._prompt_logprobs(answer)
        if prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs
        if self._has_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _text_choice(self, index: int, delta: Delta) -> bytes:
        logprobs = _encode(self._logprobs(index, delta.token_ids, delta.logprobs))
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % (
            index,
            _encode(delta.text),
            logprobs,
            self._token_ids_member(delta.token_ids),
        )

    def _last_choice(self, index: int, finish_reason: str) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}' % (index, finish_reason.encode())

    def _whole_logprobs(self, answer: Whole) -> dict[str, Any] | None:
        """Of the prompt too where it is echoed, with nothing for its first token."""
        if not self._echoed or answer.logprobs is None:
            return self._logprobs(answer.index, answer.token_ids, answer.logprobs)
        first, *rest = answer.prompt_token_ids
        entries = [
            TokenLogprobs(entry.logprob, entry.top[: self._num_logprobs]) for entry in answer.prompt_logprobs or ()
        ]
        first_text = self._tokenizer.token_text(first)
        # The token that begins a text is not in what the client wrote.
        is_shown = self._echo(answer.index).startswith(first_text)
        self._num_chars[answer.index] = len(first_text) if is_shown else 0
        shown = self._logprobs(answer.index, [*rest, *answer.token_ids], [*entries, *answer.logprobs])
        assert shown is not None
        return {
            "tokens": [first_text, *shown["tokens"]],
            "token_logprobs": [None, *shown["token_logprobs"]],
            "top_logprobs": [None, *shown["top_logprobs"]],
            "text_offset": [0, *shown["text_offset"]],
        }

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if entries is None:
            return None
        texts = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = list(itertools.accumulate(map(len, texts), initial=self._num_chars.get(index, 0)))
        self._num_chars[index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in entry.top}
                | {text: _finite(entry.logprob)}
                for text, entry in zip(texts, entries, strict=True)
            ],
            "text_offset": offsets,
        }


def shown_logprobs(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, as the chat and the Responses API show them."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        shown_bytes = tokenizer.token_bytes(token_id) or text.encode()
        return {"token": text, "logprob": _finite(logprob), "bytes": list(shown_bytes)}

    return [
        {**shown(token_id, entry.logprob), "top_logprobs": [shown(*top) for top in entry.top]}
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _finish_reason(reason: str, parser: AnswerParser) -> str:
    """An answer that calls ends for its calls, unless it was cut."""
    return "tool_calls" if reason == "stop" and parser.num_complete_calls else reason


def usage_sum(usages: Sequence[tuple[Usage, Sequence[int]]]) -> dict[str, Any]:
    """OpenAI's usage of several answers; a prompt that several of them share (the same object) counts once."""
    prompts = {id(prompt): usage for usage, prompt in usages}.values()
    num_prompt = sum(usage.prompt_tokens for usage in prompts)
    num_completion = sum(usage.completion_tokens for usage, _ in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }


def with_event_id(event: bytes, event_id: str) -> bytes:
    """One event, with the id from which a client can go on after it."""
    return b"%bid: %b\n\n" % (event.removesuffix(b"\n"), event_id.encode())


_MAX_TOKENS_WORDS = ("max_new_tokens", "n_predict", "num_predict", "max_tokens_to_sample")
_NO_BOUND: Mapping[str, tuple[int, ...]] = {"n_predict": (-1, -2), "num_predict": (-1, -2)}
"""What llama.cpp and Ollama write for as many as fit."""
_FORM_WORDS = (
    *("response_format", "regex", "ebnf", "grammar", "json_schema", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


_others_words = operator.attrgetter(*_MAX_TOKENS_WORDS, "min_new_tokens", "repeat_penalty", "stop_sequences")
_NO_OTHERS_WORDS = (None,) * (len(_MAX_TOKENS_WORDS) + 3)
_forms_asked = operator.attrgetter(*_FORM_WORDS)
_NO_FORM = (None,) * len(_FORM_WORDS)
"""Nearly all requests have none of these words, and are not looked at for each."""


def _is_unbounded(request: RequestBody) -> bool:
    return any(getattr(request, name) in values for name, values in _NO_BOUND.items())


def _agreed_max_tokens(request: RequestBody, *names: str) -> int | None:
    """What the names of one thing, and other servers' names of it, say. Raises InvalidRequest where two differ."""
    given: dict[str, int] = {}
    has_others = _others_words(request) != _NO_OTHERS_WORDS
    for name in (*names, *_MAX_TOKENS_WORDS) if has_others else names:
        value = getattr(request, name)
        if value is not None and value not in _NO_BOUND.get(name, ()):
            if name != "max_tokens":  # which is checked under its own name when the call is accepted
                check_integer(value, name, minimum=1, maximum=MAX_TOKENS_EVER)
            given[name] = value
    if given and has_others and _is_unbounded(request):
        raise InvalidRequest("one member bounds the answer and another asks for no bound", field=next(iter(given)))
    return _agreed(given)


def _agreed(given: Mapping[str, Value]) -> Value | None:
    """The value of members that mean the same; None where there are none. Raises InvalidRequest where two differ."""
    if not given:
        return None
    first, *others = given
    for name in others:
        if given[name] != given[first]:
            raise InvalidRequest(f"{first} and {name} mean the same and differ", field=name, code="invalid_value")
    return given[first]


def _add_others_words(given: dict[str, Any], request: RequestBody) -> None:
    """Adds what was asked for in the words of other servers, checked under the names that the client used."""
    if request.min_new_tokens is not None:
        check_integer(request.min_new_tokens, "min_new_tokens", minimum=0, maximum=MAX_TOKENS_EVER)
    if request.repeat_penalty is not None:
        check_positive_number(request.repeat_penalty, "repeat_penalty", MAX_REPETITION_PENALTY)
    for name, other in (("min_tokens", "min_new_tokens"), ("repetition_penalty", "repeat_penalty")):
        value = getattr(request, other)
        if value is not None:
            given[name] = _agreed({**({name: given[name]} if name in given else {}), other: value})


def _stop_texts(request: RequestBody) -> Sequence[str]:
    # An empty text asks for nothing, as elsewhere.
    stop = [request.stop] if isinstance(request.stop, str) and request.stop else request.stop or None
    asked = {"stop": stop, "stop_sequences": request.stop_sequences}
    return _agreed({name: texts for name, texts in asked.items() if texts is not None}) or ()


def _sampling(request: _ChoicesRequest, *, max_tokens: int | None, logprobs: int | None) -> AskedSampling:
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    if _others_words(request) != _NO_OTHERS_WORDS:
        _add_others_words(given, request)
    if request.top_p == 0:
        given["top_p"] = LEAST_TOP_P
    forms = _forms_asked(request)
    schema, form_field = (
        ("", "response_format") if forms == _NO_FORM else form_in(dict(zip(_FORM_WORDS, forms, strict=True)))
    )
    if request.prompt_logprobs is not None:
        _check_whole(request, "prompt_logprobs", field="prompt_logprobs")
    return AskedSampling(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop_texts(request),
        logit_bias=_logit_bias(request.logit_bias) if request.logit_bias else {},
        json_schema=schema,
        form_field=form_field,
        **given,
    )


def _check_whole(request: _ChoicesRequest, what: str, *, field: str) -> None:
    """Raises InvalidRequest for a stream: what is asked of the prompt comes with the whole answer only."""
    if request.stream:
        raise InvalidRequest(
            f"{what} needs stream to be false: log-probabilities of prompts come with whole answers",
            field=field,
            code="unsupported_parameter",
        )


_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
)


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    if len(biases) > MAX_LOGIT_BIASES:
        # Before a body full of them has been looked through.
        raise InvalidRequest(
            f"logit_bias has {len(biases)} entries; the most is {MAX_LOGIT_BIASES}", field="logit_bias"
        )
    converted = {}
    for key, bias in biases.items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise InvalidRequest("keys of logit_bias must be token ids", field="logit_bias", code="invalid_value")
        converted[int(key)] = bias
    if len(converted) != len(biases):
        raise InvalidRequest("two keys of logit_bias are one token id", field="logit_bias", code="duplicate_key")
    return converted


_TOKEN_ID = re.compile(r"-?[0-9]{1,12}")


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One or several prompts: a text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise prompt_form_error()
    kinds = set(map(type, prompt))
    if kinds == {str} or kinds == {list}:
        return prompt
    if str in kinds or list in kinds:
        raise prompt_form_error()
    return [prompt]


def _decode_strictly(body: bytes) -> dict[str, Any]:
    """The members of a JSON object, none of them twice. Raises InvalidRequest."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not valid UTF-8", code="invalid_encoding") from error
    try:
        members = _JSON.decode(text)
    except InvalidRequest:
        raise
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(members, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return members


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise InvalidRequest("a member of the body appears twice", code="duplicate_key")
    return members


def _refuse_constant(name: str) -> None:
    raise InvalidRequest(f"{name} is no JSON number", code="invalid_json")


_JSON = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


def _type_error(text: str) -> InvalidRequest:
    """Msgspec's words end with the path of the member, such as - at `$.temperature`."""
    what, _, path = text.partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    message = f"{field}: {what}" if field else what
    return InvalidRequest(message, field=field or None, code="invalid_type")


def _finite(logprob: float) -> float:
    """JSON has no -inf; OpenAI's API shows this for a token that was impossible."""
    return logprob if math.isfinite(logprob) else -9999.0


_encode = msgspec.json.Encoder().encode
