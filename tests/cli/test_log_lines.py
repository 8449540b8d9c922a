import io
import json
import logging

import pytest

from cli.log_lines import for_people, start_text, time_of
from services.runtime import logs
from services.runtime.worker_state import UNLISTED


def written(message: str, **fields: object) -> str:
    """A line as our processes write it."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.setup("info", service="gateway", stream=stream)
        logging.getLogger("gateway.x").warning(message, extra=fields)
    finally:
        root.handlers[:], root.level = handlers, level
    return stream.getvalue().strip()


def test_an_entry_is_one_short_line() -> None:
    line = written("refused\nwith \x1b[2J", request_id="r1", limit=3)
    shown = for_people(line, is_coloured=False)
    assert shown.endswith("warning gateway.x: refused\\x0awith \\x1b[2J request_id=r1 limit=3")
    coloured = for_people(line, is_coloured=True)
    assert "\x1b[33mwarning" in coloured
    assert "\x1b[2J" not in coloured
    assert time_of(line) == json.loads(line)["time"]


def test_a_traceback_follows() -> None:
    line = json.dumps(
        {"time": "2026-01-02T03:04:05.678+00:00", "message": "failed", "exception": "Traceback\n  x = \x07"}
    )
    assert for_people(line, is_coloured=False).splitlines()[1:] == ["Traceback", "  x = ?"]
    assert ":05.678 " in for_people(line, is_coloured=False)


@pytest.mark.parametrize("line", ["plain", '{"no": "time"}', "{not json", '{"time": 3}', "[1]"])
def test_anything_else_stays_as_it_is(line: str) -> None:
    assert for_people(line, is_coloured=True) == line
    assert time_of(line) == ""


def test_a_line_of_grpc_itself_looks_like_the_others() -> None:
    line = "E0000 00:00:1795645166.123456 123 chttp2_transport.cc:1182] ping timeout"
    assert for_people(line, is_coloured=False) == line  # with seconds since 1970 in place of a time of day
    line = "E1125 22:06:09.123456     123 chttp2_transport.cc:1182] ping timeout"
    assert for_people(line, is_coloured=False) == "22:06:09.123 error   grpc chttp2_transport.cc:1182: ping timeout"


def test_how_far_weights_are_read_is_one_short_text() -> None:
    told = {"message": "loading weights", "read_bytes": 1_230_000_000, "of_bytes": 16_060_000_000, "left_s": 48}
    assert start_text(json.dumps(told)) == "loading weights: 1.2 of 16.1 GB, 48 s left"
    small = {**told, "read_bytes": 1_048_576, "of_bytes": 8_432_072}
    assert start_text(json.dumps(small)) == "loading weights: 1.0 of 8.4 MB, 48 s left"
    for line in ("", "{", "loading weights", json.dumps({**told, "left_s": "soon"}), json.dumps({"message": "ready"})):
        assert start_text(line) == ""


def test_a_worker_whose_redis_does_not_answer_says_why() -> None:
    told = {"message": UNLISTED, "error": "Connection refused"}
    assert start_text(json.dumps(told)) == f"{UNLISTED}: Connection refused"
    assert start_text(json.dumps({"message": UNLISTED})) == ""
