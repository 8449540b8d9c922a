"""What README.md shows is pasted as it is, but for the ports and for what a user would put in its place."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
ELSEWHERE = {
    "make run": "the fixture starts what it starts",
    "make test": "this is one of them",
    "make test-faults": "it takes minutes",
    "make attack": "it takes minutes",
    ".venv/bin/tandem up --model ~": "a model that a user has",
    ".venv/bin/tandem serve Qwen": "a download: tests/services/hub",
    ".venv/bin/tandem scale": "tests/cli/test_scale.py",
    ".venv/bin/tandem replay": "its test below",
}
"""Commands that are not pasted here, by how they begin, and why."""


def commands() -> Iterator[str]:
    """Each command of a block of shell, in one line where it is written in several."""
    for language, text in BLOCKS:
        if language == "":
            joined = re.sub(r"\\\n\s*", " ", text)
            for command in re.split(r"\n(?=\S)", re.sub(r"(?m)(^|\s)#\s.*$", "", joined).strip()):
                if command.strip():
                    yield command.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A `tandem up` as README has it, on ports of its own; its HTTP and gRPC addresses."""
    log = (tmp_path_factory.mktemp("up") / "stderr").open("w+")
    command = [BIN / "tandem", "up", "--http-port", "0", "--grpc-port", "0", "--threads", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        ready = re.fullmatch(r"ready http=http://(\S+) grpc=(\S+)\n", process.stdout.readline())
        assert ready is not None, log.seek(0) or log.read()
        yield ready[1], ready[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_LIMIT_S)
        log.close()


def paste(command: str, cluster: tuple[str, str], **more: str) -> str:
    """Runs a command as README has it, from the checkout; returns what it printed."""
    for ours, theirs in (("127.0.0.1:8000", cluster[0]), ("127.0.0.1:50051", cluster[1]), *more.items()):
        command = command.replace(ours, theirs)
    environ = {**os.environ, "TANDEM_URL": f"http://{cluster[0]}", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_is_pasted_or_has_a_reason_not_to_be() -> None:
    known = [*ELSEWHERE, "curl -N", "make chat", "make status", ".venv/bin/tandem top"]
    assert [command for command in commands() if not command.startswith(tuple(known))] == []
    assert all(any(command.startswith(start) for command in commands()) for start in known)


def test_a_question_streams_an_answer(cluster) -> None:
    (question,) = [command for command in commands() if "chat/completions" in command]
    printed = paste(question, cluster)
    assert printed.startswith("data: ")
    assert printed.rstrip().endswith("data: [DONE]")
    assert '"content":' in printed


def events_of(stream: str) -> dict[str, str]:
    """The text of each event by its id; a resumed stream may have those of several in one."""
    found = {}
    for event in stream.split("\n\n"):
        name, data = re.search(r"^id: ?(\S+)", event, re.MULTILINE), re.search(r"^data: ?(\{.*)", event, re.MULTILINE)
        if name is not None and data is not None:
            found[name[1]] = "".join(choice["text"] for choice in json.loads(data[1])["choices"])
    return found


@pytest.mark.parametrize("start", ["make chat", "make status", ".venv/bin/tandem top"])
def test_the_commands_beside_it_work_in_a_pipe(cluster, start: str) -> None:
    (command,) = [command for command in commands() if command.startswith(start)]
    question = "echo Write a function. |" if start == "make chat" else ""
    printed = paste(f"{question} {command.replace('.venv/bin/tandem', 'tandem')}", cluster)
    assert printed.strip() if question else "decode-0" in printed


def test_a_named_request_continues_where_it_broke(cluster) -> None:
    first, again = [command for command in commands() if "order-4711" in command]
    whole = events_of(paste(first, cluster))
    ids = list(whole)
    assert len(ids) > 57
    shown = re.search(r"last-event-id: ([^']+)", again)
    assert shown is not None
    rest = events_of(paste(again, cluster, **{shown[1]: ids[57]}))
    assert "".join(rest.values()) == "".join(list(whole.values())[58:]) != ""


def test_the_python_of_the_client_prints_an_answer(cluster) -> None:
    (program,) = [text for language, text in BLOCKS if language == "python" and "tandem_client" in text]
    program = program.replace("127.0.0.1:50051", cluster[1])
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "client")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True
    )
    assert done.stdout.strip()


@pytest.mark.parametrize("start", ["from tandem import", "import asyncio"])
def test_the_python_without_a_server_prints_an_answer(start: str) -> None:
    (program,) = [text for language, text in BLOCKS if language == "python" and text.startswith(start)]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True
    )
    assert done.stdout.strip()


def test_the_replay_writes_its_report(tmp_path: Path) -> None:
    (command,) = [command for command in commands() if "tandem replay" in command]
    command = command.replace(".venv/bin/tandem", str(BIN / "tandem")).replace(
        "ladder.html", str(tmp_path / "ladder.html")
    )
    subprocess.run(
        ["bash", "-c", f"{command} --limit 100"], cwd=ROOT, capture_output=True, timeout=HANG_LIMIT_S, check=True
    )
    assert "<svg" in (tmp_path / "ladder.html").read_text()
