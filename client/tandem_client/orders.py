"""What is asked of a gateway: the methods, and one class for each kind of stream. Makes no call."""

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from google.protobuf.message import Message

from tandem_client.connections import Metadata, checked_text
from tandem_client.errors import Failure, InvalidRequest, ServerError, Unavailable
from tandem_client.messages import (
    chat_delta_of,
    chat_request,
    choice_of,
    delta_of,
    generate_request,
    topology_of,
)
from tandem_client.protos import cluster_pb2, inference_pb2, wire_pb2
from tandem_client.retries import Course, Naming, RetryBudget, RetryPolicy
from tandem_client.values import (
    Answer,
    Asked,
    Chat,
    ChatDelta,
    ChatRequest,
    Delta,
    FinishReason,
    Request,
    TokenLogprobs,
    Topology,
)

ItemT = TypeVar("ItemT")
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[ResponseT]):
    """A method by its full path; requests encode themselves."""

    path: str
    decode: Callable[[bytes], ResponseT]


GENERATE = Method("/tandem.v1.Inference/Generate", inference_pb2.GenerateResponse.FromString)
RESUME = Method("/tandem.v1.Inference/Resume", inference_pb2.GenerateResponse.FromString)
GENERATE_UNARY = Method("/tandem.v1.Inference/GenerateUnary", inference_pb2.GenerateResponse.FromString)
CHAT = Method("/tandem.v1.Inference/Chat", inference_pb2.ChatResponse.FromString)
CHAT_UNARY = Method("/tandem.v1.Inference/ChatUnary", inference_pb2.ChatUnaryResponse.FromString)
EMBED = Method("/tandem.v1.Inference/Embed", inference_pb2.EmbedResponse.FromString)
LIST_MODELS = Method("/tandem.v1.Inference/ListModels", inference_pb2.ListModelsResponse.FromString)
TOKENIZE = Method("/tandem.v1.Inference/Tokenize", inference_pb2.TokenizeResponse.FromString)
DETOKENIZE = Method("/tandem.v1.Inference/Detokenize", inference_pb2.DetokenizeResponse.FromString)
GET_TOPOLOGY = Method("/tandem.v1.Cluster/GetTopology", cluster_pb2.Topology.FromString)
WATCH_TOPOLOGY = Method("/tandem.v1.Cluster/WatchTopology", cluster_pb2.Topology.FromString)
DRAIN = Method("/tandem.v1.Cluster/Drain", cluster_pb2.DrainResponse.FromString)
CHECK_HEALTH = Method("/grpc.health.v1.Health/Check", wire_pb2.HealthCheckResponse.FromString)

INFERENCE_SERVICE = "tandem.v1.Inference"
NO_RETRIES = RetryPolicy(max_attempts=1)


def encode(message: Message) -> bytes:
    """A message as bytes, for any method."""
    return message.SerializeToString()


@dataclass(frozen=True, slots=True)
class Route:
    """What a client has in common for all its calls."""

    policy: RetryPolicy
    budget: RetryBudget
    num_addresses: int
    address: int
    """Where the last call succeeded."""

    def course(self, naming: Naming = Naming.NONE, *, resume_at: int | None = None) -> Course:
        """The way of a new call."""
        return Course(
            self.policy,
            self.budget,
            naming=naming,
            num_addresses=self.num_addresses,
            address=self.address,
            resume_at=resume_at,
        )


class Order(abc.ABC, Generic[ItemT]):
    """One stream of items, over as many calls as its course needs."""

    course: Course
    metadata: Metadata
    is_complete: bool = False
    """The last item has come."""

    @abc.abstractmethod
    def next_call(self) -> tuple[Method[Any], Message]:
        """Method and request of the next attempt."""

    @abc.abstractmethod
    def take(self, message: Any) -> ItemT:
        """The item in a message. Raises ServerError for a message that breaks the protocol."""

    def ended(self) -> Failure:
        """A stream that ended without an error and before its time: the gateway has left."""
        return Failure(Unavailable("the stream ended before it was complete"))

    def told(self, initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """What the server said before its first message."""


@dataclass
class AnswerOrder(Order[Delta]):
    """The answer of a generation, or the rest of one."""

    request: inference_pb2.GenerateRequest | None
    """None: only the rest is asked for."""
    request_id: str
    """Empty until it is known."""
    tenant: str
    metadata: Metadata
    course: Course
    model: str = ""
    fallback: str = ""
    is_complete: bool = field(default=False, init=False)

    def next_call(self) -> tuple[Method[Any], Message]:
        """`Generate`, or `Resume` at the first token that is missing."""
        if self.request is not None and not self.course.resumes:
            return GENERATE, self.request
        resume = inference_pb2.ResumeRequest(
            request_id=self.request_id, next_index=self.course.next_index, tenant=self.tenant
        )
        return RESUME, resume

    def take(self, message: inference_pb2.GenerateResponse) -> Delta:
        """Returns the delta, and notes for the course where the answer continues."""
        self.course.received(first_index=message.first_index, num_tokens=len(message.token_ids))
        self.request_id = message.request_id or self.request_id
        delta = delta_of(message)
        self.is_complete = delta.finish_reason is not None
        return delta

    def told(self, initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Which model answers, and in whose place."""
        self.model, self.fallback = model_told(initial_metadata)


@dataclass
class ChatOrder(Order[ChatDelta]):
    """The answers to a conversation, whose parts come once: what breaks after the first of them is an error."""

    request: inference_pb2.ChatRequest
    metadata: Metadata
    course: Course
    request_id: str = ""
    """Empty until it is known."""
    model: str = ""
    fallback: str = ""
    is_complete: bool = field(default=False, init=False)
    num_open: int = field(init=False)
    """Answers whose last part has not come."""

    def __post_init__(self) -> None:
        self.num_open = self.request.num_choices or 1

    def next_call(self) -> tuple[Method[Any], Message]:
        """`Chat`."""
        return CHAT, self.request

    def take(self, message: inference_pb2.ChatResponse) -> ChatDelta:
        """Returns the delta, and notes whether it is the last one."""
        self.course.made_progress()
        self.request_id = message.request_id or self.request_id
        delta = chat_delta_of(message)
        self.num_open -= delta.finish_reason is not None
        self.is_complete = self.num_open == 0
        return delta

    def told(self, initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Which model answers, and in whose place."""
        self.model, self.fallback = model_told(initial_metadata)


@dataclass
class TopologyOrder(Order[Topology]):
    """A cluster's topology and its changes; never complete."""

    metadata: Metadata
    course: Course
    is_complete: bool = field(default=False, init=False)

    def next_call(self) -> tuple[Method[Any], Message]:
        """`WatchTopology`, which begins with the topology as it is."""
        return WATCH_TOPOLOGY, cluster_pb2.WatchTopologyRequest()

    def take(self, message: cluster_pb2.Topology) -> Topology:
        """The topology."""
        self.course.made_progress()
        return topology_of(message)


def naming_of(request: Asked) -> Naming:
    """What makes the request safe to send again."""
    if request.idempotency_key:
        return Naming.KEY
    return Naming.ID if request.request_id else Naming.NONE


def answer_order(request: Request, metadata: Metadata, route: Route) -> AnswerOrder:
    """A new generation. Raises InvalidRequest for what cannot be sent."""
    message = generate_request(request)
    sent = (*metadata, *request_metadata(request))
    return AnswerOrder(message, request.request_id, request.tenant, sent, route.course(naming_of(request)))


def chat_order(request: ChatRequest, metadata: Metadata, route: Route) -> ChatOrder:
    """A new conversation's answers. Raises InvalidRequest for what cannot be sent."""
    sent = (*metadata, *request_metadata(request))
    return ChatOrder(chat_request(request), sent, route.course())


def chat_of(response: inference_pb2.ChatUnaryResponse, told: Iterable[tuple[str, str | bytes]] | None) -> Chat:
    """All answers to a conversation, with what the server told before them. Raises ServerError."""
    model, fallback = model_told(told)
    return Chat(response.request_id, tuple(map(choice_of, response.choices)), model, fallback)


def resume_order(request_id: str, next_index: int, tenant: str, metadata: Metadata, route: Route) -> AnswerOrder:
    """The rest of a generation that was begun before, perhaps by another process. Raises InvalidRequest."""
    if not 0 <= next_index < 2**32:
        raise InvalidRequest("next_index must be in [0, 2^32)", field="next_index")
    course = route.course(Naming.ID, resume_at=next_index)
    return AnswerOrder(None, request_id, tenant, metadata, course)


def request_metadata(request: Asked) -> Metadata:
    """What of a request travels beside its message."""
    pairs: list[tuple[str, str | bytes]] = []
    if request.idempotency_key:
        pairs.append(("idempotency-key", checked_text(request.idempotency_key, field="idempotency_key")))
    if request.allow_fallback is not None:
        pairs.append(("x-allow-fallback", "true" if request.allow_fallback else "false"))
    return tuple(pairs)


def model_told(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """(model, fallback) as the gateway names them."""
    told = {key: value for key, value in initial_metadata or () if isinstance(value, str)}
    return unquote(told.get("x-tandem-model", "")), unquote(told.get("x-tandem-fallback", ""))


class AnswerParts:
    """Puts deltas together to an answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """The next one."""
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._last = delta

    def answer(self, request_id: str, model: str, fallback: str) -> Answer:
        """The whole. Raises ServerError where the last one does not say that it is."""
        reason: FinishReason | None = None if self._last is None else self._last.finish_reason
        if self._last is None or reason is None:
            raise ServerError("the server sent an answer without its end")
        return Answer(
            request_id=request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            finish_reason=reason,
            usage=self._last.usage,
            model=model,
            fallback=fallback,
        )
