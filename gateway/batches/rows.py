"""The lines of batches: what a client asks in each, what is wrong with one, and how its result is written.

Data in, data out. Knows no store and no time.
"""

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec

from gateway.limits import MAX_BODY_BYTES
from services.runtime.errors import InvalidRequest

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""The endpoints that rows may ask."""
MAX_ROWS = 50_000
MAX_ERRORS = 100
"""The most lines that are reported as wrong; the check ends there."""
MAX_CUSTOM_ID_CHARS = 256
MAX_LINE_BYTES = MAX_BODY_BYTES + 4096

EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
TOO_LARGE = ("result_too_large", "The answer is larger than all the room for files: ask for less in one row.")
"""What becomes of a result that would wait for room for ever."""


class BatchRow(msgspec.Struct, frozen=True):
    """What a line says that its batch does not. `body` is as the client wrote it."""

    custom_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a file, in OpenAI's words; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class FileWrong(Exception):
    """A batch cannot be run."""

    def __init__(self, *errors: LineError) -> None:
        super().__init__(errors[0].code)
        self.errors = errors


class Line(NamedTuple):
    """A line of a file. `number` counts from 1, `start` is where it begins."""

    number: int
    start: int
    data: bytes


async def lines_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Line, None]:
    """Yields all lines that are not blank. Raises FileWrong for one that is too long."""
    rest = b""
    number = start = 0
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                yield Line(number, start, line)
            start += len(line) + 1
        _check_length(rest, number + 1)
    if rest.strip():
        yield Line(number + 1, start, rest)


def _check_length(line: bytes, number: int) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise FileWrong(LineError("line_too_long", f"Each line must have at most {MAX_LINE_BYTES} bytes.", line=number))


class Checker:
    """Checks line after line. `check_model` raises InvalidRequest for a model that must not be asked."""

    def __init__(self, endpoint: str, check_model: Callable[[str | None], None]) -> None:
        self._endpoint = endpoint
        self._check_model = check_model
        self._seen: dict[str, int] = {}
        self.errors: list[LineError] = []
        self.num_rows = 0
        self.longest_custom_id = ""
        """The custom_id that takes most bytes as JSON."""
        self._most_bytes = 0

    def check(self, number: int, line: bytes) -> None:
        """Notes what is wrong with a line. Raises FileWrong when it is of no use to look further."""
        self.num_rows += 1
        if self.num_rows > MAX_ROWS:
            raise FileWrong(
                LineError("too_many_requests", f"The file must have at most {MAX_ROWS} requests.", line=number)
            )
        error = self._error_of(number, line)
        if error is not None:
            self.errors.append(error)
            if len(self.errors) == MAX_ERRORS:
                raise FileWrong(*self.errors)

    def finish(self) -> int:
        """Returns the number of rows. Raises FileWrong if anything is wrong."""
        if not self.num_rows:
            raise FileWrong(LineError("empty_file", "The file has no requests."))
        if self.errors:
            raise FileWrong(*self.errors)
        return self.num_rows

    def _error_of(self, number: int, line: bytes) -> LineError | None:
        try:
            line.decode()
            members = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return LineError("invalid_json_line", "This line is not a JSON object.", line=number)
        texts: dict[str, str] = {}
        for name in ("custom_id", "method", "url"):
            if name not in members:
                return _missing(name, number)
            try:
                texts[name] = msgspec.json.decode(members[name], type=str)
            except msgspec.DecodeError:
                return LineError("invalid_type", f"{name} must be a text.", name, number)
        custom_id = texts["custom_id"]
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            rule = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters."
            return LineError("invalid_custom_id", rule, "custom_id", number)
        num_bytes = len(msgspec.json.encode(custom_id))
        if num_bytes > self._most_bytes:
            self._most_bytes, self.longest_custom_id = num_bytes, custom_id
        first = self._seen.setdefault(custom_id, number)
        if first != number:
            rule = f"custom_id must differ from that of every other line; line {first} has it too."
            return LineError("duplicate_custom_id", rule, "custom_id", number)
        if texts["method"] != "POST":
            return LineError("invalid_method", "method must be POST.", "method", number)
        if texts["url"] != self._endpoint:
            rule = f"url must be the endpoint of the batch, {self._endpoint}."
            return LineError("invalid_url", rule, "url", number)
        if "body" not in members:
            return _missing("body", number)
        return self._body_error(members["body"], number) or _repeats_error(line, members["body"], number)

    def _body_error(self, body: msgspec.Raw, number: int) -> LineError | None:
        try:
            read = msgspec.json.decode(body, type=_Body)
        except msgspec.ValidationError:
            return LineError("invalid_type", "body must be an object; its model is a text.", "body", number)
        except (msgspec.DecodeError, RecursionError):
            return LineError("invalid_json_line", "body is not valid JSON.", "body", number)
        if len(bytes(body)) > MAX_BODY_BYTES:
            return LineError("body_too_large", f"body must have at most {MAX_BODY_BYTES} bytes.", "body", number)
        if read.stream not in (None, False):
            return LineError("invalid_value", "stream must be absent or false.", "body.stream", number)
        if read.model == "":
            return LineError("invalid_value", "model must not be empty.", "body.model", number)
        try:
            self._check_model(read.model)
        except InvalidRequest as error:
            return LineError(error.code or "model_not_found", error.message, "body.model", number)
        return None


def has_repeats(text: str) -> bool:
    """Returns whether an object of a JSON text has a member twice. Raises RecursionError."""
    try:
        json.loads(text, object_pairs_hook=_check_repeats, parse_int=str)  # int() refuses long ones
    except _Repeated:
        return True
    return False


def row_of(line: bytes) -> BatchRow:
    """Returns the row of a line that was checked before."""
    return msgspec.json.decode(line, type=BatchRow)


def result_line(batch_id: str, row: int, custom_id: str, *, status: int, request_id: str, body: bytes) -> bytes:
    """Returns what the server has answered to a row, as a line of one of the two files."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(batch_id, row, custom_id, response=response, error=None)


def unanswered_line(batch_id: str, row: int, custom_id: str, *, code: str, message: str) -> bytes:
    """Returns why a row was not asked."""
    return _line(batch_id, row, custom_id, response=None, error={"code": code, "message": message})


class _Body(msgspec.Struct):
    """What has to be known of a body before it is asked."""

    model: str | None = None
    stream: Any = None


class _Repeated(Exception):
    """A member occurs twice."""


def _repeats_error(line: bytes, body: msgspec.Raw, number: int) -> LineError | None:
    """Returns the error for members of a line that occur twice; the body's own are checked when the row is asked."""
    try:
        # Nothing but an object looks like one, so whatever else is replaced was an empty one or in a text.
        if not has_repeats(line.replace(bytes(body), b"null").decode()):
            return None
    except RecursionError:
        return LineError("invalid_json_line", "This line is nested too deeply.", line=number)
    return LineError("duplicate_key", "A member of this line appears twice.", line=number)


def _check_repeats(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise _Repeated


def _missing(name: str, number: int) -> LineError:
    return LineError("missing_required_parameter", f"{name} is missing.", name, number)


def _line(batch_id: str, row: int, custom_id: str, **members: Any) -> bytes:
    # Equal on every gateway that computes the row, and each time.
    row_id = hashlib.sha256(f"{batch_id}/{row}".encode()).hexdigest()[:24]
    return msgspec.json.encode({"id": f"batch_req_{row_id}", "custom_id": custom_id, **members}) + b"\n"
