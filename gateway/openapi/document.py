"""The OpenAPI 3.1 document of the HTTP API: a table of its operations, completed from the types of what comes and goes.

Served at /openapi.json. Describes and does nothing: a test compares it with the routes that are served, others hold
answers against it. Who adds a route adds an `Operation`; who adds a field adds it to `gateway.openapi.fields`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.limits import (
    MAX_AFFINITY_CHARS,
    MAX_BODY_BYTES,
    MAX_BODY_READ_S,
    MAX_KEY_CHARS,
    MAX_UPLOAD_S,
    SERVICE_CLASSES,
)
from gateway.observability.metrics import CONTENT_TYPE
from gateway.openai.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import DetokenizeRequest, StreamOptions, TokenizeRequest
from gateway.openai.responses_request import ResponsesRequest
from gateway.openapi import answers
from gateway.openapi.fields import FIELDS, NAME_PATTERN, REF, SHARED_SCHEMAS, Schema, field_of
from gateway.wishes import MAX_MS, MIN_MS, PREFILL, TIMEOUT, TPOT, TTFT
from services.runtime.version import version
from services.scheduling.disaggregation import PREFILL_CHOICES

JSON = "application/json"
EVENTS = "text/event-stream"

EVERYWHERE = (400, 401, 403, 431, 500, 503)
"""Any request may be no valid HTTP or not be meant for us, find too many others, or meet a fault of ours."""
WITH_BODY = (*EVERYWHERE, 408, 413, 414, 415, 429)
WITH_MODEL = (*WITH_BODY, 404)
GENERATING = (*WITH_MODEL, 409, 504)

STORED = (*EVERYWHERE, 404)
"""What Redis holds, and can be asked for only while it is there."""
STORED_WITH_BODY = (*STORED, 408, 413, 415)

STATUSES: Mapping[int, str] = {
    200: "It worked.",
    400: "The request is wrong; `param` names the field, the message the rule.",
    401: "No API key, or one that is not known or has expired.",
    403: "The API key does not allow this, or the server is not known under this Host or does not let this Origin in.",
    404: "No such model, or nothing is known of the stream that is to go on.",
    408: f"The head or the body did not arrive within {MAX_BODY_READ_S:g} s, a file within {MAX_UPLOAD_S:g} s.",
    409: "Another request has this id, or had this key; or the batch is over, or nearly.",
    413: f"The body has more than {MAX_BODY_BYTES} bytes.",
    414: "The URL is too long.",
    415: "The body is not said to be JSON (`Content-Type: application/json`), or is compressed.",
    429: "A limit of the tenant is reached.",
    431: "Too many or too long headers.",
    500: "A fault of the server.",
    503: "No room or no worker now.",
    504: "The request's deadline passed.",
}

_MILLISECONDS: Schema = {"type": "number", "minimum": MIN_MS, "maximum": MAX_MS}
REQUEST_HEADERS: Mapping[str, tuple[str, Schema]] = {
    "X-Request-Id": (
        "Names the request, which can then be resumed; unique among the running ones of its tenant.",
        {"type": "string", "pattern": NAME_PATTERN},
    ),
    "Idempotency-Key": (
        "Names the request, which is then computed once however often it is sent.",
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[\\x20-\\x7e]*$"},
    ),
    "Last-Event-ID": ("Goes on after this event of the named request's stream.", {"type": "string"}),
    "X-Session-Id": (
        "Requests that belong together; wins over `user`.",
        {"type": "string", "minLength": 1, "maxLength": MAX_AFFINITY_CHARS},
    ),
    "X-Service-Class": ("As the field `service_class`.", {"type": "string", "enum": [*SERVICE_CLASSES, ""]}),
    TIMEOUT: ("As the field `request_timeout_ms`.", _MILLISECONDS),
    TTFT: (
        "The first token is needed within this time; it counts where it is less than `--ttft-target-s`.",
        _MILLISECONDS,
    ),
    TPOT: ("The same for each further token and `--itl-target-s`.", _MILLISECONDS),
    PREFILL: (
        "Who computes the prompt: the decode worker, a prefill worker, or the faster of the two. Needs a key with "
        "`choose_prefill`.",
        {"type": "string", "enum": [*PREFILL_CHOICES]},
    ),
    "X-Allow-Fallback": ("As the field `allow_fallback`, which wins.", {"type": "string", "enum": ["true", "false"]}),
    "traceparent": ("The trace that the request belongs to, as W3C Trace Context has it.", {"type": "string"}),
}
_LIMITS = {
    f"x-ratelimit-{what}-{unit}": (f"{meaning} of the tenant's {unit} per minute, where they are limited.", schema)
    for unit in ("requests", "tokens")
    for what, meaning, schema in (
        ("limit", "The number", {"type": "integer"}),
        ("remaining", "What is left", {"type": "integer"}),
        ("reset", "Time until all are there again, such as 6m0s,", {"type": "string"}),
    )
}
ANSWER_HEADERS: Mapping[str, tuple[str, Schema]] = {
    "X-Request-Id": ("The request's id.", {"type": "string", "pattern": NAME_PATTERN}),
    "X-Tandem-Model": ("The model that answered, by its own name.", {"type": "string"}),
    "X-Tandem-Fallback": ("In whose place another model answered, and why.", {"type": "string"}),
    "X-Tandem-Ignored": ("Members of the body that were ignored, separated by commas.", {"type": "string"}),
    "Retry-After": ("Seconds after which it may be worth trying again.", {"type": "integer", "minimum": 1}),
    "X-Should-Retry": ("A conflict: the same again would meet the same.", {"type": "string", "const": "false"}),
    "WWW-Authenticate": ("How to show a key.", {"type": "string"}),
    **_LIMITS,
}
ALWAYS_SENT = frozenset({"X-Request-Id", "X-Tandem-Model"})
"""Headers that every good answer has for which the document names them; an error has them if it came that far."""
HEADERS_OF_STATUS: Mapping[int, tuple[str, ...]] = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}
_GENERATED = ("X-Request-Id", "X-Tandem-Model", "X-Tandem-Fallback", "X-Tandem-Ignored", "X-Should-Retry", *_LIMITS)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    `answer`: the type of a 200, or the media type of one that is no JSON; None: there is no 200. `events`: the type of
    the events that come instead where the request asks for a stream. `errors`: statuses that have the error object;
    `others`: statuses with a type of their own. `body_kind`: the media type of the body.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: type[msgspec.Struct] | str | None
    errors: tuple[int, ...] = EVERYWHERE
    others: tuple[tuple[int, type[msgspec.Struct]], ...] = ()
    body: type[msgspec.Struct] | Schema | None = None
    body_kind: str = JSON
    events: type[msgspec.Struct] | None = None
    request_headers: tuple[str, ...] = ()
    answer_headers: tuple[str, ...] = ()
    path_fields: tuple[tuple[str, str], ...] = ()
    query: tuple[tuple[str, str, Schema], ...] = ()
    needs_key: bool = True
    needs_admin: bool = False


_COUNTED: Schema = {
    "type": "object",
    "properties": {
        "model": {"type": ["string", "null"]},
        "input": FIELDS["input"].schema,
        "instructions": {"type": ["string", "null"]},
        "tools": {"type": ["array", "null"]},
    },
    "required": ["input"],
}
_FORM: Schema = {
    "type": "object",
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["purpose", "file"],
}
_PAGE: tuple[tuple[str, str, Schema], ...] = (
    ("limit", "Entries of a page.", {"type": "integer", "minimum": 1, "maximum": 10_000}),
    ("after", "The id of the entry before the first.", {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}),
)
_REQUEST_NAME = (("name", "Its id, or its number after an @."),)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answers a conversation.",
        body=ChatRequest,
        answer=ChatCompletion,
        events=ChatCompletionChunk,
        errors=GENERATING,
        request_headers=tuple(REQUEST_HEADERS),
        answer_headers=_GENERATED,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        name="createCompletion",
        summary="Goes on with a text.",
        body=CompletionRequest,
        answer=Completion,
        events=CompletionChunk,
        errors=GENERATING,
        request_headers=tuple(REQUEST_HEADERS),
        answer_headers=_GENERATED,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        name="createResponse",
        summary="Answers an input with a response object; nothing is stored.",
        body=ResponsesRequest,
        answer=answers.Response,
        events=answers.ResponseEvent,
        errors=GENERATING,
        request_headers=tuple(REQUEST_HEADERS),
        answer_headers=_GENERATED,
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        name="countInputTokens",
        summary="How many tokens the input of a response would have; what does not change that is not looked at.",
        body=_COUNTED,
        answer=answers.InputTokens,
        errors=WITH_MODEL,
        answer_headers=tuple(_LIMITS),
    ),
    *(
        Operation(
            method=method,
            path="/v1/responses/{name}",
            name=f"{method}Response",
            summary="Always 404: nothing is stored.",
            answer=None,
            errors=(*EVERYWHERE, 404),
            path_fields=(("name", "An id."),),
        )
        for method in ("get", "post", "delete")
    ),
    Operation(
        method="post",
        path="/v1/files",
        name="createFile",
        summary="Takes a file of requests, one JSON object in each line, for a batch.",
        body=_FORM,
        body_kind="multipart/form-data",
        answer=answers.StoredFile,
        errors=(*STORED_WITH_BODY, 429),
    ),
    Operation(
        method="get",
        path="/v1/files",
        name="listFiles",
        summary="The tenant's files, latest first.",
        answer=answers.FileList,
        errors=STORED,
        query=(*_PAGE, ("order", "By age.", {"enum": ["asc", "desc"]}), ("purpose", "Only these.", {"type": "string"})),
    ),
    Operation(
        method="get",
        path="/v1/files/{file_id}",
        name="showFile",
        summary="One file.",
        answer=answers.StoredFile,
        errors=STORED,
        path_fields=(("file_id", "Its id."),),
    ),
    Operation(
        method="delete",
        path="/v1/files/{file_id}",
        name="deleteFile",
        summary="Forgets a file.",
        answer=answers.DeletedFile,
        errors=STORED,
        path_fields=(("file_id", "Its id."),),
    ),
    Operation(
        method="get",
        path="/v1/files/{file_id}/content",
        name="readFile",
        summary="What is in a file.",
        answer="application/octet-stream",
        errors=STORED,
        path_fields=(("file_id", "Its id."),),
    ),
    Operation(
        method="post",
        path="/v1/batches",
        name="createBatch",
        summary="Answers all requests of a file, when there is time.",
        body={"$ref": REF.format(name="CreateBatch")},
        answer=answers.StoredBatch,
        errors=(*STORED_WITH_BODY, 429),
    ),
    Operation(
        method="get",
        path="/v1/batches",
        name="listBatches",
        summary="The tenant's batches, latest first.",
        answer=answers.BatchList,
        errors=STORED,
        query=_PAGE,
    ),
    Operation(
        method="get",
        path="/v1/batches/{batch_id}",
        name="showBatch",
        summary="One batch.",
        answer=answers.StoredBatch,
        errors=STORED,
        path_fields=(("batch_id", "Its id."),),
    ),
    Operation(
        method="post",
        path="/v1/batches/{batch_id}/cancel",
        name="cancelBatch",
        summary="Ends a batch; what is answered stays.",
        answer=answers.StoredBatch,
        errors=(*STORED_WITH_BODY, 409),
        path_fields=(("batch_id", "Its id."),),
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        name="createEmbedding",
        summary="Always refused, by the code unsupported_endpoint: this server generates text only.",
        body={},
        answer=None,
        errors=WITH_BODY,
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        summary="The models that the key allows, under each of their names.",
        answer=answers.ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{name}",
        name="showModel",
        summary="One model.",
        answer=answers.Model,
        errors=(*EVERYWHERE, 404),
        path_fields=(("name", "A name or alias; may contain slashes."),),
    ),
    Operation(
        method="post",
        path="/tokenize",
        name="tokenize",
        summary="The token ids of a text, or of a conversation as it would be generated from.",
        body=TokenizeRequest,
        answer=answers.Tokens,
        errors=WITH_MODEL,
        answer_headers=tuple(_LIMITS),
    ),
    Operation(
        method="post",
        path="/detokenize",
        name="detokenize",
        summary="The text of token ids, special ones shown.",
        body=DetokenizeRequest,
        answer=answers.Text,
        errors=WITH_MODEL,
        answer_headers=tuple(_LIMITS),
    ),
    Operation(
        method="get",
        path="/health",
        name="showHealth",
        summary="The gateway is alive.",
        answer=answers.Health,
        errors=(400, 431, 500),
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/ready",
        name="showReadiness",
        summary="Whether requests can be served.",
        answer=answers.Readiness,
        errors=(400, 431, 500),
        others=((503, answers.Readiness),),
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/metrics",
        name="showMetrics",
        summary="Prometheus' text format.",
        answer=CONTENT_TYPE,
        errors=EVERYWHERE,
        needs_admin=True,
    ),
    Operation(
        method="get",
        path="/cluster",
        name="showCluster",
        summary="Workers and requests now.",
        answer=answers.ClusterState,
        errors=EVERYWHERE,
        needs_admin=True,
    ),
    Operation(
        method="get",
        path="/dashboard",
        name="showDashboard",
        summary="The dashboard; its scripts and styles are beside it.",
        answer="text/html; charset=utf-8",
        needs_key=False,
    ),
    *(
        Operation(
            method="get",
            path=f"/dashboard/{path}",
            name=name,
            summary=summary,
            answer=answer,
            errors=(*EVERYWHERE, *more),
            path_fields=path_fields,
            needs_admin=True,
        )
        for path, name, summary, answer, more, path_fields in (
            ("data", "showDashboardData", "What the dashboard shows first.", answers.DashboardPage, (), ()),
            ("events", "watchDashboard", "What has changed, each second.", "text/event-stream; charset=utf-8", (), ()),
            ("requests", "listRequests", "Ended requests, latest first.", answers.DashboardPage, (), ()),
            ("requests/{name}", "showRequest", "One ended request.", answers.DashboardPage, (404,), _REQUEST_NAME),
        )
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="showDocument",
        summary="This document.",
        answer=JSON,
    ),
)


@functools.cache
def document_bytes(*, asks_for_keys: bool) -> bytes:
    """`document` as JSON; made once."""
    return msgspec.json.encode(document(asks_for_keys=asks_for_keys))


def document(*, asks_for_keys: bool) -> dict[str, Any]:
    """The whole document. `asks_for_keys`: this gateway serves nobody without one."""
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
    """The schema of each type, by name: those of requests with their fields' meaning and bounds."""
    requests: list[Any] = [StreamOptions, *(each.body for each in OPERATIONS if isinstance(each.body, type))]
    answered: list[Any] = [answers.Error]
    for each in OPERATIONS:
        kinds = (each.answer, each.events, *(other for _, other in each.others))
        answered += [kind for kind in kinds if isinstance(kind, type)]
    _, found = msgspec.json.schema_components([*requests, *answered], ref_template=REF)
    names = {kind.__name__ for kind in requests}
    described = {name: _completed(name, schema) if name in names else schema for name, schema in found.items()}
    return {**SHARED_SCHEMAS, **described}


def _completed(type_name: str, schema: Schema) -> Schema:
    """A request's schema with what its types cannot say."""
    properties, required = {}, []
    for name, from_type in schema["properties"].items():
        known = field_of(type_name, name)
        if known is None:
            properties[name] = from_type
            continue
        if "anyOf" in known.schema or known.is_required:
            from_type = {}
        properties[name] = {"description": known.meaning, **_flat(from_type), **known.schema}
        if known.is_required:
            required.append(name)
    # A field that is not known is ignored, or refused by name where it would change the answer.
    completed = {**schema, "properties": properties, "additionalProperties": True}
    return {**completed, "required": required} if required else completed


def _flat(schema: Schema) -> Schema:
    """`{"type": ["integer", "null"]}` for what msgspec writes as alternatives; a default of null is none."""
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if schema.get("default") is not None:
        rest["default"] = schema["default"]
    options = schema.get("anyOf")
    if options is None:
        return rest
    if any("$ref" in option for option in options):
        return {**rest, "anyOf": options}
    types = [option["type"] for option in options]
    return {**rest, **{key: value for option in options for key, value in option.items()}, "type": types}


def _described(operation: Operation, *, asks_for_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    parameters = [
        {"name": name, "in": "path", "required": True, "description": meaning, "schema": {"type": "string"}}
        for name, meaning in operation.path_fields
    ]
    for name, meaning, schema in operation.query:
        parameters.append({"name": name, "in": "query", "required": False, "description": meaning, "schema": schema})
    for name in operation.request_headers:
        meaning, schema = REQUEST_HEADERS[name]
        parameters.append({"name": name, "in": "header", "required": False, "description": meaning, "schema": schema})
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
    error = {JSON: {"schema": _schema_of(answers.Error)}}
    described = {status: _answer(status, error, operation.answer_headers) for status in operation.errors}
    for status, kind in operation.others:
        described[status] = {"description": STATUSES[status], "content": {JSON: {"schema": _schema_of(kind)}}}
    if operation.answer is None:
        return described
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": _whatever(operation.answer)}
    else:
        content[JSON] = {"schema": _schema_of(operation.answer)}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(operation.events)}
    described[200] = _answer(200, content, operation.answer_headers)
    return described


def _whatever(media_type: str) -> Schema:
    """The schema of an answer of which no more is said."""
    if media_type.startswith(EVENTS):
        return {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {"type": "object" if media_type == JSON else "string"}


def _event(kind: type[msgspec.Struct]) -> Schema:
    """One server-sent event; before OpenAPI 3.2 the schema of a stream is that of each of its events."""
    payload = {"anyOf": [_schema_of(kind), _schema_of(answers.Error)]}
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
    described: dict[str, Any] = {"description": STATUSES[status], "content": content}
    named = {}
    required = HEADERS_OF_STATUS.get(status, ())
    for name in (*headers, *required):
        meaning, schema = ANSWER_HEADERS[name]
        is_required = name in required or (status == 200 and name in ALWAYS_SENT)
        named[name] = {"description": meaning, "required": is_required, "schema": schema}
    return {**described, "headers": named} if named else described


def _schema_of(kind: type[msgspec.Struct] | Schema) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)} if isinstance(kind, type) else kind
