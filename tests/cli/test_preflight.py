"""`tandem doctor --preflight`: each check sees what it is for, once with a sound machine and once with a broken one."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import preflight
from cli.findings import Finding, Level
from cli.main import main
from cli.preflight import PreflightSettings
from services.cluster import probe as redis_probe
from services.cluster.embedded_redis import EmbeddedRedis
from services.runtime.gpu_facts import GpuFacts
from services.runtime.memory_limit import MemoryLimit

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "demo" / "model"
MIB = 1 << 20


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_a_machine_that_is_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    words = tmp_path / "words"
    monkeypatch.setenv("TANDEM_TERMINATION_LOG", str(words))
    flags = ["--model", str(DEMO_MODEL), "--device", "cpu", "--kv-memory", "16MiB"]
    assert main(["doctor", "--preflight", *flags, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {finding["subject"] for finding in said} >= {"python", "model", "gpu", "shm", "memory", "start"}
    assert "gateway" not in {finding["subject"] for finding in said}
    assert words.read_text() == ""


def test_a_refusal_says_each_reason_on_screen_and_in_the_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    words = tmp_path / "words"
    monkeypatch.setenv("TANDEM_TERMINATION_LOG", str(words))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--preflight", "--model", str(tmp_path), "--ports", f"{port}"]) == 1
    said = capsys.readouterr().out
    assert f"bad   ports     127.0.0.1:{port} is taken by another program" in said
    assert "bad   model " in said
    assert words.read_text().startswith("preflight refuses: model: ")
    assert f"; ports: 127.0.0.1:{port} is taken by another program (exit code 1)" in words.read_text()


def test_an_address_of_another_machine_is_no_place_to_listen() -> None:
    found = only(preflight.free_ports("192.0.2.1", [7000]))
    assert (found.level, "cannot be used" in found.what) == (Level.BAD, True)


def test_shared_memory_that_is_small_or_missing(tmp_path: Path) -> None:
    assert only(preflight.shared_memory(0, folder=tmp_path)).level is Level.OK
    found = only(preflight.shared_memory(1 << 60, folder=tmp_path))
    assert (found.level, "are needed" in found.what) == (Level.BAD, True)
    assert only(preflight.shared_memory(1, folder=tmp_path / "none")).level is Level.BAD
    assert list(preflight.shared_memory(0, folder=tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("flags", "limit_mib", "level"),
    [
        ({"kv_memory": 64 * MIB}, 1024, Level.OK),
        ({"kv_memory": 64 * MIB}, 400, Level.BAD),
        ({"kv_memory": 64 * MIB}, 4096, Level.OK),
        ({"kv_pages": 100_000}, 4096, Level.BAD),
        ({"kv_pages": 100}, 1024, Level.OK),
        ({}, 1024, Level.OK),  # the pool takes what there is
    ],
)
def test_memory_under_the_limit_of_a_container(monkeypatch: Any, flags: Any, limit_mib: int, level: Level) -> None:
    monkeypatch.setattr(preflight, "memory_limit", lambda: MemoryLimit(limit_mib * MIB, 0))
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1 << 50)
    found = list(preflight.memory(PreflightSettings(**flags), DEMO_MODEL, gpus=[]))
    assert [finding.level for finding in found] == [level, Level.OK]
    assert "may take up to 120 s" in found[1].what


@pytest.mark.parametrize(("free", "level"), [(80 << 30, Level.OK), (60 * MIB, Level.BAD)])
def test_memory_of_a_gpu(monkeypatch: Any, free: int, level: Level) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1 << 50)
    monkeypatch.setattr(preflight, "memory_limit", lambda: None)
    gpus = [GpuFacts(free_bytes=free)]
    found = list(preflight.memory(PreflightSettings(kv_memory=64 * MIB), DEMO_MODEL, gpus=gpus))
    assert [finding.level for finding in found] == [level, Level.OK, Level.OK]


def test_a_gpu_that_is_missing_or_that_torch_cannot_use(monkeypatch: Any) -> None:
    assert only(preflight.gpu([], is_wanted=False)).level is Level.OK
    assert only(preflight.gpu([], is_wanted=True)).level is Level.BAD
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "999.1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    torch = SimpleNamespace(__version__="2", cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = only(preflight.gpu([GpuFacts()], is_wanted=True))
    assert (found.level, "999.1" in found.what) == (Level.BAD, True)
    torch.cuda.is_available = lambda: True
    assert only(preflight.gpu([GpuFacts()], is_wanted=True)).level is Level.OK
    assert [finding.level for finding in preflight.gpu([GpuFacts(is_lost=True)], is_wanted=True)] == ["ok", "bad"]


def test_a_clock_that_is_wrong_and_a_redis_that_is_away(monkeypatch: Any) -> None:
    with EmbeddedRedis() as redis:
        assert only(preflight.clock(redis.url)).level is Level.OK
        now = time.time
        monkeypatch.setattr(redis_probe.time, "time", lambda: now() - 5)
        found = only(preflight.clock(redis.url))
        assert (found.level, "5.00 s ahead of" in found.what) == (Level.BAD, True)
        url = redis.url
    assert only(preflight.clock(url)).level is Level.NOTE
