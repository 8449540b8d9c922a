"""What the command line's HTTP client makes of a gateway's answers, and of what is not an answer."""

import socket
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
