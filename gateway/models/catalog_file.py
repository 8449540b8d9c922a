"""The models file: which models a cluster serves, under which names, and what stands in for each. Plain data.

    [[model]]
    name = "large"                # what clients call it; the workers' --model-name
    path = "models/large"         # checkpoint folder; a relative one begins at this file's folder
    aliases = ["default"]         # other names for it
    fallback = ["small"]          # tried in this order where "large" is overloaded or has no worker
    fallback_after_s = 1.0        # longest wait for room before that
    prefill = 1                   # workers that `tandem up` starts for it
    decode = 2

Reads the file and nothing that it names; what is in a model's folder is `gateway.models.model_files`' business.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from services.runtime.errors import ConfigError

MAX_FILE_BYTES = 2**20
MAX_MODELS = 64
MAX_NAMES = 64
"""Aliases of one model, and entries of one fallback chain."""
MAX_WORKERS = 256
MIN_FALLBACK_AFTER_S = 0.05
"""A worker needs a moment to say whether it has room."""
MAX_FALLBACK_AFTER_S = 86_400.0
DEFAULT_FALLBACK_AFTER_S = 1.0
MAX_SHOWN_CHARS = 200

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}")
_NAME_RULE = "1 to 256 characters of A-Z, a-z, 0-9 and . _ : / @ + -, beginning with a letter or digit"
_KEYS = frozenset({"name", "path", "aliases", "fallback", "fallback_after_s", "prefill", "decode"})


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One `[[model]]` of the file.

    `fallbacks` are names of models, in the order in which they are tried; `fallback_after_s` is how long a request
    that may fall back waits for room, in seconds. `num_prefill` and `num_decode` are workers; None: not said.
    """

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    fallback_after_s: float = DEFAULT_FALLBACK_AFTER_S
    num_prefill: int | None = None
    num_decode: int | None = None


def read_models_file(path: Path) -> tuple[ModelEntry, ...]:
    """The models in the file's order, at least one. Raises ConfigError that names file, field and rule."""
    return parse_models(_read(path), file=path)


def parse_models(text: str, *, file: Path) -> tuple[ModelEntry, ...]:
    """The same from the file's text. `file` is named in errors, and relative paths begin at its folder."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    reader = _Reader(file)
    for key in document:
        if key != "model":
            reader.fail(key, document[key], "absent; the file has [[model]] entries and nothing else")
    tables = document.get("model", [])
    if not isinstance(tables, list) or not 1 <= len(tables) <= MAX_MODELS:
        reader.fail("model", tables, f"1 to {MAX_MODELS} [[model]] entries")
    entries = tuple(reader.entry(table, f"model[{number}]") for number, table in enumerate(tables))
    _check_names(reader, entries)
    _check_fallbacks(reader, entries)
    return entries


class _Reader:
    """Turns the values of one file into what their fields must be."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def fail(self, field: str, value: Any, rule: str) -> Never:
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "…"
        raise ConfigError(f"{self._file}: {field} is {shown} but must be {rule}")

    def entry(self, table: Any, where: str) -> ModelEntry:
        if not isinstance(table, Mapping):
            self.fail(where, table, "a [[model]] entry")
        for key in table:
            if key not in _KEYS:
                self.fail(f"{where}.{key}", table[key], f"absent; a model has {', '.join(sorted(_KEYS))}")
        after_s = table.get("fallback_after_s", DEFAULT_FALLBACK_AFTER_S)
        if (
            type(after_s) not in (int, float)
            or not math.isfinite(after_s)
            or not MIN_FALLBACK_AFTER_S <= after_s <= MAX_FALLBACK_AFTER_S
        ):
            self.fail(
                f"{where}.fallback_after_s", after_s, f"seconds in [{MIN_FALLBACK_AFTER_S:g}, {MAX_FALLBACK_AFTER_S:g}]"
            )
        return ModelEntry(
            name=self._name(table.get("name"), f"{where}.name"),
            path=self._folder(table.get("path"), f"{where}.path"),
            aliases=self._names(table.get("aliases", []), f"{where}.aliases"),
            fallbacks=self._names(table.get("fallback", []), f"{where}.fallback"),
            fallback_after_s=float(after_s),
            num_prefill=self._count(table.get("prefill"), f"{where}.prefill", minimum=0),
            num_decode=self._count(table.get("decode"), f"{where}.decode", minimum=1),
        )

    def _name(self, value: Any, field: str) -> str:
        if not isinstance(value, str) or _NAME.fullmatch(value) is None:
            self.fail(field, value, _NAME_RULE)
        return value

    def _names(self, value: Any, field: str) -> tuple[str, ...]:
        if not isinstance(value, list) or len(value) > MAX_NAMES:
            self.fail(field, value, f"a list of at most {MAX_NAMES} names")
        return tuple(self._name(name, f"{field}[{number}]") for number, name in enumerate(value))

    def _folder(self, value: Any, field: str) -> Path:
        if not isinstance(value, str) or not value or "\0" in value:
            self.fail(field, value, "the path of a model folder")
        folder = self._file.parent / Path(value).expanduser()
        if not folder.is_dir():
            self.fail(field, value, f"a folder that exists; there is no {folder}")
        return folder

    def _count(self, value: Any, field: str, *, minimum: int) -> int | None:
        if value is not None and (type(value) is not int or not minimum <= value <= MAX_WORKERS):
            self.fail(field, value, f"a whole number in [{minimum}, {MAX_WORKERS}]")
        return value


def _check_names(reader: _Reader, entries: Sequence[ModelEntry]) -> None:
    """Every name and alias means one model."""
    named: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if entry.name in named:
            reader.fail(f"model[{number}].name", entry.name, f"another name than that of {named[entry.name]}")
        named[entry.name] = f"model[{number}]"
    for number, entry in enumerate(entries):
        for position, alias in enumerate(entry.aliases):
            field = f"model[{number}].aliases[{position}]"
            if alias in named:
                reader.fail(field, alias, f"another name than {named[alias]} has already")
            named[alias] = field


def _check_fallbacks(reader: _Reader, entries: Sequence[ModelEntry]) -> None:
    """Every fallback is another model, once, and no model falls back to itself by way of others.

    The chain of a model is its own list; still two models that stand in for one another would only pass overload to
    and fro.
    """
    chains = {entry.name: entry.fallbacks for entry in entries}
    for number, entry in enumerate(entries):
        for position, name in enumerate(entry.fallbacks):
            field = f"model[{number}].fallback[{position}]"
            if name not in chains:
                reader.fail(field, name, f"the name (no alias) of a model of this file: {', '.join(chains)}")
            if name in entry.fallbacks[:position]:
                reader.fail(field, name, "named only once")
            way = _way(chains, name, entry.name)
            if way is not None:
                cycle = " -> ".join((entry.name, *way))
                reader.fail(field, name, f"a model that does not fall back to this one again ({cycle})")


def _way(chains: Mapping[str, Sequence[str]], start: str, goal: str) -> list[str] | None:
    """Names along the fallbacks from `start` to `goal`, both included; None: there is no way. Unknown names end it."""
    ways = [[start]]
    seen = {start}
    while ways:
        way = ways.pop()
        if way[-1] == goal:
            return way
        for name in chains.get(way[-1], ()):
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; this is no models file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"the models file {path} does not exist; give --models a TOML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text; check its permissions and content") from error
