"""A blocking HTTP client for programs that ask a gateway, or Kubernetes, now and then. Standard library only.

It exchanges small JSON documents and reads event streams.
"""

import http.client
import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.runtime.config import option
from services.runtime.errors import ConfigError, TandemError
from services.runtime.kinds import path, text, url
from services.runtime.tls import client_context

MAX_ANSWER_BYTES = 16 * 1024 * 1024
_TLS_REASONS = (
    (("certificate has expired",), "its certificate has expired"),
    (("hostname mismatch", "ip address mismatch"), "its certificate is for another host than the one in --url"),
    (
        ("certificate_verify_failed",),
        "its certificate was not signed by a CA that is believed here: name its CA with --tls-ca (TANDEM_TLS_CA)",
    ),
    (("wrong_version_number", "record_layer_failure"), "it does not speak TLS: then --url begins with http://"),
    (("certificate_required",), "it asks for a certificate: show one with --tls-cert and --tls-key"),
    (("unknown_ca",), "it does not believe the certificate of --tls-cert and --tls-key: its CA is another one"),
)
"""Texts of the TLS library, and what they mean for a person on the command line."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The gateway that a command asks, and the credentials that it shows."""

    url: str = option(url("http", "https"), default="http://127.0.0.1:8000", help="Address of the HTTP API.")
    tls_ca: Path | None = option(
        path(), default=None, help="PEM file of the CA to believe behind an https address; the system's if not given."
    )
    tls_cert: Path | None = option(
        path(), default=None, help="PEM file of a certificate to show there; needs --tls-key."
    )
    tls_key: Path | None = option(path(), default=None, help="PEM file of its private key, without a passphrase.")
    api_key: str | None = option(
        text(), default=None, help="The key to show, where the gateway asks for one; an admin's for operators' pages."
    )

    def tls(self) -> ssl.SSLContext:
        """The CA to believe and the certificate to show. Raises ConfigError."""
        return client_context(self.tls_cert, self.tls_key, self.tls_ca)


class ApiUnreachable(TandemError):
    """No answer came from the address, or none in time, or none in HTTP."""


class ApiRefused(TandemError):
    """The server answered with an error; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def get_json(
    url: str, path: str, *, timeout_s: float, api_key: str | None = None, tls: ssl.SSLContext | None = None
) -> Any:
    """GET a JSON document. Raises ApiUnreachable or ApiRefused.

    `tls` has the CA to believe behind an https address; None: the system's CAs.
    """
    with _exchange(url, path, None, timeout_s, api_key, tls) as response:
        return _decode(response.read(MAX_ANSWER_BYTES), url)


def get_text(
    url: str, path: str, *, timeout_s: float, api_key: str | None = None, tls: ssl.SSLContext | None = None
) -> str:
    """GET a text. Raises ApiUnreachable or ApiRefused."""
    with _exchange(url, path, None, timeout_s, api_key, tls) as response:
        return response.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")


def patch_json(
    url: str,
    path: str,
    *,
    body: Mapping[str, Any],
    timeout_s: float,
    api_key: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Any:
    """PATCH with a merge patch (RFC 7396) and return the JSON answer. Raises ApiUnreachable or ApiRefused."""
    patch = _Body("PATCH", "application/merge-patch+json", body)
    with _exchange(url, path, patch, timeout_s, api_key, tls) as response:
        return _decode(response.read(MAX_ANSWER_BYTES), url)


def get_status(url: str, path: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> int:
    """The HTTP status that GET answers with. Raises ApiUnreachable."""
    try:
        with _exchange(url, path, None, timeout_s, tls=tls) as response:
            return response.status
    except ApiRefused as error:
        return error.status


def post_events(
    url: str,
    path: str,
    *,
    body: Mapping[str, Any],
    timeout_s: float,
    api_key: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Any]:
    """POST a JSON document and yield the JSON of each server-sent event until `[DONE]`.

    `timeout_s` is the longest silence that is accepted, in seconds. Raises ApiUnreachable, also where the stream ends
    early, and ApiRefused for an error in place of the stream or within it.
    """
    with _exchange(url, path, _Body("POST", "application/json", body), timeout_s, api_key, tls) as response:
        while line := response.readline(MAX_ANSWER_BYTES):
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if not data:
                continue
            event = _decode(data, url)
            if isinstance(event, dict) and "error" in event:
                raise ApiRefused(_error_message(event, "the server reports an error"), status=response.status)
            yield event
    raise ApiUnreachable(f"{url} ended the answer before it was complete")


@dataclass(frozen=True, slots=True)
class _Body:
    """What is sent, and how."""

    method: str
    content_type: str
    document: Mapping[str, Any]


@contextmanager
def _exchange(
    url: str,
    path: str,
    body: _Body | None,
    timeout_s: float,
    api_key: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """Yields the successful answer to a GET, or to a body that is sent; the connection ends with the scope."""
    connection = _connection(url, timeout_s, tls)
    prefix = urlsplit(url).path.rstrip("/")
    try:
        payload = None if body is None else json.dumps(body.document).encode()
        headers = {} if body is None else {"content-type": body.content_type}
        if api_key is not None:
            if re.fullmatch(r"[\x21-\x7e]+", api_key) is None:
                raise ConfigError("the API key must be printable ASCII without spaces")  # and is not shown
            headers["authorization"] = f"Bearer {api_key}"
        connection.request("GET" if body is None else body.method, prefix + path, body=payload, headers=headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise ApiRefused(_refusal(response, url), status=response.status)
        yield response
    except TimeoutError as error:
        raise ApiUnreachable(f"{url} did not answer within {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise ApiUnreachable(f"{url} cannot be reached: {_reason(error, url)}") from error
    finally:
        connection.close()


def _connection(url: str, timeout_s: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ConfigError(f"--url is {url!r} but must name a host, such as http://127.0.0.1:8000")
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=tls)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def _reason(error: Exception, url: str) -> str:
    """Returns why there was no answer, and for what has to do with TLS the flag that says otherwise."""
    lowered = str(error).lower()
    for texts, words in _TLS_REASONS:
        if any(text in lowered for text in texts):
            return words
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if not isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError | http.client.HTTPException):
        return reason
    if url.startswith("https:"):
        return f"{reason}; it may ask for a certificate, or not believe the one of --tls-cert and --tls-key"
    return f"{reason}; it may speak TLS: then --url begins with https://"


def _refusal(response: http.client.HTTPResponse, url: str) -> str:
    try:
        answer = json.loads(response.read(MAX_ANSWER_BYTES))
    except ValueError:
        answer = None
    return _error_message(answer, f"{url} answered {response.status} {response.reason}")


def _error_message(answer: Any, otherwise: str) -> str:
    """The message of an OpenAI error object, or of Kubernetes' status."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) and message else otherwise


def _decode(data: bytes, url: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ApiUnreachable(f"{url} does not speak Tandem's API: its answer is not JSON") from error
