"""What a gRPC call says beside its message, and what is told beside the answer: for all services of the edge."""

from typing import Any

import grpc

from gateway.access.door import FrontDoor
from gateway.access.keys import ApiKey
from gateway.requests.call import TenantTicket

Context = grpc.aio.ServicerContext[Any, Any]


def metadata(context: Context, name: str) -> str | None:
    """Returns a text that the caller sent beside the request; None if it is absent."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else ""
    return None


def authenticate(door: FrontDoor, context: Context) -> ApiKey:
    """Returns the key that the caller shows. Raises Unauthenticated."""
    shown = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    return door.authenticate([value if isinstance(value, str) else "" for value in shown])


def add_limits(context: Context, ticket: TenantTicket | None) -> None:
    """Tells what is left of the tenant's limits, at the end of the call."""
    if ticket is not None and ticket.headers:
        context.set_trailing_metadata(tuple(ticket.headers))
