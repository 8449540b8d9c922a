"""The guide to several machines, followed word by word: what it starts answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.faults.harness import REPOSITORY
from tests.limited_redis import OTHER_SERVER, other_server
from tests.machines.guide import GUIDE, blocks, machines_of

TIMEOUT_S = 240
UNITS = REPOSITORY / "deploy" / "systemd"


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("server", ["embedded", "installed"])
def test_the_commands_of_the_page_make_a_cluster_that_answers(server: str) -> None:
    chosen = "" if server == "embedded" else other_server()
    if chosen is None:
        pytest.skip("no redis-server is installed: on Debian 12, apt-get install redis-server gives Redis 7.0")
    command = [sys.executable, "-m", "tests.machines.guide"]
    environment = {**os.environ, OTHER_SERVER: chosen}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.stdout.startswith("skipped:"):
        pytest.skip(done.stdout.removeprefix("skipped:").strip())
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["model"] == "tandem-demo"
    assert answer["usage"]["completion_tokens"] == 20
    # Both were ready when the gateway said so. One that a busy machine keeps silent since then is lost for a moment.
    assert re.search(r"prefill-0 +prefill +(ready|lost)", done.stdout), done.stdout
    assert re.search(r"decode-0 +decode +(ready|lost)", done.stdout), done.stdout


def test_the_page_comes_to_every_machine_and_to_every_unit() -> None:
    page = blocks(GUIDE.read_text())
    assert machines_of(page) == ["admin", "redis", "prefill-0", "decode-0", "gateway-0"]
    enabled = {word for block in page for word in re.findall(r"enable --now (\S+)", block.commands)}
    units = {re.sub("@.*", "@", name) + ".service" for name in enabled}
    assert units == {unit.name for unit in UNITS.glob("*.service")} - {"tandem-up.service"}, "that is one machine's"
