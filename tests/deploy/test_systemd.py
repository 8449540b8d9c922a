"""The units of deploy/systemd: systemd finds no fault, they name what exists, and the programs speak its protocol."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.up_settings import UpSettings
from decode_worker.config import DecodeWorkerConfig
from gateway.config import GatewayConfig
from services.runtime.config import all_settings_of

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
DEMO_MODEL = ROOT / "demo" / "model"
NAMES = ("tandem-gateway.service", "tandem-up.service", "tandem-prefill@p0.service", "tandem-decode@d0.service")
HAS_SYSTEMD = shutil.which("systemd-analyze") is not None
MAX_EXPOSURE = 20
"""Tenths of `systemd-analyze security`, from 0 to 100."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the units, the programs that they start, and systemd's own units."""
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    shutil.copytree(UNITS, tmp_path / "etc/systemd/system")
    programs = tmp_path / "opt/tandem/.venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "tandem"):
        shutil.copy("/bin/true", programs / name)
    return tmp_path


def analyze(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *words[:1], f"--root={root}", *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(not HAS_SYSTEMD, reason="systemd-analyze is not installed")
def test_systemd_finds_no_fault(root: Path) -> None:
    done = analyze(root, "verify", "--man=no", *NAMES, "tandem.target")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit = root / "etc/systemd/system/tandem-gateway.service"
    unit.write_text(unit.read_text().replace("Type=notify", "Type=notfy"))
    assert "notfy" in analyze(root, "verify", "--man=no", NAMES[0]).stderr


@pytest.mark.skipif(not HAS_SYSTEMD, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_units_are_hardened(root: Path, name: str) -> None:
    words = ("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", name)
    assert analyze(root, *words).returncode == 0
    shutil.rmtree(root / "etc/systemd/system/tandem-.service.d")
    assert analyze(root, *words).returncode != 0


def test_the_examples_name_settings_that_exist() -> None:
    known = {"gateway": GatewayConfig, "worker": DecodeWorkerConfig, "up": UpSettings}
    for name, config in known.items():
        text = (UNITS / f"{name}.env.example").read_text()
        variables = set(re.findall(r"^#? ?(TANDEM_\w+)=", text, re.MULTILINE))
        assert variables
        assert variables <= {setting.variable for setting in all_settings_of(config)}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """A service manager's end of the socket; its path is its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        yield listening


def told(manager: socket.socket, until: str) -> list[str]:
    """What came, up to a message that begins with a text."""
    lines: list[str] = []
    while not any(line.startswith(until) for line in lines):
        lines += manager.recv(4096).decode().splitlines()
    return lines


@pytest.mark.parametrize(
    "module",
    ["gateway", pytest.param("decode_worker", marks=pytest.mark.slow), pytest.param("up", marks=pytest.mark.slow)],
)
def test_a_program_tells_its_service_manager_of_its_life(manager: socket.socket, module: str, tmp_path: Path) -> None:
    path = manager.getsockname()
    environment = os.environ | {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "600000", "CUDA_VISIBLE_DEVICES": ""}
    command, flags = ["-m", module], ["--model", str(DEMO_MODEL)]
    if module == "gateway":
        flags += ["--redis", "redis://127.0.0.1:1", "--http-port", "0", "--grpc-port", "0", "--linger-s", "0"]
    elif module == "decode_worker":
        flags += ["--id", "d0", "--kv-pages", "64", "--threads", "1"]
    else:
        command = ["-m", "cli.main", "up"]
        flags += ["--http-port", "0", "--grpc-port", "0", "--kv-pages", "256", "--log-dir", str(tmp_path / "logs")]
    with subprocess.Popen(
        [sys.executable, *command, *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            start = told(manager, "READY=1")
            if module != "gateway":
                assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in start)
                assert any(line.startswith("STATUS=") for line in start)
            assert start.count("READY=1") == 1, "children do not speak for it"
            told(manager, "WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            assert "READY=1" not in told(manager, "STOPPING=1")
            assert process.wait(60) == 0
        finally:
            process.kill()
