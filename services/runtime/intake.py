"""How a public server receives: it identifies the caller first, then takes messages in turn. Knows no service."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from services.runtime.errors import InvalidRequest
from services.runtime.places import Places

Context = grpc.aio.ServicerContext[Any, Any]


class Intake:
    """Receives messages of at most `max_message_bytes`.

    `account_of` says on whose account a call is, from its method (such as /tandem.v1.Inference/Generate) and context,
    and raises Unauthenticated; no message has been asked for then. At any time as many calls
    have a message on its way as there are `places`, at most. Refusals leave a block of `refusals_noted`.
    """

    def __init__(
        self,
        places: Places,
        account_of: Callable[[str, Context], str],
        *,
        max_message_bytes: int,
        refusals_noted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._refusals_noted = refusals_noted
        self._places = places
        self._account_of = account_of

    async def one(self, context: Context, method: str) -> Any:
        """Returns the one message of a call. Raises InvalidRequest where it has none or several."""
        with self._refusals_noted():
            async with self._places.place(self._account_of(method, context)):
                message = await context.read()
                if message is grpc.aio.EOF:
                    raise InvalidRequest("the call has ended without a message; this method takes exactly one")
                if await context.read() is not grpc.aio.EOF:
                    raise InvalidRequest("the call has several messages; this method takes exactly one")
            return message

    def each(self, context: Context, method: str) -> AsyncIterator[Any]:
        """Yields the messages of a call that may have several, each of which must come in time."""
        with self._refusals_noted():
            return self._each(context, self._account_of(method, context))

    async def _each(self, context: Context, account: str) -> AsyncIterator[Any]:
        while True:
            async with self._places.place(account):
                message = await context.read()
            if message is grpc.aio.EOF:
                return
            yield message
