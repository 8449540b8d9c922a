"""`tandem autoscaler replay`: the log of decisions, decided again."""

from pathlib import Path

import pytest

from cli.main import main
from tests.planning.autoscaler.test_decisions import Life


def test_a_log_is_decided_again_and_a_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    life = Life(file, 1_700_000_000.0)
    for num in (0, 20, 200, 200):
        life.look(num)
    assert main(["autoscaler", "replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "2023-11-14 22:13:40  1+0:1+0 becomes" in out
    assert out.endswith("4 looks, 0 decided otherwise than then\n")
    text = file.read_text()
    file.write_text(text.replace('"headroom":1.1', '"headroom":3.0'))
    assert main(["autoscaler", "replay", "--all", str(file)]) == 1
    assert "is decided otherwise now: " in capsys.readouterr().out


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("hello\n")
    assert main(["autoscaler", "replay", str(tmp_path / "x")]) == 2
    assert "is no log of decisions" in capsys.readouterr().err
