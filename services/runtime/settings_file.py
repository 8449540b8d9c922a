"""A file of settings in TOML: a table for each command, whose keys are the names of its flags. Knows no command.

[up]
model = "models/Llama-3.2-1B-Instruct"
decode = 2
kv-memory = "4GiB"
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from services.runtime import toml_file
from services.runtime.config import Filed, did_you_mean
from services.runtime.errors import ConfigError

DEFAULT = "tandem.toml"
"""The file of the current folder that is read where none is named."""
VARIABLE = "TANDEM_CONFIG"
MAX_BYTES = 1 << 20


def read_settings_file(path: Path, command: str, *, commands: Collection[str]) -> dict[str, Filed]:
    """Returns what a command's table says, by setting. Raises ConfigError that names the file and the key."""
    try:
        document = msgspec.toml.decode(toml_file.read_text(path, "the settings file", max_bytes=MAX_BYTES))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"the settings file {path} is not valid TOML: {error}") from error
    for name, table in document.items():
        if name not in commands:
            raise ConfigError(f"{path}: [{name}] is not a command{did_you_mean(name, commands)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, [{name}], with a line for each setting")
    found = {}
    for key, value in document.get(command, {}).items():
        place = f"{path}: {key} in [{command}]"
        found[key.replace("-", "_")] = Filed(_text(value, place), place)
    return found


def _text(value: Any, place: str) -> str:
    """Returns a value as a flag would be given it. Raises ConfigError for tables and dates."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        return ",".join(_text(each, place) for each in value)
    raise ConfigError(f"{place} must be a text, a number, true, false or a list of these")
