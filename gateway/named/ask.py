"""What a client asks of a named request: which one it means, with which body, and from which position it reads.

Pure. A name is a digest, so that ids of different tenants, and ids and idempotency keys, never meet.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.limits import check_idempotency_key, check_name
from gateway.named.journal import START, Position, Shown, digest_of, event_id_error, name_of, parse_event_id
from gateway.requests.call import Call, TenantTicket
from services.runtime import telemetry
from services.runtime.clock import Deadline
from services.runtime.errors import AlreadyExists, InvalidRequest, NotFound, TandemError
from services.runtime.telemetry import TraceContext

DERIVED_ID_PREFIX = "key-"
_DERIVED_ID = re.compile(re.escape(DERIVED_ID_PREFIX) + "[0-9a-f]{32}")


@dataclass(frozen=True)
class Ask:
    """What a client asks of a named request.

    `call` None: only to continue what is known. `digest` is the body's. `positions` None: from the start.
    """

    name: str
    request_id: str
    tenant: str = ""
    call: Call | None = None
    digest: str = ""
    positions: Sequence[Position] | None = None
    next_index: int | None = None
    """Replaces `positions` for a call with one answer."""
    deadline: Deadline | None = None
    """When this client stops waiting. The generation, which others may read too, has the gateway's own maximum."""
    ticket: TenantTicket | None = None
    """The tenant's ticket, which is charged if this request starts or resumes the generation."""
    trace: TraceContext | None = None
    """The client's span."""

    @property
    def joins(self) -> bool:
        """Whether it may continue what exists; otherwise its name must be free."""
        keyed = self.call is not None and bool(self.call.idempotency_key)
        return keyed or self.is_continuation

    @property
    def is_continuation(self) -> bool:
        """Whether the client has a part already, or has no body to begin anew with."""
        return self.call is None or self.positions is not None or self.next_index is not None

    def positions_in(self, num_answers: int) -> list[Position]:
        """Returns the position in each answer from which the client reads.

        Raises InvalidRequest if the position belongs to another number of answers.
        """
        if self.next_index is not None:
            if num_answers != 1:
                raise several_answers()
            return [Position(self.next_index, Shown.TOKENS if self.next_index else Shown.NOTHING)]
        if self.positions is None:
            return [START] * num_answers
        if len(self.positions) != num_answers:
            raise event_id_error(f"it is of {len(self.positions)} answers, and the call has {num_answers}")
        return list(self.positions)

    def check(self, *, digest: str, request_id: str, num_answers: int) -> None:
        """Compares what is asked with a journal that has this digest, id and number of answers.

        Raises AlreadyExists if the bodies differ, InvalidRequest if the position belongs to another request.
        """
        if self.digest and self.digest != digest:
            raise conflict()
        if self.positions is not None and self.request_id != request_id:
            raise another_request()
        self.positions_in(num_answers)


def ask_for(call: Call, digest: str, *, last_event_id: str | None = None) -> Ask | None:
    """Returns what a named call asks for; None if it has no name. Sets the id of a call that has only a key.

    Raises InvalidRequest for a name, a key or an event id that breaks its rule.
    """
    if call.request_id is not None:
        check_name(call.request_id, field_name="request_id")
    if call.tenant:
        check_name(call.tenant, field_name="tenant")
    is_named = bool(call.idempotency_key) or call.request_id is not None
    if is_named and call.sampling.prompt_logprobs is not None:
        # A journal would have to hold megabytes, for a request that is quickly repeated.
        raise InvalidRequest(
            "log-probabilities of prompts do not go with a request that has a name or an idempotency key",
            field=call.field_prefix + call.prompt_logprobs_field,
            code="unsupported_parameter",
        )
    if call.idempotency_key:
        check_idempotency_key(call.idempotency_key)
        derived_id = DERIVED_ID_PREFIX + name_of("key", call.tenant, call.idempotency_key)
        call.request_id = call.request_id or derived_id
        _check_not_derived(call.request_id, derived_id)
        name = journal_name(call.tenant, derived_id)
    elif call.request_id is not None:
        if last_event_id is None:
            _check_not_derived(call.request_id)
        name = journal_name(call.tenant, call.request_id)
    elif last_event_id is not None:
        raise event_id_error("the request needs the X-Request-Id or the Idempotency-Key that it had before")
    else:
        return None
    positions = None if last_event_id is None else _positions_after(last_event_id, call)
    return Ask(
        name,
        call.request_id,
        call.tenant,
        call,
        digest_of("call", call.tenant, digest),
        positions,
        deadline=call.deadline,
        ticket=call.ticket,
        trace=telemetry.extract(call.traceparent, call.tracestate),
    )


def ask_to_resume(
    request_id: str,
    tenant: str,
    *,
    next_index: int,
    remaining_s: float,
    ticket: TenantTicket | None = None,
    trace: TraceContext | None = None,
) -> Ask:
    """Asks for the rest of what is known by this id. Raises InvalidRequest for an id that breaks the rule."""
    check_name(request_id, field_name="request_id")
    if tenant:
        check_name(tenant, field_name="tenant")
    deadline = Deadline.after(remaining_s)
    name = journal_name(tenant, request_id)
    return Ask(name, request_id, tenant, next_index=next_index, deadline=deadline, ticket=ticket, trace=trace)


def journal_name(tenant: str, request_id: str) -> str:
    """Returns the name under which the journal of this request is kept."""
    return name_of("request", tenant, request_id)


def another_request() -> InvalidRequest:
    """Returns the error for a Last-Event-ID that names another request than the client asks for."""
    return event_id_error("it is of another request")


def several_answers() -> InvalidRequest:
    """Returns the error for a place in the answer of a request that has several."""
    return InvalidRequest("the request has several answers, and next_index is of a single one", field="next_index")


def conflict() -> TandemError:
    """Returns the error for a name that belongs to a request with another body."""
    return AlreadyExists(
        "another request was made with the same name and a different body",
        field="Idempotency-Key",
        code="idempotency_conflict",
    )


def not_known() -> InvalidRequest:
    """Returns the error for a request that cannot be continued, because neither this gateway nor Redis knows it."""
    return NotFound("this request is not known, or no longer known", field="request_id", code="stream_not_found")


def _positions_after(last_event_id: str, call: Call) -> list[Position]:
    """Returns the position that an event id names. A call with an idempotency key takes its request id from there."""
    named_id, positions = parse_event_id(last_event_id)
    if call.idempotency_key:
        call.request_id = named_id
        check_name(named_id, field_name="Last-Event-ID")
    elif named_id != call.request_id:
        raise another_request()
    return positions


def _check_not_derived(request_id: str, own: str = "") -> None:
    """Raises InvalidRequest for an id that only an idempotency key may lead to, unless that is the call's own."""
    if _DERIVED_ID.fullmatch(request_id) is not None and request_id != own:
        raise InvalidRequest(
            f"request_id must not be {DERIVED_ID_PREFIX} and 32 hex digits: such ids are made of idempotency keys",
            field="request_id",
            code="invalid_value",
        )
