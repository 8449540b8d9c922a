"""What a process leaves in the file of its last words, with real processes where they end."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.runtime import last_words
from services.runtime.errors import ConfigError, InvariantViolated, ModelError
from services.runtime.memory_limit import MemoryLimit
from services.runtime.process import exit_code
from tests.waiting import HANG_LIMIT_S


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TANDEM_TERMINATION_LOG", str(path))
    path.write_text("of an earlier life")
    return path


def failing(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModelError("the model folder /m does\nnot exist"), "the model folder /m does not exist (exit code 2)"),
        (ConfigError("--port is 'x'"), "--port is 'x' (exit code 2)"),
        (InvariantViolated("stuck"), "stuck (exit code 1)"),
        (OSError(errno.ENOSPC, "No space left on device", "/cache/x"), "the disk is full: /cache/x ("),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full ("),
        (PermissionError(errno.EACCES, "Permission denied", "/model"), "permission denied: /model ("),
        (MemoryError(), "out of memory: an allocation was refused"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory: an allocation was"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "out of memory: an allocation was refused"),
        (KeyError("a prompt"), "KeyError (test_last_words.py:"),
    ],
)
def test_each_end_says_why(file: Path, error: Exception, words: str) -> None:
    code = exit_code(failing(error))
    said = file.read_text()
    assert said.startswith(words)
    assert said.endswith(f"(exit code {code})\n")
    assert said.count("\n") == 1
    assert "a prompt" not in said


def test_an_end_in_order_leaves_nothing_and_so_does_an_earlier_life(file: Path) -> None:
    assert exit_code(lambda: None) == 0
    assert file.read_text() == ""


def test_words_are_not_endless(file: Path) -> None:
    last_words.leave("é" * 5000, 1)
    assert len(file.read_bytes()) == last_words.MAX_BYTES


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "/"])
def test_a_file_that_cannot_be_written_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TANDEM_TERMINATION_LOG", name)
    assert exit_code(failing(ConfigError("x"))) == 2


def test_kubernetes_file_is_used_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_TERMINATION_LOG", raising=False)
    monkeypatch.setattr(last_words, "DEFAULT_FILE", tmp_path / "log")
    last_words.leave("x", 1)
    assert not (tmp_path / "log").exists()
    (tmp_path / "log").touch()
    last_words.leave("x", 1)
    assert (tmp_path / "log").read_text() == "x (exit code 1)\n"


async def test_near_the_memory_limit_the_file_says_so_and_no_longer_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = [50, 96, 97, 92, 91, 89, 92]  # 92 is neither near nor far
    written: list[tuple[int, str]] = []
    monkeypatch.setenv("TANDEM_TERMINATION_LOG", "/nowhere")
    monkeypatch.setattr(last_words, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(last_words, "_write", lambda text: written.append((len(shares), text[:27])))
    monkeypatch.setattr(last_words, "memory_limit", lambda: MemoryLimit(100, shares.pop(0)) if shares else None)
    await asyncio.wait_for(last_words.watch_memory(), HANG_LIMIT_S)
    assert written == [(5, "96% of the memory limit of "), (1, "")]


async def test_without_a_limit_nobody_watches(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "memory_limit", lambda: None)
    await asyncio.wait_for(last_words.watch_memory(), HANG_LIMIT_S)


SERVICE = """
import asyncio
from services.runtime import process

async def serve():
    with process.stop_signals() as stop:
        print("ready", flush=True)
        await stop.wait()
        print("draining", flush=True)
        await asyncio.sleep(60)

process.run(lambda: process.run_async(serve()))
"""


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "a second signal (SIGTERM)"), (signal.SIGKILL, "")])
def test_a_kill_from_outside_leaves_no_words_and_a_second_signal_does(
    file: Path, number: signal.Signals, words: str
) -> None:
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(number)
    assert file.read_text().startswith(words)
    assert bool(file.read_text()) == bool(words)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's address space is Linux's")
def test_a_refused_allocation_of_torch_is_told_as_what_it_is(file: Path) -> None:
    code = (
        "import resource, torch; from services.runtime import process\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))\n"
        "process.run(lambda: torch.ones(4 << 30))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert file.read_text().startswith("out of memory: an allocation was refused")
