"""How the fields of requests are described: their meaning, defaults, bounds, and the shapes of what has no type.

A request's type says this where it declares a field, in `msgspec.Meta`; the OpenAPI document and docs/api.md are made
from it. Parsing looks at types alone: values are checked by `gateway.limits` and `gateway.models`, which both APIs
share, in the words of the API that was used. A test holds the bounds that are described against those checks.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from gateway.forms.tools import MAX_TOOLS
from gateway.limits import (
    MAX_NAME_CHARS,
    MAX_PROMPT_LOGPROBS,
    MAX_SEQUENCES,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
)
from gateway.models.conversation import MAX_TOOL_DEPTH
from services.runtime.sampling import MAX_TOKENS_EVER, PARAMETERS, SamplingMembers
from services.structured.lark import MAX_CALLS

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
"""How one schema of the document names another."""
ABSENT = "absent"
"""The key of what the absence of a field means: its `default` is null for msgspec."""
NAME_PATTERN = f"^[A-Za-z0-9_.:-]{{1,{MAX_NAME_CHARS}}}$"
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS_EVER}
"""The least that every vocabulary keeps to; a served model's own size is in no document."""


StopText = Annotated[str, Meta(extra_json_schema={"maxLength": MAX_STOP_TEXT_BYTES})]
_NotEmpty = Meta(extra_json_schema={"minLength": 1})
StopTexts = Annotated[list[Annotated[StopText, _NotEmpty]], Meta(extra_json_schema={"maxItems": MAX_STOP_TEXTS})]


def said(meaning: str, **schema: Any) -> Meta:
    """A field's meaning, and more of its schema in the words of JSON Schema."""
    return Meta(description=meaning, extra_json_schema=schema or None)


def bounded(meaning: str, least: float, most: float, default: float | None = None) -> Meta:
    """A number in [least, most]. `default` is what its absence means."""
    return said(meaning, minimum=least, maximum=most, **({} if default is None else {ABSENT: default}))


def flag(meaning: str, *, default: bool = False) -> Meta:
    """A choice between true and false. `default` is what its absence means."""
    return said(meaning, **{ABSENT: default})


def parameter(name: str, end: str = ".", **more: Any) -> Meta:
    """A parameter of sampling as its row describes it. `end` ends the sentence."""
    row = PARAMETERS[name]
    bounds = {} if row.bounds is None else row.bounds.schema
    default = {} if row.default is None else {ABSENT: row.default}
    return said(row.meaning + end, **bounds, **default, **more)


def synonym(name: str, meaning: str, **more: Any) -> Meta:
    """Another name of a parameter of sampling, with its bounds. `more` adds to them or replaces them."""
    bounds = PARAMETERS[name].bounds
    assert bounds is not None
    return said(meaning, **{**bounds.schema, **more})


def list_of(items: Schema, most: int | None = None) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1, **({} if most is None else {"maxItems": most})}


def _object(needed: Schema, others: Mapping[str, Any] | None = None, **more: Any) -> Schema:
    """An object with the members of both, of which those of `needed` are required."""
    return {"type": "object", "properties": {**needed, **(others or {})}, "required": [*needed], **more}


_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_LIST: Schema = {"type": "array"}
NULL: Schema = {"type": "null"}
_FUNCTION: Schema = {"const": "function"}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}$"}

PROMPT = [
    _TEXT,
    list_of(_TEXT, MAX_SEQUENCES),
    list_of(TOKEN_ID),
    list_of(list_of(TOKEN_ID), MAX_SEQUENCES),
]
_TEXT_PART = _object({"type": {"const": "text"}, "text": _TEXT})
_EARLIER_CALL = _object(
    {"function": _object({"name": _FUNCTION_NAME, "arguments": {**_TEXT, "description": "A JSON object."}})},
    {"id": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME_CHARS}, "type": _FUNCTION},
)
PREFIXES = ("prefix", "partial")
"""Members of a last message that ask for its continuation."""
_MESSAGE = _object(
    {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    {
        "content": {"anyOf": [_TEXT, list_of(_TEXT_PART), NULL]},
        "name": {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS},
        "tool_calls": {"type": ["array", "null"], "items": _EARLIER_CALL, "maxItems": MAX_CALLS},
        "tool_call_id": {
            "type": ["string", "null"],
            "description": "Needed in a tool's message: the id of a call of an assistant's message before it.",
        },
        "reasoning_content": {"description": "In an assistant's message: a text."},
        **{name: {"type": ["boolean", "null"], "description": "As `continue_final_message`."} for name in PREFIXES},
    },
    description="One message. Only an assistant's may do without `content`; parts are joined by line breaks.",
)
_KEPT_TO = "The arguments keep to `parameters`, where one token of the model begins calls."
_OFFERED = _object(
    {"name": _FUNCTION_NAME},
    {
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
        "strict": {"description": _KEPT_TO},
    },
)
_TOOL = _object(
    {"type": _FUNCTION, "function": _OFFERED},
    description=f"A function that the model may call; nested at most {MAX_TOOL_DEPTH} deep.",
)
SHARED: Mapping[str, Schema] = {"Message": _MESSAGE, "Tool": _TOOL}
"""Schemas that have names of their own in the document."""
MESSAGE: Schema = {"$ref": REF.format(name="Message")}
TOOL: Schema = {"$ref": REF.format(name="Tool")}

_NAMED_FUNCTION = _object({"type": _FUNCTION, "function": _object({"name": _FUNCTION_NAME})})
_ALLOWED = _object({"mode": {"enum": ["auto", "required"]}, "tools": list_of(_NAMED_FUNCTION, MAX_TOOLS)})
TOOL_CHOICE = [
    {"enum": ["none", "auto", "required"]},
    _NAMED_FUNCTION,
    _object({"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED}),
    NULL,
]
_NAMED_SCHEMA = _object(
    {"schema": _OBJECT},
    {
        "name": {"type": ["string", "null"], "pattern": f"^[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}$"},
        "strict": {"type": ["boolean", "null"]},
    },
)
RESPONSE_FORMAT = [
    _object({"type": {"const": "text"}}),
    _object({"type": {"const": "json_object"}}, {"schema": {"type": ["object", "null"]}}),
    _object({"type": {"const": "json_schema"}, "schema": _OBJECT}),
    _object({"type": {"const": "regex"}, "pattern": _TEXT}),
    _object({"type": {"const": "grammar"}, "grammar": _TEXT}),
    _object({"type": {"const": "structural_tag"}}, {"format": _OBJECT, "structures": _LIST, "triggers": _LIST}),
    _object({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}),
    NULL,
]
_STRUCTURED_OUTPUTS: Schema = {
    "json": {"type": ["object", "string", "null"]},
    "json_object": {"type": ["boolean", "null"]},
    "regex": {"type": ["string", "null"]},
    "choice": {"type": ["array", "null"], "items": _TEXT},
    "grammar": {"type": ["string", "null"]},
    "structural_tag": {"type": ["object", "string", "null"]},
}
STRUCTURED_OUTPUTS = [{"type": "object", "properties": _STRUCTURED_OUTPUTS}, NULL]

SAMPLING: Mapping[str, Meta] = {
    **{name: parameter(name) for name in SamplingMembers.__struct_fields__},
    "top_p": said(f"{PARAMETERS['top_p'].meaning}; 0: the likeliest alone.", minimum=0, maximum=1, **{ABSENT: 1}),
}
"""The parameters of sampling that have one name in every API."""
UP_TO_THE_CONTEXT = parameter("max_tokens", ". Absent: what fits into the context.")
PROMPT_LOGPROBS = parameter(
    "prompt_logprobs", f", {MAX_PROMPT_LOGPROBS} in all answers together; not for streams or named requests."
)
