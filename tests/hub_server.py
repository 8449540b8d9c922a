"""A Hugging Face hub and an S3 on this machine, which break off, lie and refuse as a test wants it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "abcd"


def git_digest(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """What the server has, how it behaves, and what it was asked."""

    files: dict[str, bytes]
    name: str = "org/model"
    token: str = ""
    cuts: list[int] = field(default_factory=list)
    """After how many bytes the next answers with weights break off."""
    lies: dict[str, bytes] = field(default_factory=dict)
    """Other contents than those announced."""
    status: int = 200
    has_ranges: bool = True
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The path and the range of each request for a file."""
    signatures: list[str] = field(default_factory=list)
    sizes: dict[str, str] = field(default_factory=dict)
    """What the listing of S3 says of a file instead of its size."""
    url: str = ""

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_digest(data)}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": siblings}

    def xml(self, prefix: str) -> bytes:
        rows = "".join(
            f"<Contents><Key>{prefix}{name}</Key><Size>{self.sizes.get(name, len(data))}</Size>"
            f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag></Contents>'
            for name, data in self.files.items()
        )
        head = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        return f"{head}<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            hub.signatures.append(self.headers.get("authorization", ""))
            if hub.status != 200:
                return self.answer(hub.status, b"no")
            if hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
                return self.answer(401, b"{}", {"x-error-code": "RepoNotFound"})
            if path == f"/api/models/{hub.name}/revision/main" or path == f"/api/models/{hub.name}/revision/{COMMIT}":
                return self.answer(200, json.dumps(hub.listing()).encode())
            if "list-type=2" in query:
                return self.answer(200, hub.xml("models/one/"))
            name = path.rpartition("/")[2]
            if name not in hub.files:
                code = "RevisionNotFound" if path.startswith(f"/api/models/{hub.name}/") else "RepoNotFound"
                return self.answer(404, b"{}", {"x-error-code": code})
            return self.file(name, hub.lies.get(name, hub.files[name]))

        def file(self, name: str, data: bytes) -> None:
            asked = self.headers.get("range", "")
            hub.asked.append((name, asked))
            if asked and hub.has_ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(data):
                    return self.answer(416, b"")
                headers = {"content-range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
                return self.answer(206, data[start:], headers, cut=name)
            return self.answer(200, data, cut=name)

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: str = "") -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if cut.endswith(".safetensors") and hub.cuts:
                body, self.close_connection = body[: hub.cuts.pop(0)], True
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
