"""What each field of a request means: a sentence, its default, its bounds. For the OpenAPI document and docs/api.md.

The bounds are those that `gateway.limits` checks; nothing is checked here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.batches.rows import ENDPOINTS as BATCH_ENDPOINTS
from gateway.limits import (
    DEFAULT_SERVICE_CLASS,
    MAX_AFFINITY_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SEQUENCES,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
    SERVICE_CLASSES,
)
from gateway.models.template_words import MAX_WORDS as MAX_TEMPLATE_WORDS
from gateway.models.tools import MAX_TOOL_DEPTH, MAX_TOOLS
from gateway.openai.completions import DEFAULT_COMPLETION_TOKENS
from gateway.openai.requests import SERVICE_TIERS
from gateway.openai.responses_request import MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS
from gateway.wishes import MAX_MS
from services.runtime.sampling import MAX_TOKENS_EVER, PARAMETERS, SamplingMembers
from services.structured.grammar_text import MAX_CHOICES as MAX_CHOICE_TEXTS
from services.structured.lark import MAX_CALLS

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
"""How one schema of the document names another."""
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS_EVER}
"""The least that every vocabulary keeps to; a served model's own size is in no document."""
NAME_PATTERN = f"^[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}$"
FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}$"}


@dataclass(frozen=True)
class Field:
    """`schema` adds to what the field's type says, or replaces it. `is_required`: a request without it is refused."""

    meaning: str
    schema: Schema = field(default_factory=dict)
    is_required: bool = False


def _bounded(meaning: str, minimum: float, maximum: float, default: Any = None) -> Field:
    schema: Schema = {"minimum": minimum, "maximum": maximum}
    return Field(meaning, schema if default is None else {**schema, "default": default})


def _parameter(name: str, end: str = ".") -> Field:
    """A parameter of sampling as its row describes it; `end` ends the sentence."""
    parameter = PARAMETERS[name]
    schema: Schema = {} if parameter.bounds is None else parameter.bounds.schema
    return Field(
        parameter.meaning + end, schema if parameter.default is None else {**schema, "default": parameter.default}
    )


def _as_parameter(name: str, meaning: str, **more: Any) -> Field:
    """Another name for a parameter of sampling, with the same bounds. `more` adds to them or replaces them."""
    bounds = PARAMETERS[name].bounds
    assert bounds is not None
    return Field(meaning, {**bounds.schema, **more})


def _flag(meaning: str, default: bool = False) -> Field:
    return Field(meaning, {"default": default})


def _list_of(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_EARLIER_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME_CHARS},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": FUNCTION_NAME, "arguments": {"type": "string", "description": "A JSON object."}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_MESSAGE: Schema = {
    "type": "object",
    "description": "One message. Only an assistant's may do without `content`; parts are joined by line breaks.",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}, {"type": "null"}]
        },
        "name": {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS},
        "tool_calls": {"type": ["array", "null"], "items": _EARLIER_CALL, "maxItems": MAX_CALLS},
        "tool_call_id": {
            "type": ["string", "null"],
            "description": "Of a tool, where it is needed: the id of a call of an assistant's message before it.",
        },
        "reasoning_content": {"description": "Of an assistant: a text."},
    },
    "required": ["role"],
}
_TOOL: Schema = {
    "type": "object",
    "description": f"A function that the model may call; nested at most {MAX_TOOL_DEPTH} deep.",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": FUNCTION_NAME,
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                "strict": {
                    "description": "The arguments keep to `parameters`, where one token of the model begins calls."
                },
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_METADATA: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
    "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
    "maxProperties": MAX_METADATA,
}
_CREATE_BATCH: Schema = {
    "type": "object",
    "description": "Body of POST /v1/batches.",
    "properties": {
        "input_file_id": {"type": "string", "description": "A file with the purpose `batch`."},
        "endpoint": {"type": "string", "enum": sorted(BATCH_ENDPOINTS), "description": "What every row asks."},
        "completion_window": {"type": "string", "enum": ["24h"]},
        "metadata": _METADATA,
        "output_expires_after": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"anchor": {"const": "created_at"}, "seconds": {"type": "integer"}},
                    "required": ["anchor", "seconds"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        },
    },
    "required": ["input_file_id", "endpoint", "completion_window"],
    "additionalProperties": False,
}
SHARED_SCHEMAS: Mapping[str, Schema] = {"Message": _MESSAGE, "Tool": _TOOL, "CreateBatch": _CREATE_BATCH}
"""Parts of requests that are checked by hand and have no type."""
_NAMED_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": FUNCTION_NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED_FUNCTION,
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": _list_of(_NAMED_FUNCTION, MAX_TOOLS),
                    },
                    "required": ["mode", "tools"],
                },
            },
            "required": ["type", "allowed_tools"],
        },
        {"type": "null"},
    ]
}
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": {"type": ["object", "null"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "regex"}, "pattern": {"type": "string"}},
            "required": ["type", "pattern"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "grammar"}, "grammar": {"type": "string"}},
            "required": ["type", "grammar"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}$"},
                        "schema": {"type": "object"},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["name", "schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {"type": "null"},
    ]
}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        _list_of({"type": "string"}, MAX_SEQUENCES),
        {"type": "array", "items": TOKEN_ID, "minItems": 1},
        _list_of({"type": "array", "items": TOKEN_ID, "minItems": 1}, MAX_SEQUENCES),
    ]
}
_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_TEXT_BYTES}

_FITS = ". Absent: what fits into the context."

FIELDS: Mapping[str, Field] = {
    "model": Field("A name or alias from `/v1/models`. Needed where several models are served."),
    "prompt": Field(
        f"A text, token ids, or a list of either: each gets its answers, {MAX_SEQUENCES} in all.",
        _PROMPT,
        is_required=True,
    ),
    "messages": Field("The conversation.", _list_of(_ref("Message"), MAX_MESSAGES), is_required=True),
    **{name: _parameter(name) for name in SamplingMembers.__struct_fields__},
    "top_p": Field(
        f"{PARAMETERS['top_p'].meaning}; 0: the likeliest alone.", {"minimum": 0, "maximum": 1, "default": 1}
    ),
    "max_tokens": _parameter("max_tokens", _FITS),
    "CompletionRequest.max_tokens": _as_parameter(
        "max_tokens", f"{PARAMETERS['max_tokens'].meaning}.", default=DEFAULT_COMPLETION_TOKENS
    ),
    "max_completion_tokens": _as_parameter("max_tokens", "The newer name of `max_tokens`."),
    "n": _bounded(f"Answers to each prompt; {MAX_SEQUENCES} over all prompts.", 1, MAX_CHOICES, 1),
    "stop": Field(
        f"Generation ends before the first of these texts, each of at most {MAX_STOP_TEXT_BYTES} bytes.",
        {
            "anyOf": [
                {"type": "string", "maxLength": MAX_STOP_TEXT_BYTES},
                {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_TEXTS},
                {"type": "null"},
            ]
        },
    ),
    "stop_token_ids": Field(
        "Tokens that end the answer; they are counted and not shown.",
        {"items": TOKEN_ID, "maxItems": MAX_STOP_TOKEN_IDS},
    ),
    "logit_bias": Field(
        "Added to the logits of these token ids.",
        {
            "propertyNames": {"pattern": "^[0-9]{1,12}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
            "maxProperties": MAX_LOGIT_BIASES,
        },
    ),
    "stream": _flag("The answer comes as server-sent events."),
    "stream_options": Field("Only with `stream`."),
    "include_usage": _flag("One more event at the end has the usage."),
    "continuous_usage_stats": _flag("Every event has the usage so far."),
    "priority": _bounded(
        "Who waits with a higher one goes sooner, with `--queue-strategy priority`.", -MAX_PRIORITY, MAX_PRIORITY, 0
    ),
    "service_class": Field(
        "What is at stake if it is late. Empty counts as absent.",
        {"enum": [*SERVICE_CLASSES, "", None], "default": DEFAULT_SERVICE_CLASS},
    ),
    "tenant": Field(
        "Whom it is accounted to: the key's own; admin keys may name another. Empty counts as absent.",
        {"pattern": f"^[A-Za-z0-9_.:-]{{0,{MAX_NAME_CHARS}}}$"},
    ),
    "return_token_ids": _flag("Adds `token_ids` to each choice."),
    "user": Field(
        "Requests that belong together: they go where their prompts' pages are.", {"maxLength": MAX_AFFINITY_CHARS}
    ),
    "cache_salt": Field(
        "Only requests with the same salt find each other's cached pages.",
        {"minLength": 1, "maxLength": MAX_NAME_CHARS},
    ),
    "allow_fallback": Field("Another model may answer. Absent: as the key says."),
    "request_timeout_ms": Field(
        "The answer is needed within this time: what takes longer is refused, or ends with an error. "
        "Absent, or longer: `--max-request-s`.",
        {"minimum": 1, "maximum": MAX_MS},
    ),
    "response_format": Field(
        f"The form of the answer. A schema has at most {MAX_SCHEMA_BYTES} bytes and {MAX_SCHEMA_DEPTH} levels.",
        _RESPONSE_FORMAT,
    ),
    **{
        name: _as_parameter("max_tokens", f"{whose} name of `max_tokens`{unless}.", minimum=least)
        for name, whose, least, unless in (
            ("max_new_tokens", "SGLang's", 1, ""),
            ("max_tokens_to_sample", "An older", 1, ""),
            ("n_predict", "llama.cpp's", -2, "; below 0: what fits into the context"),
            ("num_predict", "Ollama's", -2, "; below 0: what fits into the context"),
        )
    },
    "min_new_tokens": _as_parameter("min_tokens", "SGLang's name of `min_tokens`."),
    "repeat_penalty": _as_parameter("repetition_penalty", "llama.cpp's name of `repetition_penalty`."),
    "stop_sequences": Field("Anthropic's name of `stop`.", {"items": _STOP_TEXT, "maxItems": MAX_STOP_TEXTS}),
    "regex": Field("The answer matches this regular expression as a whole.", {"minLength": 1}),
    "grammar": Field(
        "The answer keeps to this grammar, in llguidance's form of Lark, or in that of llama.cpp and XGrammar, whose "
        "rules have `::=`."
    ),
    "ebnf": Field("SGLang's name of `grammar`."),
    "json_schema": Field("The answer keeps to this JSON schema: an object, or the text of one."),
    "structured_outputs": Field(
        "vLLM's object with one of `json`, `json_object`, `regex`, `choice`, `grammar`.",
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "json": {"type": ["object", "string", "null"]},
                        "json_object": {"type": ["boolean", "null"]},
                        "regex": {"type": ["string", "null"]},
                        "choice": {"type": ["array", "null"], "items": {"type": "string"}},
                        "grammar": {"type": ["string", "null"]},
                    },
                },
                {"type": "null"},
            ]
        },
    ),
    "guided_json": Field("vLLM's older name of `json_schema`."),
    "guided_regex": Field("vLLM's older name of `regex`.", {"minLength": 1}),
    "guided_choice": Field(
        "The answer is one of these texts.",
        {"items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICE_TEXTS},
    ),
    "guided_grammar": Field("vLLM's older name of `grammar`."),
    "logprobs": _flag("Log-probabilities of the answer's tokens."),
    "CompletionRequest.logprobs": _parameter("logprobs"),
    "prompt_logprobs": _parameter(
        "prompt_logprobs", f", {MAX_PROMPT_LOGPROBS} in all answers together; not for streams or named requests."
    ),
    "top_logprobs": _as_parameter("logprobs", "So many likeliest tokens at each place; needs `logprobs`."),
    "best_of": Field("Only with the value of `n`."),
    "echo": _flag("The prompt's text comes before the answer; with `logprobs` its tokens' too, but not in a stream."),
    "tools": Field("Functions that the model may call.", {"items": _ref("Tool"), "maxItems": MAX_TOOLS}),
    "tool_choice": Field(
        "`required`, a function, or some of them: the answer is calls whose arguments keep to `parameters`.",
        _TOOL_CHOICE,
    ),
    "parallel_tool_calls": _flag("False: one call, or with `auto` the first of an answer.", default=True),
    "chat_template_kwargs": Field(
        "Told to the chat template, such as `enable_thinking`: short texts, numbers, flags. Those that it has no "
        "name for are ignored by name.",
        {"maxProperties": MAX_TEMPLATE_WORDS},
    ),
    "enable_thinking": Field("As in `chat_template_kwargs`."),
    "ChatRequest.reasoning_effort": Field("As in `chat_template_kwargs`; `none` asks for nothing."),
    "ChatRequest.reasoning": Field("`effort` is `reasoning_effort`."),
    "verbosity": Field("As in `chat_template_kwargs`; `medium` asks for nothing."),
    "TokenizeRequest.prompt": Field("A text. Either this or `messages`."),
    "TokenizeRequest.messages": Field(
        "A conversation.", {"items": _ref("Message"), "minItems": 1, "maxItems": MAX_MESSAGES}
    ),
    "prompt_cache_key": Field(
        "Requests that belong together, as `user`, which it wins over.", {"maxLength": MAX_AFFINITY_CHARS}
    ),
    "service_tier": Field("Accepted; there is one tier.", {"enum": [*SERVICE_TIERS, None]}),
    "include_obfuscation": Field("False or absent: nothing is padded here."),
    "input": Field(
        "A text, or a list of items: messages, calls of functions, their outputs, reasoning.",
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
        is_required=True,
    ),
    "instructions": Field("A system message before the input."),
    "max_output_tokens": _parameter("max_tokens", _FITS),
    "max_tool_calls": Field("Of tools that run on a server, of which there are none."),
    "text": Field("`format` is the form of the answer, as `response_format` of chats; `verbosity` as of chats."),
    "reasoning": Field("`effort` is told to the chat template as `reasoning_effort`, where it knows that."),
    "include": Field("`message.output_text.logprobs`, `reasoning.encrypted_content`."),
    "metadata": Field("Given back.", _METADATA),
    "store": Field("Nothing is stored, whatever it says."),
    "safety_identifier": Field("Given back.", {"maxLength": MAX_AFFINITY_CHARS}),
    "ResponsesRequest.tools": Field("Functions that the model may call: type, name, description, parameters.", {}),
    "ResponsesRequest.tool_choice": Field("As of chats, in the words of this API."),
    "ResponsesRequest.top_logprobs": _as_parameter("logprobs", "So many likeliest tokens at each place."),
    **{
        f"ResponsesRequest.{name}": Field("Refused: the message says what to use instead.")
        for name in (
            *("background", "context_management", "conversation", "moderation", "previous_response_id", "prompt"),
            *("truncation", "max_completion_tokens", "max_tokens", "messages", "n", "reasoning_effort"),
            "response_format",
        )
    },
    "add_special_tokens": _flag("Those of the tokenizer's post-processor; not with `messages`.", default=True),
    "tokens": Field("Token ids.", {"type": "array", "items": TOKEN_ID}, is_required=True),
}
"""By name, or by type and name where a type's field differs."""


def field_of(type_name: str, name: str) -> Field | None:
    """What is known of a field of a type; None where nobody has described it yet, which a test finds."""
    return FIELDS.get(f"{type_name}.{name}") or FIELDS.get(name)
