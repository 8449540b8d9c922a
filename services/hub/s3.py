"""Models in S3, or in a store with its API: lists the objects below a prefix and brings them here.

Credentials and places are the variables that Amazon's own programs read: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL. Without a key, requests are not signed, as public buckets want them.
Requests are signed by Signature Version 4 here rather than by boto3, which is 80 MB for two kinds of GET.
"""

import functools
import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import httpx2

from services.hub.fetching import TIMEOUT_S, CutOff, RemoteFile, Report, fetch
from services.hub.source import S3Model
from services.runtime.errors import ModelError

WHOLE = ".whole"
"""In a folder whose files are all here."""
MAX_LISTING_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def s3_folder() -> Path:
    """Returns the folder of all objects that were brought here."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tandem" / "s3"


def local_objects(model: S3Model, report: Report) -> Path:
    """Returns the folder of the objects below a prefix, brought here first where they are not. Raises ModelError.

    The folder's name stands for what the bucket lists now: when an object is replaced, it is another folder.
    """
    with httpx2.Client() as client:
        objects = list(_listed(model, client))
        listing = hashlib.sha256(repr(sorted(objects)).encode()).hexdigest()[:16]
        folder = s3_folder() / model.bucket / model.prefix / listing
        files = []
        for name, size_bytes, etag in objects:
            url = f"{_endpoint()}/{model.bucket}/{quote(f'{model.prefix}/{name}')}"
            # The ETag of an object that came in parts is no digest of its content.
            is_digest = re.fullmatch(r"[0-9a-f]{32}", etag) is not None
            algorithm, digest = ("md5", etag) if is_digest else ("", "")
            headers = functools.partial(signed, url)
            files.append(
                RemoteFile(name, size_bytes, folder / name, url, algorithm=algorithm, digest=digest, headers=headers)
            )
        fetch(files, report=report, client=client)
    (folder / WHOLE).touch()
    return folder


def _listed(model: S3Model, client: httpx2.Client) -> Iterator[tuple[str, int, str]]:
    """Name, size and ETag of each object right below the prefix. Raises ModelError."""
    query = {"list-type": "2", "prefix": f"{model.prefix}/", "delimiter": "/"}
    num_found = 0
    while True:
        url = f"{_endpoint()}/{model.bucket}?{urlencode(sorted(query.items()), quote_via=quote)}"
        root = _get_listing(url, client)
        for each in root.iter("Contents"):
            name = (each.findtext("Key") or "").removeprefix(f"{model.prefix}/")
            if _NAME.fullmatch(name) and name.strip("."):
                num_found += 1
                yield name, _size(each, url), (each.findtext("ETag") or "").strip('"')
        if root.findtext("IsTruncated") != "true":
            break
        query["continuation-token"] = root.findtext("NextContinuationToken") or ""
    if not num_found:
        raise ModelError(f"s3://{model.bucket}/{model.prefix} has no objects")


def _size(listed: ElementTree.Element, url: str) -> int:
    """Returns the bytes of an object. Raises CutOff where its size is no number."""
    text = listed.findtext("Size") or "0"
    if not re.fullmatch("[0-9]{1,18}", text):
        raise CutOff(f"{url} answers what is no listing of S3: {text[:32]!r} is no size")
    return int(text)


def _get_listing(url: str, client: httpx2.Client) -> ElementTree.Element:
    try:
        answer = client.get(url, headers=dict(signed(url)), timeout=TIMEOUT_S)
    except httpx2.TransportError as error:
        raise CutOff(f"{url} does not answer: {error}") from error
    if answer.status_code != 200 or len(answer.content) > MAX_LISTING_BYTES:
        code = re.search(r"<Code>(\w{1,64})</Code>", answer.text[:4096])
        said = f"{answer.status_code} {code[1] if code else answer.reason_phrase}"
        raise CutOff(f"{url} answers {said}; see AWS_ACCESS_KEY_ID and AWS_REGION")
    try:
        plain = re.sub(rb'\sxmlns="[^"]*"', b"", answer.content)
        root = ElementTree.fromstring(plain)  # noqa: S314 - expat bounds what entities become, and the size is bounded
    except ElementTree.ParseError as error:
        raise CutOff(f"{url} answers what is no listing of S3") from error
    return root


def _endpoint() -> str:
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return given.rstrip("/") if given else f"https://s3.{_region()}.amazonaws.com"


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def signed(url: str, *, now: datetime | None = None) -> Mapping[str, str]:
    """Returns the headers of a GET that sign it, by version 4; none where no key is given. They hold for 15 minutes."""
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return {}
    parts, moment = urlsplit(url), (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    named = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": moment}
    if token := os.environ.get("AWS_SESSION_TOKEN"):
        named["x-amz-security-token"] = token
    lines = [f"{name}:{named[name].strip()}\n" for name in sorted(named)]
    names = ";".join(sorted(named))
    request = "\n".join(["GET", parts.path or "/", parts.query, "".join(lines), names, _EMPTY_SHA256])
    scope = f"{moment[:8]}/{_region()}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signing_key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        signing_key = hmac.digest(signing_key, part.encode(), "sha256")
    signature = hmac.digest(signing_key, text.encode(), "sha256").hex()
    said = f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**{name: value for name, value in named.items() if name != "host"}, "authorization": said}
