"""Settings: frozen dataclasses filled once from flags and TANDEM_* variables. Knows no service's settings.

A class of settings looks like this, and nothing but `load` and `read` reads the environment:

    @dataclass(frozen=True)
    class Config:
        port: int = option(integer(0, 65535), default=8000, help="Port of the HTTP API; 0 picks a free one.")
"""

import argparse
import dataclasses
import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Never, TypeVar, overload
from urllib.parse import urlsplit

from services.runtime.addresses import is_ipv6
from services.runtime.errors import ConfigError

ENV_PREFIX = "TANDEM_"
MAX_COUNT = 4096
MAX_SHOWN_CHARACTERS = 200
SIMILAR, SIMILAR_VARIABLE = 0.8, 0.85
"""How alike two names are, from 0 to 1, of which one is taken for a misspelling of the other: flags and variables."""
MIN_JUDGED = 5
"""Characters of a variable's name, without TANDEM_, up to which no other name is suggested for it."""

_NAME = r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*"
_ORIGIN = r"[a-z][a-z0-9+.-]*://[^/,\s]+"
HOSTS = rf"\*|{_NAME}(?:,{_NAME})*"
"""Patterns, and the rules in words, of settings that name hosts and the origins of web pages."""
HOSTS_RULE = "names of hosts with commas between them, *.NAME for all below a name, or *"
ORIGINS = rf"\*|{_ORIGIN}(?:,{_ORIGIN})*"
ORIGINS_RULE = "origins such as https://chat.example with commas between them, or *"

logger = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C")

_OPTION = "tandem.option"
_PROG, _FLAGS = " prog", " flags"
"""Names that no setting has, under which a parser keeps what its errors name."""
_UNITS = {"s": "SECONDS", "timeout": "SECONDS", "grace": "SECONDS", "tokens": "TOKENS", "port": "PORT"}
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value: how its text is read and which rule it keeps. `parse` raises ValueError."""

    parse: Callable[[str], T]
    rule: str
    metavar: str = "TEXT"
    """The value's placeholder in `--help`, unless the setting's name ends in a unit."""
    choices: tuple[str, ...] = ()
    is_flag: bool = False
    """The flag takes no value: `--name` and `--no-name`."""
    short: str = ""
    """A second, short name of the flag, such as -v."""
    is_list: bool = False
    """The flag may be given several times."""
    is_positional: bool = False
    """The value is an argument without a flag's name."""
    may_hold_secret: bool = False
    """The value is left out of the `repr` of its settings, as part of it may be a password."""
    is_secret: bool = False
    """The value has no flag, as everybody on the machine can read command lines."""


@overload
def option(kind: Kind[T], *, help: str) -> T: ...
@overload
def option(kind: Kind[T], *, help: str, default: T) -> T: ...
@overload
def option(kind: Kind[T], *, help: str, default: None) -> T | None: ...
def option(kind: Kind[Any], *, help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of a settings class. Without `default` it must be given. None as default means "not given"."""
    metadata = {_OPTION: (kind, help)}
    return dataclasses.field(default=default, metadata=metadata, repr=not (kind.may_hold_secret or kind.is_secret))


def load(config_class: type[C], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None) -> C:
    """Builds the settings from flags, then TANDEM_* variables, then defaults.

    Raises ConfigError naming key, value and rule. `--help` prints all settings and ends the process with 0.
    """
    parser = Parser(prog=prog, description=(config_class.__doc__ or "").strip(), allow_abbrev=False)
    add_settings(parser, config_class)
    return read(config_class, parse(parser, argv), environ=environ)


def read(config_class: type[C], given: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> C:
    """Builds the settings from the flags' texts by field name, then from TANDEM_* variables, then from defaults.

    Raises ConfigError naming key, value and rule. What is secret is taken out of the process's environment, so that no
    child and no crash dump has it; a password on the command line, where it can no longer be hidden, and a variable
    that is probably misspelt are warned about.
    """
    own_environ, environ = environ is None, os.environ if environ is None else environ
    settings = settings_of(config_class)
    _warn(settings, given, environ)
    values = {setting.name: _value(setting, given.get(setting.name), environ) for setting in settings}
    if own_environ:
        for setting in settings:
            if setting.kind.is_secret:
                os.environ.pop(setting.variable, None)
    return config_class(**values)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a class: its field's name and what `option` was told."""

    name: str
    kind: Kind[Any]
    help: str
    default: Any = dataclasses.MISSING

    @property
    def is_required(self) -> bool:
        """Whether the setting has no default."""
        return self.default is dataclasses.MISSING

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The flag; empty for a secret, which only its variable may hold, and a capital name for an argument."""
        if self.kind.is_secret:
            return ""
        return self.name.upper() if self.kind.is_positional else "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """The placeholder of the value in `--help`: its unit, where the name ends in one."""
        return _UNITS.get(self.name.rsplit("_", 1)[-1], self.kind.metavar)

    def parse(self, text: str, key: str) -> Any:
        """The value of a text that was given under the name `key`. Raises ConfigError."""
        try:
            return self.kind.parse(text)
        except ValueError:
            value = "***" if self.kind.is_secret else shown(text)
            raise ConfigError(f"{key} is {value} but must be {self.kind.rule}") from None


def settings_of(config_class: type[Any]) -> list[Setting]:
    """All settings of a class, in its order."""
    return [
        Setting(field.name, kind=field.metadata[_OPTION][0], help=field.metadata[_OPTION][1], default=field.default)
        for field in dataclasses.fields(config_class)
        if _OPTION in field.metadata
    ]


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> Never:
        """Raises ConfigError."""
        raise ConfigError(f"{redacted(message)} (see {self.prog} --help)")


def add_settings(parser: argparse.ArgumentParser, config_class: type[Any]) -> None:
    """Gives the parser a flag for each setting of a class."""
    settings = settings_of(config_class)
    for setting in settings:
        _add_flag(parser, setting)
    parser.set_defaults(**{_PROG: parser.prog, _FLAGS: [setting.flag for setting in settings if setting.flag]})


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """What the arguments say, by field name; None for what they do not say. Raises ConfigError."""
    found, unknown = parser.parse_known_args(list(argv))
    given = vars(found)
    if unknown:
        name = redacted(unknown[0].partition("=")[0])
        prog, flags = given.get(_PROG, parser.prog), given.get(_FLAGS, ())
        what = "flag" if name.startswith("-") else "argument"
        raise ConfigError(f"{prog} has no {what} {name}{did_you_mean(name, flags)} (see {prog} --help)")
    return given


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A question that names the most similar name, to be added to an error; empty where none is similar."""
    similar = difflib.get_close_matches(word, list(names), 1, SIMILAR)
    return f"; did you mean {similar[0]}?" if similar else ""


def text(*, pattern: str | None = None, rule: str = "a text that is not empty") -> Kind[str]:
    """A text that is not empty and, where given, matches the whole pattern."""

    def parse(value: str) -> str:
        _require(bool(value) and (pattern is None or re.fullmatch(pattern, value) is not None))
        return value

    return Kind(parse, rule)


def integer(minimum: int, maximum: int | None = None) -> Kind[int]:
    """A whole number in [minimum, maximum]."""

    def parse(value: str) -> int:
        number = int(value)
        _require(number >= minimum and (maximum is None or number <= maximum))
        return number

    upper = "" if maximum is None else f" and at most {maximum}"
    return Kind(parse, f"a whole number of at least {minimum}{upper}", metavar="N")


def number(minimum: float, maximum: float = math.inf) -> Kind[float]:
    """A finite number in [minimum, maximum]."""

    def parse(value: str) -> float:
        parsed = float(value)
        _require(math.isfinite(parsed) and minimum <= parsed <= maximum)
        return parsed

    upper = "" if maximum == math.inf else f" and at most {maximum:g}"
    return Kind(parse, f"a number of at least {minimum:g}{upper}", metavar="NUMBER")


def flag(*, short: str = "") -> Kind[bool]:
    """True or false; as a flag `--name` or `--no-name`."""
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }

    def parse(value: str) -> bool:
        _require(value.lower() in words)
        return words[value.lower()]

    return Kind(parse, "true or false", is_flag=True, short=short)


def choice(*names: str) -> Kind[str]:
    """One of several names."""

    def parse(value: str) -> str:
        _require(value in names)
        return value

    return Kind(parse, "one of " + ", ".join(names), metavar="NAME", choices=names)


def size_bytes(minimum: int = 1) -> Kind[int]:
    """A number of bytes, such as 4096, 64MiB or 2GiB."""

    def parse(value: str) -> int:
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?) ?([a-z]*)", value.strip().lower())
        _require(match is not None and match[2] in _SIZE_UNITS)
        assert match is not None
        size = (
            int(float(match[1]) * _SIZE_UNITS[match[2]]) if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]
        )
        _require(size >= minimum)
        return size

    return Kind(parse, f"a size of at least {minimum} bytes, such as 512MiB or 2GiB", metavar="BYTES")


def number_set() -> Kind[tuple[int, ...]]:
    """Whole numbers in order, from a text such as 0-3,8."""

    def parse(value: str) -> tuple[int, ...]:
        found: set[int] = set()
        for part in value.split(","):
            match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
            _require(match is not None)
            assert match is not None
            first, last = int(match[1]), int(match[2] or match[1])
            _require(first <= last)
            found.update(range(first, last + 1))
        return tuple(sorted(found))

    return Kind(parse, "numbers and ranges separated by commas, such as 0-3,8", metavar="NUMBERS")


def host_name() -> Kind[str]:
    """A host by its name or by its IPv4 or IPv6 address, and nothing else: neither brackets nor a port."""

    def parse(value: str) -> str:
        _require(re.fullmatch(r"[A-Za-z0-9._-]{1,255}", value) is not None or is_ipv6(value))
        return value

    return Kind(parse, "a name or an IP address, without brackets and without a port", metavar="HOST")


def counts(*names: str) -> Kind[Mapping[str, int]]:
    """How many of each name there are, as NAME=COUNT separated by commas; names may be left out."""

    def parse(value: str) -> Mapping[str, int]:
        pairs = [item.partition("=")[::2] for item in value.split(",")]
        found = {name: int(count) for name, count in pairs if count.isascii() and count.isdecimal()}
        _require(len(found) == len(pairs) and found.keys() <= set(names) and max(found.values()) <= MAX_COUNT)
        return found

    rule = f"one or more of {', '.join(f'{name}=COUNT' for name in names)}, separated by commas"
    return Kind(parse, rule, metavar="NAME=COUNT,…")


def folder() -> Kind[Path]:
    """The path of a folder on this machine."""
    return dataclasses.replace(path(), metavar="DIR")


def path(*, must_exist: bool = False) -> Kind[Path]:
    """A path on this machine."""

    def parse(value: str) -> Path:
        _require(bool(value) and "\0" not in value)
        found = Path(value).expanduser()
        _require(found.exists() or not must_exist)
        return found

    return Kind(parse, "a path that exists" if must_exist else "a path", metavar="FILE")


def url(*schemes: str) -> Kind[str]:
    """A URL of one of the schemes."""

    def parse(value: str) -> str:
        parts = urlsplit(value)
        _require(parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/")))
        _ = parts.port
        return value

    rule = "a URL beginning with " + " or ".join(f"{scheme}://" for scheme in schemes)
    return Kind(parse, rule, metavar="URL", may_hold_secret=True)


def redis_url() -> Kind[str]:
    """Where a Redis is, or the sentinels that know where it is."""
    schemes = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")

    def parse(value: str) -> str:
        if value.partition("://")[0] in schemes[3:]:
            parts = urlsplit(value)  # its port is no number, but may be several
            _require(bool(parts.netloc.rpartition("@")[2] and parts.path.strip("/")))
            return value
        return url(*schemes[:3]).parse(value)

    return Kind(
        parse,
        "a URL beginning with " + " or ".join(f"{scheme}://" for scheme in schemes) + "; of sentinels "
        "redis+sentinel://HOST,HOST:PORT/SERVICE",
        metavar="URL",
        may_hold_secret=True,
    )


def secret() -> Kind[str]:
    """A text that only a variable may hold, and that nobody is shown."""
    return Kind(text().parse, "a text that is not empty", is_secret=True)


def comma_separated(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """Several values of one kind, at least one, separated by commas."""

    def parse(value: str) -> tuple[T, ...]:
        return tuple(kind.parse(part.strip()) for part in value.split(","))

    rule = f"one or more, separated by commas, of: {kind.rule}"
    return Kind(parse, rule, metavar=f"{kind.metavar},…", choices=kind.choices, is_list=True)


def argument(kind: Kind[T]) -> Kind[T]:
    """A value that is given as an argument, without a flag and without a variable."""
    return dataclasses.replace(kind, is_positional=True)


def redacted(value: str) -> str:
    """A URL without its user, its password, and those in its query, as redis-py takes them too.

    Everything before the last @ counts as user and password: who forgets to encode a / in one has no URL, but wants
    it as little in a log.
    """
    hidden = re.sub(r"://\S*@", "://***@", value)
    return re.sub(r"(?i)([?&](?:sentinel_)?(?:password|username)=)[^&\s]*", r"\1***", hidden)


def shown(value: str) -> str:
    """A value as it may be printed: without the password of a URL, and not endless."""
    hidden = redacted(value)
    return repr(hidden if len(hidden) <= MAX_SHOWN_CHARACTERS else hidden[:MAX_SHOWN_CHARACTERS] + "…")


def _add_flag(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", setting: Setting) -> None:
    kind = setting.kind
    if kind.is_secret:
        return
    default = "" if setting.is_required or setting.default is None else f"Default: {setting.default}. "
    needed = "Required. " if setting.is_required else ""
    variable = "" if kind.is_positional else f"[{setting.variable}]"
    words = f"{setting.help} Rule: {kind.rule}. {needed}{default}{variable}".strip().replace("%", "%%")
    if kind.is_positional:
        parser.add_argument(setting.name, metavar=setting.flag, help=words)
    elif kind.is_flag:
        names = [setting.flag, kind.short] if kind.short else [setting.flag]
        parser.add_argument(*names, dest=setting.name, action="store_const", const="true", help=words)
        negative = setting.flag.replace("--", "--no-", 1)
        parser.add_argument(negative, dest=setting.name, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        action = "append" if kind.is_list else "store"
        parser.add_argument(setting.flag, dest=setting.name, action=action, metavar=setting.metavar, help=words)


def _warn(settings: Collection[Setting], given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    for setting in settings:
        text = given.get(setting.name) or ""
        if setting.kind.may_hold_secret and redacted(text) != text:
            logger.warning(
                "%s has a password on the command line, which every user of this machine can read: give it as %s",
                setting.flag,
                setting.variable,
            )
    for variable, meant in misspelt(environ, [setting.variable for setting in settings]):
        logger.warning("%s is not a setting of this program; did you mean %s?", variable, meant)


def misspelt(environ: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """TANDEM_ variables that are probably misspelt, and what is meant; `known` are those of the program.

    Other programs' variables may be set too. None of them is as similar, but for plurals.
    """
    found = []
    names = {name.removeprefix(ENV_PREFIX) for name in known}
    for variable in sorted(set(environ) - set(known)):
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and len(name) > MIN_JUDGED:
            similar = difflib.get_close_matches(name, names, 1, SIMILAR_VARIABLE)
            found += [(variable, ENV_PREFIX + one) for one in similar if one.rstrip("S") != name.rstrip("S")]
    return found


def _value(setting: Setting, given: Any, environ: Mapping[str, str]) -> Any:
    """The value from the first place that gives one; an empty variable counts as not given."""
    text, key = given_text(setting, given, environ)
    if text is not None:
        return setting.parse(text, key)
    if setting.is_required:
        raise ConfigError(f"{setting.flag} (or {setting.variable}) is required: {setting.kind.rule}")
    return setting.default


def given_text(setting: Setting, given: Any, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """The setting's text as a flag or its variable gives it, or None, and the name of the one that does."""
    if given is not None and not setting.kind.is_secret:
        return (",".join(given) if setting.kind.is_list else given), setting.flag
    return environ.get(setting.variable) or None, setting.variable


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("the value does not keep its rule")
