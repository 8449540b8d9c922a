"""Worker processes from their command line to their end, without Redis: what is wrong is one sentence and a code."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_TIMEOUT_S = 60
LOADING = "the draft is loading"
SLOW_DRAFT = f"""
import time
from decode_worker import __main__ as starter
def load_draft(*_, **__):
    print({LOADING!r}, flush=True)
    time.sleep(600)
starter.load_draft = load_draft
starter.process.run(starter.main)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(checkpoint: Callable[..., Path]) -> Iterator[Start]:
    """`start("-m", "decode_worker", "--port=0", …)` starts Python with these arguments and those that all need."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        needed = ["--id=worker-0", "--threads=1", "--kv-pages=16"]
        if not any(argument.startswith("--model") for argument in arguments):
            needed.append(f"--model={checkpoint('llama-mha')}")
        environment = dict(os.environ, TANDEM_DIE_WITH_PARENT=str(os.getpid()))
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments, *needed],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    """Reads the output until a line has the text; a process that says nothing is ended, so that this is, too."""
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if text in line:
                return
        raise AssertionError(f"it ended without saying {text!r}: {''.join(seen)}")
    finally:
        watchdog.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_gets_ready_and_ends_cleanly_when_it_is_told_to(start: Start, role: str) -> None:
    process = start("-m", f"{role}_worker")
    read_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output


def test_a_transfer_port_that_is_taken_is_a_setting_that_is_wrong(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("-m", "decode_worker", "--transport=tcp", f"--transfer-port={port}")
        output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert output.splitlines()[-1].startswith(f"error: --transfer-port is {port}, which cannot be listened on: ")
    assert "Traceback" not in output


def test_a_signal_while_a_draft_model_loads_ends_the_worker_at_once(start: Start) -> None:
    process = start("-c", SLOW_DRAFT, "--speculative=draft", "--draft-model=somewhere")
    read_until(process, LOADING)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output


def test_a_folder_that_holds_no_model_is_one_sentence(start: Start, tmp_path: Path) -> None:
    process = start("-m", "prefill_worker", f"--model={tmp_path}")
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert output.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in output
