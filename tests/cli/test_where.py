"""`tandem where`: what a gateway says of a request, in a line."""

import json
from typing import Any

import pytest

from cli.main import main

FOUND = {
    "id": "a/b c",
    "state": "decoding",
    "last_state": "decoding",
    "attempt": 2,
    "gateway": "f" * 32,
    "prefill_worker": "",
    "decode_worker": "decode-1",
    "regions": {"prefill": "", "decode": "eu"},
    "began_unix_s": 1_700_000_000.25,
}


def test_a_request_is_found_by_any_id(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /cluster/requests/a%2Fb%20c"] = (200, FOUND)
    assert main(["where", "a/b c", "--url", api.url]) == 0
    said = "a/b c: decoding, attempt 2; prefill: none, decode: decode-1 in eu; began 2023-11-14T22:13:20.250+00:00\n"
    assert capsys.readouterr().out == said
    assert main(["where", "a/b c", "--url", api.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FOUND


def test_a_request_whose_gateway_died_is_interrupted(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = FOUND | {"id": "a", "state": "interrupted", "last_state": "transferring"}
    api.routes["GET /cluster/requests/a"] = (200, interrupted)
    assert main(["where", "a", "--url", api.url]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"a: interrupted: its gateway {'f' * 32} died while it was transferring, attempt 2; prefill: "
    )


def test_a_request_that_is_not_known_is_an_error(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /cluster/requests/x"] = (404, {"error": {"message": "no request x runs"}})
    assert main(["where", "x", "--url", api.url]) == 1
    assert "no request x runs" in capsys.readouterr().err
