"""Settings: frozen dataclasses filled once from flags and TANDEM_* variables. Knows no service's settings.

A class of settings looks like this, and nothing but `load` reads the environment:

    @dataclass(frozen=True)
    class Config:
        port: int = option(integer(0, 65535), default=8000, help="Port of the HTTP API; 0 picks a free one.")
"""

import argparse
import dataclasses
import ipaddress
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Never, TypeVar, cast, overload
from urllib.parse import urlsplit

from services.runtime.errors import ConfigError

ENV_PREFIX = "TANDEM_"
MAX_COUNT = 4096
MAX_SHOWN_CHARACTERS = 200

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

_METADATA_KEY = "tandem.option"
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value: how its text is read and which rule it keeps. `parse` raises ValueError."""

    parse: Callable[[str], T]
    rule: str
    is_flag: bool = False
    """The flag takes no value: `--name` and `--no-name`."""
    may_hold_secret: bool = False
    """It is left out of the `repr` of its settings, as part of it may be a password."""
    is_secret: bool = False
    """All of it is: there is no flag, as everybody on the machine can read command lines."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where to listen or to connect."""

    host: str
    port: int

    def __str__(self) -> str:
        """host:port, with an IPv6 host in brackets."""
        return join_host_port(self.host, self.port)


@overload
def option(kind: Kind[T], *, help: str) -> T: ...
@overload
def option(kind: Kind[T], *, help: str, default: T) -> T: ...
@overload
def option(kind: Kind[T], *, help: str, default: None) -> T | None: ...
def option(kind: Kind[Any], *, help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of a settings class. Without `default` it must be given. None as default means "not given"."""
    metadata = {_METADATA_KEY: (kind, help)}
    return dataclasses.field(default=default, metadata=metadata, repr=not (kind.may_hold_secret or kind.is_secret))


def load(config_class: type[C], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None) -> C:
    """Builds the settings from flags, then TANDEM_* variables, then defaults.

    Raises ConfigError naming key, value and rule. `--help` prints all settings and ends the process with 0. What is
    secret is taken out of the process's environment, so that no child and no crash dump has it; a password on the
    command line, where it cannot be hidden any more, is warned about.
    """
    own_environ, environ = environ is None, os.environ if environ is None else environ
    given = vars(_parser(config_class, prog).parse_args(list(argv)))
    for field in _fields(config_class):
        value = given.get(field.name) or ""
        if _kind(field).may_hold_secret and redacted(value) != value:
            logger.warning(
                "%s has a password on the command line, which every user of this machine can read: give it as %s",
                _flag_name(field),
                _env_name(field),
            )
    values = {field.name: _value(field, given.get(field.name), environ) for field in _fields(config_class)}
    if own_environ:
        for field in _fields(config_class):
            if _kind(field).is_secret:
                os.environ.pop(_env_name(field), None)
    return config_class(**values)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as people are told of it. `default`: None where there is none; `is_required` tells which kind.

    `flag` is empty for a secret, which only its variable may hold.
    """

    flag: str
    variable: str
    rule: str
    help: str
    default: Any
    is_required: bool


def settings_of(config_class: type[Any]) -> list[Setting]:
    """All settings of a class, in its order."""
    return [
        Setting(
            flag="" if _kind(field).is_secret else _flag_name(field),
            variable=_env_name(field),
            rule=_kind(field).rule,
            help=field.metadata[_METADATA_KEY][1],
            default=None if field.default is dataclasses.MISSING else field.default,
            is_required=field.default is dataclasses.MISSING,
        )
        for field in _fields(config_class)
    ]


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
    return Kind(parse, f"a whole number of at least {minimum}{upper}")


def number(minimum: float, maximum: float = math.inf) -> Kind[float]:
    """A finite number in [minimum, maximum]."""

    def parse(value: str) -> float:
        parsed = float(value)
        _require(math.isfinite(parsed) and minimum <= parsed <= maximum)
        return parsed

    upper = "" if maximum == math.inf else f" and at most {maximum:g}"
    return Kind(parse, f"a number of at least {minimum:g}{upper}")


def flag() -> Kind[bool]:
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

    return Kind(parse, "true or false", is_flag=True)


def choice(*names: str) -> Kind[str]:
    """One of several names."""

    def parse(value: str) -> str:
        _require(value in names)
        return value

    return Kind(parse, "one of " + ", ".join(names))


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

    return Kind(parse, f"a size of at least {minimum} bytes, such as 512MiB or 2GiB")


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

    return Kind(parse, "numbers and ranges separated by commas, such as 0-3,8")


def host_name() -> Kind[str]:
    """A host by its name or by its IPv4 or IPv6 address, and nothing else: neither brackets nor a port."""

    def parse(value: str) -> str:
        _require(re.fullmatch(r"[A-Za-z0-9._-]{1,255}", value) is not None or is_ipv6(value))
        return value

    return Kind(parse, "a name or an IP address, without brackets and without a port")


def counts(*names: str) -> Kind[Mapping[str, int]]:
    """How many of each name there are, as NAME=COUNT separated by commas; names may be left out."""

    def parse(value: str) -> Mapping[str, int]:
        pairs = [item.partition("=")[::2] for item in value.split(",")]
        found = {name: int(count) for name, count in pairs if count.isascii() and count.isdecimal()}
        _require(len(found) == len(pairs) and found.keys() <= set(names) and max(found.values()) <= MAX_COUNT)
        return found

    return Kind(parse, f"one or more of {', '.join(f'{name}=COUNT' for name in names)}, separated by commas")


def host_port() -> Kind[HostPort]:
    """An address such as 127.0.0.1:50051 or [::1]:50051."""
    return Kind(split_host_port, "host:port with a port from 0 to 65535")


def path(*, must_exist: bool = False) -> Kind[Path]:
    """A path on this machine."""

    def parse(value: str) -> Path:
        _require(bool(value) and "\0" not in value)
        found = Path(value).expanduser()
        _require(found.exists() or not must_exist)
        return found

    return Kind(parse, "a path that exists" if must_exist else "a path")


def url(*schemes: str) -> Kind[str]:
    """A URL of one of the schemes."""

    def parse(value: str) -> str:
        parts = urlsplit(value)
        _require(parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/")))
        _ = parts.port
        return value

    return Kind(
        parse, "a URL beginning with " + " or ".join(f"{scheme}://" for scheme in schemes), may_hold_secret=True
    )


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
        may_hold_secret=True,
    )


def secret() -> Kind[str]:
    """A text that only a variable may hold, and that nobody is shown."""
    return Kind(text().parse, "a text that is not empty", is_secret=True)


def comma_separated(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """Several values of one kind, at least one, separated by commas."""

    def parse(value: str) -> tuple[T, ...]:
        return tuple(kind.parse(part.strip()) for part in value.split(","))

    return Kind(parse, f"one or more, separated by commas, of: {kind.rule}")


def split_host_port(value: str) -> HostPort:
    """Reads host:port, an IPv6 host in brackets. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]/]+)):(\d{1,5})", value)
    _require(match is not None)
    assert match is not None
    port = int(match[3])
    _require(port <= 65535)
    return HostPort(match[1] or match[2], port)


def join_host_port(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Whether this is an IPv6 address; it may end in a %zone."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. A name other than localhost counts as reached by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> Never:
        raise ConfigError(f"{redacted(message)} (see {self.prog} --help)")


def _parser(config_class: type[Any], prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=(config_class.__doc__ or "").strip(), allow_abbrev=False)
    for field in _fields(config_class):
        if _kind(field).is_secret:
            continue
        kind, help_text = _kind(field), field.metadata[_METADATA_KEY][1]
        explained = f"{help_text} Rule: {kind.rule}. {_default_words(field)} [{_env_name(field)}]".replace("%", "%%")
        if kind.is_flag:
            parser.add_argument(_flag_name(field), dest=field.name, action="store_const", const="true", help=explained)
            negative = _flag_name(field).replace("--", "--no-", 1)
            parser.add_argument(negative, dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            placeholder = field.name.rsplit("_", 1)[-1].upper()
            parser.add_argument(_flag_name(field), dest=field.name, metavar=placeholder, help=explained)
    return parser


def _fields(config_class: type[Any]) -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(config_class) if _METADATA_KEY in field.metadata]


def _kind(field: "dataclasses.Field[Any]") -> Kind[Any]:
    return cast(Kind[Any], field.metadata[_METADATA_KEY][0])


def _flag_name(field: "dataclasses.Field[Any]") -> str:
    return "--" + field.name.replace("_", "-")


def _env_name(field: "dataclasses.Field[Any]") -> str:
    return ENV_PREFIX + field.name.upper()


def _default_words(field: "dataclasses.Field[Any]") -> str:
    if field.default is dataclasses.MISSING:
        return "Required."
    return "" if field.default is None else f"Default: {field.default}."


def _value(field: "dataclasses.Field[Any]", flag_value: str | None, environ: Mapping[str, str]) -> Any:
    """The field's value from the first place that gives one; an empty variable counts as not given."""
    key, raw = _env_name(field) if _kind(field).is_secret else _flag_name(field), flag_value
    if raw is None:
        key, raw = _env_name(field), environ.get(_env_name(field)) or None
    if raw is None:
        if field.default is dataclasses.MISSING:
            raise ConfigError(f"{_flag_name(field)} (or {_env_name(field)}) is required: {_kind(field).rule}")
        return field.default
    try:
        return _kind(field).parse(raw)
    except ValueError:
        value = "***" if _kind(field).is_secret else shown(raw)
        raise ConfigError(f"{key} is {value} but must be {_kind(field).rule}") from None


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("the value does not keep its rule")
