from pathlib import Path

import pytest

from services.runtime.errors import ConfigError
from services.runtime.settings_file import read_settings_file

COMMANDS = ("up", "status")


def written(folder: Path, text: str) -> Path:
    path = folder / "tandem.toml"
    path.write_text(text)
    return path


def test_values_are_as_flags_would_be_given_them(tmp_path: Path) -> None:
    text = '[up]\nmodel = "m"\ndecode = 2\npin = false\nstop-grace = 1.5\nports = [80, 81]\n[status]\njson = true\n'
    found = read_settings_file(written(tmp_path, text), "up", commands=COMMANDS)
    assert {name: filed.text for name, filed in found.items()} == {
        "model": "m",
        "decode": "2",
        "pin": "false",
        "stop_grace": "1.5",
        "ports": "80,81",
    }
    assert found["stop_grace"].place == f"{tmp_path}/tandem.toml: stop-grace in [up]"
    assert read_settings_file(tmp_path / "tandem.toml", "status", commands=COMMANDS)["json"].text == "true"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[upp]\n", "[upp] is not a command"),
        ("[statsu]\n", "[statsu] is not a command; did you mean status?"),
        ("up = 3\n", "up must be a table"),
        ("[up]\nmodel = {a = 1}\n", "model in [up] must be a text"),
        ("[up]\nmodel = 2020-01-01\n", "model in [up] must be a text"),
        ("[up\n", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings_file(written(tmp_path, text), "up", commands=COMMANDS)
    assert said in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_settings_file(tmp_path / "none.toml", "up", commands=COMMANDS)
