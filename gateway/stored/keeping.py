"""What becomes of a response beside its answer: it continues another, is kept, or is generated in the background.

Knows requests and documents, and neither routes nor how an answer is generated.
"""

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import msgspec

from gateway.access.keys import ApiKey
from gateway.http.bodies import LONG_BODY_BYTES, Claim
from gateway.http.exchange import Exchange
from gateway.limits import MAX_BODY_BYTES, check_idempotency_key, check_name
from gateway.models.catalog import ModelCatalog
from gateway.named.journal import name_of
from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.responses_writer import response_head
from gateway.openai.writer import Head, encode, system_fingerprint
from gateway.requests.call import Call
from gateway.stored.background import RESPONSE_PREFIX, Background
from gateway.stored.conversations import find_conversation, items_of
from gateway.stored.documents import changed
from gateway.stored.kept import KeptResponse, Turn
from gateway.stored.kind import check_reply, encoded
from gateway.wishes import PREFILL, RESIDENCY, TPOT, TTFT
from services.cluster.answer_records import AnswerReply
from services.cluster.answers import AnswerStore, BackgroundOrder, StoredAnswer, name_of_answer
from services.runtime.errors import InvalidRequest, NotFound, StoreUnavailable

OVER = "over"
LOOK_S = 0.25
"""How often events are looked for that another gateway generates."""
MAX_EVENTS_AT_ONCE = 256
_KEPT_HEADERS = (
    "x-session-id",
    "x-allow-fallback",
    "x-service-class",
    "traceparent",
    "tracestate",
    TTFT,
    TPOT,
    PREFILL,
    RESIDENCY,
)
"""Headers that say something of a call, and hold for one in the background too."""
_NOT_SENT_ON = frozenset({"input", "background", "conversation", "previous_response_id", "stream_options"})


class ResponseKeeper:
    """All stored responses, as one gateway reaches them. `on_refusal` is told the name of a limit that refuses.

    `comment_s`: how long a stream of events may be silent.
    """

    def __init__(
        self,
        store: AnswerStore,
        background: Background,
        *,
        catalog: ModelCatalog,
        comment_s: float,
        on_refusal: Callable[[str], None],
    ) -> None:
        self.store = store
        self._background = background
        self._catalog = catalog
        self._comment_s = comment_s
        self._on_refusal = on_refusal

    async def begin(
        self, exchange: Exchange, request: ResponsesRequest, *, call: Call, key: ApiKey, claim: Claim
    ) -> KeptResponse | None:
        """Completes a call with what it continues. Returns what keeps its answer; None: nothing does.

        Answers a request for the background, whose exchange has ended then. Raises InvalidRequest for a response or
        a conversation that it continues and that the tenant does not have, and StoreUnavailable where Redis is asked
        for and away.
        """
        if request.background and request.store is False:
            raise InvalidRequest("background needs store to be true", field="background", code="invalid_value")
        if request.store:
            # A client that asks for it is told at once where it cannot be done; others are told by the answer.
            await self.find(key.tenant, "")
        before = await self._before(request, key.tenant, claim)
        is_long = claim.num_bytes > LONG_BODY_BYTES
        if before is not None:
            whole = await asyncio.to_thread(_continued, request, before) if is_long else _continued(request, before)
            call.messages = whole.messages
        request.store = request.store is not False
        turn = Turn(request.input or "", before or [], request.conversation_id)
        if request.background:
            await self._create(exchange, request, turn, call=call, key=key)
        if request.background or not (request.store or turn.conversation_id):
            return None
        return KeptResponse(self.store, turn, tenant=key.tenant, is_stored=request.store, is_long=is_long)

    async def find(self, tenant: str, response_id: str) -> StoredAnswer | None:
        """Returns a response of the tenant."""
        found = await self.store.find(tenant, response_id)
        return found if response_id.startswith(RESPONSE_PREFIX) else None

    async def cancel(self, tenant: str, response_id: str, *, found: StoredAnswer) -> None:
        """Ends a response in the background; one that is over stays as it is."""
        await self.store.cancel(tenant, response_id, document=changed(found.document, status="cancelled"))
        self._background.poke(name_of_answer(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response, and ends it where it is generated in the background."""
        was_there = response_id.startswith(RESPONSE_PREFIX) and await self.store.delete(tenant, response_id)
        self._background.poke(name_of_answer(tenant, response_id))
        return was_there

    async def follow(self, tenant: str, response_id: str, *, first: int) -> AsyncGenerator[bytes, None]:
        """Yields the events of a response in the background from number `first` on, until it is over or gone."""
        loop = asyncio.get_running_loop()
        silent_since_s = -math.inf  # the head of an answer waits for its first piece
        with self._background.news_of(name_of_answer(tenant, response_id)) as news:
            while True:
                news.clear()
                try:
                    state, events = await self.store.events(tenant, response_id, first=first, most=MAX_EVENTS_AT_ONCE)
                except StoreUnavailable:
                    state, events = "unknown", []
                first += len(events)
                if events:
                    yield b"".join(events)
                    silent_since_s = loop.time()
                elif state in (OVER, ""):
                    return
                elif loop.time() - silent_since_s > self._comment_s:
                    yield b": keep-alive\n\n"
                    silent_since_s = loop.time()
                if len(events) < MAX_EVENTS_AT_ONCE:
                    try:
                        async with asyncio.timeout(LOOK_S):
                            await news.wait()
                    except TimeoutError:
                        pass

    async def _before(self, request: ResponsesRequest, tenant: str, claim: Claim) -> list[dict[str, Any]] | None:
        """Returns the items of the response or the conversation that a request continues; None: it continues none."""
        if request.conversation_id is not None:
            conversation = await find_conversation(self.store, tenant=tenant, conversation_id=request.conversation_id)
            claim.add(len(conversation.input))
            return items_of(conversation)
        earlier_id = request.previous_response_id
        if earlier_id is None:
            return None
        found = await self.find(tenant, earlier_id)
        if found is None:
            raise InvalidRequest(
                f"previous_response_id: no response {earlier_id[:128]!r} is stored",
                field="previous_response_id",
                code="previous_response_not_found",
            )
        if found.state != OVER:
            raise InvalidRequest(
                "previous_response_id: that response is not complete yet",
                field="previous_response_id",
                code="previous_response_not_complete",
            )
        claim.add(len(found.input) + len(found.document))
        output = msgspec.json.decode(found.document, type=_WithOutput).output
        return [*msgspec.json.decode(found.input), *output]

    async def _create(
        self,
        exchange: Exchange,
        request: ResponsesRequest,
        turn: Turn,
        *,
        call: Call,
        key: ApiKey,
    ) -> None:
        """Keeps a response that is to be generated, and answers with it or with its events."""
        model = self._catalog.resolve(call.model)
        request_id = _request_id(exchange)
        response_id = RESPONSE_PREFIX + request_id
        head = Head(request_id, int(time.time()), model.name, system_fingerprint(model))
        document = encode(msgspec.structs.replace(response_head(request, head), status="queued"))
        input_json = encode(turn.items(response_id))
        order = _order(exchange, request, key_digest=key.sha256, input_json=input_json)
        order = replace(order, num_earlier=len(turn.earlier), regions=",".join(call.residency))
        reply = await self.store.create(key.tenant, response_id, order=order, document=document, input_items=input_json)
        check_reply(reply, self.store.room, on_refusal=self._on_refusal)
        if reply is AnswerReply.HELD and (found := await self.find(key.tenant, response_id)) is not None:
            document = shown(found)
        self._background.poke(name_of_answer(key.tenant, response_id))
        exchange.name(request_id)
        if not request.stream:
            await exchange.answer(200, document)
            return
        with exchange:
            async for events in self.follow(key.tenant, response_id, first=0):
                await exchange.send_event(events)
            await exchange.end_events()


def shown(found: StoredAnswer) -> bytes:
    """Returns a response as it is now."""
    return found.document if found.state == OVER else changed(found.document, status=found.state)


def not_found(response_id: str) -> NotFound:
    """Returns the error for a response that the tenant does not have."""
    return NotFound(f"no response {response_id[:128]!r} is stored", field="response_id", code="response_not_found")


def _continued(request: ResponsesRequest, before: list[dict[str, Any]]) -> Call:
    return request.call(before=before)


def _request_id(exchange: Exchange) -> str:
    """Returns the id that the client has given by one of two headers, or a new one that sorts by time."""
    named, key = exchange.optional_header(b"x-request-id"), exchange.optional_header(b"idempotency-key")
    if named is not None:
        check_name(named, field_name="request_id")
        return named
    if key is not None:
        check_idempotency_key(key)
        return name_of("background", key)
    return f"{time.time_ns() // 10**6:012x}{secrets.token_hex(10)}"


def _order(exchange: Exchange, request: ResponsesRequest, *, key_digest: str, input_json: bytes) -> BackgroundOrder:
    """Returns what a gateway needs to generate the response. Raises InvalidRequest for a conversation too long."""
    members = msgspec.to_builtins(request)
    asked = {name: value for name, value in members.items() if value is not None and name not in _NOT_SENT_ON}
    body = encoded({**asked, "stream": True, "store": False})
    if len(body) + len(input_json) > MAX_BODY_BYTES:
        raise InvalidRequest(
            f"the conversation takes more than the {MAX_BODY_BYTES} bytes that a request may have",
            field="input",
            code="request_too_large",
        )
    told = ((name, exchange.optional_header(name.lower().encode())) for name in _KEPT_HEADERS)
    headers = encode([(name.lower(), value) for name, value in told if value is not None])
    digest = hashlib.sha256(b"%d:%b%b" % (len(body), body, input_json)).hexdigest()
    return BackgroundOrder(digest, key_digest, body, headers, bool(request.stream))


class _WithOutput(msgspec.Struct):
    output: list[dict[str, Any]]
