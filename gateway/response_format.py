"""`response_format` and forced calls: from what a client wrote to the form that its answer must have.

A schema is one text from here to the workers, with white space removed and the order of members kept, which is the
order of the answer's; JSON mode is the schema of any object, and an empty text is no schema. Whether a form can be
compiled is asked when the call is accepted (`services.structured.compiler`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.calls import Call
from gateway.tokenization import ModelTokenizer
from gateway.tool_requests import called_functions, names_of
from gateway.validation import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from services.runtime.answer_form import AnswerForm, Reasoning, ToolCalls
from services.runtime.errors import InvalidRequest
from services.structured.grammar import ANY_OBJECT

FIELD = "response_format"

_TYPES = ("text", "json_object", "json_schema")
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def json_schema_of(response_format: Any) -> str:
    """The schema that OpenAI's member asks for; an empty text where it asks for none. Raises InvalidRequest."""
    if response_format is None:
        return ""
    if not isinstance(response_format, Mapping):
        raise _invalid("response_format must be an object")
    kind = response_format.get("type")
    if kind not in _TYPES:
        raise _invalid(f"response_format.type must be one of {', '.join(_TYPES)}")
    if kind == "text":
        return ""
    return ANY_OBJECT if kind == "json_object" else _named_schema(response_format.get("json_schema"))


def answer_form(call: Call, tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int]) -> AnswerForm | None:
    """The form of the call's answers, as this model writes calls and thoughts; None: they may be any text.

    Calls that must be made leave no room for anything else. A schema beside tools leaves the choice to the model, as it
    has it without a schema. Strict tools are kept to where a token begins calls, which tells them from text. Raises
    InvalidRequest for tools whose arguments cannot be made to have a form.
    """
    schema = "" if call.must_call else call.sampling.json_schema
    calls = None
    if call.tools and tokenizer.tool_format is not None:
        is_optional = not schema and not call.must_call
        names = call.must_call or names_of(call.tools)
        if not is_optional or (call.strict_tools and tokenizer.has_call_token):
            functions = called_functions(call.tools, names, strict=call.strict_tools if is_optional else names)
            calls = ToolCalls(tokenizer.tool_format, functions, call.parallel_tool_calls, is_optional)
    if not schema and calls is None:
        return None
    # The other API shows an answer as it is.
    thinks = call.messages is not None and tokenizer.has_reasoning
    return AnswerForm(schema, calls, _reasoning(tokenizer, prompt_token_ids) if thinks else Reasoning.NONE)


def _reasoning(tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int]) -> Reasoning:
    return Reasoning.IS_OPEN if tokenizer.opens_reasoning(prompt_token_ids) else Reasoning.MAY_COME


def json_schema_in(text: str) -> str:
    """The schema that a client wrote as JSON text. Raises InvalidRequest."""
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise _too_large()
    try:
        schema = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except InvalidRequest:
        raise
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise _invalid("the schema in response_format is not valid JSON", code="invalid_json") from error
    return _normalised(schema)


def _named_schema(described: Any) -> str:
    if not isinstance(described, Mapping):
        raise _invalid("response_format.json_schema must be an object with name and schema")
    name, strict = described.get("name"), described.get("strict")
    if not isinstance(name, str) or _SCHEMA_NAME.fullmatch(name) is None:
        raise _invalid("response_format.json_schema.name must be 1 to 64 characters of [A-Za-z0-9_-]")
    if strict is not None and not isinstance(strict, bool):
        raise _invalid("response_format.json_schema.strict must be true or false")
    if "schema" not in described:
        raise _invalid("response_format.json_schema.schema is missing", code="missing_required_parameter")
    return _normalised(described["schema"])


def _normalised(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        raise _invalid("the schema in response_format must be a JSON object")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise _too_deep()
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid(
            "the schema in response_format holds half of a surrogate pair, which is no text", code="invalid_encoding"
        ) from error
    except ValueError as error:
        raise _invalid("a number of the schema in response_format is not finite") from error
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _too_large()
    return text


def _depth(value: Any) -> int:
    """How many objects and lists are within one another, without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            break
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _invalid("a member of the schema in response_format appears twice", code="duplicate_key")
    return members


def _refuse_constant(name: str) -> None:
    raise _invalid(f"{name} is no JSON number", code="invalid_json")


def _too_large() -> InvalidRequest:
    return _invalid(f"the schema in response_format must have at most {MAX_SCHEMA_BYTES} bytes")


def _too_deep() -> InvalidRequest:
    return _invalid(f"the schema in response_format must be nested at most {MAX_SCHEMA_DEPTH} levels deep")


def _invalid(message: str, *, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, field=FIELD, code=code)
