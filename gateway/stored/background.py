"""The responses that this gateway generates in the background: it claims what nobody has, and writes what comes of it.

Each is a streamed request over HTTP without a connection, with a name. So everything that holds for a request holds for
it, and where its gateway dies, the next one continues after the tokens and events that are known. 429 and 503 mean
"later" and are no results. Knows no route.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from gateway.batches.pending import RowAnswer, ask, retry_s
from gateway.http.exchange import App
from gateway.stored.documents import ENDS, Event, EventSplitter, changed, failed_event, id_of, response_of, with_members
from gateway.stored.kept import add_turn
from services.cluster.answer_records import AnswerReply
from services.cluster.answers import BACKGROUND_S, AnswerStore, ClaimedAnswer
from services.cluster.claimed_work import ClaimedRun, ClaimedWork, Left, until_answered
from services.runtime.errors import StoreRefused

ENDPOINT = "/v1/responses"
RESPONSE_PREFIX = "resp_"
TENANT_PART = 4
"""A tenant has at most one in this many of a gateway's places, so that others' responses do not have to wait for it."""
PASS_ON_S = 0.05
"""How long events are collected before they are written together."""
MAX_TRIES = 4
"""How many gateways may begin a response and neither end it nor give it back, as they do that die of it."""

_KNOWN = ("created_at", "background", "store", "previous_response_id")
"""Members of the response that its generation is not told."""

logger = logging.getLogger(__name__)


class _NoRoom(Exception):
    """Redis has no room for what is generated."""


class Background(ClaimedWork["BackgroundRun"]):
    """The responses of one gateway, at most `num_places` at once; 0: it leaves them to other gateways.

    `app_of` makes the HTTP API as the owner of the API key with a digest sees it.
    """

    def __init__(
        self, store: AnswerStore, *, gateway_incarnation: str, app_of: Callable[[str], App], num_places: int
    ) -> None:
        super().__init__(
            kind="a response in the background",
            max_runs=num_places,
            max_runs_of_tenant=max(1, num_places // TENANT_PART),
        )
        self.store = store
        self.app_of = app_of
        self._gateway_incarnation = gateway_incarnation
        self._readers: dict[str, set[asyncio.Event]] = {}

    def poke(self, name: str) -> None:
        """Looks at a response that was made, cancelled or deleted."""
        super().poke(name)
        self.tell(name)

    @contextlib.contextmanager
    def news_of(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever this gateway adds something to the response, or learns of its end."""
        news = asyncio.Event()
        readers = self._readers.setdefault(name, set())
        readers.add(news)
        try:
            yield news
        finally:
            readers.discard(news)
            if not readers:
                self._readers.pop(name, None)

    def tell(self, name: str) -> None:
        """Lets all readers of a response look again."""
        for news in self._readers.get(name, ()):
            news.set()

    async def _claim(self, *, busy_tenants: list[str], full_tenants: list[str]) -> "BackgroundRun | None":
        # Without keys everybody is one tenant, which has all places.
        full_tenants = [tenant for tenant in full_tenants if tenant]
        answer = await self.store.claim(
            self._gateway_incarnation, busy_tenants=busy_tenants, full_tenants=full_tenants, region=self.region
        )
        return None if answer is None else BackgroundRun(self, answer)

    def _forget(self, run: "BackgroundRun", task: asyncio.Task[None]) -> None:
        super()._forget(run, task)
        self.tell(run.name)


class BackgroundRun(ClaimedRun):
    """One response while it is ours."""

    def __init__(self, background: Background, answer: ClaimedAnswer) -> None:
        super().__init__(
            name=answer.name,
            tenant=answer.tenant,
            kind="a response in the background",
            identity={"response": answer.id, "epoch": answer.epoch},
        )
        self.answer = answer
        self._background = background
        self._store = background.store
        self._began = msgspec.json.decode(answer.document)
        self._conversation = self._began.get("conversation")
        self._own: list[msgspec.Raw] = []
        """What is added to the conversation before the output."""
        if self._conversation is not None:
            self._own = msgspec.json.decode(answer.input, type=list[msgspec.Raw])[answer.order.num_earlier :]
        self._is_lost = False
        self._splitter = EventSplitter()
        self._waiting: list[bytes] = []
        """Events that are not written yet."""
        self._last: list[Event] = []
        """The events that end the stream, which are written with the response."""
        self._has_events = asyncio.Event()

    async def _complete(self) -> None:
        answer = self.answer
        if answer.num_tries > MAX_TRIES:
            await self._fail("server_error", f"the gateways that generated it ended, {MAX_TRIES} times")
            return
        if time.time() > answer.created_s + BACKGROUND_S:
            await self._fail("server_error", f"it was not complete within {BACKGROUND_S:g} s")
            return
        try:
            told = await self._asked()
            await self._end(told)
        except _NoRoom:
            await self._fail("server_error", "there is no room to keep what is generated: delete stored responses")
        except StoreRefused as refused:
            logger.error("response refused by redis", extra={**self._identity, "reason": str(refused)})
            await self._fail("server_error", "the response could not be stored: Redis refused the command")

    async def _end(self, told: RowAnswer) -> None:
        """Ends the response, or gives it back, after its request has ended. Raises Left, _NoRoom or StoreRefused."""
        answer = self.answer
        wait_s = retry_s(told)
        if told.status != 200 and wait_s is not None:
            await until_answered(lambda: self._store.give_back(answer, wait_s=wait_s))
        elif told.status != 200:
            error = _error_in(told)
            await self._fail("server_error" if told.status >= 500 else "invalid_prompt", error)
        elif self._last and self._last[-1].kind in ENDS:
            *events, last = self._last
            if self._conversation is not None and not await self._is_added(response_of(last)):
                last = with_members(last, {"conversation": None})
            await self._write([*(event.data for event in events), last.data], document=response_of(last))
        else:
            raise RuntimeError("a stream has ended without its last event")

    async def _asked(self) -> RowAnswer:
        """Asks for the response and passes its events on. Raises Left or _NoRoom."""
        answer = self.answer
        request_id = answer.id.removeprefix(RESPONSE_PREFIX).encode()
        headers = [
            (name.encode(), value.encode("latin-1")) for name, value in msgspec.json.decode(answer.order.headers)
        ]
        headers += [(b"x-request-id", request_id), (b"idempotency-key", request_id)]
        last_id = id_of(answer.last_event)
        if last_id:
            headers.append((b"last-event-id", last_id.encode()))
        body = b'{"input":' + answer.input + b"," + answer.order.body.removeprefix(b"{")
        answer.input, answer.order = b"", replace(answer.order, body=b"")
        asking = asyncio.create_task(
            ask(self._background.app_of(answer.order.key_digest), ENDPOINT, body, headers=headers, take=self._take)
        )
        del body
        try:
            await self._pass_on(asking)
            return await asking
        finally:
            asking.cancel()
            await asyncio.wait((asking,))

    def _take(self, data: bytes) -> None:
        """Takes a part of the stream."""
        known = {name: self._began[name] for name in _KNOWN} | {"conversation": self._conversation}
        for event in self._splitter.take(data):
            event = with_members(event, known)
            if self._last or event.is_last:
                self._last.append(event)
            elif self.answer.order.keeps_events:
                self._waiting.append(event.data)
                self._has_events.set()

    async def _pass_on(self, asking: asyncio.Task[RowAnswer]) -> None:
        """Writes events, one batch at a time, until the request has ended. Raises Left or _NoRoom."""
        asking.add_done_callback(lambda _: self._has_events.set())
        while not asking.done():
            await self._has_events.wait()
            await asyncio.wait((asking,), timeout=PASS_ON_S)
            self._has_events.clear()
            await self._write_waiting()
        await self._write_waiting()

    async def _write_waiting(self) -> None:
        events, self._waiting = self._waiting, []
        if events:
            await self._write(events)

    async def _write(self, events: list[bytes], *, document: bytes = b"", beyond_room: bool = False) -> None:
        """Writes events that follow, or the end, for as long as it takes. Raises Left or _NoRoom."""
        if not self.answer.order.keeps_events:
            events = []
        reply = await until_answered(
            lambda: self._store.write(self.answer, events, document=document, beyond_room=beyond_room)
        )
        self._background.tell(self.answer.name)
        if reply in (AnswerReply.TENANT_FULL, AnswerReply.ALL_FULL):
            raise _NoRoom
        if reply is not AnswerReply.DONE:
            self._is_lost = True
            raise Left

    async def _is_added(self, document: bytes) -> bool:
        """Adds input and output to the conversation. Returns False where that is gone or has no room."""
        answer, conversation_id = self.answer, self._conversation["id"]
        return await until_answered(
            lambda: add_turn(
                self._store, tenant=answer.tenant, conversation_id=conversation_id, own=self._own, document=document
            )
        )

    async def _fail(self, code: str, message: str) -> None:
        """Ends the response with a reason."""
        document = changed(self.answer.document, status="failed", error={"code": code, "message": message})
        await self._write([failed_event(document, self.answer.num_events)], document=document, beyond_room=True)

    async def _keep(self) -> None:
        """Renews the claim, and ends the work where it cannot be renewed."""
        while True:
            try:
                reply = await until_answered(lambda: self._store.renew(self.answer))
            except StoreRefused as refused:
                logger.error("claim refused by redis", extra={**self._identity, "reason": str(refused)})
                reply = AnswerReply.GONE
            if reply is not AnswerReply.DONE:
                self._is_lost = True
                self.stop()
                return
            await self._until_next_look(self._store.lease_s)

    async def _on_fault(self) -> None:
        """Gives nothing back, so that the number of tries grows."""

    async def _give_back(self) -> None:
        if not self._is_lost:
            await self._store.give_back(self.answer)


class _ErrorBody(msgspec.Struct):
    error: dict[str, str | None]


def _error_in(told: RowAnswer) -> str:
    """Returns the message of an answer that is no stream."""
    return msgspec.json.decode(told.body, type=_ErrorBody).error["message"] or ""
