"""One operation of the HTTP API, as a row of the table of all: its statuses, headers and types."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec

from gateway.limits import (
    MAX_AFFINITY_CHARS,
    MAX_BODY_BYTES,
    MAX_BODY_READ_S,
    MAX_KEY_CHARS,
    MAX_UPLOAD_S,
    SERVICE_CLASSES,
)
from gateway.openai.shapes import NAME_PATTERN, Schema
from gateway.openapi import answers
from gateway.wishes import MAX_MS, MIN_MS, PREFILL, RESIDENCY, RESIDENCY_PATTERN, TIMEOUT, TPOT, TTFT
from services.scheduling.disaggregation import PREFILL_CHOICES

JSON = "application/json"
EVENTS = "text/event-stream"

EVERYWHERE = (400, 401, 403, 431, 500, 503)
"""Any request may be invalid HTTP, be meant for another server, find too many others, or meet a fault of this one."""
WITH_BODY = (*EVERYWHERE, 408, 413, 414, 415, 429)
WITH_MODEL = (*WITH_BODY, 404)
GENERATING = (*WITH_MODEL, 409, 504)

STORED = (*EVERYWHERE, 404)
"""Operations on what Redis holds, which can be asked for only while Redis answers."""
STORED_WITH_BODY = (*STORED, 408, 413, 415)

STATUSES: Mapping[int, str] = {
    200: "It worked.",
    400: "The request is wrong; `param` names the field, the message the rule.",
    401: "No API key, or one that is not known or has expired.",
    403: "The API key does not allow this, or the server is not known under this Host or does not let this Origin in.",
    404: "No such model, or nothing is known of the stream that is to be resumed.",
    408: f"The head or the body did not arrive within {MAX_BODY_READ_S:g} s, a file within {MAX_UPLOAD_S:g} s.",
    409: "Another request has this id, or had this key; or the batch is over, or nearly.",
    413: f"The body has more than {MAX_BODY_BYTES} bytes.",
    414: "The URL is too long.",
    415: "The body is not said to be JSON (`Content-Type: application/json`), or is compressed.",
    429: "A limit of the tenant is reached.",
    431: "Too many or too long headers.",
    500: "A fault of the server.",
    503: "No room or no worker now.",
    504: "The request's deadline passed.",
}

_MILLISECONDS: Schema = {"type": "number", "minimum": MIN_MS, "maximum": MAX_MS}
REQUEST_HEADERS: Mapping[str, tuple[str, Schema]] = {
    "X-Request-Id": (
        "Names the request, which can then be resumed; unique among the running ones of its tenant.",
        {"type": "string", "pattern": NAME_PATTERN},
    ),
    "Idempotency-Key": (
        "Names the request, which is then computed once however often it is sent.",
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[\\x20-\\x7e]*$"},
    ),
    "Last-Event-ID": ("Continues after this event of the named request's stream.", {"type": "string"}),
    "X-Session-Id": (
        "Requests that belong together; wins over `user`.",
        {"type": "string", "minLength": 1, "maxLength": MAX_AFFINITY_CHARS},
    ),
    "X-Service-Class": ("As the field `service_class`.", {"type": "string", "enum": [*SERVICE_CLASSES, ""]}),
    TIMEOUT: ("As the field `request_timeout_ms`.", _MILLISECONDS),
    TTFT: (
        "The first token is needed within this time; it counts where it is less than `--ttft-target-s`.",
        _MILLISECONDS,
    ),
    TPOT: (
        "Each further token is needed within this time; it counts where it is less than `--itl-target-s`.",
        _MILLISECONDS,
    ),
    PREFILL: (
        "What computes the prompt: the decode worker, a prefill worker, or the faster of the two. Needs a key with "
        "`choose_prefill`.",
        {"type": "string", "enum": [*PREFILL_CHOICES]},
    ),
    RESIDENCY: (
        "The only regions, with commas between them, in which the request's data may be: no worker and no gateway of "
        "another one sees it. It may narrow the tenant's rule.",
        {"type": "string", "pattern": RESIDENCY_PATTERN},
    ),
    "X-Allow-Fallback": ("As the field `allow_fallback`, which wins.", {"type": "string", "enum": ["true", "false"]}),
    "traceparent": ("The trace that the request belongs to, as W3C Trace Context has it.", {"type": "string"}),
}
LIMITS = {
    f"x-ratelimit-{what}-{unit}": (f"{meaning} of the tenant's {unit} per minute, where they are limited.", schema)
    for unit in ("requests", "tokens")
    for what, meaning, schema in (
        ("limit", "The number", {"type": "integer"}),
        ("remaining", "What is left", {"type": "integer"}),
        ("reset", "Time until all are available again, such as 6m0s,", {"type": "string"}),
    )
}
ID_HEADER = "X-Request-Id"
"""The header that every answer has."""
ANSWER_HEADERS: Mapping[str, tuple[str, Schema]] = {
    ID_HEADER: ("The request's id, also in the log.", {"type": "string", "pattern": NAME_PATTERN}),
    "X-Tandem-Model": ("The model that answered, by its own name.", {"type": "string"}),
    "X-Tandem-Fallback": ("The model in whose place another one answered, and why.", {"type": "string"}),
    "X-Tandem-Tier": ("The tier that was asked for, the model of it that answered, and why.", {"type": "string"}),
    "X-Tandem-Ignored": ("Members of the body that were ignored, separated by commas.", {"type": "string"}),
    "Retry-After": ("Seconds after which it may be worth trying again.", {"type": "integer", "minimum": 1}),
    "X-Should-Retry": ("A conflict: the same again would meet the same.", {"type": "string", "const": "false"}),
    "WWW-Authenticate": ("How to show a key.", {"type": "string"}),
    **LIMITS,
}
ALWAYS_SENT = frozenset({"X-Tandem-Model"})
"""Headers that every good answer has for which the document names them; an error has them if it came that far."""
HEADERS_OF_STATUS: Mapping[int, tuple[str, ...]] = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}


@dataclass(frozen=True)
class Operation:
    """One method of one path, which is `route`.

    `answer`: the type of a 200, or the media type of one that is not JSON; None: there is no 200. `events`: the type of
    the events that come instead where the request asks for a stream. `errors`: statuses that have the error object;
    `others`: statuses with a type of their own. `body_kind`: the media type of the body. `path_field`: the meaning of
    what stands in braces.
    """

    route: str
    name: str
    summary: str
    _: KW_ONLY
    answer: type[msgspec.Struct] | Schema | str | None
    errors: tuple[int, ...] = EVERYWHERE
    others: tuple[tuple[int, type[msgspec.Struct]], ...] = ()
    body: type[msgspec.Struct] | Schema | None = None
    body_kind: str = JSON
    events: type[msgspec.Struct] | None = None
    request_headers: tuple[str, ...] = ()
    answer_headers: tuple[str, ...] = ()
    path_field: str = "Its id."
    query: tuple[tuple[str, str, Schema], ...] = ()
    error: type[msgspec.Struct] = answers.Error
    """The object of its errors."""
    needs_key: bool = True
    needs_admin: bool = False

    @property
    def method(self) -> str:
        """The method in lower case, as OpenAPI has it."""
        return self.route.partition(" ")[0].lower()

    @property
    def path(self) -> str:
        """The path, with the name of what varies in braces."""
        return self.route.partition(" ")[2]
