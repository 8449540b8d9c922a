"""The program that fetches a model, against a real server: what it takes, and what it must not take."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deploy.manifests import KUBERNETES

pytestmark = pytest.mark.deploy

PROGRAM = KUBERNETES / "components" / "model-volume" / "fetch" / "fetch_model.py"
NAME, REVISION = "example/tiny", "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": b"\x01" * 3_000_000,
    "model-00002-of-00002.safetensors": b"\x02" * 1_000_000,
    "tokenizer/tokenizer.json": b"{}",
}


class Hub(ThreadingHTTPServer):
    """A server of models, with what is wrong with it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = dict(FILES)
        self.listed = [*self.files, "pytorch_model.bin", "modeling_tiny.py", ".gitattributes"]
        self.broken_off: set[str] = set()
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.tokens.add(self.headers.get("authorization"))
        if self.path == f"/api/models/{NAME}/revision/{REVISION}":
            self.answer(json.dumps({"siblings": [{"rfilename": name} for name in self.server.listed]}).encode())
            return
        name = self.path.removeprefix(f"/{NAME}/resolve/{REVISION}/")
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        self.answer(content, size=len(content) + 7 if name in self.server.broken_off else None)

    def answer(self, content: bytes, *, size: int | None = None) -> None:
        self.send_response(200)
        self.send_header("content-length", str(size or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def digest_of(files: dict[str, bytes]) -> str:
    lines = [f"{hashlib.sha256(content).hexdigest()}  ./{name}\n" for name, content in sorted(files.items())]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def run(hub: Hub, into: Path, *, digest: str = digest_of(FILES), **environ: str) -> "subprocess.CompletedProcess[str]":
    flags = [f"--endpoint={hub.url}", f"--revision={REVISION}", f"--digest={digest}", f"--into={into}"]
    return subprocess.run(
        [sys.executable, str(PROGRAM), "fetch", *flags, NAME],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_fetched_whole_and_nothing_else_of_it(hub: Hub, tmp_path: Path) -> None:
    ran = run(hub, tmp_path / "tiny", FETCH_TOKEN="secret")
    assert ran.returncode == 0, ran.stderr
    assert contents(tmp_path) == {f"tiny/{name}": content for name, content in FILES.items()}
    assert hub.tokens == {"Bearer secret"}
    assert not [path for path in hub.asked if path.endswith((".bin", ".py", ".gitattributes"))]


def test_what_is_there_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path / "tiny").returncode == 0
    hub.asked.clear()
    assert run(hub, tmp_path / "tiny").returncode == 0
    assert hub.asked == []


def test_another_model_in_its_place_stays(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    ran = run(hub, tmp_path / "tiny")
    assert ran.returncode == 1
    assert "give the new model another folder" in ran.stderr
    assert contents(tmp_path) == {"tiny/config.json": b"{}"}


def test_a_changed_file_is_found_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.files["model-00002-of-00002.safetensors"] = b"\x03" * 1_000_000
    ran = run(hub, tmp_path / "tiny")
    assert ran.returncode == 1
    assert "they were removed" in ran.stderr
    assert contents(tmp_path) == {}


def test_what_broke_off_continues_with_the_files_that_are_missing(hub: Hub, tmp_path: Path) -> None:
    hub.broken_off.add("model-00002-of-00002.safetensors")
    ran = run(hub, tmp_path / "tiny")
    assert ran.returncode == 1
    assert "broke off after 1000000 of 1000007 bytes" in ran.stderr
    assert not (tmp_path / "tiny").exists()
    hub.broken_off.clear()
    hub.asked.clear()
    assert run(hub, tmp_path / "tiny").returncode == 0
    assert [path.rpartition("/")[2] for path in hub.asked[1:]] == [
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("name", ["../config.json", "/etc/config.json", "a/../../config.json", "a\\b.json", "a\n.json"])
def test_a_file_outside_of_the_model_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.listed.append(name)
    hub.files[name] = b"{}"
    ran = run(hub, tmp_path / "models" / "tiny")
    assert ran.returncode == 1
    assert "would lie outside of the model" in ran.stderr
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("digest", "said"), [("sha256:12", "64 hex digits"), ("md5:" + "0" * 64, "64 hex digits"), ("", "64 hex digits")]
)
def test_no_model_without_a_digest(hub: Hub, tmp_path: Path, digest: str, said: str) -> None:
    ran = run(hub, tmp_path / "tiny", digest=digest)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert hub.asked == []


def test_a_model_in_pickles_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.listed = ["config.json", "pytorch_model.bin"]
    ran = run(hub, tmp_path / "tiny")
    assert ran.returncode == 1
    assert "no weights in safetensors" in ran.stderr


def test_an_unknown_model_and_a_silent_endpoint_are_told_apart(hub: Hub, tmp_path: Path) -> None:
    hub.listed.append("missing.json")
    ran = run(hub, tmp_path / "tiny")
    assert ran.returncode == 1
    assert "answered 404" in ran.stderr
    hub.server_close()
    hub.shutdown()
    ran = run(hub, tmp_path / "tiny")
    assert ran.returncode == 1
    assert "does not answer" in ran.stderr


def test_the_digest_is_that_of_coreutils(tmp_path: Path) -> None:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), "digest", str(tmp_path)], capture_output=True, text=True, check=True
    )
    shell = "find . -type f | sort | xargs sha256sum | sha256sum"
    known = subprocess.run(
        ["sh", "-c", shell], cwd=tmp_path, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    assert ran.stdout.strip() == f"sha256:{known.stdout.decode().split()[0]}" == digest_of(FILES)
