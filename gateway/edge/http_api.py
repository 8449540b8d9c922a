"""The OpenAI API over HTTP and SSE: which path leads where, which key it needs, and how an answer goes out.

An edge: turns HTTP into a `Call`, answers into HTTP, and every error into OpenAI's error object. How a request lives is
`gateway.requests.lifecycle`'s business.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from gateway.access.door import FrontDoor, OperatorsDoor
from gateway.access.keys import ApiKey
from gateway.anthropic.errors import error_body
from gateway.anthropic.request import MessagesRequest
from gateway.anthropic.request import own_words as anthropic_words
from gateway.anthropic.writer import MessagesWriter
from gateway.edge.events import events
from gateway.edge.generate import Answers
from gateway.edge.http_calls import HttpCall, ask_of, read_call, unknown_to_template
from gateway.edge.pages import ApiPages, OperatorPages, json_response
from gateway.edge.tiers import TieredGenerator
from gateway.edge.tokenization import Tokenization
from gateway.edge.vectors import VectorPages
from gateway.http.bodies import Bodies, Claim
from gateway.http.exchange import (
    App,
    Endpoint,
    Exchange,
    HeaderPairs,
    Receive,
    Scope,
    Send,
    StreamPace,
    error_answer,
    header_values,
    note_error,
)
from gateway.http.ids import with_ids
from gateway.models.catalog import header_value
from gateway.named.requests import Journals
from gateway.observability.metrics import Metrics
from gateway.observability.request_log import code_of
from gateway.openai.chat import ChatRequest, ChatWriter
from gateway.openai.completions import CompletionRequest, CompletionWriter
from gateway.openai.requests import RequestBody
from gateway.openai.responses_request import ResponsesRequest, own_words
from gateway.openai.responses_writer import ResponsesWriter
from gateway.openai.writer import Head, Whole, Writer, system_fingerprint
from gateway.requests.lifecycle import Requests
from gateway.stored.kept import Kept
from gateway.stored.service import Keepers
from gateway.vectors.embedder import Embedder
from services.runtime import status
from services.runtime.errors import PermissionDenied, RequestCancelled, TandemError, Unauthenticated

API_PREFIX = "/v1/"
API_PATHS = frozenset(
    {"/score", "/rerank", "/tokenize", "/detokenize", "/apply-template", "/openapi.json", "/version", "/tokenizer_info"}
)
"""Paths that any key may ask, beside those that begin with the prefix; other servers have them there."""

UNPREFIXED = frozenset(
    {"/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/models", "/conversations"}
    | {"/chat/completions/input_tokens", "/responses/input_tokens"}
)
"""Paths that are served below the prefix, whichever way they are asked for."""
ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths whose errors are Anthropic's."""


Begin = Callable[[Exchange, HttpCall, ApiKey, Claim], Awaitable[Kept | None]]
"""Completes a request that was read, and returns what keeps its answer. May answer it, which ends the exchange."""
Serve = Callable[[Exchange, ApiKey], Awaitable[None]]
"""Answers one request of a caller with this key."""


_USUAL_PACE = StreamPace()


class HttpApi:
    """All routes of the API, and those of the operators' pages, at its own address or at theirs."""

    def __init__(
        self,
        requests: Requests,
        *,
        journals: Journals,
        door: FrontDoor,
        bodies: Bodies,
        metrics: Metrics,
        pages: OperatorPages,
    ) -> None:
        self._requests = requests
        self._keepers: Keepers | None = None
        self._door = door
        self._bodies = bodies
        self._metrics = metrics
        self._pages = pages
        self._api_pages = ApiPages(requests, door)
        self._generator = TieredGenerator(requests, journals, door)
        self._pace = _USUAL_PACE
        self._fingerprints: dict[str, str] = {}
        """System fingerprints by the names of models."""
        self.routes: list[BaseRoute] = []
        """What `app` serves; it fills them in."""

    def app(
        self,
        more_routes: Sequence[BaseRoute] = (),
        *,
        embedder: Embedder,
        pace: StreamPace = _USUAL_PACE,
        keepers: Keepers | None = None,
    ) -> App:
        """Returns the ASGI application, for `gateway.http.server`. `more_routes` ask for a key like the others.

        `keepers` None: no answer is kept, nor generated in the background.
        """
        self._pace, self._keepers = pace, keepers
        fast = self._fast_routes(embedder)
        others = [*more_routes, *self._api_pages.routes(), *self._pages.routes(has_api=True)]
        shared = {route.path: route for route in others if isinstance(route, Route) and route.path in fast}
        for route in shared.values():
            # `dispatch` answers it; here it is what a 405 names.
            route.methods = {*(route.methods or ()), "POST"}
        # First, as their paths may look like those of stored answers.
        routes: list[BaseRoute] = [
            Route(path, endpoint, methods=["POST"]) for path, endpoint in fast.items() if path not in shared
        ]
        routes += others
        self.routes = routes
        starlette = with_ids(self._starlette(routes))

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            # Starlette's layers cost a tenth of a request, so the routes that carry the load go around them.
            endpoint = fast.get(scope["path"]) if scope["method"] == "POST" else None
            if endpoint is None and scope["path"] in UNPREFIXED:
                # What a client asks that was given the address without /v1.
                scope["path"] = f"/v1{scope['path']}"
                endpoint = fast.get(scope["path"]) if scope["method"] == "POST" else None
            if endpoint is None and (refusal := self._refusal(scope)) is not None:
                await with_ids(refusal)(scope, receive, send)
            else:
                await (endpoint or starlette)(scope, receive, send)

        return dispatch

    def admin_app(self, door: OperatorsDoor | None) -> App:
        """Returns operators' pages, for an address of their own. `door` None: the system decides which callers do."""
        pages = self._starlette(self._pages.routes(has_api=False))

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            if door is not None and not self._pages.is_open(scope):
                try:
                    door.check(header_values(scope["headers"], b"authorization"))
                except (Unauthenticated, PermissionDenied) as error:
                    self._metrics.note_refusal(note_error(error))
                    await error_answer(error)(scope, receive, send)
                    return
            await pages(scope, receive, send)

        return with_ids(dispatch)

    def _fast_routes(self, embedder: Embedder) -> dict[str, App]:
        """Returns the endpoints that carry the load, by path; all are asked by POST."""
        tokenization = Tokenization(self._requests, door=self._door, bodies=self._bodies)
        vectors = VectorPages(self._requests, embedder, door=self._door, bodies=self._bodies)
        served: dict[str, Serve] = {
            "/v1/completions": partial(self._generate, body_type=CompletionRequest, writer_type=CompletionWriter),
            "/v1/chat/completions": partial(
                self._generate, body_type=ChatRequest, writer_type=ChatWriter, begin=self._begin_chat
            ),
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": tokenization.count_message,
            "/v1/responses/input_tokens": tokenization.count_input,
            "/v1/chat/completions/input_tokens": tokenization.count_chat,
            "/v1/embeddings": vectors.embeddings,
            **dict.fromkeys(("/v1/score", "/score"), vectors.score),
            **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), vectors.rerank),
            "/tokenize": tokenization.tokenize,
            "/detokenize": tokenization.detokenize,
            "/apply-template": tokenization.apply_template,
        }
        return {path: self._endpoint(serve, is_anthropic=path in ANTHROPIC_PATHS) for path, serve in served.items()}

    def _endpoint(self, serve: Serve, *, is_anthropic: bool) -> App:
        # What `serve` returns is awaited where it is called: each coroutine around it would cost every request more.
        return Endpoint(
            lambda exchange: serve(exchange, self._key_of(exchange.headers)),
            self._metrics,
            self._requests.log,
            write_error=error_body if is_anthropic else None,
        )

    def _key_of(self, headers: HeaderPairs) -> ApiKey:
        """Returns the key that a caller shows. Raises Unauthenticated."""
        shown = header_values(headers, b"authorization")
        if not shown:
            # As Anthropic's clients show it, and gateways of clouds.
            shown = [f"Bearer {key}" for key in header_values(headers, b"x-api-key")]
        return self._door.authenticate(shown)

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns the answer to a caller that may not see a page; None if it may.

        Probes need no key and the API one of any kind, and so does what does not exist. All else needs an admin's, also
        what is added later.
        """
        path: str = scope["path"]
        if self._pages.is_open(scope):
            return None
        try:
            key = self._key_of(scope["headers"])
            if not path.startswith(API_PREFIX) and path not in API_PATHS and self._exists(scope):
                self._door.check_admin(key)
        except (Unauthenticated, PermissionDenied) as error:
            self._metrics.note_refusal(note_error(error))
            return error_answer(error)
        scope["state"] = {**scope.get("state", {}), "key": key}
        return None

    def _exists(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self.routes)

    def _starlette(self, routes: Sequence[BaseRoute]) -> Starlette:
        # Starlette answers the errors of its routes with these, and logs those that are faults of this program.
        handlers: dict[Any, Any] = {
            HTTPException: self._routing_error,
            TandemError: self._error_response,
            500: self._error_response,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A path that is nearly right is a mistake to be told of, not to be sent elsewhere.
        app.router.redirect_slashes = False
        return app

    async def _error_response(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestCancelled):
            self._metrics.note_refusal(code_of(error))
        return error_answer(error)

    async def _routing_error(self, request: Request, error: Exception) -> Response:
        """Answers 404 and 405, which the router raises."""
        assert isinstance(error, HTTPException)
        name = HTTPStatus(error.status_code).name.lower()
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        self._metrics.note_refusal(name)
        detail = {"message": f"{error.detail}: {request.url.path[:200]}", "type": kind, "param": None, "code": name}
        return json_response({"error": detail}, http_status=error.status_code, headers=error.headers)

    async def _responses(self, exchange: Exchange, key: ApiKey) -> None:
        with own_words():
            await self._generate(
                exchange, key, body_type=ResponsesRequest, writer_type=ResponsesWriter, begin=self._begin_response
            )

    async def _begin_response(self, exchange: Exchange, read: HttpCall, key: ApiKey, claim: Claim) -> Kept | None:
        request = read.body
        assert isinstance(request, ResponsesRequest)
        if self._keepers is not None:
            return await self._keepers.responses.begin(exchange, request, call=read.call, key=key, claim=claim)
        request.check_stateless()
        request.store = False
        return None

    async def _begin_chat(self, exchange: Exchange, read: HttpCall, key: ApiKey, claim: Claim) -> Kept | None:
        request = read.body
        assert isinstance(request, ChatRequest)
        if request.store and self._keepers is not None:
            return await self._keepers.chats.begin(exchange, request, key=key)
        if request.store:
            exchange.add_header(b"x-tandem-ignored", "store")
        return None

    async def _messages(self, exchange: Exchange, key: ApiKey) -> None:
        with anthropic_words():
            await self._generate(exchange, key, body_type=MessagesRequest, writer_type=MessagesWriter)

    async def _generate(
        self,
        exchange: Exchange,
        key: ApiKey,
        *,
        body_type: type[RequestBody],
        writer_type: type[Writer],
        begin: Begin | None = None,
    ) -> None:
        """Serves a request from its body to the end of its answer."""
        # Held until its texts are tokens.
        with self._bodies.claim(key.tenant) as claim:
            read = await read_call(exchange, self._bodies, claim, body_type, writer_type)
            call, catalog = read.call, self._requests.catalog
            self._door.let_in(call, key, model=catalog.name_of(call.model))
            ignored = [*read.ignored, *unknown_to_template(call, catalog)]
            if ignored:
                exchange.add_header(b"x-tandem-ignored", ",".join(ignored))
            kept = None if begin is None else await begin(exchange, read, key, claim)
            if exchange.has_started:
                return
            ask = ask_of(exchange, read, writer_type)

            def note_taken(request_id: str, traceparent: str) -> None:
                claim.release()
                exchange.name(request_id, headers=writer_type.id_headers)
                exchange.add_trace(traceparent)
                exchange.add_limits(call.ticket)

            with exchange:
                async with self._generator.answers(ask or call, key, on_taken=note_taken) as answers:
                    await self._send(exchange, answers, read.body, writer_type, kept=kept)

    async def _send(
        self,
        exchange: Exchange,
        answers: Answers,
        request: RequestBody,
        writer_type: type[Writer],
        *,
        kept: Kept | None,
    ) -> None:
        """Sends all answers, as a stream or whole."""
        exchange.add_header(b"x-tandem-model", header_value(answers.named_model))
        if answers.fallback:
            exchange.add_header(b"x-tandem-fallback", header_value(answers.fallback))
        if answers.tier:
            exchange.add_header(b"x-tandem-tier", header_value(answers.tier))
        writer = self._writer(answers, request, writer_type)
        if request.stream:
            last_event_id = exchange.optional_header(b"last-event-id")
            if last_event_id is not None:
                writer.go_on_after(last_event_id)
            writer.waits_at_end = kept is not None
            if kept is not None and kept.is_recorded:
                answers.record()
            if not await self._stream(exchange, answers, writer, kept=kept):
                return
            if kept is not None and kept.is_recorded:
                again = self._writer(answers, request, writer_type)
                await kept.whole(await self._body(again, answers, answers.recorded()))
            await exchange.send_event(writer.end)
            await exchange.end_events()
        else:
            body = await self._body(writer, answers, await answers.wholes())
            await exchange.answer(200, body if kept is None else await kept.whole(body))

    def _writer(self, answers: Answers, request: RequestBody, writer_type: type[Writer]) -> Writer:
        model = self._requests.catalog[answers.model]
        fingerprint = self._fingerprints.get(model.name)
        if fingerprint is None:
            fingerprint = self._fingerprints[model.name] = system_fingerprint(model)
        head = Head(answers.request_id, answers.created_unix_s, answers.named_model, fingerprint)
        prompts = [spec.prompt_token_ids for spec in answers.specs]
        return writer_type(model.tokenizer, request, head=head, prompts=prompts)

    async def _body(self, writer: Writer, answers: Answers, wholes: Sequence[Whole]) -> bytes:
        """Returns the body of an answer that is not streamed."""
        num_logprobs = sum(len(whole.logprobs or ()) + len(whole.prompt_logprobs or ()) for whole in wholes)
        return await self._generator.written(answers, num_logprobs, writer.whole_in_steps(wholes))

    async def _stream(self, exchange: Exchange, answers: Answers, writer: Writer, *, kept: Kept | None) -> bool:
        """Sends all events. An error before the first event is raised; a later one ends them, and False is returned."""
        opened: set[int] = set()

        def first_event() -> bytes:
            """Returns what a client gets that has waited for long: a first event, where it is the same for all."""
            if answers.start_id:
                return writer.keep_alive
            opened.add(0)
            return writer.opening(0) or writer.keep_alive

        try:
            with exchange.kept_alive(self._pace, first=first_event, comment=writer.keep_alive):
                async with contextlib.aclosing(events(exchange, answers, writer, opened=opened)) as sent:
                    async for event in sent:
                        if event:
                            await exchange.send_event(event if kept is None else await kept.passing(event))
        except Exception as error:
            if not exchange.has_started:
                raise
            self._metrics.note_refusal(note_error(error))
            await exchange.send_event(writer.error(status.openai_error(error)))
            await exchange.end_events()
            return False
        return True
