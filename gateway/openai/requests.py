"""Requests as OpenAI's clients write them: parsed strictly, and read for what they ask of sampling.

Knows the spelling that all generating routes share and nothing of serving them.
"""

import json
import operator
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.limits import (
    MAX_LOGIT_BIASES,
    check_affinity_key,
    check_cache_salt,
)
from gateway.models.response_format import form_in
from gateway.openai.vocabulary import ignored_members
from gateway.requests.call import Call
from gateway.types import AskedSampling
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import SamplingMembers, check_parameter, member_values

LEAST_TOP_P = 1e-6
"""What 0 stands for: the likeliest token alone is kept."""

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
"""What may be asked for; what is served is always `default`."""


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


class RequestBody(SamplingMembers, kw_only=True, metaclass=_AbstractStruct):
    """What all requests for answers have. None means absent, as OpenAI's clients send null for it."""

    model: str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Any] | None = None
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


class ChoicesRequest(RequestBody, kw_only=True):
    """What the APIs share whose answers are a list of choices."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    prompt_logprobs: int | None = None


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


def is_unbounded(request: RequestBody) -> bool:
    """Returns whether a member asks for as many tokens as fit."""
    return any(getattr(request, name) in values for name, values in _NO_BOUND.items())


def agreed_max_tokens(request: RequestBody, *names: str) -> int | None:
    """What the names of one thing, and other servers' names of it, say. Raises InvalidRequest where two differ."""
    given: dict[str, int] = {}
    has_others = _others_words(request) != _NO_OTHERS_WORDS
    for name in (*names, *_MAX_TOKENS_WORDS) if has_others else names:
        value = getattr(request, name)
        if value is not None and value not in _NO_BOUND.get(name, ()):
            if name != "max_tokens":  # which is checked under its own name when the call is accepted
                check_parameter("max_tokens", value, name)
            given[name] = value
    if given and has_others and is_unbounded(request):
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


def _add_others_words(asked: AskedSampling, request: RequestBody) -> None:
    """Adds what was asked for in the words of other servers, checked under the names that the client used."""
    for name, other in (("min_tokens", "min_new_tokens"), ("repetition_penalty", "repeat_penalty")):
        value = getattr(request, other)
        if value is not None:
            check_parameter(name, value, other)
            known = getattr(asked, name)
            setattr(asked, name, _agreed({other: value} if known is None else {name: known, other: value}))


def _stop_texts(request: RequestBody) -> Sequence[str]:
    # An empty text asks for nothing, as elsewhere.
    stop = [request.stop] if isinstance(request.stop, str) and request.stop else request.stop or None
    asked = {"stop": stop, "stop_sequences": request.stop_sequences}
    return _agreed({name: texts for name, texts in asked.items() if texts is not None}) or ()


def asked_sampling(request: ChoicesRequest, *, max_tokens: int | None, logprobs: int | None) -> AskedSampling:
    """Returns the sampling that the members ask for, unchecked but for its form. Raises InvalidRequest."""
    forms = _forms_asked(request)
    schema, form_field = (
        ("", "response_format") if forms == _NO_FORM else form_in(dict(zip(_FORM_WORDS, forms, strict=True)))
    )
    if request.prompt_logprobs is not None:
        check_whole(request, "prompt_logprobs", field="prompt_logprobs")
    asked = AskedSampling(
        *member_values(request),
        max_tokens=max_tokens,
        stop=_stop_texts(request),
        stop_token_ids=request.stop_token_ids or (),
        logit_bias=_logit_bias(request.logit_bias) if request.logit_bias else {},
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        json_schema=schema,
        form_field=form_field,
    )
    if asked.top_p == 0:
        asked.top_p = LEAST_TOP_P
    if _others_words(request) != _NO_OTHERS_WORDS:
        _add_others_words(asked, request)
    return asked


def check_whole(request: ChoicesRequest, what: str, *, field: str) -> None:
    """Raises InvalidRequest for a stream: what is asked of the prompt comes with the whole answer only."""
    if request.stream:
        raise InvalidRequest(
            f"{what} needs stream to be false: log-probabilities of prompts come with whole answers",
            field=field,
            code="unsupported_parameter",
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
