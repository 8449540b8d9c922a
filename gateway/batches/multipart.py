"""Forms with files (multipart/form-data, RFC 7578), read as they come: what is held is never more than a piece.

Strict: what is not exactly a form is refused, with what is wrong. Knows no HTTP, no fields and no sizes of files.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.policy import compat32

from services.runtime.errors import InvalidRequest

MAX_PART_HEAD_BYTES = 2560
"""The longest head of a part: a filename of 255 letters of three bytes, percent-encoded, and its surroundings."""
MAX_CONTENT_TYPE_CHARS = 256
"""The parser of parameters takes time by the square of their length."""
MAX_BOUNDARY_CHARS = 70
"""RFC 2046, 5.1.1."""
_HEAD_PARSER = HeaderParser(policy=compat32)
_UNREADABLE = (ValueError, TypeError)
"""Errors of parameters as in RFC 2231: encodings that decode nothing, and parts of which only some have a number."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of a form; `filename` None: it is no file."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary of the parts of a body of this content type. Raises InvalidRequest if it is not a form's."""
    head = Message()
    head["content-type"] = content_type
    boundary = ""
    with contextlib.suppress(*_UNREADABLE):
        if len(content_type) <= MAX_CONTENT_TYPE_CHARS and head.get_content_type() == "multipart/form-data":
            boundary = head.get_boundary("")
    if not 1 <= len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii() or not boundary.isprintable():
        raise InvalidRequest("send multipart/form-data with a boundary", code="invalid_form")
    return boundary.encode()


class FormReader:
    """The parts of one body, in turn: `next_part`, then all of its `data`, until there is no part left."""

    def __init__(self, body: AsyncIterator[bytes], boundary: bytes) -> None:
        self._body = body
        self._delimiter = b"\r\n--" + boundary
        # As if a line ended before the body, since its first delimiter has none before it.
        self._buffer = bytearray(b"\r\n")
        self._has_begun = False

    async def next_part(self) -> FormField | None:
        """Returns the next part; None: that was the last one. Raises InvalidRequest for a body that is no form."""
        if not self._has_begun:
            self._has_begun = True
            if await self._take(len(self._delimiter)) != self._delimiter:
                raise _malformed("it does not begin with its boundary")
        end = await self._take(2)
        if end == b"--":
            return None
        if end != b"\r\n":
            raise _malformed("a boundary is not at the end of its line")
        return _part_of(await self._head())

    async def data(self) -> AsyncGenerator[bytes, None]:
        """Yields the content of the part that was begun last, to its end. Raises InvalidRequest."""
        kept = len(self._delimiter) - 1
        while (at := self._buffer.find(self._delimiter)) < 0:
            if len(self._buffer) > kept:
                piece = bytes(self._buffer[:-kept])
                del self._buffer[:-kept]
                yield piece
            await self._fill()
        piece = bytes(self._buffer[:at])
        del self._buffer[: at + len(self._delimiter)]
        if piece:
            yield piece

    async def _head(self) -> bytes:
        while (at := self._buffer.find(b"\r\n\r\n")) < 0 and len(self._buffer) <= MAX_PART_HEAD_BYTES:
            await self._fill()
        if not 0 <= at <= MAX_PART_HEAD_BYTES:
            raise _malformed(f"the head of a part must have at most {MAX_PART_HEAD_BYTES} bytes")
        head = bytes(self._buffer[:at])
        del self._buffer[: at + 4]
        return head

    async def _take(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            await self._fill()
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken

    async def _fill(self) -> None:
        async for piece in self._body:
            if piece:
                self._buffer += piece
                return
        raise _malformed("it ends before its last boundary")


def _part_of(head: bytes) -> FormField:
    try:
        message = _HEAD_PARSER.parsestr(head.decode())
        name = message.get_param("name", header="content-disposition")
        filename = message.get_filename()
    except _UNREADABLE:
        raise _malformed("the head of a part cannot be decoded") from None
    if message.get_content_disposition() != "form-data" or not isinstance(name, str) or not name or message.defects:
        raise _malformed("each part needs a content-disposition of form-data with a name")
    if message.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise _malformed("parts must not be encoded")
    return FormField(name, filename)


def _malformed(what: str) -> InvalidRequest:
    return InvalidRequest(f"the form is malformed: {what}", code="invalid_form")
