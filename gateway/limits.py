"""All limits and ranges of a request, and their checks; used by both APIs.

Knows no HTTP, protobuf or tokenizer. Every failure is an InvalidRequest that names the field in the words of the API
that was used: the HTTP bridge's names, or the gRPC names, which begin with `sampling.`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.types import AskedSampling, Sampling
from services.runtime.bounds import Bounds, invalid_value
from services.runtime.errors import InvalidRequest
from services.runtime.sampling import MEMBERS, check_numbers, completed_members
from services.scheduling.entry import ServiceClass
from services.structured.form import AnswerForm

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_BODY_READ_S = 30.0
MAX_UPLOAD_S = 120.0
"""The time for a body that is a file."""
MAX_MESSAGES = 2048
MAX_CHOICES = 16
"""Answers to one prompt."""
MAX_SEQUENCES = 128
"""Answers of one call: prompts times choices."""
MAX_INPUTS = 2048
"""Texts of one call that are embedded."""
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PROMPT_LOGPROBS = 100_000
"""The most for all tokens of a prompt together: some megabytes, which travel with the first token."""
MAX_PRIORITY = 100
MAX_NAME_CHARS = 64
MAX_KEY_CHARS = 255
MAX_AFFINITY_CHARS = 256
MAX_TOKENIZE_CHARS = 2**20
SLOW_REQUEST_S = 10.0
"""The log says where the time went of a request that takes longer."""
MAX_SCHEMA_BYTES = 64 * 1024
"""The size of a JSON schema for the answer, without white space."""
MAX_SCHEMA_DEPTH = 64
"""The nesting of objects and lists in such a schema; an object's member is two levels below the object."""
SERVICE_CLASSES = tuple(one.name.lower() for one in ServiceClass)
"""From the most to the least urgent."""
DEFAULT_SERVICE_CLASS = ServiceClass.NORMAL.name.lower()

GRPC_PREFIX = "sampling."

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_BIAS = Bounds(float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
_CHOICES = Bounds(int, 1, MAX_CHOICES)
_PRIORITY = Bounds(int, -MAX_PRIORITY, MAX_PRIORITY)
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The bounds that a served model sets. `context_length_tokens` counts prompt and answer together."""

    vocab_size: int
    context_length_tokens: int


def check_sampling(asked: AskedSampling | Sampling, limits: ModelLimits, *, prefix: str = "") -> None:
    """Checks all values that do not depend on the prompt. `prefix` begins the field names in errors."""
    check_numbers(asked, prefix=prefix)
    if asked.stop:
        _check_stop_texts(asked.stop, prefix + "stop")
    if asked.stop_token_ids:
        _check_count(asked.stop_token_ids, prefix + "stop_token_ids", MAX_STOP_TOKEN_IDS)
        check_token_ids(asked.stop_token_ids, limits, field_name=prefix + "stop_token_ids")
    if asked.logit_bias:
        _check_logit_bias(asked.logit_bias, limits, prefix + "logit_bias")
    if isinstance(asked, Sampling):
        if asked.form is not None:
            is_free = asked.form.may_be_text
            check_with_form(asked, asked.form.num_bytes, prefix=prefix, may_be_text=is_free)
    elif asked.json_schema:
        check_with_form(asked, len(asked.json_schema.encode()), prefix=prefix, field_name=asked.form_field)


def complete_sampling(
    asked: AskedSampling,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    seed: int,
    form: AnswerForm | None = None,
    field_name: str = "prompt",
) -> Sampling:
    """Returns the final sampling of one answer.

    `form` is what becomes of `asked.json_schema`. Raises InvalidRequest with the code context_length_exceeded where the
    answer cannot fit; `field_name` is what the error calls the prompt.
    """
    room = limits.context_length_tokens - num_prompt_tokens
    max_tokens = room if asked.max_tokens is None else asked.max_tokens
    min_tokens = asked.min_tokens or 0
    if room < 1 or max_tokens > room or min_tokens > max_tokens:
        num_wanted = max(asked.max_tokens or 1, min_tokens)
        raise _context_length_exceeded(num_prompt_tokens, num_wanted, limits, field_name)
    members = completed_members(asked)
    members[_SEED] = seed
    if not 0 < members[_TOP_K] < limits.vocab_size:
        members[_TOP_K] = 0
    return Sampling(
        *members,
        max_tokens=max_tokens,
        # Calls that must be made are not text, in which a stop text could appear.
        stop=() if form is not None and form.is_calls_only else tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        logit_bias=asked.logit_bias,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        form=form,
    )


_SEED, _TOP_K = MEMBERS.index("seed"), MEMBERS.index("top_k")


def check_prompt_logprobs(asked: AskedSampling, *, num_shown_tokens: int, field_name: str) -> None:
    """Raises InvalidRequest if a call whose answers show `num_shown_tokens` of prompts would show too much of them."""
    num_entries = num_shown_tokens * (1 + (asked.prompt_logprobs or 0))
    if asked.prompt_logprobs is not None and num_entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field_name} asks for {num_entries} log-probabilities of prompts; the most is {MAX_PROMPT_LOGPROBS} in "
            "all answers of a call together",
            field=field_name,
            code="invalid_value",
        )


def check_with_form(
    asked: AskedSampling | Sampling,
    num_schema_bytes: int,
    *,
    prefix: str = "",
    field_name: str = "response_format",
    may_be_text: bool = False,
) -> None:
    """Raises InvalidRequest for parameters that contradict a form: such an answer ends where the form does.

    `field_name` is the member that asks for the form. With `may_be_text` the answer may also be a text, which ends as
    every text does.
    """
    if num_schema_bytes > MAX_SCHEMA_BYTES:
        asked_by = "response_format" if field_name in ("tools", "tool_choice") else field_name
        raise InvalidRequest(
            f"the schemas of {asked_by} and of tools must have at most {MAX_SCHEMA_BYTES} bytes together",
            field=field_name,
        )
    for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
        if getattr(asked, name):
            what = "strict tools" if may_be_text else f"this {field_name}"
            raise InvalidRequest(
                f"{prefix}{name} cannot be used with {what}: the answer ends where its form does",
                field=prefix + name,
                code="unsupported_parameter",
            )


def prompt_form_error() -> InvalidRequest:
    """Returns the error for a prompt that has none of the forms that a prompt may have."""
    return InvalidRequest(
        "prompt must be a text, token ids, or a list of either, and not empty", field="prompt", code="invalid_value"
    )


def check_prompt_token_ids(token_ids: Sequence[int], limits: ModelLimits, *, field_name: str) -> None:
    """Checks that a prompt has a token, that each token is in the vocabulary, and that room is left for an answer."""
    if not token_ids:
        raise InvalidRequest(f"{field_name} is empty; at least one token is needed", field=field_name)
    if len(token_ids) >= limits.context_length_tokens:
        raise _context_length_exceeded(len(token_ids), 1, limits, field_name)
    check_token_ids(token_ids, limits, field_name=field_name)


def check_token_ids(token_ids: Sequence[Any], limits: ModelLimits, *, field_name: str) -> None:
    """Checks that each is an integer in the vocabulary; true, 1.0 and "1" are not."""
    if set(map(type, token_ids)) <= {int} and (not token_ids or _is_within(token_ids, limits.vocab_size)):
        return
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < limits.vocab_size:
            rule = f"a token id in [0, {limits.vocab_size})"
            raise invalid_value(f"{field_name}[{position}]", token_id, rule, field_name=field_name)


def check_text(text: str, *, field_name: str, max_chars: int | None = None) -> None:
    """Checks that a text can be encoded as UTF-8, and that it has at most `max_chars` characters."""
    if max_chars is not None:
        _check_num_chars(len(text), max_chars, field_name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field_name} holds half of a surrogate pair, which is no text", field=field_name, code="invalid_encoding"
        ) from error


def check_text_to_count(text: str, *, field_name: str, max_chars: int) -> None:
    """Checks a text that is turned into tokens and not answered, so that no model's context bounds it."""
    if len(text) > max_chars:
        raise InvalidRequest(
            f"{field_name} has {len(text)} characters but must have at most {max_chars}",
            field=field_name,
            code="string_above_max_length",
        )
    check_text(text, field_name=field_name)


def check_messages(messages: Sequence[Mapping[str, Any]], *, max_chars: int) -> list[dict[str, Any]]:
    """Returns checked chat messages, each content as one string; parts of a list are joined by line breaks."""
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed", field="messages")
    _check_count(messages, "messages", MAX_MESSAGES)
    check_are_objects(messages)
    checked = [_checked_message(message, f"messages[{n}]") for n, message in enumerate(messages)]
    _check_num_chars(sum(len(message["content"]) for message in checked), max_chars, "messages")
    return checked


def check_are_objects(messages: Sequence[Any]) -> None:
    """Raises InvalidRequest for a message that is not an object. Messages are read before they are checked in full."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{number}] must be an object", field="messages")


def check_num_choices(n: int, *, num_prompts: int = 1) -> None:
    """Checks the number of answers to each of the prompts."""
    _CHOICES.check(n, "n")
    if n * num_prompts > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} are too many answers for one call; the most is {MAX_SEQUENCES}",
            field="prompt",
        )


def check_num_inputs(num_inputs: int, *, field_name: str) -> None:
    """Checks the number of texts that one call has embedded."""
    if not 1 <= num_inputs <= MAX_INPUTS:
        rule = f"must have 1 to {MAX_INPUTS} texts"
        raise InvalidRequest(f"{field_name} has {num_inputs} texts; it {rule}", field=field_name, rule=rule)


def check_name(name: str, *, field_name: str) -> None:
    """Checks the name of a request or a tenant: 1 to 64 characters of [A-Za-z0-9_.:-]."""
    if _NAME.fullmatch(name) is None:
        rule = f"1 to {MAX_NAME_CHARS} characters of [A-Za-z0-9_.:-]"
        raise InvalidRequest(f"{field_name} must be {rule}", field=field_name, rule=f"must be {rule}")


def check_idempotency_key(key: str) -> None:
    """Checks an idempotency key: 1 to 255 printable ASCII characters."""
    if _KEY.fullmatch(key) is None:
        rule = f"1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise InvalidRequest(f"the idempotency key must be {rule}", field="Idempotency-Key", code="invalid_value")


def check_permission(text: str, *, field_name: str) -> bool:
    """Returns what a header says: `true` or `false`."""
    if text not in ("true", "false"):
        raise InvalidRequest(f"{field_name} must be true or false", field=field_name, code="invalid_value")
    return text == "true"


def check_short_text(text: str, *, field_name: str) -> None:
    """Checks an identifier that is only passed along: at most 64 characters."""
    if len(text) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{field_name} must have at most {MAX_NAME_CHARS} characters", field=field_name)


def check_cache_salt(salt: str) -> None:
    """Checks the salt of cached pages: 1 to 64 characters of any kind."""
    if not 1 <= len(salt) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"cache_salt must have 1 to {MAX_NAME_CHARS} characters", field="cache_salt")
    check_text(salt, field_name="cache_salt")


def check_priority(priority: int) -> None:
    """Checks that a priority is in [-100, 100]."""
    _PRIORITY.check(priority, "priority")


def check_service_class(name: str) -> None:
    """Checks that a class is one of SERVICE_CLASSES."""
    if name not in SERVICE_CLASSES:
        rule = f"one of {', '.join(SERVICE_CLASSES)}"
        raise InvalidRequest(
            f"service_class must be {rule}", field="service_class", code="invalid_value", rule=f"must be {rule}"
        )


def check_affinity_key(key: str, *, field_name: str) -> None:
    """Checks the name of a session or a user: 1 to 256 characters."""
    if not 1 <= len(key) <= MAX_AFFINITY_CHARS:
        raise InvalidRequest(f"{field_name} must have 1 to {MAX_AFFINITY_CHARS} characters", field=field_name)
    check_text(key, field_name=field_name)


def check_integer(value: Any, field_name: str, *, minimum: int, maximum: int) -> None:
    """Checks that a value is an integer in [minimum, maximum]; true and 1.0 are not."""
    Bounds(int, minimum, maximum).check(value, field_name)


def _is_within(token_ids: Sequence[int], vocab_size: int) -> bool:
    return min(token_ids) >= 0 and max(token_ids) < vocab_size


def _check_num_chars(num_chars: int, max_chars: int, field_name: str) -> None:
    """Checks a text before it is tokenized, so that an endless one costs nothing."""
    if num_chars > max_chars:
        raise InvalidRequest(
            # In words that LiteLLM looks for, which does not see the code.
            f"{field_name} has {num_chars} characters and is longer than the model's context length: "
            f"at most {max_chars} can fit",
            field=field_name,
            code="context_length_exceeded",
            rule=f"at most {max_chars} characters",
        )


def _check_stop_texts(stops: Sequence[Any], field_name: str) -> None:
    _check_count(stops, field_name, MAX_STOP_TEXTS)
    for position, stop in enumerate(stops):
        name = f"{field_name}[{position}]"
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest(f"{name} must be a text that is not empty", field=field_name)
        check_text(stop, field_name=name)
        if len(stop.encode()) > MAX_STOP_TEXT_BYTES:
            raise InvalidRequest(f"{name} must have at most {MAX_STOP_TEXT_BYTES} bytes", field=field_name)


def _check_logit_bias(biases: Mapping[Any, Any], limits: ModelLimits, field_name: str) -> None:
    _check_count(biases, field_name, MAX_LOGIT_BIASES)
    for token_id, bias in biases.items():
        if type(token_id) is not int or not 0 <= token_id < limits.vocab_size:
            raise invalid_value(
                f"a key of {field_name}", token_id, f"a token id in [0, {limits.vocab_size})", field_name
            )
        if not _BIAS.admits(bias):
            raise invalid_value(f"{field_name}[{token_id}]", bias, _BIAS.rule, field_name)


def _check_count(values: Sequence[Any] | Mapping[Any, Any], field_name: str, most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(
            f"{field_name} has {len(values)} entries; the most is {most}",
            field=field_name,
            rule=f"at most {most} entries",
        )


def _checked_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(sorted(_ROLES))}", field=f"{name}.role")
    for unserved in ("tool_calls", "function_call", "audio"):
        if message.get(unserved):
            raise InvalidRequest(
                f"{name}.{unserved} is not supported by this server",
                field=f"{name}.{unserved}",
                code="unsupported_parameter",
            )
    checked = {"role": role, "content": _content_text(message.get("content"), role, f"{name}.content")}
    sender = message.get("name")
    if sender is not None:
        if not isinstance(sender, str):
            raise InvalidRequest(f"{name}.name must be a text", field=f"{name}.name")
        check_text(sender, field_name=f"{name}.name")
        check_short_text(sender, field_name=f"{name}.name")
        checked["name"] = sender
    return checked


def _content_text(content: Any, role: str, name: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        check_text(content, field_name=name)
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{name} must be a text or a list of text parts", field=name)
    texts = []
    for position, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f'{name}[{position}] must be {{"type": "text", "text": …}}; this model takes text only',
                field=f"{name}[{position}]",
            )
        check_text(part["text"], field_name=f"{name}[{position}]")
        texts.append(part["text"])
    return "\n".join(texts)


def _context_length_exceeded(
    num_prompt_tokens: int, max_tokens: int, limits: ModelLimits, field_name: str
) -> InvalidRequest:
    """Returns the error in the words that OpenAI's clients look for."""
    return InvalidRequest(
        f"This model's maximum context length is {limits.context_length_tokens} tokens, but the prompt has "
        f"{num_prompt_tokens} and at least {max_tokens} were asked for. Shorten the prompt or lower max_tokens.",
        field=field_name,
        code="context_length_exceeded",
        rule=f"prompt and answer have at most {limits.context_length_tokens} tokens",
    )
