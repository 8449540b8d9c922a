"""`tandem up` with a real supervisor, real Redis and real signals, over small programs in place of the services."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.main import main
from tests.certificates import Authority
from tests.waiting import HANG_LIMIT_S, wait_until

# Stands in for `python -m gateway`: lists as ready whichever worker has written its pid into the folder.
GATEWAY = """
import http.server, json, pathlib, sys
sys.path.insert(0, sys.argv[3])
from services.runtime.process import die_with_parent
die_with_parent()
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        workers = [
            {"id": path.stem, "role": path.stem.split("-")[0], "pid": int(path.read_text()), "state": "ready"}
            for path in sorted(folder.glob("*.pid"))
        ]
        body = json.dumps({"workers": workers, "requests": {"queued": 0, "running": 0}}).encode()
        self.send_response(200 if workers or self.path != "/ready" else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
WORKER = """
import os, pathlib, sys, time
sys.path.insert(0, sys.argv[3])
from services.runtime.process import die_with_parent
die_with_parent()
path = pathlib.Path(sys.argv[1]) / f"{sys.argv[2]}.pid"
path.with_suffix(".partial").write_text(str(os.getpid()))
os.rename(path.with_suffix(".partial"), path)
print("loaded", flush=True)
time.sleep(600)
"""
REFUSING = "import sys; print('error: the weights are made of cheese', file=sys.stderr); sys.exit(2)"
CRASHING = "raise RuntimeError('out of luck')"
IDLE = "import time; time.sleep(600)"

DRIVER = """
import os, sys
from cli import up
from cli.children import ChildSpec
from cli.main import main
from cli.restarts import RestartPolicy
root, folder, worker, flags = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
programs = {name: open(f"{folder}/{name}.py").read() for name in ("gateway", "worker", "refusing", "crashing", "idle")}
def spec(name, program, *arguments):
    environment = dict(os.environ) | {"TANDEM_DIE_WITH_PARENT": str(os.getpid())}
    return ChildSpec(name, (sys.executable, "-c", programs[program], *arguments), environment)
up.gateway_spec = lambda settings, addresses, environment: spec(
    "gateway", "gateway", folder, str(addresses.http_port), root
)
up.worker_specs = lambda settings, plans, addresses, environment, machine, gpus: [
    spec(f"{role}-{n}", worker, folder, f"{role}-{n}", root)
    for plan in plans for role, count in (("prefill", plan.num_prefill), ("decode", plan.num_decode))
    for n in range(count)
]
up.load_config = up.read_model_files = lambda folder: None
up.RestartPolicy = lambda: RestartPolicy(first_backoff_s=0.05, max_backoff_s=0.2, max_start_failures=3)
sys.exit(main(["up", "--http-port", "0", "--grpc-port", "0", *flags]))
"""
ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """A running `tandem up` and what it has told."""

    def __init__(self, folder: Path, *flags: str, worker: str = "worker") -> None:
        programs = {"gateway": GATEWAY, "worker": WORKER, "refusing": REFUSING, "crashing": CRASHING, "idle": IDLE}
        for name, program in programs.items():
            (folder / f"{name}.py").write_text(program)
        self.folder = folder
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(ROOT), str(folder), worker, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(folder)},
                text=True,
                start_new_session=True,
            )

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def pid_of(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def processes(self) -> list[int]:
        """Every process that it has started and that still lives."""
        pids = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(self.folder).encode() in command and state != "Z" and int(entry.name) != self.process.pid:
                pids.append(int(entry.name))
        return pids

    def end(self, timeout_s: float = HANG_LIMIT_S) -> int:
        return self.process.wait(timeout_s)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started: list[Cluster] = []

    def start(*flags: str, worker: str = "worker") -> Cluster:
        started.append(Cluster(tmp_path, *flags, worker=worker))
        return started[-1]

    yield start
    for cluster in started:
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda cluster=cluster: cluster.processes() == [])
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_gets_ready_and_ends_cleanly_leaving_nothing(start: Callable[..., Cluster], number: signal.Signals) -> None:
    cluster = start("--prefill", "2", "--decode", "1")
    line = cluster.ready_line()
    words = dict(part.split("=", 1) for part in line.split()[1:])
    assert line.startswith("ready http=http://127.0.0.1:")
    host, _, port = words["grpc"].rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert len(cluster.processes()) >= 5  # gateway, three workers, Redis
    cluster.process.send_signal(number)
    assert cluster.end() == 0
    wait_until(lambda: cluster.processes() == [])
    assert cluster.process.stdout is not None
    assert cluster.process.stdout.read() == ""
    assert not [path.name for path in cluster.folder.iterdir() if path.name.startswith("tandem-")]


def test_a_killed_worker_comes_back(start: Callable[..., Cluster]) -> None:
    cluster = start()
    assert cluster.ready_line()
    first = cluster.pid_of("decode-0")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: cluster.pid_of("decode-0") != first)
    wait_until(lambda: f"decode-0   ready (pid {cluster.pid_of('decode-0')})" in cluster.errors.read_text())
    assert "SIGKILL" in cluster.errors.read_text()


def test_the_gateway_comes_back_on_the_same_port(start: Callable[..., Cluster]) -> None:
    cluster = start()
    port = int(cluster.ready_line().split()[1].rpartition(":")[2])
    gateways = [
        pid for pid in cluster.processes() if b"ThreadingHTTPServer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(gateways[0], signal.SIGKILL)

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    wait_until(lambda: not Path(f"/proc/{gateways[0]}").exists())
    wait_until(answers)


def test_a_killed_redis_comes_back(start: Callable[..., Cluster]) -> None:
    cluster = start()
    assert cluster.ready_line()

    def redis_pids() -> list[int]:
        return [pid for pid in cluster.processes() if b"redis.sock" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    (first,) = redis_pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: [pid for pid in redis_pids() if pid != first] != [])


def test_kill_9_takes_the_workers_along(start: Callable[..., Cluster]) -> None:
    cluster = start("--prefill", "1", "--decode", "2")
    assert cluster.ready_line()
    pids = [cluster.pid_of(name) for name in ("prefill-0", "decode-0", "decode-1")]
    cluster.process.kill()
    wait_until(lambda: not any(pid in cluster.processes() for pid in pids))


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("gateway", "decode"), ("gateway", "prefill")])
def test_a_certificate_without_a_role_is_refused_before_anything_starts(
    roles: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Authority(tmp_path).issue("cluster", roles=roles)
    flags = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]
    assert main(["up", *flags, "--http-port=0", "--grpc-port=0", f"--log-dir={tmp_path / 'logs'}"]) == 2
    (lacking,) = {"gateway", "prefill", "decode"} - set(roles)
    said = f"error: --tls-cert is {files.cert} but must have the URI spiffe://tandem/{lacking} among"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_a_worker_that_refuses_the_model_ends_it_with_exit_code_2_and_its_sentence(
    start: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = start("--log-dir", str(tmp_path / "logs"), worker="refusing")
    assert cluster.end() == 2
    assert cluster.ready_line() == ""
    assert cluster.errors.read_text().rstrip().endswith("error: the weights are made of cheese")
    assert (tmp_path / "logs" / "decode-0.log").is_file()
    wait_until(lambda: cluster.processes() == [])


def test_a_worker_that_cannot_start_ends_it_with_exit_code_1_and_its_log(start: Callable[..., Cluster]) -> None:
    cluster = start(worker="crashing")
    assert cluster.end() == 1
    errors = cluster.errors.read_text()
    assert "RuntimeError: out of luck" in errors
    log = errors.rpartition("its log is ")[2].strip()
    assert "out of luck" in Path(log).read_text()


def test_a_cluster_that_does_not_get_ready_is_given_up_in_time(start: Callable[..., Cluster]) -> None:
    cluster = start("--start-timeout", "1", worker="idle")
    assert cluster.end() == 1
    assert cluster.ready_line() == ""
    assert "error: no request can be served after 1 s" in cluster.errors.read_text()
    wait_until(lambda: cluster.processes() == [])


def test_a_stop_while_loading_is_clean(start: Callable[..., Cluster]) -> None:
    cluster = start("--decode", "3")
    wait_until(lambda: "loading" in cluster.errors.read_text())
    cluster.process.terminate()
    assert cluster.end() == 0
    wait_until(lambda: cluster.processes() == [])


def test_a_stop_before_anything_runs_is_clean(start: Callable[..., Cluster]) -> None:
    cluster = start()
    wait_until(lambda: any(path.name.startswith("tandem-") for path in cluster.folder.iterdir()))
    cluster.process.terminate()
    assert cluster.end() == 0
    assert not [path.name for path in cluster.folder.iterdir() if path.name.startswith("tandem-")]
    wait_until(lambda: cluster.processes() == [])


def test_the_pid_file_holds_the_pid_as_long_as_it_runs(start: Callable[..., Cluster], tmp_path: Path) -> None:
    pid_file = tmp_path / "run" / "tandem.pid"
    cluster = start("--pid-file", str(pid_file))
    assert cluster.ready_line()
    assert int(pid_file.read_text()) == cluster.process.pid
    cluster.process.terminate()
    assert cluster.end() == 0
    assert not pid_file.exists()


def test_logs_are_kept_where_asked_and_shown_when_verbose(start: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = start("--log-dir", str(tmp_path / "logs"), "-v")
    assert cluster.ready_line()
    wait_until(lambda: "decode-0 | loaded" in cluster.errors.read_text())
    cluster.process.terminate()
    assert cluster.end() == 0
    assert (tmp_path / "logs" / "decode-0.log").read_text() == "loaded\n"
    made = [tmp_path / "logs", *(tmp_path / "logs").iterdir()]
    assert {path.name: path.stat().st_mode & 0o077 for path in made if path.stat().st_mode & 0o077} == {}


def pickled(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def unknown(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (folder / "model.safetensors").write_bytes(b"")


def empty(folder: Path) -> None:
    pass


@pytest.mark.parametrize("make", [pickled, unknown, empty])
def test_a_bad_model_folder_is_exit_code_2_and_one_sentence(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert main(["up", "--model", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_vllm_that_is_not_there_is_exit_code_2_and_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cli.up_checks.SOURCE_ROOT", tmp_path)
    assert main(["up", "--engine=vllm"]) == 2
    assert (
        capsys.readouterr().err == "error: --engine vllm needs vLLM, which is not installed: run `make install-vllm`\n"
    )
