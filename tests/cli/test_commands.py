"""How the command line is put together: subcommands, their flags, and what is said of misspelt ones."""

import subprocess
import sys

import pytest

from cli.commands import COMMANDS, command_line, run_command
from services.runtime.config import all_settings_of
from services.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["satus"], "tandem has no command 'satus'; did you mean status?"),
        (["fly"], "tandem has no command 'fly'; it must be one of up, status, "),
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == {"cli.commands", "cli.status", "cli.api_client"}


def test_every_flag_has_a_unit_or_a_kind_as_its_placeholder() -> None:
    commands = list(command_line(COMMANDS).commands.values())
    for command in commands:
        commands += command.commands.values()
    settings = [setting for command in commands if command.settings for setting in all_settings_of(command.settings)]
    assert len(settings) > 150
    known = {
        "SECONDS",
        "TOKENS",
        "BYTES",
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
    }
    assert {setting.metavar.removesuffix(",…") for setting in settings} - known == {"NAME=COUNT"}
