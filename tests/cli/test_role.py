"""`tandem role` over the socket of a `tandem up`."""

import io
from pathlib import Path
from typing import Any

import pytest

from cli import role
from cli.main import main
from cli.role import RoleSettings


def test_it_says_what_the_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def order(url: str, name: str, /, **arguments: Any) -> bool:
        given.update(arguments, url=url, order=name)
        return bool(arguments["is_forced"])

    monkeypatch.setattr(role, "order", order)
    for force, word in ((True, "now"), (False, "already")):
        stdout = io.StringIO()
        settings = RoleSettings(worker="decode-1", role="prefill", force=force, url="http://127.0.0.1:1", timeout=7.0)
        assert role.run(settings, stdout) == 0
        assert stdout.getvalue() == f"decode-1 is a prefill worker {word}\n"
        assert given == {
            "url": "http://127.0.0.1:1",
            "order": "role",
            "name": "decode-1",
            "role": "prefill",
            "grace_s": 7.0,
            "is_forced": force,
        }


def test_what_is_no_role_is_bad_input_and_without_a_cluster_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["role", "decode-0", "gateway"]) == 2
    assert "prefill, decode" in capsys.readouterr().err
    assert main(["role", "decode-0", "prefill", "--url", "http://127.0.0.1:1"]) == 1
    assert "no `tandem up` of this user" in capsys.readouterr().err
