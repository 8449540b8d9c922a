"""What the command line's HTTP client makes of a gateway's answers, and of what is not an answer."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from services.runtime.api_client import (
    ApiRefused,
    ApiUnreachable,
    get_json,
    get_status,
    get_text,
    patch_json,
    post_events,
)
from services.runtime.errors import ConfigError
from services.runtime.tls import TlsFiles, client_context
from tests.certificates import Authority


def test_a_document_and_a_status(api: Any) -> None:
    api.routes["GET /x"] = (200, {"a": [1]})
    api.routes["GET /y"] = (503, {})
    assert get_json(api.url, "/x", timeout_s=5) == {"a": [1]}
    assert [get_status(api.url, path, timeout_s=5) for path in ("/x", "/y")] == [200, 503]


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((403, {"error": {"message": "an admin's key is needed"}}), ApiRefused, "an admin's key is needed"),
        ((500, b"<html>"), ApiRefused, "answered 500"),
        ((200, b"<html>"), ApiUnreachable, "its answer is not JSON"),
    ],
)
def test_an_error_says_what_the_server_said(api: Any, answer: Any, error: type[Exception], said: str) -> None:
    api.routes["GET /x"] = answer
    with pytest.raises(error, match=said):
        get_json(api.url, "/x", timeout_s=5)


def test_an_address_without_a_server_and_one_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ApiUnreachable, match=r"did not answer within 0\.1 s"):
            get_json(url, "/x", timeout_s=0.1)
    with pytest.raises(ApiUnreachable, match="cannot be reached: Connection refused"):
        get_json(url, "/x", timeout_s=5)
    with pytest.raises(ConfigError, match="must name a host"):
        get_json("http:///x", "/x", timeout_s=5)


@contextlib.contextmanager
def tls_server(files: TlsFiles, *, asks: bool = False) -> Iterator[int]:
    """The port of a server that speaks TLS and answers nothing; `asks` for a certificate of the same CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca) if asks else None)
    context.load_cert_chain(files.cert, files.key)
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as spoken:
                    spoken.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_what_is_wrong_with_tls_names_the_flag(authority: Authority, tmp_path: Any, api: Any) -> None:
    ours = client_context(None, None, authority.path)

    def said(url: str, tls: ssl.SSLContext | None) -> str:
        with pytest.raises(ApiUnreachable) as caught:
            get_json(url, "/x", timeout_s=5, tls=tls)
        return caught.value.message

    with tls_server(authority.issue("gateway")) as port:
        assert "--tls-ca" in said(f"https://127.0.0.1:{port}", client_context(None, None, None))
        assert "--url begins with https://" in said(f"http://127.0.0.1:{port}", None)
    with tls_server(authority.issue("elsewhere", hosts=["other.example"])) as port:
        assert "for another host" in said(f"https://127.0.0.1:{port}", ours)
    with tls_server(authority.issue("old", days=(-9, -1))) as port:
        assert "expired" in said(f"https://127.0.0.1:{port}", ours)
    with tls_server(authority.issue("strict"), asks=True) as port:
        assert "--tls-cert and --tls-key" in said(f"https://127.0.0.1:{port}", ours)
        files = Authority(tmp_path / "other").issue("stranger")
        stranger = client_context(files.cert, files.key, authority.path)
        assert "--tls-cert and --tls-key" in said(f"https://127.0.0.1:{port}", stranger)
    assert "does not speak TLS" in said(f"https://127.0.0.1:{api.port}", ours)


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(api: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        get_json(api.url, "/x", timeout_s=5, api_key="geh\u00e4im\n")
    assert "geh" not in caught.value.message


def test_events_until_done_and_an_answer_that_breaks_off(api: Any) -> None:
    api.routes["POST /x"] = (
        200,
        b': comment\n\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n',
    )
    api.routes["POST /y"] = (200, b'data: {"n": 1}\n\n')
    api.routes["POST /z"] = (200, b'data: {"error": {"message": "no worker is left"}}\n\n')
    assert list(post_events(api.url, "/x", body={}, timeout_s=5)) == [{"n": 1}, {"n": 2}]
    events = post_events(api.url, "/y", body={}, timeout_s=5)
    assert next(events) == {"n": 1}
    with pytest.raises(ApiUnreachable, match="before it was complete"):
        next(events)
    with pytest.raises(ApiRefused, match="no worker is left"):
        list(post_events(api.url, "/z", body={}, timeout_s=5))


def test_a_text_and_a_patch(api: Any) -> None:
    api.routes["GET /x"] = (200, "é\n".encode())
    api.routes["PATCH /x"] = (200, {"replicas": 2})
    api.routes["PATCH /y"] = (409, {"kind": "Status", "message": "it has been modified"})
    assert get_text(api.url, "/x", timeout_s=5) == "é\n"
    assert patch_json(api.url, "/x", body={"spec": 1}, timeout_s=5) == {"replicas": 2}
    assert api.requests[-1] == ("PATCH /x", {"spec": 1})
    with pytest.raises(ApiRefused, match="it has been modified"):
        patch_json(api.url, "/y", body={}, timeout_s=5)
