"""Files in TOML that become msgspec structs. Errors name the file, the key and the rule."""

import re
import typing
from collections.abc import Set
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.runtime.config import did_you_mean
from services.runtime.errors import ConfigError

MAX_SHOWN_CHARACTERS = 300

S = TypeVar("S")


def read_text(path: Path, what: str, *, max_bytes: int) -> str:
    """Returns the file's text; `what` says in errors what the file is. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{what} {path} must have at most {max_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} is not valid UTF-8, which TOML is") from error


def parse(text: str, shape: type[S]) -> S:
    """Returns the document as a struct. Raises ConfigError with key and rule, or the line where it is not TOML."""
    try:
        document = msgspec.toml.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"not valid TOML: {error}") from error
    return convert(document, shape)


def convert(value: Any, shape: type[S], *, where: str = "") -> S:
    """Returns a value of the document as a struct; `where` is its key. Raises ConfigError that names key and rule."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(str(error), shape, where)[:MAX_SHOWN_CHARACTERS]) from error


def _explained(message: str, shape: Any, where: str) -> str:
    """Returns msgspec's message with the key first, and a suggestion for a key that does not exist."""
    rule, _, place = message.partition(" - at `$")
    key = (where + place.rstrip("`")).lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", rule)
    guess = did_you_mean(unknown[1], _names(shape)) if unknown else ""
    return f"{key}: {rule}{guess}" if key else f"{rule}{guess}"


def _names(shape: Any) -> Set[str]:
    """Returns the keys of all structs that a type is made of."""
    if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
        fields = msgspec.structs.fields(shape)
        return {field.encode_name for field in fields}.union(*(_names(field.type) for field in fields))
    return set[str]().union(*map(_names, typing.get_args(shape)))
