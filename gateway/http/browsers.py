"""What web pages may ask: under which names the gateway is reached (Host), and pages of which sites may call it (CORS).

A page that a browser shows can send requests to any address that its user can reach, this machine's own too. It cannot
choose the headers that are looked at here. Knows no route but those of probes.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Collection

from starlette.responses import Response

from gateway.http.exchange import App, HeaderPairs, HttpRefusal, Receive, Scope, Send, error_answer
from gateway.observability.request_log import code_of
from services.runtime.errors import PermissionDenied, TandemError

PROBE_PATHS = frozenset({"/health", "/ready"})
"""What balancers ask under any name; the answer says nothing."""
WILDCARD_ADDRESSES = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - what a name means, not a bind
PREFLIGHT_S = 600
MAX_KNOWN_HOSTS = 256
"""Values of Host that are remembered as good: a name may come with any port."""

_ALLOWED_METHODS = b"GET, POST, DELETE"
_EXPOSED = (
    b"x-request-id, retry-after, x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    b"x-tandem-model, x-tandem-fallback, x-tandem-ignored, traceparent"
)
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Hosts:
    """The names under which a port is reached. Addresses are always among them, and names that mean this machine only.

    A page whose site is made to resolve to the gateway's address (DNS rebinding) shows its site's name as Host; it
    cannot show an address. `given` adds names; `*.name` stands for all below a name, `*` alone for any host at all.
    """

    def __init__(self, given: str | None, *, bound_to: str) -> None:
        names = {"localhost", *(given or "").lower().split(",")} - {""}
        if bound_to in WILDCARD_ADDRESSES:
            names.add(socket.gethostname().lower())
        else:
            names.add(bound_to.lower())
        self.is_any = "*" in names
        self._names = frozenset(names)
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def allows(self, host: str) -> bool:
        """Returns whether a request with this Host, which may have a port, is meant for us."""
        if self.is_any:
            return True
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") <= 1:
            name = name.partition(":")[0]
        name = name.removesuffix(".")
        if name in self._names or name.endswith(self._suffixes):
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return False


class BrowserGuard:
    """An ASGI application before another, which sees only requests that are meant for it and come from no strange page.

    `origins` are sites whose pages may call it, as browsers write them: `https://chat.example`; "*": all may. None of
    them gets credentials, which the API has none of but a header that a page has to set itself. `on_refusal` is told
    the code of each refusal.
    """

    def __init__(
        self, app: App, hosts: Hosts, *, origins: Collection[str] = (), on_refusal: Callable[[str], None]
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origin.encode() for origin in origins)
        self._is_open_to_all = "*" in origins
        self._on_refusal = on_refusal
        self._known_hosts: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        host = origin = site = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value if host is None else b","
            elif name == b"origin":
                origin = value if origin is None else b","
            elif name == b"sec-fetch-site":
                site = value
        if host not in self._known_hosts and (refusal := self._host_refusal(scope, host)) is not None:
            await self._refuse(refusal, scope, receive, send)
        elif origin is None and site is None:
            await self._app(scope, receive, send)
        else:
            await self._call_of_page(origin, site, host or b"", (scope, receive, send))

    async def _call_of_page(
        self, origin: bytes | None, site: bytes | None, host: bytes, call: tuple[Scope, Receive, Send]
    ) -> None:
        scope, receive, send = call
        if origin is None:
            is_strange = site not in (b"same-origin", b"none") and scope["method"] not in _SAFE_METHODS
        else:
            is_strange = not _is_same(origin, host)
        if not is_strange:
            await self._app(scope, receive, send)
        elif origin is not None and (self._is_open_to_all or origin in self._origins):
            await self._call_of_other_site(origin, call)
        else:
            shown = (origin or b"another site").decode("latin-1")[:256]
            refusal = PermissionDenied(
                f"pages of {shown!r} may not call this server; --cors-origins says which may", code="origin_not_allowed"
            )
            await self._refuse(refusal, scope, receive, send)

    async def _call_of_other_site(self, origin: bytes, call: tuple[Scope, Receive, Send]) -> None:
        scope, receive, send = call
        allowed: HeaderPairs = [(b"access-control-allow-origin", b"*" if self._is_open_to_all else origin)]
        if not self._is_open_to_all:
            allowed.append((b"vary", b"origin"))
        if scope["method"] == "OPTIONS":
            headers = dict(scope["headers"])
            if b"access-control-request-method" in headers:
                answer = _preflight(headers)
                answer.raw_headers += allowed
                await answer(scope, receive, send)
                return
        allowed.append((b"access-control-expose-headers", _EXPOSED))

        async def send_with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                assert isinstance(headers, list | tuple)
                message = {**message, "headers": [*headers, *allowed]}
            await send(message)

        await self._app(scope, receive, send_with_headers)  # type: ignore[arg-type]

    def _host_refusal(self, scope: Scope, host: bytes | None) -> TandemError | None:
        if host is None or host == b",":
            if host is None and (scope["http_version"] != "1.1" or self._hosts.is_any):
                return None
            return HttpRefusal("the request needs one Host header", http_status=400, code="invalid_http")
        if self._hosts.allows(host.decode("latin-1")):
            if len(self._known_hosts) < MAX_KNOWN_HOSTS:
                self._known_hosts.add(host)
            return None
        if scope["path"] in PROBE_PATHS:
            return None
        return PermissionDenied(
            f"this server has no name {host.decode('latin-1')[:256]!r}; --allowed-hosts says which names it has",
            code="host_not_allowed",
        )

    async def _refuse(self, refusal: TandemError, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_refusal(code_of(refusal))
        await error_answer(refusal)(scope, receive, send)


def _preflight(headers: dict[bytes, bytes]) -> Response:
    """Returns the answer to a browser that asks before it sends a page's request."""
    answer = Response(status_code=204)
    asked = headers.get(b"access-control-request-headers", b"")
    if _HEADER_NAMES.fullmatch(asked):
        answer.raw_headers.append((b"access-control-allow-headers", asked))
    if headers.get(b"access-control-request-private-network") == b"true":
        answer.raw_headers.append((b"access-control-allow-private-network", b"true"))
    answer.raw_headers += [
        (b"access-control-allow-methods", _ALLOWED_METHODS),
        (b"access-control-max-age", b"%d" % PREFLIGHT_S),
    ]
    return answer


def _is_same(origin: bytes, host: bytes) -> bool:
    """Returns whether a page sends its request to its own site. A proxy may have terminated its TLS."""
    scheme, _, site = origin.decode("latin-1").lower().partition("://")
    default_port = _DEFAULT_PORTS.get(scheme)
    if default_port is None:
        return False
    return site.removesuffix(default_port) == host.decode("latin-1").lower().removesuffix(default_port)
