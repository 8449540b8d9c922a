"""What gateways and Kubernetes would answer."""

import http.server
import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.certificates import Authority
from tests.fake_api import FakeApi

SPEED = {
    "prefill": {"overhead_s": 0.001, "s_per_token": 1e-3, "s_per_token_squared": 0.0},
    "decode": {"overhead_s": 0.01, "s_per_sequence": 0.01, "s_per_context_token": 0.0},
}


def worker(role: str, **changes: Any) -> dict[str, Any]:
    return {
        "role": role,
        "state": "ready",
        "model": "demo",
        "pages": {"total": 100},
        "page_tokens": 16,
        "max_running": 4,
        "waiting_tokens": 0,
        "speed": SPEED,
        **changes,
    }


def metrics(*, ended: float = 0, queued: float = 0, running: float = 0, model: str = "demo", **sums: float) -> bytes:
    rows = [
        f'tandem_request_duration_seconds_count{{model="{model}",outcome="finished"}} {ended}',
        f'tandem_requests{{model="{model}",state="queued"}} {queued}',
        f'tandem_requests{{model="{model}",state="running"}} {running}',
        f'tandem_request_prompt_tokens_count{{model="{model}"}} {ended}',
        f'tandem_request_prompt_tokens_sum{{model="{model}"}} {sums.get("prompt", 450 * ended)}',
        f'tandem_request_generated_tokens_count{{model="{model}"}} {ended}',
        f'tandem_request_generated_tokens_sum{{model="{model}"}} {sums.get("answer", 101 * ended)}',
    ]
    return ("\n".join(rows) + "\n").encode()


class FakeGateway:
    """Its counts and workers are attributes; `page` replaces /metrics where it is set."""

    def __init__(self, api: FakeApi) -> None:
        self.counts: dict[str, Any] = {}
        self.workers = [worker("prefill"), worker("decode")]
        self.page: bytes | None = None
        self.url = api.url
        api.routes["GET /metrics"] = lambda: (200, metrics(**self.counts) if self.page is None else self.page)
        api.routes["GET /cluster"] = lambda: (200, {"workers": self.workers})


class FakeKubernetes:
    """An API server that knows `scale` and nothing else, over TLS, for a service account whose folder it makes."""

    def __init__(self, folder: Path, **replicas: int) -> None:
        self.scales = {f"statefulsets/tandem-{role}": [number, 1] for role, number in replicas.items()}
        self.patches: list[tuple[str, int]] = []
        self.token = "first"
        authority = Authority(folder / "ca")
        files = authority.issue("server")
        self.account = folder / "account"
        self.account.mkdir()
        (self.account / "ca.crt").write_bytes(authority.path.read_bytes())
        (self.account / "namespace").write_text("home\n")
        (self.account / "token").write_text("first\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def replicas(self) -> Mapping[str, int]:
        return {name.removeprefix("statefulsets/tandem-"): number for name, (number, _) in self.scales.items()}

    def set(self, role: str, replicas: int) -> None:
        scale = self.scales[f"statefulsets/tandem-{role}"]
        scale[:] = [replicas, scale[1] + 1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_PATCH(self) -> None:
                assert self.headers["content-type"] == "application/merge-patch+json"
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, patch: Any) -> None:
                prefix, suffix = "/apis/apps/v1/namespaces/home/", "/scale"
                name = self.path.removeprefix(prefix).removesuffix(suffix)
                if self.headers["authorization"] != f"Bearer {api.token}":
                    return self._send(401, {"kind": "Status", "message": "Unauthorized"})
                if not (self.path.startswith(prefix) and self.path.endswith(suffix) and name in api.scales):
                    return self._send(404, {"kind": "Status", "message": f'"{name}" not found'})
                scale = api.scales[name]
                if patch is not None:
                    if patch["metadata"]["resourceVersion"] != str(scale[1]):
                        return self._send(409, {"kind": "Status", "message": "the object has been modified"})
                    scale[:] = [patch["spec"]["replicas"], scale[1] + 1]
                    api.patches.append((name, scale[0]))
                spec = {"replicas": scale[0]} if scale[0] else {}
                return self._send(200, {"metadata": {"resourceVersion": str(scale[1])}, "spec": spec})

            def _send(self, status: int, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
