"""`tandem join`: which workers it starts and where, how it knows that they are ready, and a cluster of two programs."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gateway as bench
from cli.children import Addresses, ChildSpec, worker_specs
from cli.cores import this_machine
from cli.join import Joined, JoinSettings, machine_label
from cli.up_scopes import early_signals
from demo import DEMO_MODEL
from services.cluster.embedded_redis import EmbeddedRedis
from services.runtime.config import read
from services.runtime.errors import ConfigError
from services.runtime.worker_state import FOUND, UNFOUND, UNLISTED
from tests.waiting import HANG_LIMIT_S

REDIS = "redis://10.0.0.1:6379"
READY = json.dumps({"message": "ready"})


def join(*flags: str, **fields: str) -> JoinSettings:
    given = dict(flag.removeprefix("--").replace("-", "_").split("=") for flag in flags)
    return read(JoinSettings, {"redis": REDIS, **given, **fields}, environ={})


def commands(settings: JoinSettings) -> dict[str, set[str]]:
    addresses = Addresses(settings.redis, 0, 0, workers_at={})
    specs = worker_specs(settings, [settings.plan], addresses, {}, this_machine())
    return {spec.name: set(spec.command) for spec in specs}


def test_its_workers_have_names_of_their_own_and_are_where_they_are_told() -> None:
    placed = ("--host=0.0.0.0", "--advertise-host=left", "--insecure=true")
    found = commands(join("--prefill=1", "--decode=2", "--machine=left", *placed))
    assert list(found) == ["prefill-left-0", "decode-left-0", "decode-left-1"]
    for flags in found.values():
        assert {"--host=0.0.0.0", "--advertise-host=left", "--model-name=tandem-demo"} <= flags
    (flags,) = commands(join("--machine=left", "--max-batch=7", redis="redis://127.0.0.1:6379")).values()
    assert "--max-batch=7" in flags
    assert not [flag for flag in flags if flag.startswith(("--host", "--advertise"))], "a worker's own default holds"


@pytest.mark.parametrize(
    ("host", "label"), [("Node-7.example.org", "node-7"), ("a_b", "a-b"), ("---", "machine"), ("x" * 64, "x" * 32)]
)
def test_a_hosts_name_becomes_a_part_of_names(host: str, label: str) -> None:
    assert machine_label(host) == label


def test_a_place_that_the_cluster_cannot_reach_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--host"):
        join("--machine=left")
    with pytest.raises(ConfigError, match="--insecure"):
        join("--machine=left", "--host=0.0.0.0", "--advertise-host=left")


def test_there_must_be_something_to_join_with() -> None:
    with pytest.raises(ConfigError, match="both 0"):
        join("--prefill=0", "--decode=0")


def child(name: str, body: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", f"import time\n{body}"), dict(os.environ))


async def test_it_is_ready_when_every_worker_says_so_and_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.join.POLL_S", 0.01)
    (tmp_path / "b.log").write_text(READY + "\n")  # of an earlier life, which says nothing of this one
    gate = tmp_path / "gate"
    slow = f"while not __import__('os').path.exists({str(gate)!r}): time.sleep(0.01)\n"
    says = f"print({READY!r}, flush=True); time.sleep(60)"
    joined = Joined([child("a", says), child("b", slow + says)], tmp_path, grace_s=5.0)
    seen: list[str] = []

    def look(self: Joined, really: Callable[[Joined], None] = Joined._look) -> None:
        really(self)
        seen.append(capsys.readouterr().out)
        if self._ready == {"a"} and not gate.exists():
            gate.touch()
        if any("ready a b" in said for said in seen):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Joined, "_look", look)
    with early_signals() as came:  # which gives the signals back
        assert await joined.run(came) == 0
    assert not any("ready" in said for said in seen[: seen.index("ready a b\n")])
    assert all(one.process.returncode is not None for one in joined._supervisor.children.values())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"message": UNFOUND}, "a: no gateway has connected; "),
        ({"message": UNLISTED, "error": "Connection refused"}, f"a: {UNLISTED}: Connection refused\n"),
    ],
)
async def test_it_says_that_no_gateway_comes_and_when_one_does(
    entry: dict[str, str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.join.POLL_S", 0.01)
    entries = ({"message": "ready"}, entry, {"message": FOUND})
    says = [f"print({json.dumps(each)!r}, flush=True)\n" for each in entries]
    gate = tmp_path / "gate"
    slow = f"while not __import__('os').path.exists({str(gate)!r}): time.sleep(0.01)\n"
    body = f"{says[0]}{says[1]}{slow}{says[2]}time.sleep(60)"
    joined = Joined([child("a", body)], tmp_path, grace_s=5.0)
    seen: list[str] = []

    def look(self: Joined, really: Callable[[Joined], None] = Joined._look) -> None:
        really(self)
        seen.append(capsys.readouterr().err)
        if said in "".join(seen):
            gate.touch()
        if "a: a gateway has connected\n" in "".join(seen):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Joined, "_look", look)
    with early_signals() as came:
        assert await joined.run(came) == 0
    assert "".join(seen).count(said) == 1


async def test_a_worker_that_cannot_run_is_named_with_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = Joined([child("a", "print('no such device', flush=True); raise SystemExit(2)")], tmp_path, grace_s=5.0)
    with early_signals() as came:
        assert await joined.run(came) == 1
    said = capsys.readouterr().err
    assert "error: a cannot be kept running" in said
    assert "no such device" in said


@pytest.mark.slow
def test_two_programs_are_one_cluster(tmp_path: Path) -> None:
    """A gateway without workers, and `tandem join`: it serves; the worker leaves in order, and nothing is missed."""
    with EmbeddedRedis() as redis, bench.gateway_process(redis.url) as (_, port):
        command = [sys.executable, "-m", "cli.main", "join", redis.url, "--model-name", "bench"]
        command += ["--cluster", bench.CLUSTER, "--model", str(DEMO_MODEL), "--log-dir", str(tmp_path / "logs")]
        with subprocess.Popen([*command, "--machine", "left"], stdout=subprocess.PIPE, text=True) as joined:
            assert joined.stdout is not None
            assert joined.stdout.readline() == "ready decode-left-0\n"
            assert json.loads(bench.post(port, bench.WHOLE))["choices"][0]["finish_reason"] == "length"
            joined.send_signal(signal.SIGTERM)
            assert joined.wait(HANG_LIMIT_S) == 0
        deadline_s = time.monotonic() + HANG_LIMIT_S
        while (shown := _cluster(port))["workers"] and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert (shown["workers"], shown["gone"]) == ([], [])


def _cluster(port: int) -> dict[str, list[object]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster", timeout=HANG_LIMIT_S) as response:
        found: dict[str, list[object]] = json.load(response)
    return found
