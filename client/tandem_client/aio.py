"""The asyncio client. What is asked and when it is asked again is decided elsewhere; this makes the calls.

A client belongs to the event loop that first used it.
"""

import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from google.protobuf.message import Message

from tandem_client import messages, orders
from tandem_client.calls_aio import Call, Channel, Pause, open_channel
from tandem_client.connections import Metadata, Tls, addresses_of, channel_options, metadata_of
from tandem_client.errors import BrokenCall, ClientClosed, DeadlineExceeded, Failure, RequestCancelled, Unavailable
from tandem_client.orders import AnswerOrder, AnswerParts, Method, Order, ResponseT, Route
from tandem_client.protos import cluster_pb2, inference_pb2, wire_pb2
from tandem_client.retries import Course, Naming, RetryBudget, RetryPolicy
from tandem_client.values import Answer, Chat, ChatDelta, ChatRequest, Delta, ModelInfo, Request, Topology

ItemT = TypeVar("ItemT")

DEFAULT_TIMEOUT_S = 600.0


class AsyncClient:
    """Talks to one or several gateways of a cluster; `async with`, or `close` it.

    `addresses` are `host:port`, several as a sequence or separated by commas: it stays with one while that serves, and
    moves to the next when it does not. `timeout_s` is the total time of a call where the call names none, retries and
    all; it is the gRPC deadline. Every call raises a `TandemError`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: RetryPolicy | None = None,
    ) -> None:
        self._addresses = addresses_of(addresses)
        self._metadata = metadata_of(metadata, api_key=api_key)
        self._tls = tls
        self._credentials = None if tls is None else tls.credentials()
        self._timeout_s = timeout_s
        self._policy = retries or RetryPolicy()
        self._budget = RetryBudget(ratio=self._policy.budget_ratio, reserve=self._policy.budget_reserve)
        self._channels: dict[int, Channel] = {}
        self._address = 0
        # Weak: a stream that its user has dropped ends by itself, with the call that it holds.
        self._open: weakref.WeakSet[_Exchange] = weakref.WeakSet()
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards the channels and the set of open exchanges."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what runs and ends the connections. Callers that wait for an answer get ClientClosed."""
        with self._lock:
            self._is_closed = True
            exchanges, channels = list(self._open), list(self._channels.values())
            self._channels.clear()
        for exchange in exchanges:
            exchange.cancel(ClientClosed("the client was closed"))
        for channel in channels:
            await channel.close()

    def stream(
        self, request: Request, *, timeout_s: float | None = None, metadata: Mapping[str, str | bytes] | None = None
    ) -> "AsyncAnswerStream":
        """The answer as it is generated. Nothing is sent before the first delta is asked for."""
        order = orders.answer_order(request, self._metadata_with(metadata), self._route())
        return AsyncAnswerStream(self, order, self._timeout(timeout_s))

    def resume(
        self,
        request_id: str,
        next_index: int,
        *,
        tenant: str = "",
        timeout_s: float | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
    ) -> "AsyncAnswerStream":
        """The rest of the answer of a named request, from the token `next_index` on; also one of another process.

        `request_id` is that of an AnswerStream or an Answer. NotFound: nothing is known of it.
        """
        order = orders.resume_order(request_id, next_index, tenant, self._metadata_with(metadata), self._route())
        return AsyncAnswerStream(self, order, self._timeout(timeout_s))

    async def generate(
        self, request: Request, *, timeout_s: float | None = None, metadata: Mapping[str, str | bytes] | None = None
    ) -> Answer:
        """The whole answer."""
        if request.request_id and not request.idempotency_key:
            # Sent again while it runs, such a request is an error: what broke off can only be resumed, as a stream.
            async with self.stream(request, timeout_s=timeout_s, metadata=metadata) as stream:
                return await stream.answer()
        message = messages.generate_request(request)
        sent = (*self._metadata_with(metadata), *orders.request_metadata(request))
        exchange = _Exchange(self, self._timeout(timeout_s), sent)
        course = self._route().course(orders.naming_of(request))
        response = await exchange.unary(orders.GENERATE_UNARY, message, course)
        parts = AnswerParts()
        parts.add(messages.delta_of(response))
        return parts.answer(response.request_id, *orders.model_told(exchange.initial_metadata))

    def stream_chat(
        self, request: ChatRequest, *, timeout_s: float | None = None, metadata: Mapping[str, str | bytes] | None = None
    ) -> "AsyncStream[ChatDelta]":
        """The answers to a conversation as they are generated. Nothing is sent before the first part is asked for."""
        order = orders.chat_order(request, self._metadata_with(metadata), self._route())
        return AsyncStream(self, order, self._timeout(timeout_s))

    async def chat(
        self, request: ChatRequest, *, timeout_s: float | None = None, metadata: Mapping[str, str | bytes] | None = None
    ) -> Chat:
        """The whole answers to a conversation."""
        message = messages.chat_request(request)
        sent = (*self._metadata_with(metadata), *orders.request_metadata(request))
        exchange = _Exchange(self, self._timeout(timeout_s), sent)
        # What broke off cannot be resumed as a conversation; with a key it is asked for again.
        course = self._route().course(Naming.KEY if request.idempotency_key else Naming.NONE)
        response = await exchange.unary(orders.CHAT_UNARY, message, course)
        return orders.chat_of(response, exchange.initial_metadata)

    async def embed(
        self,
        inputs: str | Sequence[str | Sequence[int]],
        *,
        model: str = "",
        dimensions: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[tuple[float, ...], ...]:
        """The vectors of texts, or of one, by a model that embeds; `dimensions` of 0: as many as it has."""
        texts = [inputs] if isinstance(inputs, str) else inputs
        request = messages.embed_request(texts, model=model, dimensions=dimensions)
        response = await self._unary(orders.EMBED, request, timeout_s=timeout_s)
        return tuple(tuple(vector.values) for vector in response.vectors)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Every name of every served model that the API key allows."""
        response = await self._unary(orders.LIST_MODELS, inference_pb2.ListModelsRequest(), timeout_s=timeout_s)
        return messages.models_of(response)

    async def tokenize(
        self, text: str, *, model: str = "", without_special_tokens: bool = False, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text."""
        request = messages.tokenize_request(text, model=model, without_special_tokens=without_special_tokens)
        response = await self._unary(orders.TOKENIZE, request, timeout_s=timeout_s)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        with_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = messages.detokenize_request(token_ids, model=model, with_special_tokens=with_special_tokens)
        response = await self._unary(orders.DETOKENIZE, request, timeout_s=timeout_s)
        return response.text

    async def topology(self, *, timeout_s: float | None = None) -> Topology:
        """The cluster as a gateway sees it now. With API keys on, this and the next two need an admin's."""
        message = await self._unary(orders.GET_TOPOLOGY, cluster_pb2.GetTopologyRequest(), timeout_s=timeout_s)
        return messages.topology_of(message)

    def watch_topology(self, *, timeout_s: float | None = None) -> "AsyncStream[Topology]":
        """The topology now, and after each change, at most twice a second, until it is closed or the time is over."""
        order = orders.TopologyOrder(self._metadata, self._route().course(Naming.SNAPSHOTS))
        return AsyncStream(self, order, self._timeout(timeout_s))

    async def drain(self, worker_id: str, *, timeout_s: float | None = None) -> str:
        """Takes a worker out of rotation without losing a request; returns its state. Never tried again."""
        request = cluster_pb2.DrainRequest(worker_id=worker_id)
        return messages.state_of(await self._unary(orders.DRAIN, request, timeout_s=timeout_s, is_tried_once=True))

    async def is_serving(self, *, timeout_s: float = 5.0) -> bool:
        """Whether one of the gateways can be reached, takes requests and has workers for them. Needs no API key."""
        request = wire_pb2.HealthCheckRequest(service=orders.INFERENCE_SERVICE)
        deadline_s = time.monotonic() + timeout_s
        for turn in range(len(self._addresses)):
            course = self._route(orders.NO_RETRIES, turn=turn).course()
            exchange = _Exchange(self, deadline_s - time.monotonic(), self._metadata)
            try:
                response = await exchange.unary(orders.CHECK_HEALTH, request, course)
            except (Unavailable, DeadlineExceeded):
                continue
            if response.status == wire_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    async def _unary(
        self, method: Method[ResponseT], request: Message, *, timeout_s: float | None, is_tried_once: bool = False
    ) -> ResponseT:
        course = self._route(orders.NO_RETRIES if is_tried_once else None).course()
        return await _Exchange(self, self._timeout(timeout_s), self._metadata).unary(method, request, course)

    def _route(self, policy: RetryPolicy | None = None, *, turn: int = 0) -> Route:
        address = (self._address + turn) % len(self._addresses)
        return Route(policy or self._policy, self._budget, len(self._addresses), address)

    def _timeout(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _metadata_with(self, given: Mapping[str, str | bytes] | None) -> Metadata:
        return (*self._metadata, *metadata_of(given))

    def _enter(self, exchange: "_Exchange") -> None:
        with self._lock:
            self._open.add(exchange)

    def _leave(self, exchange: "_Exchange") -> None:
        with self._lock:
            self._open.discard(exchange)

    def _channel(self, address: int) -> Channel:
        """The channel to an address, opened when it is first needed."""
        with self._lock:
            if self._is_closed:
                raise ClientClosed("the client was closed")
            if address not in self._channels:
                target, options = self._addresses[address], channel_options(self._tls)
                self._channels[address] = open_channel(target, self._credentials, options)
            return self._channels[address]


class _Exchange:
    """One call of the client's user: all its attempts, its time, and whether it was cancelled."""

    def __init__(self, client: AsyncClient, timeout_s: float, metadata: Metadata) -> None:
        self.initial_metadata: Sequence[tuple[str, str | bytes]] = ()
        self._client = client
        self._metadata = metadata
        self._deadline_s = time.monotonic() + timeout_s
        self._pause = Pause()
        self._why: RequestCancelled | None = None
        self._call: Call | None = None
        self._lock = threading.Lock()
        """Held while a call begins, so that it is either cancelled or not begun."""
        client._enter(self)

    def cancel(self, why: RequestCancelled) -> None:
        """Ends the exchange; a caller that waits for it gets `why`."""
        with self._lock:
            self._why = self._why or why
        self._pause.end()
        self.leave()

    def leave(self) -> None:
        """Ends the call, for which nobody waits."""
        self._client._leave(self)
        if self._call is not None:
            self._call.cancel()

    async def unary(self, method: Method[ResponseT], request: Message, course: Course) -> ResponseT:
        """The response, after as many attempts as the course grants."""
        try:
            while True:
                call = self.begin(method, request, course, is_stream=False)
                try:
                    response: ResponseT = await call.response()
                except BrokenCall as broken:
                    delay_s = self.failed(course, broken.failure)
                else:
                    self.initial_metadata = await call.initial_metadata()
                    self._client._address = course.address
                    return response
                await self.pause(delay_s)
        finally:
            self.leave()

    def begin(self, method: Method[Any], request: Message, course: Course, *, is_stream: bool) -> Call:
        """The next attempt. Raises the reason of a cancellation."""
        with self._lock:
            self.check()
            channel, left_s = self._client._channel(course.address), self.remaining_s()
            self._call = Call(channel, method, request, is_stream=is_stream, timeout_s=left_s, metadata=self._metadata)
            return self._call

    def failed(self, course: Course, failure: Failure) -> float:
        """Seconds until the next attempt. Raises the reason where there will be none."""
        self.check()
        left_s = self._deadline_s - time.monotonic()
        return course.failed(failure, draw=random.random(), remaining_s=left_s)  # noqa: S311 - jitter

    async def pause(self, delay_s: float) -> None:
        """Waits. Raises the reason of a cancellation meanwhile."""
        if delay_s > 0:
            await self._pause.wait(delay_s)
        self.check()

    def remaining_s(self) -> float:
        """Time until the deadline. Raises DeadlineExceeded."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the time for the call is over")
        return left_s

    def check(self) -> None:
        """Raises the reason of the cancellation, if there was one."""
        if self._why is not None:
            raise self._why


class AsyncStream(Generic[ItemT]):
    """An async iterator whose `aclose` cancels the call; also an async context manager that does. For one reader.

    The time runs from the making. What ends it, ends it for good; a named request may be asked for again with `resume`.
    """

    def __init__(self, client: AsyncClient, order: Order[ItemT], timeout_s: float) -> None:
        self._client = client
        self._order = order
        self._exchange = _Exchange(client, timeout_s, order.metadata)
        self._call: Call | None = None
        self._is_done = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the call, if it still runs. A task that waits for the next item gets RequestCancelled."""
        self._is_done = True
        self._exchange.cancel(RequestCancelled("the stream was closed"))

    def __aiter__(self) -> AsyncIterator[ItemT]:
        return self

    async def __anext__(self) -> ItemT:
        if self._is_done:
            raise StopAsyncIteration
        goes_on = False
        try:
            if not self._order.is_complete:
                item = await self._next()
                goes_on = True
                return item
            await self._end()
        finally:
            if not goes_on:
                self._is_done = True
                self._exchange.leave()
        raise StopAsyncIteration

    async def _next(self) -> ItemT:
        order, exchange = self._order, self._exchange
        while True:
            is_new = self._call is None
            if self._call is None:
                self._call = exchange.begin(*order.next_call(), order.course, is_stream=True)
            try:
                message = await self._call.read()
                if message is not None:
                    if is_new:
                        order.told(await self._call.initial_metadata())
                        self._client._address = order.course.address
                    return order.take(message)
                delay_s = exchange.failed(order.course, order.ended())
            except BrokenCall as broken:
                delay_s = exchange.failed(order.course, broken.failure)
            self._call = None
            await exchange.pause(delay_s)

    async def _end(self) -> None:
        """Waits for the status, so that the server does not see a cancelled call; it has no news."""
        assert self._call is not None
        try:
            await self._call.read()
        except BrokenCall:
            self._exchange.check()


class AsyncAnswerStream(AsyncStream[Delta]):
    """The answer of one request as it is generated."""

    def __init__(self, client: AsyncClient, order: AnswerOrder, timeout_s: float) -> None:
        super().__init__(client, order, timeout_s)
        self._answer_order = order

    @property
    def request_id(self) -> str:
        """The request's id, or the server's own as soon as the first delta has come."""
        return self._answer_order.request_id

    @property
    def next_index(self) -> int:
        """Index of the first token that has not come yet: with `request_id`, what `resume` needs."""
        return self._answer_order.course.next_index

    @property
    def model(self) -> str:
        """The model that answers; empty before the first delta."""
        return self._answer_order.model

    @property
    def fallback(self) -> str:
        """The model in whose place it answers, and why; empty if it is the one asked for."""
        return self._answer_order.fallback

    async def answer(self) -> Answer:
        """Reads on to the end: the whole, or what is left of it."""
        parts = AnswerParts()
        async for delta in self:
            parts.add(delta)
        return parts.answer(self.request_id, self.model, self.fallback)
