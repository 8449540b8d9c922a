"""The `tandem` command itself."""

import subprocess
import sys

import pytest

from cli.main import main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in ("up", "status", "chat", "version", "help"))


@pytest.mark.parametrize("command", ["up", "status", "chat"])
def test_each_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([command, "--help"])
    assert ending.value.code == 0
    assert "TANDEM_" in capsys.readouterr().out


def test_no_command_and_unknown_commands_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert "fly" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("tandem ")


def test_the_command_loads_neither_torch_nor_grpc() -> None:
    program = (
        "import sys; import cli.main, cli.up, cli.status, cli.chat;"
        "sys.exit(int('torch' in sys.modules or 'grpc' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert b"Traceback" not in process.stderr.read()
    process.wait(30)
