"""The cluster of deploy/compose as containers of this machine, driven as tests/faults drives clusters of processes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.faults.harness import REPOSITORY, FaultCluster, Program
from tests.free_ports import free_port

COMPOSE = REPOSITORY / "deploy" / "compose"
PODMAN_COMPOSE = REPOSITORY / ".tools" / "deploy" / "bin" / "podman-compose"
RUNTIMES = ("crun", "runc")
PROJECT = "tandem-test"
VERSION_TAG = "0.1.0"
COMMAND_TIMEOUT_S = 120.0
IMAGES = ("gateway", "worker", "valkey", "prometheus")
BASE, BUILD_BASE = "localhost/tandem-debian:bookworm", "localhost/tandem-debian-build:bookworm"


class Unavailable(Exception):
    """Containers cannot be run here; the text says why."""


class Podman:
    """podman with settings of its own, under which this machine runs containers."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("podman") is None:
            raise Unavailable("podman is not installed")
        if not PODMAN_COMPOSE.exists():
            raise Unavailable("podman-compose is not installed; tools/deploy_tools.sh installs it")
        self._settings = folder / "containers.conf"
        self.environment = dict(os.environ, CONTAINERS_CONF=str(self._settings))
        self._settings.touch()
        for image in IMAGES:
            if self.run("image", "exists", image_name(image), check=False).returncode:
                raise Unavailable(f"{image_name(image)} is missing; `make images ARGS='{' '.join(IMAGES)}'` builds it")
        self.runtime = self._choose_runtime()

    def run(
        self, *arguments: str, check: bool = True, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of podman. Raises RuntimeError with what it said, if it fails and `check` is set."""
        return self._run(["podman", *arguments], check=check, timeout_s=timeout_s)

    def compose(self, files: Sequence[Path], *arguments: str, environment: Mapping[str, str]) -> None:
        """Runs a command of podman-compose over these files. Raises RuntimeError."""
        named = [f"--file={file}" for file in files]
        self._run(
            [str(PODMAN_COMPOSE), f"--project-name={PROJECT}", *named, *arguments], timeout_s=300.0, **environment
        )

    def inspect(self, name: str) -> Any:
        """What podman knows of a container."""
        return json.loads(self.run("container", "inspect", name).stdout)[0]

    def image(self, name: str) -> Any:
        """What it knows of an image."""
        return json.loads(self.run("image", "inspect", name).stdout)[0]

    def _run(
        self, command: list[str], *, check: bool = True, timeout_s: float, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=COMPOSE,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return done

    def _choose_runtime(self) -> str:
        """The first runtime that works: not each of them copes with the control groups of each machine."""
        said = []
        # A machine may allow fewer files than podman asks for, and no process may ask for more than its own limit.
        files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 16_384)
        for runtime in filter(shutil.which, RUNTIMES):
            self._settings.write_text(
                f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n'
                f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            )
            python = ("--entrypoint=python3", image_name("gateway"), "-c", "print('works')")
            done = self.run("run", "--rm", "--network=none", "--read-only", "--cap-drop=all", *python, check=False)
            if done.stdout.strip() == "works":
                return runtime
            said.append(f"{runtime}: {done.stderr.strip()[-200:]}")
        raise Unavailable("no container can be run: " + ("; ".join(said) or f"none of {RUNTIMES} is installed"))


def image_name(image: str) -> str:
    return f"localhost/tandem-{image}:{VERSION_TAG}"


@dataclass
class ContainerCluster(FaultCluster):
    """G gateways, P prefill and D decode workers (2 at most), Valkey and Prometheus: the containers of compose.yaml.

    A program's process is that of its container; it may have been started again by podman. `others` are further
    services, `changes` a file that is laid over compose.yaml, `environment` what its variables are.
    """

    podman: Podman = field(kw_only=True)
    others: Sequence[str] = ()
    changes: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-containers-"))
        self.programs: dict[str, Program] = {}
        self.keep_logs = False
        self._seen: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        self._files = [COMPOSE / "compose.yaml", REPOSITORY / "tests" / "containers" / "compose.yaml"]
        if self.changes is not None:
            self._files.append(self.changes)
        self.prometheus = f"127.0.0.1:{free_port()}"
        self._environment = {
            "COMPOSE_PROFILES": "cpu",
            "VALKEY_IMAGE": image_name("valkey"),
            "PROMETHEUS_IMAGE": image_name("prometheus"),
            "OTLP": "",
            "KV_MEMORY": "64MiB",
            "GREEN_DTYPE": "float32",
            "HTTP_PORT": "",
            "GRPC_PORT": "",
            "PROMETHEUS_PORT": self.prometheus.partition(":")[2],
            **self.environment,
        }
        self._remove()
        try:
            workers = [f"prefill-{number}" for number in range(self.prefill)]
            workers += [f"decode-{number}" for number in range(self.decode)]
            self.up("valkey", "prometheus", "gateway", *workers, *self.others, f"--scale=gateway={self.gateways}")
            for number in range(self.gateways):
                self._add_program(f"gateway-{number}", "gateway")
            for name in workers:
                self._add_program(name, name.partition("-")[0])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None or self.keep_logs:
            for name in self.programs:
                (self.folder / f"{name}.log").write_text("\n".join(self.lines(name)))
            sys.stderr.write(f"logs are kept in {self.folder}\n")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._remove()

    def up(self, *arguments: str, blue_green: bool = False) -> None:
        """Makes and starts what is named."""
        if blue_green and COMPOSE / "blue-green.yaml" not in self._files:
            self._files.insert(1, COMPOSE / "blue-green.yaml")
        self._compose("up", "--detach", "--no-deps", *arguments)

    def add_worker(self, name: str, role: str) -> None:
        """Takes a worker that `up` started for one of the cluster's."""
        self._add_program(name, role)

    def forget(self, name: str) -> None:
        """Expects a program no longer that was stopped for good."""
        del self.programs[name]

    def container(self, name: str) -> str:
        """What podman calls a program."""
        service, _, number = name.partition("-")
        return f"{PROJECT}_gateway_{int(number) + 1}" if service == "gateway" else f"{PROJECT}_{name}_1"

    def start(self, name: str) -> int:
        self.podman.run("start", self.container(name))
        self._refresh(name)
        return self.programs[name].pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.podman.run("kill", f"--signal={number.name}", self.container(name))

    def stop(self, name: str, *, grace_s: int) -> float:
        """Stops a container as Kubernetes stops a pod: SIGTERM, and SIGKILL after the grace. Returns its seconds.

        Raises AssertionError if it had to be killed.
        """
        began = time.monotonic()
        self.podman.run("stop", f"--time={grace_s}", self.container(name), timeout_s=grace_s + COMMAND_TIMEOUT_S)
        state = self.podman.inspect(self.container(name))["State"]
        assert state["ExitCode"] == 0, f"{name} ended with {state['ExitCode']}"
        return time.monotonic() - began

    async def recreate(self, name: str) -> None:
        """Removes a stopped container and starts a new one of its image, as a new pod takes the place of an old one."""
        self._gone[name] = self._seen.get(name, "")
        # podman-compose makes all containers of a scaled service anew; one is made by the old one's command.
        command = self.podman.inspect(self.container(name))["Config"]["CreateCommand"]
        program = self.programs[name]
        # Behind the address that it had, as a Service has one for its pods.
        had = {"127.0.0.1::8000": f"{program.http}:8000", "127.0.0.1::50051": f"{program.grpc}:50051"}
        command = [had.get(word, word) for word in command]
        await asyncio.to_thread(self.podman.run, "rm", self.container(name))
        await asyncio.to_thread(self.podman.run, *command[1:])
        await asyncio.to_thread(self.start, name)

    async def replace(self, name: str) -> None:
        self._gone[name] = self._seen.get(name, "")
        if self.programs[name].is_alive:
            self.kill(name)
        await self.ended(name)
        self.start(name)

    def _is_current(self, worker: Mapping[str, Any]) -> bool:
        # In its container each process has the number 1, and a container that is started again keeps its name.
        name, incarnation = worker["id"], worker["incarnation"]
        if incarnation == self._gone.get(name):
            return False
        self._seen[name] = incarnation
        return True

    def lines(self, name: str, start: int = 0) -> list[str]:
        # Each line begins with a time, the stream, and whether it is whole.
        return [line.split(" ", 3)[-1] for line in super().lines(name, start)]

    def _admin_url(self) -> str:
        networks = self.podman.inspect(f"{PROJECT}_valkey_1")["NetworkSettings"]["Networks"]
        return f"redis://{networks[f'{PROJECT}_cluster']['IPAddress']}:6379"

    def _remove(self) -> None:
        # podman-compose takes down one container of each service, however many it has started.
        label = f"--filter=label=io.podman.compose.project={PROJECT}"
        if found := self.podman.run("ps", "--all", "--quiet", label).stdout.split():
            self.podman.run("rm", "--force", "--time=0", *found)
        self._compose("down", "--volumes", "--timeout=0")

    def _compose(self, *arguments: str) -> None:
        self.podman.compose(self._files, *arguments, environment=self._environment)

    def _add_program(self, name: str, role: str) -> None:
        self.programs[name] = Program(name, role, [], self.folder)
        self._refresh(name)

    def _refresh(self, name: str) -> None:
        program, known = self.programs[name], self.podman.inspect(self.container(name))
        program.pid = known["State"]["Pid"]
        program.log = Path(known["HostConfig"]["LogConfig"]["Path"])
        if program.role == "gateway":
            ports = known["NetworkSettings"]["Ports"]
            program.http = f"127.0.0.1:{ports['8000/tcp'][0]['HostPort']}"
            program.grpc = f"127.0.0.1:{ports['50051/tcp'][0]['HostPort']}"
