"""The public gRPC service `Inference`, and how both public services are served.

An edge: turns protobuf into a `Call` and `Delta`s into protobuf. Errors become statuses in `services.runtime.rpc`.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from grpc_health.v1 import health

from gateway.access.door import FrontDoor
from gateway.edge.generate import Answers
from gateway.edge.grpc_chat import ChatReader, chat_call, without_name
from gateway.edge.grpc_cluster import CLUSTER_SERVICE, ClusterService
from gateway.edge.grpc_context import Context, add_limits, authenticate, metadata
from gateway.edge.grpc_messages import LENGTH, STOP, form_of, logprobs_of, usage_of
from gateway.edge.tiers import TieredGenerator
from gateway.edge.vectors import in_turns
from gateway.http.bodies import Bodies
from gateway.limits import (
    GRPC_PREFIX,
    check_affinity_key,
    check_idempotency_key,
    check_permission,
    check_text_to_count,
    check_token_ids,
)
from gateway.models.catalog import header_value
from gateway.models.turns import Steps
from gateway.named.ask import Ask, ask_for, ask_to_resume
from gateway.named.journal import digest_of
from gateway.named.requests import Journals
from gateway.observability.tracing import Origin
from gateway.openai.embeddings import numbers_of
from gateway.openai.writer import Whole
from gateway.requests.call import Call
from gateway.requests.lifecycle import Requests
from gateway.types import AskedSampling, Delta
from gateway.vectors.embedder import OPERATION, Embedder
from gateway.wishes import read_wishes
from protos import cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.runtime import rpc, telemetry
from services.runtime.errors import InvalidRequest
from services.runtime.interceptor import caller_roles
from services.runtime.places import OPERATORS, STRANGERS
from services.runtime.sampling_wire import read_sampling
from services.runtime.tls import OPERATOR

INFERENCE_SERVICE = "tandem.v1.Inference"
SERVICE_NAMES = (INFERENCE_SERVICE, CLUSTER_SERVICE)
MAX_DEADLINE_S = 24 * 3600.0
"""The gateway's own maximum applies on top of it."""

ALLOW_FALLBACK = "x-allow-fallback"
"""Metadata: `true` or `false`."""

Request = TypeVar("Request", inference_pb2.GenerateRequest, inference_pb2.ChatRequest)
AnyRequest = inference_pb2.GenerateRequest | inference_pb2.ChatRequest | inference_pb2.EmbedRequest
_REASONS = {"stop": STOP, "length": LENGTH}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generation of texts, answers to conversations, and tokenization."""

    def __init__(
        self, requests: Requests, journals: Journals, *, embedder: Embedder, door: FrontDoor, bodies: Bodies
    ) -> None:
        self._embedder = embedder
        self._door = door
        self._bodies = bodies
        self._requests = requests
        self._generator = TieredGenerator(requests, journals, door)
        self._created_unix_s = int(time.time())

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the answer of one prompt."""
        with self._requests.refusals_noted():
            async with (
                self._generated(request, context, _call, method="Generate") as (answers, _),
                contextlib.aclosing(self._responses(answers, context)) as responses,
            ):
                async for response in responses:
                    yield response

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the rest of an answer."""
        with self._requests.refusals_noted():
            async with (
                self._resumed(request, context) as answers,
                contextlib.aclosing(self._responses(answers, context)) as responses,
            ):
                async for response in responses:
                    yield response

    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Returns the whole answer of one prompt."""
        with self._requests.refusals_noted():
            async with self._generated(request, context, _call, method="GenerateUnary") as (answers, _):
                (whole,) = await answers.wholes()
                await context.send_initial_metadata(_told(answers))
                return await self._response(answers, _delta_of(whole))

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.ChatResponse, None]:
        """Streams the answers to a conversation."""
        with self._requests.refusals_noted():
            async with self._generated(request, context, chat_call, method="Chat") as (answers, call):
                reader, is_told = self._chat_reader(answers, call), False
                async with contextlib.aclosing(answers.parts()) as parts:
                    async for part in parts:
                        response = reader.response(part.choice, part.delta)
                        if not is_told:
                            is_told = True
                            await context.send_initial_metadata(_told(answers))
                        yield response

    async def ChatUnary(self, request: inference_pb2.ChatRequest, context: Context) -> inference_pb2.ChatUnaryResponse:
        """Returns the whole answers to a conversation."""
        with self._requests.refusals_noted():
            async with self._generated(request, context, chat_call, method="ChatUnary") as (answers, call):
                reader, wholes = self._chat_reader(answers, call), await answers.wholes()
                await context.send_initial_metadata(_told(answers))
                return inference_pb2.ChatUnaryResponse(
                    request_id=answers.request_id, choices=[reader.whole(whole) for whole in wholes]
                )

    def _chat_reader(self, answers: Answers, call: Call) -> ChatReader:
        prompts = [spec.prompt_token_ids for spec in answers.specs]
        tokenizer = self._requests.catalog[answers.model].tokenizer
        return ChatReader(tokenizer, call, request_id=answers.request_id, prompts=prompts)

    async def _responses(
        self, answers: Answers, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the messages of an answer. What ends it comes in one message: all of it or nothing."""
        is_told, last_text = False, ""
        async with contextlib.aclosing(answers.parts()) as parts:
            async for part in parts:
                delta = part.delta
                if not delta.token_ids and delta.finish_reason is None:
                    last_text = delta.text
                    continue
                delta.text = last_text + delta.text
                if not is_told:
                    is_told = True
                    await context.send_initial_metadata(_told(answers))
                yield await self._response(answers, delta)

    async def _response(self, answers: Answers, delta: Delta) -> inference_pb2.GenerateResponse:
        num_logprobs = len(delta.logprobs or ()) + len(delta.prompt_logprobs or ())
        return await self._generator.written(answers, num_logprobs, _response(answers.request_id, delta))

    @contextlib.asynccontextmanager
    async def _generated(
        self, request: Request, context: Context, call_of: Callable[[Request], Call], *, method: str
    ) -> AsyncIterator[tuple[Answers, Call]]:
        """The answers to a new request, or to a named one that exists already, and its call."""
        key = authenticate(self._door, context)
        # Held until the prompt has become tokens.
        with self._bodies.claim(key.tenant, num_bytes=request.ByteSize()) as claim:
            call = _completed(call_of(request), request, context)
            origin = Origin(rpc_method=f"{INFERENCE_SERVICE}/{method}")
            call.note_origin(lambda name: metadata(context, name) or "", origin)
            self._door.let_in(call, key, model=self._requests.catalog.name_of(call.model))
            ask = _ask(call, request, context)
            request.Clear()

            def note_taken(request_id: str, traceparent: str) -> None:
                claim.release()
                add_limits(context, call.ticket)

            async with self._generator.answers(ask or call, key, on_taken=note_taken) as answers:
                yield answers, call

    @contextlib.asynccontextmanager
    async def _resumed(self, request: inference_pb2.ResumeRequest, context: Context) -> AsyncIterator[Answers]:
        """The rest of an answer whose request has a name."""
        key = authenticate(self._door, context)
        tenant = self._door.tenant_of(key, request.tenant)
        ticket = self._door.ticket(tenant)
        ask = ask_to_resume(
            request.request_id,
            tenant,
            next_index=request.next_index,
            remaining_s=rpc.call_deadline(context, maximum_s=MAX_DEADLINE_S).remaining_s(),
            ticket=ticket,
            trace=telemetry.extract(*telemetry.from_client(lambda name: metadata(context, name) or "")),
        )

        def note_taken(request_id: str, traceparent: str) -> None:
            add_limits(context, ticket)

        async with self._generator.answers(ask, key, on_taken=note_taken) as answers:
            yield answers

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        """Returns the vectors of texts."""
        with self._requests.refusals_noted():
            key = authenticate(self._door, context)
            with self._bodies.claim(key.tenant, num_bytes=request.ByteSize()) as claim:
                call = _completed(_embedding_call(request), request, context)
                call.note_origin(
                    lambda name: metadata(context, name) or "", Origin(rpc_method=f"{INFERENCE_SERVICE}/Embed")
                )
                self._door.let_in(call, key, model=self._requests.catalog.name_of(call.model))
                order = self._embedder.order_for(call, request.dimensions or None)
                with await self._requests.accept(call) as accepted:
                    claim.release()
                    add_limits(context, call.ticket)
                    embedded = await self._embedder.vectors(accepted, order)
            response = inference_pb2.EmbedResponse(
                request_id=accepted.request_id, prompt_tokens=embedded.num_prompt_tokens
            )
            async for vector in in_turns(embedded.vectors):
                response.vectors.add().values.extend(numbers_of(vector))
            await context.send_initial_metadata((("x-tandem-model", header_value(accepted.model)),))
            return response

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Returns the models that the caller's key allows, under each of their names."""
        with self._requests.refusals_noted():
            key = authenticate(self._door, context)
            models = []
            for name, model in sorted(self._requests.catalog.names()):
                if not key.allows_model(model.name):
                    continue
                limits = self._requests.limits(model)
                models.append(
                    inference_pb2.Model(
                        name=name,
                        context_length_tokens=limits.context_length_tokens,
                        vocab_size=limits.vocab_size,
                        created_unix_s=self._created_unix_s,
                        parent=model.name if name in model.adapters else "",
                    )
                )
            return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Returns the token ids of a text."""
        with self._requests.refusals_noted():
            tenant = await self._let_in(request.model, context)
            catalog = self._requests.catalog
            check_text_to_count(request.text, field_name="text", max_chars=catalog.max_tokenize_chars)
            with self._bodies.claim(tenant, num_bytes=request.ByteSize()):
                token_ids = await catalog.resolve(request.model).tokenizer.encode(
                    request.text, add_special_tokens=not request.without_special_tokens, tenant=tenant
                )
            return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of token ids."""
        with self._requests.refusals_noted():
            tenant = await self._let_in(request.model, context)
            model = self._requests.catalog.resolve(request.model)
            with self._bodies.claim(tenant, num_bytes=request.ByteSize()):
                token_ids = list(request.token_ids)
                check_token_ids(token_ids, model.limits, field_name="token_ids")
                text = await model.tokenizer.decode_long(
                    token_ids, skip_special_tokens=not request.with_special_tokens, tenant=tenant
                )
            return inference_pb2.DetokenizeResponse(text=text)

    async def _let_in(self, model: str, context: Context) -> str:
        """Returns the tenant of a call that generates nothing, which counts as a request too."""
        key = authenticate(self._door, context)
        self._door.check_model(key, self._requests.catalog.name_of(model), asked=model)
        ticket = self._door.ticket(key.tenant)
        if ticket is not None:
            await ticket.charge_request()
            add_limits(context, ticket)
        return key.tenant


def account_of(door: FrontDoor) -> Callable[[str, Context], str]:
    """Returns the tenant whose key the caller shows, for `services.runtime.intake.Intake`. Raises Unauthenticated.

    Probes need no key, and an operator's certificate stands for one. All else does, reflection too: it names services
    that are not for everybody.
    """

    def account(method: str, context: Context) -> str:
        service = method.strip("/").partition("/")[0]
        if service == health.SERVICE_NAME:
            return STRANGERS
        if service != INFERENCE_SERVICE and OPERATOR in (caller_roles(context) or ()):
            return OPERATORS
        return authenticate(door, context).tenant

    return account


def register(server: rpc.RpcServer, inference: InferenceService, cluster: ClusterService) -> None:
    """Adds both services to a server that was made for SERVICE_NAMES."""
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(cluster, server.server)


def _completed(call: Call, request: AnyRequest, context: Context) -> Call:
    """Returns the call with what all generating methods have, in the message or beside it. Raises InvalidRequest."""
    allows_fallback = metadata(context, ALLOW_FALLBACK)
    call.request_id = request.request_id or None
    call.priority = request.priority
    call.service_class = request.service_class
    call.affinity_key = _affinity_key(context)
    call.cache_salt = request.cache_salt
    call.tenant = request.tenant
    call.deadline = rpc.call_deadline(context, maximum_s=MAX_DEADLINE_S)
    call.wishes = read_wishes(lambda name: metadata(context, name))
    if allows_fallback is not None:
        call.allow_fallback = check_permission(allows_fallback, field_name=ALLOW_FALLBACK)
    return call


def _call(request: inference_pb2.GenerateRequest) -> Call:
    return Call(
        operation="text_completion",
        model=request.model,
        prompts=[_prompt(request)],
        sampling=_sampling(request),
        field_prefix=GRPC_PREFIX,
        prompt_field="token_ids" if request.WhichOneof("prompt") == "token_ids" else "text",
    )


def _embedding_call(request: inference_pb2.EmbedRequest) -> Call:
    inputs: list[str | list[int]] = []
    for place, given in enumerate(request.inputs):
        kind = given.WhichOneof("input")
        if kind is None:
            raise InvalidRequest(f"inputs[{place}] must be a text or token_ids", field=f"inputs[{place}]")
        inputs.append(given.text if kind == "text" else list(given.token_ids.ids))
    return Call(operation=OPERATION, model=request.model, prompts=inputs, prompt_field="inputs")


def _ask(call: Call, request: Request, context: Context) -> Ask | None:
    """Returns what a request with a name asks for; None for one without. Raises InvalidRequest."""
    key = metadata(context, "idempotency-key")
    if key is None and call.request_id is None:
        return None
    if key is not None:
        check_idempotency_key(key)
        call.idempotency_key = key
    kind = "grpc" if isinstance(request, inference_pb2.GenerateRequest) else "grpc-chat"
    return ask_for(call, digest_of(kind, without_name(request)))


def _prompt(request: inference_pb2.GenerateRequest) -> str | list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt must be given as text or as token_ids", field="prompt")
    return request.text if kind == "text" else list(request.token_ids.ids)


def _sampling(request: inference_pb2.GenerateRequest) -> AskedSampling:
    asked = AskedSampling(**read_sampling(request.sampling))
    asked.json_schema, asked.form_field = form_of(request.response_format)
    return asked


def _told(answers: Answers) -> tuple[tuple[str, str], ...]:
    """Initial metadata: which model answers, in whose place, and which span is the request's.

    To be sent with the first message and not before: a client's gRPC does not try again what the server has begun to
    answer.
    """
    said = [("x-tandem-model", header_value(answers.named_model))]
    if answers.fallback:
        said.append(("x-tandem-fallback", header_value(answers.fallback)))
    if answers.tier:
        said.append(("x-tandem-tier", header_value(answers.tier)))
    if answers.traceparent:
        said.append(("traceparent", answers.traceparent))
    return tuple(said)


def _affinity_key(context: Context) -> str:
    """Returns the caller's session, or an empty text. Raises InvalidRequest."""
    session = metadata(context, "x-session-id")
    if session is None:
        return ""
    check_affinity_key(session, field_name="x-session-id")
    return session


def _response(request_id: str, delta: Delta) -> Steps[inference_pb2.GenerateResponse]:
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=logprobs_of(delta.logprobs) if delta.logprobs is not None else (),
    )
    if delta.prompt_logprobs is not None:
        for entries in delta.prompt_logprobs.parts():
            response.prompt_logprobs.extend(logprobs_of(entries))
            yield
    if delta.finish_reason is not None:
        response.finish_reason = _REASONS[delta.finish_reason]
    if delta.usage is not None:
        response.usage.CopyFrom(usage_of(delta.usage))
    return response


def _delta_of(whole: Whole) -> Delta:
    delta = Delta(0, whole.token_ids, whole.text, whole.logprobs, whole.finish_reason, whole.usage)
    delta.prompt_logprobs = whole.prompt_logprobs
    return delta
