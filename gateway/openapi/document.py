"""The OpenAPI 3.1 document of the HTTP API, made from the table of its operations and the types of what is exchanged.

Served at /openapi.json. Describes and does nothing: tests hold requests and answers against it. Fields are described
where the types declare them.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.openai.requests import StreamOptions
from gateway.openai.shapes import ABSENT, NULL, REF, SAMPLING, SHARED, Schema
from gateway.openapi.operation import (
    ALWAYS_SENT,
    ANSWER_HEADERS,
    EVENTS,
    HEADERS_OF_STATUS,
    ID_HEADER,
    JSON,
    REQUEST_HEADERS,
    STATUSES,
    Operation,
)
from gateway.openapi.operations import OPERATIONS
from services.runtime.version import version


@functools.cache
def document_bytes(*, asks_for_keys: bool) -> bytes:
    """Returns `document` as JSON; made once."""
    return msgspec.json.encode(document(asks_for_keys=asks_for_keys))


def document(*, asks_for_keys: bool) -> dict[str, Any]:
    """Returns the document. `asks_for_keys`: this gateway serves nobody without one."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, asks_for_keys=asks_for_keys)
    components: dict[str, Any] = {"schemas": schemas()}
    if asks_for_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": components,
    }


def schemas() -> dict[str, Schema]:
    """Returns the schema of each type, by name."""
    requests: list[Any] = [StreamOptions, *(each.body for each in OPERATIONS if isinstance(each.body, type))]
    answered: list[Any] = [each.error for each in OPERATIONS]
    for each in OPERATIONS:
        kinds = (each.answer, each.events, *(other for _, other in each.others))
        answered += [kind for kind in kinds if isinstance(kind, type)]
    _, found = msgspec.json.schema_components([*requests, *answered], ref_template=REF)
    required = {kind.__name__: getattr(kind, "REQUIRED", ()) for kind in requests}
    of_requests = {name: _of_request(found[name], names) for name, names in required.items()}
    return {**SHARED, **found, **of_requests}


def _of_request(schema: Schema, required: Sequence[str]) -> Schema:
    """Returns a request's schema as it is described: other fields are ignored, or refused by name."""
    properties = {
        name: _plain({**_sampling(name), **field}, can_be_null=name not in required)
        for name, field in schema["properties"].items()
    }
    required = [*schema["required"], *required]
    return {"additionalProperties": True, **schema, "properties": properties, "required": required}


def _sampling(name: str) -> Schema:
    """Returns what is said of a parameter of sampling, which is declared where no API is known."""
    meta = SAMPLING.get(name)
    return {} if meta is None else {"description": meta.description, **(meta.extra_json_schema or {})}


def _plain(schema: Schema, *, can_be_null: bool) -> Schema:
    """Returns a field's schema with `"type": [KIND, "null"]` for alternatives of one type and null."""
    schema = {key: value for key, value in schema.items() if key != "default"}
    if ABSENT in schema:
        schema["default"] = schema.pop(ABSENT)
    kinds = [kind for kind in schema.pop("anyOf", ()) if can_be_null or kind != NULL]
    known = [kind for kind in kinds if kind != NULL]
    if len(known) != 1 or "type" not in known[0]:
        return {**schema, "anyOf": kinds} if kinds else schema
    (kind,) = known
    return {**schema, **kind, **({"type": [kind["type"], "null"]} if len(kinds) == 2 else {})}


def _described(operation: Operation, *, asks_for_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    asked = [
        *(("path", name, operation.path_field, {"type": "string"}) for name in re.findall(r"{(\w+)}", operation.path)),
        *(("query", *row) for row in operation.query),
        *(("header", name, *REQUEST_HEADERS[name]) for name in operation.request_headers),
    ]
    parameters = [
        {"name": name, "in": place, "required": place == "path", "description": meaning, "schema": schema}
        for place, name, meaning, schema in asked
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {operation.body_kind: {"schema": _schema_of(operation.body)}},
        }
    described["responses"] = {str(status): answer for status, answer in sorted(_answers(operation).items())}
    if asks_for_keys:
        described["security"] = [{"key": []}] if operation.needs_key else []
    if operation.needs_admin:
        described["description"] = "Where API keys are asked for, this takes one with the admin role."
    return described


def _answers(operation: Operation) -> dict[int, dict[str, Any]]:
    error = {JSON: {"schema": _schema_of(operation.error)}}
    described = {status: _answer(status, error, operation.answer_headers) for status in operation.errors}
    for status, kind in operation.others:
        described[status] = _answer(status, {JSON: {"schema": _schema_of(kind)}})
    if operation.answer is None:
        return described
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": _whatever(operation.answer)}
    else:
        content[JSON] = {"schema": _schema_of(operation.answer)}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(operation.events, operation.error)}
    described[200] = _answer(200, content, operation.answer_headers)
    return described


def _whatever(media_type: str) -> Schema:
    """Returns the schema of an answer that has no type."""
    if media_type.startswith(EVENTS):
        return {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {"type": "object" if media_type == JSON else "string"}


def _event(kind: type[msgspec.Struct], error: type[msgspec.Struct]) -> Schema:
    """Returns the schema of a server-sent event, which stands for a stream of them before OpenAPI 3.2."""
    payload = {"anyOf": [_schema_of(kind), _schema_of(error)]}
    return {
        "type": "object",
        "description": "A server-sent event. The last one is [DONE], or an error, where the answer failed after it had "
        "begun. Events of a named request have ids.",
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]"},
                    {"type": "string", "contentMediaType": JSON, "contentSchema": payload},
                ]
            },
            "id": {"type": "string"},
        },
        "required": ["data"],
    }


def _answer(status: int, content: dict[str, Any], headers: tuple[str, ...] = ()) -> dict[str, Any]:
    named = {}
    required = {ID_HEADER, *HEADERS_OF_STATUS.get(status, ())}
    for name in dict.fromkeys((ID_HEADER, *headers, *HEADERS_OF_STATUS.get(status, ()))):
        meaning, schema = ANSWER_HEADERS[name]
        is_required = name in required or (status == 200 and name in ALWAYS_SENT)
        named[name] = {"description": meaning, "required": is_required, "schema": schema}
    return {"description": STATUSES[status], "content": content, "headers": named}


def _schema_of(kind: type[msgspec.Struct] | Schema) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)} if isinstance(kind, type) else kind
