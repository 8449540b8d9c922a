"""How the command line is put together: subcommands, their flags, and what is said of misspelt ones."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.commands import COMMANDS, command_line, run_command
from cli.serve import ServeSettings
from services.runtime.config import all_settings_of
from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["satus"], "tandem has no command 'satus'; did you mean status?"),
        (["fly"], "tandem has no command 'fly'; it must be one of serve, up, join, scale, role, drain, "),
        (["keys", "tennant"], "tandem keys has no command 'tennant'; did you mean tenant?"),
        (["status", "--urll", "x"], "tandem status has no flag --urll; did you mean --url? (see tandem status --help)"),
        (["keys", "new", "--tenat=x"], "tandem keys new has no flag --tenat; did you mean --tenant?"),
        (["status", "--zebra"], "tandem status has no flag --zebra (see"),
        (["status", "stray"], "tandem status has no argument stray"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_command(words)
    assert said in caught.value.message


def test_only_the_subcommand_that_is_asked_for_is_imported() -> None:
    program = (
        "import sys; from cli.commands import command_line; command_line(['status']);"
        "print(*(name for name in sys.modules if name.startswith('cli.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S
    )
    assert set(done.stdout.split()) == {"cli.commands", "cli.status"}


def test_every_flag_has_a_unit_or_a_kind_as_its_placeholder() -> None:
    commands = list(command_line(COMMANDS).commands.values())
    for command in commands:
        commands += command.commands.values()
    settings = [setting for command in commands if command.settings for setting in all_settings_of(command.settings)]
    assert len(settings) > 150
    known = {
        "MIN:MAX",
        "SECONDS",
        "TOKENS",
        "BYTES",
        "MODEL",
        "URL",
        "FILE",
        "DIR",
        "PORT",
        "HOST",
        "N",
        "NUMBER",
        "NAME",
        "TEXT",
        "NUMBERS",
        "NETWORKS",
    }
    assert {setting.metavar.removesuffix(",…") for setting in settings} - known == {
        "NAME=COUNT",
        "NAME=DIR",
        "A:B=SECONDS",
        "REGION@SECONDS[+SECONDS]",
    }


class Caught(Exception):
    """Carries the settings that a command was called with."""


def settings_of_run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(settings: Any, *_: Any) -> int:
        raise Caught(settings)

    monkeypatch.setattr("cli.up.run", run)
    with pytest.raises(Caught) as caught:
        run_command(words)
    return caught.value.args[0]


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tandem.toml").write_text("[up]\nprefill = 3\ndecode = 4\nstop-grace = 5\nhttp-port = 9\n")
    monkeypatch.setenv("TANDEM_DECODE", "6")
    settings = settings_of_run(["up", "--stop-grace", "7"], monkeypatch)
    assert (settings.prefill, settings.decode, settings.stop_grace) == (3, 6, 7.0)
    assert settings.gateway.http_port == 9
    assert settings.gateway.grpc_port == 50051


def test_a_file_may_be_named_and_serve_has_the_settings_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tandem.toml").write_text("[up]\nprefill = 3\n")
    Path("other.toml").write_text('[up]\nprefill = 2\nmodel = "theirs"\n')
    assert settings_of_run(["up", "--config", "other.toml"], monkeypatch).prefill == 2
    monkeypatch.setenv("TANDEM_CONFIG", "other.toml")
    settings = settings_of_run(["serve", "mine"], monkeypatch)
    assert isinstance(settings, ServeSettings)
    assert (settings.prefill, settings.model) == (2, Path("mine"))


@pytest.mark.parametrize(
    ("table", "url"),
    [
        ("[up]\nhttp-port = 8077", "http://127.0.0.1:8077"),
        ('[up]\nhost = "0.0.0.0"\ntls-cert = "c.pem"', "https://127.0.0.1:8000"),
        ('[up]\nhost = "::1"', "http://[::1]:8000"),
        ('[up]\nhttp-port = 8077\n[status]\nurl = "https://else.example"', "https://else.example"),
        ('[up]\nhttp-port = 0\nhost = "10.0.0.1"', "http://127.0.0.1:8000"),
        ("[up]\ndecode = 2", "http://127.0.0.1:8000"),
    ],
)
def test_commands_ask_the_gateway_that_the_file_has_started(
    table: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tandem.toml").write_text(table + "\n")
    seen: list[Any] = []
    monkeypatch.setattr("cli.status.run", lambda settings, stdout: seen.append(settings) or 0)
    assert run_command(["status"]) == 0
    assert run_command(["status", "--url", "http://b.example"]) == 0
    assert [each.url for each in seen] == [url, "http://b.example"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("htp-port = 3", "tandem.toml: htp-port in [up] is not a setting; did you mean http-port?"),
        ("prefil = 3", "tandem.toml: prefil in [up] is not a setting; did you mean prefill?"),
        ("prefill = 300", "tandem.toml: prefill in [up] is '300' but must be a whole number"),
        ("http-port = 99999999", "tandem.toml: http-port in [up] is '99999999' but must be"),
    ],
)
def test_a_mistake_in_the_file_is_named(line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tandem.toml").write_text(f"[up]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        run_command(["up"])
    assert said in caught.value.message
