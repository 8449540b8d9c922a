"""The HTTP API as a table: each operation with its statuses, headers and types.

A new route is a new row; a test compares the table with the routes that are served.
"""

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.anthropic.answers import AnthropicMessage, CountedTokens, MessageError, MessageEvent
from gateway.anthropic.request import MessagesRequest
from gateway.batches.batches_api import CreateBatch
from gateway.limits import (
    MAX_AFFINITY_CHARS,
    MAX_BODY_BYTES,
    MAX_BODY_READ_S,
    MAX_KEY_CHARS,
    MAX_UPLOAD_S,
    SERVICE_CLASSES,
)
from gateway.observability.metrics import CONTENT_TYPE
from gateway.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Response,
    ResponseEvent,
)
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import DetokenizeRequest, TokenizeRequest
from gateway.openai.responses_request import Items, ResponsesRequest
from gateway.openai.shapes import NAME_PATTERN, Schema
from gateway.openapi import answers
from gateway.wishes import MAX_MS, MIN_MS, PREFILL, TIMEOUT, TPOT, TTFT
from services.scheduling.disaggregation import PREFILL_CHOICES

JSON = "application/json"
EVENTS = "text/event-stream"

EVERYWHERE = (400, 401, 403, 431, 500, 503)
"""Any request may be invalid HTTP, be meant for another server, find too many others, or meet a fault of this one."""
WITH_BODY = (*EVERYWHERE, 408, 413, 414, 415, 429)
WITH_MODEL = (*WITH_BODY, 404)
GENERATING = (*WITH_MODEL, 409, 504)

STORED = (*EVERYWHERE, 404)
"""Operations on what Redis holds, which can be asked for only while Redis answers."""
STORED_WITH_BODY = (*STORED, 408, 413, 415)

STATUSES: Mapping[int, str] = {
    200: "It worked.",
    400: "The request is wrong; `param` names the field, the message the rule.",
    401: "No API key, or one that is not known or has expired.",
    403: "The API key does not allow this, or the server is not known under this Host or does not let this Origin in.",
    404: "No such model, or nothing is known of the stream that is to be resumed.",
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
    "Last-Event-ID": ("Continues after this event of the named request's stream.", {"type": "string"}),
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
    TPOT: (
        "Each further token is needed within this time; it counts where it is less than `--itl-target-s`.",
        _MILLISECONDS,
    ),
    PREFILL: (
        "What computes the prompt: the decode worker, a prefill worker, or the faster of the two. Needs a key with "
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
        ("reset", "Time until all are available again, such as 6m0s,", {"type": "string"}),
    )
}
ID_HEADER = "X-Request-Id"
"""The header that every answer has."""
ANSWER_HEADERS: Mapping[str, tuple[str, Schema]] = {
    ID_HEADER: ("The request's id, also in the log.", {"type": "string", "pattern": NAME_PATTERN}),
    "X-Tandem-Model": ("The model that answered, by its own name.", {"type": "string"}),
    "X-Tandem-Fallback": ("The model in whose place another one answered, and why.", {"type": "string"}),
    "X-Tandem-Ignored": ("Members of the body that were ignored, separated by commas.", {"type": "string"}),
    "Retry-After": ("Seconds after which it may be worth trying again.", {"type": "integer", "minimum": 1}),
    "X-Should-Retry": ("A conflict: the same again would meet the same.", {"type": "string", "const": "false"}),
    "WWW-Authenticate": ("How to show a key.", {"type": "string"}),
    **_LIMITS,
}
ALWAYS_SENT = frozenset({"X-Tandem-Model"})
"""Headers that every good answer has for which the document names them; an error has them if it came that far."""
HEADERS_OF_STATUS: Mapping[int, tuple[str, ...]] = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}
_GENERATED = ("X-Tandem-Model", "X-Tandem-Fallback", "X-Tandem-Ignored", "X-Should-Retry", *_LIMITS)


@dataclass(frozen=True)
class Operation:
    """One method of one path, which is `route`.

    `answer`: the type of a 200, or the media type of one that is not JSON; None: there is no 200. `events`: the type of
    the events that come instead where the request asks for a stream. `errors`: statuses that have the error object;
    `others`: statuses with a type of their own. `body_kind`: the media type of the body. `path_field`: the meaning of
    what stands in braces.
    """

    route: str
    name: str
    summary: str
    _: KW_ONLY
    answer: type[msgspec.Struct] | Schema | str | None
    errors: tuple[int, ...] = EVERYWHERE
    others: tuple[tuple[int, type[msgspec.Struct]], ...] = ()
    body: type[msgspec.Struct] | Schema | None = None
    body_kind: str = JSON
    events: type[msgspec.Struct] | None = None
    request_headers: tuple[str, ...] = ()
    answer_headers: tuple[str, ...] = ()
    path_field: str = "Its id."
    query: tuple[tuple[str, str, Schema], ...] = ()
    error: type[msgspec.Struct] = answers.Error
    """The object of its errors."""
    needs_key: bool = True
    needs_admin: bool = False

    @property
    def method(self) -> str:
        """The method in lower case, as OpenAPI has it."""
        return self.route.partition(" ")[0].lower()

    @property
    def path(self) -> str:
        """The path, with the name of what varies in braces."""
        return self.route.partition(" ")[2]


class CountedInput(msgspec.Struct, kw_only=True):
    """A request for a response, as far as its members change the number of tokens."""

    model: str | None = None
    input: Annotated[str | Items, Meta(description="As of a request for a response.")]
    instructions: str | None = None
    tools: list[Any] | None = None


_SCRAPE_TARGETS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "targets": {"type": "array", "items": {"type": "string"}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["targets", "labels"],
        "additionalProperties": False,
    },
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

_generation = functools.partial(
    Operation, errors=GENERATING, request_headers=tuple(REQUEST_HEADERS), answer_headers=_GENERATED
)
_counting = functools.partial(Operation, errors=WITH_MODEL, answer_headers=tuple(_LIMITS))
_stored = functools.partial(Operation, errors=STORED)

OPERATIONS: tuple[Operation, ...] = (
    _generation(
        "POST /v1/chat/completions",
        "createChatCompletion",
        "Answers a conversation.",
        body=ChatRequest,
        answer=ChatCompletion,
        events=ChatCompletionChunk,
    ),
    _generation(
        "POST /v1/completions",
        "createCompletion",
        "Continues a text.",
        body=CompletionRequest,
        answer=Completion,
        events=CompletionChunk,
    ),
    _generation(
        "POST /v1/responses",
        "createResponse",
        "Answers an input with a response object, which is kept for a while.",
        body=ResponsesRequest,
        answer=Response,
        events=ResponseEvent,
    ),
    _counting(
        "POST /v1/responses/input_tokens",
        "countInputTokens",
        "Counts the tokens of a response's input; members that do not change the number are ignored.",
        body=CountedInput,
        answer=answers.InputTokens,
    ),
    _counting(
        "POST /v1/chat/completions/input_tokens",
        "countChatTokens",
        "Counts the tokens of a chat's prompt.",
        body=ChatRequest,
        answer=CountedTokens,
    ),
    _generation(
        "POST /v1/messages",
        "createMessage",
        "Answers a conversation in the words of Anthropic's API.",
        body=MessagesRequest,
        answer=AnthropicMessage,
        events=MessageEvent,
        error=MessageError,
    ),
    _counting(
        "POST /v1/messages/count_tokens",
        "countMessageTokens",
        "Counts the tokens of such a conversation.",
        body=MessagesRequest,
        answer=CountedTokens,
        error=MessageError,
    ),
    _stored(
        "GET /v1/responses/{response_id}",
        "showResponse",
        "A stored response as it is now, or the events of one in the background.",
        answer=Response,
        events=ResponseEvent,
        query=(
            ("stream", "The events of a response that was made with `background` and `stream`.", {"type": "boolean"}),
            ("starting_after", "The number of the event before the first.", {"type": "integer", "minimum": 0}),
        ),
    ),
    _stored(
        "DELETE /v1/responses/{response_id}", "deleteResponse", "Forgets a response.", answer=answers.DeletedResponse
    ),
    _stored(
        "POST /v1/responses/{response_id}/cancel",
        "cancelResponse",
        "Ends a response in the background; one that is over stays as it is.",
        answer=Response,
    ),
    _stored(
        "GET /v1/responses/{response_id}/input_items",
        "listInputItems",
        "The items of a response's input, with those of the responses that it continues; latest first.",
        answer=answers.ItemList,
        query=(*_PAGE, ("order", "By place.", {"enum": ["asc", "desc"]})),
    ),
    Operation(
        "POST /v1/files",
        "createFile",
        "Takes a file of requests, one JSON object in each line, for a batch.",
        body=_FORM,
        body_kind="multipart/form-data",
        answer=answers.StoredFile,
        errors=(*STORED_WITH_BODY, 429),
    ),
    _stored(
        "GET /v1/files",
        "listFiles",
        "The tenant's files, latest first.",
        answer=answers.FileList,
        query=(*_PAGE, ("order", "By age.", {"enum": ["asc", "desc"]}), ("purpose", "Only these.", {"type": "string"})),
    ),
    _stored("GET /v1/files/{file_id}", "showFile", "One file.", answer=answers.StoredFile),
    _stored("DELETE /v1/files/{file_id}", "deleteFile", "Forgets a file.", answer=answers.DeletedFile),
    _stored("GET /v1/files/{file_id}/content", "readFile", "The content of a file.", answer="application/octet-stream"),
    Operation(
        "POST /v1/batches",
        "createBatch",
        "Answers all requests of a file, as capacity allows.",
        body=CreateBatch,
        answer=answers.StoredBatch,
        errors=(*STORED_WITH_BODY, 429),
    ),
    _stored(
        "GET /v1/batches", "listBatches", "The tenant's batches, latest first.", answer=answers.BatchList, query=_PAGE
    ),
    _stored("GET /v1/batches/{batch_id}", "showBatch", "One batch.", answer=answers.StoredBatch),
    Operation(
        "POST /v1/batches/{batch_id}/cancel",
        "cancelBatch",
        "Ends a batch; answers that exist are kept.",
        answer=answers.StoredBatch,
        errors=(*STORED_WITH_BODY, 409),
    ),
    *(
        Operation(
            f"POST {path}",
            name,
            "Always refused, by the code unsupported_endpoint: this server generates text only.",
            body={},
            answer=None,
            errors=WITH_BODY,
        )
        for path, name in (
            ("/v1/embeddings", "createEmbedding"),
            ("/v1/score", "createScore"),
            ("/v1/rerank", "createRanking"),
            ("/v2/rerank", "createRankingV2"),
            ("/score", "createScoreUnversioned"),
            ("/rerank", "createRankingUnversioned"),
        )
    ),
    Operation(
        "GET /v1/models",
        "listModels",
        "The models that the key allows, under each of their names.",
        answer=answers.ModelList,
    ),
    Operation(
        "GET /v1/models/{name}",
        "showModel",
        "One model.",
        answer=answers.Model,
        errors=(*EVERYWHERE, 404),
        path_field="A name or alias; may contain slashes.",
    ),
    _counting(
        "POST /tokenize",
        "tokenize",
        "The token ids of a text, or of a conversation as it would be generated from.",
        body=TokenizeRequest,
        answer=answers.Tokens,
    ),
    _counting(
        "POST /detokenize",
        "detokenize",
        "The text of token ids, special ones shown.",
        body=DetokenizeRequest,
        answer=answers.Text,
    ),
    _counting(
        "POST /apply-template",
        "applyTemplate",
        "The text of a conversation as it would be generated from.",
        body=TokenizeRequest,
        answer=answers.Prompt,
    ),
    Operation("GET /version", "showVersion", "The version of the server.", answer=answers.Version),
    Operation(
        "GET /tokenizer_info",
        "showTokenizer",
        "The chat template and the special tokens of a model.",
        answer=answers.TokenizerInfo,
        errors=(*EVERYWHERE, 404),
        query=(("model", "A name or alias; needed where several models are served.", {"type": "string"}),),
    ),
    Operation(
        "GET /health",
        "showHealth",
        "The gateway is alive; with `verbose`, which asks for an admin's key where others do, what its checks say.",
        answer=answers.Health,
        errors=(400, 401, 403, 431, 500),
        needs_key=False,
        query=(("verbose", "Given, and not 0 or false: the checks are told too.", {"type": "string"}),),
    ),
    Operation(
        "GET /ready",
        "showReadiness",
        "Whether requests can be served.",
        answer=answers.Readiness,
        errors=(400, 431, 500),
        others=((503, answers.Readiness),),
        needs_key=False,
    ),
    Operation(
        "GET /metrics",
        "showMetrics",
        "Prometheus' text format, or that of OpenMetrics where `Accept` has it.",
        answer=CONTENT_TYPE,
        needs_admin=True,
    ),
    Operation(
        "GET /metrics/targets",
        "listMetricsTargets",
        "The workers that serve metrics, as Prometheus' HTTP service discovery reads them.",
        answer=_SCRAPE_TARGETS,
        needs_admin=True,
    ),
    Operation(
        "GET /cluster", "showCluster", "Workers and requests now.", answer=answers.ClusterState, needs_admin=True
    ),
    Operation(
        "GET /cluster/requests/{name}",
        "locateRequest",
        "The workers that have a request, whichever gateway takes care of it; for a minute after its end.",
        answer=answers.RequestPlace,
        errors=(*EVERYWHERE, 404),
        needs_admin=True,
    ),
    Operation(
        "GET /dashboard",
        "showDashboard",
        "The dashboard; its scripts and styles are beside it.",
        answer="text/html; charset=utf-8",
        needs_key=False,
    ),
    *(
        Operation(
            f"GET /dashboard/{path}",
            name,
            summary,
            answer=answer,
            errors=(*EVERYWHERE, *more),
            needs_admin=True,
            path_field=path_field,
        )
        for path, name, summary, answer, more, path_field in (
            ("data", "showDashboardData", "What the dashboard shows first.", answers.DashboardPage, (), ""),
            ("events", "watchDashboard", "What has changed, each second.", "text/event-stream; charset=utf-8", (), ""),
            ("requests", "listRequests", "Ended requests, latest first.", answers.DashboardPage, (), ""),
            (
                "requests/{name}",
                "showRequest",
                "One ended request.",
                answers.DashboardPage,
                (404,),
                "Its id, or its number after an @.",
            ),
        )
    ),
    Operation("GET /openapi.json", "showDocument", "This document.", answer=JSON),
)
