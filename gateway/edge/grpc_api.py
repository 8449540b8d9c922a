"""The public gRPC services `Inference` and `Cluster`.

An edge: turns protobuf into a `Call` and `Delta`s into protobuf. Errors become statuses in `services.runtime.rpc`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from grpc_health.v1 import health

from gateway.access.door import FrontDoor
from gateway.access.keys import ApiKey
from gateway.http.bodies import Bodies, Claim
from gateway.limits import (
    GRPC_PREFIX,
    check_affinity_key,
    check_idempotency_key,
    check_permission,
    check_text_to_count,
    check_token_ids,
)
from gateway.models.catalog import header_value
from gateway.models.response_format import json_schema_in
from gateway.named.ask import Ask, ask_for, ask_to_resume
from gateway.named.journal import digest_of
from gateway.named.requests import Journals
from gateway.requests.call import Call, TenantTicket
from gateway.requests.fallback import begun
from gateway.requests.lifecycle import Requests
from gateway.topology.members import Member, Topology
from gateway.topology.presence import Gone
from gateway.topology.troubles import Troubles
from gateway.types import AskedSampling, Delta, TokenLogprobs, Usage
from gateway.wishes import read_wishes
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.runtime import rpc, telemetry
from services.runtime.errors import InvalidRequest, PermissionDenied, Unauthenticated
from services.runtime.places import OPERATORS, STRANGERS
from services.runtime.sampling_wire import read_sampling
from services.runtime.tls import OPERATOR
from services.runtime.worker_state import WorkerState
from services.scheduling.disaggregation import PREFILL_CHOICES, PrefillChoice
from services.scheduling.health import GpuState
from services.structured.grammar import ANY_OBJECT

INFERENCE_SERVICE, CLUSTER_SERVICE = "tandem.v1.Inference", "tandem.v1.Cluster"
SERVICE_NAMES = (INFERENCE_SERVICE, CLUSTER_SERVICE)
WATCH_INTERVAL_S = 0.5
MAX_DEADLINE_S = 24 * 3600.0
"""The gateway's own maximum applies on top of it."""

ALLOW_FALLBACK = "x-allow-fallback"
"""Metadata: `true` or `false`."""

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_ROLES = {"prefill": cluster_pb2.WORKER_ROLE_PREFILL, "decode": cluster_pb2.WORKER_ROLE_DECODE}
_STATES = {state: cluster_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState}
_GPU_STATES = {
    GpuState.OK: cluster_pb2.GPU_STATE_OK,
    GpuState.DEGRADED: cluster_pb2.GPU_STATE_DEGRADED,
    GpuState.OUT: cluster_pb2.GPU_STATE_OUT,
}
_PREFILL_CHOICES: "Mapping[PrefillChoice, cluster_pb2.PrefillChoice.ValueType]" = {
    "auto": cluster_pb2.PREFILL_CHOICE_AUTO,
    "local": cluster_pb2.PREFILL_CHOICE_LOCAL,
    "remote": cluster_pb2.PREFILL_CHOICE_REMOTE,
}
_REASONS = {"stop": inference_pb2.FINISH_REASON_STOP, "length": inference_pb2.FINISH_REASON_LENGTH}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Text generation and tokenization."""

    def __init__(self, requests: Requests, journals: Journals, *, door: FrontDoor, bodies: Bodies) -> None:
        self._door = door
        self._bodies = bodies
        self._requests = requests
        self._journals = journals
        self._created_unix_s = int(time.time())

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the answer of one prompt."""
        model = _AnsweringModel()
        with self._requests.refusals_noted():
            async with contextlib.aclosing(self._responses(request, context, model)) as responses:
                async for response in responses:
                    await model.tell(context)
                    yield response

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the rest of an answer."""
        model = _AnsweringModel()
        with self._requests.refusals_noted():
            async with contextlib.aclosing(self._rest(request, context, model)) as responses:
                async for response in responses:
                    await model.tell(context)
                    yield response

    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """The whole answer of one prompt."""
        whole = inference_pb2.GenerateResponse()
        texts: list[str] = []
        model = _AnsweringModel()
        with self._requests.refusals_noted():
            async with contextlib.aclosing(self._responses(request, context, model)) as responses:
                async for response in responses:
                    texts.append(response.text)
                    # Merging appends what is repeated and replaces what is not.
                    whole.MergeFrom(response)
        whole.text = "".join(texts)
        whole.first_index = 0
        await model.tell(context)
        return whole

    async def _responses(
        self, request: inference_pb2.GenerateRequest, context: Context, model: "_AnsweringModel"
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The parts of the answer of a new request, or of a named one that there is already."""
        key = _authenticate(self._door, context)
        # Held until the prompt has become tokens.
        with self._bodies.claim(key.tenant, num_bytes=request.ByteSize()) as claim:
            call = _call(request, context)
            self._door.let_in(call, key, model=self._requests.catalog.name_of(call.model))
            ask = _ask(call, request, context)
            request.Clear()
            if ask is not None:
                async with contextlib.aclosing(self._named(ask, key, context, model, claim)) as responses:
                    async for response in responses:
                        yield response
                return
            with await self._requests.accept(call) as accepted:
                claim.release()
                _add_limits(context, call.ticket)
                async with begun(self._requests, accepted, accepted.generations) as (stream,):
                    model.name, model.fallback = accepted.model, accepted.fallback
                    model.traceparent = accepted.span.told_traceparent
                    async with contextlib.aclosing(stream) as deltas:
                        async for delta in deltas:
                            yield _response(accepted.request_id, delta)

    async def _rest(
        self, request: inference_pb2.ResumeRequest, context: Context, model: "_AnsweringModel"
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        key = _authenticate(self._door, context)
        tenant = self._door.tenant_of(key, request.tenant)
        deadline = rpc.call_deadline(context, maximum_s=MAX_DEADLINE_S)
        ask = ask_to_resume(
            request.request_id,
            tenant,
            next_index=request.next_index,
            remaining_s=deadline.remaining_s(),
            ticket=self._door.ticket(tenant),
            trace=telemetry.extract(_metadata(context, "traceparent") or "", _metadata(context, "tracestate") or ""),
        )
        async with contextlib.aclosing(self._named(ask, key, context, model)) as responses:
            async for response in responses:
                yield response

    async def _named(
        self,
        ask: Ask,
        key: ApiKey,
        context: Context,
        model: "_AnsweringModel",
        claim: Claim | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """What the client does not have of a named answer. What ends it comes in one message: all of it or nothing."""
        async with self._journals.attach(ask) as reader, contextlib.aclosing(reader.parts()) as parts:
            if claim is not None:
                claim.release()
            # Another key of the tenant may have begun it, and may be allowed more.
            self._door.check_model(key, reader.model)
            model.name, model.fallback = reader.model, reader.fallback
            model.traceparent = reader.traceparent
            _add_limits(context, ask.ticket)
            last_text = ""
            async for part in parts:
                delta = part.delta
                if not delta.token_ids and delta.finish_reason is None:
                    last_text = delta.text
                    continue
                delta.text = last_text + delta.text
                yield _response(reader.request_id, delta)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The models that the caller's key allows, under each of their names."""
        with self._requests.refusals_noted():
            key = _authenticate(self._door, context)
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
                    )
                )
            return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text."""
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
        """Text of token ids."""
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
        """The tenant of a call that generates nothing, which counts as a request too."""
        key = _authenticate(self._door, context)
        self._door.check_model(key, self._requests.catalog.name_of(model), asked=model)
        ticket = self._door.ticket(key.tenant)
        if ticket is not None:
            await ticket.charge_request()
            _add_limits(context, ticket)
        return key.tenant


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Who is in the cluster, and taking a worker out: for operators."""

    def __init__(self, requests: Requests, topology: Topology, *, door: FrontDoor, troubles: Troubles) -> None:
        self._door = door
        self._troubles = troubles
        self._requests = requests
        self._topology = topology

    async def GetTopology(self, request: cluster_pb2.GetTopologyRequest, context: Context) -> cluster_pb2.Topology:
        """The topology now."""
        self._check_operator(context)
        return self._snapshot()

    async def WatchTopology(
        self, request: cluster_pb2.WatchTopologyRequest, context: Context
    ) -> AsyncGenerator[cluster_pb2.Topology, None]:
        """The topology now and after each change, at most once in WATCH_INTERVAL_S."""
        self._check_operator(context)
        last: cluster_pb2.Topology | None = None
        async with contextlib.aclosing(self._topology.changes()) as changes:
            async for _ in changes:
                snapshot = self._snapshot()
                if snapshot != last:
                    last = snapshot
                    yield snapshot
                await asyncio.sleep(WATCH_INTERVAL_S)

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Context) -> cluster_pb2.DrainResponse:
        """Takes a worker out of rotation."""
        self._check_operator(context)
        member = self._topology.drain(request.worker_id)
        return cluster_pb2.DrainResponse(state=_STATES[member.state])

    async def SetPrefill(
        self, request: cluster_pb2.SetPrefillRequest, context: Context
    ) -> cluster_pb2.SetPrefillResponse:
        """Chooses who computes prompts from now on."""
        who = self._check_operator(context)
        chosen = next((name for name, value in _PREFILL_CHOICES.items() if value == request.choice), None)
        if chosen is None:
            raise InvalidRequest(f"choice must be one of {', '.join(PREFILL_CHOICES)}", field="choice")
        before, self._requests.prefill_choice = self._requests.prefill_choice, chosen
        logger.info("an operator chose who computes prompts", extra={"who": who, "before": before, "now": chosen})
        return cluster_pb2.SetPrefillResponse(before=_PREFILL_CHOICES[before])

    def _check_operator(self, context: Context) -> str:
        """The caller's name for the log, or its tenant's.

        Raises Unauthenticated or PermissionDenied unless the caller has an operator's certificate or an admin's key.

        Where there are neither keys nor a CA, everybody is an operator.
        """
        identity, roles = rpc.identity(), rpc.caller_roles(context)
        if roles is not None:
            if OPERATOR not in roles:
                raise PermissionDenied(f"the caller's certificate does not have the role {OPERATOR}")
            return "a certificate"
        if identity is not None and identity.is_mutual and self._door.is_open:
            raise Unauthenticated(f"this needs a certificate with the role {OPERATOR}, shown at --operator-port")
        key = _authenticate(self._door, context)
        self._door.check_admin(key)
        return key.name or key.tenant or "anybody"

    def _snapshot(self) -> cluster_pb2.Topology:
        counts = cluster_pb2.RequestCounts(queued=self._requests.num_queued, running=self._requests.num_running)
        return cluster_pb2.Topology(
            workers=map(_worker, self._topology.members()),
            requests=counts,
            troubles=(cluster_pb2.Trouble(**asdict(trouble)) for trouble in self._troubles.all()),
            gone=(_gone(gone) for gone in self._topology.presence.gone),
            prefill=_PREFILL_CHOICES[self._requests.prefill_choice],
        )


def account_of(door: FrontDoor) -> Callable[[str, Context], str]:
    """For `services.runtime.intake.Intake`: the tenant whose key the caller shows. Raises Unauthenticated.

    Probes need no key, and an operator's certificate stands for one. All else does, reflection too: it names services
    that are not for everybody.
    """

    def account(method: str, context: Context) -> str:
        service = method.strip("/").partition("/")[0]
        if service == health.SERVICE_NAME:
            return STRANGERS
        if service != INFERENCE_SERVICE and OPERATOR in (rpc.caller_roles(context) or ()):
            return OPERATORS
        return _authenticate(door, context).tenant

    return account


def register(server: rpc.RpcServer, inference: InferenceService, cluster: ClusterService) -> None:
    """Adds both services to a server that was made for SERVICE_NAMES."""
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(cluster, server.server)


def _call(request: inference_pb2.GenerateRequest, context: Context) -> Call:
    allows_fallback = _metadata(context, ALLOW_FALLBACK)
    return Call(
        operation="text_completion",
        model=request.model,
        request_id=request.request_id or None,
        prompts=[_prompt(request)],
        sampling=_sampling(request),
        priority=request.priority,
        service_class=request.service_class,
        affinity_key=_affinity_key(context),
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        deadline=rpc.call_deadline(context, maximum_s=MAX_DEADLINE_S),
        wishes=read_wishes(lambda name: _metadata(context, name)),
        traceparent=_metadata(context, "traceparent") or "",
        tracestate=_metadata(context, "tracestate") or "",
        allow_fallback=None
        if allows_fallback is None
        else check_permission(allows_fallback, field_name=ALLOW_FALLBACK),
        field_prefix=GRPC_PREFIX,
        prompt_field="token_ids" if request.WhichOneof("prompt") == "token_ids" else "text",
    )


def _ask(call: Call, request: inference_pb2.GenerateRequest, context: Context) -> Ask | None:
    """What a request with a name asks for; None for one without. Raises InvalidRequest."""
    key = _metadata(context, "idempotency-key")
    if key is None and call.request_id is None:
        return None
    if key is not None:
        check_idempotency_key(key)
        call.idempotency_key = key
    body = inference_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return ask_for(call, digest_of("grpc", body.SerializeToString(deterministic=True)))


def _prompt(request: inference_pb2.GenerateRequest) -> str | list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt must be given as text or as token_ids", field="prompt")
    return request.text if kind == "text" else list(request.token_ids.ids)


def _sampling(request: inference_pb2.GenerateRequest) -> AskedSampling:
    return AskedSampling(json_schema=_json_schema(request.response_format), **read_sampling(request.sampling))


def _json_schema(asked: inference_pb2.ResponseFormat) -> str:
    kind = asked.WhichOneof("format")
    if kind is None:
        return ""
    return ANY_OBJECT if kind == "json_object" else json_schema_in(asked.json_schema)


@dataclass(slots=True)
class _AnsweringModel:
    """Which model answers, and in whose place; said once, with the first message.

    Not before: a client's gRPC does not try again what the server has begun to answer.
    """

    name: str = ""
    fallback: str = ""
    traceparent: str = ""
    """Of the request's span, where one is recorded."""
    is_told: bool = False

    async def tell(self, context: Context) -> None:
        """Sends it as initial metadata, unless it was."""
        if self.is_told:
            return
        self.is_told = True
        said = [("x-tandem-model", header_value(self.name))]
        if self.fallback:
            said.append(("x-tandem-fallback", header_value(self.fallback)))
        if self.traceparent:
            said.append(("traceparent", self.traceparent))
        await context.send_initial_metadata(tuple(said))


def _metadata(context: Context, name: str) -> str | None:
    """A text that the caller sent beside the request; None if it did not."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else ""
    return None


def _authenticate(door: FrontDoor, context: Context) -> ApiKey:
    """The caller's key. Raises Unauthenticated."""
    shown = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    return door.authenticate([value if isinstance(value, str) else "" for value in shown])


def _affinity_key(context: Context) -> str:
    """The caller's session, or an empty text. Raises InvalidRequest."""
    session = _metadata(context, "x-session-id")
    if session is None:
        return ""
    check_affinity_key(session, field_name="x-session-id")
    return session


def _add_limits(context: Context, ticket: TenantTicket | None) -> None:
    """Tells what is left of the tenant's limits, at the end of the call."""
    if ticket is not None and ticket.headers:
        context.set_trailing_metadata(tuple(ticket.headers))


def _response(request_id: str, delta: Delta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=_logprobs(delta.logprobs) if delta.logprobs is not None else (),
        prompt_logprobs=_logprobs(delta.prompt_logprobs.entries()) if delta.prompt_logprobs is not None else (),
    )
    if delta.finish_reason is not None:
        response.finish_reason = _REASONS[delta.finish_reason]
    if delta.usage is not None:
        response.usage.CopyFrom(_usage(delta.usage))
    return response


def _logprobs(entries: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    return [
        inference_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top=[inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
        )
        for entry in entries
    ]


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=usage.queue_s,
        prefill_s=usage.prefill_s,
        transfer_s=usage.transfer_s,
        decode_s=usage.decode_s,
    )


def _worker(member: Member) -> cluster_pb2.Worker:
    record, load = member.record, member.load
    return cluster_pb2.Worker(
        id=record.id,
        role=_ROLES[record.role],
        pid=record.pid,
        host=record.host,
        address=record.address,
        incarnation=record.incarnation,
        state=_STATES[member.state],
        model=record.model,
        exact=member.is_exact,
        arithmetic=member.arithmetic,
        pages=cluster_pb2.PageCounts(
            total=load.pages_total,
            free=load.pages_free,
            cached=load.pages_cached,
            reserved=load.pages_reserved,
            used=load.pages_used,
        ),
        running=load.running,
        waiting=load.waiting,
        gpu=_gpu(member),
        tensor_parallel=record.tensor_parallel,
        pipeline_parallel=record.pipeline_parallel,
        left_out=member.left_out,
        identity=record.identity,
    )


def _gone(gone: Gone) -> cluster_pb2.GoneWorker:
    worker = gone.worker
    return cluster_pb2.GoneWorker(
        id=worker.id,
        role=_ROLES[worker.role],
        model=worker.model,
        host=worker.host,
        address=worker.address,
        since_unix_s=gone.since_unix_s,
    )


def _gpu(member: Member) -> cluster_pb2.GpuHealth | None:
    if member.gpu_facts is None:
        return None
    gpu = member.gpu
    return cluster_pb2.GpuHealth(state=_GPU_STATES[gpu.state], weight=gpu.weight, reasons=gpu.reasons)
