"""`tandem doctor`: what it finds, and that it says what to do."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from cli import doctor
from cli.findings import Finding, Level
from cli.main import main
from services.cluster.probe import RedisFacts
from services.runtime.version import version
from tests.services.runtime.test_dialling import listening, silent

WORKER = {"id": "d0", "role": "decode", "state": "ready", "model": "m", "layout": "a", "arithmetic": "x", "gpu": None}
WORKER |= {"version": version(), "clock_ahead_s": 0.01, "address": ""}
PREFILL = WORKER | {"id": "p0", "role": "prefill"}


def bad(found: Any) -> list[Finding]:
    return [finding for finding in found if finding.level is not Level.OK]


def test_a_sound_deployment(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /ready"] = (200, {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = PREFILL | {"address": f"127.0.0.1:{server.getsockname()[1]}"}
        api.routes["GET /cluster"] = (200, {"version": version(), "workers": [WORKER, reached]})
        found = list(doctor.gateway(doctor.DoctorSettings(url=api.url)))
    assert [finding.level for finding in found] == [Level.OK] * 3
    assert "1 prefill and 1 decode" in found[2].what
    assert main(["doctor", "--url", api.url, "--json"]) in (0, 1)  # this machine may have its own troubles
    subjects = {finding["subject"] for finding in json.loads(capsys.readouterr().out)}
    assert subjects >= {"python", "machine", "gpu", "copying", "gateway", "workers"}


def test_a_package_that_is_missing_has_its_extra_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(doctor.importlib, "import_module", missing)
    monkeypatch.setattr(doctor, "vllm", lambda: Finding(Level.OK, "vllm", ""))
    for gpus, extras in (("", ["worker", "local"]), ("0", ["worker", "local", "gpu"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        found = bad(doctor.software())
        assert [one.advice.partition("pip install ")[2] for one in found] == [f"'tandem-serving[{x}]'" for x in extras]


def test_what_is_said_of_vllm(tmp_path: Path) -> None:
    """This interpreter has none; the one beside answers what a script says."""
    absent = doctor.vllm(tmp_path)
    assert (absent.level, absent.what.partition(": ")[2]) == (Level.NOTE, "run `make install-vllm`")
    python = tmp_path / ".venv-vllm/bin/python"
    python.parent.mkdir(parents=True)
    for version_there, level, words in (
        ("0.1.2", Level.NOTE, "vLLM 0.1.2 is installed"),
        ("0.32.0", Level.OK, "0.32.0"),
    ):
        python.write_text(f"#!/bin/sh\necho {version_there}\n")
        python.chmod(0o755)
        found = doctor.vllm(tmp_path)
        assert found.level is level
        assert words in found.what


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["doctor", "--url", f"http://127.0.0.1:{port}", "--redis", f"redis://127.0.0.1:{port}"]) == 1
    said = capsys.readouterr().out
    assert "bad   redis" in said
    assert "bad   gateway" in said
    assert "nothing is wrong" not in said


@pytest.mark.parametrize(
    ("status", "workers", "level", "words"),
    [
        (503, [], Level.BAD, "is not ready"),
        (200, [], Level.BAD, "none has joined"),
        (200, [PREFILL], Level.BAD, "without a decode worker"),
        (200, [WORKER], Level.NOTE, "compute all prompts themselves"),
        (200, [WORKER, PREFILL | {"layout": "b"}], Level.BAD, "differ in weights or page layout, such as d0 and p0"),
        (200, [WORKER, PREFILL | {"arithmetic": "y"}], Level.NOTE, "workers differ in arithmetic"),
        (200, [WORKER, PREFILL, WORKER | {"id": "d1", "state": "lost", "layout": "b"}], Level.NOTE, "d1 is lost"),
        (200, [WORKER, PREFILL, WORKER | {"id": "d1", "state": "draining"}], Level.NOTE, "d1 is draining"),
        (200, [PREFILL, WORKER | {"gpu": {"state": "out", "reasons": ["xid_79"]}}], Level.BAD, "d0 is out: xid_79"),
        (200, [PREFILL, WORKER | {"gpu": {"state": "degraded", "reasons": ["hot"]}}], Level.NOTE, "degraded: hot"),
        (200, [PREFILL, WORKER | {"clock_ahead_s": -3.0}], Level.NOTE, "d0 is 3.0 s behind"),
        (200, [PREFILL, WORKER | {"version": "0.0"}], Level.NOTE, "0.0 (d0)"),
        (200, [PREFILL, WORKER | {"version": ""}], Level.NOTE, "unknown (d0)"),
    ],
)
def test_what_is_wrong_with_the_workers(api: Any, status: int, workers: list[Any], level: Level, words: str) -> None:
    api.routes["GET /ready"] = (status, {})
    api.routes["GET /cluster"] = (200, {"version": version(), "workers": workers})
    found = bad(doctor.gateway(doctor.DoctorSettings(url=api.url)))
    named = [finding for finding in found if words in f"{finding.what} {finding.advice}"]
    assert [finding.level for finding in named] == [level]
    assert all(finding.advice for finding in found)
    if status == 200 and workers:
        assert len(found) == 1


def test_a_worker_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (found,) = doctor.ports([WORKER | {"address": f"127.0.0.1:{port}"}], timeout_s=5)
    assert (found.level, found.what) == (
        Level.NOTE,
        f"d0 at 127.0.0.1:{port} cannot be reached from here: Connection refused",
    )
    assert "--advertise-host" in found.advice


def test_a_payload_port_that_drops_packets_is_named_with_what_to_allow() -> None:
    with listening() as (_, port), silent() as (_, transfer_port):
        worker = WORKER | {"address": f"127.0.0.1:{port}", "transfer_address": f"127.0.0.1:{transfer_port}"}
        (found,) = doctor.ports([worker], timeout_s=0.5)
    assert (found.level, found.what) == (
        Level.NOTE,
        f"d0 is reached at 127.0.0.1:{port}, but not at its payload port 127.0.0.1:{transfer_port}: "
        "no answer within 0.5 s",
    )
    assert f"allow TCP port {transfer_port} from the other workers to d0" in found.advice


@pytest.mark.parametrize("transfer_address", ["", None])
def test_a_worker_whose_ports_are_open(transfer_address: str | None) -> None:
    with listening() as (_, port), listening() as (_, transfer_port):
        known = f"127.0.0.1:{transfer_port}" if transfer_address is None else transfer_address
        worker = WORKER | {"address": f"127.0.0.1:{port}", "transfer_address": known}
        assert list(doctor.ports([worker], timeout_s=5)) == []


def test_a_gateway_that_asks_for_a_key(api: Any) -> None:
    api.routes["GET /ready"] = (200, {})
    api.routes["GET /cluster"] = (401, {"error": {"message": "no key"}})
    (found,) = doctor.gateway(doctor.DoctorSettings(url=api.url))
    assert (found.level, found.what) == (Level.BAD, "no key")
    assert "--api-key" in found.advice


def test_each_trouble_is_a_finding_and_nothing_is_said_twice(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    told = [
        {"kind": "clock", "subject": "d0", "cause": "it is 30 s behind", "remedy": "run a time service"},
        {"kind": "redis", "subject": "redis", "cause": "refused", "remedy": "start it"},
    ]
    worker = {"id": "d0", "role": "decode", "state": "ready", "model": "m", "clock_ahead_s": -30.0}
    api.routes["GET /ready"] = (200, {})
    cluster = {"workers": [worker], "version": version(), "redis": {"available": False, "last_failure": "refused"}}
    api.routes["GET /cluster"] = (200, cluster | {"troubles": told})
    assert main(["doctor", "--url", api.url]) == 1
    text = capsys.readouterr().out
    assert "bad   trouble   clock d0: it is 30 s behind\n                run a time service\n" in text
    assert "bad   trouble   redis redis: refused\n                start it\n" in text
    assert text.count("behind") == text.count("refused") == 1
    assert "nothing is wrong" not in text


def test_a_failing_task_of_the_gateway_is_named_once(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway lists it among the troubles too, unless the task that looks for troubles fails itself."""
    error = "KeyError (session.py:290); the log has the rest"
    task = {"name": "session", "subject": "d0", "failures": 5, "error": error, "since_unix_s": 1.0}
    looking = {**task, "name": "troubles", "subject": ""}
    told = {"kind": "background_task", "subject": "session d0", "cause": error, "remedy": "report it"}
    api.routes["GET /ready"] = (200, {})
    api.routes["GET /cluster"] = (200, {"workers": [], "troubles": [told], "failing_tasks": [task, looking]})
    assert main(["doctor", "--url", api.url]) == 1
    text = capsys.readouterr().out
    assert text.count("background_task session d0: ") == 1
    assert f"background_task troubles: it failed 5 times: {error}" in text
    assert "nothing is wrong" not in text


SOUND = RedisFacts("9.1.0", ping_s=0.0002, clock_ahead_s=0.01, used_bytes=10, max_bytes=0, eviction="noeviction")


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"ping_s": 0.02}, Level.NOTE, "round trip is long"),
        ({"clock_ahead_s": -5.0}, Level.NOTE, "5.0 s behind"),
        ({"clock_ahead_s": 5.0}, Level.NOTE, "5.0 s ahead of"),
        ({"used_bytes": 95, "max_bytes": 100}, Level.BAD, "95 B of 100 B"),
        ({"max_bytes": 100, "eviction": "allkeys-lru"}, Level.NOTE, "throws keys away (allkeys-lru), 0 so far"),
        ({"max_bytes": 100, "eviction": "volatile-ttl", "num_evicted_keys": 7}, Level.BAD, "(volatile-ttl), 7 so far"),
    ],
)
def test_what_is_wrong_with_redis(facts: dict[str, Any], level: Level, words: str) -> None:
    assert bad(doctor.judge_redis(SOUND)) == []
    values = {name: getattr(SOUND, name) for name in RedisFacts.__slots__} | facts
    (found,) = bad(doctor.judge_redis(RedisFacts(**values)))
    assert (found.level, words in found.what) == (level, True)


def test_model_folders(tmp_path: Path) -> None:
    demo = Path(__file__).resolve().parents[2] / "demo" / "model"
    (found,) = doctor.model_folder(demo)
    assert (found.level, "layers" in found.what) == (Level.OK, True)
    (found,) = doctor.model_folder(tmp_path)
    assert found.level is Level.BAD
    assert found.advice


def test_what_copying_costs_is_measured() -> None:
    found = list(doctor.copying())
    assert [finding.subject for finding in found] == ["copying", "copying"]
    assert all("GB/s" in finding.what for finding in found)
