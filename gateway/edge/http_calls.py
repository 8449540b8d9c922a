"""From the body and the headers of an HTTP request to the call that it makes, and whether it has a name.

The bounds are `gateway.limits`' business, and what a body may say is `gateway.openai.requests`'.
"""

from typing import NamedTuple

from gateway.http.bodies import Bodies, Claim
from gateway.http.exchange import Exchange
from gateway.limits import check_affinity_key, check_idempotency_key, check_integer, check_permission
from gateway.models.catalog import ModelCatalog
from gateway.models.template_words import unknown_fields
from gateway.named.ask import Ask, ask_for
from gateway.named.journal import digest_of
from gateway.observability.tracing import Origin
from gateway.openai.requests import RequestBody, parse, parse_named
from gateway.openai.responses_request import TEMPLATE_FIELDS
from gateway.openai.writer import Writer
from gateway.requests.call import Call
from gateway.wishes import MAX_MS, TIMEOUT, WISHES, read_ms, read_wishes
from services.runtime.clock import Deadline
from services.runtime.errors import InvalidRequest

_NAMING = frozenset((b"idempotency-key", b"last-event-id", b"x-request-id"))
"""Headers of requests that have a name, whose answers others may read too."""
_TIMEOUT = frozenset((TIMEOUT.lower().encode(),))
_WISHES = frozenset(name.lower().encode() for name in WISHES)
_TELLING = frozenset((b"x-session-id", b"x-allow-fallback", b"x-service-class")) | _NAMING | _TIMEOUT | _WISHES
"""All headers that say something of the call; most requests have none of them."""


class HttpCall(NamedTuple):
    """A request to generate, before the caller's key has let it in."""

    body: RequestBody
    call: Call
    ignored: list[str]
    """Names of members that are ignored."""
    digest: str
    """The digest of the body of a request with a name; empty for others."""


async def read_call(
    exchange: Exchange, bodies: Bodies, claim: Claim, body_type: type[RequestBody], writer_type: type[Writer]
) -> HttpCall:
    """Reads the request. Raises InvalidRequest, and what `Exchange.read_body` raises."""
    is_named = exchange.has_any(_NAMING)
    read = await bodies.read(
        claim, exchange.read_body, lambda body: _read_body(body, body_type, writer_type, is_named=is_named)
    )
    complete_call(exchange, read.call, timeout_ms=read.body.request_timeout_ms, is_streamed=bool(read.body.stream))
    return read


def complete_call(exchange: Exchange, call: Call, *, timeout_ms: int | None, is_streamed: bool = False) -> None:
    """Takes what the headers say of a call; `timeout_ms` is what its body says. Raises InvalidRequest."""
    if exchange.has_any(_TELLING):
        _read_headers(exchange, call)
    call.deadline = _deadline(exchange, timeout_ms)
    call.note_origin(exchange.joined, Origin(http_route=exchange.path, is_streamed=is_streamed))


def _read_headers(exchange: Exchange, call: Call) -> None:
    """Takes what the headers say of the call. Raises InvalidRequest."""
    call.service_class = _service_class(call, exchange)
    session = exchange.optional_header(b"x-session-id")
    if session is not None:
        check_affinity_key(session, field_name="X-Session-Id")
        call.affinity_key = session
    _read_permission(exchange, call)
    if exchange.has_any(_WISHES):
        call.wishes = read_wishes(lambda name: exchange.optional_header(name.encode()))
    call.request_id = exchange.optional_header(b"x-request-id")


def ask_of(exchange: Exchange, read: HttpCall, writer_type: type[Writer]) -> Ask | None:
    """Returns what a request with a name asks for; None for one without. Raises InvalidRequest."""
    if not read.digest:
        return None
    key = exchange.optional_header(b"idempotency-key")
    last_event_id = exchange.optional_header(b"last-event-id")
    if key is not None:
        check_idempotency_key(key)
        read.call.idempotency_key = key
    if last_event_id is not None and not read.body.stream:
        raise InvalidRequest("Last-Event-ID needs stream to be true", field="Last-Event-ID", code="invalid_event_id")
    position = None if last_event_id is None else writer_type.journal_event_id(last_event_id)
    return ask_for(read.call, read.digest, last_event_id=position)


def unknown_to_template(call: Call, catalog: ModelCatalog) -> list[str]:
    """Returns the members of a request that the chat template of its model does not read."""
    if not call.template_fields:
        return []
    try:
        model = catalog.resolve(call.model)
    except InvalidRequest:
        return []  # it is told when the call is accepted
    unknown = unknown_fields(call.template_fields, model.tokenizer.template_names)
    return [TEMPLATE_FIELDS.get(field, field) if call.prompt_field == "input" else field for field in unknown]


def _read_body(body: bytes, body_type: type[RequestBody], writer_type: type[Writer], *, is_named: bool) -> HttpCall:
    if not is_named:
        request, ignored = parse(body, body_type)
        return HttpCall(request, request.call(), [*ignored, *request.left_out()], "")
    request, ignored, canonical = parse_named(body, body_type)
    return HttpCall(
        request, request.call(), [*ignored, *request.left_out()], digest_of(writer_type.object_name, canonical)
    )


def _read_permission(exchange: Exchange, call: Call) -> None:
    """Reads X-Allow-Fallback, for clients that cannot add a field to the body, which would take precedence.

    Raises InvalidRequest.
    """
    said = exchange.optional_header(b"x-allow-fallback")
    if said is not None and call.allow_fallback is None:
        call.allow_fallback = check_permission(said, field_name="X-Allow-Fallback")


def _deadline(exchange: Exchange, named_ms: int | None) -> Deadline | None:
    """Returns the deadline of body or header; None: the server's. Raises InvalidRequest if the two differ."""
    if named_ms is not None:
        check_integer(named_ms, "request_timeout_ms", minimum=1, maximum=MAX_MS)
    timeout_s = None
    if exchange.has_any(_TIMEOUT):
        timeout_s = read_ms(lambda name: exchange.optional_header(name.encode()), TIMEOUT)
    if timeout_s is not None and named_ms is not None and timeout_s != named_ms / 1000:
        raise InvalidRequest(
            f"request_timeout_ms and {TIMEOUT} differ", field="request_timeout_ms", code="invalid_value"
        )
    if timeout_s is None:
        timeout_s = None if named_ms is None else named_ms / 1000
    return None if timeout_s is None else Deadline.after(timeout_s)


def _service_class(call: Call, exchange: Exchange) -> str:
    """Returns the class of the body or the header. Raises InvalidRequest if both are given and differ."""
    named = exchange.header(b"x-service-class").strip().lower()
    if named and call.service_class and named != call.service_class:
        raise InvalidRequest("service_class and X-Service-Class differ", field="service_class", code="invalid_value")
    return call.service_class or named
