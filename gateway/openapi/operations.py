"""The HTTP API as a table: each operation with its statuses, headers and types.

A new route is a new row; a test compares the table with the routes that are served.
"""

import functools
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.anthropic.answers import AnthropicMessage, CountedTokens, MessageError, MessageEvent
from gateway.anthropic.request import MessagesRequest
from gateway.batches.batches_api import CreateBatch
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
from gateway.openai.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from gateway.openai.requests import DetokenizeRequest, TokenizeRequest
from gateway.openai.responses_request import Items, ResponsesRequest
from gateway.openai.shapes import Schema
from gateway.openapi import answers
from gateway.openapi.operation import (
    EVERYWHERE,
    GENERATING,
    JSON,
    LIMITS,
    REQUEST_HEADERS,
    STORED,
    STORED_WITH_BODY,
    WITH_MODEL,
    Operation,
)
from gateway.stored.chats_api import ChangedMetadata
from gateway.stored.conversations_api import CreateConversation, NewItems
from gateway.wishes import RESIDENCY, TIMEOUT

_GENERATED = (
    *("X-Tandem-Model", "X-Tandem-Fallback", "X-Tandem-Tier", "X-Tandem-Ignored", "X-Should-Retry"),
    *LIMITS,
)


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
_embedding = functools.partial(
    Operation,
    errors=GENERATING,
    request_headers=("X-Request-Id", "X-Service-Class", TIMEOUT, RESIDENCY, "traceparent"),
    answer_headers=("X-Tandem-Model", "X-Tandem-Ignored", *LIMITS),
)
_counting = functools.partial(Operation, errors=WITH_MODEL, answer_headers=tuple(LIMITS))
_stored = functools.partial(Operation, errors=STORED)
_changing = functools.partial(Operation, errors=(*STORED_WITH_BODY, 429))

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
    _stored(
        "GET /v1/chat/completions",
        "listChatCompletions",
        "The tenant's stored chat answers, oldest first.",
        answer=answers.ChatList,
        query=(
            *_PAGE,
            ("order", "By age.", {"enum": ["asc", "desc"]}),
            ("model", "Only answers of the model that is told so.", {"type": "string"}),
            ("metadata[NAME]", "Only answers with this value; may be given for several names.", {"type": "string"}),
        ),
    ),
    _stored(
        "GET /v1/chat/completions/{completion_id}",
        "showChatCompletion",
        "A stored chat answer.",
        answer=answers.StoredChat,
    ),
    _changing(
        "POST /v1/chat/completions/{completion_id}",
        "changeChatCompletion",
        "Gives a stored chat answer other metadata.",
        body=ChangedMetadata,
        answer=answers.StoredChat,
    ),
    _stored(
        "DELETE /v1/chat/completions/{completion_id}",
        "deleteChatCompletion",
        "Forgets a chat answer.",
        answer=answers.DeletedChat,
    ),
    _stored(
        "GET /v1/chat/completions/{completion_id}/messages",
        "listChatMessages",
        "The messages that a stored chat answer was asked with, in their order.",
        answer=answers.ItemList,
        query=(*_PAGE, ("order", "By place.", {"enum": ["asc", "desc"]})),
    ),
    _changing(
        "POST /v1/conversations",
        "createConversation",
        "Makes a conversation, which responses continue and add to.",
        body=CreateConversation,
        answer=answers.Conversation,
    ),
    _stored(
        "GET /v1/conversations/{conversation_id}",
        "showConversation",
        "One conversation.",
        answer=answers.Conversation,
    ),
    _changing(
        "POST /v1/conversations/{conversation_id}",
        "changeConversation",
        "Gives a conversation other metadata.",
        body=ChangedMetadata,
        answer=answers.Conversation,
    ),
    _stored(
        "DELETE /v1/conversations/{conversation_id}",
        "deleteConversation",
        "Forgets a conversation with its items.",
        answer=answers.DeletedConversation,
    ),
    _stored(
        "GET /v1/conversations/{conversation_id}/items",
        "listConversationItems",
        "The items of a conversation, latest first.",
        answer=answers.ItemList,
        query=(*_PAGE, ("order", "By place.", {"enum": ["asc", "desc"]})),
    ),
    _changing(
        "POST /v1/conversations/{conversation_id}/items",
        "addConversationItems",
        "Adds items to the end of a conversation.",
        body=NewItems,
        answer=answers.ItemList,
    ),
    _stored(
        "GET /v1/conversations/{conversation_id}/items/{item_id}",
        "showConversationItem",
        "One item of a conversation.",
        answer={"type": "object"},
    ),
    _stored(
        "DELETE /v1/conversations/{conversation_id}/items/{item_id}",
        "deleteConversationItem",
        "Takes an item out of a conversation.",
        answer=answers.Conversation,
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
    _embedding(
        "POST /v1/embeddings",
        "createEmbedding",
        "The vectors of texts, by models that embed.",
        body=EmbeddingRequest,
        answer=EmbeddingList,
    ),
    *(
        _embedding(
            f"POST {path}",
            name,
            "How alike texts are: the cosines of their vectors.",
            body=ScoreRequest,
            answer=ScoreList,
        )
        for path, name in (("/v1/score", "createScore"), ("/score", "createScoreUnversioned"))
    ),
    *(
        _embedding(
            f"POST {path}",
            name,
            "Documents in the order of how near they are to a query: the cosines of their vectors.",
            body=RerankRequest,
            answer=Ranking,
        )
        for path, name in (
            ("/v1/rerank", "createRanking"),
            ("/v2/rerank", "createRankingV2"),
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
