"""One JSON object per record, whatever is logged."""

import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from services.runtime import logs


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup("info", service="decode", worker_id="decode-0", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def entries(output: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


def test_a_record_has_its_request_and_its_trace(output: io.StringIO) -> None:
    fields = logs.request_fields("r1", 2, "00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    logging.getLogger("x").info("admitted %d pages", 3, extra=fields)
    logging.getLogger("x").debug("not shown")
    (entry,) = entries(output)
    assert entry["message"] == "admitted 3 pages"
    assert entry["level"] == "info"
    assert (entry["service"], entry["worker_id"]) == ("decode", "decode-0")
    assert (entry["request_id"], entry["attempt"], entry["trace_id"]) == ("r1", 2, "a" * 32)
    assert entry["time"].endswith("+00:00")


def test_a_message_cannot_forge_a_record_or_break_json(output: io.StringIO) -> None:
    # pytest's own handlers, added after ours, would report a text that parallel test processes cannot send.
    del logging.getLogger().handlers[1:]
    logging.getLogger("x").info('a\n{"level": "error"}\r\x00\u2028\ud800', extra={"odd": object(), "raw": b"\xff"})
    (entry,) = entries(output)
    assert entry["level"] == "info"
    assert output.getvalue().count("\n") == 1


@pytest.mark.parametrize("text", ["plain", "naïve\u2028", "\ud800", "\x00\r\n"])
def test_what_any_reader_of_json_gets_is_what_was_said(output: io.StringIO, text: str) -> None:
    del logging.getLogger().handlers[1:]
    fields = {"said": text, "many": ("a", text), "seconds": 0.25, "number": 10**15, "nothing": None}
    logging.getLogger("x").info("done", extra=fields)
    (line,) = output.getvalue().splitlines()
    assert line.isascii()
    entry = json.loads(line)
    assert {name: entry[name] for name in fields} == {**fields, "many": ["a", text]}


def test_tracebacks_are_in_the_record(output: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("x").exception("failed")
    (entry,) = entries(output)
    assert "RuntimeError: broken" in entry["exception"]


def test_endless_messages_are_cut(output: io.StringIO) -> None:
    logging.getLogger("x").info("x" * 10**6)
    assert len(output.getvalue()) < 20_000


@pytest.mark.parametrize(("no_color", "start", "middle"), [("1", "", ""), ("", "\x1b[33m", "\x1b[0m")])
def test_a_terminal_gets_readable_lines_without_control_characters(
    no_color: str, start: str, middle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = Terminal()
    try:
        logs.setup("debug", service="gateway", stream=stream)
        logging.getLogger("x").warning("hello \x1b[31m\nfaked", extra={"request_id": "r1"})
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = stream.getvalue()
    assert f"{start}warning{middle} x: hello \\x1b[31m\\x0afaked" in line
    assert " request_id=r1" in line
    assert line.count("\n") == 1


def test_nonsense_traceparents_give_no_trace_id() -> None:
    assert "trace_id" not in logs.request_fields("r", 1, "nonsense")
    assert "trace_id" not in logs.request_fields("r", 1)


class FullDisk(io.StringIO):
    """A stream to a disk without space, as long as `is_full`."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_a_full_disk_does_not_take_are_counted_and_nothing_is_raised(
    output: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, before = FullDisk(), logs.lost.count
    logs.setup("info", service="decode", stream=disk)
    for _ in range(3):
        logging.getLogger("x").info("a line")
    assert (logs.lost.count - before, logs.lost.error) == (3, "No space left on device")
    assert capsys.readouterr().err == "", "no traceback per line"
    disk.is_full = False
    logging.getLogger("x").info("a line")
    assert (logs.lost.count - before, logs.lost.error) == (3, "")


def test_a_mistake_in_a_log_call_is_shown(output: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    handler = next(one for one in logging.getLogger().handlers if isinstance(one, logs._Handler))
    handler.handle(logging.LogRecord("x", logging.INFO, "file", 1, "%d", ("no number",), None))
    assert "no number" in capsys.readouterr().err
    assert logs.lost.error == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_process_outlives_a_full_disk() -> None:
    program = (
        "import logging, sys; from services.runtime import logs; logs.setup('info', service='x');"
        "[logging.getLogger('x').info('a' * 1000) for _ in range(100)];"
        "sys.stdout.write(f'{logs.lost.count} {logs.lost.error}')"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ended.stdout.decode() == "100 No space left on device"


def test_what_the_grpc_library_says_of_clients_that_leave_is_not_an_error_of_ours(output: io.StringIO) -> None:
    library = logging.getLogger("grpc._cython.cygrpc")
    library.error("ExecuteBatchError raised in core by servicer method [/x]")
    library.error("Invalid encoding on %s", b"content-\xeaype")
    library.error("Exception in callback")
    logging.getLogger("x").error("Invalid encoding on our side")
    assert [entry["message"] for entry in entries(output)] == ["Exception in callback", "Invalid encoding on our side"]
