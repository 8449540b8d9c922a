"""Requests as OpenAI's clients write them: parsed strictly, and read for what they ask of sampling.

Knows the spelling that all generating routes share and nothing of serving them.
"""

import json
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from gateway.forms.tools import MAX_TOOLS
from gateway.limits import (
    DEFAULT_SERVICE_CLASS,
    MAX_AFFINITY_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SEQUENCES,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TOKEN_IDS,
    SERVICE_CLASSES,
    check_affinity_key,
    check_cache_salt,
)
from gateway.openai.shapes import (
    ABSENT,
    MESSAGE,
    PROMPT_LOGPROBS,
    RESPONSE_FORMAT,
    TOKEN_ID,
    TOOL,
    UP_TO_THE_CONTEXT,
    StopText,
    StopTexts,
    bounded,
    flag,
    list_of,
    said,
)
from gateway.openai.synonyms import Synonyms, add_synonyms, form_asked, stop_texts
from gateway.openai.vocabulary import ignored_members
from gateway.requests.call import Call
from gateway.types import AskedSampling
from gateway.wishes import MAX_MS
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import member_values

LEAST_TOP_P = 1e-6
"""The value that 0 stands for: the likeliest token alone is kept."""

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast", "standard_only")
"""The tiers that may be asked for; `default` is always served."""

MODEL = said("A name or alias from `/v1/models`. Needed where several models are served.")
TOOLS = said("Functions that the model may call.", items=TOOL, maxItems=MAX_TOOLS)
_TIMEOUT = (
    "The answer is needed within this time: what takes longer is refused, or ends with an error. "
    "Absent, or longer: `--max-request-s`."
)
_SERVICE_CLASS = {"enum": [*SERVICE_CLASSES, "", None], ABSENT: DEFAULT_SERVICE_CLASS}
_TokenId = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]{1,12}$"})]
_Bias = Annotated[float, Meta(extra_json_schema={"minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS})]


class StreamOptions(msgspec.Struct):
    """`stream_options` of both request types."""

    include_usage: Annotated[bool | None, flag("One more event at the end has the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, flag("Every event has the usage so far.")] = None
    include_obfuscation: Annotated[bool | None, said("False or absent: nothing is padded here.")] = None


class EffortOption(msgspec.Struct, kw_only=True):
    """`reasoning` of a chat request."""

    effort: str | None = None


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """The metaclass of bodies that are parts of others."""


class RequestBody(Synonyms, kw_only=True, metaclass=_AbstractStruct):
    """The members of all requests for answers. None means absent, as OpenAI's clients send null for it."""

    REQUIRED: ClassVar[tuple[str, ...]] = ()
    """The members without which a request is refused."""

    model: Annotated[str | None, MODEL] = None
    stop: Annotated[
        StopText | StopTexts | None,
        said(f"Generation ends before the first of these texts, each of at most {MAX_STOP_TEXT_BYTES} bytes."),
    ] = None
    stop_token_ids: Annotated[
        list[Any] | None,
        said(
            "Tokens that end the answer; they are counted and not shown.", items=TOKEN_ID, maxItems=MAX_STOP_TOKEN_IDS
        ),
    ] = None
    logit_bias: Annotated[
        dict[_TokenId, _Bias] | None, said("Added to the logits of these token ids.", maxProperties=MAX_LOGIT_BIASES)
    ] = None
    stream: Annotated[bool | None, flag("The answer comes as server-sent events.")] = None
    stream_options: Annotated[Any, said("Only with `stream`.")] = None
    priority: Annotated[
        int | None,
        bounded(
            "Requests with a higher one leave the queue sooner, with `--queue-strategy priority`.",
            -MAX_PRIORITY,
            MAX_PRIORITY,
            0,
        ),
    ] = None
    service_class: Annotated[
        str | None, said("What is at stake if it is late. Empty counts as absent.", **_SERVICE_CLASS)
    ] = None
    tenant: Annotated[
        str | None,
        said(
            "The tenant that pays: the key's own; admin keys may name another. Empty counts as absent.",
            pattern=f"^[A-Za-z0-9_.:-]{{0,{MAX_NAME_CHARS}}}$",
        ),
    ] = None
    user: Annotated[
        str | None,
        said("Requests that belong together: they go where their prompts' pages are.", maxLength=MAX_AFFINITY_CHARS),
    ] = None
    prompt_cache_key: Annotated[
        str | None, said("Requests that belong together, as `user`, which it wins over.", maxLength=MAX_AFFINITY_CHARS)
    ] = None
    service_tier: Annotated[str | None, said("Accepted; there is one tier.", enum=[*SERVICE_TIERS, None])] = None
    cache_salt: Annotated[
        str | None,
        said("Only requests with the same salt find each other's cached pages.", minLength=1, maxLength=MAX_NAME_CHARS),
    ] = None
    allow_fallback: Annotated[bool | None, said("Another model may answer. Absent: as the key says.")] = None
    request_timeout_ms: Annotated[int | None, bounded(_TIMEOUT, 1, MAX_MS)] = None

    @abstractmethod
    def call(self) -> Call:
        """Returns the call that it asks for. Raises InvalidRequest."""

    def left_out(self) -> list[str]:
        """Returns the names of members whose values are partly ignored."""
        return []


class ChoicesRequest(RequestBody, kw_only=True):
    """The members of requests whose answers are a list of choices."""

    max_tokens: Annotated[int | None, UP_TO_THE_CONTEXT] = None
    n: Annotated[
        int | None, bounded(f"Answers to each prompt; {MAX_SEQUENCES} over all prompts.", 1, MAX_CHOICES, 1)
    ] = None
    stream_options: Annotated[StreamOptions | None, said("Only with `stream`.")] = None
    return_token_ids: Annotated[
        bool | None, flag("Adds `token_ids` to each choice, and `prompt_token_ids`; in streams to the first event.")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, flag("Log-probabilities name tokens by their ids, as `token_id:5`.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        said(
            "Only this many tokens of a prompt are kept, its last; -1: as many as fit into the context.",
            minimum=-1,
            **{"not": {"const": 0}},
        ),
    ] = None
    response_format: Annotated[
        Any,
        said(
            f"The form of the answer. A schema has at most {MAX_SCHEMA_BYTES} bytes and {MAX_SCHEMA_DEPTH} levels.",
            anyOf=RESPONSE_FORMAT,
        ),
    ] = None
    prompt_logprobs: Annotated[int | None, PROMPT_LOGPROBS] = None

    def begun_call(self, operation: str, sampling: AskedSampling) -> Call:
        """Returns the call as far as it does not depend on what its prompt is made of."""
        return Call(
            operation=operation,
            sampling=sampling,
            model=self.model,
            num_choices=1 if self.n is None else self.n,
            priority=0 if self.priority is None else self.priority,
            service_class=self.service_class or "",
            tenant=self.tenant or "",
            affinity_key=self.prompt_cache_key or self.user or "",
            cache_salt=self.cache_salt or "",
            allow_fallback=self.allow_fallback,
            most_prompt_tokens=self._most_prompt_tokens(),
        )

    def _most_prompt_tokens(self) -> int | None:
        most = self.truncate_prompt_tokens
        if most is not None and most != -1 and most < 1:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1", field="truncate_prompt_tokens", code="invalid_value"
            )
        return most


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: one of `prompt`, `content` and `messages`, which become the tokens of a chat's prompt."""

    model: Annotated[str | None, MODEL] = None
    prompt: Annotated[str | None, said("A text. Either this, `content` or `messages`.")] = None
    messages: Annotated[list[Any] | None, said("A conversation.", **list_of(MESSAGE, MAX_MESSAGES))] = None
    tools: Annotated[list[Any] | None, TOOLS] = None
    add_special_tokens: Annotated[
        bool | None, flag("Those of the tokenizer's post-processor; not with `messages`.", default=True)
    ] = None
    add_generation_prompt: Annotated[
        bool | None, said("As of chats, and absent: true, unless the last message is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, said("As of chats.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, said("As of chats.")] = None
    return_token_strs: Annotated[bool | None, flag("Adds `token_strs`, the text of each token.")] = None
    content: Annotated[str | None, said("llama.cpp's name of `prompt`, without special tokens.")] = None
    add_special: Annotated[
        bool | None, flag("llama.cpp's name of `add_special_tokens`, with `content`.", default=False)
    ] = None
    with_pieces: Annotated[
        bool | None, flag("`tokens` are objects of `id` and `piece`, a text or, of half a character, its bytes.")
    ] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("tokens",)

    model: Annotated[str | None, MODEL] = None
    tokens: Annotated[list[Any] | None, said("Token ids.", items=TOKEN_ID)] = None


Body = TypeVar("Body", bound=RequestBody)
Members = TypeVar("Members", bound=msgspec.Struct)


def parse_members(body: bytes, body_type: type[Members]) -> tuple[Members, list[str]]:
    """Returns the body, checked by its type alone, and the names of ignored members. Raises InvalidRequest."""
    return _converted(_decode_strictly(body), body_type)


def parse(body: bytes, body_type: type[Body]) -> tuple[Body, list[str]]:
    """Returns the request and the names of ignored members. Raises InvalidRequest that names the member."""
    return _parsed(_decode_strictly(body), body_type)


def parse_named(body: bytes, body_type: type[Body]) -> tuple[Body, list[str], bytes]:
    """Returns what `parse` does, and the body without the white space and order of members that it came with."""
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


def asked_sampling(request: ChoicesRequest, *, max_tokens: int | None, logprobs: int | None) -> AskedSampling:
    """Returns the sampling that the members ask for, unchecked but for its form. Raises InvalidRequest."""
    schema, form_field = form_asked(request)
    if request.prompt_logprobs is not None:
        check_whole(request, "prompt_logprobs", field="prompt_logprobs")
    asked = AskedSampling(
        *member_values(request),
        max_tokens=max_tokens,
        stop=stop_texts(request.stop, request),
        stop_token_ids=request.stop_token_ids or (),
        logit_bias=_logit_bias(request.logit_bias) if request.logit_bias else {},
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        json_schema=schema,
        form_field=form_field,
    )
    if asked.top_p is not None and 0 <= asked.top_p < LEAST_TOP_P:
        asked.top_p = LEAST_TOP_P
    add_synonyms(asked, request)
    return asked


def check_whole(request: ChoicesRequest, what: str, *, field: str) -> None:
    """Raises InvalidRequest for a stream: log-probabilities of prompts come with whole answers only."""
    if request.stream:
        raise InvalidRequest(
            f"{what} needs stream to be false: log-probabilities of prompts come with whole answers",
            field=field,
            code="unsupported_parameter",
        )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    if len(biases) > MAX_LOGIT_BIASES:
        # Refused before each of them is checked.
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
    """Returns the members of a JSON object, each of which appears once. Raises InvalidRequest."""
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
    """Returns the error for a message of msgspec's, which ends with the path of the member: - at `$.temperature`."""
    what, _, path = text.partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    message = f"{field}: {what}" if field else what
    return InvalidRequest(message, field=field or None, code="invalid_type")
