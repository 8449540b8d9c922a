"""`response_format` and its like: from what a client wrote to the schema that its answer must have.

A schema is one text from here to the workers, with white space removed and the order of members kept, which is the
order of the answer's; JSON mode is the schema of any object, and an empty text is not a schema. Regular expressions,
choices and grammars are texts too, whose first line says what they are (`services.structured.grammar_text`). Whether a
form can be compiled is asked when the call is accepted (`services.structured.compiler`).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.forms.structural_tag import grammar_of
from gateway.limits import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, check_text
from services.runtime.errors import InvalidRequest
from services.structured.grammar import ANY_OBJECT
from services.structured.grammar_text import CHOICES, GRAMMAR, REGEX, tokens_form

FIELD = "response_format"
MAX_ALLOWED_TOKENS = 2**18

_TYPES = ("text", "json_object", "json_schema", "regex", "grammar", "structural_tag")
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def json_schema_of(response_format: Any) -> str:
    """Returns the schema that OpenAI's member asks for; an empty text where it asks for none. Raises InvalidRequest."""
    if response_format is None:
        return ""
    if not isinstance(response_format, Mapping):
        raise _invalid("response_format must be an object")
    kind = response_format.get("type")
    if kind not in _TYPES:
        raise _invalid(f"response_format.type must be one of {', '.join(_TYPES)}")
    schema = response_format.get("schema")
    if schema is not None and kind not in ("json_object", "json_schema"):
        raise _invalid(f"response_format.schema does not go with the type {kind}")
    if kind == "text":
        return ""
    if kind == "regex":
        return _regex(response_format.get("pattern"), "response_format.pattern")
    if kind == "grammar":
        return _grammar(response_format.get("grammar"), "response_format.grammar")
    if kind == "structural_tag":
        return _structural_tag(response_format, FIELD)
    if kind == "json_object":
        return ANY_OBJECT if schema is None else _normalised(schema)
    described = response_format.get("json_schema")
    if described is None and schema is not None:
        return _normalised(schema)
    if schema is not None:
        raise _invalid("response_format.schema and response_format.json_schema cannot be used together")
    return _named_schema(described)


def form_in(members: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the answer's form and the first of these members that asks for it; empty texts where none does.

    Two members may ask for the same form, as clients do that serve older and newer servers. Raises InvalidRequest that
    names the member, also where two ask for different forms.
    """
    asked = [(name, text) for name, value in members.items() if value is not None and (text := _read(name, value))]
    for name, text in asked[1:]:
        if text != asked[0][1]:
            raise InvalidRequest(
                f"{asked[0][0]} and {name} both ask for a form of the answer; it can have one",
                field=name,
                code="invalid_value",
            )
    return (asked[0][1], asked[0][0]) if asked else ("", FIELD)


def _read(name: str, value: Any) -> str:
    if name == FIELD:
        return json_schema_of(value)
    if name == "structured_outputs":
        return _structured(value)
    if name == "structural_tag":
        return _structural_tag(value, name)
    if name in ("json_schema", "guided_json"):
        return _schema(value, name)
    if name == "allowed_token_ids":
        return _tokens(value, name)
    if name == "guided_choice":
        return _choices(value, name)
    return (_regex if name in ("regex", "guided_regex") else _grammar)(value, name)


def _structured(value: Any) -> str:
    """Returns the form of vLLM's `structured_outputs`, whose other members are judged before."""
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object")
    given = [kind for kind in _STRUCTURED if value.get(kind) not in (None, False)]
    if len(given) != 1:
        raise _wrong(name, f"an object with one of {', '.join(_STRUCTURED)}")
    inner = value[given[0]]
    if given[0] == "json_object":
        return ANY_OBJECT
    return _STRUCTURED[given[0]](inner, f"{name}.{given[0]}")


def _schema(value: Any, name: str) -> str:
    """Returns the form of a schema, which is an object or the JSON text of one."""
    try:
        return json_schema_in(value) if isinstance(value, str) else _normalised(value)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace(FIELD, name), field=name, code=error.code) from error


def _choices(value: Any, name: str) -> str:
    if not isinstance(value, list):
        raise _wrong(name, "a list of texts")
    return _bounded(CHOICES + json.dumps(value), name)


def _tokens(value: Any, name: str) -> str:
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= MAX_ALLOWED_TOKENS
        or any(type(one) is not int or one < 0 for one in value)
    ):
        raise _wrong(name, f"a list of 1 to {MAX_ALLOWED_TOKENS} token ids")
    return _bounded(tokens_form(value), name)


def _regex(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a regular expression, which is a text")
    return _bounded(REGEX + value, name)


def _grammar(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a grammar, which is a text")
    return _bounded(GRAMMAR + value, name)


def _structural_tag(value: Any, name: str) -> str:
    """Returns the form of a structural tag, which is an object or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(name, "an object, or the JSON text of one") from error
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object, or the JSON text of one")
    if _depth(value) > MAX_SCHEMA_DEPTH:
        raise _wrong(name, f"nested at most {MAX_SCHEMA_DEPTH} levels deep")
    return _bounded(grammar_of(value, name), name)


def _bounded(text: str, name: str) -> str:
    check_text(text, field_name=name)
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{name} must have at most {MAX_SCHEMA_BYTES} bytes", field=name, code="invalid_value")
    return text


_STRUCTURED: Mapping[str, Callable[[Any, str], str]] = {
    "json": _schema,
    "json_object": _schema,
    "regex": _regex,
    "choice": _choices,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _wrong(name: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {rule}", field=name, code="invalid_value")


def json_schema_in(text: str) -> str:
    """Returns the schema that a client wrote as JSON text. Raises InvalidRequest."""
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
        raise _invalid("response_format.json_schema must be an object with a schema")
    name, strict = described.get("name"), described.get("strict")
    # OpenAI asks for a name, llama.cpp does not; nothing reads it.
    if name is not None and (not isinstance(name, str) or _SCHEMA_NAME.fullmatch(name) is None):
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
    """Returns how many objects and lists are within one another, without recursion."""
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
