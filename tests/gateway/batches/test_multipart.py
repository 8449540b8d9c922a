"""Forms with files: whole whatever the pieces they come in, and refused where they are no forms."""

import asyncio
import contextlib
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.files_api import MAX_FILENAME_CHARS
from gateway.batches.multipart import (
    MAX_BOUNDARY_CHARS,
    MAX_CONTENT_TYPE_CHARS,
    MAX_PART_HEAD_BYTES,
    FormField,
    FormReader,
    boundary_of,
)
from services.runtime.errors import InvalidRequest

BOUNDARY = b"frontier"


async def pieces_of(body, cuts):
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        yield body[start:end]


def read(body, cuts=(), boundary=BOUNDARY):
    """(part, content) of each part, and the largest piece of content."""

    async def read_all():
        form = FormReader(pieces_of(body, cuts), boundary)
        parts = []
        while (part := await form.next_part()) is not None:
            parts.append((part, [piece async for piece in form.data()]))
        return parts

    return [(part, b"".join(data)) for part, data in asyncio.run(read_all())]


def form(*parts, end=b"--\r\n"):
    return b"".join(b"--frontier\r\n" + part + b"\r\n" for part in parts) + b"--frontier" + end


FILE = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
FIELD = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'


@given(st.text(st.sampled_from("\r\n-abfrontie"), max_size=200), st.lists(st.integers(0, 400), max_size=20), st.text())
def test_a_form_is_read_as_it_was_written_however_it_is_cut(content, cuts, field):
    content = content.encode()
    request = httpx.Request(
        "POST", "http://here/", data={"purpose": field}, files={"file": ("näme.jsonl", content, "text/plain")}
    )
    body = request.read()
    cuts = sorted(cut for cut in cuts if cut < len(body))
    parts = read(body, cuts, boundary_of(request.headers["content-type"]))
    assert parts == [(FormField("purpose", None), field.encode()), (FormField("file", "näme.jsonl"), content)]


def test_what_looks_like_a_boundary_is_content_until_it_is_one():
    contents = [b"\r\n--frontie", b"--frontier--", b"\r\n-", b"", b"\r\n", b"\r\n\r\n--frontie\r\n"]
    body = form(*[FILE + content for content in contents])
    assert [content for _, content in read(body, range(1, len(body)))] == contents


def test_no_more_is_held_than_a_piece():
    async def most_held():
        body = form(FILE + b"x" * 100_000)
        reader = FormReader(pieces_of(body, range(1000, len(body), 1000)), BOUNDARY)
        await reader.next_part()
        return max([len(reader._buffer) async for _ in reader.data()])

    assert asyncio.run(most_held()) < 2000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--frontier",
        b"nothing\r\n" + form(FIELD),
        form(FIELD)[: -len(b"--frontier--\r\n")],
        form(FIELD, end=b"\n"),
        form(FIELD, end=b"x"),
        form(FIELD, end=b"\r\n"),
        form(b"\r\nno head"),
        form(b"Content-Type: text/plain\r\n\r\nx"),
        form(b"Content-Disposition: form-data\r\n\r\nx"),
        form(b'Content-Disposition: form-data; name=""\r\n\r\nx'),
        form(b'Content-Disposition: attachment; name="file"\r\n\r\nx'),
        form(b'Content-Disposition: form-data; name="\xff"\r\n\r\nx'),
        form(b"no colon\r\n" + FIELD),
        form(b"Content-Disposition: form-data; name=x; filename*=undefined''x\r\n\r\nx"),
        form(b"Content-Disposition: form-data; name*=utf-8''x\r\n\r\nx"),
        form(b"Content-Disposition: form-data; name*0=a; name*=b\r\n\r\nx"),
        form(b'Content-Disposition: form-data; name=x; filename*="x"; filename*0="y"\r\n\r\nx'),
        form(b"Content-Transfer-Encoding: base64\r\n" + FIELD),
        form(b"X: " + b"y" * MAX_PART_HEAD_BYTES + b"\r\n" + FIELD),
    ],
)
def test_what_is_no_form_is_refused(body):
    with pytest.raises(InvalidRequest, match="the form is malformed"):
        read(body)


WORDS = (
    *("content-disposition: ", "form-data", "; name=", "; filename", "*", "*0", "*1*", "=", "''", "utf-8", "utf-7"),
    *("undefined", '"', "\\", ";", "x", "\r\n", "\r\n ", ":", "\0", "%ff", "ä", "(", "=?utf-8?q?x?="),
)
HEADS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@given(HEADS, st.booleans())
def test_whatever_a_head_says_it_is_understood_or_refused(text, is_form):
    head = "content-disposition: form-data; name=x" * is_form + text
    with contextlib.suppress(InvalidRequest):
        ((part, _),) = read(form(head.encode() + b"\r\n\r\ncontent"))
        assert part.name
    with contextlib.suppress(InvalidRequest):
        assert boundary_of("multipart/form-data; boundary" * is_form + text)


def test_the_longest_name_fits_however_it_is_encoded():
    name = "名" * MAX_FILENAME_CHARS
    head = f"Content-Disposition: form-data; name=\"file\"; filename*=utf-8''{quote(name)}\r\nContent-Type: text/plain"
    assert read(form(head.encode() + b"\r\n\r\n{}")) == [(FormField("file", name), b"{}")]


def test_a_form_is_known_by_its_content_type():
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    longest = "x" * MAX_BOUNDARY_CHARS
    assert boundary_of(f"Multipart/Form-Data; charset=x; boundary={longest}") == longest.encode()
    for wrong in (
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=a",
        f"multipart/form-data; boundary={longest}x",
        "multipart/form-data; boundary=ä",
        "multipart/form-data; boundary*=undefined''x",
        "multipart/form-data; boundary*=\0''x",
        "multipart/form-data; boundary*=a; boundary*0=b",
        "multipart/form-data; boundary=x; a=" + "y" * MAX_CONTENT_TYPE_CHARS,
    ):
        with pytest.raises(InvalidRequest, match="boundary"):
            boundary_of(wrong)
