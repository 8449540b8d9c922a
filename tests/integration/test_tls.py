"""A cluster of real processes in which everything is TLS: it serves, and it refuses strangers at once."""

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kv_transfer.protocol.messages import Hello, WireLayout
from kv_transfer.wire import to_wire
from protos import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    link_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.runtime import rpc
from services.runtime.tls import Identity, TlsFiles
from tests.certificates import Authority, serial_of
from tests.free_ports import free_port
from tests.integration.conftest import ScriptedGateway, WorkerProcess
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
TANDEM = [sys.executable, "-m", "cli.main"]
TIMEOUT_S = HANG_LIMIT_S
START_TIMEOUT_S = HANG_LIMIT_S
LAYOUT = WireLayout("f" * 32, 16, "bfloat16", 8, 32, 128, True, "avx2")
ROLES = ("gateway", "prefill", "decode")


class SecureCluster:
    """A `tandem up` with TLS for everything; `files` is what all of its processes show."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.files = self.authority.issue("cluster", roles=ROLES)
        self.operator_port = free_port()
        self.errors = folder / "up.err"
        self.logs = folder / "logs"
        flags = {"http-port": 0, "grpc-port": 0, "kv-pages": 512, "threads": 1, "log-dir": self.logs, "seed": 1}
        environment = {
            "TANDEM_TLS_CERT": str(self.files.cert),
            "TANDEM_TLS_KEY": str(self.files.key),
            "TANDEM_TLS_CA": str(self.authority.path),
            "TANDEM_OPERATOR_PORT": str(self.operator_port),
            "TANDEM_LOCAL_PREFILL_TOKENS": "0",
            "TMPDIR": str(folder),
        }
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*TANDEM, "up", *(f"--{name}={value}" for name, value in flags.items())],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | environment,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http=https://"), self.errors.read_text()
        self.url, self.grpc = (word.partition("=")[2] for word in line.split()[1:])
        workers = self.ready_workers()
        self.pids = {worker["id"]: worker["pid"] for worker in workers}
        self.worker_at = {worker["role"]: worker["address"] for worker in workers}

    def ready_workers(self) -> list[dict[str, Any]]:
        """Both workers, as soon as they are ready."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            status = self.tandem("status", "--json")
            assert status.returncode == 0, status.stderr
            workers: list[dict[str, Any]] = json.loads(status.stdout)["workers"]
            if [worker["state"] for worker in workers] == ["ready", "ready"]:
                return workers
            assert time.monotonic() < deadline_s, f"they are not ready: {workers}"
            time.sleep(0.1)

    def tandem(self, *arguments: str, ca: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [*TANDEM, arguments[0], "--url", self.url, *arguments[1:]]
        given = {"TANDEM_TLS_CA": str(ca or self.authority.path)}
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False, env=os.environ | given
        )

    def dial(self, address: str, shown: TlsFiles | None = None, *, ca: Path | None = None) -> grpc.Channel:
        pair = (None, None) if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
        credentials = grpc.ssl_channel_credentials((ca or self.authority.path).read_bytes(), *pair)
        return grpc.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1)])

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(HANG_LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    running = SecureCluster(tmp_path_factory.mktemp("tls"))
    yield running
    assert running.stop() == 0, running.errors.read_text()


def outcome(call: Callable[[], Any]) -> str:
    """The status of a call; OK where it was answered."""
    try:
        call()
    except grpc.RpcError as error:
        return str(getattr(error, "code")().name)  # noqa: B009 - the stubs do not say that it is a Call too
    return "OK"


def health_at(channel: grpc.Channel) -> str:
    request = health_pb2.HealthCheckRequest()
    return outcome(lambda: health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S))


def session_at(channel: grpc.Channel) -> str:
    hello = worker_pb2.DecodeCommand(hello=worker_pb2.SessionHello(gateway_incarnation="f" * 32))
    commands = iter([worker_pb2.DecodeCommands(commands=[hello])])
    return outcome(lambda: next(worker_pb2_grpc.DecodeWorkerStub(channel).Session(commands, timeout=TIMEOUT_S)))


def link_at(channel: grpc.Channel) -> str:
    """Sends a hello that means another process; the Link itself answers with a message that says so."""
    messages = iter([to_wire(Hello("nobody-0", "0" * 32, "1" * 32, LAYOUT, ("tcp",), "nowhere"))])
    return outcome(lambda: next(link_pb2_grpc.LinkStub(channel).Connect(messages, timeout=TIMEOUT_S)))


def drain_at(channel: grpc.Channel) -> str:
    request = cluster_pb2.DrainRequest(worker_id="nobody-0")
    return outcome(lambda: cluster_pb2_grpc.ClusterStub(channel).Drain(request, timeout=TIMEOUT_S))


def generate(cluster: SecureCluster) -> inference_pb2.GenerateResponse:
    """An answer of six tokens to a prompt of which no worker has a page: each has a cache of its own."""
    request = inference_pb2.GenerateRequest(text="def main():\n    return " * 8, cache_salt=os.urandom(8).hex())
    cluster.ready_workers()  # on a very busy machine one may just have counted as lost
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = 6, 0.0, True
    with cluster.dial(cluster.grpc) as channel:
        return inference_pb2_grpc.InferenceStub(channel).GenerateUnary(request, timeout=TIMEOUT_S)


def test_clients_are_served_over_https_and_grpc(cluster: SecureCluster) -> None:
    chat = cluster.tandem("chat", "--message", "Write a function.", "--max-tokens", "8", "--temperature", "0")
    assert chat.returncode == 0, chat.stderr
    assert "TTFT" in chat.stderr

    answer = generate(cluster)
    assert len(answer.token_ids) == 6
    with cluster.dial(cluster.grpc) as channel:
        assert health_at(channel) == "OK"


def test_pages_travel_over_a_link_between_authenticated_workers(cluster: SecureCluster) -> None:
    # A prompt is computed where it is decoded only while the prefill worker counts as gone, as on a very busy machine.
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not generate(cluster).usage.transfer_s > 0:
        assert time.monotonic() < deadline_s, "no page was ever sent"
    assert "handoff channel" in (cluster.logs / "prefill-0.log").read_text()


def test_a_client_that_believes_another_ca_says_so(cluster: SecureCluster, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    refused = cluster.tandem("status", ca=other.path)
    assert refused.returncode == 1
    assert "was not signed by a CA that is believed here: name its CA with --tls-ca" in refused.stderr
    with cluster.dial(cluster.grpc, ca=other.path) as channel:
        assert health_at(channel) == "UNAVAILABLE"


@pytest.mark.parametrize("port", ["grpc", "prefill", "decode", "operator"])
def test_without_tls_there_is_no_connection(cluster: SecureCluster, port: str) -> None:
    address = {"grpc": cluster.grpc, "operator": f"127.0.0.1:{cluster.operator_port}", **cluster.worker_at}[port]
    with grpc.insecure_channel(address) as channel:
        assert health_at(channel) == "UNAVAILABLE"


def test_plain_http_is_not_answered(cluster: SecureCluster) -> None:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("https://"), timeout=TIMEOUT_S)
    connection.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        connection.getresponse()
    connection.close()


def test_a_workers_port_is_closed_to_whom_the_ca_does_not_know(cluster: SecureCluster, tmp_path: Path) -> None:
    strangers = {
        "none": None,
        "another CA's": Authority(tmp_path).issue("stranger", roles=ROLES),
        "expired": cluster.authority.issue("expired", roles=ROLES, days=(-9, -1)),
    }
    found = {}
    for name, shown in strangers.items():
        for role, address in cluster.worker_at.items():
            with cluster.dial(address, shown) as channel:
                found[name, role] = health_at(channel)
    assert set(found.values()) == {"UNAVAILABLE"}, found


@pytest.mark.parametrize(
    ("roles", "session", "link"),
    [
        ((), "PERMISSION_DENIED", "PERMISSION_DENIED"),  # a client's certificate
        (("prefill",), "PERMISSION_DENIED", "OK"),
        (("gateway",), "OK", "PERMISSION_DENIED"),
        (("operator",), "PERMISSION_DENIED", "PERMISSION_DENIED"),
    ],
)
def test_a_role_gets_no_further_than_its_own_methods(
    cluster: SecureCluster, roles: tuple[str, ...], session: str, link: str
) -> None:
    shown = cluster.authority.issue("caller", roles=roles)
    with cluster.dial(cluster.worker_at["decode"], shown) as channel:
        assert (health_at(channel), session_at(channel), link_at(channel)) == ("OK", session, link)


def test_draining_is_for_operators(cluster: SecureCluster) -> None:
    operators_port = f"127.0.0.1:{cluster.operator_port}"
    with cluster.dial(cluster.grpc) as channel:
        assert drain_at(channel) == "UNAUTHENTICATED"
    with cluster.dial(operators_port, cluster.authority.issue("worker", roles=["prefill"])) as channel:
        assert drain_at(channel) == "PERMISSION_DENIED"
    with cluster.dial(operators_port, cluster.authority.issue("operator", roles=["operator"])) as channel:
        assert drain_at(channel) == "NOT_FOUND"  # there is no such worker
        topology = cluster_pb2_grpc.ClusterStub(channel).GetTopology(
            cluster_pb2.GetTopologyRequest(), timeout=TIMEOUT_S
        )
        assert {worker.id for worker in topology.workers} == {"prefill-0", "decode-0"}
    with cluster.dial(operators_port) as channel:
        assert health_at(channel) == "UNAVAILABLE"


@pytest.mark.slow
async def test_each_process_gets_along_with_its_own_role(
    cluster: SecureCluster,
    start_worker: Callable[..., WorkerProcess],
    make_gateway: Callable[[], ScriptedGateway],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def flags(name: str, role: str) -> dict[str, Path | None]:
        files = cluster.authority.issue(name, roles=[role])
        return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}

    prefill = start_worker("prefill", "prefill-0", transport="tcp", **flags("own-prefill", "prefill"))
    decode = start_worker("decode", "decode-0", transport="tcp", **flags("own-decode", "decode"))
    other = start_worker("decode", "decode-1", transport="tcp", **flags("own-decode", "decode"))
    monkeypatch.setattr(rpc, "_identity", Identity(cluster.authority.issue("own-gateway", roles=["gateway"])))
    gateway = await make_gateway().connected_to(prefill, decode, other)
    answer = await gateway.begin("long", list(range(2, 60)), max_tokens=1000)
    await answer.until("handed_off")
    assert answer.handed_off is not None
    assert answer.handed_off.transport == "tls"
    await answer.until("tokens")
    await gateway.pause(answer)
    moved = await gateway.admit_from_decode(answer, answer.token_ids, decode=1)
    await gateway.hand_over(answer, moved)
    await moved.until("tokens", "failed", "refused")
    assert moved.error is None
    await gateway.cancel(moved)


def serials(cluster: SecureCluster, shown: TlsFiles) -> Mapping[str, int]:
    """Numbers of the certificates that new connections are shown."""
    context = ssl.create_default_context(cafile=cluster.authority.path)
    context.load_cert_chain(shown.cert, shown.key)
    addresses = {"http": cluster.url.removeprefix("https://"), "grpc": cluster.grpc, **cluster.worker_at}
    found = {}
    for name, address in addresses.items():
        context.set_alpn_protocols(["http/1.1" if name == "http" else "h2"])
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                der = secure.getpeercert(binary_form=True)
        assert der is not None
        found[name] = serial_of(ssl.DER_cert_to_PEM_cert(der).encode())
    return found


def test_certificates_change_under_a_running_cluster(cluster: SecureCluster) -> None:
    shown = cluster.authority.issue("looker", roles=["gateway"])
    before = serials(cluster, shown)
    assert set(before.values()) == {serial_of(cluster.files.cert.read_bytes())}

    cluster.authority.issue("cluster", roles=ROLES)
    after = serials(cluster, shown)
    assert set(after.values()) == {serial_of(cluster.files.cert.read_bytes())} != set(before.values())

    # Open sessions and Links continue, in the same processes.
    assert len(generate(cluster).token_ids) == 6
    assert {worker["id"]: worker["pid"] for worker in cluster.ready_workers()} == cluster.pids
