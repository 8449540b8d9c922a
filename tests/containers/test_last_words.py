"""What a container leaves behind when it ends badly: for want of memory, of a disk's room, of the right model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.containers.cluster import Podman, Unavailable, image_name
from tests.containers.test_containers import say
from tests.deploy.test_fetch_model import NAME, PROGRAM, REVISION, Hub

pytestmark = [pytest.mark.containers, pytest.mark.timeout(120)]

MODELS = "/opt/tandem/models/tandem-demo"
# Files of a tmpfs count as memory of the container, and belong to no process that could be killed for them. The last
# twentieth of the limit takes longer than the second after which a process looks again.
FILL = """
import time
with open("/tmp/fill", "wb") as file:
    for number in range(400):
        file.write(bytes(1 << 20))
        time.sleep(0.02 if number < 100 else 0.1)
"""


@dataclass
class End:
    """How a container ended, what it said last in its file, and in its log."""

    exit_code: int
    words: str
    log: str


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    try:
        return Podman(tmp_path_factory.mktemp("podman"))
    except Unavailable as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def container(podman: Podman, words: Path, image: str, *arguments: str, flags: tuple[str, ...] = ()) -> Iterator[str]:
    """Runs a container as Kubernetes does, with a file for its last words; removes it."""
    words.write_text("")
    words.chmod(0o666)
    hardened = ("--detach", "--read-only", "--cap-drop=all", f"--volume={words}:/dev/termination-log")
    started = podman.run("run", *hardened, *flags, image_name(image), *arguments).stdout.strip()
    try:
        yield started
    finally:
        podman.run("rm", "--force", "--time=0", started)


def end_of(podman: Podman, name: str, words: Path) -> End:
    code = int(podman.run("wait", name).stdout.strip())
    logs = podman.run("logs", name)
    return End(code, words.read_text().strip(), logs.stdout + logs.stderr)


def test_a_worker_that_the_kernel_kills_for_memory_has_said_so(podman: Podman, tmp_path: Path) -> None:
    limits = ("--network=none", "--memory=400m", "--memory-swap=400m", "--tmpfs=/tmp:size=1g")
    settings = ("--env=TANDEM_ID=decode-9", f"--env=TANDEM_MODEL={MODELS}", "--env=TANDEM_THREADS=1")
    words = tmp_path / "words"
    flags = (*limits, *settings, "--env=TANDEM_KV_MEMORY=32MiB")
    with container(podman, words, "worker", "decode_worker", flags=flags) as name:
        until_said(podman, name, '"message":"ready"')
        assert words.read_text() == ""
        podman.run("exec", name, "python3", "-c", FILL, check=False)
        end = end_of(podman, name, words)
    say(f"killed for memory: {end.exit_code}, {end.words!r}")
    assert end.exit_code == 137
    assert "of the memory limit of 0.391 GiB were in use: if the process was killed" in end.words


def until_said(podman: Podman, name: str, text: str) -> None:
    end = time.monotonic() + 60
    while text not in (logs := podman.run("logs", name)).stdout + logs.stderr:
        assert time.monotonic() < end, logs.stderr[-2000:]
        time.sleep(0.2)


def test_more_pages_than_memory_are_refused_before_they_are_used(podman: Podman, tmp_path: Path) -> None:
    settings = ("--env=TANDEM_ID=decode-9", f"--env=TANDEM_MODEL={MODELS}", "--env=TANDEM_KV_MEMORY=2GiB")
    flags = ("--network=none", "--memory=400m", *settings)
    with container(podman, tmp_path / "words", "worker", "decode_worker", flags=flags) as name:
        end = end_of(podman, name, tmp_path / "words")
    assert end.exit_code == 2
    assert "KV pages take 2047 MiB, but" in end.words


def test_a_volume_without_the_model_is_named(podman: Podman, tmp_path: Path) -> None:
    flags = ("--network=none", "--env=TANDEM_ID=decode-9", "--env=TANDEM_MODEL=/srv/models/llama")
    with container(podman, tmp_path / "words", "worker", "decode_worker", flags=flags) as name:
        end = end_of(podman, name, tmp_path / "words")
    assert end.exit_code == 2
    assert end.words.startswith("the model folder /srv/models/llama does not exist")


def test_a_fetch_onto_a_full_volume_says_so(podman: Podman, tmp_path: Path) -> None:
    """The Job of `model-volume/fetch`, whose last words are the end of its log (FallbackToLogsOnError)."""
    volume = "--tmpfs=/srv/models:size=2m,mode=1777"
    flags = ("--network=host", f"--volume={PROGRAM}:/fetch_model.py:ro", volume, "--entrypoint=python3")
    with serving() as hub:
        given = ("--endpoint", hub.url, "--revision", REVISION, "--digest", f"sha256:{'0' * 64}")
        command = ("/fetch_model.py", "fetch", *given, "--into", "/srv/models/tiny", NAME)
        with container(podman, tmp_path / "words", "gateway", *command, flags=flags) as name:
            end = end_of(podman, name, tmp_path / "words")
    last = end.log.splitlines()[-1]
    say(f"a full volume: {end.exit_code}, {last!r}")
    assert end.exit_code == 1
    assert "model-00001-of-00002.safetensors cannot be written: No space left on device" in last


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
