"""Worker processes from their command line to their end, without Redis: what is wrong is one sentence and a code."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.free_ports import free_port
from tests.waiting import HANG_LIMIT_S, settle
from worker import startup
from worker.role_change import Life

START_TIMEOUT_S = HANG_LIMIT_S
LOADING = "the draft is loading"
SLOW_DRAFT = f"""
import time
from decode_worker import __main__ as starter, role
def load_draft(*_, **__):
    print({LOADING!r}, flush=True)
    time.sleep(600)
role.load_draft = load_draft
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


def read_until(process: "subprocess.Popen[str]", *texts: str) -> None:
    """Reads the output until a line has the texts; a process that says nothing is ended, so that this is, too."""
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if all(text in line for text in texts):
                return
        raise AssertionError(f"it ended without saying {texts}: {''.join(seen)}")
    finally:
        watchdog.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_gets_ready_and_ends_cleanly_when_it_is_told_to(start: Start, role: str) -> None:
    process = start("-m", f"{role}_worker")
    read_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_worker_changes_its_role_with_its_port_and_its_pages(start: Start, tmp_path: Path, first: str) -> None:
    file, ports = tmp_path / "worker-0.role", [free_port(), free_port(), free_port()]
    flags = [f"--port={ports[0]}", f"--metrics-port={ports[1]}", f"--transfer-port={ports[2]}", "--transport=tcp"]
    process = start("-m", "dual_worker", f"--role={first}", f"--role-file={file}", *flags)
    other = "decode" if first == "prefill" else "prefill"
    read_until(process, f'"service":"{first}-worker"', '"ready"', f"127.0.0.1:{ports[0]}")
    for role in (other, first, other):
        file.write_text(role)
        read_until(process, f'"service":"{role}-worker"', '"ready"', f"127.0.0.1:{ports[0]}")
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/metrics", timeout=HANG_LIMIT_S) as page:
            assert f'program="{role}-worker"' in page.read().decode()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output


def test_a_worker_begins_in_the_role_that_its_file_names_and_keeps_it_where_the_other_cannot_be(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "worker-0.role"
    file.write_text("prefill\n")
    flags = ["--speculative=draft", f"--draft-model={tmp_path}"]
    process = start("-m", "dual_worker", "--role=decode", f"--role-file={file}", *flags)
    read_until(process, '"service":"prefill-worker"', '"ready"')
    file.unlink()
    read_until(process, '"service":"prefill-worker"', "it cannot have the role or the model that is wanted")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output
    assert "draining" in output


def test_a_worker_that_vllm_computes_for_has_one_role(start: Start) -> None:
    process = start("-m", "dual_worker", "--role=decode", "--engine=vllm")
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert output.splitlines()[-1].startswith("error: --engine is vllm, which computes for one role only")


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


def test_a_worker_changes_its_model_and_wakes_one_that_sleeps(
    start: Start, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    file, broken = tmp_path / "all-0.model", tmp_path / "broken"
    broken.mkdir()
    others = f"--other-models=b={checkpoint('qwen2-bias')},c={broken}"
    first = (f"--model={checkpoint('llama-mha')}", "--model-name=a")
    process = start("-m", "dual_worker", "--role=decode", *first, f"--model-file={file}", others)
    read_until(process, '"ready"')
    for name, was_asleep in (("b", "false"), ("a", "true"), ("b", "true")):
        file.write_text(name)
        read_until(process, "another model is awake", f'"model":"{name}"', f'"was_asleep":{was_asleep}')
        read_until(process, '"ready"')
    file.write_text("c")
    read_until(process, "it cannot have the role or the model that is wanted", str(broken))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, output
    assert "draining" in output


async def test_a_change_waits_for_redis_through_which_the_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "LOOK_S", 0.001)
    lease, nothing = SimpleNamespace(is_held=False), SimpleNamespace(tls=None)
    awake = SimpleNamespace(name="a", settings=nothing, loaded=None)
    process: Any = startup._Process(nothing, SimpleNamespace(awake=awake), None, lease, None)  # type: ignore[arg-type]
    role: Any = SimpleNamespace(name="decode", engine=lambda settings, model: "makes the engine")
    preparing = asyncio.create_task(process.prepare(Life(role, "a")))
    await settle()
    assert (preparing.done(), process.engines) == (False, {})
    lease.is_held = True
    await asyncio.wait_for(preparing, HANG_LIMIT_S)
    assert process.engines == {"decode": "makes the engine"}
