"""A small HTTP server that answers as each test tells it to."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | list[Any]
"""(status, JSON document), or a list of pieces of an event stream: bytes as they are, others as JSON events."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave in the middle are part of the tests."""


class FakeApi:
    """`routes` maps "GET /path" to an answer or a function that makes one; `requests` holds what came in."""

    def __init__(self) -> None:
        self.routes: dict[str, Answer | Callable[[], Answer]] = {}
        self.requests: list[tuple[str, Any]] = []
        self._here = threading.local()
        self._server = Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def answered(self) -> tuple[Mapping[str, str], Any]:
        """Headers and body of the request that this thread answers: others may have come since."""
        return self._here.headers, self._here.body

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(f"GET {self.path}", None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self._answer(f"POST {self.path}", json.loads(body))

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self._answer(f"PATCH {self.path}", json.loads(body))

            def _answer(self, key: str, body: Any) -> None:
                api.requests.append((key, body))
                api._here.headers, api._here.body = self.headers, body
                route = api.routes.get(key, (404, {"error": {"message": f"no route {key}"}}))
                answer = route() if callable(route) else route
                if isinstance(answer, tuple):
                    data = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
                    self.send_response(answer[0])
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for piece in answer:
                    data = piece if isinstance(piece, bytes) else b"data: " + json.dumps(piece).encode() + b"\n\n"
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
