"""The `tandem` command itself."""

import subprocess
import sys

import pytest

from cli.commands import COMMANDS
from cli.main import main
from tests.waiting import HANG_LIMIT_S


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([word])
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert "--version" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([command, "--help"])
    assert ending.value.code == 0
    assert f"usage: tandem {command}" in capsys.readouterr().out


def test_no_command_and_unknown_commands_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert "fly" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([word])
    assert ending.value.code == 0
    assert capsys.readouterr().out.startswith("tandem ")


def test_the_command_loads_neither_torch_nor_grpc() -> None:
    program = (
        "import sys; import cli.main, cli.up, cli.status, cli.chat;"
        "sys.exit(int('torch' in sys.modules or 'grpc' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=HANG_LIMIT_S).returncode == 0


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert b"Traceback" not in process.stderr.read()
    process.wait(HANG_LIMIT_S)
