"""The OpenAI API over HTTP and SSE, and the pages that operators and probes read.

An edge: turns HTTP into a `Call`, `Delta`s into HTTP, and every error into OpenAI's error object. How a request lives
is `gateway.requests.lifecycle`'s business.
"""

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.access.door import FrontDoor, OperatorsDoor
from gateway.access.keys import ApiKey
from gateway.dashboard.pages import Dashboard
from gateway.http.bodies import Bodies, Claim
from gateway.http.exchange import App, Endpoint, Exchange, Receive, Scope, Send, error_answer, header_values, note_error
from gateway.limits import (
    MAX_NAME_CHARS,
    check_affinity_key,
    check_idempotency_key,
    check_integer,
    check_permission,
    check_text_to_count,
    check_token_ids,
)
from gateway.models.answer_text import AnswerText
from gateway.models.catalog import ServedModel, header_value
from gateway.models.template_words import unknown_fields
from gateway.models.tools import encode_conversation, offered_tools
from gateway.named.ask import Ask, ask_for
from gateway.named.journal import digest_of, event_id
from gateway.named.reader import Reader
from gateway.named.requests import Journals
from gateway.observability.metrics import CONTENT_TYPE, Metrics
from gateway.observability.request_log import code_of
from gateway.openai.chat import ChatRequest, ChatWriter
from gateway.openai.completions import CompletionRequest, CompletionWriter
from gateway.openai.requests import Body, DetokenizeRequest, TokenizeRequest, parse, parse_members, parse_named
from gateway.openai.responses_request import TEMPLATE_FIELDS, ResponsesRequest, own_words
from gateway.openai.responses_writer import ResponsesWriter
from gateway.openai.writer import Head, Whole, Writer, system_fingerprint
from gateway.openapi.document import document_bytes
from gateway.requests.call import AcceptedCall, AnswerSpec, Call
from gateway.requests.delivery import FastPath
from gateway.requests.fallback import Stream, begun
from gateway.requests.fan_out import all_of, merged
from gateway.requests.lifecycle import Requests
from gateway.topology.members import Member, Topology
from gateway.topology.presence import Gone
from gateway.topology.troubles import Troubles
from gateway.topology.watch import CircuitReport
from gateway.types import Delta, PromptLogprobs, TokenLogprobs, Usage
from gateway.wishes import MAX_MS, TIMEOUT, read_ms, read_wishes
from services.cluster.redis_store import Store
from services.runtime import status
from services.runtime.clock import Deadline
from services.runtime.errors import (
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RequestCancelled,
    TandemError,
    Unauthenticated,
)
from services.runtime.identity import identity_fields
from services.runtime.version import version

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask, which have no key."""
API_PREFIX = "/v1/"
API_PATHS = frozenset({"/tokenize", "/detokenize", "/openapi.json"})
"""What any key may ask beside what begins with the prefix; they are where other servers have them."""
_NAMING = (b"idempotency-key", b"last-event-id", b"x-request-id")
"""Headers of requests that have a name, whose answers others may read too."""
MANY_LOGPROBS = 256
"""Tokens with log-probabilities that take at most 20 ms to write, about."""


class HttpApi:
    """All routes; `more_routes` ask for a key like the others.

    `is_ready` says whether requests can be served now, `port` where the API is served.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        journals: Journals,
        topology: Topology,
        metrics: Metrics,
        is_ready: Callable[[], bool],
        door: FrontDoor,
        dashboard: Dashboard,
        port: Callable[[], int],
        bodies: Bodies,
        store: Store,
        troubles: Troubles,
        more_routes: Sequence[BaseRoute] = (),
    ) -> None:
        self._more_routes = more_routes
        self._requests = requests
        self._dashboard = dashboard
        self._port = port
        self._bodies = bodies
        self._store = store
        self._troubles = troubles
        self._journals = journals
        self._topology = topology
        self._metrics = metrics
        self._is_ready = is_ready
        self._door = door
        self._created_unix_s = int(time.time())
        self._fingerprints: dict[str, str] = {}
        """By the names of models."""
        self.routes: list[BaseRoute] = []
        """What `app` serves; it fills them in."""

    def app(self) -> App:
        """The ASGI application, to be run by `gateway.http.server`."""
        fast: dict[str, App] = {
            "/v1/completions": Endpoint(self._completions, self._metrics, self._requests.log),
            "/v1/chat/completions": Endpoint(self._chat_completions, self._metrics, self._requests.log),
            "/v1/responses": Endpoint(self._responses, self._metrics, self._requests.log),
            "/v1/responses/input_tokens": Endpoint(self._count_input, self._metrics, self._requests.log),
            "/v1/embeddings": Endpoint(self._refuse_embeddings, self._metrics, self._requests.log),
            "/tokenize": Endpoint(self._tokenize, self._metrics, self._requests.log),
            "/detokenize": Endpoint(self._detokenize, self._metrics, self._requests.log),
        }
        routes: list[BaseRoute] = [Route(path, endpoint, methods=["POST"]) for path, endpoint in fast.items()]
        routes += [
            *self._more_routes,
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/v1/responses/{name:path}", self._show_no_response, methods=["GET", "POST", "DELETE"]),
            Route("/openapi.json", self._show_document),
            *self._probes(),
            *self._admin_pages(has_api=True),
        ]
        self.routes = routes
        starlette = Starlette(routes=routes, exception_handlers=self._handlers())
        # A path that is nearly right is a mistake to be told of, not to be sent elsewhere.
        starlette.router.redirect_slashes = False

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            # Starlette's layers cost a tenth of a request, so the routes that carry the load go around them.
            endpoint = fast.get(scope["path"]) if scope["method"] == "POST" else None
            if endpoint is None and (refusal := self._refusal(scope)) is not None:
                await refusal(scope, receive, send)
            else:
                await (endpoint or starlette)(scope, receive, send)

        return dispatch

    def admin_app(self, door: OperatorsDoor | None) -> App:
        """What operators read, for an address of its own. None: who reaches it was judged by the system."""
        routes = [*self._probes(), *self._admin_pages(has_api=False)]
        pages = Starlette(routes=routes, exception_handlers=self._handlers())
        pages.router.redirect_slashes = False

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            if door is not None and not self._is_open(scope["path"]):
                try:
                    door.check(header_values(scope["headers"], b"authorization"))
                except (Unauthenticated, PermissionDenied) as error:
                    self._metrics.note_refusal(note_error(error))
                    await error_answer(error)(scope, receive, send)
                    return
            await pages(scope, receive, send)

        return dispatch

    def _is_open(self, path: str) -> bool:
        """Whether a page says nothing about a cluster, so that nobody needs a key for it."""
        return path in OPEN_PATHS or self._dashboard.is_open(path)

    def _handlers(self) -> dict[Any, Any]:
        """What answers the errors of routes that are Starlette's, which logs those that are faults of ours."""
        return {HTTPException: self._routing_error, TandemError: self._error_response, 500: self._error_response}

    async def _error_response(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestCancelled):
            self._metrics.note_refusal(code_of(error))
        return error_answer(error)

    async def _routing_error(self, request: Request, error: Exception) -> Response:
        """404 and 405, which the router raises."""
        assert isinstance(error, HTTPException)
        name = HTTPStatus(error.status_code).name.lower()
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        self._metrics.note_refusal(name)
        detail = {"message": f"{error.detail}: {request.url.path[:200]}", "type": kind, "param": None, "code": name}
        return _json({"error": detail}, http_status=error.status_code, headers=error.headers)

    def _probes(self) -> list[Route]:
        return [Route("/health", self._show_health), Route("/ready", self._show_readiness)]

    def _admin_pages(self, *, has_api: bool) -> list[Route]:
        pages = self._dashboard.routes(api_port=self._port, has_api=has_api)
        return [Route("/metrics", self._show_metrics), Route("/cluster", self._show_cluster), *pages]

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a caller who may not see a page; None: it may.

        Probes need no key and the API one of any kind. All else needs an admin's, also what is added later and what
        does not exist.
        """
        path: str = scope["path"]
        if self._is_open(path):
            return None
        try:
            key = self._door.authenticate(header_values(scope["headers"], b"authorization"))
            if not path.startswith(API_PREFIX) and path not in API_PATHS:
                self._door.check_admin(key)
        except (Unauthenticated, PermissionDenied) as error:
            self._metrics.note_refusal(note_error(error))
            return error_answer(error)
        scope["state"] = {**scope.get("state", {}), "key": key}
        return None

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, CompletionRequest, CompletionWriter)

    async def _chat_completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, ChatRequest, ChatWriter)

    async def _responses(self, exchange: Exchange) -> None:
        with own_words():
            await self._generate(exchange, ResponsesRequest, ResponsesWriter)

    async def _count_input(self, exchange: Exchange) -> None:
        """How many tokens the input of a response would have."""
        key = self._door.authenticate(exchange.all_headers(b"authorization"))
        with own_words(), self._bodies.claim(key.tenant) as claim:
            call = await self._bodies.read(
                claim, exchange.read_body, lambda body: parse(body, ResponsesRequest)[0].call()
            )
            model = await self._let_in_free(exchange, key, call.model)
            token_ids = await self._encode_to_count(model, call.messages or (), call.tools, key.tenant)
        document = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        await exchange.answer(200, msgspec.json.encode(document))

    async def _refuse_embeddings(self, exchange: Exchange) -> None:
        key = self._door.authenticate(exchange.all_headers(b"authorization"))
        await self._bodies.take(exchange.read_body, len, tenant=key.tenant)
        raise InvalidRequest("this server generates text only; it has no embeddings", code="unsupported_endpoint")

    async def _tokenize(self, exchange: Exchange) -> None:
        """Token ids of a text, or of a conversation as it would be generated from."""
        key = self._door.authenticate(exchange.all_headers(b"authorization"))
        with self._bodies.claim(key.tenant) as claim:
            request, tools = await self._bodies.read(claim, exchange.read_body, _read_tokenize)
            model = await self._let_in_free(exchange, key, request.model)
            token_ids = await self._tokens_of(request, tools, model, key.tenant)
        max_tokens = self._requests.limits(model).context_length_tokens
        document = {"count": len(token_ids), "max_model_len": max_tokens, "tokens": token_ids}
        await exchange.answer(200, msgspec.json.encode(document))

    async def _tokens_of(
        self, request: TokenizeRequest, tools: list[dict[str, Any]] | None, model: ServedModel, tenant: str
    ) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed", field="prompt", code="invalid_value")
        if request.messages is not None:
            if request.add_special_tokens:
                # Templates write the special tokens themselves; a second set would be another prompt than is used.
                raise InvalidRequest(
                    "add_special_tokens goes with prompt, not with messages",
                    field="add_special_tokens",
                    code="unsupported_parameter",
                )
            return await self._encode_to_count(model, request.messages, tools, tenant)
        assert request.prompt is not None
        if request.tools:
            raise InvalidRequest(
                "tools goes with messages, not with prompt", field="tools", code="unsupported_parameter"
            )
        check_text_to_count(request.prompt, field_name="prompt", max_chars=self._requests.catalog.max_tokenize_chars)
        adds_special = request.add_special_tokens is not False
        return await model.tokenizer.encode(request.prompt, add_special_tokens=adds_special, tenant=tenant)

    async def _encode_to_count(
        self, model: ServedModel, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None, tenant: str
    ) -> list[int]:
        """Token ids of a conversation that nothing is generated from, so that no model's context bounds it."""
        most = self._requests.catalog.max_tokenize_chars
        try:
            return await encode_conversation(model.tokenizer, messages, tools, max_chars=most, tenant=tenant)
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            raise InvalidRequest(
                f"{error.field} must have at most {most} characters", field=error.field, code="string_above_max_length"
            ) from error

    async def _detokenize(self, exchange: Exchange) -> None:
        """The text of token ids, special ones shown."""
        key = self._door.authenticate(exchange.all_headers(b"authorization"))
        with self._bodies.claim(key.tenant) as claim:
            request, _ = await self._bodies.read(
                claim, exchange.read_body, lambda body: parse_members(body, DetokenizeRequest)
            )
            model = await self._let_in_free(exchange, key, request.model)
            token_ids = request.tokens
            if token_ids is None:
                raise InvalidRequest("tokens is missing", field="tokens", code="missing_required_parameter")
            check_token_ids(token_ids, model.limits, field_name="tokens")
            text = await model.tokenizer.decode_long(token_ids, skip_special_tokens=False, tenant=key.tenant)
        await exchange.answer(200, msgspec.json.encode({"prompt": text}))

    async def _let_in_free(self, exchange: Exchange, key: ApiKey, name: str | None) -> ServedModel:
        """The model of a request that generates nothing; it counts as one all the same."""
        catalog = self._requests.catalog
        self._door.check_model(key, catalog.name_of(name), asked=name)
        ticket = self._door.ticket(key.tenant)
        if ticket is not None:
            await ticket.charge_request()
        exchange.add_limits(ticket)
        return catalog.resolve(name)

    async def _generate(self, exchange: Exchange, body_type: type[Body], writer_type: type[Writer]) -> None:
        """From the body of a request to the end of its answer."""
        key = self._door.authenticate(exchange.all_headers(b"authorization"))
        with self._bodies.claim(key.tenant) as claim:
            await self._generate_holding(claim, exchange, key, body_type, writer_type)

    async def _generate_holding(
        self, claim: Claim, exchange: Exchange, key: ApiKey, body_type: type[Body], writer_type: type[Writer]
    ) -> None:
        """The same with the body's memory, which is held until its texts are tokens."""
        is_named = any(exchange.optional_header(name) is not None for name in _NAMING)
        request, ignored, call, digest = await self._bodies.read(
            claim, exchange.read_body, lambda body: _read_call(body, body_type, writer_type, is_named=is_named)
        )
        call.service_class = _service_class(call, exchange)
        session = exchange.optional_header(b"x-session-id")
        if session is not None:
            check_affinity_key(session, field_name="X-Session-Id")
            call.affinity_key = session
        _read_permission(exchange, call)
        call.wishes = read_wishes(lambda name: exchange.optional_header(name.encode()))
        call.deadline = _deadline(exchange, request)
        self._door.let_in(call, key, model=self._requests.catalog.name_of(call.model))
        call.request_id = exchange.optional_header(b"x-request-id")
        call.traceparent = exchange.header(b"traceparent")
        call.tracestate = ",".join(exchange.all_headers(b"tracestate"))
        ask = _ask(exchange, call, digest, request, writer_type)
        ignored = [*ignored, *self._unknown_to_template(call)]
        if ignored:
            exchange.add_header(b"x-tandem-ignored", ",".join(ignored))
        if ask is not None:
            with exchange.cancelled_on_disconnect():
                async with self._journals.attach(ask) as reader:
                    claim.release()
                    exchange.add_header(b"x-request-id", reader.request_id)
                    exchange.add_trace(reader.traceparent)
                    # Another key of the tenant may have begun it, and may be allowed more.
                    self._door.check_model(key, reader.model)
                    if ask.call is not None:
                        exchange.add_limits(ask.call.ticket)
                    await self._answer_named(exchange, reader, request, writer_type)
            return
        with await self._requests.accept(call) as accepted:
            claim.release()
            exchange.add_header(b"x-request-id", accepted.request_id)
            exchange.add_trace(accepted.span.told_traceparent)
            exchange.add_limits(call.ticket)
            with exchange.cancelled_on_disconnect():
                paths = [FastPath() for _ in accepted.generations]
                async with begun(self._requests, accepted, accepted.generations, fast_paths=paths) as streams:
                    _add_model_headers(exchange, accepted.model, accepted.fallback)
                    writer = self._writer(
                        writer_type, request, accepted.request_id, int(time.time()), accepted.generations
                    )
                    if request.stream:
                        await self._stream(exchange, self._events(exchange, accepted, streams, writer, paths), writer)
                    else:
                        pairs = zip(accepted.generations, streams, paths, strict=True)
                        answers = await all_of([self._whole(*each) for each in pairs])
                        await exchange.answer(200, await self._body(writer, answers, accepted.generations))

    def _unknown_to_template(self, call: Call) -> list[str]:
        """The members of a request that the chat template of its model knows nothing of."""
        if not call.template_fields:
            return []
        try:
            model = self._requests.catalog.resolve(call.model)
        except InvalidRequest:
            return []  # it is told when the call is accepted
        unknown = unknown_fields(call.template_fields, model.tokenizer.template_names)
        return [TEMPLATE_FIELDS.get(field, field) if call.prompt_field == "input" else field for field in unknown]

    async def _answer_named(self, exchange: Exchange, reader: Reader, request: Body, writer_type: type[Writer]) -> None:
        """The answer of a request with a name, which others may read too."""
        _add_model_headers(exchange, reader.model, reader.fallback)
        writer = self._writer(writer_type, request, reader.request_id, reader.created_unix_s, reader.generations)
        if request.stream:
            last_event_id = exchange.optional_header(b"last-event-id")
            if last_event_id is not None:
                writer.go_on_after(last_event_id)
            await self._stream(exchange, _named_events(reader, writer, self._requests.new_text), writer)
        else:
            await exchange.answer(200, await self._body(writer, await _wholes(reader), reader.generations))

    def _writer(
        self,
        writer_type: type[Writer],
        request: Body,
        request_id: str,
        created_unix_s: int,
        generations: Sequence[AnswerSpec],
    ) -> Writer:
        model = self._requests.catalog[generations[0].model]
        fingerprint = self._fingerprints.get(model.name)
        if fingerprint is None:
            fingerprint = self._fingerprints[model.name] = system_fingerprint(model)
        head = Head(request_id, created_unix_s, model.name, fingerprint)
        prompts = [generation.prompt_token_ids for generation in generations]
        return writer_type(model.tokenizer, request, head=head, prompts=prompts)

    async def _body(self, writer: Writer, answers: Sequence[Whole], generations: Sequence[AnswerSpec]) -> bytes:
        """The body of an answer that is not streamed."""
        num_entries = sum(len(answer.logprobs or ()) + len(answer.prompt_logprobs or ()) for answer in answers)
        if num_entries < MANY_LOGPROBS:
            return writer.whole(answers)
        # Seconds at the bounds, in which nobody else's tokens would go out.
        turns = self._requests.catalog[generations[0].model].tokenizer.turns
        return await turns.call(lambda: writer.whole(answers), tenant=generations[0].tenant)

    async def _whole(self, generation: AnswerSpec, stream: Stream, path: FastPath) -> Whole:
        """One answer, complete."""
        token_ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprobs] | None = None
        prompt_logprobs: PromptLogprobs | None = None

        def take(delta: Delta) -> bool:
            nonlocal logprobs, prompt_logprobs
            token_ids.extend(delta.token_ids)
            texts.append(delta.text)
            if delta.logprobs is not None:
                logprobs = [*(logprobs or ()), *delta.logprobs]
            prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
            return True

        path.take = take
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                take(delta)
        assert delta.finish_reason is not None
        assert delta.usage is not None
        return Whole(
            index=generation.choice,
            token_ids=token_ids,
            text="".join(texts),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=delta.finish_reason,
            usage=delta.usage,
            prompt_token_ids=generation.prompt_token_ids,
        )

    async def _events(
        self,
        exchange: Exchange,
        accepted: AcceptedCall,
        streams: list[Stream],
        writer: Writer,
        paths: list[FastPath],
    ) -> AsyncGenerator[bytes, None]:
        """The events of all answers as they come, but for those of a single one that could be sent at once."""
        tally = _UsageTally(accepted.generations, is_continuous=writer.is_usage_continuous)
        opened: set[int] = set()

        def send_now(delta: Delta) -> bool:
            if not exchange.can_send_event_now():
                return False
            event = writer.chunk(0, delta, tally.take(0, delta))
            if event:
                exchange.send_event_now(event)
            return True

        if len(streams) == 1:
            paths[0].take = send_now
        async with contextlib.aclosing(merged(streams)) as parts:
            async for choice, delta in parts:
                opening = b"" if choice in opened else writer.opening(choice)
                opened.add(choice)
                yield opening + writer.chunk(choice, delta, tally.take(choice, delta))
        yield writer.usage_chunk(tally.all()) if writer.has_usage else b""

    async def _stream(self, exchange: Exchange, events: AsyncGenerator[bytes, None], writer: Writer) -> None:
        """Sends all events and the end. An error before the first event is raised, a later one is an event."""
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if event:
                        await exchange.send_event(event)
        except Exception as error:
            if not exchange.has_started:
                raise
            self._metrics.note_refusal(note_error(error))
            await exchange.send_event(writer.error(status.openai_error(error)))
            await exchange.end_events()
            return
        await exchange.send_event(writer.end)
        await exchange.end_events()

    async def _list_models(self, request: Request) -> Response:
        key: ApiKey = request.state.key
        names = self._requests.catalog.names()
        data = [self._model(name, model) for name, model in names if key.allows_model(model.name)]
        return _json({"object": "list", "data": data})

    async def _show_model(self, request: Request) -> Response:
        name, catalog = request.path_params["name"], self._requests.catalog
        self._door.check_model(request.state.key, catalog.name_of(name), asked=name)
        return _json(self._model(name, catalog.resolve(name)))

    def _model(self, name: str, model: ServedModel) -> dict[str, Any]:
        """A model under one of its names; `root` is its own."""
        return {
            "id": name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "tandem",
            "root": model.name,
            "max_model_len": self._requests.limits(model).context_length_tokens,
            "sampling_defaults": model.sampling_defaults,
        }

    async def _show_no_response(self, request: Request) -> Response:
        name = request.path_params["name"][:MAX_NAME_CHARS]
        raise NotFound(f"there is no response {name}: this server stores none", code="response_not_found")

    async def _show_document(self, request: Request) -> Response:
        return Response(document_bytes(asks_for_keys=not self._door.is_open), media_type="application/json")

    async def _show_health(self, request: Request) -> Response:
        return _json({"status": "alive"})

    async def _show_readiness(self, request: Request) -> Response:
        is_ready = self._is_ready()
        return _json({"status": "ready" if is_ready else "not ready"}, http_status=200 if is_ready else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(self._topology.members()), media_type=CONTENT_TYPE)

    async def _show_cluster(self, request: Request) -> Response:
        circuits = self._requests.circuits()
        return _json(
            {
                "workers": [
                    _worker_json(member, circuits.get(member.record.id)) for member in self._topology.members()
                ],
                "cut_pairs": [dataclasses.asdict(pair) for pair in self._requests.cut_pairs()],
                "version": version(),
                "requests": {"queued": self._requests.num_queued, "running": self._requests.num_running},
                "prefill": self._requests.prefill_choice,
                "redis": {
                    "available": self._store.is_available,
                    "round_trip_s": round(self._store.round_trip.mean_s, 6),
                    "last_failure": self._store.last_failure,
                },
                "expected": self._topology.presence.expected,
                "gone": [_gone_json(gone) for gone in self._topology.presence.gone],
                "troubles": self._troubles.all(),
            }
        )


def _read_call(
    body: bytes, body_type: type[Body], writer_type: type[Writer], *, is_named: bool
) -> tuple[Body, list[str], Call, str]:
    """The request, the names of members that are ignored, the call, and of a request with a name its digest."""
    if not is_named:
        request, ignored = parse(body, body_type)
        return request, ignored, request.call(), ""
    request, ignored, canonical = parse_named(body, body_type)
    return request, ignored, request.call(), digest_of(writer_type.object_name, canonical)


def _read_tokenize(body: bytes) -> tuple[TokenizeRequest, list[dict[str, Any]] | None]:
    """The request, and the tools that go with its messages."""
    request, _ = parse_members(body, TokenizeRequest)
    return request, None if request.messages is None else offered_tools(request.tools, None)


def _read_permission(exchange: Exchange, call: Call) -> None:
    """X-Allow-Fallback, for clients that cannot add a field to the body, which would count. Raises InvalidRequest."""
    said = exchange.optional_header(b"x-allow-fallback")
    if said is not None and call.allow_fallback is None:
        call.allow_fallback = check_permission(said, field_name="X-Allow-Fallback")


def _deadline(exchange: Exchange, request: Body) -> Deadline | None:
    """From the body or the header; None: the server's. Raises InvalidRequest where both are there and differ."""
    named_ms = request.request_timeout_ms
    if named_ms is not None:
        check_integer(named_ms, "request_timeout_ms", minimum=1, maximum=MAX_MS)
    timeout_s = read_ms(lambda name: exchange.optional_header(name.encode()), TIMEOUT)
    if timeout_s is not None and named_ms is not None and timeout_s != named_ms / 1000:
        raise InvalidRequest(
            f"request_timeout_ms and {TIMEOUT} differ", field="request_timeout_ms", code="invalid_value"
        )
    if timeout_s is None:
        timeout_s = None if named_ms is None else named_ms / 1000
    return None if timeout_s is None else Deadline.after(timeout_s)


def _add_model_headers(exchange: Exchange, model: str, fallback: str) -> None:
    exchange.add_header(b"x-tandem-model", header_value(model))
    if fallback:
        exchange.add_header(b"x-tandem-fallback", header_value(fallback))


def _service_class(call: Call, exchange: Exchange) -> str:
    """From the body or the header. Raises InvalidRequest where both are there and differ."""
    named = exchange.header(b"x-service-class").strip().lower()
    if named and call.service_class and named != call.service_class:
        raise InvalidRequest("service_class and X-Service-Class differ", field="service_class", code="invalid_value")
    return call.service_class or named


def _ask(exchange: Exchange, call: Call, digest: str, request: Body, writer_type: type[Writer]) -> Ask | None:
    """What a request with a name asks for; None for one without. Raises InvalidRequest."""
    key = exchange.optional_header(b"idempotency-key")
    last_event_id = exchange.optional_header(b"last-event-id")
    if key is None and last_event_id is None and call.request_id is None:
        return None
    if key is not None:
        check_idempotency_key(key)
        call.idempotency_key = key
    if last_event_id is not None and not request.stream:
        raise InvalidRequest("Last-Event-ID needs stream to be true", field="Last-Event-ID", code="invalid_event_id")
    position = None if last_event_id is None else writer_type.journal_event_id(last_event_id)
    return ask_for(call, digest, last_event_id=position)


async def _named_events(
    reader: Reader, writer: Writer, new_text: Callable[[AnswerSpec], AnswerText]
) -> AsyncGenerator[bytes, None]:
    """The events of all answers from the reader's position on, each with its id."""
    tally = _UsageTally(reader.generations, is_continuous=writer.is_usage_continuous)
    begun: set[int] = set()
    before = event_id(reader.request_id, reader.positions)

    def skip(choice: int, num_tokens: int, *, has_all: bool) -> None:
        """The client has so many tokens of this answer; `has_all`: also the text that was held back until its end."""
        begun.add(choice)
        answer = reader.answers[choice]
        token_ids = answer.token_ids[:num_tokens]
        logprobs = answer.logprobs and answer.logprobs[:num_tokens]
        text = _text_of(new_text(reader.generations[choice]), token_ids, has_all=has_all)
        writer.skip(choice, token_ids, text, logprobs)
        tally.skip(choice, num_tokens)

    async with contextlib.aclosing(reader.parts()) as parts:
        async for part in parts:
            if part.choice not in begun:
                # A last part comes alone where the client has all of the text, or where none was held back.
                skip(part.choice, part.delta.first_index, has_all=part.delta.finish_reason is not None)
            # The connection may be cut between any two events, so each has an id.
            opening = writer.opening(part.choice) if part.is_first else b""
            if opening:
                opening = writer.with_ids(opening, before=before, after=part.opening_id)
            event = writer.chunk(part.choice, part.delta, tally.take(part.choice, part.delta))
            if event:
                event = writer.with_ids(event, before=part.opening_id or before, after=part.event_id)
            before = part.event_id
            yield opening + event
    if writer.has_usage:
        # What the writer counts itself is of all answers, also those that the client has to their ends.
        for choice in {*range(len(reader.answers))} - begun:
            skip(choice, len(reader.answers[choice].token_ids), has_all=True)
        yield writer.usage_chunk(reader.usages())


def _text_of(text: AnswerText, token_ids: Sequence[int], *, has_all: bool) -> str:
    """What a reader has shown of these tokens; `has_all`: also what was held back until the end."""
    taken = [text.push((token_id,)) for token_id in token_ids]
    is_stopped = any(each.is_stopped for each in taken)
    return "".join(each.text for each in taken) + ("" if is_stopped or not has_all else text.finish())


async def _wholes(reader: Reader) -> list[Whole]:
    """All answers, complete."""
    texts: list[list[str]] = [[] for _ in reader.answers]
    async with contextlib.aclosing(reader.parts()) as parts:
        async for part in parts:
            texts[part.choice].append(part.delta.text)
    wholes = []
    for index, (answer, (usage, prompt)) in enumerate(zip(reader.answers, reader.usages(), strict=True)):
        assert answer.finish_reason is not None  # the parts have come to their end
        wholes.append(
            Whole(
                index=index,
                token_ids=answer.token_ids,
                text="".join(texts[index]),
                logprobs=answer.logprobs,
                finish_reason=answer.finish_reason,
                usage=usage,
                prompt_token_ids=prompt,
            )
        )
    return wholes


class _UsageTally:
    """Usage of the answers of a stream: at the end, and so far for clients that want it with every chunk."""

    def __init__(self, generations: list[AnswerSpec], *, is_continuous: bool) -> None:
        self._is_continuous = is_continuous
        self._prompts = [generation.prompt_token_ids for generation in generations]
        self._num_tokens = [0] * len(generations)
        self._usages: dict[int, Usage] = {}

    def skip(self, choice: int, num_tokens: int) -> None:
        """The client has so many tokens of an answer already."""
        self._num_tokens[choice] += num_tokens

    def take(self, choice: int, delta: Delta) -> Usage | None:
        """The usage of one answer up to this delta, if that is its last one or each is to have it."""
        if delta.usage is not None:
            self._usages[choice] = delta.usage
            return delta.usage
        if not self._is_continuous:
            return None
        self._num_tokens[choice] += len(delta.token_ids)
        return Usage(len(self._prompts[choice]), 0, self._num_tokens[choice], 0.0, 0.0, 0.0, 0.0)

    def all(self) -> list[tuple[Usage, Any]]:
        """(usage, prompt) of each answer."""
        return [(usage, self._prompts[choice]) for choice, usage in self._usages.items()]


def _json(value: Any, *, http_status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), http_status, headers, media_type="application/json")


def _worker_json(member: Member, circuit: CircuitReport | None) -> dict[str, Any]:
    record, load = member.record, member.load
    return {
        "id": record.id,
        "role": record.role,
        "pid": record.pid,
        "host": record.host,
        "address": record.address,
        "incarnation": record.incarnation,
        "state": member.state,
        "model": record.model,
        "exact": member.is_exact,
        "arithmetic": member.arithmetic,
        "identity": identity_fields(record.identity),
        "left_out": member.left_out,
        "unreachable": member.obstacle.cause if member.obstacle is not None and member.state == "lost" else "",
        "layout": record.layout_fingerprint,
        "tensor_parallel": record.tensor_parallel,
        "pipeline_parallel": record.pipeline_parallel,
        "version": record.version,
        "clock_ahead_s": load.clock_ahead_s,
        "channels": record.channels,
        "pages": {
            "total": load.pages_total,
            "free": load.pages_free,
            "cached": load.pages_cached,
            "reserved": load.pages_reserved,
            "used": load.pages_used,
        },
        "running": load.running,
        "waiting": load.waiting,
        "gpu": _gpu_json(member),
        "circuit": None if circuit is None else circuit.as_json(),
        "counts": None if member.session.counts is None else member.session.counts.as_json(),
    }


def _gone_json(gone: Gone) -> dict[str, Any]:
    worker = gone.worker
    return {
        "id": worker.id,
        "role": worker.role,
        "model": worker.model,
        "host": worker.host,
        "address": worker.address,
        "since_unix_s": gone.since_unix_s,
    }


def _gpu_json(member: Member) -> dict[str, Any] | None:
    if member.gpu_facts is None:
        return None
    gpu = member.gpu
    return {"state": gpu.state.value, "weight": gpu.weight, "reasons": gpu.reasons}
