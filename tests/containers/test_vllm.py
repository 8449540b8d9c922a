"""Workers with vLLM on processors, as containers: they start, hand a prompt over, answer, and stop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.containers.cluster import Podman, Unavailable, image_name
from tests.containers.test_containers import say, size_bytes

pytestmark = [pytest.mark.containers, pytest.mark.timeout(500)]

PREFIX = "tandem-test-vllm"
MODEL = "/opt/tandem/models/tandem-demo"
START_LIMIT_S = 240.0
ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
path, body = sys.argv[1], sys.argv[2]
connection.request("POST" if body else "GET", path, body or None, {"content-type": "application/json"})
answer = connection.getresponse()
print(json.dumps({"status": answer.status, "body": answer.read().decode()}))
"""


class Cluster:
    """Valkey, a gateway and one worker of each role in one network that leads nowhere."""

    def __init__(self, podman: Podman) -> None:
        self.podman = podman
        self.names: list[str] = []

    def start(self, name: str, image: str, *arguments: str, **settings: str) -> None:
        """Starts a container; the first one's network is that of all."""
        network = f"--network=container:{self.names[0]}" if self.names else "--network=none"
        hardened = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp:size=256m")
        variables = (f"--env=TANDEM_{key}={value}" for key, value in settings.items())
        name = f"{PREFIX}-{name}"
        self.podman.run(
            "run", "--detach", f"--name={name}", network, *hardened, *variables, image_name(image), *arguments
        )
        self.names.append(name)

    def ask(self, path: str, body: object = None) -> tuple[int, str]:
        """Asks the gateway, from within its container."""
        text = "" if body is None else json.dumps(body)
        asking = ("exec", f"{PREFIX}-gateway", "python3", "-c", ASK, path, text)
        done = self.podman.run(*asking, check=False)
        if done.returncode:
            return 0, done.stderr[-300:]
        answer = json.loads(done.stdout)
        return answer["status"], answer["body"]

    def logs(self) -> str:
        ended = ((name, self.podman.run("logs", "--tail=15", name, check=False)) for name in self.names)
        return "\n".join(f"{name}: {logs.stdout}{logs.stderr}" for name, logs in ended)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        podman = Podman(tmp_path_factory.mktemp("podman"))
    except Unavailable as error:
        pytest.skip(str(error))
    if podman.run("image", "exists", image_name("worker-vllm"), check=False).returncode:
        pytest.skip("`LOCK=vllm TORCH_INDEX= make images ARGS=worker-vllm` builds the image")
    cluster = Cluster(podman)
    names = [f"{PREFIX}-{name}" for name in ("gateway", "prefill", "decode", "valkey")]
    podman.run("rm", "--force", "--ignore", "--time=0", *names)
    try:
        common = {"REDIS": "redis://127.0.0.1:6379", "MODEL": MODEL}
        cluster.start("valkey", "valkey", "--save", "", "--protected-mode", "no")
        engine = {"ENGINE": "vllm", "THREADS": "1", "KV_MEMORY": "256MiB", "DTYPE": "float32", "HOST": "127.0.0.1"}
        for number, role in enumerate(("prefill", "decode")):
            ports = {"PORT": str(7000 + 10 * number), "TRANSFER_PORT": str(7001 + 10 * number), "ID": f"{role}-0"}
            cluster.start(role, "worker-vllm", f"{role}_worker", **common, **engine, **ports)
        cluster.start("gateway", "gateway", **common, LOCAL_PREFILL_TOKENS="0", MIN_PREFILL="1")
        yield cluster
    finally:
        podman.run("rm", "--force", "--ignore", "--time=0", *names)


def test_workers_with_vllm_start_answer_and_stop(cluster: Cluster) -> None:
    began = time.monotonic()
    while cluster.ask("/ready")[0] != 200:
        assert time.monotonic() - began < START_LIMIT_S, cluster.logs()
        time.sleep(1)
    ready_s = round(time.monotonic() - began, 1)
    body = {"prompt": "def length(", "max_tokens": 20, "temperature": 0}
    answers = [json.loads(cluster.ask("/v1/completions", body)[1])["choices"][0] for _ in range(2)]
    assert answers[0]["finish_reason"] in ("stop", "length")
    assert answers[0]["text"]
    assert answers[0] == answers[1]
    known = json.loads(cluster.ask("/cluster")[1])
    engines = {worker["id"]: worker["identity"]["engine"] for worker in known["workers"]}
    assert set(engines) == {"prefill-0", "decode-0"}
    assert all("vllm" in str(engine).lower() for engine in engines.values()), engines
    took = {}
    for role in ("prefill", "decode"):
        stopping = time.monotonic()
        cluster.podman.run("stop", "--time=60", f"{PREFIX}-{role}", timeout_s=90)
        took[role] = round(time.monotonic() - stopping, 1)
        assert cluster.podman.inspect(f"{PREFIX}-{role}")["State"]["ExitCode"] == 0, cluster.logs()
    size = size_bytes(cluster.podman, image_name("worker-vllm")) / 1e6
    say(f"worker-vllm: {size:.0f} MB, ready in {ready_s} s, {answers[0]['text']!r}; seconds to stop: {took}")
